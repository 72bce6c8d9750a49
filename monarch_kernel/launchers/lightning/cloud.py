"""Send requests to the Lightning platform, with the client that its SDK generates from the platform's API description.

The classes ``lightning_sdk.Job``, ``Studio`` and ``Teamspace`` are not used. When one of their calls fails, they send
all of its arguments to a history of commands, including the key of a job and the environment of its user. They also
print, and repeat a rejected request for half a minute.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from monarch_kernel.launchers.base import LaunchError, SubmissionRefusedError

_SDK = "lightning_sdk"
#: Turns off the SDK's check of a package index for a later version.
_NO_CHECK = "LIGHTNING_DISABLE_VERSION_CHECK"
#: Variables in the environment of a Studio: the ids of the teamspace and of the Studio itself.
PROJECT, STUDIO = "LIGHTNING_CLOUD_PROJECT_ID", "LIGHTNING_CLOUD_SPACE_ID"
#: HTTP statuses that do not concern the request: too many requests, and failures of the platform.
_PASSING = (429, 500, 502, 503, 504)
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 5.0
#: The number of log lines in one answer.
_PAGE = 1000


class Studio(NamedTuple):
    """A Studio: its id, and the cloud account in which it runs."""

    id: str
    account: str


class LogLine(NamedTuple):
    """A line of a log, and the id of the job that wrote it."""

    job: str
    text: str


class LightningCloud:
    """The jobs of one user.

    Args:
        patience: the time limit for one request, including repetitions (seconds).
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        check = os.environ.get(_NO_CHECK)
        os.environ[_NO_CHECK] = "1"
        try:
            self.models: Any = importlib.import_module(f"{_SDK}.lightning_cloud.openapi")
            rest: Any = importlib.import_module(f"{_SDK}.lightning_cloud.rest_client")
            login: Any = importlib.import_module(f"{_SDK}.lightning_cloud.login")
            self._machine: Any = importlib.import_module(f"{_SDK}.machine").Machine
            self._failed: Any = importlib.import_module(f"{_SDK}.lightning_cloud.openapi.rest").ApiException
            self._unreachable: Any = importlib.import_module("urllib3").exceptions.HTTPError
        except ImportError as e:
            raise LaunchError(
                f"jobs of Lightning need its SDK, which cannot be imported ({e}): "
                "pip install 'monarch_kernel[lightning]'"
            ) from e
        finally:
            if check is None:
                del os.environ[_NO_CHECK]
            else:
                os.environ[_NO_CHECK] = check
        found = login.Auth()
        # Its own ``authenticate`` would open a browser, and wait.
        if not (found.api_key or found.auth_token) and not (found.load() and (found.api_key or found.auth_token)):
            raise SubmissionRefusedError(
                "lightning", "you are not logged in", "run 'lightning login', or set LIGHTNING_API_KEY"
            )
        client = rest.create_swagger_client(with_auth=False)
        # Requests and answers contain the key of a job: neither DEBUG=1 nor a logger of level DEBUG may print them.
        client.configuration.debug = False
        logging.getLogger(f"{_SDK}.lightning_cloud.openapi.rest").setLevel(logging.INFO)
        client.default_headers["Authorization"] = found.auth_header
        self._client: Any = rest.GridRestClient(api_client=client)
        self._user: str = found.user_id or ""

    # -- names ----------------------------------------------------------------------------------------

    def teamspace(self, name: str) -> str:
        """Return the id of a teamspace by its name or id; "": that of this Studio, or the only one of the user."""
        name = name or os.environ.get(PROJECT, "") or os.environ.get("LIGHTNING_TEAMSPACE", "")
        found = self._memberships()
        fitting = [one for one in found if not name or name in (one.project_id, one.name, one.display_name)]
        if len(fitting) == 1:
            return fitting[0].project_id
        known = ", ".join(f"{one.name} ({one.project_id})" for one in found) or "none"
        what = f"{len(fitting)} teamspaces are called {name!r}" if name else "no teamspace was named"
        raise SubmissionRefusedError("lightning", what, f"name one of yours, or its id: {known}")

    def teamspaces(self) -> list[str]:
        """Return the ids of all teamspaces of the user."""
        return [one.project_id for one in self._memberships()]

    def _memberships(self) -> Any:
        answer = self._found(lambda: self._client.projects_service_list_memberships(filter_by_user_id=True))
        return (answer and answer.memberships) or ()

    def studio(self, teamspace: str, name: str) -> Studio:
        """Find a Studio by its name or id."""
        answer = self._found(lambda: self._client.cloud_space_service_list_cloud_spaces(project_id=teamspace))
        found = (answer and answer.cloudspaces) or ()
        for one in found:
            if name in (one.id, one.name, one.display_name):
                return Studio(one.id, one.cluster_id or "")
        known = ", ".join(one.name for one in found) or "none"
        raise SubmissionRefusedError("lightning", f"there is no Studio {name!r}", f"the teamspace has: {known}")

    def default_account(self, teamspace: str) -> str:
        """Return the cloud account that a teamspace prefers; "": the platform chooses."""
        answer = self._found(lambda: self._client.projects_service_get_project(teamspace))
        settings = answer and answer.project_settings
        return (settings and settings.preferred_cluster) or ""

    def machine(self, name: str) -> tuple[str, int | None]:
        """Return the name of a machine type in requests, and the number of its GPUs.

        None: the SDK does not know the number of GPUs.

        Args:
            name: its name in the SDK ("L4_X_4"), or its slug.
        """
        found = self._machine.from_str(name)
        gpus = found.accelerator_count
        if (found.family or "").upper() in ("CPU", "DATA-PREP"):
            gpus = 0  # for these, the SDK counts processors
        return found.instance_type or found.slug, gpus

    # -- jobs -----------------------------------------------------------------------------------------

    def submit(self, teamspace: str, name: str, spec: Any, machines: int | None) -> str:
        """Submit a job. Return its id on the platform.

        Args:
            machines: the number of machines of a multi-machine job; None: a job of one machine.

        Raises:
            SubmissionRefusedError: the platform rejected it; the message quotes the platform.
        """

        def ask() -> Any:
            if machines is None:
                body = self.models.JobsServiceCreateJobBody(name=name, spec=spec)
                return self._client.jobs_service_create_job(body=body, project_id=teamspace)
            body = self.models.JobsServiceCreateMultiMachineJobBody(
                name=name, spec=spec, cluster_id=spec.cluster_id, machines=machines, max_run_attempts=1
            )
            return self._client.jobs_service_create_multi_machine_job(body=body, project_id=teamspace)

        try:
            return self._ask(ask, again=False).id  # a second request could create a second job
        except self._failed as e:
            raise SubmissionRefusedError("lightning", _said(e), "check the machine type, your quota and credits") from e

    def job(self, teamspace: str, job: str) -> Any:
        """Return a job of one machine (the SDK's ``V1Job``); None if it no longer exists."""
        return self._found(lambda: self._client.jobs_service_get_job(project_id=teamspace, id=job))

    def group(self, teamspace: str, group: str) -> Any:
        """Return a multi-machine job (the SDK's ``V1MultiMachineJob``); None if it no longer exists."""
        return self._found(lambda: self._client.jobs_service_get_multi_machine_job(project_id=teamspace, id=group))

    def machines(self, teamspace: str, group: str) -> Iterator[Any]:
        """Return the jobs of the machines of a multi-machine job."""
        return self._jobs(teamspace, multi_machine_job_id=group)

    def jobs(self, teamspace: str) -> Iterator[Any]:
        """Return the user's single-machine jobs, including ended ones."""
        return self._jobs(teamspace, standalone=True, **self._own)

    def groups(self, teamspace: str) -> list[Any]:
        """Return the user's multi-machine jobs, including ended ones."""
        answer = self._found(
            lambda: self._client.jobs_service_list_multi_machine_jobs(project_id=teamspace, **self._own)
        )
        return (answer and answer.multi_machine_jobs) or []

    @property
    def _own(self) -> dict[str, str]:
        return {"user_id": self._user} if self._user else {}

    def _jobs(self, teamspace: str, **which: Any) -> Iterator[Any]:
        token = ""
        while True:
            more = {**which, "page_token": token} if token else which
            page = self._found(lambda more=more: self._client.jobs_service_list_jobs(project_id=teamspace, **more))
            if page is None:
                return
            yield from page.jobs or ()
            token = page.next_page_token or ""
            if not token:
                return

    def stop(self, teamspace: str, job: str) -> None:
        """Stop a machine. Returns when the platform has confirmed it. A machine that is gone is not an error."""
        body = self.models.JobsServiceUpdateJobBody(state="stop")
        self._found(lambda: self._client.jobs_service_update_job(body=body, project_id=teamspace, id=job))

    def stop_group(self, teamspace: str, group: str) -> None:
        """Stop all machines of a multi-machine job. Returns when the platform has confirmed the request."""
        state = self.models.V1MultiMachineJobState.STOP
        body = self.models.JobsServiceUpdateMultiMachineJobBody(desired_state=state)
        self._found(
            lambda: self._client.jobs_service_update_multi_machine_job(body=body, project_id=teamspace, id=group)
        )

    def log(self, teamspace: str, jobs: list[str], query: str = "") -> Iterator[LogLine]:
        """Yield the lines that machines have written, from the first on; with ``query``, only those with this word."""
        chosen = {"query": query} if query else {}
        token = ""
        while True:
            more = {"page_token": token} if token else {}
            page = self._found(
                lambda more=more: self._client.jobs_service_get_logs(
                    project_id=teamspace, job_ids=jobs, page_size=str(_PAGE), **chosen, **more
                )
            )
            if page is None:
                return
            for entry in page.entries or ():
                yield LogLine(entry.resource_id or (jobs[0] if len(jobs) == 1 else ""), entry.message or "")
            token = page.next_page_token or ""
            if not token:
                return

    # -- asking ---------------------------------------------------------------------------------------

    def _found(self, question: Callable[[], Any]) -> Any:
        try:
            return self._ask(question)
        except self._failed as e:
            if e.status == 404:
                return None
            raise ConnectionError(f"Lightning did not answer: {_said(e)}") from e

    def _ask(self, question: Callable[[], Any], again: bool = True) -> Any:
        """Send a request, and repeat it while the platform cannot be reached, unless ``again`` is false."""
        end = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return question()
            except self._failed as e:
                if not again or e.status not in _PASSING or time.monotonic() + pause > end:
                    raise
            except self._unreachable as e:
                if not again or time.monotonic() + pause > end:
                    raise ConnectionError(f"Lightning cannot be reached: {e}") from e
            time.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE)


def _said(error: Any) -> str:
    """Return the platform's error message."""
    try:
        body = json.loads(error.body)
        words = body.get("message") or body.get("error") or error.body
    except (TypeError, ValueError, AttributeError):
        words = error.body or error.reason
    return f"{words} (HTTP {error.status})"
