"""The environment variables of monarch_kernel, with their types, defaults and allowed values.

A variable is read when it is used (``CAST_FANOUT.get()``), not when a module is imported. A program may therefore set
it before it spawns its first mesh. Code on a hot path reads a variable once, at setup. ``docs/configuration.md`` has
a table of all variables; users read them through ``monarch_kernel.config``.

Any package of this project may import this module; it imports none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")

_PREFIX = "MONARCH_KERNEL_"


class InvalidSettingError(ValueError):
    """Raised for an invalid environment variable. The message names the variable, its value and the allowed values."""


class EnvironmentVariable(Generic[T]):
    """An environment variable that users may set.

    Args:
        name: its name without the common prefix.
        kind: converts text to the value, raising ValueError for text that is not allowed, and describes the allowed
            values, for errors and documentation.
        default: the text to use if the variable is unset or empty, or a function that returns it.
        meaning: the effect of the variable.
        read_by: the processes that read it.
        shown_default: a description of the default, if its text is not self-explanatory.
    """

    __slots__ = ("_default", "_parse", "allowed", "meaning", "name", "read_by", "shown_default")

    def __init__(
        self,
        name: str,
        kind: _Kind[T],
        default: str | Callable[[], str],
        meaning: str,
        read_by: str,
        shown_default: str = "",
    ) -> None:
        self.name = _PREFIX + name
        self.meaning = meaning
        self.read_by = read_by
        self.shown_default = shown_default or str(default)
        self._parse, self.allowed = kind
        self._default = default
        _variables.append(self)

    def get(self) -> T:
        """Return the current value in this process.

        Raises:
            InvalidSettingError: the variable is set to a value that is not allowed.
        """
        text = os.environ.get(self.name)
        if text:
            return self.parse(text)
        default = self._default
        return self._parse(default if isinstance(default, str) else default())

    def set(self, text: str | None) -> None:
        """Set the variable for this process and its child processes; None unsets it.

        Raises:
            InvalidSettingError: the value is not allowed.
        """
        if text is None:
            os.environ.pop(self.name, None)
        else:
            self.parse(text)
            os.environ[self.name] = text

    def parse(self, text: str) -> T:
        """Convert text to the value.

        Raises:
            InvalidSettingError: the text is not allowed.
        """
        try:
            return self._parse(text)
        except ValueError:
            raise InvalidSettingError(f"{self.name}={text!r} is not valid: it must be {self.allowed}") from None

    def __repr__(self) -> str:
        return f"<{self.name}>"


_variables: list[EnvironmentVariable[Any]] = []


def user_folder(kind: Literal["config", "state"]) -> str:
    """Return the folder of this package with the configuration or the state of this user, which need not exist."""
    base = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
    if not os.path.isabs(base):  # the XDG specification requires ignoring such a setting
        base = os.path.expanduser({"config": "~/.config", "state": "~/.local/state"}[kind])
    return os.path.join(base, "monarch_kernel")


def variables() -> tuple[EnvironmentVariable[Any], ...]:
    """Return all environment variables that users may set, in the order of the documentation."""
    return tuple(_variables)


def check() -> None:
    """Validate all variables that are set, to report mistakes before any process is started.

    Raises:
        InvalidSettingError: a variable is not valid.
    """
    given = {name for name in os.environ if name.startswith(_PREFIX)}
    for variable in _variables:
        if variable.name in given:
            variable.get()


# -- kinds of values -----------------------------------------------------------------------------


class _Kind(NamedTuple, Generic[T]):
    """How a value is parsed, and a description of the allowed ones."""

    parse: Callable[[str], T]
    allowed: str


def _seconds(least: float, most: float = 1e9) -> _Kind[float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not least <= seconds <= most:  # rejects NaN, too
            raise ValueError(text)
        return seconds

    limits = f", {least:g} or more" if most == 1e9 else f" from {least:g} to {most:.0f}"
    return _Kind(parse, f"a number of seconds{limits}")


def _whole(least: int, unit: str = "") -> _Kind[int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return _Kind(parse, f"a whole number{unit}, {least} or more")


_BYTES = _whole(0, " of bytes")
_INDEX = _Kind[int | None](lambda text: _whole(0).parse(text) if text else None, _whole(0).allowed)


def _one_of(*choices: str) -> _Kind[str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    shown = [f"`{choice}`" for choice in choices if choice]
    return _Kind(parse, " or ".join(shown) if len(shown) == 2 else f"one of {', '.join(shown)}")


def _flag(text: str) -> bool | None:
    if text not in ("", "0", "1"):
        raise ValueError(text)
    return text == "1" if text else None


_FLAG = _Kind(_flag, "`0` or `1`")


def _text(allowed: str) -> _Kind[str]:
    return _Kind(str, allowed)


def _meeting_point(text: str) -> str:
    """Parse the URL of a gateway, ``tcp://host:port``. Ranks call this, so it imports no URL module."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not text:
        return ""
    if not (colon and host.strip("[]") and "/" not in host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(text)
    return f"tcp://{host}:{port}"


def _one_per_core() -> str:
    return str(min(4, len(os.sched_getaffinity(0))))


def _quarter_of_memory() -> str:
    return str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


# -- hosts and processes -------------------------------------------------------------------------

KEY_FILE = EnvironmentVariable(
    "KEY_FILE",
    _text("the path of a key file"),
    "",
    "the key with which this process authenticates over TCP if neither `key_file=` nor `--key-file` names one",
    "controller, worker",
    shown_default="this user's own key",
)
ALLOW = EnvironmentVariable(
    "ALLOW",
    _text("the path of an allow-list"),
    "",
    "the list of keys that may connect, if neither `allow=` nor `--allow` names one",
    "controller, worker",
    shown_default="the key file's name followed by `.allow`",
)
HEARTBEAT_TIMEOUT = EnvironmentVariable(
    "HEARTBEAT_TIMEOUT",
    _seconds(0.1, 3600),
    "3",
    "how long a host may be silent before it counts as lost; set the same value for all processes",
    "controller, worker",
)
SILENCE_TIMEOUT = EnvironmentVariable(
    "SILENCE_TIMEOUT",
    _seconds(0.1, 1e6),
    "600",
    "how long a process that runs user code may be silent while its host still answers",
    "controller, worker",
)
START_LIMIT = EnvironmentVariable(
    "START_LIMIT",
    _seconds(0),
    "120",
    "how long a rank may take to start, 0: no limit; `mesh_proc_spawn_max_idle` of `configure` overrides it",
    "controller, host agent, worker",
)
PING_PERIOD = EnvironmentVariable(
    "PING_PERIOD",
    _seconds(0),
    "1",
    "how often a host agent pings its ranks; 0: never",
    "host agent, worker",
)
UNRESPONSIVE_AFTER = EnvironmentVariable(
    "UNRESPONSIVE_AFTER",
    _seconds(0),
    "3",
    "how long a rank may leave a ping unanswered before it is reported as unresponsive",
    "host agent, worker",
)
KEPT_DIR = EnvironmentVariable(
    "KEPT_DIR",
    _text("the path of a folder"),
    "",
    "the folder that contains those of kept meshes",
    "controller",
    shown_default="`<tmp>/monarch-kernel-<uid>/kept`",
)
BACKLOG = EnvironmentVariable(
    "BACKLOG",
    _BYTES,
    "1048576",
    "how much output of a kept rank is shown to a controller that attaches again",
    "worker of a kept mesh",
)

# -- workspace sync ------------------------------------------------------------------------------

SYNC_FOLDER = EnvironmentVariable(
    "SYNC_FOLDER",
    _text("the path of a folder"),
    "",
    "where a host keeps the workspaces and environments that are synced to it",
    "agents of workspace sync, ranks",
    shown_default="`~/.cache/monarch_kernel/sync`",
)
SYNC_KEEP = EnvironmentVariable(
    "SYNC_KEEP",
    _BYTES,
    "10737418240",
    "how much content outside of trees a host keeps for rollback and reuse; beyond that, the oldest is removed",
    "agents of workspace sync",
)

# -- calls ---------------------------------------------------------------------------------------

CAST_FANOUT = EnvironmentVariable(
    "CAST_FANOUT",
    _whole(1),
    "16",
    "the number of host agents to which a process sends a cast directly; beyond that, agents forward it as a tree",
    "controller, ranks",
)
ERROR_GRACE = EnvironmentVariable(
    "ERROR_GRACE",
    _seconds(0),
    "1",
    "how long a call that has failed on one rank waits for the others, so that one error covers all failures",
    "controller, ranks",
)
SEGMENT_THRESHOLD = EnvironmentVariable(
    "SEGMENT_THRESHOLD",
    _BYTES,
    "131072",
    "smaller buffers of a message (in total) are sent through the socket, others in shared memory",
    "all",
)
DIRECT_THRESHOLD = EnvironmentVariable(
    "DIRECT_THRESHOLD",
    _BYTES,
    "1048576",
    "from this size on, the body of a message to another host is sent directly, by the data plane, and not through "
    "the host agents; 0: never",
    "all",
)
SEGMENT_KEEP = EnvironmentVariable(
    "SEGMENT_KEEP",
    _BYTES,
    "1073741824",
    "how much free shared memory a process keeps for its next messages",
    "all",
)
SEGMENT_LIMIT = EnvironmentVariable(
    "SEGMENT_LIMIT",
    _BYTES,
    _quarter_of_memory,
    "how much shared memory the messages of one process may use; beyond that, buffers are sent through the socket",
    "all",
    shown_default="a quarter of the memory",
)

# -- the debugger --------------------------------------------------------------------------------

POST_MORTEM = EnvironmentVariable(
    "POST_MORTEM",
    _seconds(0),
    "300",
    "how long the frames of a failed endpoint or cell are kept for post-mortem debugging; 0: not at all",
    "controller, ranks",
)
ORPHANED_STOPS = EnvironmentVariable(
    "ORPHANED_STOPS",
    _one_of("resume", "end"),
    "resume",
    "what stopped ranks of a kept mesh do when their controller has ended",
    "ranks",
)

# -- the data plane ------------------------------------------------------------------------------

#: All backends, best first. ``local``: within one process; ``cuda_ipc``: GPU memory within one host; ``cma``:
#: cross-memory attach within one host; ``segment``: through shared memory, with the help of the owner of the memory.
#: The others work between hosts.
BACKENDS = ("local", "cuda_ipc", "cma", "segment", "ibverbs", "tcp")
ENCRYPTED, TRUSTED_NETWORK = "encrypted", "trusted-network"

RDMA_BACKEND = EnvironmentVariable(
    "RDMA_BACKEND",
    _one_of("auto", *BACKENDS),
    "auto",
    "forces a backend; `auto` selects one for each pair of processes",
    "all",
)
RDMA_TCP = EnvironmentVariable(
    "RDMA_TCP",
    _one_of(ENCRYPTED, TRUSTED_NETWORK),
    ENCRYPTED,
    "whether data may be sent by TCP without encryption",
    "all",
)
RDMA_TCP_FALLBACK = EnvironmentVariable(
    "RDMA_TCP_FALLBACK",
    _FLAG,
    "",
    "0: an error instead of TCP between hosts, unless TCP is forced; 1: TCP without a warning",
    "all",
    shown_default="TCP, with a warning",
)
RDMA_STREAMS = EnvironmentVariable(
    "RDMA_STREAMS",
    _whole(0),
    _one_per_core,
    "connections that share a large transfer by TCP",
    "all",
    shown_default="one per core, up to 4",
)
RDMA_THREADS = EnvironmentVariable(
    "RDMA_THREADS",
    _whole(0),
    _one_per_core,
    "threads that share a large copy within a host",
    "all",
    shown_default="one per core, up to 4",
)
RDMA_HUGEPAGES = EnvironmentVariable(
    "RDMA_HUGEPAGES",
    _BYTES,
    "8388608",
    "registered memory of at least this size is moved to huge pages; 0: never",
    "all",
)
RDMA_DEVICE = EnvironmentVariable(
    "RDMA_DEVICE",
    _text("names of cards as `ibv_devices` lists them, with or without `:PORT`, separated by commas"),
    "",
    "the RDMA cards to use",
    "all",
    shown_default="one of the fastest ports",
)
RDMA_GID_INDEX = EnvironmentVariable(
    "RDMA_GID_INDEX",
    _INDEX,
    "",
    "RoCE: the entry of the port's address table to use, on all hosts",
    "all",
    shown_default="the best that both sides have",
)
RDMA_QUEUE_PAIRS = EnvironmentVariable(
    "RDMA_QUEUE_PAIRS",
    _whole(1),
    "4",
    "queue pairs to one owner, over which a large transfer is spread",
    "all",
)
RDMA_REGIONS = EnvironmentVariable(
    "RDMA_REGIONS",
    _whole(0),
    "64",
    "how many pieces of memory stay registered for later transfers, per card",
    "all",
)
RDMA_REGION_BYTES = EnvironmentVariable(
    "RDMA_REGION_BYTES",
    _BYTES,
    "17179869184",
    "how much memory stays registered for later transfers, per card",
    "all",
)

AUDIT_LOG = EnvironmentVariable(
    "AUDIT_LOG",
    _text("the path of a file"),
    "",
    "a kernel appends the user, source and ranks of each run to it, as JSON lines",
    "kernel",
    shown_default="none: nothing is written",
)
AUDIT_TEXT = EnvironmentVariable(
    "AUDIT_TEXT",
    _FLAG,
    "0",
    "1: the audit log contains the text of cells, not only its digest",
    "kernel",
)

ENGINE = EnvironmentVariable(
    "ENGINE",
    _one_of("monarch_kernel", "torchmonarch"),
    "monarch_kernel",
    "the runtime under the kernel, the magics and the debugger",
    "kernel",
)
JOIN = EnvironmentVariable(
    "JOIN",
    _text("up to 64 letters, digits, `.`, `_` and `-`"),
    "",
    "the name under which notebooks can join this process (`monarch_kernel.join`)",
    "ranks of jobs that others start",
    shown_default="the name of the script",
)
JOIN_HOLD = EnvironmentVariable(
    "JOIN_HOLD",
    _seconds(0),
    "0",
    "how long such a process waits after a fatal exception for a notebook to inspect its frames",
    "ranks of jobs that others start",
)

JOIN_ON_HANG = EnvironmentVariable(
    "JOIN_ON_HANG",
    _one_of("", "dump", "hold"),
    "",
    "write a report when such a job makes no progress; `hold`: also hold ranks that fail later, as `JOIN_HOLD` does",
    "ranks of jobs that others start",
    shown_default="no report",
)
JOIN_HANG_AFTER = EnvironmentVariable(
    "JOIN_HANG_AFTER",
    _seconds(1),
    "300",
    "how long a job may make no progress before that report is written",
    "ranks of jobs that others start",
)
JOIN_REPORTS = EnvironmentVariable(
    "JOIN_REPORTS",
    _text("the path of a folder"),
    "",
    "where that report is written",
    "ranks of jobs that others start",
    shown_default="`NAME-reports` in the working folder",
)
JOIN_MEET = EnvironmentVariable(
    "JOIN_MEET",
    _Kind(_meeting_point, "`host:port`"),
    "",
    "the address at which such processes on several machines and notebooks meet (`docs/join.md`)",
    "ranks of jobs that others start, `%mesh join`, `%mesh jobs`",
    shown_default="none",
)
JOIN_WEBHOOK = EnvironmentVariable(
    "JOIN_WEBHOOK",
    _text("a URL (`https`, or `http` of this machine), or the path of a file that you own and that contains it"),
    "",
    "the address to which such a report is posted; it is never shown",
    "ranks of jobs that others start, `monarch-kernel report --post`",
    shown_default="none",
)

# -- variables that our processes set for the processes they start; not for users ------------------

#: The run folder of a host agent, which identifies its processes.
RUN = "MONARCH_KERNEL_RUN"
#: The controller for which a worker's rank was started.
ROOT = "MONARCH_KERNEL_ROOT"
#: The host agent that started a process.
AGENT = "MONARCH_KERNEL_AGENT"
#: The job and rank under which notebooks can join this process. A child process that inherits this value cannot be
#: joined.
JOIN_RANK = "MONARCH_KERNEL_JOIN_RANK"
#: The job, and the number of the host, for which a launcher started a worker.
JOB = "MONARCH_KERNEL_JOB"
#: The Slurm job id, in a batch job whose script is the controller.
SLURM_BATCH = "MONARCH_KERNEL_SLURM_BATCH"
#: The address of the Pod, which Kubernetes sets.
POD_ADDRESS = "MONARCH_KERNEL_POD_IP"
#: The name of the Pod, which Kubernetes sets.
POD_NAME = "MONARCH_KERNEL_POD_NAME"
#: The key of a worker. The worker removes the variable before it starts any process.
WORKER_KEY = "MONARCH_KERNEL_WORKER_KEY"
#: Set if ``import monarch`` is to import this package.
IMPORTS = "MONARCH_KERNEL_IMPORTS"
#: The display module of a rank whose controller is a notebook.
DISPLAY = "MONARCH_KERNEL_DISPLAY"
