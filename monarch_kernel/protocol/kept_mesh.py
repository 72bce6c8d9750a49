"""Messages about meshes that outlive their controller: to and from the host agent that keeps them, and its ranks.

Such an agent (a *keeper*) has at most one controller at a time, its *holder*. What a later holder must know to go on
is a record of parts, each under a key, which the holder keeps up to date. The keeper does not look into it.
"""

from __future__ import annotations

import msgspec

from monarch_kernel.protocol.private_files import NEW
from monarch_kernel.protocol.refs import Death, ProcRef, Seconds

#: What the folder of a kept mesh calls itself, and the files in it: all that is ever removed from one.
FOLDER = "kept mesh"
SOCKET = "socket"
LOG = "worker.log"
DESCRIPTION = "mesh.json"
FILES = (SOCKET, LOG, DESCRIPTION, DESCRIPTION + NEW)

#: How the keys begin of parts that tell of procs: without any of them there is nothing to keep.
PROCS = "procs:"


class Keep(msgspec.Struct, array_like=True, tag=70):
    """From the holder: this part of the record has changed. Body: the part; empty: it is removed."""

    key: str


class TakeOver(msgspec.Struct, array_like=True, tag=71):
    """Make the sender the holder. Answered with a Reply whose body is a pickle of bytes: MessagePack of ``Held``.

    Ranks are told (``Adopt``); their output waits until the new holder says ``Hear``.
    """

    call: int
    force: bool  # from a holder that lives, too


class Hear(msgspec.Struct, array_like=True, tag=72):
    """The holder is ready for output: first what no holder has received yet.

    The answer comes after that, as a pickle of bytes: MessagePack of ``dict[str, tuple[int, int]]``, the bytes that
    were sent and those that were not, by proc.
    """

    call: int


class LetGo(msgspec.Struct, array_like=True, tag=73):
    """From the holder: it gives the mesh up. Answered with a Reply."""

    call: int


class Taken(msgspec.Struct, array_like=True, tag=74):
    """To a holder that lives: another process has taken over, by force."""

    pid: int
    host: str


class Adopt(msgspec.Struct, array_like=True, tag=75):
    """To a rank, from its host agent: this is your controller now. What the one before owned is owned by this one."""

    root: ProcRef


class Held(msgspec.Struct, array_like=True):
    """What a new holder gets.

    Attributes:
        refused: why it is not the holder now; then the rest is empty.
        record: the parts by their keys, in the order in which they first came.
        deaths: of procs that are gone.
        pids: of procs that live.
        idle: seconds without a holder after which all ends.
    """

    refused: str = ""
    record: dict[str, bytes] = {}
    deaths: dict[str, Death] = {}
    pids: dict[str, int] = {}
    idle: Seconds = 0.0


class KeptMesh(msgspec.Struct):
    """One proc mesh on a keeper."""

    name: str
    sizes: dict[str, int]
    ranks: int
    alive: int


class KeptInfo(msgspec.Struct):
    """What a keeper writes about itself into its folder, for commands that list kept meshes.

    Attributes:
        url: where it listens.
        since: when it was started (seconds since 1970).
        held_by: the holder's process id; 0 if there is none.
        free_since: since when there is none; 0 if there is one.
        idle: seconds without a holder after which all ends.
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
