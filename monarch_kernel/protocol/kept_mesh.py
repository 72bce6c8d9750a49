"""Messages about meshes that outlive their controller: to and from the host agent that keeps them, and its ranks.

Such an agent (a *keeper*) has at most one controller at a time, its *holder*. The holder maintains a record, in parts
with keys, of the data that a later holder needs to continue. The keeper stores the record without decoding it.
"""

import msgspec

from monarch_kernel.protocol.private_files import NEW
from monarch_kernel.protocol.refs import Death, Message, ProcRef, Seconds

#: The purpose in the lock of a kept mesh's folder, and the folder's files; no others are ever removed from it.
FOLDER = "kept mesh"
SOCKET = "socket"
LOG = "worker.log"
DESCRIPTION = "mesh.json"
FILES = (SOCKET, LOG, DESCRIPTION, DESCRIPTION + NEW)

#: The prefix of the keys of parts about procs: without any such part there is nothing to keep.
PROCS = "procs:"


class Keep(Message, tag=70):
    """From the holder: this part of the record has changed. Body: the part; empty: the part is removed."""

    key: str


class TakeOver(Message, tag=71):
    """Make the sender the holder. Answered with a Reply whose body is a pickle of bytes: MessagePack of ``Held``.

    The keeper notifies its ranks (``Adopt``); their output waits until the new holder sends ``Hear``.
    """

    call: int
    force: bool  # also take over from a living holder


class Hear(Message, tag=72):
    """The holder is ready for output; the keeper first sends the output that no holder has received yet.

    The answer follows it, as a pickle of bytes: MessagePack of ``dict[str, tuple[int, int]]``, the number of bytes
    sent and of bytes not sent, by proc.
    """

    call: int


class LetGo(Message, tag=73):
    """From the holder: it releases the mesh. Answered with a Reply."""

    call: int


class Taken(Message, tag=74):
    """To a living holder: another process has taken over by force."""

    pid: int
    host: str


class Adopt(Message, tag=75):
    """To a rank, from its host agent: the new controller, which now owns everything that the old one owned."""

    root: ProcRef


class LookAtKept(Message, tag=76):
    """From any program of the same user, without Hello: query the ranks of a kept mesh. It does not become the holder.

    Answered with a Reply whose body is MessagePack of ``list[KeptRank]``, or (ERROR) a sentence.
    """

    call: int
    version: int  # WIRE_VERSION
    release: str  # of the package
    oldest: int = 0  # as in Hello


class ReadKeptLogs(Message, tag=77):
    """From any program of the same user, without Hello: query stored output, as for ``GetLogs``.

    Answered with MessagePack of ``list[LogText]``.
    """

    call: int
    version: int
    release: str
    procs: list[str]
    tail: int = 0
    oldest: int = 0


class EndKept(Message, tag=78):
    """From any program of the same user, without Hello: end everything on the keeper. Answered when it is gone.

    The answer is OK, or (ERROR) a sentence that explains why nothing was ended.
    """

    call: int
    version: int
    release: str
    pid: int  # process id of the sender, for the holder
    force: bool  # also end it if a living holder has it
    oldest: int = 0


class Held(msgspec.Struct, array_like=True):
    """The answer to ``TakeOver``.

    Attributes:
        refused: why the sender is not the holder; the rest is then empty.
        record: the parts by their keys, in the order of their first arrival.
        deaths: the deaths of procs that are gone.
        pids: the pids of living procs.
        idle: seconds without a holder after which the keeper ends.
        held: whether it is refused because another controller holds the mesh.
    """

    refused: str = ""
    record: dict[str, bytes] = {}
    deaths: dict[str, Death] = {}
    pids: dict[str, int] = {}
    idle: Seconds = 0.0
    held: bool = False


class KeptMesh(msgspec.Struct):
    """One proc mesh on a keeper."""

    name: str
    sizes: dict[str, int]
    ranks: int
    alive: int


class KeptRank(msgspec.Struct):
    """The current state of a rank on a keeper.

    Attributes:
        mesh: the name of its mesh.
        rank: its rank in that mesh.
        proc: the identifier of its process.
        state: "starting", "alive", "unresponsive", "dead" or "stopped".
        pid: its process id.
        cause: why it is dead or unresponsive.
        rss_bytes, cpu_percent, uptime_s: resource use and age of the process.
    """

    mesh: str
    rank: int
    proc: str
    state: str
    pid: int
    cause: str = ""
    rss_bytes: int = 0
    cpu_percent: float = 0.0
    uptime_s: Seconds = 0.0


class KeptInfo(msgspec.Struct):
    """A keeper's description in its folder, for commands that list kept meshes.

    Attributes:
        url: the URL that it listens on.
        since: when it was started (seconds since 1970).
        held_by: the holder's process id; 0 if there is none.
        free_since: when the last holder left; 0 if there is a holder.
        idle: seconds without a holder after which the keeper ends.
    """

    name: str
    pid: int
    url: str
    host: str
    since: Seconds
    held_by: int = 0
    free_since: Seconds = 0.0
    idle: Seconds = 0.0
    meshes: list[KeptMesh] = []
