"""The patterns of ``.gitignore``, as git matches them, translated to regular expressions over bytes.

The libraries that exist differ from git where a pattern has character classes (``[[:digit:]]``), ends in ``/**``, or
meets a name with a line break.

Source: gitignore(5), https://git-scm.com/docs/gitignore; POSIX.1-2017, section 2.13 (patterns).
"""

from __future__ import annotations

import re

_SPECIAL = b"*?[\\"
_CLASSES: dict[bytes, frozenset[int]] = {
    name: frozenset(byte for byte in range(128) if re.fullmatch(members, bytes([byte]), re.DOTALL))
    for name, members in {
        b"alnum": rb"[0-9A-Za-z]",
        b"alpha": rb"[A-Za-z]",
        b"blank": rb"[ \t]",
        b"cntrl": rb"[\x00-\x1f\x7f]",
        b"digit": rb"[0-9]",
        b"graph": rb"[!-~]",
        b"lower": rb"[a-z]",
        b"print": rb"[ -~]",
        b"punct": rb"[!-/:-@\[-`{-~]",
        b"space": rb"[ \t-\r]",
        b"upper": rb"[A-Z]",
        b"xdigit": rb"[0-9A-Fa-f]",
    }.items()
}


def literal_length(pattern: bytes) -> int:
    """How many bytes at the start of a pattern stand for themselves."""
    for i, byte in enumerate(pattern):
        if byte in _SPECIAL:
            return i
    return len(pattern)


def translate(pattern: bytes, *, path: bool) -> bytes | None:
    """The regular expression (for ``re.DOTALL``, to match the whole) of a pattern; None: it matches nothing.

    Args:
        path: whether it is matched with a path, where only ``**`` stands for ``/``, too.
    """
    one, many = (b"[^/]", b"[^/]*") if path else (b".", b".*")
    parts: list[bytes] = []
    start = literal_length(pattern)
    parts.append(re.escape(pattern[:start]))
    i = start
    while i < len(pattern):
        byte = pattern[i : i + 1]
        if byte == b"*":
            end = i
            while pattern[end : end + 1] == b"*":
                end += 1
            follows = pattern[end : end + 1]
            # What stands before the first wildcard is compared first, so ``**`` counts as the start of a part there.
            starts_part = i == start or pattern[i - 1 : i] == b"/"
            if path and end - i > 1 and starts_part and follows in (b"", b"/"):
                if follows:
                    parts.append(b"(?:.*/)?")
                    end += 1
                else:
                    parts.append(b".*")
            else:
                parts.append(many)
            i = end
        elif byte == b"?":
            parts.append(one)
            i += 1
        elif byte == b"[":
            found = _bracket(pattern, i)
            if found is None:
                return None
            members, i = found
            if path:
                members -= {ord("/")}
            if not members:
                return None
            parts.append(b"[" + b"".join(b"\\x%02x" % member for member in sorted(members)) + b"]")
        elif byte == b"\\":
            if i + 1 == len(pattern):
                return None
            parts.append(re.escape(pattern[i + 1 : i + 2]))
            i += 2
        else:
            parts.append(re.escape(byte))
            i += 1
    return b"".join(parts)


def _bracket(pattern: bytes, i: int) -> tuple[set[int], int] | None:
    """The bytes that a bracket expression stands for, and where it ends; None if it does not end."""
    i += 1
    negated = pattern[i : i + 1] in (b"!", b"^") and pattern[i : i + 1] != b""
    if negated:
        i += 1
    members: set[int] = set()
    before = -1  # the byte that a range may start from
    first = True
    while True:
        if i >= len(pattern):
            return None
        byte = pattern[i]
        if byte == ord("]") and not first:
            break
        first = False
        after = pattern[i + 1 : i + 2]
        if byte == ord("\\"):
            i += 1
            if i >= len(pattern):
                return None
            before = pattern[i]
            members.add(before)
        elif byte == ord("-") and before >= 0 and after and after != b"]":
            i += 1
            if pattern[i] == ord("\\"):
                i += 1
                if i >= len(pattern):
                    return None
            members.update(range(before, pattern[i] + 1))
            before = -1
        elif byte == ord("[") and after == b":":
            end = pattern.find(b"]", i + 2)
            if end < 0:
                return None
            if end - i - 3 < 0 or pattern[end - 1 : end] != b":":
                members.add(byte)  # no ``:]``: an ordinary member
                before = byte
            else:
                named = _CLASSES.get(pattern[i + 2 : end - 1])
                if named is None:
                    return None
                members |= named
                before = -1
                i = end
        else:
            members.add(byte)
            before = byte
        i += 1
    if negated:
        members = set(range(256)) - members
    return members, i + 1
