"""What the content of a file has to do with a prefix; found once a digest, and remembered."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from workspace_sync.environment.compiled import source_stamp
from workspace_sync.environment.elf import Elf, read_elf
from workspace_sync.environment.text import mentions
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import FileEntry, printable

_T = TypeVar("_T")

_BLOCK = 4 << 20
# Code beside ELF; in other data, such as archives and databases, nothing may be changed.
_CODE = (b"!<arch>\n", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


class Content(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is known of some content.

    Attributes:
        mentions: how often it names the prefix.
        form: "text", "code" (ELF …), "data" (anything else with NULs in it), or "pyc".
        stamp: the time and size of the source of a .pyc; empty if it has none.
        machine: of an ELF file; empty for others.
        glibc: what an ELF file needs; empty if nothing.
        hidden: all its mentions are in what is not loaded (debug information).
        runpath: all its mentions are where it looks for shared libraries.
    """

    mentions: int
    form: str
    stamp: tuple[int, ...] = ()
    machine: str = ""
    glibc: tuple[int, ...] = ()
    hidden: bool = False
    runpath: bool = False


class Contents:
    """Reads files of one environment, each content once.

    Args:
        folder: of the environment.
        prefix: as its files name it.
        known: what an earlier process has found, by digest.
    """

    def __init__(self, folder: str, prefix: bytes, known: dict[bytes, Content] | None = None) -> None:
        self.folder = os.fsencode(folder)
        self.prefix = prefix
        self.known = {} if known is None else known
        #: Bytes that had to be read.
        self.read_bytes = 0
        self._pattern = mentions(prefix)

    def content(self, path: bytes, entry: FileEntry) -> Content:
        """What is known of a file, read if necessary.

        Raises:
            ScanError: it cannot be read, or is not what was scanned.
        """
        known = self.known.get(entry.digest)
        if known is None:
            known = self.known[entry.digest] = self._open(path, entry, lambda fd: self._look(fd, path, entry))
        return known

    def data(self, path: bytes, entry: FileEntry) -> bytes:
        """The whole content of a file that is not large.

        Raises:
            ScanError: it cannot be read, or is not what was scanned.
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
            # The scan has just hashed it. Its time and size tell whether it has held still since.
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
        """Where a file names the prefix, and whether it has NULs; its memory is that of a block.

        Files are read and not mapped: one that is truncated while it is mapped would end the process.
        """
        found: list[int] = []
        zeros = False
        keep = len(self.prefix) + 2  # what follows a mention decides whether it is one
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
