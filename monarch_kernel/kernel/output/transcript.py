"""Folded output as plain data: the output of a cell with the ranks that wrote each part.

`render.py` converts it to text and HTML; other views (a panel, a widget) may read it directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

#: A rich result: data by MIME type, as in Jupyter.
MimeBundle = dict[str, Any]


class Source(NamedTuple):
    """The origin of output: the name of a mesh, and a rank in it."""

    mesh: str
    rank: int


@dataclass(frozen=True, slots=True)
class Block:
    """Adjacent lines of the same ranks and the same stream."""

    sources: frozenset[Source]
    stream: str  # "stdout", "stderr", "result", "label" or "notice"
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextView:
    """The current state of a text section; without blocks it shows nothing."""

    id: int
    blocks: tuple[Block, ...]
    progress: str = ""


@dataclass(frozen=True, slots=True)
class RichView:
    """The current state of a rich result; without data it has been removed."""

    id: int
    sources: frozenset[Source]
    data: MimeBundle
    metadata: dict[str, Any]


View = TextView | RichView


@dataclass(frozen=True, slots=True)
class CutOutput:
    """Output of some ranks that exceeds their limits and is not shown.

    Attributes:
        sources: the ranks, all with the same cut.
        lines: the number of lines.
        bytes: the size of these lines.
        rich: the number of rich results.
        tail: the last of these lines.
    """

    sources: frozenset[Source]
    lines: int
    bytes: int
    rich: int
    tail: tuple[str, ...]
