"""Content of an environment that a host creates by itself, from a lock file and its own package cache.

The client's manifest lists the content of the environment. A host that installs the same packages has most of it, and
only the rest is sent. The installer verifies packages against the hashes of the lock file; the installed files are then
verified against the digests of the client's files. If a host cannot install, or its installer creates other files, the
client sends these files. All hosts get the same environment.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from monarch_kernel import programs
from workspace_sync.environment.creation import create
from workspace_sync.environment.kinds import Environment, distributions
from workspace_sync.environment.manifests import EnvironmentScan, environment_manifest
from workspace_sync.environment.rewriter import Rewriter
from workspace_sync.model.errors import IncompatibleError, ScanError, StoreError
from workspace_sync.model.manifest import FileEntry, Manifest, digest_of
from workspace_sync.scanning import Index

#: The maximum size of a lock file (bytes).
_LARGEST = 64 << 20
_PR_SET_PDEATHSIG = 1
_CHILD = "from workspace_sync.environment.locked import main; main()"


class LockFile(msgspec.Struct, array_like=True):
    """A lock file, as sent to hosts.

    Attributes:
        name: of the file, which determines its format.
        folder: of the file at the client; relative paths in it refer to it.
        data: its content, compressed.
        prefix: of the environment at the client.
        base: the Python that it was created from; empty for conda.
        version: of its Python, such as "3.11".
        packages: the installed packages: versions by name.
    """

    name: str
    folder: str
    data: bytes
    prefix: str
    base: str
    version: str
    packages: dict[str, str]


class _Order(msgspec.Struct, array_like=True):
    lock: str
    prefix: str
    python: str
    only: dict[str, str]


def read_lock(path: str, env: Environment) -> LockFile:
    """Read a lock file to send it to hosts.

    Args:
        path: of the file.
        env: the environment at the client.

    Raises:
        ScanError: it cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as e:
        raise ScanError(f"the lock file {path} cannot be read: {e.strerror}") from None
    if len(data) > _LARGEST:
        raise ScanError(f"{path} has more than {_LARGEST >> 20} MiB, which no lock file has")
    packages = {re.sub(r"[-_.]+", "-", name): about[0] for name, about in distributions(env).items()}
    folder, name = os.path.split(os.path.realpath(path))
    return LockFile(name, folder, zlib.compress(data), env.prefix, env.base, env.version, packages)


@contextmanager
def made_from_lock(lock: LockFile, folder: str, cancelled: Callable[[], bool]) -> Generator[LockedContent]:
    """Install the packages of a lock file into a folder, whose content is removed afterwards.

    Args:
        lock: the client's lock file.
        folder: an empty folder that only this user can access.
        cancelled: polled often; true: end soon.

    Raises:
        IncompatibleError: the lock file is for other machines or another Python, or has no package that can be
            installed.
        StoreError: the installer is missing or has failed.
    """
    here = "{}.{}".format(*sys.version_info)
    if lock.base and lock.version != here:
        raise IncompatibleError(f"the environment has Python {lock.version}, and its sync agent runs in Python {here}")
    place = os.path.join(folder, secrets.token_hex(8))
    os.mkdir(place, 0o700)
    try:
        prefix = os.path.join(place, "env")
        _install(lock, place, prefix, cancelled)
        yield LockedContent(environment_manifest(prefix, Index("made", place), cancelled=cancelled), lock.prefix)
    finally:
        clear(place)


class LockedContent:
    """Content that a host has installed, by the paths of the client's environment.

    Args:
        scanned: the scan of the installed environment.
        prefix: of the environment at the client.
    """

    def __init__(self, scanned: EnvironmentScan, prefix: str) -> None:
        self._scanned = scanned
        self._original = Rewriter(prefix)
        self._made: dict[bytes, bytes] = {}

    def pieces(self, target: Manifest, wanted: Mapping[bytes, int]) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the wanted pieces of the client's environment that are here, with their verified digests.

        Args:
            target: the client's environment.
            wanted: the pieces that are missing, with their sizes.
        """
        given = set[bytes]()
        for path, entry in target.files():
            here = self._scanned.manifest.file(path)
            if here is None:
                continue
            open_pieces = [piece for piece in entry.pieces() if piece[0] in wanted and piece[0] not in given]
            if not open_pieces:
                continue
            data = memoryview(self._original_of(path, here))
            self._made.clear()
            for digest, offset, size in open_pieces:
                part = data[offset : offset + size]
                if len(part) == size and digest_of(part) == digest:
                    given.add(digest)
                    yield digest, part

    def _original_of(self, path: bytes, entry: FileEntry) -> bytes:
        """Return the content that a file would have at the client."""
        if path not in self._made:
            data = bytearray(entry.size)
            for digest, offset, size in entry.pieces():
                self._scanned.read(digest, memoryview(data)[offset : offset + size])
            self._made[path] = self._original(entry, bytes(data), path=path, read=self._other)
        return self._made[path]

    def _other(self, path: bytes) -> bytes:
        entry = self._scanned.manifest.file(path)
        return b"" if entry is None else self._original_of(path, entry)


def _install(lock: LockFile, place: str, prefix: str, cancelled: Callable[[], bool]) -> None:
    """Run the installer in a separate process that can be terminated and ends with this one."""
    path = os.path.join(place, lock.name)
    with open(path, "xb") as file:
        file.write(zlib.decompress(lock.data))
    python = os.path.join(lock.base, "bin", f"python{lock.version}") if lock.base else ""
    order = _Order(path, prefix, python if os.path.exists(python) else "", lock.packages)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": place}
    child = programs.start(
        [sys.executable, "-c", _CHILD, lock.folder],
        env=variables,
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with child:
        given: bytes | None = msgspec.msgpack.encode(order)
        while True:
            try:
                said = child.communicate(given, timeout=0.2)[1]
                break
            except subprocess.TimeoutExpired:
                given = None
                if cancelled():
                    child.terminate()
        if child.returncode:
            text = said.decode(errors="replace").strip()
            raise StoreError(text[-2000:] or f"the installer ended with status {child.returncode}")


def main() -> None:
    """Run the installing process, which reads its instructions from standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))  # the installer ends, too
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Order)
    try:
        create(order.lock, order.prefix, python=order.python or None, only=order.only, base=sys.argv[1])
    except (IncompatibleError, StoreError) as e:
        sys.exit(str(e))


def clear(folder: str) -> None:
    """Remove a folder that was created here, with its content. Links are removed and never followed."""
    for _, folders, files, fd in os.fwalk(folder, topdown=False, follow_symlinks=False):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=fd)
            except NotADirectoryError:  # a link to a folder
                os.unlink(name, dir_fd=fd)
    os.rmdir(folder)
