"""The cell that the notebook sends to ranks, and how both sides handle its source."""

from __future__ import annotations

import ast
import io
import linecache
import tokenize
from dataclasses import dataclass

# The text of cells: whether it is a `%%mesh` cell, where its body begins, and how it ends. Pure functions.

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


@dataclass(frozen=True, slots=True)
class CellLocation:
    """The location in a program where a cell runs, if it does not run on the usual thread in the namespace of cells.

    Attributes:
        module: run in the namespace of this module.
        frame: run in this frame of the rank's stop, 0 being the innermost; -1: in no frame.
        step: run right after the next optimizer step, on its thread; the name of the point on which ranks agree
            (``debugger.rank.common_point``).
        collective: with that name, run right before the next collective instead.
    """

    module: str = ""
    frame: int = -1
    step: str = ""
    collective: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as the notebook sends it to ranks.

    Attributes:
        id: the key that routes its output.
        source: Python source, with the line numbers of `raw`.
        filename: the file name of the cell in tracebacks and breakpoints.
        raw: the cell as the user wrote it, magic line included.
        quiet: whether to hide the last expression (the cell ends in a semicolon).
        place: where it runs; None: the usual namespace and thread.
        setup: whether its author marked it as a setup cell, which new ranks run.
    """

    id: str
    source: str
    filename: str
    raw: str
    quiet: bool = False
    place: CellLocation | None = None
    setup: bool = False


def remember_source(filename: str, source: str) -> None:
    """Register the source of a cell, so that tracebacks, `inspect` and debuggers in this process find it."""
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    linecache.cache[filename] = (len(source), None, lines, filename)


def check_syntax(source: str, filename: str) -> None:
    """Raise SyntaxError if this source would not compile on a rank."""
    compile(source, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
