"""What an ELF file says about where it runs: its machine, the glibc that it needs, and where its libraries are.

Source: System V ABI, "Object Files"; LSB 5.0, "Symbol Versioning" (section ``.gnu.version_r``).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MACHINES = {3: "i386", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_DYNAMIC, _VERNEED, _NOBITS = 6, 0x6FFFFFFE, 8
_ALLOC = 2
_RPATH, _RUNPATH, _NEEDED = 15, 29, 1


@dataclass(frozen=True)
class Elf:
    """An ELF file.

    Attributes:
        machine: as ``platform.machine()`` calls it; a number for others.
        glibc: the newest version of glibc that it needs; empty if none.
        libraries: the shared libraries that it needs.
        runpath: the folders in which they are looked for.
        loaded: the (start, end) in the file of what is loaded when it runs; debug information is not.
    """

    machine: str
    glibc: tuple[int, ...]
    libraries: tuple[bytes, ...]
    runpath: tuple[bytes, ...]
    loaded: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


def read_elf(data: bytes | mmap.mmap) -> Elf | None:
    """What an ELF file says, or None if the bytes are none, or damaged."""
    if data[:4] != b"\x7fELF":
        return None
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError):
        return None


def _read(data: bytes | mmap.mmap) -> Elf:
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    (machine,) = struct.unpack_from(order + "H", data, 18)
    sections = list(_sections(data, wide, order))
    glibc: tuple[int, ...] = ()
    libraries: list[bytes] = []
    runpath: list[bytes] = []
    for section in sections:
        if section.kind == _VERNEED:
            strings = sections[section.link]
            glibc = max([glibc, *_glibc(data, order, section, strings)])
        elif section.kind == _DYNAMIC:
            strings = sections[section.link]
            entry = struct.Struct(order + ("qQ" if wide else "iI"))
            for at in range(section.offset, section.offset + section.size, entry.size):
                tag, value = entry.unpack_from(data, at)
                if tag == _NEEDED:
                    libraries.append(_text(data, strings, value))
                elif tag in (_RPATH, _RUNPATH):
                    runpath += _text(data, strings, value).split(b":")
    loaded = tuple((s.offset, s.offset + s.size) for s in sections if s.flags & _ALLOC and s.kind != _NOBITS)
    return Elf(_MACHINES.get(machine, str(machine)), glibc, tuple(libraries), tuple(runpath), loaded)


def _sections(data: bytes | mmap.mmap, wide: bool, order: str) -> Iterator[_Section]:
    if wide:
        (start,) = struct.unpack_from(order + "Q", data, 40)
        size, count = struct.unpack_from(order + "HH", data, 58)
        form = struct.Struct(order + "IIQQQQIIQQ")
    else:
        (start,) = struct.unpack_from(order + "I", data, 32)
        size, count = struct.unpack_from(order + "HH", data, 46)
        form = struct.Struct(order + "IIIIIIIIII")
    for i in range(count):
        _, kind, flags, _, offset, length, link, info, _, _ = form.unpack_from(data, start + i * size)
        yield _Section(kind, flags, offset, length, link, info)


def _glibc(data: bytes | mmap.mmap, order: str, section: _Section, strings: _Section) -> Iterator[tuple[int, ...]]:
    at = section.offset
    for _ in range(section.info):
        _, count, _, first, following = struct.unpack_from(order + "HHIII", data, at)
        aux = at + first
        for _ in range(count):
            _, _, _, name, next_aux = struct.unpack_from(order + "IHHII", data, aux)
            if found := re.fullmatch(rb"GLIBC_(\d+(?:\.\d+)+)", _text(data, strings, name)):
                yield tuple(int(part) for part in found[1].split(b"."))
            aux += next_aux
        at += following


def _text(data: bytes | mmap.mmap, strings: _Section, at: int) -> bytes:
    start = strings.offset + at
    return bytes(data[start : data.find(b"\0", start)])
