"""A prefix in compiled code: C strings that an installer has padded with NULs.

conda packages are built at a prefix of 255 bytes. An installer replaces it in each C string and pads the string with
NULs, so that nothing moves. The padding is still there at the prefix of the client, and a longer prefix fits into it.
"""

from __future__ import annotations

import posixpath

from workspace_sync.environment.elf import read_elf
from workspace_sync.environment.text import mentions


class PrefixTooLongError(ValueError):
    """A string of a binary has no space for a prefix.

    Attributes:
        space: the bytes that it has.
    """

    def __init__(self, space: int) -> None:
        super().__init__(f"there is space for a prefix of {space} bytes")
        self.space = space


def replace_padded(data: bytes, prefix: bytes, target: bytes, space: int) -> bytes:
    """Put another prefix into the C strings that name one; the length stays the same.

    Args:
        space: the bytes that each mention had for the prefix when the file was built; the string is followed by
            ``space - len(prefix)`` NULs for each mention in it, beside its own.

    Raises:
        PrefixTooLongError: a string has no space for ``target``.
    """
    pattern = mentions(prefix)
    parts: list[bytes] = []
    at = 0
    while found := pattern.search(data, at):
        start = found.start()
        end = data.find(b"\0", start)
        if end < 0:
            end = len(data)
        string = data[start:end]
        moved, count = pattern.subn(lambda _: target, string)
        room = len(string)
        if space > len(prefix):
            padding = count * (space - len(prefix))
            if data[end : end + padding] == bytes(padding):
                room += padding
        if len(moved) > room:
            raise PrefixTooLongError(len(prefix) + (room - len(string)) // count)
        parts += (data[at:start], moved, bytes(room - len(moved)))
        at = start + room
    parts.append(data[at:])
    return b"".join(parts)


def restored(data: bytes, prefix: bytes, placeholder: bytes) -> bytes | None:
    """The file as it was in its package, or None if it cannot have had the placeholder wherever it has the prefix."""
    try:
        return replace_padded(data, prefix, placeholder, len(placeholder))
    except PrefixTooLongError:
        return None


def replace_runpaths(data: bytes, prefix: bytes, path: bytes, place: bytes = b"") -> bytes:
    """Have an ELF file look for libraries relative to itself, wherever it looks for them below a prefix.

    Code that was compiled at the client has no padding, and ``$ORIGIN`` mostly is shorter than the prefix.

    Args:
        path: of the file in the environment.
        place: where the environment has what is at the prefix; empty: the prefix is its own.

    Raises:
        PrefixTooLongError: the relative path is longer, or the string is part of another one.
    """
    elf = read_elf(lambda size, at: data[at : at + size])
    folder = posixpath.dirname(path)
    for listed in () if elf is None else elf.runpaths:
        moved = b":".join(_relative(part, prefix, folder, place) for part in listed.split(b":"))
        if len(moved) > len(listed) or (moved != listed and b"\0" + listed + b"\0" not in data):
            raise PrefixTooLongError(len(prefix))
        data = data.replace(b"\0" + listed + b"\0", b"\0" + moved.ljust(len(listed), b"\0") + b"\0")
    return data


def _relative(part: bytes, prefix: bytes, folder: bytes, place: bytes) -> bytes:
    if not mentions(prefix).match(part):
        return part
    inner = posixpath.relpath(posixpath.join(place, part[len(prefix) :].strip(b"/")) or b".", folder or b".")
    return b"$ORIGIN" if inner == b"." else b"$ORIGIN/" + inner
