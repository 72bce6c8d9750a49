"""All messages that cross a process boundary of the runtime.

A message is ``<u32 header length><u64 body length>``, the header (one of the structs below, as a MessagePack array
whose first element is the tag), and a body. Each header documents its body, usually a pickle created by ``serialize``.
``buffers`` in a header has the lengths of the out-of-band buffers that precede the pickle in the body.

This file is long because the wire protocol is one list: a new message is added next to all others and their version.
"""

# pyright: reportUnusedImport=false
# No `from __future__ import annotations` in modules of messages: msgspec would evaluate each annotation from its
# text, which takes longer than everything else in them.
import functools
import operator
import struct
from collections.abc import Callable
from typing import Any

import msgspec

import monarch_kernel.protocol.casts
import monarch_kernel.protocol.gateway_messages
import monarch_kernel.protocol.kept_mesh
import monarch_kernel.protocol.observation  # noqa: F401  # these modules define messages, too
from monarch_kernel.protocol.placement import Placement
from monarch_kernel.protocol.refs import Death, DeathKind, Message, ProcRef, Seconds, SegmentRef

#: The version of the wire that this package speaks, and the oldest one that it also understands. Two sides of different
#: versions meet if one of them understands the other's (``can_meet``); otherwise both report their versions.
#:
#: A new message, and a new last field with a default, need no new version: msgspec drops fields that a reader does not
#: know, and a reader that does not know a message names it (``runtime.node.link``). Increment ``WIRE_VERSION`` whenever
#: a field or its meaning changes, a body needs a newer reader (``serialize``), or code moves to which bodies refer:
#: actors of the tools, values of the public modules. Set ``OLDEST_WIRE`` to it as well, unless this package still
#: reads and writes what the older one does.
WIRE_VERSION = 13
OLDEST_WIRE = 13

PREFIX = struct.Struct("<IQ")

# Status of a Reply.
OK = 0
ERROR = 1  # the endpoint raised; the body is a Fault
DEAD = 2  # the actor cannot answer any more; the body is a Death


# -- links ------------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """First message on every link, from the side that connected."""

    version: int
    node: str
    pid: int
    kind: str  # "controller", "agent" or "rank"
    ref: ProcRef
    release: str = ""  # of the package, for errors
    python: str = ""  # like "3.11": functions are sent as bytecode
    answer: bool = False  # requests a Hello in return: the connecting side knows only an address
    connection: str = ""  # between gateways: the connection's name, chosen by the dialling side
    lost: tuple[str, ...] = ()  # the last connections between the two that the sender has lost
    oldest: int = 0  # the oldest version that the sender understands; 0: only its own


class Refused(Message, tag=2):
    """The accepting side rejects the connecting one, and then closes the link."""

    reason: str


# -- actors -----------------------------------------------------------------------------------


class Call(Message, tag=10):
    """Run an endpoint. Body: pickle of ``(args, kwargs)``."""

    actor: str
    endpoint: str
    call: int  # the call's number at the receiver of the reply; 0: no reply is requested
    rank: int  # position in the addressed slice
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    sender: str  # the actor instance that sent it
    buffers: tuple[int, ...] = ()
    reply_to: ProcRef | None = None  # None: the sending process
    segment: SegmentRef | None = None  # the location of the buffers, if they are not in the body
    cell: str = ""  # the notebook cell that caused it, which gets the endpoint's output
    trace: str = ""  # the id of the caller's record, a blank, and a W3C traceparent; each empty if there is none
    tensors: tuple[tuple[str, int], ...] = ()  # engines of tensors that wait for the end of this call, and their tokens
    stays: bool = False  # the result stays in the process, for the last of these engines


class Reply(Message, tag=11):
    """The answer to a call, or a value sent to a port. Body: by ``status``."""

    call: int
    rank: int
    status: int
    buffers: tuple[int, ...] = ()
    segment: SegmentRef | None = None  # the location of the buffers, if they are not in the body
    written: int = 0  # the mark after the rank's earlier output (``protocol.output_records``); 0: no new output


class Create(Message, tag=12):
    """Create an actor. Body: pickle of its class, arguments and proc mesh. Answered when ``__init__`` has run."""

    actor: str
    name: str
    call: int
    rank: int  # position in the mesh as spawned
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    owner: str  # the actor instance that spawned it
    owner_proc: ProcRef
    buffers: tuple[int, ...] = ()
    cell: str = ""  # as in Call
    inner: bool = False  # spawned on the this_proc() of that process: does not wait for its bootstrap


class StopActor(Message, tag=13):
    """Stop an actor after its current work, and run its ``__cleanup__``. Answered with a Reply."""

    actor: str
    call: int
    rank: int
    reason: str


class ActorFailed(Message, tag=14):
    """To the owner's process: one of its actors died. Body: MessagePack of a Death."""

    actor: str
    rank: int
    owner: str


class Interrupt(Message, tag=15):
    """Raise KeyboardInterrupt in every endpoint that runs here. Reply body: list of those interrupted."""

    call: int
    rank: int
    cells: str = ""  # only in endpoints that run for cells whose ids begin with this


class Bootstrap(Message, tag=16):
    """Run a callable before any actor of this proc. Body: its pickle, or empty for none."""

    call: int
    rank: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    buffers: tuple[int, ...] = ()


class EndProc(Message, tag=17):
    """Stop all actors, run their ``__cleanup__``, and exit with code 0."""

    reason: str


class Ping(Message, tag=18):
    """Answered by the polling thread, without involving any actor."""

    call: int
    rank: int


class SetLogLevel(Message, tag=19):
    """Set the level of the loggers of this proc's actors. Answered by the polling thread."""

    call: int
    rank: int
    level: int


class AskTrace(Message, tag=25):
    """Query or control the records of a trace; answered by the polling thread. Reply body: a pickle.

    The answer depends on ``order``: "clock": the time in nanoseconds; "on" (record for the sender): the time; "take":
    the time and MessagePack of a ``RecordedTrace``; "off" (after a last "take"): the same.
    """

    call: int
    rank: int
    order: str
    capacity: int = 0  # of "on": how many records are kept


class Release(Message, tag=20):
    """To a segment's owner: the sender has dropped it."""

    number: int


class Forget(Message, tag=21):
    """From a segment's owner: the segment is freed; drop any mapping of it."""

    number: int


class BodyFetched(Message, tag=26):
    """To the owner of an offered body: it has arrived, or the data plane could not fetch it."""

    number: int
    fetched: bool


class BodyAgain(Message, tag=27):
    """A body that the data plane could not fetch. Body: the offered bytes."""

    number: int


class PeersFailed(Message, tag=24):
    """To ranks that have not answered a call yet: these others have failed, so collectives with them never complete."""

    asked: tuple[str, str, str]  # the actor, the endpoint and the sender, as in the Call
    ranks: list[int]  # those that have failed


class PortGiven(Message, tag=22):
    """To a port's receiver, before the message that carries the port: which actors get it."""

    call: int
    rank: int  # whose answer it takes; 0 for the port of a channel
    actor: str  # in each of ``procs``; "" for any code there
    mesh: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    procs: tuple[ProcRef, ...]  # empty: any process may get it
    ranks: tuple[int, ...]  # of those, in the mesh


class PortLeft(Message, tag=23):
    """To a port's receiver: an actor of the sending process no longer has it.

    Body: MessagePack of a Death if the actor has ended; empty if it has released one copy.
    """

    call: int
    rank: int
    actor: str


# -- between sites ----------------------------------------------------------------------------


class Routed(Message, tag=3):
    """A message routed through gateways. Body: ``<u32>`` length of its header, its header, its body."""

    to: str
    source: str
    gateway: str  # of the receiver's site
    casts: int = 0  # the source's last cast that must precede it at the receiver's site; -1: uncounted


class Introduce(Message, tag=4):
    """To the sender's gateway: a proc that messages will be sent to, or come from."""

    ref: ProcRef
    losses: int = 0  # how often ``AgentLost`` has reported the loss of the proc's gateway to the sender


class Unreachable(Message, tag=5):
    """From a gateway: this proc can no longer be reached. Body: MessagePack of a Death."""

    proc: str


class AgentLost(Message, tag=6):
    """From a gateway to its site: a host agent (or a controller) of another site and all procs behind it are gone.

    Body: MessagePack of a Death.
    """

    agent: str


# -- host agent -------------------------------------------------------------------------------


class ProcSpec(msgspec.Struct, array_like=True, frozen=True):
    """One proc to start."""

    id: str
    address: str
    rank: int


class Launch(msgspec.Struct, array_like=True, frozen=True):
    """How the start of one proc differs from that of the others of its mesh."""

    argv: list[str] | None  # the command line of another interpreter; None: the mesh's
    env: dict[str, str | None]  # updates the mesh's; None removes a variable
    inherit_env: bool = True


class SpawnProcs(Message, tag=30):
    """Start procs. Each connects to ``owner``. Failures are reported as ProcExited."""

    mesh: str
    procs: list[ProcSpec]
    owner: ProcRef
    root: ProcRef
    env: dict[str, str | None]  # None removes a variable
    cwd: str
    sys_path: list[str]
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    preload: list[str] = []
    per_proc: list[Launch] = []  # one for each proc, or nothing
    binds: list[
        dict[str, str]
    ] = []  # for each proc, or nothing: lists of the resources that it may use, as for numactl
    start_limit: float = 0.0  # the time limit for each start (seconds); 0: the agent's own limit
    tool: bool = False  # procs of a tool: they end with the controller, also on a host whose meshes are kept
    devices: int = 0  # the number of its host's GPUs that each proc sees; 0: all
    slots: list[int] = []  # with devices, the number of each proc on its host
    asyncio: bool = False  # the requesting process has it loaded, so these procs will probably have async actors


class SetPlacement(Message, tag=55):
    """From a controller to a host agent: how the controller's ranks start there from now on. Answered with a Reply.

    It applies to all procs of that controller, whichever of its processes requests them.
    """

    call: int
    placement: Placement


class ProcStarted(Message, tag=31):
    """The proc has said hello to its agent, so it listens. To its owner and all watchers."""

    proc: str
    pid: int


class ProcExited(Message, tag=32):
    """The proc is gone. To its owner and all watchers."""

    proc: str
    pid: int
    host: str
    status: int  # exit code, or minus the signal
    cause: str
    expected: bool = False
    kind: DeathKind = DeathKind.UNKNOWN  # of the death; STOPPED if expected

    def death(self) -> Death:
        """Return the death to report to those that wait for the proc."""
        if self.expected:
            kind = DeathKind.STOPPED
        else:
            kind = self.kind if self.kind is not DeathKind.UNKNOWN else DeathKind.EXITED
        return Death.of(kind, self.cause, self.proc, self.host, self.pid, signal=max(0, -self.status))


class OutputChunk(Message, tag=33):
    """Bytes read from a rank's stdout (1) or stderr (2). Body: those bytes."""

    proc: str
    stream: int


class OutputEnd(Message, tag=34):
    """All output of the proc has been forwarded."""

    proc: str


class KillProcs(Message, tag=35):
    """SIGKILL these procs. Answered with a Reply when they are gone."""

    call: int
    procs: list[str]
    reason: str


class StopProcs(Message, tag=36):
    """EndProc, then SIGKILL for those left after ``grace`` seconds. Answered when all are gone and drained."""

    call: int
    procs: list[str] | None  # None: all procs here that the sender, or a process that it has started, has started
    reason: str
    grace: Seconds
    rest: bool = False  # also kill processes that the sender's ranks have left here, after its last rank here


class ReportProcs(Message, tag=37):
    """Report the starts and exits of these procs to the sender, also past ones. Unknown procs may start later."""

    procs: list[str]
    closed: bool = False  # their connection has ended: report with ``ProcEnding`` whether they are about to exit


class ProcEnding(Message, tag=49):
    """Whether a proc is ending whose connection has ended, before its exit status is known."""

    proc: str
    ending: bool  # its ``ProcExited`` follows: it was told to end, or the kernel is tearing it down
    asked: str = ""  # the reason, if it was told to stop


class GetStatus(Message, tag=38):
    """Answered with a Reply whose body is a pickle of bytes: MessagePack of ``list[ProcStatus]``."""

    call: int
    procs: list[str]


class ProcStatus(msgspec.Struct, array_like=True, frozen=True):
    """An agent's status of one proc."""

    proc: str
    state: str  # "starting", "alive", "dead" or "stopped"
    pid: int
    host: str
    cause: str = ""
    rss_bytes: int = 0
    cpu_percent: float = 0.0
    uptime_s: Seconds = 0.0
    devices: str = ""  # the GPUs that it was assigned, if not all of its host
    gpus: dict[int, tuple[int, float]] = {}  # by GPU: the memory it uses there (bytes), how busy the GPU is (percent)


class GetLogs(Message, tag=39):
    """Answered with a Reply: a pickle of MessagePack of ``list[LogText]``. ``tail``: the least lines wanted; 0: all."""

    call: int
    procs: list[str]
    tail: int = 0


class LogText(msgspec.Struct, array_like=True, frozen=True):
    """The output of one proc that its agent has kept (bounded; ``dropped`` bytes are gone)."""

    proc: str
    stdout: bytes
    stderr: bytes
    dropped: int = 0


class Shutdown(Message, tag=40):
    """The agent stops every proc, drains their output, answers with a Reply, and exits."""

    call: int
    grace: Seconds


class ProcUnresponsive(Message, tag=45):
    """The proc is alive but does not answer its agent. To its owner and all watchers; again when its stack is known."""

    proc: str
    pid: int
    host: str
    seconds: Seconds  # since the ping
    why: str
    stack: str = ""


class ProcResponds(Message, tag=46):
    """An unresponsive proc has answered."""

    proc: str
    seconds: Seconds  # how long the answer took


class AskStacks(Message, tag=47):
    """Read the stacks of these procs from outside. Answered as GetStatus is: MessagePack of ``list[StackRead]``."""

    call: int
    procs: list[str]
    native: bool  # with the frames of native code
    timeout: Seconds  # time limit for all of them (seconds)


class StackRead(msgspec.Struct, array_like=True, frozen=True):
    """The stack of one proc that py-spy has read."""

    proc: str
    pid: int
    host: str
    why: str  # why it cannot answer itself, by its state in the kernel ("" if the state does not explain it)
    dump: str  # its JSON; "" if there is none
    error: str = ""  # the reason if there is none


class AskConsole(Message, tag=48):
    """To a controller, from a terminal of the same user: open the debugger's console.

    Accepted on a link without Hello, as are the requests to keepers in ``kept_mesh``. Answered with a Reply whose body
    is the path of a socket, or (ERROR) a sentence.
    """

    call: int
    version: int
    release: str
    oldest: int = 0  # as in Hello


# -- healing ----------------------------------------------------------------------------------


class Replaced(Message, tag=41):
    """A dead proc has a successor, which takes its place in the mesh from now on.

    Owners of actors on the dead proc recreate them on the successor. Answered with a Reply when that is done.
    """

    call: int  # 0: no reply is wanted
    rank: int
    proc: str
    ref: ProcRef


class AskReplaced(Message, tag=42):
    """To the root: report to the sender when this dead proc has a successor, or that it has one."""

    proc: str


class AskEnded(Message, tag=44):
    """Query which of these actors have ended here. Reply body: a pickle of their causes by actor."""

    call: int
    rank: int
    actors: list[str]


class Checkpoint(Message, tag=43):
    """To the owner's process: the value that an actor's ``checkpoint`` has returned. Body: its pickle."""

    actor: str
    rank: int
    buffers: tuple[int, ...] = ()
    segment: SegmentRef | None = None


# -- the data plane ---------------------------------------------------------------------------


class BufferRead(Message, tag=50):
    """To a buffer's owner: send these bytes of it. Answered with a Reply that has them as its only buffer."""

    call: int
    buffer: int
    offset: int
    size: int


class BufferWrite(Message, tag=51):
    """To a buffer's owner: put the one buffer of this message into it. Answered with a Reply."""

    call: int
    buffer: int
    offset: int
    buffers: tuple[int, ...]
    segment: SegmentRef | None = None


class BufferAtomic(Message, tag=52):
    """To a buffer's owner: change one 8-byte word. Reply body: the word before.

    Without ``expected``: add ``operand``; with it: put ``operand`` there if the word is ``expected``.
    """

    call: int
    buffer: int
    offset: int
    operand: int
    expected: int | None = None


class BufferDrop(Message, tag=53):
    """To a buffer's owner: drop it. Answered when no transfer accesses it any more."""

    call: int
    buffer: int


class BufferOffer(Message, tag=54):
    """To a buffer's owner: prepare its side of a backend for this buffer (a listener, a queue pair, an IPC handle).

    Body: the request of the sender's backend. Answered with a Reply whose body is "+" and the answer of the
    owner's backend, or "-" and the reason why it cannot serve the buffer.
    """

    call: int
    buffer: int
    backend: str


encode = msgspec.msgpack.Encoder().encode
encode_death = msgspec.msgpack.Encoder().encode
decode_death = msgspec.msgpack.Decoder(Death).decode
_KINDS: object = functools.reduce(operator.or_, Message.__subclasses__())
decode: Callable[[bytes | memoryview], Message] = msgspec.msgpack.Decoder(_KINDS).decode


def can_meet(version: int, oldest: int) -> bool:
    """Return whether this package and a peer understand each other.

    Args:
        version: the version of the wire that the peer speaks.
        oldest: the oldest one that it understands; 0: only its own.
    """
    return OLDEST_WIRE <= version <= WIRE_VERSION or (oldest or version) <= WIRE_VERSION < version


def message_name(tag: int) -> str:
    """Return the name of the message with a tag; "" if there is none."""
    return next((kind.__name__ for kind in Message.__subclasses__() if kind.__struct_config__.tag == tag), "")


def death_of(body: Any) -> Death:
    """Return the death in the body of a message: decode it, unless it has not left this process."""
    return body if type(body) is Death else decode_death(body)


class RankConfig(msgspec.Struct, array_like=True, frozen=True):
    """The configuration of a new rank. The agent makes it from SpawnProcs; ``rank.main.main(bytes)`` decodes it."""

    ref: ProcRef
    agent: ProcRef
    owner: ProcRef
    root: ProcRef
    mesh: str
    rank: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    run_dir: str
    sys_path: list[str]
    kept: bool = False  # it outlives its controller
    launch: Launch | None = None  # how it was started; procs that it spawns start the same way
    cpus: list[int] = []  # the processors on which it may run; none: all
    memory: list[int] = []  # the NUMA nodes from which it gets memory; none: all
    placement: Placement | None = None  # of its host, for procs that it starts
