"""Read ELF files: their machine, the glibc that they need, and their search paths for libraries.

Source: System V ABI, "Object Files"; LSB 5.0, "Symbol Versioning" (section ``.gnu.version_r``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MACHINES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_DYNAMIC, _VERNEED, _NOBITS = 6, 0x6FFFFFFE, 8
_ALLOC = 2
_RPATH, _RUNPATH = 15, 29


@dataclass(frozen=True)
class Elf:
    """An ELF file.

    Attributes:
        machine: as ``platform.machine()`` calls it; a number for others.
        glibc: the newest version of glibc that it needs; empty if none.
        runpaths: the search paths for libraries, as written in the file.
        loaded: the (start, end) of the loaded parts of the file; these exclude debug information.
    """

    machine: str
    glibc: tuple[int, ...]
    runpaths: tuple[bytes, ...]
    loaded: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


class _Reader:
    """Reader of numbers at offsets of a file."""

    def __init__(self, read: Callable[[int, int], bytes], wide: bool, little: bool) -> None:
        self.read = read
        self.wide = wide
        self._order = "<" if little else ">"

    def unpack(self, form: str, at: int) -> tuple[int, ...]:
        """Unpack the numbers at an offset."""
        packed = struct.Struct(self._order + form)
        return packed.unpack(self.read(at, packed.size))

    def table(self, form: str, at: int, size: int) -> Iterator[tuple[int, ...]]:
        """Iterate over the rows of a table."""
        packed = struct.Struct(self._order + form)
        data = self.read(at, size)
        return packed.iter_unpack(data[: len(data) // packed.size * packed.size])


def read_elf(read: Callable[[int, int], bytes]) -> Elf | None:
    """Read an ELF file; return None if it is not one, or is damaged.

    Args:
        read: returns bytes of the file: (size, offset), as for ``os.pread``.
    """
    head = read(16, 0)
    if head[:4] != b"\x7fELF":
        return None
    try:
        return _read(_Reader(lambda at, size: _exactly(read(size, at), size), head[4] == 2, head[5] == 1))
    except (struct.error, IndexError, ValueError):
        return None


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise ValueError("the file is cut off")
    return data


def _read(file: _Reader) -> Elf:
    (machine,) = file.unpack("H", 18)
    sections = list(_sections(file))
    glibc: tuple[int, ...] = ()
    runpaths: list[bytes] = []
    for section in sections:
        if section.kind == _VERNEED:
            glibc = max([glibc, *_glibc(file, section, _strings(file, sections[section.link]))])
        elif section.kind == _DYNAMIC:
            strings = _strings(file, sections[section.link])
            for tag, value in file.table("qQ" if file.wide else "iI", section.offset, section.size):
                if tag in (_RPATH, _RUNPATH):
                    runpaths.append(_text(strings, value))
    loaded = tuple((s.offset, s.offset + s.size) for s in sections if s.flags & _ALLOC and s.kind != _NOBITS)
    return Elf(_MACHINES.get(machine, str(machine)), glibc, tuple(runpaths), loaded)


def _sections(file: _Reader) -> Iterator[_Section]:
    (start,) = file.unpack("Q", 40) if file.wide else file.unpack("I", 32)
    size, count = file.unpack("HH", 58 if file.wide else 46)
    form = "IIQQQQIIQQ" if file.wide else "IIIIIIIIII"
    if size != struct.calcsize("<" + form):
        raise ValueError("the table of sections has another form")
    for _, kind, flags, _, offset, length, link, info, _, _ in file.table(form, start, size * count):
        yield _Section(kind, flags, offset, length, link, info)


def _strings(file: _Reader, section: _Section) -> bytes:
    return file.read(section.offset, section.size)


def _glibc(file: _Reader, section: _Section, strings: bytes) -> Iterator[tuple[int, ...]]:
    at = section.offset
    for _ in range(section.info):
        _, count, _, first, following = file.unpack("HHIII", at)
        aux = at + first
        for _ in range(count):
            _, _, _, name, next_aux = file.unpack("IHHII", aux)
            if found := re.fullmatch(rb"GLIBC_(\d+(?:\.\d+)+)", _text(strings, name)):
                yield tuple(int(part) for part in found[1].split(b"."))
            aux += next_aux
        at += following


def _text(strings: bytes, at: int) -> bytes:
    return strings[at : strings.index(b"\0", at)]
