"""Build scripts for sh: the text is a literal of the program, and one function quotes each inserted value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import LiteralString

#: Units of a script: escaped characters, quoted text, comments, and placeholders for values.
_PARTS = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)\#[^\n]*|@\{(\w+)\}""", re.DOTALL)


class Script(str):
    """A piece of a script for sh in which every value is quoted. It can be inserted into other scripts unchanged."""

    __slots__ = ()


def script(text: LiteralString, /, **values: str | int | Iterable[str]) -> Script:
    """Insert values into a script, each quoted as one word; a list becomes several words, and a script stays unchanged.

    Args:
        text: the script, with ``@{name}`` as placeholders, outside of quotes.
        values: the values by these names.

    Raises:
        ValueError: a placeholder is within quotes, where the value would not be quoted.
    """

    def filled(part: re.Match[str]) -> str:
        if (name := part[1]) is None:
            if "@{" in part[0]:
                raise ValueError(f"a value within quotes or a comment: {part[0]}")
            return part[0]
        value = values[name]
        return _quoted(value) if isinstance(value, str | int) else " ".join(map(_quoted, value))

    return Script(_PARTS.sub(filled, text))


def one_word(text: Script) -> Script:
    """Quote a script as an argument, such as that of ``sh -c``."""
    return Script(shlex.quote(text))


def _quoted(value: str | int) -> str:
    return value if isinstance(value, Script) else shlex.quote(str(value))
