"""Messages between the client and the agents. ``docs/sync.md`` describes the protocol and the effects of deaths."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from workspace_sync.environment import LockFile
from workspace_sync.store import Footprint, Generation
from workspace_sync.transfer.blocks import Piece

#: Content of up to this size travels in the request to stage (bytes), which saves a round trip. Each host then gets it
#: from the client.
INLINE = 64 << 10
#: Up to this many missing pieces are named one by one.
FEW = 256


class PartState(msgspec.Struct, array_like=True):
    """One part (tree or environment) of a workspace on a host.

    Attributes:
        digest: of the manifest that ranks see; empty: none.
        known: digests of all manifests that a delta can be applied to.
    """

    digest: bytes = b""
    known: list[bytes] = []


class HostState(msgspec.Struct, array_like=True):
    """Content of a workspace on a host.

    Attributes:
        host: its name.
        path: the folder of the workspace on it.
        parts: by name.
        repair: why the next sync must look at all files first; empty: it need not.
        generation: the number of what ranks see; 0: none.
        generations: those that a rollback can go to (``store.Generation``), the newest first.
        store: the identity of its store; hosts with a common home folder may have one together.
        left: what a sync that was interrupted has left half made; empty: nothing.
        kept_files: how many files of ranks were in the way of a tree and are kept, if that was asked for.
        kept_bytes: their size.
    """

    host: str
    path: str
    parts: dict[str, PartState]
    repair: str = ""
    generation: int = 0
    generations: list[Generation] = []
    store: str = ""
    left: str = ""
    kept_files: int = 0
    kept_bytes: int = 0


class PartTarget(msgspec.Struct, array_like=True):
    """New content of one part.

    Attributes:
        part: "tree" or "env".
        digest: of the new manifest.
        data: an encoded and compressed ``ManifestDelta``, if it is small.
        blocks: otherwise, the numbers of the blocks that it arrives in.
    """

    part: str
    digest: bytes
    data: bytes = b""
    blocks: list[int] = []


class StageRequest(msgspec.Struct, array_like=True):
    """Make a new generation beside the one that ranks see.

    Attributes:
        workspace: the name of its folder.
        owner: the client, for others that find the workspace busy.
        parts: all parts of the new generation.
        wait: how long to wait for another client (seconds).
        inline: small content that the host may lack, by digest.
        dry: only say what is missing.
        lock: a lock file of the environment, from which the host makes what it can itself.
    """

    workspace: str
    owner: str
    parts: list[PartTarget]
    wait: float = 0.0
    inline: dict[bytes, bytes] = {}
    dry: bool = False
    lock: LockFile | None = None


class Missing(msgspec.Struct, array_like=True):
    """The pieces that a host lacks.

    Attributes:
        bits: one bit for each piece of the deltas, in the order of ``blocks.piece_order``; compressed. Empty: ``named``
            has all.
        named: pieces by digest and size.
    """

    bits: bytes = b""
    named: list[Piece] = []


class Staged(msgspec.Struct, array_like=True):
    """A host's answer to a request to stage, or to finish.

    Attributes:
        finished: all is made and verified; otherwise ``missing`` is to be sent.
        missing: what it lacks.
        files: files that were or will be made.
        deleted: paths that go (only for a dry run).
        reused: bytes that the host had.
        problems: content on the host that was found to be damaged, and is made anew.
        notes: what a sync that was interrupted had left, or what else was not in order, and what was done with it.
        made: bytes that the host made from the lock file.
        unmade: why it could not, in a sentence.
    """

    finished: bool
    missing: Missing
    files: int = 0
    deleted: list[str] = []
    reused: int = 0
    problems: list[str] = []
    notes: list[str] = []
    made: int = 0
    unmade: str = ""


class Switched(msgspec.Struct, array_like=True):
    """A host's answer to a request to commit.

    Attributes:
        generation: the number of what ranks see now.
        digests: of its manifests, by part.
        moved: paths of ranks that moved along.
        kept: what ranks had made where the new tree has something else, and where it is now.
        files: that were made.
        seconds: what the switch took on the host.
    """

    generation: int
    digests: dict[str, bytes] = {}
    moved: list[str] = []
    kept: list[str] = []
    files: int = 0
    seconds: float = 0.0


class Collected(msgspec.Struct, array_like=True):
    """Content that was removed from the store of a host.

    Attributes:
        host: its name.
        freed: bytes that were removed.
        left: bytes of old content that stay.
        error: why it could not be done; empty if it was.
        kept_files: how many files of ranks are kept in all workspaces, as they were in the way of a tree.
        kept_bytes: their size.
        removed_files: how many of such files were removed, as was asked for.
        removed_bytes: their size.
    """

    host: str
    freed: int = 0
    left: int = 0
    error: str = ""
    kept_files: int = 0
    kept_bytes: int = 0
    removed_files: int = 0
    removed_bytes: int = 0


class Remains(msgspec.Struct, array_like=True):
    """Content of a workspace on a host, now or before it was forgotten.

    Attributes:
        path: the folder of the workspace.
        store: the identity of its store.
        footprint: the content; while it has users, nothing is removed.
    """

    path: str
    store: str
    footprint: Footprint = msgspec.field(default_factory=Footprint)


class Failed(msgspec.Struct, array_like=True):
    """A host could not fulfil a request.

    Attributes:
        kind: the name of the error's class.
        text: what happened, as a sentence for the report.
        source: whether the source of a block is the cause, and not this host.
    """

    kind: str
    text: str
    source: bool = False


def encode_missing(missing: Sequence[Piece], order: Collection[bytes]) -> Missing:
    """Describe missing pieces briefly."""
    if len(missing) <= FEW:
        return Missing(b"", list(missing))
    lacks = dict(missing)
    bits = bytearray((len(order) + 7) // 8)
    for at, digest in enumerate(order):
        if lacks.pop(digest, None) is not None:
            bits[at >> 3] |= 1 << (at & 7)
    return Missing(zlib.compress(bits, 1), list(lacks.items()))


def decode_missing(missing: Missing, order: Iterable[Piece]) -> list[Piece]:
    """The pieces that are missing."""
    found: list[Piece] = []
    if missing.bits:
        bits = zlib.decompress(missing.bits)
        found = [piece for at, piece in enumerate(order) if bits[at >> 3] >> (at & 7) & 1]
    return found + [(digest, size) for digest, size in missing.named]
