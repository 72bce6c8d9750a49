"""Messages by which host agents relay casts and combine their replies (tags 60 to 69).

A cast is one message to many ranks. Its sender maintains a tree of the host agents that it casts to. A *group* is a set
of ranks with the part of that tree that leads to them. A group is installed once; each cast then names it and carries
the message once. ``runtime.node.relay`` documents the protocol.
"""

from array import array
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from monarch_kernel.protocol.refs import Message, ProcRef

#: A status in CastReplies, in addition to those of a Reply: the whole proc is gone; the body is a Death.
GONE = 3
#: In place of a body's size: the body is the same as the previous one.
SAME = 0xFFFF_FFFF_FFFF_FFFF


class CastBranch(msgspec.Struct, array_like=True, frozen=True):
    """One host agent in a group's tree, and the members on its host."""

    agent: ProcRef
    # The number of agents in this branch, including this one: a receiver that steps over branches of none never ends.
    size: Annotated[int, msgspec.Meta(ge=1)]
    procs: list[str]
    ranks: list[int]  # the position of each proc in the addressed slice


class CastGroup(Message, tag=60):
    """The routes of a group's casts, for the receiver and the agents below it.

    ``branches`` are in depth-first order; the first one is the receiver's own.
    """

    group: int
    source: ProcRef
    branches: Annotated[list[CastBranch], msgspec.Meta(min_length=1)]


class Cast(Message, tag=61):
    """One message to all members of a group. Body: the body of the message."""

    group: int
    source: str
    number: int  # increases with every cast of the source
    header: bytes  # the message's header, as it is for rank 0 at the source
    answered: bool  # whether the members' replies are collected; if not, the cast is only acknowledged
    oldest: int  # all casts of the source before this one are over
    over: list[int] = []  # further casts of this group that are over
    after: dict[str, int] = {}  # by agent: how many single messages from the source must precede this cast


class CastReplies(Message, tag=62):
    """Replies of several ranks to one cast. Body: the bodies of the replies, one after the other.

    ``ranks`` have 4 bytes each, ``sizes`` (of the bodies) 8.
    """

    source: str
    number: int
    complete: bool  # these are the branch's last replies
    ranks: bytes = b""
    sizes: bytes = b""
    statuses: bytes = b""  # one byte each; empty: all are OK
    buffers: dict[int, tuple[int, ...]] = {}  # the buffers of a reply, by rank


class CastLost(Message, tag=63):
    """Up a tree: the sender can no longer reach this agent below it.

    Down a tree: the source has declared the agent dead; its parent must not wait for it.
    """

    source: str
    agent: str


class CastsOver(Message, tag=64):
    """Down a group's tree: the source has all replies to these casts; no agent needs to keep them."""

    source: str
    group: int
    numbers: list[int]


class CastDrop(Message, tag=65):
    """Down a group's tree: the group is no longer used."""

    source: str
    group: int


class CastAnswers:
    """Collects replies of several ranks to one cast for one message."""

    __slots__ = ("_last", "bodies", "buffers", "nbytes", "ranks", "sizes", "statuses")

    def __init__(self) -> None:
        self.ranks = array("I")
        self.sizes = array("Q")
        self.statuses = bytearray()
        self.buffers: dict[int, tuple[int, ...]] = {}
        self.bodies: list[Any] = []
        self.nbytes = 0
        self._last: bytes | None = None

    def add(self, rank: int, status: int, body: bytes) -> None:
        """Add one rank's reply without large buffers."""
        self.ranks.append(rank)
        self.statuses.append(status)
        if body == self._last:
            self.sizes.append(SAME)
            return
        self._last = body
        self.sizes.append(len(body))
        self.bodies.append(body)
        self.nbytes += len(body)

    def add_large(self, rank: int, status: int, pieces: list[Any], buffers: tuple[int, ...]) -> None:
        """Add one rank's reply, whose body consists of these pieces."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        self.ranks.append(rank)
        self.statuses.append(status)
        self.buffers[rank] = buffers
        self._last = None
        self.sizes.append(size)
        self.bodies += pieces
        self.nbytes += size

    def extend(self, message: CastReplies, body: Any) -> None:
        """Add the replies of a branch."""
        count = len(message.ranks) // 4
        if not count:
            return
        self.ranks.frombytes(message.ranks)
        self.sizes.frombytes(message.sizes)
        self.statuses += message.statuses or bytes(count)
        self.buffers.update(message.buffers)
        self._last = None
        self.bodies.append(body)
        self.nbytes += len(body)

    def __len__(self) -> int:
        return len(self.ranks)

    def message(self, source: str, number: int, complete: bool) -> CastReplies:
        """Create the header of the message. Its body is ``bodies``."""
        statuses = bytes(self.statuses) if any(self.statuses) else b""
        return CastReplies(source, number, complete, self.ranks.tobytes(), self.sizes.tobytes(), statuses, self.buffers)


def unpack(message: CastReplies, body: object) -> tuple[list[int], bytes, list[Any]]:
    """Split a message into ranks, their statuses (empty: all OK) and their bodies."""
    ranks = array("I")
    ranks.frombytes(message.ranks)
    return ranks.tolist(), message.statuses, list(_bodies(message, body))


def _bodies(message: CastReplies, body: Any) -> Iterator[object]:
    sizes = array("Q")
    sizes.frombytes(message.sizes)
    # Slices of bytes are cheaper than views, but large bodies must not be copied.
    whole: Any = body if message.buffers else bytes(body)
    at = 0
    last = b""
    for size in sizes:
        if size != SAME:
            last = whole[at : at + size]
            at += size
        yield last
