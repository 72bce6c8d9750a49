"""What a client remembers of an environment between runs: one that is unchanged is neither read nor judged again.

Both files stand beside the index of the scan. They are only a memory: without them everything is found out again.
"""

from __future__ import annotations

import weakref

import msgspec

from workspace_sync.environment.contents import Content
from workspace_sync.model.manifest import Manifest, ManifestDelta
from workspace_sync.scanning import Index

# Another version of the rules is another memory.
_VERSION = 2
_RESULT, _CONTENTS = "environment", "contents"


class Judged(msgspec.Struct, array_like=True):
    """An environment as it was judged.

    Attributes:
        prefix: as its files name it.
        scanned: the digest of its folder as it was scanned.
        change: the complete manifest with what is to be done to each file.
        notes: what a person should know.
        native: whether it has compiled code.
        glibc: what its compiled code needs.
    """

    prefix: bytes
    scanned: bytes
    change: ManifestDelta
    notes: list[str]
    native: bool
    glibc: tuple[int, ...]
    version: int = _VERSION

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return Manifest(self.change.folders)


class _Contents(msgspec.Struct, array_like=True):
    prefix: bytes
    known: dict[bytes, Content]
    version: int = _VERSION


# The results of this process, by index.
_last: weakref.WeakKeyDictionary[Index, Judged] = weakref.WeakKeyDictionary()


def recall(index: Index, prefix: bytes, scanned: bytes) -> Judged | None:
    """What was found of an environment, if it is what it was."""
    found = _last.get(index)
    if found is None:
        data = index.load_file(_RESULT)
        if data is None:
            return None
        try:
            found = msgspec.msgpack.decode(data, type=Judged)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if found.version != _VERSION:
            return None
        _last[index] = found
    return found if (found.prefix, found.scanned) == (prefix, scanned) else None


def recall_contents(index: Index, prefix: bytes) -> dict[bytes, Content]:
    """What is known of the content of files, by digest."""
    data = index.load_file(_CONTENTS)
    if data is None:
        return {}
    try:
        found = msgspec.msgpack.decode(data, type=_Contents)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found.known if (found.prefix, found.version) == (prefix, _VERSION) else {}


def remember(index: Index, judged: Judged, scanned: Manifest, known: dict[bytes, Content]) -> None:
    """Keep what was found, of the files that are there now."""
    _last[index] = judged
    index.save_file(_RESULT, msgspec.msgpack.encode(judged))
    present = {entry.digest for _, entry in scanned.files()}
    kept = {digest: content for digest, content in known.items() if digest in present}
    index.save_file(_CONTENTS, msgspec.msgpack.encode(_Contents(judged.prefix, kept)))
