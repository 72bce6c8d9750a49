"""SkyPilot's API server as far as its client can tell, on the loopback address: for tests without a cloud.

It runs in the interpreter of SkyPilot. Each request is checked against SkyPilot's own model of it, with no field
beside, and each answer is encoded by SkyPilot's own code. The nodes of clusters are this machine: an sshd of the tests
is where they are reached, and bash runs the commands of their jobs.

    python sky_api.py FOLDER SSH_PORT SSH_KEY

prints its URL, and ends with its standard input. ``/test/asked`` has all requests, and ``/test/take/CLUSTER`` takes a
cluster away, as a cloud does with cheaper machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import sky
from sky import backends, exceptions
from sky.schemas.api import responses
from sky.server import constants
from sky.server.common import ApiServerStatus
from sky.server.requests import payloads
from sky.server.requests.requests import Request, RequestStatus
from sky.skylet.job_lib import JobStatus
from sky.utils import dag_utils, yaml_utils
from sky.utils.status_lib import ClusterStatus

#: How many nodes there are; and the zones in which a cluster is never given, and in which it is refused.
MOST, NEVER, REFUSED = 4, "never", "refused"
_HOME = pwd.getpwuid(os.getuid()).pw_dir


class Cluster:
    """A cluster, and its jobs."""

    def __init__(self, api: Api, name: str, task: Any) -> None:
        self.api, self.name, self.task = api, name, task
        self.state = ClusterStatus.INIT
        self.jobs: list[JobStatus] = []
        self.processes: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the numbers of their jobs
        self.log = os.path.join(api.folder, f"{name}.log")

    def run(self, body: Any) -> int:
        """Run a job; returns its number once it has been submitted."""
        number = len(self.jobs) + 1
        self.jobs.append(JobStatus.PENDING)
        threading.Thread(target=self._run, args=(body, number), daemon=True).start()
        return number

    def _run(self, task: Any, number: int) -> None:
        if task.setup:
            self._set(number, JobStatus.SETTING_UP)
            if self._start(task.setup, 0).wait():
                self._set(number, JobStatus.FAILED_SETUP)
                return
        with self.api.lock:
            if self.jobs[number - 1].is_terminal():
                return
            mine = [self._start(task.run, rank) for rank in range(task.num_nodes)]
            self.processes += [(number, process) for process in mine]
            self.jobs[number - 1] = JobStatus.RUNNING
        codes = [process.wait() for process in mine]
        self._set(number, JobStatus.FAILED if any(codes) else JobStatus.SUCCEEDED)

    def _set(self, number: int, state: JobStatus) -> None:
        with self.api.lock:
            if not self.jobs[number - 1].is_terminal():
                self.jobs[number - 1] = state

    def _start(self, command: str, rank: int) -> subprocess.Popen[bytes]:
        variables = {
            "HOME": _HOME,
            "PATH": os.environ["PATH"],
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(self.task.num_nodes),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * self.task.num_nodes),
        }
        with open(self.log, "ab") as out:
            return subprocess.Popen(
                ["bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=variables,
                cwd=_HOME,
                start_new_session=True,
            )

    def cancel(self, jobs: list[int] | None = None) -> None:
        """End these jobs, or all."""
        for at, state in enumerate(self.jobs):
            if (jobs is None or at + 1 in jobs) and not state.is_terminal():
                self.jobs[at] = JobStatus.CANCELLED
        for number, process in self.processes:
            if jobs is None or number in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def handle(self) -> Any:
        count = self.task.num_nodes
        return backends.CloudVmRayResourceHandle(
            cluster_name=self.name,
            cluster_name_on_cloud=self.name,
            cluster_yaml=None,
            launched_nodes=count,
            launched_resources=sky.Resources(cloud=sky.Lambda()),
            stable_internal_external_ips=[("127.0.0.1", "127.0.0.1")] * count,
            stable_ssh_ports=[self.api.ssh_port] * count,
        )

    def told(self, credentials: bool) -> Any:
        login = {"ssh_user": pwd.getpwuid(os.getuid()).pw_name, "ssh_private_key_content": self.api.ssh_key}
        up = self.state is ClusterStatus.UP
        return responses.StatusResponse(
            name=self.name,
            launched_at=int(time.time()),
            handle=self.handle() if up else None,
            status=self.state,
            autostop=1,
            to_down=True,
            cluster_hash=self.name,
            cluster_ever_up=up,
            user_hash="0",
            user_name="test",
            workspace="default",
            is_managed=False,
            init_kind=None if up else "launching",
            init_status_reason=None if up else "Provisioning: waiting for capacity",
            nodes=self.task.num_nodes,
            credentials=login if credentials and up else None,
        )


class Api:
    """Serves requests."""

    def __init__(self, folder: str, ssh_port: int, ssh_key: str) -> None:
        self.folder, self.ssh_port, self.ssh_key = folder, ssh_port, ssh_key
        self.requests: dict[str, Request] = {}
        self.clusters: dict[str, Cluster] = {}
        self.asked: list[tuple[str, Any]] = []
        self.lock = threading.RLock()

    def new(self, name: str, body: Any) -> Request:
        """A request that goes on."""
        found = Request(
            request_id=str(uuid.uuid4()),
            name=f"sky.{name}",
            entrypoint=time.time,
            request_body=body,
            status=RequestStatus.RUNNING,
            created_at=time.time(),
            user_id="0",
        )
        self.requests[found.request_id] = found
        return found

    def over(self, request: Request, value: Any = None, error: Exception | None = None) -> None:
        """End a request."""
        with self.lock:
            if request.status is not RequestStatus.RUNNING:
                return
            if error is not None:
                request.set_error(error)
                request.status = RequestStatus.FAILED
            else:
                request.set_return_value(value)
                request.status = RequestStatus.SUCCEEDED

    def body(self, path: str, data: Any, model: Any) -> Any:
        """A body as the model that SkyPilot has for it, with no field beside."""
        strange = data.keys() - model.model_fields.keys()
        assert not strange, f"{model.__name__} has no {strange}"
        self.asked.append((path, data))
        return model.model_validate(data)

    def post(self, path: str, data: Any) -> Request | None:
        """Take a request."""
        with self.lock:
            if path == "/validate":
                dag_utils.load_dag_from_yaml_str(self.body(path, data, payloads.ValidateBody).dag)
                return None
            body = self.body(path, data, _BODIES[path])
            request = self.new(path.removeprefix("/").replace("/", "."), body)
            try:
                if path == "/launch":
                    threading.Thread(target=self._launch, args=(request, body), daemon=True).start()
                else:
                    self.over(request, getattr(self, "_" + path.removeprefix("/").replace("/", "_"))(body))
            except Exception as e:  # as SkyPilot's executor does
                self.over(request, error=e)
            return request

    def _optimize(self, body: Any) -> str:
        (task,) = dag_utils.load_dag_from_yaml_str(body.dag).tasks
        if task.num_nodes > MOST:
            raise exceptions.ResourcesUnavailableError(f"No cloud has more than {MOST} nodes of this kind.")
        return str(body.dag)

    def _launch(self, request: Request, body: Any) -> None:
        (task,) = dag_utils.load_dag_from_yaml_str(body.task).tasks
        (resources,) = yaml_utils.read_yaml_all_str(body.task)[-1:]
        zone = (resources.get("resources") or {}).get("labels", {}).get("zone", "")
        with self.lock:
            cluster = self.clusters.get(body.cluster_name)
            new = cluster is None
            if cluster is None:
                cluster = self.clusters[body.cluster_name] = Cluster(self, body.cluster_name, task)
        if zone == NEVER:
            return
        if zone == REFUSED:
            del self.clusters[body.cluster_name]
            said = "Failed to acquire resources in all zones: InsufficientInstanceCapacity."
            self.over(request, error=exceptions.ResourcesUnavailableError(said))
            return
        with self.lock:
            if new and self.clusters.get(body.cluster_name) is not cluster:
                return  # it was ended meanwhile
            cluster.state = ClusterStatus.UP
            self.over(request, (cluster.run(task), cluster.handle()))

    def _status(self, body: Any) -> list[Any]:
        names = body.cluster_names
        return [
            each.told(body.include_credentials)
            for each in self.clusters.values()
            if names is None or each.name in names
        ]

    def _cluster(self, name: str) -> Cluster:
        if name not in self.clusters:
            raise exceptions.ClusterDoesNotExist(f"Cluster {name!r} does not exist.")
        return self.clusters[name]

    def _job_status(self, body: Any) -> dict[int | None, Any]:
        cluster = self._cluster(body.cluster_name)
        numbers = body.job_ids or [len(cluster.jobs)]
        return {number: cluster.jobs[number - 1] for number in numbers}

    def _down(self, body: Any) -> None:
        self._cluster(body.cluster_name).cancel()
        del self.clusters[body.cluster_name]

    def _cancel(self, body: Any) -> None:
        self._cluster(body.cluster_name).cancel(None if body.all else body.job_ids)

    def _api_cancel(self, body: Any) -> list[str]:
        for request in body.request_ids:
            if self.requests[request].status is RequestStatus.RUNNING:
                self.requests[request].status = RequestStatus.CANCELLED
        return list(body.request_ids)

    def _logs(self, body: Any) -> int:
        self._cluster(body.cluster_name)
        return 0

    _provision_logs = _logs

    def text(self, path: str, data: Any) -> str:
        """The log that a request for one has named."""
        cluster = self.clusters.get(data["cluster_name"])
        if cluster is None or path == "/provision_logs":
            return "waiting for capacity\n"
        with open(cluster.log) as file:
            return file.read()

    def close(self) -> None:
        """End all jobs."""
        for cluster in self.clusters.values():
            cluster.cancel()


_BODIES = {
    "/optimize": payloads.OptimizeBody,
    "/launch": payloads.LaunchBody,
    "/status": payloads.StatusBody,
    "/job_status": payloads.JobStatusBody,
    "/down": payloads.StopOrDownBody,
    "/cancel": payloads.CancelBody,
    "/api/cancel": payloads.RequestCancelBody,
    "/logs": payloads.ClusterJobBody,
    "/provision_logs": payloads.ProvisionLogsBody,
}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: Api

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = urlsplit(self.path).path
        request = self.api.post(path, data)
        headers = {"X-Skypilot-Request-ID": request.request_id} if request is not None else {}
        if path in ("/logs", "/provision_logs"):
            self._answer(200, self.api.text(path, data).encode(), headers, "text/plain")
        else:
            self._answer(200, b"{}", headers)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path == "/api/health":
            told = responses.APIHealthResponse(
                status=ApiServerStatus.HEALTHY,
                api_version=str(constants.API_VERSION),
                version=sky.__version__,
                version_on_disk=sky.__version__,
                commit=sky.__commit__,
            )
            self._answer(200, told.model_dump_json().encode())
        elif url.path == "/api/status":
            with self.api.lock:
                asked = [self.api.requests[one] for one in query["request_ids"] if one in self.api.requests]
                self._answer(200, json.dumps([one.encode().model_dump() for one in asked]).encode())
        elif url.path == "/api/get":
            request = self.api.requests[query["request_id"][0]]
            while request.status is RequestStatus.RUNNING:
                time.sleep(0.01)
            payload = request.encode().model_dump()
            failed = request.status is RequestStatus.FAILED
            self._answer(500 if failed else 200, json.dumps({"detail": payload} if failed else payload).encode())
        elif url.path == "/api/stream":
            self._answer(200, b"", {constants.STREAM_REQUEST_HEADER: query["request_id"][0]}, "text/plain")
        elif url.path in ("/workspaces", "/enabled_clouds"):  # for the table of `sky status`
            request = self.api.new(url.path[1:], payloads.RequestBody())
            self.api.over(request, {"default": {}} if url.path == "/workspaces" else [])
            self._answer(200, b"{}", {"X-Skypilot-Request-ID": request.request_id})
        elif url.path == "/test/asked":
            self._answer(200, json.dumps(self.api.asked).encode())
        elif url.path.startswith("/test/take/"):
            with self.api.lock:
                self.api.clusters.pop(url.path.rpartition("/")[2]).cancel()
            self._answer(200, b"{}")
        else:
            self._answer(404, json.dumps({"detail": f"no test has needed {url.path}"}).encode())

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header(constants.API_VERSION_HEADER, str(constants.API_VERSION))
        self.send_header(constants.VERSION_HEADER, sky.__version__)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until standard input ends."""
    folder, ssh_port, key = sys.argv[1:]
    with open(key) as file:
        Handler.api = Api(folder, int(ssh_port), file.read())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()
    Handler.api.close()


if __name__ == "__main__":
    main()
