"""The Lightning platform as far as its SDK can tell, on the loopback address: for tests without an account.

Each request is checked against the SDK's own description of it (its swagger models), and each answer is made of these
models. Machines are processes of this machine that run the command of their job as the platform does: a bash script
under ``set -e`` for Studios, ``sh -c`` for images.

``python -m tests.launchers.lightning`` makes the environment with the SDK; `make test` calls it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bench.environments import EnvironmentFailed, python_for

TEAMSPACE, STUDIO, ACCOUNT, USER, API_KEY = "project-1", "space-1", "account-1", "user-1", "api-key-1"
#: A type of machine that the platform never has, and how many machines of a type it gives at most.
NEVER, MOST = "B200_X_8", 4
#: The states of machines in which nothing runs any more.
OVER = ("completed", "failed", "stopped")


class RefusedError(Exception):
    """A request that the platform refuses: the HTTP status, and what it says."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Machine:
    """A job of one machine, by itself or of a multi-machine job."""

    def __init__(self, platform: Platform, job: str, name: str, spec: Any, group: str = "") -> None:
        self.platform, self.id, self.name, self.spec, self.group = platform, job, name, spec, group
        self.stopped = False
        self.log = platform.folder / f"{job}.log"
        self.started = datetime.datetime.now(datetime.UTC)
        self.process: subprocess.Popen[bytes] | None = None
        if spec.instance_name != platform.slug(NEVER):
            argv = ["sh", "-c", spec.command] if spec.image else ["bash", "-e", "-c", spec.command]
            variables = {item.name: item.value for item in spec.env}
            training = {"NODE_RANK": str(spec.rank or 0), "NUM_NODES": "2", "MASTER_ADDR": "10.0.0.1", "RANK": "0"}
            path = f"{platform.folder / 'bin'}:{os.environ['PATH']}"
            with open(self.log, "wb") as out:
                self.process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={"PATH": path, "HOME": os.environ["HOME"], **training, **variables},
                    start_new_session=True,
                )

    @property
    def state(self) -> str:
        if self.process is None:
            return "stopped" if self.stopped else "pending"
        code = self.process.poll()
        if code is None:
            return "stopping" if self.stopped else "running"
        return "stopped" if self.stopped else "completed" if code == 0 else "failed"

    def stop(self) -> None:
        if self.state not in OVER:
            self.stopped = True
            if self.process is not None:
                self.process.terminate()

    def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def answer(self) -> Any:
        return self.platform.models.V1Job(
            id=self.id,
            name=self.name,
            project_id=TEAMSPACE,
            spec=self.spec,
            state=self.state,
            message="waiting for capacity" if self.state == "pending" else "",
            multi_machine_job_id=self.group,
            private_ip_address="127.0.0.1",
            started_at=self.started,
        )


class Platform:
    """Serves the requests. ``requests`` has all of them, as (method, path, body)."""

    def __init__(self, folder: Path) -> None:
        from lightning_sdk.lightning_cloud import openapi  # pyright: ignore[reportMissingImports]
        from lightning_sdk.machine import Machine as Types  # pyright: ignore[reportMissingImports]

        self.models: Any = openapi
        self._types: Any = Types
        self._codec: Any = openapi.ApiClient()
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")  # the address of each machine
        (folder / "bin" / "hostname").chmod(0o755)
        self.machines: dict[str, Machine] = {}
        self.groups: dict[str, Any] = {}  # multi-machine jobs
        self.requests: list[tuple[str, str, Any]] = []
        self.unwell = 0  # how many requests it is going to answer with 503
        self._lock = threading.Lock()
        self._count = 0
        platform = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, answer = 200, platform.answer(self.command, self.path, dict(self.headers), body)
                except RefusedError as e:
                    status, answer = e.status, {"code": 9, "message": str(e), "details": []}
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="platform")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for machine in self.machines.values():
            machine.end()

    def slug(self, machine: str) -> str:
        found = self._types.from_str(machine)
        return found.instance_type or found.slug

    # -- requests -------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        """The answer to a request, as plain data."""
        url = urlsplit(path)
        query = parse_qs(url.query)
        with self._lock:
            self.requests.append((method, url.path, json.loads(body) if body else None))
            if self.unwell:
                self.unwell -= 1
                raise RefusedError(503, "the platform is not well")
            basic = base64.b64encode(f"{USER}:{API_KEY}".encode()).decode()
            if headers.get("Authorization") != f"Basic {basic}":
                raise RefusedError(401, "who are you?")
            for pattern, verb, serve in self._routes():
                match = re.fullmatch(pattern, url.path)
                if match and verb == method:
                    found = serve(*match.groups(), body=body, query=query)
                    return self._codec.sanitize_for_serialization(found)
        raise RefusedError(501, f"no test has needed {method} {url.path}")

    def _routes(self) -> list[tuple[str, str, Any]]:
        project = f"/v1/projects/{TEAMSPACE}"
        return [
            ("/v1/memberships", "GET", self._memberships),
            (project, "GET", self._project),
            (f"{project}/cloudspaces", "GET", self._studios),
            (f"{project}/jobs", "POST", self._create),
            (f"{project}/jobs", "GET", self._list),
            (f"{project}/jobs/([^/]+)", "GET", self._job),
            (f"{project}/jobs/([^/]+)", "PUT", self._update),
            (f"{project}/multi-machine-jobs", "POST", self._create_group),
            (f"{project}/multi-machine-jobs", "GET", self._list_groups),
            (f"{project}/multi-machine-jobs/([^/]+)", "GET", self._group),
            (f"{project}/multi-machine-jobs/([^/]+)", "PUT", self._update_group),
            (f"{project}/page-logs", "GET", self._logs),
        ]

    def _checked(self, body: bytes, model: str) -> Any:
        """A body as the model that the SDK has for it; every field must be one of that model, and of its type."""
        data = json.loads(body)
        self._check(data, model)

        class Response:
            data = body

        return self._codec.deserialize(Response, model)

    def _check(self, data: Any, kind: str) -> None:
        native = {"str": str, "int": int, "bool": bool, "float": (int, float)}
        if kind in native:
            assert isinstance(data, native[kind]), f"{data!r} is no {kind}"
        elif kind.startswith("list["):
            for item in data:
                self._check(item, kind[5:-1])
        elif types := getattr(self.models, kind).swagger_types:
            names = {wire: types[name] for name, wire in getattr(self.models, kind).attribute_map.items()}
            for name, value in data.items():
                assert name in names, f"{kind} has no field {name}"
                self._check(value, names[name])

    def _memberships(self, body: bytes, query: dict[str, list[str]]) -> Any:
        one = self.models.V1Membership(project_id=TEAMSPACE, name="vision", display_name="Vision", owner_id="org-1")
        return self.models.V1ListMembershipsResponse(memberships=[one])

    def _project(self, body: bytes, query: dict[str, list[str]]) -> Any:
        settings = self.models.V1ProjectSettings(preferred_cluster=ACCOUNT)
        return self.models.V1Project(id=TEAMSPACE, name="vision", project_settings=settings)

    def _studios(self, body: bytes, query: dict[str, list[str]]) -> Any:
        one = self.models.V1CloudSpace(id=STUDIO, name="lab", display_name="Lab", cluster_id=ACCOUNT)
        return self.models.V1ListCloudSpacesResponse(cloudspaces=[one])

    def _new_id(self) -> str:
        self._count += 1
        return f"job-{self._count}"

    def _accept(self, name: str, spec: Any, machines: int) -> None:
        if machines > MOST:
            raise RefusedError(400, f"quota exceeded: at most {MOST} machines of type {spec.instance_name}")
        if bool(spec.image) == bool(spec.cloudspace_id) or not spec.command:
            raise RefusedError(400, "a job needs a Studio or an image, and a command")
        names = {one.name for one in self.machines.values()} | {one.name for one in self.groups.values()}
        if name in names or spec.cluster_id != ACCOUNT:
            raise RefusedError(400, f"the name {name} is taken, or there is no account {spec.cluster_id}")

    def _create(self, body: bytes, query: dict[str, list[str]]) -> Any:
        asked = self._checked(body, "JobsServiceCreateJobBody")
        self._accept(asked.name, asked.spec, 1)
        machine = Machine(self, self._new_id(), asked.name, asked.spec)
        self.machines[machine.id] = machine
        return machine.answer()

    def _create_group(self, body: bytes, query: dict[str, list[str]]) -> Any:
        asked = self._checked(body, "JobsServiceCreateMultiMachineJobBody")
        self._accept(asked.name, asked.spec, asked.machines)
        group = self.models.V1MultiMachineJob(
            id=self._new_id(), name=asked.name, machines=asked.machines, spec=asked.spec, project_id=TEAMSPACE
        )
        self.groups[group.id] = group
        for rank in range(asked.machines):
            spec = self._checked(json.dumps(self._codec.sanitize_for_serialization(asked.spec)).encode(), "V1JobSpec")
            spec.rank = rank
            machine = Machine(self, self._new_id(), f"{asked.name}-{rank}", spec, group.id)
            self.machines[machine.id] = machine
        return self._group(group.id, b"", {})

    def _of_group(self, group: str) -> list[Machine]:
        return [one for one in self.machines.values() if one.group == group]

    def _group(self, group: str, body: bytes, query: dict[str, list[str]]) -> Any:
        if group not in self.groups:
            raise RefusedError(404, "not found")
        found, states = self.groups[group], {one.state for one in self._of_group(group)}
        state = "RUNNING" if states & {"running", "stopping"} else "STOPPED" if "stopped" in states else "PENDING"
        found.state = f"MultiMachineJob_STATE_{state}"
        return found

    def _list(self, body: bytes, query: dict[str, list[str]]) -> Any:
        if "standalone" in query:
            assert query["userId"] == [USER]
        jobs = [one.answer() for one in self._of_group(query.get("multiMachineJobId", [""])[0])]
        # Two pages, the last machines first.
        half = len(jobs) // 2
        if query.get("pageToken"):
            return self.models.V1ListJobsResponse(jobs=jobs[:half])
        return self.models.V1ListJobsResponse(jobs=jobs[half:], next_page_token="more" if half else "")

    def _list_groups(self, body: bytes, query: dict[str, list[str]]) -> Any:
        assert query["userId"] == [USER]
        found = [self._group(group, body, query) for group in self.groups]
        return self.models.V1ListMultiMachineJobsResponse(multi_machine_jobs=found)

    def _machine(self, job: str) -> Machine:
        if job not in self.machines:
            raise RefusedError(404, "not found")
        return self.machines[job]

    def _job(self, job: str, body: bytes, query: dict[str, list[str]]) -> Any:
        return self._machine(job).answer()

    def _update(self, job: str, body: bytes, query: dict[str, list[str]]) -> Any:
        assert self._checked(body, "JobsServiceUpdateJobBody").state == "stop"
        machine = self._machine(job)
        machine.stop()
        return machine.answer()

    def _update_group(self, group: str, body: bytes, query: dict[str, list[str]]) -> Any:
        asked = self._checked(body, "JobsServiceUpdateMultiMachineJobBody")
        assert asked.desired_state == self.models.V1MultiMachineJobState.STOP
        self.groups[group].desired_state = asked.desired_state
        for machine in self._of_group(group):
            machine.stop()
        return self._group(group, b"", {})

    def _logs(self, body: bytes, query: dict[str, list[str]]) -> Any:
        jobs = query["jobIds"]
        entries = [
            self.models.V1JobLogEntry(line=str(at), message=line, resource_id=job)
            for job in jobs
            if self._machine(job).log.exists()
            for at, line in enumerate(self._machine(job).log.read_text(errors="replace").splitlines())
            if query.get("query", [""])[0] in line
        ]
        begin = int(query.get("pageToken", ["0"])[0])
        more = str(begin + 2) if begin + 2 < len(entries) else ""
        return self.models.V1GetLogsResponse(entries=entries[begin : begin + 2], next_page_token=more)


def packages() -> Path:
    """The folder with the SDK's packages.

    Raises EnvironmentFailed when they cannot be installed here.
    """
    (site,) = python_for("lightning").parent.parent.glob("lib/python3*/site-packages")
    return site


@pytest.fixture(scope="module")
def sdk() -> Iterator[None]:
    """The SDK, behind the packages of this environment."""
    try:
        folder = str(packages())
    except EnvironmentFailed as e:
        pytest.skip(str(e))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, folder])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder))))
        yield


@pytest.fixture
def platform(sdk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """The platform; this program is logged in there, and runs in a Studio."""
    folder = tmp_path / "platform"
    folder.mkdir()
    found = Platform(folder)
    from lightning_sdk.lightning_cloud import env  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(env, "LIGHTNING_CLOUD_URL", found.url)  # it is read once, when the SDK is imported
    monkeypatch.setenv("LIGHTNING_CLOUD_URL", found.url)
    monkeypatch.setenv("LIGHTNING_USER_ID", USER)
    monkeypatch.setenv("LIGHTNING_API_KEY", API_KEY)
    monkeypatch.setenv("LIGHTNING_CLOUD_SPACE_ID", STUDIO)
    monkeypatch.setenv("LIGHTNING_CREDENTIAL_PATH", str(folder / "credentials.json"))
    yield found
    found.close()


if __name__ == "__main__":
    try:
        packages()
    except EnvironmentFailed as error:
        sys.exit(str(error))
