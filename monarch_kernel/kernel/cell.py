"""A cell as it travels from the notebook to ranks."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as it travels to ranks.

    Attributes:
        id: whom its output belongs to.
        source: Python source; its line numbers are those of `raw`.
        filename: what tracebacks and breakpoints call it.
        raw: the whole cell as the user wrote it, magic line included.
        quiet: do not show the last expression (the cell ends in a semicolon).
    """

    id: str
    source: str
    filename: str
    raw: str
    quiet: bool = False


def remember_source(filename: str, source: str) -> None:
    """Let tracebacks, `inspect` and debuggers of this process find the source of a cell."""
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    linecache.cache[filename] = (len(source), None, lines, filename)


def check_syntax(source: str, filename: str) -> None:
    """Raise SyntaxError if ranks could not compile this."""
    compile(source, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
