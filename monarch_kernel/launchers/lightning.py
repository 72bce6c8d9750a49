"""Get hosts from the Lightning platform."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from monarch_kernel.launchers.base import (
    KEY_VARIABLE,
    MARKER,
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    KeyWay,
    Launcher,
    LauncherOption,
    LaunchError,
    LaunchRequest,
    Resources,
    SubmissionRefusedError,
    Ticket,
    WorkerAnnouncement,
    find_announcement,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.scripts import Script, one_word, script

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")

# Send requests to the Lightning platform, with the client that its SDK generates from the platform's API description.
#
# The classes ``lightning_sdk.Job``, ``Studio`` and ``Teamspace`` are not used. When one of their calls fails, they
# send all of its arguments to a history of commands, including the key of a job and the environment of its user. They
# also print, and repeat a rejected request for half a minute.

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
            self.models: ModuleType = importlib.import_module(f"{_SDK}.lightning_cloud.openapi")
            rest = importlib.import_module(f"{_SDK}.lightning_cloud.rest_client")
            login = importlib.import_module(f"{_SDK}.lightning_cloud.login")
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

    def _jobs(self, teamspace: str, **which: object) -> Iterator[object]:
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

    def _found(self, question: Callable[[], T]) -> T | None:
        try:
            return self._ask(question)
        except self._failed as e:
            if e.status == 404:
                return None
            raise ConnectionError(f"Lightning did not answer: {_said(e)}") from e

    def _ask(self, question: Callable[[], T], again: bool = True) -> T:
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


# Get hosts from the Lightning platform: jobs whose machines run a worker each.

#: How the machines of a job are grouped.
WAYS = ("group", "single")
#: The kinds of address by which workers are reached.
ADDRESSES = ("own", "private", "public")
#: Variables that the platform sets for distributed training. With them, programs would use a rank as a whole machine.
_OF_TRAINING = ("NODE_RANK", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "RANK")
#: A placeholder in the command line of a worker, for the address that is known only on its machine.
_ADDRESS = "tcp://ADDRESS:0"
#: The states of a machine that is not assigned yet, that is being created, and in which the command runs.
_QUEUED, _MADE, _RUNS = ("", "pending"), ("creating",), ("running",)
_LIVING = (*_QUEUED, *_MADE, *_RUNS)
#: The states after the command has ended by itself.
_ENDED = ("complete", "completed", "fail", "failed")
_CODE = re.compile(r"monarch_kernel: the worker has ended \(exit code (\d+)\)")
#: The pattern of the name of a platform's job, which ends with the id of our job and the number of its first host.
_NAME = re.compile(r".*-([0-9a-f]{16})-(\d+)")
#: How long to wait for machines to stop. The platform has confirmed the request before (seconds).
_STOP_TIME = 5.0
_PAUSE = 0.2


class _Part(msgspec.Struct):
    """A job of the platform.

    Attributes:
        id: its id on the platform.
        first: the number of its first host.
        count: the number of its hosts.
        group: whether it is a multi-machine job.
    """

    id: str
    first: int
    count: int
    group: bool

    @property
    def hosts(self) -> range:
        return range(self.first, self.first + self.count)


class _Data(msgspec.Struct):
    """The data in tickets of this launcher."""

    teamspace: str
    parts: list[_Part]


class LightningLauncher(Launcher):
    """Requests machines from the Lightning platform, and runs a worker on each as the command of a job.

    Args:
        machine: the type of machine, by its name in the SDK such as "L4_X_4", or its slug.
        studio: run in a copy of this Studio's environment, by its name or id; "": the Studio that this program runs in,
            if there is one and no image is named.
        image: run in this container image instead.
        teamspace: the teamspace, by its name or id; "": that of this Studio, or the only one of the user.
        account: the cloud account; "": that of the Studio, or the preferred one of the teamspace.
        interruptible: whether to request cheaper machines, which the platform may take away.
        way: "group": hosts that are requested together are one multi-machine job, which the platform places together.
            "single": each host is a separate job.
        address: the address by which workers are reached: their "own" first one, at which they listen, or the "private"
            or "public" one that the platform knows for the machine.
        port: the port at which workers listen; 0: any free port.
        image_secret: the name of the platform's secret with the login for a private image.
    """

    name = "lightning"
    OPTIONS = (
        LauncherOption(name="machine", metavar="TYPE", help='the type of machine, such as "L4_X_4"', plain=True),
        LauncherOption(name="teamspace", metavar="NAME", help="where; by default that of this Studio", plain=True),
        LauncherOption(name="account", metavar="NAME", help="the cloud account", plain=True),
        LauncherOption(name="interruptible", type=bool, help="cheaper machines that may be taken away", plain=True),
        LauncherOption(name="way", choices=WAYS, help="one multi-machine job (default), or jobs", plain=True),
        LauncherOption(name="address", choices=ADDRESSES, help="by which workers are reached", plain=True),
        LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
        LauncherOption(name="studio", metavar="NAME", help="run in a copy of this Studio's environment"),
        LauncherOption(name="image", metavar="IMAGE", help="run in this container image"),
        LauncherOption(name="image_secret", metavar="NAME", help="the secret with the login for the image"),
    )

    def __init__(
        self,
        machine: str = "CPU",
        *,
        studio: str = "",
        image: str = "",
        teamspace: str = "",
        account: str = "",
        interruptible: bool = False,
        way: str = "group",
        address: str = "own",
        port: int = 0,
        image_secret: str = "",
    ) -> None:
        if way not in WAYS:
            raise ValueError(f"there is no way {way!r} to ask Lightning: choose one of {', '.join(WAYS)}")
        if address not in ADDRESSES:
            raise ValueError(f"machines have no {address!r} address: choose one of {', '.join(ADDRESSES)}")
        if studio and image:
            raise ValueError("a job runs in a Studio's environment or in an image: name one of them")
        self._machine = machine
        self._studio = studio
        self._image = image
        self._teamspace = teamspace
        self._account = account
        self._interruptible = interruptible
        self._way = way
        self._address = address
        self._port = port
        self._image_secret = image_secret
        self._client: LightningCloud | None = None
        self._said: dict[str, WorkerAnnouncement] = {}  # by machine id; an announcement stays valid

    @property
    def _cloud(self) -> LightningCloud:
        if self._client is None:
            self._client = LightningCloud(self.PATIENCE)
        return self._client

    # -- asking for hosts -----------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        data = _Data(self._cloud.teamspace(self._teamspace), [])
        self._new(data, 0, request)
        return self._ticket(request.command.job, request.hosts, data)

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``. A job has no free slots, so this creates new jobs."""
        data = ticket.read(_Data)
        self._new(data, ticket.hosts, LaunchRequest(count, request.command, request.resources, request.name))
        return self._ticket(ticket.job, ticket.hosts + count, data)

    def _new(self, data: _Data, first: int, request: LaunchRequest) -> None:
        """Submit jobs for hosts from this number on. If one is rejected, all are removed."""
        together = self._way == "group" and request.hosts > 1
        spec = self._environment(data.teamspace, request)
        new: list[_Part] = []
        try:
            for at in range(1 if together else request.hosts):
                number = first + at
                spec["command"] = _script(number, request, self._port)
                name = f"{request.name}-{request.command.job}-{number}"
                count = request.hosts if together else 1
                machines = count if together else None
                made = self._cloud.submit(data.teamspace, name, self._cloud.models.V1JobSpec(**spec), machines)
                new.append(_Part(made, number, count, together))
        except BaseException:
            for part in new:
                self._stop(data.teamspace, part)
            raise
        data.parts += new

    def _environment(self, teamspace: str, request: LaunchRequest) -> dict[str, object]:
        """Return the environment of a job of this request, as fields of the SDK's ``V1JobSpec``."""
        wishes = request.resources
        machine, gpus = self._cloud.machine(self._machine)
        if gpus is not None and wishes.gpus > gpus:
            raise InfeasibleError(
                f"a machine {self._machine} of Lightning has {gpus} GPUs, and {wishes.gpus} were asked for on each "
                "host: name a larger type (machine=), or ask for fewer"
            )
        if wishes.cpus or wishes.memory or wishes.options:
            raise InfeasibleError(
                "Lightning has types of machines, and takes no numbers of processors, no memory and no further wishes: "
                f"name a type that has them (machine=; now {self._machine})"
            )
        studio, account = "", self._account
        if not self._image:
            name = self._studio or os.environ.get(STUDIO, "")
            if not name:
                raise SubmissionRefusedError(
                    self.name, "no environment was named", "name a Studio (studio=), or image="
                )
            studio, of_studio = self._cloud.studio(teamspace, name)
            account = account or of_studio
        assert request.command.key is not None
        variables = {**request.command.env, **request.command.key_environment()}
        return {
            "cloudspace_id": studio,
            "image": self._image,
            "image_secret_ref": self._image_secret,
            "entrypoint": "sh -c" if self._image else None,
            "cluster_id": account or self._cloud.default_account(teamspace),
            "instance_name": machine,
            "env": [self._cloud.models.V1EnvVar(name=name, value=value) for name, value in variables.items()],
            # Jobs with the same id share a copy of the Studio.
            "run_id": request.command.job if studio else "",
            "spot": self._interruptible,
            "max_run_attempts": 1,  # a restarted worker would be another host
        }

    # -- asking where they are ------------------------------------------------------------------------

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        machines: dict[int, Any] = {}
        waits: dict[int, str] = {}  # why the platform has not created a machine yet
        for part in data.parts:
            found = self._machines(data.teamspace, part)
            machines.update(found)
            if part.group and len(found) < part.count:
                group = self._cloud.group(data.teamspace, part.id)
                over = group is None or not _group_lives(group)
                why = (group.message if group is not None else "") or ""
                waits.update(dict.fromkeys(part.hosts, "" if over else why or "pending"))
        self._read(data.teamspace, [one.id for one in machines.values() if one.state in (*_RUNS, *_ENDED)])
        return JobStatus(
            tuple(
                self._of_machine(data, number, machines[number])
                if number in machines
                else _without_machine(number, waits.get(number, ""))
                for number in range(ticket.hosts)
            )
        )

    def _machines(self, teamspace: str, part: _Part) -> dict[int, Any]:
        """Return the jobs of the machines by the numbers of their hosts, except machines that do not exist yet."""
        if not part.group:
            job = self._cloud.job(teamspace, part.id)
            return {part.first: job} if job is not None else {}
        return {part.first + (job.spec.rank or 0): job for job in self._cloud.machines(teamspace, part.id)}

    def _machine_of(self, data: _Data, host: int) -> Any:
        """Return the job of the machine of a host; None if there is none."""
        part = next((part for part in data.parts if host in part.hosts), None)
        return None if part is None else self._machines(data.teamspace, part).get(host)

    def _read(self, teamspace: str, jobs: list[str]) -> None:
        """Find the announcements of machines in their logs."""
        unknown = [job for job in jobs if job not in self._said]
        if unknown:
            for line in self._cloud.log(teamspace, unknown, query="monarch_kernel"):
                said = find_announcement(line.text.strip().encode() + b"\n")
                if said is not None:
                    self._said.setdefault(line.job, said)

    def _of_machine(self, data: _Data, number: int, job: Any) -> HostStatus:
        since = job.started_at.timestamp() if job.started_at is not None else 0.0
        state = (job.state or "").lower()
        words = job.message or job.server_error or ""
        if state in _QUEUED:
            return HostStatus(host=number, state=HostPhase.QUEUED, name=job.name, reason=words or "pending")
        if state in _MADE:
            return HostStatus(host=number, state=HostPhase.STARTING, name=job.name, reason=words or state)
        said = self._said.get(job.id)
        if state in _RUNS:
            if said is not None:
                return HostStatus.announced(number, said, name=job.name, since=since)
            why = words or "its worker is starting"
            return HostStatus(host=number, state=HostPhase.STARTING, name=job.name, reason=why, since=since)
        if state not in _ENDED or (said is not None and not said.error):
            why = words or ("its worker has ended" if state in _ENDED else f"Lightning: {state}")
            return HostStatus(host=number, state=HostPhase.GONE, name=job.name, reason=why)
        code, last = self._end_of(data.teamspace, job.id)
        if said is not None:
            return HostStatus.announced(number, said, name=job.name, exit_code=code)
        reason = words or last or "it ended before it listened, and wrote no output"
        return HostStatus(host=number, state=HostPhase.GONE, name=job.name, reason=reason, exit_code=code, failed=True)

    def _end_of(self, teamspace: str, job: str) -> tuple[int | None, str]:
        """Return the exit code of a worker, and the last line that it wrote."""
        code, last = None, ""
        for line in self._cloud.log(teamspace, [job]):
            found = _CODE.search(line.text)
            if found is not None:
                code = int(found[1])
            elif line.text.strip():
                last = line.text.strip()
        return code, last

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``."""
        data = ticket.read(_Data)
        job = self._machine_of(data, host)
        if job is None:
            return ""
        return "\n".join([line.text.rstrip("\n") for line in self._cloud.log(data.teamspace, [job.id])][-lines:])

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. A multi-machine job is stopped with its last host; before, single machines are."""
        data = ticket.read(_Data)
        ending = set(range(ticket.hosts) if hosts is None else hosts)
        status = self.poll(ticket)
        gone = {host.host for host in status.hosts if host.state is HostPhase.GONE}
        for part in data.parts:
            if not ending.intersection(part.hosts) or gone.issuperset(part.hosts):
                continue
            if (ending | gone).issuperset(part.hosts):
                self._stop(data.teamspace, part)
                continue
            machines = self._machines(data.teamspace, part)
            for number in ending.intersection(machines) - gone:
                self._cloud.stop(data.teamspace, machines[number].id)
        limit = time.monotonic() + _STOP_TIME
        while not _are_gone(self.poll(ticket), ending) and time.monotonic() < limit:
            time.sleep(_PAUSE)

    def _stop(self, teamspace: str, part: _Part) -> None:
        (self._cloud.stop_group if part.group else self._cloud.stop)(teamspace, part.id)

    # -- reaching -------------------------------------------------------------------------------------

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """See ``Launcher``."""
        if self._address == "own":
            return host.url
        data = ticket.read(_Data)
        job = self._machine_of(data, host.host)
        address = (job.private_ip_address if self._address == "private" else job.public_ip_address) if job else ""
        if not address:
            raise ConnectionError(
                f"Lightning names no {self._address} address of {host.name}: choose another one with address="
            )
        return f"tcp://{f'[{address}]' if ':' in address else address}:{urlsplit(host.url).port}"

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """See ``Launcher``. Finds jobs in all teamspaces of the user, by their names and commands."""
        if importlib.util.find_spec("lightning_sdk") is None:
            return []
        launcher = cls()
        try:
            cloud = launcher._cloud
        except SubmissionRefusedError:  # the user is not logged in
            return []
        found: list[tuple[Launcher, Ticket]] = []
        for teamspace in cloud.teamspaces():
            jobs: dict[str, list[_Part]] = {}
            living = [(one, False) for one in cloud.jobs(teamspace) if (one.state or "").lower() in _LIVING]
            living += [(one, True) for one in cloud.groups(teamspace) if _group_lives(one)]
            for one, group in living:
                named = _NAME.fullmatch(one.name or "")
                if named is not None and _mark(named[1]) in (one.spec.command or ""):
                    part = _Part(one.id, int(named[2]), one.machines if group else 1, group)
                    jobs.setdefault(named[1], []).append(part)
            for job, parts in jobs.items():
                hosts = max(part.hosts.stop for part in parts)
                found.append((launcher, launcher._ticket(job, hosts, _Data(teamspace, parts))))
        return found


def _without_machine(number: int, waits: str) -> HostStatus:
    if waits:
        return HostStatus(host=number, state=HostPhase.QUEUED, reason=waits)
    return HostStatus(host=number, state=HostPhase.GONE, reason="Lightning has no such job any more")


def _are_gone(status: JobStatus, hosts: Iterable[int]) -> bool:
    return all(status.hosts[number].state is HostPhase.GONE for number in hosts)


def _script(first: int, request: LaunchRequest, port: int) -> Script:
    """Build the command of a job, for sh and bash, with and without ``set -ex``. It contains no secret.

    The key is in the environment of the command. The worker reads it from a pipe, and no process that continues to run
    has it: a program that replaces this shell removes it.
    """
    limit = request.resources.walltime
    argv = request.command.argv(_ADDRESS, key=KeyWay.STDIN, announce=("-",), walltime=limit)
    address = script('"tcp://$a:"@{port}', port=port)
    inner = script(
        """a=$(hostname -I | cut -d ' ' -f 1)
[ -n "$a" ] || { echo "this machine has no address (hostname -I)" >&2; exit 2; }
case "$a" in *:*) a="[$a]";; esac
export @{mark}$((@{first} + ${NODE_RANK:-0}))
unset @{of_training}
@{until} @{worker} <&3 3<&- &
pid=$!
exec 3<&-
trap 'kill -TERM $pid 2>/dev/null' TERM INT HUP
wait $pid; code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
echo "monarch_kernel: the worker has ended (exit code $code)"
exit $code
""",
        mark=_mark(request.command.job),
        first=first,
        of_training=_OF_TRAINING,
        until=["timeout", "-k", "10", str(math.ceil(limit))] if limit > 0 else [],
        worker=[address if word == _ADDRESS else word for word in argv],
    )
    return script(
        """exec 3<<END
$@{key}
{}
END
unset @{key}
exec sh -c @{inner}
""",
        key=KEY_VARIABLE,
        inner=one_word(inner),
    )


def _mark(job: str) -> str:
    """Return the beginning of a worker's mark in the environment that its command sets."""
    return f"{MARKER}={job}."


def _group_lives(group: Any) -> bool:
    """Return whether a multi-machine job runs or is going to, and nobody has asked the platform to end it."""
    state, asked = (str(name).rpartition("_")[2] for name in (group.state, group.desired_state))
    return state in ("PENDING", "RUNNING", "UNSPECIFIED") and asked not in ("STOP", "STOPPED", "DELETE", "DELETED")


def inside_studio(studio: str) -> bool:
    """Return whether this program runs in the Studio of this name or id; "": in any Studio."""
    here = os.environ.get(STUDIO, "")
    return bool(here) and studio in ("", here, os.environ.get("LIGHTNING_CLOUD_SPACE_NAME", ""))


class LightningJob(EngineJob):
    """Hosts from the Lightning platform: machines of a job, with a worker on each (``docs/lightning.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name.
        machine: the type of machine, by its name in ``lightning_sdk.Machine`` ("L4_X_4"), or its slug.
        studio: run in a copy of this Studio's environment, by its name or id; by default the Studio that this program
            runs in, if there is one.
        image: run in this container image instead; it needs monarch_kernel, ``sh`` and ``hostname``.
        teamspace: the teamspace, by its name or id; by default that of this Studio, or the only one of the user.
        account: the cloud account; by default that of the Studio, or the preferred one of the teamspace.
        interruptible: whether to request cheaper machines, which the platform may take away.
        time_limit: the time after which the workers end (seconds); 0: never.
        way: "group" or "single"; see ``LightningLauncher``.
        address: "own", "private" or "public"; see ``LightningLauncher``.
        port: the port at which workers listen; 0: any free port.
        image_secret: the name of the platform's secret with the login for a private image.
        python: the interpreter on the machines; by default the path of this process's interpreter if they use the
            Studio that this program runs in, else "python".
        options: those of ``EngineJob``. The platform shows ``env`` to all users who may read the job.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        machine: str = "CPU",
        *,
        studio: str = "",
        image: str = "",
        teamspace: str = "",
        account: str = "",
        interruptible: bool = False,
        time_limit: float = 0.0,
        way: str = "group",
        address: str = "own",
        port: int = 0,
        image_secret: str = "",
        python: str = "",
        **options: Any,
    ) -> None:
        launcher = LightningLauncher(
            machine,
            studio=studio,
            image=image,
            teamspace=teamspace,
            account=account,
            interruptible=interruptible,
            way=way,
            address=address,
            port=port,
            image_secret=image_secret,
        )
        if not python and (image or not inside_studio(studio)):
            python = "python"
        options = {"resources": Resources(walltime=time_limit), **options}
        super().__init__(launcher, meshes, python=python, **options)
