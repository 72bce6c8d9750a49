"""A prefix in compiled modules (.pyc): the name of the source, which each code object has.

A string in a .pyc is preceded by its type and length (the marshal format), so a prefix of another length changes both.
It is patched where it stands. Loading and dumping the code would be simpler, but would give other bytes: marshal marks
an object for references by its reference count.

A module whose source names the prefix has it in constants, too, and their lengths are in the tables of columns. Such a
module is not patched but left out, and the host compiles it.

Source: CPython's Python/marshal.c (versions 2 to 4); PEP 552 (header).
"""

from __future__ import annotations

from workspace_sync.environment.text import mentions

#: The bytes before the code: magic number, flags, and either time and size of the source, or its hash.
HEADER = 16
_REF = 0x80
_SHORT = b"zZ"
_LONG = b"aAut"


class CompiledError(ValueError):
    """A compiled module has a form that is not known here."""


def source_stamp(data: bytes) -> tuple[int, int] | None:
    """The (mtime in s, size) of the source that a .pyc was compiled from; None if it has a hash of it instead."""
    if len(data) < HEADER or int.from_bytes(data[4:8], "little"):
        return None
    return int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")


def replace_compiled(data: bytes, prefix: bytes, target: bytes) -> bytes:
    """A .pyc as the compiler would write it at another prefix, if its source does not name the prefix.

    Raises:
        CompiledError: the prefix is in a place that cannot be changed.
    """
    pattern = mentions(prefix)
    parts: list[bytes] = []
    done = HEADER
    while found := pattern.search(data, done):
        start = found.start()
        if start - 2 >= done and data[start - 2] & ~_REF in _SHORT:
            kind, begin, size = data[start - 2], start - 2, data[start - 1]
        elif start - 5 >= done and data[start - 5] & ~_REF in _LONG:
            kind, begin, size = data[start - 5], start - 5, int.from_bytes(data[start - 4 : start], "little")
        else:
            raise CompiledError(f"it has the prefix within a constant, at byte {start}")
        end = start + size
        if size < len(prefix) or end > len(data):
            raise CompiledError(f"it has the prefix in something else than a string, at byte {start}")
        parts += (data[done:begin], _string(kind, pattern.sub(lambda _: target, data[start:end])))
        done = end
    return data[:HEADER] + b"".join(parts) + data[done:]


def _string(kind: int, text: bytes) -> bytes:
    """A string of marshal; ASCII of under 256 bytes has a form of its own."""
    ref, code = kind & _REF, chr(kind & ~_REF)
    if code in "zZaA":
        if not text.isascii():
            code = "t" if code in "ZA" else "u"
        elif len(text) < 256:
            return bytes((ord("Z" if code in "ZA" else "z") | ref, len(text))) + text
        else:
            code = "A" if code in "ZA" else "a"
    elif code in "ut" and text.isascii():
        return _string(ref | ord("Z" if code == "t" else "z"), text)
    return bytes((ord(code) | ref,)) + len(text).to_bytes(4, "little") + text
