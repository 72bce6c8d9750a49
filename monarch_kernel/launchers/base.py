"""The interface to the engines that provide hosts: write a ``Launcher`` to take them from another engine.

A launcher asks its engine (a scheduler, ssh, a cloud) to run a worker on each of some hosts, and tells where they are.
It knows nothing of meshes, actors and connections, and this module imports nothing of the runtime: values are plain
data. ``EngineJob`` does the rest: keys, waiting, attaching, the list of all jobs, replacements, errors.

``docs/launchers.md`` explains it with an example. A launcher is registered by an entry point of the group
``monarch_kernel.launchers``, whose name is ``Launcher.name``. ``tests/launchers/conformance.py`` tests any of them.

It is long because all that a launcher's author has to know stands in one place.
"""

from __future__ import annotations

import enum
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, NoReturn

import msgspec

from monarch_kernel import environment, programs
from monarch_kernel.protocol.announcement import WorkerAnnouncement, find_announcement

__all__ = [
    "MARKER",
    "HostPhase",
    "HostStatus",
    "InfeasibleError",
    "JobStatus",
    "KeyWay",
    "LaunchError",
    "LaunchRequest",
    "Launcher",
    "LauncherOption",
    "Resources",
    "Secret",
    "StartFailedError",
    "StartTimeoutError",
    "SubmissionRefusedError",
    "Ticket",
    "WorkerAnnouncement",
    "WorkerCommand",
    "find_announcement",
    "launcher_class",
    "launcher_names",
    "own_launchers",
    "tail",
]

#: The entry point group in which launchers are registered.
GROUP = "monarch_kernel.launchers"
#: Our own launchers, also known in a checkout. No package in a working folder replaces them.
_OWN = {
    "kubernetes": "monarch_kernel.launchers.kubernetes:KubernetesLauncher",
    "lightning": "monarch_kernel.launchers.lightning:LightningLauncher",
    "process": "monarch_kernel.launchers.process:ProcessLauncher",
    "ray": "monarch_kernel.launchers.ray:RayLauncher",
    "sky": "monarch_kernel.launchers.sky:SkyLauncher",
    "slurm": "monarch_kernel.launchers.slurm:SlurmLauncher",
    "ssh": "monarch_kernel.launchers.ssh:SSHLauncher",
}
#: In the environment of a worker and of all that it starts: its job and host, by which they are found on their machine.
MARKER = environment.JOB
#: Where a worker gets its key if it comes by an environment variable, which the worker removes.
KEY_VARIABLE = environment.WORKER_KEY


# -- errors -------------------------------------------------------------------------------------------


class LaunchError(RuntimeError):
    """Hosts could not be had. The message says what, where, why in the engine's own words, and what to do next."""


class InfeasibleError(LaunchError):
    """The engine can never fulfil this request, such as more GPUs than any of its hosts has."""


class SubmissionRefusedError(LaunchError):
    """The engine did not take the request; the message quotes it.

    Args:
        engine: the launcher's name.
        said: the engine's own words.
        advice: what to do next.
    """

    def __init__(self, engine: str, said: str, advice: str = "") -> None:
        self.engine = engine
        self.said = said.strip()
        super().__init__(f"{engine} refused the job: {self.said or 'it said nothing'}" + (f"; {advice}" * bool(advice)))


class StartFailedError(LaunchError):
    """A worker did not start on a host.

    Args:
        host: the name of the host.
        reason: one clause.
        exit_code: of the command that started it; None: not known.
        log: the end of its output.
        check: what to look at.
    """

    def __init__(self, host: str, reason: str, exit_code: int | None = None, log: str = "", check: str = "") -> None:
        self.host = host
        self.reason = reason
        self.exit_code = exit_code
        self.log = log.strip()
        self.check = check or advice_for(f"{reason}\n{log}")
        code = "" if exit_code is None else f" (exit code {exit_code})"
        tail = f"\nThe end of its log:\n{self.log}" if self.log else ""
        super().__init__(f"the worker on {host} did not start{code}: {reason}. {self.check}{tail}")


class StartTimeoutError(LaunchError, TimeoutError):
    """Not all hosts were up in time.

    Args:
        up: how many were.
        wanted: how many were to be.
        seconds: the limit.
        reason: the last reason that the engine gave for those that were not.
        log: the ends of their logs.
    """

    def __init__(self, up: int, wanted: int, seconds: float, reason: str, log: str = "") -> None:
        self.up = up
        self.wanted = wanted
        self.reason = reason
        self.log = log.strip()
        tail = f"\n{self.log}" if self.log else ""
        super().__init__(
            f"{up} of {wanted} hosts were up after {seconds:g} s; the others: {reason or 'the engine gave no reason'}. "
            f"Wait longer with timeout=, or ask for fewer hosts{tail}"
        )


_CLOCKS = "Compare the clocks of this machine and of the host (date), as credentials and certificates depend on them"
#: Phrases in the output of a start that failed, and what to check.
_ADVICE = (
    ("Rewound credential", _CLOCKS),
    ("Expired credential", _CLOCKS),
    ("not yet valid", _CLOCKS),
    ("No module named monarch_kernel", "Install monarch_kernel in that interpreter, or name another with python="),
    ("No module named", "Install that module in the interpreter of the hosts, or name another with python="),
    ("Permission denied (", "The host refused the login: check the user, and that your key is in its authorized_keys"),
    ("Host key verification failed", "Connect once by hand with ssh, and compare the key of the host"),
    ("Could not resolve hostname", "Check the name of the host, and HostName in ~/.ssh/config"),
    ("Connection refused", "Check that the host is up, and the port"),
    ("Connection timed out", "Check that the host is up, and that no firewall is in between"),
    ("No route to host", "Check that the host is up, and that no firewall is in between"),
    ("cannot listen at", "Choose another port, or 0 for any free one, and check the host's own name and address"),
    ("ImagePull", "Check the name of the image, and that the cluster may pull it"),
    ("No such file or directory", "Check that this interpreter exists on the host, or name another with python="),
    ("not found", "Check that this interpreter exists on the host, or name another with python="),
    ("key", "Check how the key reaches the host: the file's mode must be 0600"),
)


def advice_for(text: str) -> str:
    """What to check, given the output of a start that failed."""
    return next((advice for phrase, advice in _ADVICE if phrase in text), "Look at its log, and try the command there")


# -- requests -----------------------------------------------------------------------------------------


class Secret:
    """Text that is shown, pickled and encoded by nothing; only ``reveal`` gives it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text, for a pipe, a file of mode 0600, or the environment of the one process that it is for."""
        return self._text

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: pass it on by a pipe or a file of mode 0600")


class KeyWay(enum.StrEnum):
    """How a worker gets its key; never by its arguments."""

    NONE = "none"
    """It needs none, as it listens on a Unix socket."""
    STDIN = "stdin"
    """As the first line of its standard input."""
    FILE = "file"
    """In a file of mode 0600."""
    ENVIRONMENT = "environment"
    """In the environment variable ``KEY_VARIABLE``, which it removes before it starts anything."""


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each host must have; 0: what the engine gives by default.

    Attributes:
        gpus: devices.
        cpus: processors.
        memory: bytes.
        walltime: for how long (seconds).
        options: further wishes, by the engine's own names: partition, account, image, ...
    """

    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    walltime: float = 0.0
    options: dict[str, Any] = {}


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker is started on a host of the job.

    Attributes:
        job: the id of the job.
        key: the key of the job, as one line; None: workers listen on Unix sockets only.
        env: environment variables for the worker and all that it starts. They may be secret: they are no arguments.
        python: the interpreter on the hosts; "": that of this process.
        idle: seconds without a controller after which the worker ends by itself.
    """

    job: str
    key: Secret | None
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    python: str = ""
    idle: float = 600.0

    def argv(
        self,
        listen: str,
        *,
        key: KeyWay = KeyWay.STDIN,
        key_file: str = "",
        announce: Sequence[str] = ("-",),
        name: str = "",
        log: str = "",
        background: bool = False,
        walltime: float = 0.0,
    ) -> list[str]:
        """The command line of a worker; it has no secret.

        Args:
            listen: ``tcp://HOST:PORT`` (port 0: any), ``tcp://ADVERTISED:PORT@tcp://0.0.0.0:PORT`` or ``ipc:///PATH``.
            key: how it gets its key. With ``STDIN``, write ``stdin()`` to it. With ``ENVIRONMENT``, its environment
                has ``key_environment()``.
            key_file: the file, with ``FILE``.
            announce: where it announces itself: "-" (standard output), the number of a descriptor, or a path.
            name: what the host is called in errors and tables; "": its own name.
            log: a file on the host for its output; "": standard error.
            background: whether it leaves the session that started it once it runs, and closes its standard streams.
            walltime: in how many seconds the engine ends it; it ends its ranks in good order before. 0: not known.
        """
        command = [*self._program(), "worker", "--listen", listen]
        for each in announce:
            command += ["--announce", each]
        if key is KeyWay.STDIN:
            command += ["--key", "-", *(["--env", "-"] if self.env else [])]
        elif key is KeyWay.FILE:
            command += ["--key", key_file]
        elif key is KeyWay.ENVIRONMENT:
            command += ["--key-env", KEY_VARIABLE]
        for option, value in (("--name", name), ("--log", log)):
            if value:
                command += [option, value]
        for option, seconds in (("--idle", self.idle), ("--walltime", walltime)):
            if seconds > 0:
                command += [option, f"{seconds:g}"]
        if background:
            command.append("--background")
        return command

    def _program(self) -> list[str]:
        if self.python:
            return [self.python, "-P", "-m", "monarch_kernel"]
        return programs.own_command()

    def stdin(self) -> bytes:
        """What to write to the worker's standard input with ``KeyWay.STDIN``: its key, and ``env`` if there is any, a
        line each."""
        assert self.key is not None
        env = msgspec.json.encode(dict(self.env)) + b"\n" if self.env else b""
        return self.key.reveal().encode() + b"\n" + env

    def key_environment(self) -> dict[str, str]:
        """The variable with the key for ``KeyWay.ENVIRONMENT``. Only the worker may get it."""
        assert self.key is not None
        return {KEY_VARIABLE: self.key.reveal()}

    def marker(self, host: int | str) -> str:
        """The value of ``MARKER`` in the environment of a host's worker, and so of all that it starts.

        Args:
            host: its number, or a name that only it has among the hosts of the job.
        """
        return f"{self.job}.{host}"

    def marks(self, host: int | str) -> dict[str, str]:
        """``MARKER``, and the marks by which a worker finds all that it has started; new ones for each start.

        A worker that is started without them executes a second interpreter that has them.

        Args:
            host: as for ``marker``.
        """
        run = os.urandom(5).hex()
        return {MARKER: self.marker(host), environment.RUN: run, environment.AGENT: f"worker-{run}"}


@dataclass(frozen=True)
class LaunchRequest:
    """What a job asks of an engine.

    Attributes:
        hosts: how many.
        command: what to run on each.
        resources: what each must have.
        name: what the engine may call the job.
        names: what the hosts may be called, where the engine has no names of its own for them; one each, or none.
        meshes: the names of their meshes, one each. A launcher whose options differ by mesh finds here which apply to
            a host; all other launchers give every host the same.
    """

    hosts: int
    command: WorkerCommand
    resources: Resources = field(default_factory=Resources)
    name: str = "monarch"
    names: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies what an engine has been asked for: plain data, without a secret, for any later process of this user.

    Attributes:
        launcher: its ``name``.
        job: the id of the job.
        hosts: how many have been asked for so far; they are numbered from 0, and a number is never given twice.
        data: what the launcher needs to find them.
    """

    launcher: str
    job: str
    hosts: int
    data: dict[str, Any]


# -- status -------------------------------------------------------------------------------------------


class HostPhase(enum.StrEnum):
    """Where a host is in its life; it only moves down this list."""

    QUEUED = "queued"
    """The engine has not given it yet."""
    STARTING = "starting"
    """The engine has given it, and its worker has not announced itself."""
    UP = "up"
    """Its worker listens."""
    GONE = "gone"
    """It was refused, failed, lost, or has ended."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One host of a job.

    Attributes:
        host: its number.
        state: where it is.
        url: the URL that its worker announced.
        name: what the engine calls the machine.
        reason: why it is in that state, in the engine's own words: "Resources", "exit 1: No module named ...".
        since: when that state began (Unix time); 0: not known.
        expected_start: when the engine expects to give it (Unix time); 0: not known.
        ends_at: when its walltime ends (Unix time); 0: not known, or never.
        worker: the id that its worker announced.
        devices: the GPUs that the engine gave it; None: the environment of the worker names none.
        exit_code: of a worker that has failed.
        failed: whether it is gone because its start failed.
    """

    host: int
    state: HostPhase
    url: str = ""
    name: str = ""
    reason: str = ""
    since: float = 0.0
    expected_start: float = 0.0
    ends_at: float = 0.0
    worker: str = ""
    devices: tuple[str, ...] | None = None
    exit_code: int | None = None
    failed: bool = False

    @classmethod
    def announced(cls, host: int, said: WorkerAnnouncement, **more: Any) -> HostStatus:
        """The status of a host whose worker has announced itself."""
        state = HostPhase.GONE if said.error else HostPhase.UP
        found = cls(
            host=host,
            state=state,
            url=said.url,
            name=said.host,
            reason=said.error,
            worker=said.id,
            devices=said.devices,
            ends_at=said.ends_at,
            failed=bool(said.error),
        )
        return msgspec.structs.replace(found, **more)


class JobStatus(msgspec.Struct, frozen=True):
    """All hosts that a ticket stands for, by number."""

    hosts: tuple[HostStatus, ...]

    def of(self, state: HostPhase) -> list[HostStatus]:
        """The hosts in a state."""
        return [host for host in self.hosts if host.state is state]

    @property
    def reason(self) -> str:
        """Why hosts that are not up are not, each reason once."""
        waiting = [host for host in self.hosts if host.state is not HostPhase.UP and host.reason]
        return "; ".join(dict.fromkeys(host.reason for host in waiting))

    def __str__(self) -> str:
        counts = {state: len(self.of(state)) for state in HostPhase}
        shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        why = f" ({self.reason})" if self.reason else ""
        ends = [host.ends_at for host in self.of(HostPhase.UP) if host.ends_at]
        left = f"; the walltime ends in {max(0.0, min(ends) - time.time()):.0f} s" if ends else ""
        return f"{counts[HostPhase.UP]} of {len(self.hosts)} hosts up: {shown}{why}{left}"


# -- launchers ----------------------------------------------------------------------------------------


class LauncherOption(msgspec.Struct, frozen=True, kw_only=True):
    """What users may set of a launcher: by an option of ``%mesh up --on`` and ``monarch-kernel up``, and in profiles.

    Attributes:
        name: the key; the option is ``--name``, with ``-`` for ``_``.
        help: half a sentence.
        type: ``str``, ``int``, ``float``, ``bool`` or ``list`` (of words: the option takes several, with commas).
        metavar: what stands for its value in the help.
        choices: the values that it may have; none: any.
        pattern: what the whole of a text must match, for values that get into scripts and paths; "": anything.
        wish: whether it is one of ``Resources.options``, and not for ``Launcher.configured``.
        plain: whether its value only chooses among what the engine has, such as a partition. Any other may make
            something run, or send something elsewhere; a project's file may set it only once the user trusts that file.
    """

    name: str
    help: str
    type: type = str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    pattern: str = ""
    wish: bool = False
    plain: bool = False


class Launcher(ABC):
    """Takes hosts from an engine.

    All methods but ``options`` may block, on whatever thread they are called; an interrupt of that thread ends them.
    Two that change a ticket are never called at once. Each bounds its own waits by ``PATIENCE``. They raise
    ``LaunchError`` for what the engine refuses, and ``OSError`` when it cannot be reached. A launcher keeps no state
    that a later process would need: all of it is in the ticket, or with the engine.
    """

    #: The name of its entry point, and in tickets.
    name: ClassVar[str]
    #: Whether its workers listen on TCP, and so need a key.
    needs_key: ClassVar[bool] = True
    #: How long one question to the engine may take (seconds).
    PATIENCE: ClassVar[float] = 30.0
    #: What users may set by name, in a line or in a profile.
    OPTIONS: ClassVar[tuple[LauncherOption, ...]] = ()
    _known: ClassVar[dict[str, type[Launcher]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            Launcher._known[cls.name] = cls

    @abstractmethod
    def submit(self, request: LaunchRequest) -> Ticket:
        """Ask for hosts, with a worker on each. Returns when the engine has taken the request, not when they are up.

        Raises:
            InfeasibleError: the engine can never fulfil it.
            SubmissionRefusedError: the engine refused it; nothing of it is left there.
        """

    @abstractmethod
    def poll(self, ticket: Ticket) -> JobStatus:
        """Ask where each host of the ticket is. The numbers of the hosts are 0 to ``ticket.hosts - 1``."""

    @abstractmethod
    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """Ask for further hosts: in places that the engine has already given to this job, as those of hosts that are
        gone; then new ones.

        Args:
            request: that of ``submit``, for the command of the workers, with the names and meshes of the further hosts.

        Returns:
            The ticket for all hosts, the old numbers included.

        Raises: as ``submit``; the old ticket then still stands for the old hosts.
        """

    @abstractmethod
    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """The end of what a host's worker, or its start, has written; "" if there is nothing."""

    @abstractmethod
    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """End these hosts, by default all, queued ones included, and remove what the engine keeps for them.

        Does nothing for hosts that are gone. Called by any process of this user, more than once, or while hosts start.
        Returns when they have ended, or the engine has promised so.
        """

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """The address to connect to from this process; where no direct way leads to ``host.url``, that of a tunnel,
        which this launcher holds open until ``close``."""
        del ticket
        return host.url

    def rest(self, seconds: float) -> None:
        """Wait between two polls. A launcher that hears of a change in between returns then.

        Args:
            seconds: the longest.
        """
        time.sleep(seconds)

    def close(self) -> None:  # noqa: B027  most launchers hold nothing
        """Release what this process holds for hosts, such as tunnels; the hosts stay."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The arguments of this launcher, as plain data without a secret, for ``Launcher.of`` in a later process."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Launcher:
        """Make a launcher from its ``options``."""
        return cls(**options)

    @classmethod
    def configured(cls, values: Mapping[str, Any]) -> Launcher:
        """Make a launcher from what a user has set of its ``OPTIONS``, without wishes; by default as ``of`` does.

        Raises:
            ValueError: something is missing, or has no such value; the message says what to write.
        """
        return cls.of(values)

    def others(self) -> str:
        """What says which workers of others it takes, and does not start its own; these have a key already."""
        return ""

    def usual_hosts(self) -> int:
        """How many hosts are asked for where a user does not say."""
        return 1

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """The jobs of this user that the engine knows by their marks, whether they are in the list of jobs or not.

        So a job whose record was lost, or is kept elsewhere, can be seen and ended. Empty where the engine is not.

        Args:
            own_process: whether this process is a command of ours. That of a user must not be changed by the question,
                such as connected to a cluster.
        """
        return []


def launcher_class(name: str) -> type[Launcher]:
    """The launcher that is registered by this name.

    Raises:
        LaunchError: no launcher has this name, or it cannot be loaded.
    """
    if name in Launcher._known:  # it is imported already
        return Launcher._known[name]
    own = [metadata.EntryPoint(name, _OWN[name], GROUP)] if name in _OWN else []
    found = own or [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]
    if not found:
        raise LaunchError(f"there is no launcher {name!r} (known: {', '.join(launcher_names()) or 'none'})")
    try:
        loaded = found[0].load()
    except ImportError as e:
        raise LaunchError(f"the launcher {name!r} ({found[0].value}) cannot be loaded: {e}") from e
    if not (isinstance(loaded, type) and issubclass(loaded, Launcher)):
        raise LaunchError(f"the entry point {name!r} ({found[0].value}) is not a Launcher")
    return loaded


def launcher_names() -> list[str]:
    """The names of all launchers that are registered, or imported."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUP)} | Launcher._known.keys() | _OWN.keys())


def own_launchers() -> set[str]:
    """The names of the launchers that come with this package."""
    return set(_OWN)


def host_log(launcher: Launcher, ticket: Ticket, host: int, lines: int) -> str:
    """The end of what one host has written; also of one that has been replaced.

    Raises:
        LaunchError: there is no such host.
    """
    if not 0 <= host < ticket.hosts:
        raise LaunchError(f"job {ticket.job} has no host {host}: its hosts so far are 0 to {ticket.hosts - 1}")
    return launcher.log(ticket, host, lines)


def keyless(others: str) -> str:
    """What to say where the key of workers of others is not named."""
    return f"the workers of {others} have a key already: name its file with key_file=, as only who has it can use them"


def tail(path: str, lines: int) -> str:
    """The last lines of a file; "" if there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 400 * max(1, lines)))
            return b"\n".join(file.read().splitlines()[-lines:]).decode(errors="replace")
    except OSError:
        return ""
