"""The host agent's state of each rank, and its client for fork servers."""

from __future__ import annotations

import math
import os
import re
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from monarch_kernel.protocol.messages import LogText, ProcExited, ProcSpec
from monarch_kernel.protocol.output_records import beginning
from monarch_kernel.runtime.host import forkserver
from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller

#: The maximum stored output of each of a rank's two streams (bytes).
LOG_LIMIT = 16 * 1024 * 1024
#: The size of the first read when only the end of a log is requested (bytes).
_TAIL_BYTES = 64 * 1024


class OutputLog:
    """The newest output of one stream of one rank, in two alternating files of half the limit each."""

    def __init__(self, path: str, limit: int = LOG_LIMIT) -> None:
        self._path = path
        self._half = limit // 2
        self._fd = -1
        self._size = 0
        self._old = 0
        self.dropped = 0

    def append(self, data: bytes) -> None:
        """Store ``data``.

        The older half is dropped when the log is full. A full disk loses log entries, not forwarded output.
        """
        try:
            if self._size and self._size + len(data) > self._half:
                os.close(self._fd)
                self._fd = -1
                os.replace(self._path, self._path + ".old")
                self.dropped += self._old
                self._old, self._size = self._size, 0
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            self._size += os.write(self._fd, data)
        except OSError:
            self.dropped += len(data)

    def read(self, tail: int = 0) -> bytes:
        """Return the kept output: records and plain bytes; decode it before cutting it.

        Args:
            tail: the number of lines needed; reads only as much of the end as holds them. 0: everything.
        """
        size = _TAIL_BYTES
        while tail > 0:
            newest = _contents(self._path, size)
            if len(newest) < size:
                newest = _contents(self._path + ".old", size - len(newest)) + newest
            if len(newest) < size:  # the whole log was read
                return newest
            newest = newest[beginning(newest) :]
            if newest.count(b"\n") > tail:
                return newest
            size *= 8
        return b"".join(map(_contents, (self._path + ".old", self._path)))

    def close(self) -> None:
        """Stop storing output. The stored output can still be read."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Delete the stored output."""
        self.close()
        for path in (self._path, self._path + ".old"):
            try:
                os.unlink(path)
            except OSError:
                pass


def _contents(path: str, last: int = 0) -> bytes:
    """Return a file's content, or only its ``last`` bytes; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last))
            return file.read()
    except OSError:
        return b""


#: The first bytes of the output of Python's fault handler when a rank crashes.
_BEGIN = b"Fatal Python error: "
# Patterns are compiled with the first dump, because every agent loads this module at its start.
# Lines of a dump, as CPython's traceback.c writes them.
_DUMP = (
    rb"Fatal Python error: |Stack \(|(?:Current thread|Thread) 0x|  File \"|  \.\.\.|  <|<truncated|Extension modules: "
    rb"|\s*$"
)
_FRAME = rb'  File "(?P<file>[^"]*)", line \d+'
# Frames between the start of a rank and user code: the runtime's, and those of the interpreter's start.
_RUNTIME = rb"[/\\]monarch_kernel[/\\](?:runtime|protocol|kernel)[/\\]|^<string>$|^<frozen runpy>$"


class CrashFilter:
    """Passes a rank's stderr through, but drops runtime frames and the list of extension modules from crash dumps.

    A dump is the last output of a process, but that process may be a child of the rank, so other lines may follow.
    """

    def __init__(self) -> None:
        self._in_dump = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part of the next bytes to show."""
        if not self._in_dump:
            at = data.find(_BEGIN)
            if at < 0:
                return data
            self._in_dump = True
            return data[:at] + self._lines(data[at:])
        return self._lines(data)

    def close(self) -> bytes:
        """Return the part of an unfinished last line to show."""
        rest, self._rest = self._rest, b""
        return rest if self._shows(rest) else b""

    def _lines(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown: list[bytes] = []
        for at, line in enumerate(lines):
            if not re.match(_DUMP, line):
                self._in_dump = False
                rest = b"\n".join([*lines[at:], self._rest])
                self._rest = b""
                return b"".join(shown) + rest
            if self._shows(line):
                shown.append(line + b"\n")
        return b"".join(shown)

    def _shows(self, line: bytes) -> bool:
        frame = re.match(_FRAME, line)
        if frame is not None:
            return not re.search(_RUNTIME, frame["file"])
        return bool(line.strip()) and not line.startswith(b"Extension modules: ")


class Proc:
    """The state of one rank, from the request to start it until the agent ends."""

    def __init__(self, spec: ProcSpec, mesh: str, owner: str, root: str, logs: str) -> None:
        self.id = spec.id
        self.rank = spec.rank
        self.address = spec.address
        self.mesh = mesh
        self.owner = owner
        self.root = root
        self.tool = False  # a tool's: it ends with the controller on every host
        self.watchers: set[str] = set()
        self.pid = 0
        self.state = "starting"
        self.started = time.monotonic()
        self.exit: ProcExited | None = None
        self.drained = False
        self.stopping = ""  # the reason, if it was asked to stop
        self.withdrawn = False  # its host shuts down without its owner's request
        self.killing = ""
        self.devices = ""  # the GPUs that it was given, if not all of this host
        self.start_limit = 0.0  # the time limit for its start (seconds); 0: none
        self.request: forkserver.Fork | None = None
        self.server: ForkClient | None = None
        self.pipes: dict[int, int] = {}  # stream -> descriptor to read from
        self.far_ends: list[int] = []  # the write ends, kept open until the rank has them
        self.marked = 0  # the last mark in its output that a reply has named
        self.logs = {n: OutputLog(os.path.join(logs, f"{spec.id}.{n}.log")) for n in (1, 2)}
        self.crash = CrashFilter()  # selects the stderr output to forward; the log has all of it
        self._cpu_at = (self.started, 0.0)

    def log_text(self, tail: int) -> LogText:
        """Return its kept output; see `OutputLog.read`."""
        out, err = (self.logs[stream].read(tail) for stream in (1, 2))
        return LogText(self.id, out, err, 0 if tail else sum(kept.dropped for kept in self.logs.values()))

    @property
    def asked(self) -> str:
        """The reason of its owner's request to stop, which makes its end no failure; "" without a request."""
        return "" if self.withdrawn else self.stopping

    def belongs_to(self, process: str) -> bool:
        """Return whether it ends with this process: its owner, or the controller above the owner."""
        return process in (self.owner, self.root)

    def audience(self) -> set[str]:
        """Return the processes to notify of its start and end."""
        return {self.owner, *self.watchers}

    def open_pipes(self) -> list[int]:
        """Create the output pipes; return their write ends."""
        for stream in (1, 2):
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            self.pipes[stream] = read
            self.far_ends.append(write)
        return self.far_ends

    def close_far_ends(self) -> None:
        """Close the write ends once the rank has them. While the agent held them open, it would see no end of file."""
        for fd in self.far_ends:
            os.close(fd)
        self.far_ends.clear()

    def is_exiting(self) -> bool:
        """Return whether the kernel is tearing it down: descriptors are closed before the exit is reported."""
        if not self.pid:
            return False
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return True
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)

    def usage(self) -> tuple[int, float]:
        """Return resident bytes now, and CPU use in percent of one core since the last call."""
        rss, cpu = cpu_and_memory(self.pid)
        now = time.monotonic()
        before, used = self._cpu_at
        self._cpu_at = (now, cpu)
        percent = 100 * (cpu - used) / (now - before) if now > before else 0.0
        return rss, round(max(0.0, percent), 1)


def cpu_and_memory(pid: int) -> tuple[int, float]:
    """Return the resident bytes of a process, and the processor seconds that it has used; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0.0
    return int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS


_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 0x4


# -- causes of death --------------------------------------------------------------------------


class OomMonitor:
    """Detects whether the kernel's out-of-memory killer has acted recently.

    The kernel's counters do not name the killed processes, so the agent calls ``look`` periodically. A kill long before
    a process died is then not reported as its cause. If several processes were killed together, it is reported for all
    of them.

    Args:
        files: the files with counters, and the memory that each covers; default: the process's cgroup and the machine.
    """

    #: A kill at most this long before the end of a process counts as its cause (seconds).
    RECENT = 3.0

    def __init__(self, files: Sequence[tuple[str, str]] | None = None) -> None:
        self._files = [*_cgroup_files(), ("/proc/vmstat", _MACHINE)] if files is None else list(files)
        self._counts = self._read()
        self._struck = [-math.inf] * len(self._files)
        self._limited = -math.inf

    def look(self, now: float) -> None:
        """Read the counters and note their changes since the last call."""
        counts = self._read()
        for k, ((kills, hits), (more_kills, more_hits)) in enumerate(zip(self._counts, counts, strict=True)):
            if more_kills > kills:
                self._struck[k] = now
            if more_hits > hits:
                self._limited = now
        self._counts = counts

    def news(self, now: float) -> str:
        """Return where memory has just run out ("" if nowhere)."""
        self.look(now)
        for (_path, where), struck in zip(self._files, self._struck, strict=True):
            if now - struck <= self.RECENT:
                # A cgroup also counts its processes that were killed because the machine ran out of memory.
                limited = now - self._limited <= self.RECENT
                return f"the memory {where if limited else _MACHINE} was used up"
        return ""

    def _read(self) -> list[tuple[int, int]]:
        """For each file: the number of kills, and how often a limit was hit."""
        return [(_oom_kills(path), 0 if where == _MACHINE else _limit_hits(path)) for path, where in self._files]


_MACHINE = "of this machine"


def _cgroup_files() -> list[tuple[str, str]]:
    """Return the counter files of this process's cgroups and their ancestors, whose limits also apply."""
    files: list[tuple[str, str]] = []
    for line in _contents("/proc/self/cgroup").decode().splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        root, name = ("/sys/fs/cgroup", "memory.events") if not controllers else _VERSION_1
        if controllers not in ("", "memory"):
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            files.append(("/".join([root, *parts[:depth], name]), "limit of its cgroup"))
    return [(path, where) for path, where in files if os.path.exists(path)]


_VERSION_1 = ("/sys/fs/cgroup/memory", "memory.oom_control")


def _limit_hits(path: str) -> int:
    """Return how often the memory limit of a cgroup was hit; ``path`` is the file that counts its kills."""
    if path.endswith(_VERSION_1[1]):
        text = _contents(os.path.join(os.path.dirname(path), "memory.failcnt")).strip()
        return int(text) if text.isdigit() else 0
    return _counter(path, b"oom ")


def _oom_kills(path: str) -> int:
    return _counter(path, b"oom_kill ")


def _counter(path: str, name: bytes) -> int:
    for line in _contents(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


# -- talking to a fork server -----------------------------------------------------------------


class ForkClient:
    """The agent's end of a fork server's (or template's) socket; never blocks."""

    def __init__(
        self, sock: socket.socket, poller: Poller, on_event: Callable[[ForkClient, forkserver.Event | None], None]
    ) -> None:
        self.ready = False  # whether a template has loaded its modules
        self.failed: forkserver.TemplateFailed | None = None  # why it no longer serves
        self.last_used = time.monotonic()
        self._sock = sock
        self._poller = poller
        self._on_event = on_event
        self._queue: deque[tuple[forkserver.Request, list[int], bool]] = deque()
        sock.setblocking(False)
        poller.register(sock.fileno(), self._on_ready)

    def send(self, request: forkserver.Request, fds: list[int], close: bool = False) -> None:
        """Send a request; ``close``: close the descriptors after sending them."""
        self.last_used = time.monotonic()
        self._queue.append((request, fds, close))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            request, fds, close = self._queue[0]
            try:
                forkserver.send_packet(self._sock, request, fds)
            except BlockingIOError:
                self._poller.modify(self._sock.fileno(), EPOLLIN | EPOLLOUT)
                return
            except OSError:
                self._queue.clear()  # the next read reports the end of the socket
                return
            self._queue.popleft()
            if close:
                for fd in fds:
                    os.close(fd)
        self._poller.modify(self._sock.fileno(), EPOLLIN)

    def _on_ready(self, events: int) -> None:
        if events & EPOLLOUT:
            self._flush()
        if not events & (EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        for _ in range(64):  # then let the poller serve other descriptors
            try:
                event, _fds = forkserver.receive_packet(self._sock, forkserver.decode_event)
            except BlockingIOError:
                return
            except OSError:
                event = None
            if event is None:
                self.close()
            self._on_event(self, event)
            if event is None:
                return

    def close(self) -> None:
        """Close the socket, which makes a template exit together with its ranks."""
        if self._sock.fileno() >= 0:
            self._poller.unregister(self._sock.fileno())
            self._sock.close()
