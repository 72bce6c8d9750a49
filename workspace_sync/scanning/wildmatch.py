"""Translate the patterns of ``.gitignore`` to regular expressions over bytes that match exactly as git does.

Existing libraries differ from git if a pattern has character classes (``[[:digit:]]``) or ends in ``/**``, or if a name
contains a line break. Also, the matching time of their expressions, such as those of pathspec, grows polynomially with
the length of the name, and the pattern determines the exponent.

These expressions do not backtrack. The piece of a pattern between one ``*`` and the next takes its first match: if the
rest matches after a later match of the piece, it also matches after the first, because the next ``*`` covers the text
between. If a ``/`` comes before the next ``*``, only one match is possible. The same holds for whole parts between two
``**``. Each such piece is therefore an atomic group.

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
    """Count the literal bytes at the start of a pattern."""
    for i, byte in enumerate(pattern):
        if byte in _SPECIAL:
            return i
    return len(pattern)


def translate(pattern: bytes, *, path: bool) -> bytes | None:
    """Translate a pattern to a regular expression (for ``re.DOTALL`` and a full match); None: it matches nothing.

    Args:
        path: whether it is matched against a path, where only ``**`` also matches ``/``.
    """
    one, many = (b"[^/]", b"[^/]*") if path else (b".", b".*")
    found = _Pieces(many)
    start = literal_length(pattern)
    found.one(re.escape(pattern[:start]))
    i = start
    while i < len(pattern):
        byte = pattern[i : i + 1]
        if byte == b"*":
            end = i
            while pattern[end : end + 1] == b"*":
                end += 1
            follows = pattern[end : end + 1]
            # The part before the first wildcard is compared separately, so ``**`` right after it starts a part.
            starts_part = i == start or pattern[i - 1 : i] == b"/"
            if path and end - i > 1 and starts_part and follows in (b"", b"/"):
                if follows:
                    found.parts()
                    end += 1
                else:
                    return found.regex(b".*")
            else:
                found.star()
            i = end
        elif byte == b"?":
            found.one(one)
            i += 1
        elif byte == b"[":
            bracket = _bracket(pattern, i)
            if bracket is None:
                return None
            members, i = bracket
            if path:
                members -= {ord("/")}
            if not members:
                return None
            found.one(b"[" + b"".join(b"\\x%02x" % member for member in sorted(members)) + b"]")
        elif byte == b"\\":
            if i + 1 == len(pattern):
                return None
            found.one(re.escape(pattern[i + 1 : i + 2]))
            i += 2
        else:
            found.one(re.escape(byte))
            i += 1
    return found.regex()


class _Pieces:
    """Pieces of a pattern between its wildcards, collected from left to right.

    Args:
        many: the expression for ``*``.
    """

    def __init__(self, many: bytes) -> None:
        self._many = many
        self._blocks: list[bytes] = []  # between ``**/``
        self._block: list[bytes] = []  # of the current one, between ``*``
        self._piece: list[bytes] = []

    def one(self, piece: bytes) -> None:
        """Add a piece that matches single bytes."""
        self._piece.append(piece)

    def star(self) -> None:
        """Add ``*``."""
        self._block.append(b"".join(self._piece))
        self._piece = []

    def parts(self) -> None:
        """Add ``**/``."""
        self.star()
        self._blocks.append(self._joined(whole=True))
        self._block = []

    def regex(self, rest: bytes = b"") -> bytes:
        """Return the whole expression; ``rest`` is the part that follows."""
        self.star()
        last = self._joined(whole=bool(rest)) + rest
        if not self._blocks:
            return last
        first, *between = self._blocks
        return first + b"".join(b"(?>(?:.*?/)??%s)" % block for block in between) + b"(?:.*/)?" + last

    def _joined(self, whole: bool) -> bytes:
        """Return the current block; ``whole``: it ends in ``/``, or the pattern allows any end."""
        first, *more = self._block
        if not more:
            return first
        if whole:
            return first + b"".join(b"(?>%s?%s)" % (self._many, piece) for piece in more)
        *between, last = more
        return first + b"".join(b"(?>%s?%s)" % (self._many, piece) for piece in between) + self._many + last


def _bracket(pattern: bytes, i: int) -> tuple[set[int], int] | None:
    """Parse a bracket expression: the set of its bytes, and its end; None if it has no end."""
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
