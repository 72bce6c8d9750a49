"""Where joinable ranks are, and the connections to them. This machine is one place; another one is a relay's."""

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
from typing import Any, Protocol, TypeVar

from monarch_kernel.engines.join.announcements import RankAnnouncement, announcement_of, announcements, pid_space
from monarch_kernel.engines.join.frame_loop import FrameLoop
from monarch_kernel.engines.join.identity import RankIdentity
from monarch_kernel.engines.join.outside_stacks import OutsideRead, read_stacks
from monarch_kernel.protocol.socket_peers import is_ours, peer_of

T = TypeVar("T")
R = TypeVar("R")

#: How many machines are asked at once.
_AT_ONCE = 32
#: How long ranks may take to say who they are (seconds).
HELLO = 2.0
#: The same for those that are only listed, and how often they are asked (seconds).
ASK, ASK_AGAIN = 0.5, 5.0
#: By process, when it is to be asked again for its rank, and what it has said.
Asked = dict[tuple[object, ...], tuple[float, RankIdentity]]


class RankLink(Protocol):
    """A connection to a rank, whose tools are at the other end."""

    def send(self, *parts: bytes) -> None:
        """Send one message, without waiting."""
        ...

    def close(self) -> None:
        """Let go of the rank."""
        ...


@dataclass
class JoinableRank:
    """A joinable rank.

    Attributes:
        announced: what it says of itself now.
        near: whether its process id is one of this machine, as this process sees it.
        version: of the package there.
        faults: the last ones of tools in it.
        fault_count: how many there were since it began.
        silent: it has not said who it is, as it is stopped, or native code holds its interpreter lock. What is known
            was announced when it began.
        held: the error after which it is held for somebody to look; "" if it is not.
        held_until: until when (seconds since 1970).
        dims: the dimensions of its job: their names and sizes; empty if the program has made none.
        moved: when its main thread has last come to another instruction (seconds since 1970); 0: that is not watched.
        issued: when it has last issued a collective, likewise.
        link: the connection to it, if one is wanted; the caller owns it.
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
        """Its rank; -1 if nobody knows it."""
        return self.announced.identity.rank

    def plain(self) -> dict[str, Any]:
        """What `found_rank` makes it from again."""
        more = {
            name: getattr(self, name)
            for name in ("silent", "version", "faults", "held", "held_until", "dims", "moved", "issued")
        }
        return {**asdict(self.announced), **more}


class RankMachines(Protocol):
    """A machine on which ranks can be found, or several."""

    @property
    def ended(self) -> bool:
        """Whether the connection to it is over."""
        ...

    def find(self, name: str = "") -> list[RankAnnouncement]:
        """The ranks of jobs of this name, or of all."""
        ...

    def connect(
        self,
        wanted: Iterable[RankAnnouncement],
        on_frame: Callable[[RankAnnouncement, bytes], None],
        on_closed: Callable[[RankAnnouncement], None],
    ) -> list[JoinableRank]:
        """Connect to these ranks, as far as they answer in time.

        Args:
            on_frame: is given each message of a rank, in order, on a thread that it must not block.
            on_closed: is told that a connection has ended, on the same thread.
        """
        ...

    def read_stacks(
        self, ranks: Sequence[RankAnnouncement], native: bool, timeout: float
    ) -> dict[RankAnnouncement, OutsideRead]:
        """Read the stacks of ranks without their help; those that could not be read in time are missing."""
        ...


class ThisMachine:
    """The ranks of this user on this machine.

    Args:
        loop: carries messages to and from them.
    """

    def __init__(self, loop: FrameLoop) -> None:
        self._loop = loop
        self._asked: Asked = {}

    @property
    def ended(self) -> bool:
        """See ``RankMachines``: it is here."""
        return False

    def find(self, name: str = "") -> list[RankAnnouncement]:
        """See ``RankMachines``."""
        return [each for each in refreshed(self._asked) if name in ("", each.name)]

    def connect(
        self,
        wanted: Iterable[RankAnnouncement],
        on_frame: Callable[[RankAnnouncement, bytes], None],
        on_closed: Callable[[RankAnnouncement], None],
    ) -> list[JoinableRank]:
        """See ``RankMachines``."""
        sockets = greet(wanted)
        found: list[JoinableRank] = []
        for rank, sock in sockets:
            announced = rank.announced
            link = self._loop.add(sock, lambda _link, frame, of=announced: on_frame(of, frame))
            link.on_closed = lambda _link, of=announced: on_closed(of)
            rank.link = link
            found.append(rank)
        return found

    def read_stacks(
        self, ranks: Sequence[RankAnnouncement], native: bool, timeout: float
    ) -> dict[RankAnnouncement, OutsideRead]:
        """See ``RankMachines``; a process id of another space cannot be read."""
        here = pid_space()
        by_pid = {each.pid: each for each in ranks if each.space == here}
        return {by_pid[pid]: read for pid, read in read_stacks(by_pid, native, timeout).items()}


def at_once(work: Callable[[T], R], places: Sequence[T]) -> list[R]:
    """Do this with each of these, all at once, as each answers when it can; the results, in their order."""
    if len(places) < 2:  # this machine alone is looked at often
        return [work(each) for each in places]
    with ThreadPoolExecutor(min(len(places), _AT_ONCE), "monarch-join-find") as pool:
        return list(pool.map(work, places))


def refreshed(asked: Asked | None = None) -> list[RankAnnouncement]:
    """The announcements of this machine. Processes that began without knowing their rank are asked for it.

    Args:
        asked: what earlier calls have learnt, so that no process is asked too often.
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
    """Connect to ranks of this machine, all at once, and let them say who they are.

    Returns:
        Them and the connections, also those that have not answered in time: they are silent.
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
    """A rank as it has answered a greeting."""
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


def _answer(sock: socket.socket, received: bytearray) -> dict[str, Any] | None:
    """The answer to a greeting; None: it is not all there yet; empty: there will be none."""
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


__all__ = [
    "HELLO",
    "JoinableRank",
    "RankLink",
    "RankMachines",
    "ThisMachine",
    "greet",
    "joinable_rank",
    "refreshed",
]
