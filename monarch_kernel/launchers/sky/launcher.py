"""Get hosts from SkyPilot: nodes of clusters that it creates on clouds, Kubernetes and Slurm, with a worker each."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, ClassVar

import msgspec

from monarch_kernel import programs
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    Launcher,
    LauncherOption,
    LaunchError,
    LaunchRequest,
    Resources,
    Secret,
    SubmissionRefusedError,
    Ticket,
    WorkerCommand,
)
from monarch_kernel.launchers.engine_job import EngineJob
from monarch_kernel.launchers.scripts import Script, script
from monarch_kernel.launchers.ssh import SSHLauncher
from monarch_kernel.workers import key_text

# Run SkyPilot's SDK in a separate process (``sky.calls``), and find an interpreter that has it.

_CALLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.py")
#: Runs that text without this package's folder, or the working folder, on the path of modules.
_RUN = "import sys; sys.path[:1] = []; exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))"
#: The additional time limit for the first answer: SkyPilot is imported, and may start its server (seconds).
_FIRST_ANSWER_TIME = 90.0
_HOW = (
    "pip install 'monarch_kernel[sky]'; or install SkyPilot in a separate environment, such as by 'uv tool install "
    "skypilot', and have its command in PATH, or name it with sky="
)
#: The pattern by which the first lines of a program name its interpreter.
_NAMED = re.compile(rb"\A#!\s*(/\S*python\S*)\s*\n|'''exec' \"?(/[^\"\n]*?python[^\"\s]*)\"? ")
#: The length up to which a message is shown completely (characters).
_LONG = 600
#: The colors in SkyPilot's messages.
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class SkyError(Exception):
    """SkyPilot has raised an error.

    Args:
        kind: the name of its class.
        said: its message.
    """

    def __init__(self, kind: str, said: str) -> None:
        self.kind = kind
        self.said = _short(" ".join(_COLOR.sub("", said).split())) or kind
        super().__init__(f"{kind}: {self.said}")


def _short(words: str) -> str:
    """Shorten a message to a clause. It may contain the output of a failed command, whose end has the reason."""
    return words if len(words) <= _LONG else f"{words[: _LONG // 2]} ... {words[-_LONG // 2 :]}"


class SkyClient:
    """Sends requests to SkyPilot. The first request starts the process, which ends when idle, or with this process.

    Args:
        command: SkyPilot's command, or its interpreter; "": this interpreter if it has SkyPilot, else ``sky``.
        patience: the time limit for one request (seconds).
    """

    def __init__(self, command: str, patience: float) -> None:
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._read = b""

    def ask(self, call: str, **arguments: object) -> Any:
        """Call a method of ``calls.SkyCalls``.

        Raises:
            SkyError: SkyPilot raised an error.
            LaunchError: SkyPilot is not installed here.
            ConnectionError: SkyPilot does not answer.
        """
        with self._lock:
            limit = self._patience
            if self._process is None or self._process.poll() is not None:
                self._start()
                limit += _FIRST_ANSWER_TIME
            assert self._process is not None and self._process.stdin is not None
            self._count += 1
            line = json.dumps({"id": self._count, "call": call, "with": arguments}).encode() + b"\n"
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                told = self._answer(time.monotonic() + limit)
            except (OSError, ValueError) as e:
                self._end()  # its remaining work is not waited for
                raise ConnectionError(f"SkyPilot did not answer ({call}): {e}; try 'sky api info'") from e
        if "error" not in told:
            return told["value"]
        if told["error"] in ("ApiServerConnectionError", "ConnectionError", "ConnectTimeout", "ReadTimeout"):
            raise ConnectionError(f"SkyPilot's API server cannot be reached: {SkyError('', told['said']).said}")
        if told["error"] in ("ModuleNotFoundError", "ImportError") and call != "aliases":
            raise LaunchError(f"SkyPilot cannot be loaded: {told['said']}; {_HOW}")
        raise SkyError(told["error"], told["said"])

    def _start(self) -> None:
        self._end()
        python = interpreter(self._command)
        self._process = programs.start(
            [python, "-c", _RUN, _CALLS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
        )
        self._read = b""

    def _answer(self, end: float) -> dict[str, Any]:
        """Return the answer to the last request. Answers to abandoned requests are skipped."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._read:
                    line, _, self._read = self._read.partition(b"\n")
                    told = json.loads(line)
                    if told["id"] == self._count:
                        return told
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError("it takes too long")
                found = os.read(self._process.stdout.fileno(), 1 << 16)
                if not found:
                    raise ConnectionError(f"its process has ended (exit code {self._process.wait()})")
                self._read += found

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unwritten data is lost with the process
                    stream.close()


_clients: dict[object, SkyClient] = {}
_clients_lock = threading.Lock()


def client(command: str, patience: float) -> SkyClient:
    """Return the shared client of this process, because importing SkyPilot takes seconds."""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("SKYPILOT_"))
    with _clients_lock:
        key = command, patience, os.environ.get("HOME"), tuple(settings)
        return _clients.setdefault(key, SkyClient(command, patience))


@atexit.register
def close_clients() -> None:
    """End the processes of all clients. The next request starts a new one."""
    with _clients_lock:
        for each in _clients.values():
            each.close()
        _clients.clear()


def interpreter(command: str) -> str:
    """Find the interpreter that has SkyPilot.

    Args:
        command: see ``SkyClient``.

    Raises:
        LaunchError: there is no such interpreter.
    """
    if not command and _is_installed():
        return sys.executable
    path = shutil.which(os.path.expanduser(command or "sky"))
    if path is None:
        what = f"there is no command {command}" if command else "SkyPilot is not installed here"
        raise LaunchError(f"{what}: {_HOW}")
    if os.path.basename(path).startswith("python"):
        return path
    with open(path, "rb") as file:
        named = _NAMED.search(file.read(1024))
    if named is None:
        raise LaunchError(f"{path} does not say which Python runs it: name the interpreter that has SkyPilot with sky=")
    return os.fsdecode(named[1] or named[2])


def _is_installed() -> bool:
    for name in ("skypilot", "skypilot-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return bool(metadata.version(name))
    return False


# Build the task that SkyPilot runs. Its command keeps the nodes while workers of the job run on them.
#
# The workers are not started by this command but by ssh, so that SkyPilot stores no copy of their key. For them, the
# command records the environment that SkyPilot sets for its jobs. While it runs, SkyPilot considers the cluster in
# use. Once no worker is alive, it ends, and so does the cluster, whether or not the requesting program still runs.

#: Variables of SkyPilot's jobs that workers get: paths of programs, devices, and the placement of nodes.
_VARIABLES = script(
    "PATH LD_LIBRARY_PATH CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV CUDA_VISIBLE_DEVICES SKYPILOT_TASK_ID "
    "SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_CLUSTER_INFO"
)
#: Sets ``d`` to the folder for that. On Slurm, SkyPilot's jobs have a separate home, while ssh uses the account's.
_FOLDER = script(
    'h=$(eval echo "~$(id -un 2>/dev/null)"); [ -d "$h" ] || h=$HOME; d="$h/.local/state/monarch_kernel/workers";'
)
#: How long a node is kept without a worker, so that a lost one can be replaced, and the interval of checks (seconds).
_GRACE, _STEP = 60, 2
#: The time limit for the first worker if workers never end as idle (seconds).
_FIRST_TIME = 600
#: How long a start waits for that environment (tenths of a second).
_WAIT = 100


def task_config(
    job: str,
    name: str,
    nodes: int,
    resources: Mapping[str, object],
    *,
    setup: str,
    workdir: str,
    file_mounts: Mapping[str, object],
    idle: float,
) -> dict[str, object]:
    """Build a task with the fields of SkyPilot's YAML.

    Args:
        job: the id of the job.
        name: the name of the task.
        nodes: the number of nodes.
        resources: the resources of each node, by SkyPilot's fields.
        setup: commands that run once on each node.
        workdir: a local folder that is copied to nodes, and in which the commands run.
        file_mounts: further files for nodes.
        idle: the time without a controller after which workers end (seconds); 0: never.
    """
    found: dict[str, object] = {"name": name, "num_nodes": nodes, "resources": dict(resources), "run": _hold(job, idle)}
    for field, value in (("setup", setup), ("workdir", workdir), ("file_mounts", dict(file_mounts))):
        if value:
            found[field] = value
    return found


def _hold(job: str, idle: float) -> Script:
    """Build the command of the task, for bash. It contains no secret."""
    return script(
        r"""@{folder} mkdir -p "$d"; chmod 700 "$d"
f="$d"/@{job}."$(uname -n)".env
umask 077
q="'\\''"
for n in @{variables}; do
  if [ -n "${!n+set}" ]; then printf "export %s='%s'\n" "$n" "${!n//\'/$q}"; fi
done > "$f.new"
mv "$f.new" "$f"
trap 'rm -f "$f"' EXIT
trap 'exit 0' TERM INT HUP
left=@{first}
while [ "$left" -gt 0 ]; do
  if grep -szq @{mark} /proc/[0-9]*/environ; then left=@{grace}; else left=$((left - @{step})); fi
  sleep @{step} & wait $!
done
""",
        folder=_FOLDER,
        job=job,
        variables=_VARIABLES,
        first=int(idle) or _FIRST_TIME,
        mark=rf"^{MARKER}={job}\.",
        grace=_GRACE,
        step=_STEP,
    )


def preparation(job: str) -> Script:
    """Build the preparation that sh runs on a node before it starts a worker of the job.

    It reads the environment that the command has recorded, and sets ``a`` to SkyPilot's address of the node.
    """
    return script(
        '@{folder} f="$d"/@{job}."$(uname -n)".env; '
        'i=0; while [ ! -e "$f" ] && [ $i -lt @{wait} ]; do i=$((i+1)); sleep 0.1; done; [ ! -e "$f" ] || . "$f"; '
        'a=$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | sed -n "$((${SKYPILOT_NODE_RANK:-0} + 1))p"); '
        '[ -n "$a" ] || a=$(hostname -I | cut -d " " -f 1); '
        '[ -n "$a" ] || { echo "this node has no address (hostname -I)" >&2; exit 2; }; '
        'case "$a" in *:*) a="[$a]";; esac;',
        folder=_FOLDER,
        job=job,
        wait=_WAIT,
    )


def resource_fields(given: Mapping[str, object], wishes: Resources) -> dict[str, object]:
    """Return the requirements of each node, by the fields of SkyPilot's YAML.

    Args:
        given: fields from the arguments of the launcher.
        wishes: the job's requirements; its options are further fields.

    Raises:
        InfeasibleError: SkyPilot does not support these requirements.
    """
    fields = {**given, **wishes.options}
    kind = fields.get("accelerators")
    if wishes.gpus and not kind:
        raise InfeasibleError(
            f"SkyPilot takes no number of devices without their kind: write accelerators=NAME:{wishes.gpus}, such as "
            f"H100:{wishes.gpus} ('sky gpus list' shows the kinds)"
        )
    if wishes.gpus and isinstance(kind, str):
        name, _, count = kind.partition(":")
        if count and float(count) != wishes.gpus:
            raise InfeasibleError(f"accelerators={kind} and gpus={wishes.gpus} differ: leave out one of the numbers")
        fields["accelerators"] = f"{name}:{wishes.gpus}"
    if wishes.cpus:
        fields["cpus"] = f"{wishes.cpus}+"
    if wishes.memory:
        fields["memory"] = f"{wishes.memory / 10**9:g}+"
    return fields


def alias(cluster: str, node: int) -> str:
    """Return the name of a cluster's node for ssh, from its number there."""
    return f"{cluster}-worker{node}" if node else cluster


#: The names of clusters that a job creates: the id of the job, and the number of its first host there.
_CLUSTER = "monarch-kernel-{}-{}"
_OURS = re.compile(r"monarch-kernel-([0-9a-f]+)-(\d+)")
#: SkyPilot's errors for which a later attempt would not help.
_NEVER = ("ResourcesUnavailableError", "ResourcesMismatchError", "NotSupportedError")
_NO_CLUSTER = "ClusterDoesNotExist"
_NO_CLOUD = "NoCloudAccessError"
#: States of a request to its API server, of a cluster, and of a job there.
_WAITS, _GOES_ON = ("PENDING", "WAITING"), ("PENDING", "WAITING", "RUNNING")
_UP, _STOPPED = "UP", "STOPPED"
_SETS_UP, _FAILED_SETUP = ("", "INIT", "PENDING", "SETTING_UP"), "FAILED_SETUP"
#: How long an answer of SkyPilot is used (seconds).
_FRESH = 0.5
_PAUSE = 0.2
#: The time limit for a connection by ssh, including the program of SkyPilot that it starts (seconds).
_CONNECT_TIME = 40
#: How long a cluster without jobs is kept (minutes).
IDLE_MINUTES = 1
#: The interpreter on nodes, as found by the commands of SkyPilot's tasks.
PYTHON = "python"


class _Part(msgspec.Struct):
    """A cluster.

    Attributes:
        cluster: its name.
        request: SkyPilot's id of the request for it; "": unknown.
        own: whether the job has created it, and ends it.
        nodes: the number of its nodes that the job uses.
    """

    cluster: str
    request: str
    own: bool
    nodes: int


class _Data(msgspec.Struct):
    """The data in tickets of this launcher.

    Attributes:
        parts: the clusters.
        places: the cluster's index and the node of each host, by its number.
        python, idle, walltime: settings for workers that no program has started yet.
    """

    parts: list[_Part]
    places: list[tuple[int, int]]
    python: str
    idle: float
    walltime: float


@dataclass
class _Seen:
    """SkyPilot's last answer about a cluster.

    Attributes:
        phase: the phase of its hosts; None: workers may be started, or already are.
        words: the reason.
        failed: whether its launch or its setup has failed.
        job: SkyPilot's number of the job on it.
        at: the time of the query.
    """

    phase: HostPhase | None
    words: str = ""
    failed: bool = False
    job: int | None = None
    at: float = 0.0


class SkyNodes(SSHLauncher):
    """Starts workers on nodes of clusters, by the names that SkyPilot adds to the configuration of ssh."""

    PATIENCE: ClassVar[float] = 90.0  # on Kubernetes and Slurm, each connection starts a program of SkyPilot

    def _preparation(self, job: str) -> Script:
        return preparation(job)

    def knows(self, mark: str) -> bool:
        """Return whether this process has started the worker with this mark."""
        return mark in self._starts


class SkyLauncher(Launcher):
    """Requests a cluster from SkyPilot, and starts a worker on each of its nodes by ssh.

    Args:
        resources: the requirements of each node, by the fields of ``resources:`` in SkyPilot's YAML.
        cluster: the name of a cluster that is used if it exists, and created otherwise; "": a separate one for the job.
        setup: commands that run once on each node.
        workdir: a local folder that is copied to nodes.
        file_mounts: further files for nodes: paths there, and local paths or buckets.
        idle_minutes: how long a cluster without workers is kept; None: until the job is killed.
        down: whether it is then removed; False: it is stopped.
        retry: whether SkyPilot repeats the request until it gets the cluster.
        port: the port at which workers listen; 0: any free port.
        tunnel: whether this process reaches workers through ssh; None: only if no direct connection succeeds.
        python: the interpreter on the nodes if a job names none; "": the path of this process's interpreter.
        ssh: the command, with further options.
        sky: SkyPilot's command, or the interpreter that has SkyPilot; "": this interpreter, or else ``sky`` on PATH.
    """

    name = "sky"
    PATIENCE: ClassVar[float] = 60.0
    OPTIONS = (
        LauncherOption(name="infra", metavar="WHERE", help='such as "aws/us-east-1", "k8s" or "slurm"', plain=True),
        LauncherOption(
            name="accelerators", metavar="NAME:N", help='devices of each host, such as "H100:8"', plain=True
        ),
        LauncherOption(name="instance_type", metavar="TYPE", help="the cloud's name of the machine", plain=True),
        LauncherOption(name="use_spot", type=bool, help="cheaper machines that may be taken away", plain=True),
        LauncherOption(name="disk_size", type=int, metavar="GB", help="the disk of each host", plain=True),
        LauncherOption(name="image_id", metavar="IMAGE", help="the image, as SkyPilot names it"),
        LauncherOption(name="cluster", metavar="NAME", help="use this cluster (default: one of the job's own)"),
        LauncherOption(name="setup", metavar="COMMANDS", help="what runs once on each host"),
        LauncherOption(name="workdir", metavar="FOLDER", help="a folder here that hosts get"),
        LauncherOption(
            name="idle_minutes", type=int, metavar="N", help="a cluster without workers stays (-1: on)", plain=True
        ),
        LauncherOption(name="down", type=bool, help="it is removed then (default), and not stopped", plain=True),
        LauncherOption(name="retry", type=bool, help="ask again until there is room", plain=True),
        LauncherOption(name="port", type=int, metavar="PORT", help="where workers listen (default: any)", plain=True),
        LauncherOption(name="tunnel", type=bool, help="reach workers through ssh (default: where needed)", plain=True),
        LauncherOption(name="sky", metavar="COMMAND", help="SkyPilot's command or interpreter"),
    )
    _FIELDS = ("infra", "accelerators", "instance_type", "use_spot", "disk_size", "image_id")

    def __init__(
        self,
        resources: Mapping[str, object] | None = None,
        *,
        cluster: str = "",
        setup: str = "",
        workdir: str = "",
        file_mounts: Mapping[str, Any] | None = None,
        idle_minutes: int | None = IDLE_MINUTES,
        down: bool = True,
        retry: bool = False,
        port: int = 0,
        tunnel: bool | None = None,
        python: str = PYTHON,
        ssh: Sequence[str] = ("ssh",),
        sky: str = "",
    ) -> None:
        if _OURS.fullmatch(cluster):
            raise ValueError(f"cluster={cluster!r} is the name of a job's own cluster: choose another one")
        self._resources = dict(resources or {})
        self._cluster = cluster
        self._setup = setup
        self._workdir = os.path.abspath(os.path.expanduser(workdir)) if workdir else ""
        self._file_mounts = dict(file_mounts or {})
        self._idle_minutes = idle_minutes
        self._down = down
        self._retry = retry
        self._port = port
        self._tunnel = tunnel
        self._python = python
        self._ssh = list(ssh)
        self._sky = sky
        self._client = client(sky, self.PATIENCE)
        self._nodes = SkyNodes([], [*ssh, "-o", f"ConnectTimeout={_CONNECT_TIME}"], port, tunnel)
        self._seen: dict[str, _Seen] = {}  # by cluster
        self._named: set[str] = set()  # clusters whose names ssh knows
        self._starting = threading.Lock()

    @classmethod
    def configured(cls, values: Mapping[str, Any]) -> SkyLauncher:
        """See ``Launcher``."""
        fields = {name: value for name, value in values.items() if name in cls._FIELDS}
        others = {name: value for name, value in values.items() if name not in cls._FIELDS}
        if others.get("idle_minutes", 0) < 0:
            others["idle_minutes"] = None
        return cls(fields, **others)

    # -- asking for hosts -----------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        command = request.command
        data = _Data([], [], command.python or self._python, command.idle, request.resources.walltime)
        self._new(data, request, request.hosts)
        return self._ticket(command.job, len(data.places), data)

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``. First uses nodes of the job that answer and have no living worker, then another cluster."""
        data = ticket.read(_Data)
        status = self.poll(ticket)
        used = {data.places[host.host] for host in status.hosts if host.state is not HostPhase.GONE}
        free = [place for place in dict.fromkeys(data.places) if place not in used]
        free = [place for place in free if self._look(data.parts[place[0]]).phase is None]
        names = {_alias(data, place): place for place in free}
        chosen = [names[name] for name in self._nodes.answering(list(names))][:count]
        first = len(data.places)
        data.places += chosen
        if len(chosen) < count:
            self._new(data, request, count - len(chosen))
        request = replace(request, command=replace(request.command, python=data.python))
        self._nodes.begin(request, {first + at: _alias(data, place) for at, place in enumerate(chosen)})
        return self._ticket(ticket.job, len(data.places), data)

    def _new(self, data: _Data, request: LaunchRequest, count: int) -> None:
        """Request a cluster for further hosts."""
        command = request.command
        shared = bool(self._cluster) and not data.parts
        cluster = self._cluster if shared else _CLUSTER.format(command.job, len(data.places))
        fields = resource_fields(self._resources, request.resources)
        task = task_config(
            command.job,
            request.name,
            count,
            {**self._ending(), **fields},
            setup=self._setup,
            workdir=self._workdir,
            file_mounts=self._file_mounts,
            idle=command.idle,
        )
        try:
            there = shared and bool(self._client.ask("clusters", names=[cluster], refresh=False))
            if not there:
                self._client.ask("optimize", task=task)  # a launch would report this minutes later
            asked = self._client.ask("launch", task=task, cluster=cluster, retry=self._retry)
        except SkyError as e:
            if e.kind in _NEVER:
                stays = "; idle_minutes=None asks for none" if "autostop" in e.said.lower() else ""
                raise InfeasibleError(
                    f"SkyPilot cannot fulfil {count} x {_shown(fields)}: {e.said}; 'sky check' lists the "
                    "clouds that it may use, 'sky gpus list' their GPUs" + stays
                ) from e
            advice = "run 'sky check', which lists the requirements of each cloud" if e.kind == _NO_CLOUD else ""
            raise SubmissionRefusedError(self.name, f"{e.said} ({e.kind})", advice) from e
        data.parts.append(_Part(cluster, asked, not there, count))
        data.places += [(len(data.parts) - 1, node) for node in range(count)]

    def _ending(self) -> dict[str, object]:
        """Return SkyPilot's action for an idle cluster, as fields of its resources."""
        if self._idle_minutes is None:
            return {}
        return {"autostop": {"idle_minutes": self._idle_minutes, "down": self._down}}

    # -- asking where they are ------------------------------------------------------------------------

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``. It also starts workers on nodes that have become ready, if no program has done so."""
        data = ticket.read(_Data)
        found: dict[int, HostStatus] = {}
        ready: list[int] = []
        seen = [self._look(part) for part in data.parts]
        for number, (part, _node) in enumerate(data.places):
            one = seen[part]
            if one.phase is None:
                ready.append(number)
                continue
            name = _alias(data, data.places[number])
            found[number] = HostStatus(host=number, state=one.phase, name=name, reason=one.words, failed=one.failed)
        if ready:
            found |= self._of_nodes(ticket, data, ready)
        return JobStatus(tuple(found[number] for number in range(ticket.hosts)))

    def _look(self, part: _Part) -> _Seen:
        """Return SkyPilot's progress with a cluster.

        Once workers can be started there, the workers themselves are queried.
        """
        seen = self._seen.get(part.cluster)
        now = time.monotonic()
        if seen is not None and (seen.phase in (None, HostPhase.GONE) or now - seen.at < _FRESH):
            return seen
        try:
            new = self._request_of(part) if part.request else self._cluster_of(part)
            if new.phase is None:
                self._name(part)
        except SkyError as e:
            new = _Seen(HostPhase.GONE, str(e), failed=True)
        new.job = new.job if seen is None or new.job is not None else seen.job
        new.at = now
        self._seen[part.cluster] = new
        return new

    def _lost(self, part: _Part) -> str:
        """Return the cloud's reason why a host of a ready cluster is gone; "": the cluster is healthy."""
        try:
            new = self._cluster_of(part, refresh=True)
        except SkyError as e:
            return str(e)
        if new.phase is HostPhase.GONE:
            self._seen[part.cluster] = new
        return new.words

    def _request_of(self, part: _Part) -> _Seen:
        """Return the progress of the request for a cluster, and then of the job on it."""
        told = self._client.ask("request", request=part.request)
        state, words = told["state"], told["words"]
        if state in _GOES_ON:
            (cluster,) = self._client.ask("clusters", names=[part.cluster], refresh=False) or [None]
            if cluster is not None and cluster["state"] == _UP:
                return _Seen(HostPhase.STARTING, words or "the job is being submitted")
            waits = state if state in _WAITS else "provisioning"
            return _Seen(HostPhase.QUEUED, (cluster or {}).get("words") or words or waits)
        if state == "CANCELLED":
            return _Seen(HostPhase.GONE, "the launch was cancelled", failed=True)
        if not state:
            return self._cluster_of(part)  # the API server has forgotten the request
        number = told["job"]
        try:
            job = self._client.ask("job", cluster=part.cluster, job=number)
        except SkyError as e:
            if e.kind == _NO_CLUSTER:
                return self._cluster_of(part)
            return _Seen(HostPhase.STARTING, str(e), job=number)  # the cluster does not answer at the moment
        if job in _SETS_UP:
            return _Seen(HostPhase.STARTING, job or "the job is being submitted", job=number)
        if job == _FAILED_SETUP:
            return _Seen(HostPhase.GONE, job, failed=True, job=number)
        return _Seen(None, job=number)

    def _cluster_of(self, part: _Part, refresh: bool = False) -> _Seen:
        found = self._client.ask("clusters", names=[part.cluster], refresh=refresh)
        if not found:
            return _Seen(HostPhase.GONE, "SkyPilot has no such cluster any more: it was ended, or taken away")
        state = found[0]["state"]
        if state == _STOPPED:
            return _Seen(HostPhase.GONE, "the cluster is stopped")
        if state != _UP:
            return _Seen(HostPhase.STARTING, found[0]["words"] or state)
        return _Seen(None)

    def _name(self, part: _Part) -> None:
        """Let SkyPilot write the names of a cluster's nodes for ssh."""
        if part.cluster not in self._named:
            self._client.ask("aliases", cluster=part.cluster)
            self._named.add(part.cluster)

    def _of_nodes(self, ticket: Ticket, data: _Data, numbers: Sequence[int]) -> dict[int, HostStatus]:
        """Return the status of hosts whose nodes are ready."""
        nodes = _of_ssh(ticket, data)
        waiting = self._start(nodes, data, numbers)
        known = [number for number in numbers if number not in waiting]
        found = self._nodes.statuses(nodes, known)
        # If a host is gone, SkyPilot may know the reason.
        parts = {data.places[number][0] for number, one in found.items() if one.state is HostPhase.GONE}
        told = {part: self._lost(data.parts[part]) for part in parts}
        for number, one in found.items():
            part = data.places[number][0]
            if one.state is HostPhase.GONE and not one.failed and told[part]:
                found[number] = msgspec.structs.replace(one, reason=told[part])
        for number in waiting:
            name = _alias(data, data.places[number])
            why = "another program starts its worker"
            found[number] = HostStatus(host=number, state=HostPhase.STARTING, name=name, reason=why)
        return found

    def _start(self, nodes: Ticket, data: _Data, numbers: Sequence[int]) -> set[int]:
        """Start workers that no program has started. Return the hosts whose workers another program is starting."""
        with self._starting:
            new = {number for number in numbers if not self._nodes.knows(f"{nodes.job}.{number}")}
            if not new or registry.read(nodes.job) is None:
                return set()  # all are known; or the job is not in the list here, so this program has no key
            if not (new := new - registry.started(nodes.job)):
                return set()
            starting = registry.Starting(nodes.job)
            if not starting.take():
                starting.close()
                return new
            # A program may have ended while it started them.
            left = new - registry.started(nodes.job)
            there = self._nodes.statuses(nodes, sorted(left))
            starting.done(number for number, one in there.items() if one.state is not HostPhase.GONE)
            left = {number for number in left if there[number].state is HostPhase.GONE}
            key = Secret(key_text(registry.key_path(nodes.job)))
            command = WorkerCommand(nodes.job, key, registry.env_of(nodes.job), data.python, data.idle)
            request = LaunchRequest(len(left), command, Resources(walltime=data.walltime))
            threads = self._nodes.begin(request, {number: nodes.data["hosts"][number] for number in sorted(left)})
            threading.Thread(target=_note, args=(starting, threads, left), name="sky-start", daemon=True).start()
        return set()

    def rest(self, seconds: float) -> None:
        """See ``Launcher``."""
        self._nodes.rest(seconds)

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``: the output of the worker; before it starts, that of the setup or the launch."""
        data = ticket.read(_Data)
        part = data.parts[data.places[host][0]]
        seen = self._look(part)
        if seen.phase is None:
            return self._nodes.log(_of_ssh(ticket, data), host, lines)
        try:
            return str(self._client.ask("log", cluster=part.cluster, job=seen.job, lines=lines))
        except SkyError as e:
            return "" if e.kind == _NO_CLUSTER else f"SkyPilot has no log of {part.cluster}: {e.said}"

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. A cluster that the job has created ends with its last host. Others stay."""
        data = ticket.read(_Data)
        ending = set(range(ticket.hosts) if hosts is None else hosts)
        seen = [self._look(part) for part in data.parts]
        parts = {data.places[number][0] for number in ending}
        parts = {part for part in parts if seen[part].phase is None and not self._is_gone(data.parts[part])}
        nodes = _of_ssh(ticket, data)
        if on_nodes := [number for number in sorted(ending) if data.places[number][0] in parts]:
            self._nodes.end(nodes, on_nodes)
        left: dict[int, set[int]] = {part: set() for part in range(len(data.parts))}
        for number in set(range(ticket.hosts)) - ending:
            left[data.places[number][0]].add(number)
        over: list[_Part] = []
        for part, others in left.items():
            ready = seen[part].phase is None
            if others and ready:
                found = self._nodes.statuses(nodes, sorted(others))
                others = {number for number in others if found[number].state is not HostPhase.GONE}
            if not others:
                over.append(data.parts[part])
        self._give_back(over)

    def _is_gone(self, part: _Part) -> bool:
        try:
            return self._cluster_of(part).phase is HostPhase.GONE
        except SkyError as e:
            return e.kind == _NO_CLUSTER

    def _give_back(self, parts: Sequence[_Part]) -> None:
        """End clusters, or the job's task on clusters that it has not created, and wait a while until they end."""
        asked: dict[str, str] = {}
        for part in parts:
            try:
                seen = self._seen.get(part.cluster)
                if part.request and (seen is None or seen.phase is not None):
                    self._client.ask("withdraw", request=part.request)
                if part.own:
                    asked[part.cluster] = self._client.ask("down", cluster=part.cluster)
                else:
                    self._client.ask("cancel", cluster=part.cluster, job=self._look(part).job)
            except SkyError as e:
                self._refused(part.cluster, e)
        limit = time.monotonic() + self.PATIENCE
        for cluster, request in asked.items():
            try:
                while self._client.ask("request", request=request)["state"] in _GOES_ON and time.monotonic() < limit:
                    time.sleep(_PAUSE)
                self._client.ask("aliases", cluster=cluster)
            except SkyError as e:
                self._refused(cluster, e)
            self._seen.pop(cluster, None)
            self._named.discard(cluster)

    def _refused(self, cluster: str, error: SkyError) -> None:
        if error.kind != _NO_CLUSTER:
            raise LaunchError(f"SkyPilot did not end the cluster {cluster}: {error.said}; run 'sky down {cluster}'")

    # -- reaching -------------------------------------------------------------------------------------

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """See ``Launcher``."""
        return self._nodes.route(_of_ssh(ticket, ticket.read(_Data)), host)

    def close(self) -> None:
        """See ``Launcher``."""
        self._nodes.close()

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """See ``Launcher``. Clusters that jobs have created are found by name. No API server is started for this."""
        if not os.path.isdir(os.path.expanduser("~/.sky")):
            return []  # this user has not used SkyPilot
        launcher = cls()
        try:
            if not launcher._client.ask("running"):
                return []
            known = launcher._client.ask("clusters", names=None, refresh=False)
        except (LaunchError, SkyError):
            return []
        jobs: dict[str, list[tuple[int, str, int]]] = {}
        for each in known:
            if match := _OURS.fullmatch(each["name"]):
                jobs.setdefault(match[1], []).append((int(match[2]), each["name"], each["nodes"]))
        found: list[tuple[Launcher, Ticket]] = []
        for job, clusters in jobs.items():
            data = _Data([], [], "", 0.0, 0.0)
            for first, name, nodes in sorted(clusters):
                data.parts.append(_Part(name, "", True, nodes))
                # Numbers between clusters belong to hosts that have moved: they get slots of the first cluster.
                data.places += [(0, 0)] * (first - len(data.places))
                data.places += [(len(data.parts) - 1, node) for node in range(nodes)]
            found.append((cls(), launcher._ticket(job, len(data.places), data)))
        return found


def _note(starting: registry.Starting, threads: Sequence[threading.Thread], hosts: set[int]) -> None:
    """Record that workers were started, once they were."""
    for thread in threads:
        thread.join()
    starting.done(hosts)
    starting.close()


def _alias(data: _Data, place: tuple[int, int]) -> str:
    return alias(data.parts[place[0]].cluster, place[1])


def _of_ssh(ticket: Ticket, data: _Data) -> Ticket:
    """Return the ticket of the hosts for the ssh launcher."""
    hosts = [_alias(data, place) for place in data.places]
    return Ticket(launcher=SkyNodes.name, job=ticket.job, hosts=len(hosts), data={"hosts": hosts})


def _shown(resources: Mapping[str, object]) -> str:
    return "(" + (", ".join(f"{name}={value}" for name, value in resources.items()) or "any machine") + ")"


class SkyPilotJob(EngineJob):
    """Hosts from SkyPilot: the nodes of a cluster, with a worker on each (``docs/sky.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. They are one cluster.
        resources: the requirements of each host: a ``sky.Resources``, or the fields of ``resources:`` in SkyPilot's
            YAML, such as ``{"accelerators": "H100:8", "infra": "k8s", "use_spot": True}``.
        cluster_name: the name of a cluster that is used if it exists, and then stays; otherwise it is created. By
            default the job creates a separate one.
        monarch_port: the port at which workers listen; 0: any free port.
        idle_minutes_to_autostop: how long a cluster without workers is kept; None: until the job is killed.
        down_on_autostop: whether it is then removed; False: it is stopped.
        python_exe: the interpreter on the hosts, as found by the commands of SkyPilot's tasks.
        setup_commands: commands that run once on each host, such as an installation of monarch_kernel.
        workdir: a local folder that is copied to the hosts.
        file_mounts: further files for the hosts: paths there, and local paths or buckets.
        retry_until_up: whether SkyPilot repeats the request until it gets the hosts.
        tunnel: whether workers are reached through ssh, because their ports are closed; None: only if necessary.
        ssh: the command, with further options.
        sky: SkyPilot's command, or the interpreter that has SkyPilot; by default this interpreter, or else ``sky`` on
            PATH.
        options: those of ``EngineJob``.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        resources: object = None,
        cluster_name: str | None = None,
        monarch_port: int = 0,
        idle_minutes_to_autostop: int | None = IDLE_MINUTES,
        down_on_autostop: bool = True,
        python_exe: str = PYTHON,
        setup_commands: str | None = None,
        workdir: str | os.PathLike[str] | None = None,
        file_mounts: Mapping[str, Any] | None = None,
        *,
        retry_until_up: bool = False,
        tunnel: bool | None = None,
        ssh: Sequence[str] = ("ssh",),
        sky: str = "",
        **options: Any,
    ) -> None:
        launcher = SkyLauncher(
            _fields(resources),
            cluster=cluster_name or "",
            setup=setup_commands or "",
            workdir=os.fspath(workdir or ""),
            file_mounts=file_mounts,
            idle_minutes=idle_minutes_to_autostop,
            down=down_on_autostop,
            retry=retry_until_up,
            port=monarch_port,
            tunnel=tunnel,
            ssh=ssh,
            sky=sky,
        )
        super().__init__(launcher, meshes, python=python_exe, **options)


def _fields(resources: Any) -> dict[str, object]:
    """Return the fields of a ``sky.Resources``, or the given fields."""
    if resources is None or isinstance(resources, Mapping):
        return dict(resources or {})
    try:
        return dict(resources.to_yaml_config())
    except AttributeError:
        raise TypeError(
            f"resources={resources!r}: give a sky.Resources, or SkyPilot's fields, such as {{'accelerators': 'H100:8'}}"
        ) from None
