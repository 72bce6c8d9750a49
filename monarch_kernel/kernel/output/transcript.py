"""What folded output is made of: rows with the ranks that wrote them, and what is shown of them. Pure values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    data: dict[str, Any]
    metadata: dict[str, Any]


View = TextView | RichView


@dataclass(slots=True, eq=False)
class Row:
    """One line (or rich result) and the ranks that wrote it; `order` is its place among all."""

    order: float
    key: tuple[str, ...]
    stream: str
    text: str
    section: Section
    born: float
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    sources: set[Source] = field(default_factory=set)
    label: Row | None = None  # the label row of a rich row
    target: Row | None = None  # the rich row of a label row


@dataclass(slots=True, eq=False)
class Section:
    """Rows that are shown together."""

    id: int
    rich: bool
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    dirty: bool = True
    closed: bool = False  # the cell's own output stands below it: nothing is added any more


def blocks_of(rows: Iterable[Row], *, rich_text: bool = False) -> list[Block]:
    """Rows with neighbours of the same ranks and stream put together."""
    blocks: list[Block] = []
    sources: frozenset[Source] = frozenset()
    stream = ""
    lines: list[str] = []

    def close() -> None:
        if lines:
            blocks.append(Block(sources, stream, tuple(lines)))

    for row in _by_rank(rows):
        who = frozenset(row.target.sources if row.target is not None else row.sources)
        text = row.text
        if rich_text and row.data is not None:
            text = str(row.data.get("text/plain", ""))
        if not lines or who != sources or row.stream != stream or row.target is not None:
            close()
            sources, stream, lines = who, row.stream, []
        lines.extend(text.split("\n"))
    close()
    return blocks


def _by_rank(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of different ranks in a row, which have no order among themselves, by rank."""
    run: list[Row] = []
    seen: set[Source] = set()
    for row in rows:
        if row.target is not None or not seen.isdisjoint(row.sources):
            yield from sorted(run, key=_first_source)
            run, seen = [], set()
        if row.target is not None:
            yield row
            continue
        run.append(row)
        seen |= row.sources
    yield from sorted(run, key=_first_source)


def _first_source(row: Row) -> Source:
    return min(row.sources, default=Source("", 0))
