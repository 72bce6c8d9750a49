"""Manifests: the content of a tree, as a Merkle tree of its folders.

A manifest lists every folder, file and symbolic link of a tree with its mode and the digest of its content. The digest
of a folder covers its entries, and thereby everything below it. Equal digests therefore mean equal trees, and a
comparison of two manifests skips their common folders. Digests do not cover times, only content.

Names and paths are bytes, as in the file system: a name may contain any byte but ``/`` and NUL. A path is relative to
the root of its tree, and the root is ``b""``.

Source: R. C. Merkle, "A Digital Signature Based on a Conventional Encryption Function", CRYPTO '87; BLAKE3
specification, https://github.com/BLAKE3-team/BLAKE3-specs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from blake3 import blake3

#: The length of every digest (bytes).
DIGEST_SIZE = 32
#: The bits of a mode that a tree keeps: those of ``chmod``, without set-uid, set-gid and sticky.
MODE_BITS = 0o777
#: The block size for reading a file in pieces (bytes).
BUFFER = 1 << 20


_local = threading.local()


def thread_buffer() -> memoryview:
    """Return a buffer of ``BUFFER`` bytes that this thread reuses.

    The system clears new memory of this size page by page, which takes longer than to read the data.
    """
    try:
        return _local.buffer
    except AttributeError:
        buffer = _local.buffer = memoryview(bytearray(BUFFER))
        return buffer


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Compute the BLAKE3 digest of some bytes."""
    return blake3(data).digest()


def entry_path(folder: bytes, name: bytes) -> bytes:
    """Return the path of an entry of a folder."""
    return folder + b"/" + name if folder else name


class Rewrite(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a file of an environment contains the prefix, so that a host can replace it by its own.

    Attributes:
        kind: "text", "script" (of pip), "uv" (a script of uv), "env" (a script of conda that ``/usr/bin/env`` starts),
            "home" (the ``home`` of a venv's configuration), "binary" (NUL-padded strings), "runpath" (of compiled code
            without padding), "pyc", or an index of other files' hashes: "record" (RECORD), "conda" and "rattler" (their
            ``conda-meta``).
        prefix: the prefix in the file at the client.
        space: the bytes available for it in a padded binary.
        files: the paths of those files in an index of hashes that also name the prefix; they are rewritten before it.
        places: other folders of the client that the file names, as written, and their places in the workspace's tree;
            for "home" and "runpath", in the environment.
    """

    kind: str
    prefix: bytes
    space: int = 0
    files: tuple[bytes, ...] = ()
    places: tuple[tuple[bytes, bytes], ...] = ()


class FileEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A regular file.

    Attributes:
        size: bytes.
        mode: its permissions, ``MODE_BITS`` of them.
        digest: BLAKE3 of its content at the client.
        mtime: its modification time (ns since the epoch), which copies get; no digest covers it.
        chunks: the digests of its chunks, in order, if it is larger than one chunk; otherwise empty.
        sizes: the sizes of its chunks (bytes); empty if ``chunks`` is.
        rewrite: for a file of an environment that contains its prefix.
    """

    size: int
    mode: int
    digest: bytes
    mtime: int = 0
    chunks: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    rewrite: Rewrite | None = None

    def pieces(self) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over the (digest, offset, size) of each chunk.

        A file of one chunk is itself one piece; an empty file has none.
        """
        if not self.chunks:
            if self.size:
                yield self.digest, 0, self.size
            return
        offset = 0
        for digest, size in zip(self.chunks, self.sizes, strict=True):
            yield digest, offset, size
            offset += size


class Folder(msgspec.Struct, array_like=True, gc=False):
    """A folder and its entries. The entries of subfolders are in the manifest under the subfolders' paths.

    Attributes:
        mode: its permissions.
        files: its regular files by name.
        links: the targets of its symbolic links by name.
        folders: the digests of its subfolders by name.
        digest: covers all of the above, except times.
    """

    mode: int
    files: dict[bytes, FileEntry]
    links: dict[bytes, bytes]
    folders: dict[bytes, bytes]
    digest: bytes = b""

    def copy(self) -> Folder:
        """Return a copy that can be changed independently of this folder."""
        return Folder(self.mode, dict(self.files), dict(self.links), dict(self.folders), self.digest)


def folder_digest(folder: Folder) -> bytes:
    """Compute the digest of a folder; those of its subfolders must be current."""
    parts: list[bytes] = [b"monarch folder 1\0", folder.mode.to_bytes(2, "big")]
    for name in sorted(folder.files):
        entry = folder.files[name]
        rewrite = _NOTHING if entry.rewrite is None else _framed(msgspec.msgpack.encode(entry.rewrite))
        parts += (b"f", _length(name), name, entry.mode.to_bytes(2, "big"), entry.digest, rewrite)
    for name in sorted(folder.links):
        parts += (b"l", _framed(name), _framed(folder.links[name]))
    for name in sorted(folder.folders):
        parts += (b"d", _framed(name), folder.folders[name])
    return blake3(b"".join(parts)).digest()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


_LENGTHS = tuple(length.to_bytes(4, "big") for length in range(256))
_NOTHING = _framed(b"")


def _length(name: bytes) -> bytes:
    length = len(name)
    return _LENGTHS[length] if length < 256 else length.to_bytes(4, "big")


#: Cache of ``Manifest.count``, by digest: every sync counts the same few manifests.
_counts: dict[bytes, tuple[int, int]] = {}
_MOST_COUNTS = 64


class Manifest(msgspec.Struct, gc=False):
    """Content of a tree: its folders by path. The path of the root is ``b""``."""

    folders: dict[bytes, Folder]

    @property
    def digest(self) -> bytes:
        """The digest of the whole tree."""
        return self.folders[b""].digest

    def files(self) -> Iterator[tuple[bytes, FileEntry]]:
        """Iterate over all files with their paths."""
        for path, folder in self.folders.items():
            prefix = path + b"/" if path else b""
            for name, entry in folder.files.items():
                yield prefix + name, entry

    def file(self, path: bytes) -> FileEntry | None:
        """Return the file at a path; None if there is none."""
        parent, _, name = path.rpartition(b"/")
        folder = self.folders.get(parent)
        return None if folder is None else folder.files.get(name)

    def count(self) -> tuple[int, int]:
        """Return the number of files and their total size (bytes)."""
        digest = self.digest
        if digest not in _counts:
            if len(_counts) >= _MOST_COUNTS:
                _counts.clear()
            files = sum(len(folder.files) for folder in self.folders.values())
            size = sum(entry.size for folder in self.folders.values() for entry in folder.files.values())
            _counts[digest] = files, size
        return _counts[digest]


def seal(folders: dict[bytes, Folder], changed: Iterable[bytes] | None = None) -> Manifest:
    """Compute the digests of folders, deepest first, and enter each in its parent.

    Args:
        folders: all folders by path. The parent of each folder must be present.
        changed: the paths of folders with new entries; their ancestors are computed, too. None: all folders.
    """
    if changed is None:
        paths = set(folders)
    else:
        paths = set[bytes]()
        for path in changed:
            while path not in paths:
                paths.add(path)
                if not path:
                    break
                path = path.rpartition(b"/")[0]
    for path in sorted((p for p in paths if p in folders), key=lambda p: -p.count(b"/") if p else 1):
        folder = folders[path]
        folder.digest = folder_digest(folder)
        if path:
            parent, _, name = path.rpartition(b"/")
            folders[parent].folders[name] = folder.digest
    return Manifest(folders)


@dataclass(frozen=True)
class Change:
    """One path that differs between two manifests.

    Attributes:
        path: relative to the root.
        old: its previous file entry, link target or folder mode; None: it did not exist.
        new: its new file entry, link target or folder mode; None: it is deleted.
    """

    path: bytes
    old: FileEntry | bytes | int | None
    new: FileEntry | bytes | int | None


def changes(old: Manifest | None, new: Manifest) -> Iterator[Change]:
    """Compare two manifests folder by folder, without visiting folders of equal digests.

    A new parent comes before its entries. A deleted folder is reported once, without its entries.
    """
    before: dict[bytes, Folder] = {} if old is None else old.folders
    todo = [b""]
    while todo:
        path = todo.pop()
        a, b = before.get(path), new.folders[path]
        if a is not None and a.digest == b.digest:
            continue
        prefix = path + b"/" if path else b""
        if a is None or a.mode != b.mode:
            yield Change(path, None if a is None else a.mode, b.mode)
        was = _entries(a)
        now = _entries(b)
        for name in was.keys() - now.keys():
            yield Change(prefix + name, was[name], None)
        for name, entry in now.items():
            if isinstance(entry, int):
                earlier = was.get(name)
                if earlier is not None and not isinstance(earlier, int):
                    yield Change(prefix + name, earlier, None)  # a file or link in place of a folder
                todo.append(prefix + name)
            elif not _same(was.get(name), entry):
                yield Change(prefix + name, was.get(name), entry)


def _entries(folder: Folder | None) -> dict[bytes, FileEntry | bytes | int]:
    if folder is None:
        return {}
    return {**folder.files, **folder.links, **dict.fromkeys(folder.folders, 0)}


def _same(old: FileEntry | bytes | int | None, new: FileEntry | bytes) -> bool:
    if isinstance(old, FileEntry) and isinstance(new, FileEntry):
        return (old.digest, old.mode, old.rewrite) == (new.digest, new.mode, new.rewrite)
    return type(old) is type(new) and old == new


class ManifestDelta(msgspec.Struct, array_like=True):
    """Difference between two manifests: the changed folders, each complete.

    Attributes:
        base: the digest of the manifest that it applies to; empty: it is a complete manifest.
        digest: of the result.
        folders: new and changed folders by path.
        gone: the paths of deleted folders; everything below them is deleted, too.
    """

    base: bytes
    digest: bytes
    folders: dict[bytes, Folder]
    gone: list[bytes]


def delta(old: Manifest | None, new: Manifest) -> ManifestDelta:
    """Compute the difference between two manifests. If ``old`` is None, the result is complete."""
    if old is None:
        return ManifestDelta(b"", new.digest, new.folders, [])
    folders: dict[bytes, Folder] = {}
    gone: list[bytes] = []
    todo = [b""]
    while todo:
        path = todo.pop()
        a, b = old.folders.get(path), new.folders[path]
        if a is not None and a.digest == b.digest:
            continue
        folders[path] = b
        todo += (entry_path(path, name) for name in b.folders)
        if a is not None:
            gone += (entry_path(path, name) for name in a.folders.keys() - b.folders.keys())
    return ManifestDelta(old.digest, new.digest, folders, gone)


class ManifestError(ValueError):
    """A manifest or its delta is invalid: wrong base, a digest that does not match, or an unsafe name."""


def patched(base: Manifest | None, change: ManifestDelta) -> Manifest:
    """Apply a delta, and verify every digest in it.

    Raises:
        ManifestError: it is not for this base, a name could lead outside the tree, or a digest does not match.
    """
    have = base.digest if base is not None else b""
    if change.base and change.base != have:
        raise ManifestError(f"the changes are for tree {change.base.hex()[:12]}, and this host has {have.hex()[:12]}")
    folders = dict(base.folders) if change.base and base is not None else {}
    for path in change.gone:
        _remove(folders, path)
    before = {path: folders[path] for path in change.folders if path in folders}
    folders.update(change.folders)
    if b"" not in folders:
        raise ManifestError("the manifest has no root folder")
    for path, folder in change.folders.items():
        _check(path, folder)
        for name, digest in folder.folders.items():
            below = folders.get(entry_path(path, name))
            if below is None or below.digest != digest:
                raise ManifestError(
                    f"folder {printable(path)!r} lists a subfolder {printable(name)!r} that it does not have"
                )
        if folder_digest(folder) != folder.digest:
            raise ManifestError(f"the digest of folder {printable(path)!r} does not hold")
    # No digest covers a folder that no other folder lists: none may remain, be smuggled in, or be removed alone.
    unlisted = [entry_path(path, name) for path, old in before.items() for name in old.folders]
    for path in (*change.folders, *change.gone, *unlisted):
        parent, _, name = path.rpartition(b"/")
        listed = path == b"" or (parent in folders and name in folders[parent].folders)
        if listed != (path in folders):
            raise ManifestError(f"folder {printable(path)!r} and the entries of its parent do not agree")
    result = Manifest(folders)
    if result.digest != change.digest:
        raise ManifestError(f"the tree is {result.digest.hex()[:12]} and not {change.digest.hex()[:12]} as announced")
    return result


def _remove(folders: dict[bytes, Folder], path: bytes) -> None:
    """Remove a folder and everything that it lists."""
    todo = [path]
    while todo:
        path = todo.pop()
        folder = folders.pop(path, None)
        if folder is not None:
            todo += (entry_path(path, name) for name in folder.folders)


def _check(path: bytes, folder: Folder) -> None:
    """Raise unless a folder's path and names are valid in a tree, and its entries are complete."""
    if path.startswith(b"/"):  # from an empty name; all others are names of a folder that is checked, too
        raise ManifestError(f"folder {printable(path)!r} has no path inside a tree")
    for names in (folder.files, folder.links, folder.folders):
        for name in names:
            if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
                raise ManifestError(f"{printable(name)!r} in folder {printable(path)!r} is no name of a file")
    if len({*folder.files, *folder.links, *folder.folders}) != sum(
        map(len, (folder.files, folder.links, folder.folders))
    ):
        raise ManifestError(f"a name in folder {printable(path)!r} stands for two entries")
    if not 0 <= folder.mode <= MODE_BITS:
        raise ManifestError(f"folder {printable(path)!r} has an impossible mode")
    for name, entry in folder.files.items():
        if not 0 <= entry.mode <= MODE_BITS or len(entry.digest) != DIGEST_SIZE or entry.size < 0:
            raise ManifestError(f"the entry of {printable(name)!r} in folder {printable(path)!r} is invalid")
        if entry.chunks or entry.sizes:
            fits = len(entry.chunks) == len(entry.sizes) and sum(entry.sizes) == entry.size and min(entry.sizes) > 0
            if not fits or any(len(digest) != DIGEST_SIZE for digest in entry.chunks):
                raise ManifestError(f"the chunks of {printable(name)!r} in folder {printable(path)!r} do not fit")
    if any(not target or b"\0" in target for target in folder.links.values()):
        raise ManifestError(f"a link in folder {printable(path)!r} has an impossible target")


def printable(path: bytes) -> str:
    """Render a path for messages: as text, with undecodable bytes as ``\\xNN``."""
    return path.decode("utf-8", "backslashreplace")


def encode_delta(change: ManifestDelta) -> bytes:
    """Encode a delta (MessagePack)."""
    return msgspec.msgpack.encode(change)


def decode_delta(data: bytes | memoryview) -> ManifestDelta:
    """Decode a delta.

    Raises:
        ManifestError: the bytes are not a delta.
    """
    try:
        return msgspec.msgpack.decode(data, type=ManifestDelta)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ManifestError(f"the received data is not a manifest: {e}") from None


# -- content before its manifest ------------------------------------------------------------------


class EarlyFile(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A file, or some chunks of one, as first read. The manifest that follows is authoritative.

    Attributes:
        path: in the tree.
        size: of the file (bytes).
        mode: its permissions.
        mtime: its modification time (ns since the epoch).
        offset: the offset of the first of these pieces in the file (bytes).
        digests: the concatenated digests of the pieces.
        sizes: of the pieces (bytes).
    """

    path: bytes
    size: int
    mode: int
    mtime: int
    offset: int
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is the whole file."""
        return self.offset == 0 and sum(self.sizes) == self.size
