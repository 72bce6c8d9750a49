"""Define the interface to providers of hosts: write a ``Launcher`` to get hosts from another provider.

A launcher asks its provider (a scheduler, ssh, a cloud) to run a worker on each of several hosts, and reports their
addresses. It does not deal with meshes, actors and connections, and this module imports nothing of the runtime: values
are plain data. ``EngineJob`` does the rest: keys, waiting, attaching, the list of all jobs, replacements, errors.

``docs/launchers.md`` explains it with an example. A launcher is registered by an entry point of the group
``monarch_kernel.launchers``, with the name ``Launcher.name``. ``tests/launchers/conformance.py`` tests any launcher.

This module is long so that authors of launchers find everything in one place.
"""

from __future__ import annotations

import enum
import inspect
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from monarch_kernel import environment, programs
from monarch_kernel.protocol.announcement import WorkerAnnouncement as WorkerAnnouncement
from monarch_kernel.protocol.announcement import find_announcement as find_announcement  # launchers take both from here

T = TypeVar("T")

#: The entry point group in which launchers are registered.
GROUP = "monarch_kernel.launchers"
#: The launchers of this package, also found in a checkout. No package in a working folder replaces them.
_OWN = {
    "kubernetes": "monarch_kernel.launchers.kubernetes:KubernetesLauncher",
    "lightning": "monarch_kernel.launchers.lightning:LightningLauncher",
    "process": "monarch_kernel.launchers.process:ProcessLauncher",
    "ray": "monarch_kernel.launchers.ray:RayLauncher",
    "sky": "monarch_kernel.launchers.sky:SkyLauncher",
    "slurm": "monarch_kernel.launchers.slurm:SlurmLauncher",
    "ssh": "monarch_kernel.launchers.ssh:SSHLauncher",
}
#: A variable in the environment of a worker and its descendants, with job and host; identifies them on their machine.
MARKER = environment.JOB
#: The environment variable with the key of a worker, if it is passed that way. The worker removes the variable.
KEY_VARIABLE = environment.WORKER_KEY


# -- errors -------------------------------------------------------------------------------------------


class LaunchError(RuntimeError):
    """Hosts could not be obtained. The message names the hosts, the provider's reason, and the next step."""


class InfeasibleError(LaunchError):
    """The provider can never fulfil this request, for example because it asks for more GPUs than any host has."""


class SubmissionRefusedError(LaunchError):
    """The provider rejected the request. The message quotes the provider.

    Args:
        engine: the launcher's name.
        said: the message of the provider.
        advice: the next step.
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
        exit_code: the exit code of the command that started it; None: unknown.
        log: the end of its output.
        check: what to check.
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
        up: the number of hosts that were up.
        wanted: the number of requested hosts.
        seconds: the time limit.
        reason: the provider's last reason for the hosts that were not up.
        log: the ends of the logs of these hosts.
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
#: Phrases in the output of a failed start, and what to check.
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
    """Return what to check, given the output of a failed start."""
    return next((advice for phrase, advice in _ADVICE if phrase in text), "Look at its log, and try the command there")


# -- requests -----------------------------------------------------------------------------------------


class Secret:
    """Text that is never shown, pickled or encoded; only ``reveal`` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for a pipe, a file of mode 0600, or the environment of the one process that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: pass it on by a pipe or a file of mode 0600")


class KeyWay(enum.StrEnum):
    """The way in which a worker gets its key; never by its arguments."""

    NONE = "none"
    """It needs none, as it listens on a Unix socket."""
    STDIN = "stdin"
    """As the first line of its standard input."""
    FILE = "file"
    """In a file of mode 0600."""
    ENVIRONMENT = "environment"
    """In the environment variable ``KEY_VARIABLE``, which it removes before it starts anything."""


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requirements of each host; 0: the default of the provider.

    Attributes:
        gpus: the number of devices.
        cpus: the number of processors.
        memory: the memory (bytes).
        walltime: the duration (seconds).
        options: further requirements, with the provider's own names: partition, account, image, ...
    """

    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    walltime: float = 0.0
    options: dict[str, Any] = {}


@dataclass(frozen=True)
class WorkerCommand:
    """The command that starts a worker on a host of the job.

    Attributes:
        job: the id of the job.
        key: the key of the job, as one line; None: workers listen on Unix sockets only.
        env: environment variables for the worker and its descendants. They may be secret, so they are not passed as
            arguments.
        python: the interpreter on the hosts; "": that of this process.
        idle: the time without a controller after which the worker ends itself (seconds).
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
        """Build the command line of a worker. It contains no secret.

        Args:
            listen: ``tcp://HOST:PORT`` (port 0: any), ``tcp://ADVERTISED:PORT@tcp://0.0.0.0:PORT`` or ``ipc:///PATH``.
            key: the way in which it gets its key. With ``STDIN``, write ``stdin()`` to it. With ``ENVIRONMENT``, add
                ``key_environment()`` to its environment.
            key_file: the file, with ``FILE``.
            announce: where it announces itself: "-" (standard output), the number of a descriptor, or a path.
            name: the name of the host in errors and tables; "": its hostname.
            log: a file on the host for its output; "": standard error.
            background: whether it leaves the session that started it once it runs, and closes its standard streams.
            walltime: the time until the provider ends it (seconds); before that, it ends its ranks in good order. 0:
                unknown.
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
        """Return the data for the worker's standard input with ``KeyWay.STDIN``.

        The first line is its key; the second, if there are any variables, is ``env``.
        """
        assert self.key is not None
        env = msgspec.json.encode(dict(self.env)) + b"\n" if self.env else b""
        return self.key.reveal().encode() + b"\n" + env

    def key_environment(self) -> dict[str, str]:
        """Return the variable with the key for ``KeyWay.ENVIRONMENT``. Only the worker may get it."""
        assert self.key is not None
        return {KEY_VARIABLE: self.key.reveal()}

    def marker(self, host: int | str) -> str:
        """Return the value of ``MARKER`` in the environment of a host's worker, and so of its descendants.

        Args:
            host: its number, or a name that is unique among the hosts of the job.
        """
        return f"{self.job}.{host}"

    def marks(self, host: int | str) -> dict[str, str]:
        """Return ``MARKER``, and the marks by which a worker finds its descendants. They are new for each start.

        A worker that is started without them executes a second interpreter with them.

        Args:
            host: as for ``marker``.
        """
        run = os.urandom(5).hex()
        return {MARKER: self.marker(host), environment.RUN: run, environment.AGENT: f"worker-{run}"}


@dataclass(frozen=True)
class LaunchRequest:
    """The request of a job to a provider.

    Attributes:
        hosts: the number of hosts.
        command: the command to run on each.
        resources: the requirements of each host.
        name: the name for the job at the provider.
        names: suggested names for the hosts, if the provider has no names for them; one each, or none.
        meshes: the names of their meshes, one each. Launchers whose options differ by mesh use this to select those of
            a host. All other launchers treat every host alike.
    """

    hosts: int
    command: WorkerCommand
    resources: Resources = field(default_factory=Resources)
    name: str = "monarch"
    names: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a request to a provider: plain data, without a secret, for any later process of this user.

    Attributes:
        launcher: its ``name``.
        job: the id of the job.
        hosts: the number of hosts requested so far; they are numbered from 0, and no number is reused.
        data: the data with which the launcher finds them.
    """

    launcher: str
    job: str
    hosts: int
    data: dict[str, Any]

    def read(self, kind: type[T]) -> T:
        """Return the data as the structure that the launcher made it from."""
        return msgspec.convert(self.data, kind)


# -- status -------------------------------------------------------------------------------------------


class HostPhase(enum.StrEnum):
    """The phase of a host. It only moves down this list."""

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
        state: its phase.
        url: the URL that its worker announced.
        name: the provider's name of the machine.
        reason: why it is in that phase, in the provider's words: "Resources", "exit 1: No module named ...".
        since: when that phase began (Unix time); 0: unknown.
        expected_start: when the provider expects to start it (Unix time); 0: unknown.
        ends_at: when its walltime ends (Unix time); 0: unknown, or never.
        worker: the id that its worker announced.
        devices: the GPUs that the provider assigned; None: the environment of the worker names none.
        exit_code: the exit code of a failed worker.
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
    def announced(cls, host: int, said: WorkerAnnouncement, **more: object) -> HostStatus:
        """Build the status of a host whose worker has announced itself."""
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
    """All hosts of a ticket, by number."""

    hosts: tuple[HostStatus, ...]

    def of(self, state: HostPhase) -> list[HostStatus]:
        """Return the hosts in a phase."""
        return [host for host in self.hosts if host.state is state]

    @property
    def reason(self) -> str:
        """The reasons why hosts are not up, each once."""
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
    """A setting of a launcher, for users of ``%mesh up --on`` and ``monarch-kernel up``, and for profiles.

    Attributes:
        name: the key; the option is ``--name``, with ``-`` for ``_``.
        help: half a sentence.
        type: ``str``, ``int``, ``float``, ``bool`` or ``list`` (of words: the option takes several, with commas).
        metavar: the placeholder for its value in the help.
        choices: the valid values; none: any.
        pattern: a pattern that a text must match completely, for values that are used in scripts and paths; "":
            anything.
        wish: whether it belongs to ``Resources.options`` instead of ``Launcher.configured``.
        plain: whether its value only chooses among the provider's resources, such as a partition. Any other option may
            cause code to run, or data to be sent elsewhere. A project's file may set such an option only once the user
            trusts the file.
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
    """The interface to a provider of hosts.

    All methods but ``options`` may block, on any thread; an interrupt of that thread ends them. Two calls that change a
    ticket are never made at the same time. Each call limits its own waits by ``PATIENCE``. Methods raise
    ``LaunchError`` if the provider rejects a request, and ``OSError`` if it cannot be reached. A launcher keeps no
    state that a later process would need: all state is in the ticket, or at the provider.
    """

    #: The name of its entry point, and in tickets.
    name: ClassVar[str]
    #: Whether its workers listen on TCP, and therefore need a key.
    needs_key: ClassVar[bool] = True
    #: The time limit for one request to the provider (seconds).
    PATIENCE: ClassVar[float] = 30.0
    #: The options that users may set by name, on a command line or in a profile.
    OPTIONS: ClassVar[tuple[LauncherOption, ...]] = ()
    _known: ClassVar[dict[str, type[Launcher]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            Launcher._known[cls.name] = cls

    @abstractmethod
    def submit(self, request: LaunchRequest) -> Ticket:
        """Request hosts, with a worker on each.

        Returns when the provider has accepted the request, not when they are up.

        Raises:
            InfeasibleError: the provider can never fulfil it.
            SubmissionRefusedError: the provider rejected it, and keeps nothing of it.
        """

    @abstractmethod
    def poll(self, ticket: Ticket) -> JobStatus:
        """Query the status of each host of the ticket. Hosts are numbered from 0 to ``ticket.hosts - 1``."""

    @abstractmethod
    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """Request further hosts.

        First use resources that the provider has already assigned to this job, such as those of hosts that are gone;
        then request new ones.

        Args:
            request: as for ``submit``, with the command of the workers, and the names and meshes of the further hosts.

        Returns:
            The ticket for all hosts, including the old ones.

        Raises: as ``submit``; the old ticket then remains valid for the old hosts.
        """

    @abstractmethod
    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """Return the last output of a host's worker or of its start; "" if there is none."""

    @abstractmethod
    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """End these hosts, by default all, including queued ones, and remove the provider's objects for them.

        Does nothing for hosts that are gone. Any process of this user may call this, repeatedly, and while hosts start.
        Returns when they have ended, or the provider has confirmed that they will.
        """

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """Return the address by which this process connects to a host.

        If ``host.url`` cannot be reached directly, it is the address of a tunnel, which this launcher keeps open until
        ``close``.
        """
        del ticket
        return host.url

    def rest(self, seconds: float) -> None:
        """Wait between two polls. A launcher that is notified of a change returns then.

        Args:
            seconds: the maximum time.
        """
        time.sleep(seconds)

    def close(self) -> None:  # noqa: B027  most launchers hold nothing
        """Release resources of this process for hosts, such as tunnels; the hosts stay."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of this launcher, as plain data without secrets, for ``of`` in a later process.

        By default, an argument ``port`` is in the attribute ``_port``.
        """
        return {name: getattr(self, f"_{name}") for name in inspect.signature(type(self)).parameters}

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Launcher:
        """Create a launcher from its ``options``."""
        return cls(**options)

    @classmethod
    def configured(cls, values: Mapping[str, object]) -> Launcher:
        """Create a launcher from the user's values of its ``OPTIONS``, except wishes; by default as ``of`` does.

        Raises:
            ValueError: a value is missing or invalid; the message says what to write.
        """
        return cls.of(values)

    @classmethod
    def _ticket(cls, job: str, hosts: int, data: msgspec.Struct) -> Ticket:
        """Return the ticket of a job with so many hosts; ``Ticket.read`` returns its data again."""
        return Ticket(launcher=cls.name, job=job, hosts=hosts, data=msgspec.to_builtins(data))

    def others(self) -> str:
        """Describe the existing workers that it uses instead of starting new ones. These already have a key."""
        return ""

    def usual_hosts(self) -> int:
        """Return the default number of hosts of a request."""
        return 1

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """Return the jobs of this user that the provider finds by their marks, listed or not in the list of jobs.

        A job whose record was lost, or is stored elsewhere, can thereby be listed and ended. Empty without the
        provider.

        Args:
            own_process: whether this process is a command of this package. The query must not change a user's process,
                for example by connecting it to a cluster.
        """
        return []


def launcher_class(name: str) -> type[Launcher]:
    """Return the launcher that is registered under this name.

    Raises:
        LaunchError: no launcher has this name, or it cannot be loaded.
    """
    if name in Launcher._known:  # it is already imported
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
    """Return the names of all launchers that are registered or imported."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUP)} | Launcher._known.keys() | _OWN.keys())


def own_launchers() -> set[str]:
    """Return the names of the launchers of this package."""
    return set(_OWN)


def host_log(launcher: Launcher, ticket: Ticket, host: int, lines: int) -> str:
    """Return the last output of one host, which may have been replaced.

    Raises:
        LaunchError: the host does not exist.
    """
    if not 0 <= host < ticket.hosts:
        raise LaunchError(f"job {ticket.job} has no host {host}: its hosts so far are 0 to {ticket.hosts - 1}")
    return launcher.log(ticket, host, lines)


def keyless(others: str) -> str:
    """Build the message for a missing key of existing workers."""
    return f"the workers of {others} have a key already: name its file with key_file=, which is required to use them"


def tail(path: str, lines: int) -> str:
    """Return the last lines of a file; "" if there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 400 * max(1, lines)))
            return b"\n".join(file.read().splitlines()[-lines:]).decode(errors="replace")
    except OSError:
        return ""
