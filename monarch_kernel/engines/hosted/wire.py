"""The messages between a controller's tools and the ranks of another runtime."""

from __future__ import annotations

import msgspec


class EnterRank(msgspec.Struct, array_like=True, tag=1):
    """The first message to a rank: what the rank is to this controller.

    Attributes:
        controller: the controller's id among the procs, which answers are addressed to.
        uid, name: of the mesh.
        labels, sizes: its shape.
        silence: the rank releases what this controller has stopped after that long without a message (seconds).
        output: whether all output of the process goes to this controller, rather than that of its cells alone.
        rank: the rank's place in the mesh; -1 if the other runtime tells it.
        hold: how long stopped ranks stay stopped after the controller's end (seconds).
        host, pid: where the controller runs, for other viewers of the same job.
        drive: take control of the job from any other viewer.
        looks_on: it only reads and leaves, as a program that writes a report does; failures stay held for a viewer.
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
    """The answer to it: where the rank is."""

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
    """Call an endpoint; ``body`` is the pickle of its arguments. ``call`` 0: no answer is wanted."""

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
    """Interrupt what runs in a rank; answered with the names of what was interrupted.

    ``cells``: only endpoints that run for cells whose ids begin so, and no cell of the rank itself.
    """

    sender: str
    call: int
    cells: str


class ControllerBeat(msgspec.Struct, array_like=True, tag=9):
    """The controller is alive."""

    controller: str


class LeaveRank(msgspec.Struct, array_like=True, tag=10):
    """The controller leaves on purpose: its actors end, and what it has stopped continues."""

    controller: str


class DriveRank(msgspec.Struct, array_like=True, tag=11):
    """A viewer of a joined job asks for control; with ``force``, whoever has it. Answered by `RankDriver`."""

    controller: str
    force: bool


class RankDriver(msgspec.Struct, array_like=True, tag=12):
    """Which viewer of a joined job has control of a rank: one that may stop it, and run code in it.

    Attributes:
        uid, rank: the rank, in the receiver's mesh.
        driver: the controller's id; "" if none has control.
        host, pid, since: where it runs, and when it took control (seconds since 1970).
    """

    uid: str
    rank: int
    driver: str
    host: str
    pid: int
    since: float


class RankReleased(msgspec.Struct, array_like=True, tag=13):
    """A rank has let go of what this viewer had stopped in it, since the viewer was silent for so many seconds."""

    uid: str
    rank: int
    stops: int
    silent: float


class RankFault(msgspec.Struct, array_like=True, tag=14):
    """A fault of the tools in a rank, which the rank's program has not felt; ``count``: how many there were."""

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
