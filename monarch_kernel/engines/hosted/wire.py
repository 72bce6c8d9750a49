"""The messages between a controller's tools and the ranks of another runtime."""

from __future__ import annotations

import msgspec


class EnterRank(msgspec.Struct, array_like=True, tag=1):
    """The first message to a rank: how it fits into the controller's mesh.

    Attributes:
        controller: the controller's proc id, to which answers are addressed.
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


class RankEntered(msgspec.Struct, array_like=True, tag=2):
    """The answer to `EnterRank`: where the rank runs."""

    uid: str
    rank: int
    host: str
    pid: int


class SpawnActor(msgspec.Struct, array_like=True, tag=3):
    """Create an actor; ``body`` is the pickle of its class and the arguments of its constructor."""

    sender: str
    uid: str
    actor: str
    name: str
    call: int
    body: bytes


class CallActor(msgspec.Struct, array_like=True, tag=4):
    """Call an endpoint; ``body`` is the pickle of its arguments. If ``call`` is 0, no answer is expected."""

    sender: str
    actor: str
    endpoint: str
    call: int
    origin: str
    body: bytes


class CallAnswer(msgspec.Struct, array_like=True, tag=5):
    """The answer of a proc to a call or a spawn; ``status`` and ``body`` are as in ``protocol.messages.Reply``."""

    proc: str
    call: int
    status: int
    body: bytes


class StopToolActor(msgspec.Struct, array_like=True, tag=6):
    """Stop an actor after its current message."""

    sender: str
    actor: str
    call: int


class ToolOutput(msgspec.Struct, array_like=True, tag=7):
    """Bytes that a rank wrote into one of its output pipes."""

    uid: str
    rank: int
    stream: int
    data: bytes


class InterruptRank(msgspec.Struct, array_like=True, tag=8):
    """Interrupt the endpoints that run in a rank. The answer has their names.

    If ``cells`` is set, only endpoints that run for cells with this id prefix are interrupted, and no cell of the rank
    itself.
    """

    sender: str
    call: int
    cells: str


class ControllerBeat(msgspec.Struct, array_like=True, tag=9):
    """Heartbeat of the controller."""

    controller: str


class LeaveRank(msgspec.Struct, array_like=True, tag=10):
    """The controller leaves on purpose: its actors end, and ranks that it has stopped continue."""

    controller: str


class DriveRank(msgspec.Struct, array_like=True, tag=11):
    """A viewer of a joined job asks for control; with ``force``, even if another viewer has it.

    Answered by `RankDriver`.
    """

    controller: str
    force: bool


class RankDriver(msgspec.Struct, array_like=True, tag=12):
    """The viewer that controls a rank of a joined job: only this viewer may stop the rank and run code in it.

    Attributes:
        uid, rank: the rank, in the receiver's mesh.
        driver: the controller's id; "" if there is none.
        host, pid, since: where it runs, and when it took control (seconds since 1970).
    """

    uid: str
    rank: int
    driver: str
    host: str
    pid: int
    since: float


class RankReleased(msgspec.Struct, array_like=True, tag=13):
    """A rank has released what this viewer had stopped, because the viewer was silent for this many seconds."""

    uid: str
    rank: int
    stops: int
    silent: float


class RankFault(msgspec.Struct, array_like=True, tag=14):
    """A fault of the tools in a rank, which did not affect the rank's program; ``count``: the number of such faults."""

    uid: str
    rank: int
    count: int
    text: str


ToolMessage = (
    EnterRank
    | RankEntered
    | SpawnActor
    | CallActor
    | CallAnswer
    | StopToolActor
    | ToolOutput
    | InterruptRank
    | ControllerBeat
    | LeaveRank
    | DriveRank
    | RankDriver
    | RankReleased
    | RankFault
)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ToolMessage).decode
