"""Pack environments into archives, and unpack them, for hosts without a connection.

An archive is a tar. Its first member is a manifest, followed by the files as they are at the client, and by
``bin/conda-unpack``. ``unpack`` needs this package. Without it, extract the archive with any tar and run
``bin/python bin/conda-unpack``, as for archives of conda-pack. Unlike in those, files contain the client's prefix and
not the prefix of a package's build, and venvs can be packed, too.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from typing import IO, Never, Self

import msgspec
from blake3 import blake3

from monarch_kernel.private_files import written_whole
from workspace_sync.environment.conda_unpack import FILES
from workspace_sync.environment.facts import MachineFacts, Needs, check_compatible, facts
from workspace_sync.environment.kinds import Environment, environment
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest
from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.model.errors import IncompatibleError, StoreError, TamperedError
from workspace_sync.model.manifest import (
    FileEntry,
    Folder,
    Manifest,
    ManifestDelta,
    ManifestError,
    delta,
    digest_of,
    entry_path,
    patched,
    printable,
)
from workspace_sync.model.workspace import CondaEnvironment
from workspace_sync.scanning import Index

_MANIFEST = ".monarch-environment"
_SCRIPT = "bin/conda-unpack"
_MODULES = ("elf", "rewriting", "conda_unpack")
#: The maximum size of a manifest (bytes).
_LARGEST = 1 << 28
#: The limits for a manifest, whose digests do not compress, and for a file that is rewritten in memory: this many
#: bytes, and this multiple of the archive's size.
_OF_MANIFEST, _OF_FILE = (1 << 20, 4), (4 << 20, 16)
#: The maximum size of a member's extended header, which holds at most a path (bytes).
_LONGEST = 1 << 16
_BLOCK = 1 << 20


class _Header(msgspec.Struct):
    prefix: bytes
    client: MachineFacts
    needs: Needs
    change: ManifestDelta
    version: int = 1


def pack(
    env: EnvironmentScan | Environment | CondaEnvironment | str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write an environment into an archive; return the digest of its tree (hex).

    Args:
        env: the environment, or a scan of it. The Python of a venv is included, unless a scan without it is given.
        file: a path that ends in ``.tar``, ``.tar.gz`` or ``.tar.xz``. The file appears when it is complete.
        progress: called with the number of packed bytes, and their total.

    Raises:
        ScanError: the environment cannot be read, or keeps changing.
        IncompatibleError: the Python of a venv cannot be included.
        StoreError: the archive cannot be written.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(file)))
    if not isinstance(env, EnvironmentScan):
        about = environment(env)
        index = Index(f"pack-{digest_of(os.fsencode(about.folder)).hex()[:16]}")
        env = environment_manifest(about, index, with_python=True)
    total = env.manifest.count()[1]
    done = 0
    try:
        with written_whole(path, None) as raw, _opened(raw, path) as archive:
            header = _Header(os.fsencode(env.environment.prefix), facts(), env.needs, delta(None, env.manifest))
            _add(archive, _MANIFEST, msgspec.msgpack.encode(header), 0o644)
            for member, entry in _members(env.manifest):
                archive.addfile(member, None if entry is None else _Content(env, entry))
                if entry is not None and progress is not None:
                    done += entry.size
                    progress(done, total)
            _add(archive, _SCRIPT, script(env.manifest), 0o755)
    except OSError as e:
        raise StoreError(f"{path} cannot be written: {e.strerror or e}") from None
    return env.manifest.digest.hex()


def _opened(file: IO[bytes], path: str) -> tarfile.TarFile:
    """Open a new archive in a file, compressed according to the suffix of its path."""
    if path.endswith(".tar"):
        return tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT)
    if path.endswith((".tar.gz", ".tgz")):
        return tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT, compresslevel=6)
    if path.endswith(".tar.xz"):
        return tarfile.open(fileobj=file, mode="w:xz", format=tarfile.PAX_FORMAT)
    raise StoreError(f"{path} has no known suffix: name it .tar, .tar.gz or .tar.xz")


def _members(manifest: Manifest) -> Iterator[tuple[tarfile.TarInfo, FileEntry | None]]:
    for path in sorted(manifest.folders):
        folder = manifest.folders[path]
        prefix = os.fsdecode(path) + "/" if path else ""
        if path:
            member = tarfile.TarInfo(os.fsdecode(path))
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, folder.mode, int(time.time())
            yield member, None
        for name, entry in folder.files.items():
            member = tarfile.TarInfo(prefix + os.fsdecode(name))
            member.size, member.mode, member.mtime = entry.size, entry.mode, entry.mtime / 10**9
            yield member, entry
        for name, target in folder.links.items():
            member = tarfile.TarInfo(prefix + os.fsdecode(name))
            member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(target)
            yield member, None


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), mode, int(time.time())
    archive.addfile(member, io.BytesIO(data))


class _Content(io.RawIOBase):
    """Content of a file, read piece by piece."""

    def __init__(self, env: EnvironmentScan, entry: FileEntry) -> None:
        self._env = env
        self._pieces = entry.pieces()
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts: list[memoryview] = []
        wanted = size
        while wanted:
            if not self._left:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                buffer = memoryview(bytearray(piece[2]))
                self._env.read(piece[0], buffer)
                self._left = buffer
            part = self._left[:wanted] if wanted > 0 else self._left
            self._left = self._left[len(part) :]
            parts.append(part)
            wanted -= len(part) if wanted > 0 else 0
        return b"".join(parts)


def script(manifest: Manifest) -> bytes:
    """Build ``bin/conda-unpack`` for an environment."""
    listed = sorted(manifest.files(), key=lambda each: bool(each[1].rewrite and each[1].rewrite.files))
    entries: list[object] = []
    for path, entry in listed:
        if (how := entry.rewrite) is not None:
            files = [_text(each) for each in how.files]
            places = [[_text(source), _text(place)] for source, place in how.places]
            entries.append([_text(path), how.kind, _text(how.prefix), how.space, files, places])
    data = io.BytesIO()
    data.write(b"#!/usr/bin/env python\n")
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        package = resources.files("workspace_sync.environment")
        for module in _MODULES:
            archive.writestr(f"workspace_sync/environment/{module}.py", package.joinpath(f"{module}.py").read_bytes())
        archive.writestr("workspace_sync/__init__.py", b"")
        archive.writestr("workspace_sync/environment/__init__.py", b"")
        archive.writestr("__main__.py", b"from workspace_sync.environment.conda_unpack import main\n\nmain()\n")
        archive.writestr(FILES, json.dumps(entries))
    return data.getvalue()


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def unpack(
    file: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Needs:
    """Unpack the environment of an archive at a prefix; return its requirements, which this host satisfies.

    Nothing is written outside the prefix. Every file is verified by its digest. The prefix appears when the environment
    is complete.

    Args:
        prefix: a path that does not exist, or an empty folder.
        progress: called with the number of written bytes, and their total.

    Raises:
        TamperedError: the archive is damaged, or has members that its manifest does not list.
        IncompatibleError: the environment cannot run here.
        StoreError: it cannot be read or written.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(file)))
    target = os.path.abspath(os.path.expanduser(os.fspath(prefix)))
    if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target) or os.listdir(target)):
        raise StoreError(f"{target} exists: name a path that does not, or an empty folder")
    try:
        with tarfile.open(path, "r|*", tarinfo=_Member) as archive:
            size = os.stat(path).st_size
            header, manifest = _header(archive, path, min(_LARGEST, _OF_MANIFEST[0] + _OF_MANIFEST[1] * size))
            bases = [header.needs.base] if header.needs.base else []
            for base in bases:
                _check_owner(base, header.needs.prefix)
            check_compatible(header.client, facts(bases), header.needs)
            with _target(target) as folder:
                most = _OF_FILE[0] + _OF_FILE[1] * size
                _Unpacking(path, manifest, folder, Rewriter(target), most, progress).run(archive)
    except (tarfile.TarError, EOFError) as e:
        raise TamperedError(f"{path} is no complete archive: {e}; copy it again") from None
    except OSError as e:
        if e.errno is None:  # raised by tarfile itself for a compressed file that is truncated
            raise TamperedError(f"{path} is no complete archive: {e}; copy it again") from None
        raise StoreError(f"{path} cannot be unpacked to {target}: {e.strerror or e}") from None
    return header.needs


class _Member(tarfile.TarInfo):
    """A member of an archive that was packed here.

    Other kinds of members are refused, as they may use unlimited memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        known = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.XHDTYPE)
        if found.type not in known or (found.type == tarfile.XHDTYPE and found.size > _LONGEST):
            raise TamperedError(f"the archive has a member of kind {found.type!r}, which is not packed: copy it again")
        return found

    def _proc_gnusparse_00(self, *_: object) -> Never:
        raise TamperedError("the archive has a sparse file, which is not packed: copy it again")

    _proc_gnusparse_01 = _proc_gnusparse_10 = _proc_gnusparse_00


def _check_owner(base: str, prefix: str) -> None:
    """Raise IncompatibleError if another user owns the Python at a path that the archive names."""
    for path in (base, os.path.join(base, "bin"), os.path.join(base, "bin", "python3")):
        try:
            owner = os.stat(path).st_uid
        except OSError:
            continue
        if owner not in (0, os.geteuid()):
            raise IncompatibleError(
                f"the environment {prefix} is a venv of the Python at {base}, and {path} belongs to user {owner}: pack "
                "it with its Python"
            )


def _header(archive: tarfile.TarFile, path: str, most: int) -> tuple[_Header, Manifest]:
    member = archive.next()
    data = archive.extractfile(member) if member is not None and member.name == _MANIFEST else None
    if member is None or data is None or member.size > most:
        raise TamperedError(
            f"{path} is no archive of an environment that was packed here; for one of conda-pack, extract it and run "
            "its bin/conda-unpack"
        )
    try:
        header = msgspec.msgpack.decode(data.read(), type=_Header)
        return header, patched(None, header.change)
    except (msgspec.DecodeError, UnicodeDecodeError, ManifestError) as e:
        raise TamperedError(f"the manifest of {path} is damaged: {e}; copy it again") from None


@contextmanager
def _target(prefix: str) -> Generator[int]:
    """Create and open a new folder that finally becomes the prefix. After an error its content is removed by name."""
    parent, name = os.path.split(prefix)
    os.makedirs(parent, exist_ok=True)
    outer = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    new = f".{name}.{os.getpid()}.unpacking"
    try:
        os.mkdir(new, 0o700, dir_fd=outer)
        folder = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise StoreError(f"another user has replaced {new} in {parent}: unpack into a folder of your own")
            yield folder
            os.rename(new, name, src_dir_fd=outer, dst_dir_fd=outer)
        except BaseException:
            with suppress(OSError):
                os.rmdir(new, dir_fd=outer)
            raise
        finally:
            os.close(folder)
    finally:
        os.close(outer)


class _Unpacking:
    """Writer of the members that an archive's manifest lists into a folder.

    Links are created last, so that no file is ever written through one.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        folder: int,
        rewriter: Rewriter,
        most: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._folder = folder
        self._rewriter = rewriter
        self._most = most
        self._progress = progress
        self._total = manifest.count()[1]
        self._size = 0
        self._files = dict(manifest.files())
        self._indexes: dict[bytes, tuple[FileEntry, bytes]] = {}
        self._made: list[tuple[bytes, bool]] = []

    def run(self, archive: tarfile.TarFile) -> None:
        try:
            for path in sorted(self._manifest.folders):
                if path:
                    os.mkdir(path, 0o700, dir_fd=self._folder)
                    self._made.append((path, True))
            for member in archive:
                self._member(archive, member)
            if self._files:
                raise TamperedError(f"{self._path} lacks {printable(next(iter(self._files)))}: copy it again")
            for path, (entry, data) in self._indexes.items():
                self._write(path, entry, self._rewriter(entry, data, path=path, read=self._read))
            self._finish()
        except BaseException:
            for path, is_folder in reversed(self._made):
                with suppress(OSError):
                    (os.rmdir if is_folder else os.unlink)(path, dir_fd=self._folder)
            raise

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = os.fsencode(member.name)
        if member.isdir() or member.issym() or member.name in (_MANIFEST, _SCRIPT):
            return  # folders and links follow the manifest; the rest is not for this host
        entry = self._files.pop(path, None)
        content = archive.extractfile(member) if member.isreg() else None
        if entry is None or content is None or member.size != entry.size:
            raise TamperedError(
                f"{self._path} has {printable(path)}, which is not as its manifest lists it: copy it again"
            )
        if entry.rewrite is None:
            self._copy(path, entry, content)
        else:
            if entry.size + sum(len(data) for _, data in self._indexes.values()) > self._most:
                raise TamperedError(
                    f"{printable(path)} in {self._path} has {entry.size} bytes, more than can be in an archive of that "
                    "size: copy it again"
                )
            data = content.read()
            self._check(path, entry, digest_of(data))
            if entry.rewrite.files:
                self._indexes[path] = entry, data
            else:
                self._write(path, entry, self._rewriter(entry, data, path=path))
        self._size += entry.size
        if self._progress is not None:
            self._progress(self._size, self._total)

    def _copy(self, path: bytes, entry: FileEntry, content: IO[bytes]) -> None:
        digest = blake3()
        with self._new(path) as file:
            while block := content.read(_BLOCK):
                digest.update(block)
                file.write(block)
            self._settle(file.fileno(), entry)
        self._check(path, entry, digest.digest())

    def _write(self, path: bytes, entry: FileEntry, data: bytes) -> None:
        with self._new(path) as file:
            file.write(data)
            self._settle(file.fileno(), entry)

    def _new(self, path: bytes) -> io.FileIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = io.FileIO(os.open(path, flags, 0o600, dir_fd=self._folder), "wb")
        self._made.append((path, False))
        return file

    @staticmethod
    def _settle(fd: int, entry: FileEntry) -> None:
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime, entry.mtime))

    def _check(self, path: bytes, entry: FileEntry, digest: bytes) -> None:
        if digest != entry.digest:
            raise TamperedError(f"{printable(path)} in {self._path} is not what its digest says: copy it again")

    def _read(self, path: bytes) -> bytes:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder), "rb") as file:
            return file.read()

    def _finish(self) -> None:
        folders: list[tuple[bytes, Folder]] = sorted(self._manifest.folders.items(), reverse=True)
        for path, folder in folders:
            for name, target in folder.links.items():
                link = entry_path(path, name)
                os.symlink(target, link, dir_fd=self._folder)
                self._made.append((link, False))
        for path, folder in folders:
            os.chmod(path or b".", folder.mode, dir_fd=self._folder)
