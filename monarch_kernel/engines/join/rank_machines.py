"""Find joinable ranks on machines, and connect to them: on this machine, or on others through relays."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from monarch_kernel.engines.join.announcements import RankAnnouncement, announcement_of, announcements, pid_space
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.identity import RankIdentity
from monarch_kernel.protocol.socket_peers import is_ours, peer_of
from monarch_kernel.runtime.host import py_spy

__all__ = ["HELLO", "JoinableRank", "RankLink", "ThisMachine", "greet", "joinable_rank", "refreshed"]


# Read stacks of ranks that cannot answer, from another process of the same user, with py-spy.

#: The number of processes that are read in parallel.
_READ_AT_ONCE = 8
_NOTHING = "py-spy has read nothing"


class OutsideRead(NamedTuple):
    """The result of reading a process.

    Attributes:
        why: why it cannot answer, by its state in the operating system; "" if the state does not explain it.
        dump: py-spy's JSON; "" if there is none.
        error: why there is no dump.
    """

    why: str
    dump: str
    error: str


def read_stacks(pids: Iterable[int], native: bool, timeout: float) -> dict[int, OutsideRead]:
    """Read the stacks of processes of this machine within ``timeout`` seconds in total."""
    deadline = time.monotonic() + timeout

    def read(pid: int) -> OutsideRead:
        why = py_spy.state_of(pid)
        found = py_spy.read(pid, native, bool(why), max(0.0, deadline - time.monotonic()))
        return OutsideRead(why, found.dump, "" if found.dump else found.trouble or found.said or _NOTHING)

    pids = list(pids)
    with ThreadPoolExecutor(_READ_AT_ONCE, "monarch-join-read") as pool:
        return dict(zip(pids, pool.map(read, pids), strict=True))


T = TypeVar("T")
R = TypeVar("R")

#: The number of machines that are queried in parallel.
_AT_ONCE = 32
#: The time limit for ranks to identify themselves (seconds).
HELLO = 2.0
#: The same for ranks that are only listed, and the interval of these queries (seconds).
ASK, ASK_AGAIN = 0.5, 5.0
#: By process: when to query it again for its rank, and its last answer.
Asked = dict[tuple[object, ...], tuple[float, RankIdentity]]


class RankLink(Protocol):
    """A connection to the tools in a rank."""

    def send(self, *parts: bytes) -> None:
        """Send one message, without waiting."""
        ...

    def close(self) -> None:
        """Close the connection to the rank."""
        ...


@dataclass
class JoinableRank:
    """A joinable rank.

    Attributes:
        announced: its current announcement.
        near: whether its process id is valid on this machine, in the PID namespace of this process.
        version: its version of the package.
        faults: the last faults of tools in it.
        fault_count: the number of such faults since it began.
        silent: whether it has not identified itself, because it is stopped or native code holds its GIL. The known data
            was announced when it began.
        held: the error after which it is held for inspection; "" if it is not held.
        held_until: the end of the hold (seconds since 1970).
        dims: names and sizes of the dimensions of its job; empty if the program has created none.
        moved: when its main thread last reached another instruction (seconds since 1970); 0 if not monitored.
        issued: when it last issued a collective, likewise.
        link: the connection to it, if requested; the caller owns it.
    """

    announced: RankAnnouncement
    near: bool
    silent: bool = False
    version: str = ""
    faults: list[str] = field(default_factory=list[str])
    held: str = ""
    held_until: float = 0.0
    dims: dict[str, int] = field(default_factory=dict[str, int])
    link: RankLink | None = None
    moved: float = 0.0
    issued: float = 0.0
    fault_count: int = 0

    @property
    def rank(self) -> int:
        """Its rank; -1 if unknown."""
        return self.announced.identity.rank

    def plain(self) -> dict[str, Any]:
        """Return plain data from which `found_rank` recreates it."""
        more = {
            name: getattr(self, name)
            for name in ("silent", "version", "faults", "held", "held_until", "dims", "moved", "issued")
        }
        return {**asdict(self.announced), **more}


class ThisMachine:
    """The ranks of this user on this machine.

    Args:
        loop: carries messages to and from them.
    """

    #: Whether the connection to the machine is over. No connection is needed.
    ended = False

    def __init__(self, loop: FrameLoop) -> None:
        self._loop = loop
        self._asked: Asked = {}

    def find(self, name: str = "") -> list[RankAnnouncement]:
        """Return the ranks of jobs of this name, or of all jobs."""
        return [each for each in refreshed(self._asked) if name in ("", each.name)]

    def connect(
        self,
        wanted: Iterable[RankAnnouncement],
        on_frame: Callable[[RankAnnouncement, bytes], None],
        on_closed: Callable[[RankAnnouncement], None],
    ) -> list[JoinableRank]:
        """Connect to those of these ranks that answer in time.

        Args:
            on_frame: called with each message of a rank, in order, on a thread that it must not block.
            on_closed: called when a connection has ended, on the same thread.
        """
        found: list[JoinableRank] = []
        for rank, sock in greet(wanted):
            announced = rank.announced
            link = self._loop.add(sock, lambda _link, frame, of=announced: on_frame(of, frame))
            link.on_closed = lambda _link, of=announced: on_closed(of)
            rank.link = link
            found.append(rank)
        return found

    def read_stacks(
        self, ranks: Sequence[RankAnnouncement], native: bool, timeout: float
    ) -> dict[RankAnnouncement, OutsideRead]:
        """Read the stacks of ranks without their cooperation. Stacks that cannot be read in time are missing.

        Processes of another PID namespace cannot be read.
        """
        here = pid_space()
        by_pid = {each.pid: each for each in ranks if each.space == here}
        return {by_pid[pid]: read for pid, read in read_stacks(by_pid, native, timeout).items()}


def at_once(work: Callable[[T], R], places: Sequence[T]) -> list[R]:
    """Call ``work`` with each of these in parallel. Return the results in their order."""
    if len(places) < 2:  # this machine alone is looked at often
        return [work(each) for each in places]
    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "monarch-join-find") as pool:
        return list(pool.map(work, places))


def refreshed(asked: Asked | None = None) -> list[RankAnnouncement]:
    """Return the announcements of this machine. Processes that began without a known rank are queried for it.

    Args:
        asked: results of earlier calls, so that no process is queried too often.
    """
    asked = {} if asked is None else asked
    found = announcements()
    unsure = {each.process: each for each in found if each.identity.rank < 0}
    now = time.monotonic()
    due = [each for key, each in unsure.items() if key not in asked or now >= asked[key][0]]
    asked.update({each.process: (now + ASK_AGAIN, asked.get(each.process, (0, each.identity))[1]) for each in due})
    for rank, sock in greet(due, ASK) if due else ():
        sock.close()
        if rank.silent:
            continue
        asked[rank.announced.process] = now + ASK_AGAIN, rank.announced.identity
    return [replace(each, identity=asked[each.process][1]) if each.process in unsure else each for each in found]


def greet(wanted: Iterable[RankAnnouncement], timeout: float = HELLO) -> list[tuple[JoinableRank, socket.socket]]:
    """Connect to ranks of this machine in parallel, and wait for their greetings.

    Returns:
        The ranks and connections, including silent ones that have not answered in time.
    """
    poll = select.epoll()
    waiting: dict[int, tuple[RankAnnouncement, socket.socket, bytearray]] = {}
    found: list[tuple[JoinableRank, socket.socket]] = []
    hello = json.dumps({"hello": 1}).encode()
    try:
        for each in wanted:
            sock = _connected(each)
            if sock is not None:
                with suppress(OSError):
                    sock.send(struct.pack("<I", len(hello)) + hello)
                    waiting[sock.fileno()] = each, sock, bytearray()
                    poll.register(sock, select.EPOLLIN)
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left):
                _announced, sock, received = waiting[fd]
                answer = _answer(sock, received)
                if answer is None:
                    continue
                poll.unregister(fd)
                del waiting[fd]
                if answer:
                    found.append((joinable_rank(answer, near=True), sock))
                else:
                    sock.close()
        for announced, sock, _ in waiting.values():
            found.append((JoinableRank(announced, near=True, silent=True), sock))
    finally:
        poll.close()
    return found


def joinable_rank(answer: dict[str, Any], near: bool) -> JoinableRank:
    """Create a joinable rank from its answer to a greeting."""
    return JoinableRank(
        announcement_of(answer),
        near,
        silent=bool(answer.get("silent", False)),
        version=str(answer.get("version", "")),
        faults=list(answer.get("faults", [])),
        held=str(answer.get("held", "")),
        held_until=float(answer.get("held_until", 0.0)),
        dims=dict(answer.get("dims", {})),
        moved=float(answer.get("moved", 0.0)),
        issued=float(answer.get("issued", 0.0)),
        fault_count=int(answer.get("fault_count", 0)),
    )


def _connected(announced: RankAnnouncement) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(announced.socket)
        if is_ours(peer_of(sock)[1]):
            return sock
    except OSError:  # it has ended
        pass
    sock.close()
    return None


def _answer(sock: socket.socket, received: bytearray) -> dict[str, object] | None:
    """Parse the answer to a greeting. None: it is incomplete; empty: there will be none."""
    try:
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return {}
    if not data:
        return {}
    received += data
    if len(received) < 4:
        return None
    (size,) = struct.unpack_from("<I", received)
    if size > 1 << 20:
        return {}
    return json.loads(bytes(received[4:])) if len(received) == 4 + size else None
