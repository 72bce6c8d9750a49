"""The text of cells: whether it is a `%%mesh` cell, where its body begins, and how it ends. Pure functions."""

from __future__ import annotations

import io
import tokenize

_MAGIC = "%%mesh"


def is_mesh_cell(text: str) -> bool:
    """Return whether a cell begins with `%%mesh`."""
    return text.split(None, 1)[:1] == [_MAGIC]


def split_header(text: str) -> tuple[str, str] | None:
    """Split a `%%mesh` cell into its header, up to and including the first line's newline, and its body.

    None for any other cell, and for one that has no second line yet.
    """
    start = len(text) - len(text.lstrip())
    end = text.find("\n", start)
    return (text[: end + 1], text[end + 1 :]) if end >= 0 and is_mesh_cell(text) else None


def header_lines(text: str, body: str) -> int:
    """Return the number of lines of a cell before its body."""
    at = text.rfind(body.rstrip("\n"))
    return text.count("\n", 0, at) if at >= 0 else 1


def blank_lines(source: str) -> int:
    """Return the number of blank lines at the beginning of a cell."""
    return next((at for at, line in enumerate(source.split("\n")) if line.strip()), 0)


def ends_quietly(source: str) -> bool:
    """Return whether a cell ends in a semicolon, which suppresses the display of its value."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    try:
        tokens = [
            token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped
        ]
    except (tokenize.TokenError, SyntaxError):
        return False
    return bool(tokens) and tokens[-1].exact_type == tokenize.SEMI
