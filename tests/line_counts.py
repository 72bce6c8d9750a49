"""Print the size of the product's Python code by package: ``python -m tests.line_counts``.

A line of code is one that is not blank and holds more than comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("monarch_kernel", "workspace_sync")
#: Files with fewer lines count as short.
SHORT = 40
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass(frozen=True)
class FileSize:
    """The lines of a file: all of them, those of code, and how often the word ``Any`` stands in them."""

    lines: int
    code: int
    anys: int


def size_of(text: str) -> FileSize:
    """Count the lines of a Python source."""
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return FileSize(text.count("\n"), len(used), len(re.findall(r"\bAny\b", text)))


def table() -> str:
    """The sizes of the packages, and of both together, as text."""
    rows = ["package          files  median  short  lines    code     Any"]
    everything: list[FileSize] = []
    for package in (*PACKAGES, ""):
        sizes = (
            [size_of(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))] if package else everything
        )
        everything = [*everything, *sizes] if package else everything
        median = statistics.median(each.lines for each in sizes)
        short = sum(each.lines < SHORT for each in sizes)
        totals = (sum(values) for values in zip(*((each.lines, each.code, each.anys) for each in sizes), strict=True))
        lines, code, anys = totals
        rows.append(f"{package or 'all':15} {len(sizes):6} {median:7.0f} {short:6} {lines:6} {code:7} {anys:7}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
