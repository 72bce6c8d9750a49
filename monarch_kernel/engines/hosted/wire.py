"""The messages between a controller's tools and the ranks of another runtime.

Calls, answers, actors and output have the messages of this package's own runtime. The others are defined here. What
crosses is `<u32>` length of the header, the header, the body, as inside ``Routed``.
"""

from __future__ import annotations

import struct

import msgspec

from monarch_kernel.protocol.messages import Call, Create, Interrupt, OutputChunk, Reply, StopActor
from monarch_kernel.protocol.serialize import Body

_LENGTH = struct.Struct("<I")


class EnterRank(msgspec.Struct, array_like=True, tag=101):
    """The first message to a rank: how it fits into the controller's mesh.

    Attributes:
        controller: the controller's proc id.
        uid, name: id and name of the mesh.
        labels, sizes: the shape of the mesh.
        silence: the time without a message after which the rank releases what this controller has stopped (seconds).
        output: whether all output of the process goes to this controller, or only output of its cells.
        rank: the rank's position in the mesh; -1 if the other runtime assigns it.
        hold: how long stopped ranks stay stopped after the controller's end (seconds).
        host, pid: where the controller runs, for other viewers of the same job.
        drive: whether to take control of the job from any other viewer.
        looks_on: whether it only reads and leaves, like a program that writes a report; failures stay held for a
            viewer.
    """

    controller: str
    uid: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    silence: float
    output: bool
    rank: int = -1
    hold: float = 0.0
    host: str = ""
    pid: int = 0
    drive: bool = False
    looks_on: bool = False


class RankEntered(msgspec.Struct, array_like=True, tag=102):
    """The answer to `EnterRank`: where the rank runs."""

    host: str
    pid: int


class ControllerBeat(msgspec.Struct, array_like=True, tag=103):
    """Heartbeat of the controller."""


class LeaveRank(msgspec.Struct, array_like=True, tag=104):
    """The controller leaves on purpose: its actors end, and ranks that it has stopped continue."""


class DriveRank(msgspec.Struct, array_like=True, tag=105):
    """A viewer of a joined job asks for control; with ``force``, even if another viewer has it.

    Answered by `RankDriver`.
    """

    force: bool


class RankDriver(msgspec.Struct, array_like=True, tag=106):
    """The viewer that controls a rank of a joined job: only this viewer may stop the rank and run code in it.

    Attributes:
        driver: the controller's id; "" if there is none.
        host, pid, since: where it runs, and when it took control (seconds since 1970).
    """

    driver: str
    host: str
    pid: int
    since: float


class RankReleased(msgspec.Struct, array_like=True, tag=107):
    """A rank has released what this viewer had stopped, because the viewer was silent for this many seconds."""

    stops: int
    silent: float


class RankFault(msgspec.Struct, array_like=True, tag=108):
    """A fault of the tools in a rank, which did not affect the rank's program; ``count``: the number of such faults."""

    count: int
    text: str


ToolMessage = (
    Call
    | Reply
    | Create
    | StopActor
    | Interrupt
    | OutputChunk
    | EnterRank
    | RankEntered
    | ControllerBeat
    | LeaveRank
    | DriveRank
    | RankDriver
    | RankReleased
    | RankFault
)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ToolMessage).decode


def pack(header: ToolMessage | bytes, body: Body = b"") -> bytes:
    """Return the bytes of a message with this header, which may be encoded already."""
    encoded = header if isinstance(header, bytes) else encode(header)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, *(body if type(body) is list else (body,))))


def unpack(data: bytes) -> tuple[ToolMessage, memoryview]:
    """Return the header and the body of a message.

    Raises:
        struct.error, msgspec.MsgspecError: it is none.
    """
    (length,) = _LENGTH.unpack_from(data)
    view = memoryview(data)[_LENGTH.size :]
    return decode(view[:length]), view[length:]
