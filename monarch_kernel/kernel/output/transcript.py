"""Folded output as plain data: what a front end shows of a cell, with the ranks that wrote each part.

Text and HTML are made of it by `render.py`; other views (a panel, a widget) may read it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

#: A rich result: data by MIME type, as Jupyter has it.
MimeBundle = dict[str, Any]


class Source(NamedTuple):
    """Where output comes from: the name of a mesh, and a rank of it."""

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
    """A text section as it is to be shown now; without blocks it shows nothing."""

    id: int
    blocks: tuple[Block, ...]
    progress: str = ""


@dataclass(frozen=True, slots=True)
class RichView:
    """A rich result as it is to be shown now; without data it has been withdrawn."""

    id: int
    sources: frozenset[Source]
    data: MimeBundle
    metadata: dict[str, Any]


View = TextView | RichView


@dataclass(frozen=True, slots=True)
class CutOutput:
    """What some ranks wrote beyond their limits, which is not shown.

    Attributes:
        sources: the ranks, all of which had the same cut.
        lines: how many lines.
        bytes: the size of these lines.
        rich: how many rich results.
        tail: the last of the lines.
    """

    sources: frozenset[Source]
    lines: int
    bytes: int
    rich: int
    tail: tuple[str, ...]
