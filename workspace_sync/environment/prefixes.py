"""Decide how each file of an environment contains its prefix: by installers' records if they match, else by content.

Source: conda's records (``conda-meta/*.json``): https://conda.org/learn/ceps/cep-0034/.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from workspace_sync.environment.elf import Elf, read_elf
from workspace_sync.environment.kinds import Environment
from workspace_sync.environment.rewriting import (
    mentions,
    record_hash,
    record_rows,
    restored_binary,
    restored_text,
    source_stamp,
)
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import FileEntry, Folder, Manifest, Rewrite, digest_of, printable, seal

_T = TypeVar("_T")

_BLOCK = 4 << 20
# Magic numbers of code other than ELF. Other data, such as archives and databases, must not be changed.
_CODE = (b"!<arch>\n", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


class Content(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Facts about the content of a file.

    Attributes:
        mentions: the number of occurrences of the prefix.
        form: "text", "code" (ELF …), "data" (anything else that contains NULs), or "pyc".
        stamp: the time and size of the source of a .pyc; empty if it has none.
        machine: of an ELF file; empty for others.
        glibc: the version of glibc that an ELF file needs; empty if none.
        hidden: whether all mentions are in parts that are not loaded (debug information).
        runpath: whether all mentions are in search paths for shared libraries.
    """

    mentions: int
    form: str
    stamp: tuple[int, ...] = ()
    machine: str = ""
    glibc: tuple[int, ...] = ()
    hidden: bool = False
    runpath: bool = False


class Contents:
    """Reader of the files of one environment. It reads each content once.

    Args:
        folder: of the environment.
        prefix: as its files name it.
        known: the results of an earlier process, by digest.
    """

    def __init__(self, folder: str, prefix: bytes, known: dict[bytes, Content] | None = None) -> None:
        self.folder = os.fsencode(folder)
        self.prefix = prefix
        self.known = {} if known is None else known
        #: The number of bytes that had to be read.
        self.read_bytes = 0
        self._pattern = mentions(prefix)

    def content(self, path: bytes, entry: FileEntry) -> Content:
        """Return the facts about a file, which is read if necessary.

        Raises:
            ScanError: it cannot be read, or has changed since the scan.
        """
        known = self.known.get(entry.digest)
        if known is None:
            known = self.known[entry.digest] = self._open(path, entry, lambda fd: self._look(fd, path, entry))
        return known

    def data(self, path: bytes, entry: FileEntry) -> bytes:
        """Return the whole content of a small file.

        Raises:
            ScanError: it cannot be read, or has changed since the scan.
        """

        def read(fd: int) -> bytes:
            with os.fdopen(os.dup(fd), "rb") as file:
                return file.read()

        return self._open(path, entry, read)

    def _open(self, path: bytes, entry: FileEntry, use: Callable[[int], _T]) -> _T:
        try:
            fd = os.open(os.path.join(self.folder, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise ScanError(f"{self._shown(path)} cannot be read: {e.strerror}") from None
        try:
            result = use(fd)
            # The scan has just hashed it. Its time and size show whether it has changed since.
            stat = os.fstat(fd)
        finally:
            os.close(fd)
        if (stat.st_size, stat.st_mtime_ns) != (entry.size, entry.mtime):
            raise ScanError(
                f"{self._shown(path)} changed while it was read: sync again when the environment is at rest"
            )
        self.read_bytes += entry.size
        return result

    def _shown(self, path: bytes) -> str:
        return printable(os.path.join(self.folder, path))

    def _look(self, fd: int, path: bytes, entry: FileEntry) -> Content:
        if not entry.size:
            return Content(0, "text")
        head = os.pread(fd, 16, 0)
        found, zeros = self._found(fd)
        if path.endswith(b".pyc"):
            return Content(len(found), "pyc", source_stamp(head) or ())
        if (elf := read_elf(lambda size, at: os.pread(fd, size, at))) is not None:
            loaded = self._loaded(found, elf)
            hidden = bool(found) and not loaded
            runpath = sum(len(self._pattern.findall(each)) for each in elf.runpaths)
            return Content(len(found), "code", (), elf.machine, elf.glibc, hidden, 0 < runpath == loaded)
        return Content(len(found), "code" if head.startswith(_CODE) else "data" if zeros else "text")

    @staticmethod
    def _loaded(found: list[int], elf: Elf) -> int:
        return sum(any(start <= at < end for start, end in elf.loaded) for at in found)

    def _found(self, fd: int) -> tuple[list[int], bool]:
        """Find the mentions of the prefix in a file, and whether it contains NULs, with the memory of one block.

        Files are read and not mapped: truncating a mapped file would end the process.
        """
        found: list[int] = []
        zeros = False
        keep = len(self.prefix) + 2  # the bytes after a match decide whether it is a mention
        at = 0
        data = b""
        while block := os.pread(fd, _BLOCK, at + len(data)):
            zeros = zeros or b"\0" in block
            data += block
            if self.prefix in data:
                end = len(data) - keep
                found += (at + match.start() for match in self._pattern.finditer(data) if match.start() < end)
            at += max(0, len(data) - keep)
            data = data[-keep:]
        found += (at + match.start() for match in self._pattern.finditer(data))
        return found, zeros


class CondaPath(msgspec.Struct, rename={"path": "_path"}):
    """A file that a conda package has installed.

    Attributes:
        path: in the prefix.
        sha256: of the file in the package (hex).
        size_in_bytes: in the package (conda) or in the prefix (rattler).
        file_mode: "text" or "binary", for a file that names the prefix.
        prefix_placeholder: the prefix at which it was built, for such a file.
    """

    path: str
    sha256: str | None = None
    size_in_bytes: int | None = None
    file_mode: str | None = None
    prefix_placeholder: str | None = None


class _Paths(msgspec.Struct):
    paths: list[CondaPath] = []


class CondaRecord(msgspec.Struct):
    """Record of one package that conda or rattler has installed.

    Attributes:
        name: of the package.
        files: its paths in the prefix.
        paths_data: the same with hashes.
    """

    name: str
    files: list[str] = []
    paths_data: _Paths = msgspec.field(default_factory=_Paths)


def conda_record(data: bytes) -> CondaRecord | None:
    """Decode a record of ``conda-meta``; return None if the file is not one."""
    try:
        return msgspec.json.decode(data, type=CondaRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_CACHE = b"__pycache__"
# The content of INSTALLER if uv has installed a distribution.
_UV = digest_of(b"uv")


@dataclass
class Records:
    """Records of the installers of an environment.

    Attributes:
        conda: the files of conda packages by path.
        conda_records: the paths of conda's records, with the packages.
        rows: the (hash, size) of files in RECORDs by path, and the RECORD's own path.
        record_files: the paths of the RECORDs.
        by_uv: the paths of RECORDs written by uv.
    """

    conda: dict[bytes, CondaPath] = field(default_factory=dict)
    conda_records: dict[bytes, CondaRecord] = field(default_factory=dict)
    rows: dict[bytes, tuple[str, str, bytes]] = field(default_factory=dict)
    record_files: list[bytes] = field(default_factory=list)
    by_uv: set[bytes] = field(default_factory=set)

    def lists(self, path: bytes) -> bool:
        """Return whether an installer's records list a file."""
        return path in self.conda or path in self.rows


def read_records(manifest: Manifest, contents: Contents) -> Records:
    """Read conda's records, and all RECORDs, of an environment."""
    found = Records()
    for path, folder in manifest.folders.items():
        if path == b"conda-meta":
            for name, entry in folder.files.items():
                if name.endswith(b".json"):
                    _read_conda(path + b"/" + name, entry, contents, found)
        elif path.endswith(b".dist-info") and b"RECORD" in folder.files:
            read_record(path + b"/RECORD", manifest, contents, found)
    return found


def read_record(path: bytes, manifest: Manifest, contents: Contents, found: Records) -> None:
    """Read one RECORD."""
    entry = manifest.file(path)
    if entry is None:
        return
    found.record_files.append(path)
    installer = manifest.file(path.removesuffix(b"RECORD") + b"INSTALLER")
    if installer is not None and installer.digest == _UV:
        found.by_uv.add(path)
    for listed, value, size in record_rows(contents.data(path, entry), path):
        found.rows[listed] = (value, size, path)


def _read_conda(path: bytes, entry: FileEntry, contents: Contents, found: Records) -> None:
    package = conda_record(contents.data(path, entry))
    if package is None:
        return
    found.conda_records[path] = package
    for name in package.files:
        found.conda[name.encode()] = CondaPath(name)
    for each in package.paths_data.paths:
        found.conda[each.path.encode()] = each


@dataclass
class Decisions:
    """Treatment of the files of an environment.

    Attributes:
        rewrites: the rewrites of files, by path.
        dropped: compiled modules that are left out, because no installer created them, or because they are out of date.
        notes: sentences for the user.
    """

    rewrites: dict[bytes, Rewrite] = field(default_factory=dict)
    dropped: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def decide(environment: Environment, manifest: Manifest, contents: Contents, found: Records) -> Decisions:
    """Decide for each file how its prefix is rewritten, and which compiled modules are included."""
    made = Decisions()
    prefix = contents.prefix
    compiled: list[tuple[bytes, FileEntry]] = []
    unchanged: list[str] = []
    for path, entry in manifest.files():
        if path.endswith(b".pyc"):
            compiled.append((path, entry))
            continue
        content = contents.content(path, entry)
        listed = found.conda.get(path)
        if path in found.conda_records or path in found.record_files:
            continue
        if not content.mentions:
            # The prefix may have been too long for the shebang, which was the only mention of it.
            data = contents.data(path, entry) if listed is not None and listed.file_mode == "text" else b""
            if listed is not None and data and (how := _as_recorded(data, prefix, listed)):
                made.rewrites[path] = how
            continue
        if how := _of_file(path, entry, contents, found):
            made.rewrites[path] = how
        elif not content.hidden:
            unchanged.append(printable(path))
    for path, entry in compiled:
        _decide_compiled(path, entry, manifest, contents, found, made)
    for path, package in found.conda_records.items():
        _index_conda(path, package, manifest, prefix, made)
    index_records(manifest, contents, found, made)
    if unchanged:
        made.notes.append(
            f"{len(unchanged)} data files name {printable(prefix)} and are copied as they are: " + _few(unchanged)
        )
    return made


def _of_file(path: bytes, entry: FileEntry, contents: Contents, found: Records) -> Rewrite | None:
    """Return the rewrite of a file that names the prefix; None: the file is copied unchanged."""
    prefix, content = contents.prefix, contents.content(path, entry)
    listed = found.conda.get(path)
    if listed is not None and listed.prefix_placeholder:
        if how := _as_recorded(contents.data(path, entry), prefix, listed):
            return how
        if listed.file_mode == "binary":
            return Rewrite("binary", prefix, len(listed.prefix_placeholder.encode()))
    if content.form == "text":
        if listed is not None or path not in found.rows:
            return Rewrite("text", prefix)
        return Rewrite("uv" if found.rows[path][2] in found.by_uv else "script", prefix)
    if content.form == "code" and not content.hidden:
        return Rewrite("runpath", prefix) if content.runpath else Rewrite("binary", prefix, len(prefix))
    return None


def _as_recorded(data: bytes, prefix: bytes, listed: CondaPath) -> Rewrite | None:
    """Return the rewriting that turns the file of the package into this file; None: the record does not match it."""
    if not listed.prefix_placeholder:
        return None
    placeholder = listed.prefix_placeholder.encode()
    if listed.file_mode == "binary":
        package = restored_binary(data, prefix, placeholder)
        if package is not None and hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite("binary", prefix, len(placeholder))
        return None
    for kind, package in restored_text(data, prefix, placeholder):
        if hashlib.sha256(package).hexdigest() == listed.sha256:
            return Rewrite(kind, prefix)
    return None


def _decide_compiled(
    path: bytes, entry: FileEntry, manifest: Manifest, contents: Contents, found: Records, made: Decisions
) -> None:
    content = contents.content(path, entry)
    cached = path.rpartition(b"/")[0].endswith(_CACHE)
    # If a source names the prefix, the module depends on more than its strings (see ``rewriting``).
    if cached and (not found.lists(path) or source_of(path) in made.rewrites or is_stale(path, content, manifest)):
        made.dropped.add(path)
    elif content.mentions:
        made.rewrites[path] = Rewrite("pyc", contents.prefix)


def source_of(path: bytes) -> bytes:
    """Return the source of a compiled module in a ``__pycache__``."""
    folder, _, name = path.rpartition(b"/")
    return posixpath.join(posixpath.dirname(folder), name.partition(b".")[0] + b".py")


def is_stale(path: bytes, content: Content, manifest: Manifest) -> bool:
    """Return whether a compiled module in a ``__pycache__`` was compiled from another source than the present one."""
    if not path.rpartition(b"/")[0].endswith(_CACHE):
        return False
    source = manifest.file(source_of(path))
    return source is None or not _is_current(content.stamp, source)


def _is_current(stamp: tuple[int, ...], source: FileEntry) -> bool:
    if not stamp:
        return True
    return stamp == (source.mtime // 10**9 & 0xFFFFFFFF, source.size & 0xFFFFFFFF)


def _index_conda(path: bytes, package: CondaRecord, manifest: Manifest, prefix: bytes, made: Decisions) -> None:
    files: list[bytes] = []
    sizes = True
    for each in package.paths_data.paths:
        name = each.path.encode()
        entry = manifest.file(name)
        if name in made.rewrites and entry is not None:
            files.append(name)
            sizes = sizes and each.size_in_bytes == entry.size
    if files:
        made.rewrites[path] = Rewrite("rattler" if sizes else "conda", prefix, 0, tuple(files))


def compiled_of(path: bytes, manifest: Manifest) -> set[bytes]:
    """Return the compiled modules of a source."""
    folder, _, name = path.rpartition(b"/")
    cache = folder + b"/__pycache__" if folder else b"__pycache__"
    stem = name.removesuffix(b".py") + b"."
    there = manifest.folders.get(cache)
    return set() if there is None else {cache + b"/" + each for each in there.files if each.startswith(stem)}


def index_records(manifest: Manifest, contents: Contents, found: Records, made: Decisions) -> None:
    """Make each RECORD depend on the rewritten files that it lists, so that it is rewritten after them."""
    files: dict[bytes, list[bytes]] = {}
    for path, (value, _, record) in found.rows.items():
        entry = manifest.file(path)
        if not value or entry is None or (path not in made.rewrites and entry.rewrite is None):
            continue
        # If a hash is wrong now, the host must not correct it.
        if record_hash(contents.data(path, entry)) == value:
            files.setdefault(record, []).append(path)
    for record in found.record_files:
        entry = manifest.file(record)
        if entry is not None and (record in files or contents.content(record, entry).mentions):
            made.rewrites[record] = Rewrite("record", contents.prefix, 0, tuple(files.get(record, ())))


def _few(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def glibc_floor(manifest: Manifest, contents: Contents) -> tuple[tuple[int, ...], set[str]]:
    """Return the newest glibc that compiled code of an environment needs, and the machines that the code is for."""
    floor: tuple[int, ...] = ()
    machines: set[str] = set()
    for content in _all(manifest, contents):
        if content.machine:
            machines.add(content.machine)
            floor = max(floor, content.glibc)
    return floor, machines


def _all(manifest: Manifest, contents: Contents) -> Iterator[Content]:
    for _, entry in manifest.files():
        if (content := contents.known.get(entry.digest)) is not None:
            yield content


def applied(manifest: Manifest, decisions: Decisions, prefix: bytes, folder: bytes) -> Manifest:
    """Apply the decisions to a manifest; unchanged parts are shared with the given one, not copied."""
    changed: dict[bytes, Folder] = {}

    def of(path: bytes) -> Folder:
        if path not in changed:
            changed[path] = manifest.folders[path].copy()
        return changed[path]

    for path, how in decisions.rewrites.items():
        parent, _, name = path.rpartition(b"/")
        files = of(parent).files
        files[name] = msgspec.structs.replace(files[name], rewrite=how)
    for path in decisions.dropped:
        parent, _, name = path.rpartition(b"/")
        del of(parent).files[name]
    for path, each in manifest.folders.items():
        for name, target in each.links.items():
            if (inside := _inside(target, prefix, folder)) is not None:
                of(path).links[name] = posixpath.relpath(inside or b".", path or b".")
    gone: set[bytes] = set()
    for path in [p for p in changed if p.endswith(b"__pycache__")]:
        each = changed[path]
        if not (each.files or each.links or each.folders):
            parent, _, name = path.rpartition(b"/")
            del of(parent).folders[name]
            gone.add(path)
    folders = {path: changed.get(path, each) for path, each in manifest.folders.items() if path not in gone}
    return seal(folders, [path for path in changed if path not in gone])


def _inside(target: bytes, prefix: bytes, folder: bytes) -> bytes | None:
    """Return the path in the environment that an absolute link leads to; None: it leads elsewhere."""
    for root in (prefix, folder):
        if target == root:
            return b""
        if target.startswith(root + b"/"):
            return target[len(root) + 1 :]
    return None
