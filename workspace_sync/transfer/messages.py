"""Messages between the client and the agents. ``docs/sync.md`` describes the protocol and the effects of deaths."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from workspace_sync.environment.locked import LockFile
from workspace_sync.store.kept import Footprint
from workspace_sync.store.records import Generation
from workspace_sync.transfer.blocks import Piece

#: The maximum size of content that is included in the stage request (bytes), which saves a round trip. The client
#: then sends it to each host.
INLINE = 64 << 10
#: Up to this many missing pieces are listed individually.
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
        parts: its parts, by name.
        repair: why the next sync must check all files first; empty: it need not.
        generation: the number of the current generation; 0: none.
        generations: those that a rollback can go to (``store.Generation``), newest first.
        store: the identity of its store, which hosts with a common home folder may share.
        left: remains of an interrupted sync; empty: none.
        kept_files: the number of kept files of ranks that were in conflict with a tree, if requested.
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
        blocks: otherwise, the numbers of the blocks that contain it.
    """

    part: str
    digest: bytes
    data: bytes = b""
    blocks: list[int] = []


class StageRequest(msgspec.Struct, array_like=True):
    """Request to create a new generation beside the current one.

    Attributes:
        workspace: the name of its folder.
        owner: the client, for messages to other clients while the workspace is busy.
        parts: all parts of the new generation.
        wait: the longest wait for another client (seconds).
        inline: small content that the host may lack, by digest.
        dry: only report the missing content.
        lock: a lock file of the environment, from which the host installs what it can.
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
            lists all.
        named: pieces by digest and size.
    """

    bits: bytes = b""
    named: list[Piece] = []


class Staged(msgspec.Struct, array_like=True):
    """A host's answer to a request to stage, or to finish.

    Attributes:
        finished: whether everything is created and verified; otherwise ``missing`` must be sent.
        missing: the pieces that it lacks.
        files: the number of files that were or will be created.
        deleted: paths that will be deleted (only for a dry run).
        reused: bytes that the host already had.
        problems: damaged content found on the host, which is created again.
        notes: remains of an interrupted sync or other irregularities, and how they were handled.
        made: bytes that the host created from the lock file.
        unmade: why it could not use the lock file, in a sentence.
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
        generation: the number of the current generation.
        digests: of its manifests, by part.
        moved: paths created by ranks that were moved to the new tree.
        kept: paths created by ranks that conflict with the new tree, and their new locations.
        files: the number of created files.
        seconds: the duration of the switch on the host.
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
        left: bytes of old content that remain.
        error: why it failed; empty on success.
        kept_files: the number of kept files of ranks in all workspaces, which were in conflict with a tree.
        kept_bytes: their size.
        removed_files: the number of such files that were removed on request.
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
        footprint: the content. While it has users, nothing is removed.
    """

    path: str
    store: str
    footprint: Footprint = msgspec.field(default_factory=Footprint)


class Failed(msgspec.Struct, array_like=True):
    """A host could not fulfil a request.

    Attributes:
        kind: the name of the error's class.
        text: the failure, as a sentence for the report.
        source: whether the source of a block is the cause, and not this host.
    """

    kind: str
    text: str
    source: bool = False


def encode_missing(missing: Sequence[Piece], order: Collection[bytes]) -> Missing:
    """Encode missing pieces compactly."""
    if len(missing) <= FEW:
        return Missing(b"", list(missing))
    lacks = dict(missing)
    bits = bytearray((len(order) + 7) // 8)
    for at, digest in enumerate(order):
        if lacks.pop(digest, None) is not None:
            bits[at >> 3] |= 1 << (at & 7)
    return Missing(zlib.compress(bits, 1), list(lacks.items()))


def decode_missing(missing: Missing, order: Iterable[Piece]) -> list[Piece]:
    """Decode the missing pieces."""
    found: list[Piece] = []
    if missing.bits:
        bits = zlib.decompress(missing.bits)
        found = [piece for at, piece in enumerate(order) if bits[at >> 3] >> (at & 7) & 1]
    return found + [(digest, size) for digest, size in missing.named]
