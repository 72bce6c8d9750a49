"""The output of ranks in one cell: recorded as it arrives, and shown when something is new.

Events are recorded under one lock, quickly, and shown under another, so a slow front end never delays the events of
ranks.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from monarch_kernel.display.quantities import text_size
from monarch_kernel.display.tables import only_colours
from monarch_kernel.kernel.output.publisher import (
    Block,
    CutOutput,
    MimeBundle,
    Publisher,
    RichView,
    Source,
    TextView,
    View,
)
from monarch_kernel.kernel.output.rank_lines import LONGEST_LINE, STEERING, Limits, RankLines
from monarch_kernel.kernel.output.render import Tooltip, blocks_text, bundle, raw_line
from monarch_kernel.output import RankOutput

# Folds the output of many ranks into one transcript: events in, views of its sections out.
#
# Pure: no I/O, no threads, no IPython. `rank_lines.py` splits a rank's output into lines, and `Rows` decides which row
# each line joins. For a front end that can update its display, each section has its own id, and only changed sections
# are published again (`take`). A terminal cannot update, so rows are printed once they have settled (`take_settled`).

# The rows of folded output: which row a line joins, and the order of the rows.
#
# Pure. A *row* is one line with the set of ranks that wrote it. The rows of one rank are in the order in which it
# wrote them. A rank joins the first row after its own last one that has the same content, so ranks that print the same
# lines at different speeds fold. Otherwise it joins an earlier row with the same content, if its own rows since then
# can be moved before that row without changing any rank's order; common lines after differing lines then also fold.
# Otherwise it appends a row.
#
# Rows are grouped in *sections*, which are displayed separately: runs of text rows of bounded size, and single rich
# results.

#: A section with this many rows or characters is full.
SECTION_ROWS = 100
SECTION_BYTES = 16_384
#: The maximum number of text sections of a cell. JupyterLab hides outputs after the first 50 of a cell, and the last
#: section lists what was cut.
MOST_SECTIONS = 40
# How many rows back a rank may join one, and how many rows a section may reach as a result.
_WINDOW = 400
_SECTION_MOST_ROWS = 3 * SECTION_ROWS
# How many of the latest rows with the same content before a rank's last one are tried.
_TRIED = 8
_SMALLEST_GAP = 1e-6

#: Equal for rows with the same content.
Key = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Row:
    """One line (or rich result) and the ranks that wrote it; `order` is its position among all rows."""

    order: float
    key: Key
    stream: str
    text: str
    section: Section
    born: float
    data: MimeBundle | None = None
    metadata: MimeBundle = field(default_factory=dict)
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
    closed: bool = False  # the cell's own output follows, so nothing more is added
    vacant: bool = False  # all rows were removed: a front end that hides outputs beyond the first 50 has room here


_order_of = attrgetter("order")


class Rows:
    """All rows of one cell.

    Args:
        clock: gives the time at which rows are created.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sections: list[Section] = []
        self._texts = 0  # how many of them are of text
        self._clock = clock
        self._has_vacant = False
        self._last: dict[Source, Row] = {}
        self._alike: dict[Key, list[Row]] = {}
        self._unsettled: list[Row] = []

    # -- what ranks write --------------------------------------------------------------------

    def add_line(self, source: Source, stream: str, line: str) -> None:
        """Add a line, or a text result of several lines, that `source` wrote."""
        self._join(source, ("text", stream, line))

    def add_rich(self, source: Source, key: Key, data: MimeBundle, metadata: MimeBundle) -> Row:
        """Add a MIME bundle that `source` displayed."""
        row = self._join(source, key, data, metadata)
        if len(row.sources) == 1:  # a new one
            self._sort_by_rank(source, row)
        return row

    def replace(self, source: Source, row: Row, key: Key, data: MimeBundle, metadata: MimeBundle) -> Row:
        """Replace a MIME bundle that `source` displayed; returns the row of the new one."""
        if row.key == key:
            return row
        twin = next((other for other in self._alike.get(key, ()) if source not in other.sources), None)
        if twin is None and row.sources == {source}:
            self._forget(row)
            row.key, row.data, row.metadata = key, data, metadata
            self._remember(row)
            _touch(row)
            return row
        self._leave(source, row)
        if twin is None:
            twin = self._append(source, key, data, metadata)
            self._remember(twin)
        twin.sources.add(source)
        _touch(twin)
        self._last[source] = max(self._rows_of(source), key=_order_of)
        return twin

    def drop(self, source: Source, row: Row) -> None:
        """Remove a MIME bundle that `source` displayed."""
        self._leave(source, row)
        last = max(self._rows_of(source), key=_order_of, default=None)
        if last is None:
            self._last.pop(source, None)
        else:
            self._last[source] = last

    def remove(self, source: Source) -> None:
        """Remove everything that `source` wrote."""
        for row in list(self._rows_of(source)):
            self._leave(source, row)
        self._last.pop(source, None)

    def divide(self) -> None:
        """Let no source join an existing row, and put further rows in new sections."""
        self._alike.clear()
        if self.sections:
            self.sections[-1].closed = True

    @property
    def is_full(self) -> bool:
        """Whether no new section of text may be added."""
        return self._texts >= MOST_SECTIONS

    # -- what is shown -----------------------------------------------------------------------

    def last_text_section(self) -> Section | None:
        """The last section, if text can follow its rows; None if it is a rich result, or if there is no section."""
        last = self.sections[-1] if self.sections else None
        return None if last is None or last.rich else last

    def new_section(self, *, rich: bool = False) -> Section:
        """A section below all others."""
        section = Section(len(self.sections), rich)
        self.sections.append(section)
        self._texts += not rich
        return section

    @property
    def unsettled(self) -> bool:
        """Whether `take_settled` holds any row back."""
        return bool(self._unsettled)

    def take_settled(self, expected: Collection[Source], hold: float) -> list[Row]:
        """The next rows that no rank will join: all of `expected` have passed them, or they are `hold` seconds old."""
        now = self._clock()
        settled: list[Row] = []
        # All rows that settled earlier precede these, even after later moves.
        self._unsettled.sort(key=_order_of)
        for row in self._unsettled:
            waiting = hold > 0 and now - row.born < hold
            if waiting and not all(self._has_passed(source, row) for source in expected):
                break
            settled.append(row)
        del self._unsettled[: len(settled)]
        for row in settled:
            self._forget(row)
        return [row for row in settled if row.sources]

    def _has_passed(self, source: Source, row: Row) -> bool:
        last = self._last.get(source)
        return last is not None and last.order >= row.order

    # -- which row ---------------------------------------------------------------------------

    def _join(
        self,
        source: Source,
        key: Key,
        data: MimeBundle | None = None,
        metadata: MimeBundle | None = None,
    ) -> Row:
        row = self._partner(source, key)
        if row is None:
            row = self._append(source, key, data, metadata)
            self._remember(row)
        row.sources.add(source)
        _touch(row)
        self._last[source] = row
        return row

    def _partner(self, source: Source, key: Key) -> Row | None:
        """Return the row with this content that `source` can join; None if there is none."""
        rows = self._alike.get(key)
        if not rows:
            return None
        last = self._last.get(source)
        if last is None:
            return rows[0]
        at = bisect_right(rows, last.order, key=_order_of)
        if at < len(rows):
            return rows[at]
        for row in rows[-_TRIED:]:  # the earliest possible; all but the last few would be too far back
            if source not in row.sources and self._move_before(row, last):
                return row
        return None

    def _rows_of(self, source: Source) -> Iterator[Row]:
        return (row for section in self.sections for row in section.rows if source in row.sources)

    def _remember(self, row: Row) -> None:
        rows = self._alike.setdefault(row.key, [])
        rows.insert(bisect_right(rows, row.order, key=_order_of), row)

    def _forget(self, row: Row) -> None:
        """Let no further source join `row`."""
        rows = self._alike.get(row.key)
        if rows and row in rows:
            rows.remove(row)
            if not rows:
                del self._alike[row.key]

    def _leave(self, source: Source, row: Row) -> None:
        row.sources.discard(source)
        _touch(row)
        if not row.sources:
            self._forget(row)
            for each in (row, row.label):
                if each is not None:
                    each.section.rows.remove(each)
                    each.section.vacant = not each.section.rows
                    self._has_vacant = self._has_vacant or each.section.vacant

    # -- new rows ----------------------------------------------------------------------------

    def _append(self, source: Source, key: Key, data: MimeBundle | None, metadata: MimeBundle | None) -> Row:
        """Create a row below all rows of `source`: where rows were removed, or else below all others."""
        vacant = self._vacant(source, rich=data is not None)
        if data is None:
            row = self._new_row(vacant or self._text_section(), key, key[1], key[2])
            row.section.size += len(row.text)
            return row
        label = self._new_row(
            self._text_section() if vacant is None else self.sections[vacant.id - 1], key, "label", ""
        )
        row = self._new_row(vacant or self.new_section(rich=True), key, "rich", "")
        row.data, row.metadata = data, metadata or {}
        row.label, label.target = label, row
        return row

    def _vacant(self, source: Source, *, rich: bool) -> Section | None:
        """Return the first section below all rows of `source` whose rows were removed."""
        if not self._has_vacant:
            return None
        last = self._last.get(source)
        closed = max((section.id for section in self.sections if section.closed), default=-1)
        begin = max(closed, -1 if last is None else last.section.id) + 1
        return next((each for each in self.sections[begin:] if each.vacant and each.rich == rich), None)

    def _new_row(self, section: Section, key: Key, stream: str, text: str) -> Row:
        above, below = reversed(self.sections[: section.id + 1]), self.sections[section.id + 1 :]
        before = next((each.rows[-1].order for each in above if each.rows), None)
        after = next((each.rows[0].order for each in below if each.rows), None)
        if after is None:
            order = 0.0 if before is None else before + 1.0
        else:
            order = after - 1.0 if before is None else (before + after) / 2
        row = Row(order, key, stream, text, section, self._clock())
        section.rows.append(row)
        section.dirty, section.vacant = True, False
        if stream != "label":
            self._unsettled.append(row)
        return row

    def _text_section(self) -> Section:
        last = self.last_text_section()
        if last is None or last.closed or len(last.rows) >= SECTION_ROWS or last.size >= SECTION_BYTES:
            return self.new_section()
        return last

    # -- order -------------------------------------------------------------------------------

    def _move_before(self, row: Row, last: Row) -> bool:
        """Move `last`, and what must precede it, before `row`; False if any rank's order forbids that."""
        must: list[Row] = []
        writers: set[Source] = set()
        seen = 0
        for section in reversed(self.sections[row.section.id : last.section.id + 1]):
            for other in reversed(section.rows):
                if other.order > last.order or other.target is not None:
                    continue
                if other is row:
                    break
                seen += 1
                if seen > _WINDOW:
                    return False
                if other is last or other.sources & writers:
                    if other.data is not None:
                        return False  # a rich result stays where it was shown
                    writers |= other.sources
                    must.append(other)
        target = row.label or row
        if row.sources & writers or len(target.section.rows) + len(must) > _SECTION_MOST_ROWS:
            return False
        must.reverse()
        self._insert_before(target, must)
        return True

    def _insert_before(self, target: Row, rows: Sequence[Row]) -> None:
        before = self._order_before(target)
        if (target.order - before) / (len(rows) + 1) < _SMALLEST_GAP:
            everything = [row for section in self.sections for row in section.rows]
            for at, row in enumerate(everything):
                row.order = float(at)
            before = target.order - 1.0
        step = (target.order - before) / (len(rows) + 1)
        for at, row in enumerate(rows, 1):
            row.section.rows.remove(row)
            row.section.dirty = True
            known = row in self._alike.get(row.key, ())
            if known:
                self._forget(row)
            row.order = before + at * step
            row.section = target.section
            if known:
                self._remember(row)
        at = target.section.rows.index(target)
        target.section.rows[at:at] = rows
        target.section.dirty = True

    def _order_before(self, target: Row) -> float:
        at = target.section.rows.index(target)
        if at:
            return target.section.rows[at - 1].order
        for section in reversed(self.sections[: target.section.id]):
            if section.rows:
                return section.rows[-1].order
        return target.order - 1.0

    def _sort_by_rank(self, source: Source, new: Row) -> None:
        """Sort rich results that ranks show at about the same time by rank, whichever came first.

        The results above `new` that it may precede are reordered: the first of each rank in rank order, then the second
        of each. No result moves past a line of a rank that showed it.
        """
        run = self._movable(new)
        counts: dict[Source, int] = {}
        keys: list[tuple[int, Source]] = []
        for row in run:
            first = min(row.sources)
            keys.append((counts.get(first, 0), first))
            for each in row.sources:
                counts[each] = counts.get(each, 0) + 1
        mine = (counts.get(source, 0), source)
        own = max((at for at, row in enumerate(run) if source in row.sources), default=-1)
        at = next((at for at, key in enumerate(keys) if key > mine and at > own), len(run))
        if at == len(run):
            return
        lines = [row for section in self.sections[run[at].section.id :] for row in section.rows]
        last = max((row for row in lines if row.data is None and source in row.sources), key=_order_of, default=None)
        if last is not None and not self._move_before(run[at], last):
            return
        places = [(row.section, row.label, row.order) for row in (*run[at:], new)]
        for row, (section, label, order) in zip((new, *run[at:]), places, strict=True):
            known = row in self._alike.get(row.key, ())
            if known:
                self._forget(row)
            row.section, row.label, row.order = section, label, order
            section.rows = [row]
            if label is not None:
                label.target = row
            if known:
                self._remember(row)
            _touch(row)

    def _movable(self, new: Row) -> list[Row]:
        """Return the rich rows above `new` that may move to its place: none of their ranks wrote lines in between."""
        found: list[Row] = []
        wrote: set[Source] = set()
        seen = 0
        for section in reversed(self.sections[: new.section.id]):
            if section.closed:
                break
            for row in reversed(section.rows):
                seen += 1
                if row.target is not None:
                    continue
                if row.data is None:
                    wrote |= row.sources
                elif not row.sources or row.sources & wrote or seen > _WINDOW:
                    return found[::-1]
                else:
                    found.append(row)
        return found[::-1]


def blocks_of(rows: Iterable[Row], *, rich_text: bool = False) -> list[Block]:
    """Return rows as blocks. Neighbouring rows of the same ranks and stream are joined."""
    blocks: list[Block] = []
    sources: frozenset[Source] = frozenset()
    stream = ""
    lines: list[str] = []

    def close() -> None:
        if lines:
            blocks.append(Block(sources, stream, tuple(lines)))

    for row in _in_rank_order(rows):
        writers = frozenset(row.target.sources if row.target is not None else row.sources)
        text = row.text
        if rich_text and row.data is not None:
            text = str(row.data.get("text/plain", ""))
        if not lines or writers != sources or row.stream != stream or row.target is not None:
            close()
            sources, stream, lines = writers, row.stream, []
        lines.extend(text.split("\n"))
    close()
    return blocks


def _in_rank_order(rows: Iterable[Row]) -> Iterator[Row]:
    """Sort each run of rows with disjoint ranks by rank; such rows have no order among themselves."""
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


def _touch(row: Row) -> None:
    row.section.dirty = True
    if row.label is not None:
        row.label.section.dirty = True


@dataclass(slots=True)
class _Writer:
    """The output of one source so far."""

    lines: RankLines
    clear_next: bool = False
    shown: dict[str, Row] = field(default_factory=dict[str, Row])  # by display id


class Folding:
    """The folded output of one cell."""

    def __init__(self, limits: Limits | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.meshes: set[str] = set()
        self._limits = limits or Limits()
        self._rows = Rows(clock)
        self._writers: dict[Source, _Writer] = {}
        self._footer: tuple[int, tuple[Block, ...], str] = (-1, (), "")
        self._told: list[CutOutput] = []

    # -- events ------------------------------------------------------------------------------

    def text(self, source: Source, stream: str, text: str) -> None:
        """Add `text` that `source` wrote. It may contain any number of lines, and end in the middle of one."""
        lines = self._cleared(source).lines
        while not self._rows.is_full:
            piece, text = _first_lines(text)
            self._feed(lines, source, stream, piece)
            if not text:
                return
        lines.close()
        self._feed(lines, source, stream, text)

    def _feed(self, lines: RankLines, source: Source, stream: str, text: str) -> None:
        shown = lines.feed(stream, text)
        if shown and lines.steers:
            for other, line in lines.settle(without=stream):
                self._rows.add_line(source, other, line)
        for line in shown:
            self._rows.add_line(source, stream, line)

    def display(
        self,
        source: Source,
        data: MimeBundle,
        metadata: MimeBundle | None = None,
        *,
        display_id: str | None = None,
        update: bool = False,
        result: bool = False,
    ) -> None:
        """Add a MIME bundle that `source` displayed, or replace the one under `display_id`; {} removes that."""
        writer = self._writer(source)
        if update:
            if display_id is not None and display_id in writer.shown:
                row = writer.shown[display_id]
                if not data:
                    del writer.shown[display_id]
                    writer.lines.release_rich(_bundle_size(row.data or {}))
                    self._rows.drop(source, row)
                    return
                writer.shown[display_id] = self._rows.replace(source, row, _rich_key(data), data, metadata or {})
            return
        writer = self._cleared(source)
        self._finish_lines(source, writer)
        if set(data) == {"text/plain"} and display_id is None:
            stream = "result" if result else "stdout"
            for text in writer.lines.admit_result(str(data["text/plain"])):
                self._rows.add_line(source, stream, text)
        elif writer.lines.admit_rich(_bundle_size(data)):
            row = self._rows.add_rich(source, _rich_key(data), data, metadata or {})
            if display_id is not None:
                writer.shown[display_id] = row

    def clear(self, source: Source, wait: bool = False) -> None:
        """Remove the output of `source` so far, now or (`wait`) when it next writes."""
        writer = self._writer(source)
        if wait:
            writer.clear_next = True
            return
        self._rows.remove(source)
        self._writers[source] = _Writer(RankLines(self._limits))

    def finish(self, source: Source | None = None) -> None:
        """Expect no more of `source` (or of any source) for now: complete its unfinished line."""
        for known, writer in self._writers.items():
            if source is None or known == source:
                self._finish_lines(known, writer)

    def divide(self) -> None:
        """Begin a new part, because the cell shows its own output here; later rows fold only among themselves."""
        self.finish()
        self._rows.divide()

    # -- what to show ------------------------------------------------------------------------

    def take(self, progress: str = "") -> list[View]:
        """Return the sections that changed since the last call, oldest first.

        Unfinished lines, notices of cut output, and `progress` are at the end of the last section.
        """
        self._place_footer(progress)
        changed = [section for section in self._rows.sections if section.dirty]
        for section in changed:
            section.dirty = False
        return [self._view(section) for section in changed]

    def take_settled(self, expected: Collection[Source] = (), *, hold: float = 0.3) -> list[Block]:
        """Return rows that no further rank will join, for a display that can only append.

        A row is settled when each of `expected` has written it or a later row, or when it is `hold` seconds old. With
        `hold=0`, all rows are settled.
        """
        return blocks_of(self._rows.take_settled(expected, hold), rich_text=True)

    def cut(self) -> list[CutOutput]:
        """Return the output that was cut. Ranks with the same cut share an entry."""
        alike: dict[tuple[int, int, int, tuple[str, ...]], set[Source]] = {}
        for source, writer in self._writers.items():
            lines = writer.lines
            if lines.cut or lines.cut_rich:
                key = (lines.cut, lines.cut_size, lines.cut_rich, tuple(lines.tail))
                alike.setdefault(key, set()).add(source)
        return [CutOutput(frozenset(sources), *key) for key, sources in alike.items()]

    def new_notices(self) -> list[Block]:
        """Return the notices of cut output, if they have changed since the last call."""
        cut = self.cut()
        new, self._told = cut != self._told, cut
        return notices(cut) if new else []

    def touch_all(self) -> None:
        """Make `take` return every section again."""
        for section in self._rows.sections:
            section.dirty = True

    @property
    def unsettled(self) -> bool:
        """Whether `take_settled` holds rows back."""
        return self._rows.unsettled

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not any(section.rows for section in self._rows.sections) and not self._footer_blocks()

    # -- sources -----------------------------------------------------------------------------

    def _writer(self, source: Source) -> _Writer:
        writer = self._writers.get(source)
        if writer is None:
            writer = self._writers[source] = _Writer(RankLines(self._limits))
            self.meshes.add(source.mesh)
        return writer

    def _cleared(self, source: Source) -> _Writer:
        """Return the writer of `source`, which is about to write: `clear(wait=True)` takes effect now."""
        writer = self._writer(source)
        if writer.clear_next:
            self.clear(source)
            writer = self._writer(source)
        return writer

    def _finish_lines(self, source: Source, writer: _Writer) -> None:
        for stream, line in writer.lines.finish():
            self._rows.add_line(source, stream, line)

    # -- views -------------------------------------------------------------------------------

    def _footer_blocks(self) -> tuple[Block, ...]:
        alike: dict[tuple[str, tuple[str, ...]], set[Source]] = {}
        for source, writer in self._writers.items():
            for stream, lines in writer.lines.live():
                alike.setdefault((stream, lines), set()).add(source)
        blocks = [Block(frozenset(sources), stream, lines) for (stream, lines), sources in alike.items()]
        blocks.sort(key=lambda block: min(block.sources))
        return (*blocks, *notices(self.cut()))

    def _place_footer(self, progress: str) -> None:
        blocks = self._footer_blocks()
        at, old_blocks, old_progress = self._footer
        if (blocks or progress) and self._rows.last_text_section() is None:
            self._rows.new_section()
        sections = self._rows.sections
        last = len(sections) - 1
        if (last, blocks, progress) == (at, old_blocks, old_progress):
            return
        if at >= 0 and (old_blocks or old_progress):
            sections[at].dirty = True
        if last >= 0 and (blocks or progress):
            sections[last].dirty = True
        self._footer = (last, blocks, progress)

    def _view(self, section: Section) -> View:
        if section.rich:
            if not section.rows:
                return RichView(section.id, frozenset(), {}, {})
            row = section.rows[0]
            return RichView(section.id, frozenset(row.sources), row.data or {}, row.metadata)
        blocks = blocks_of(section.rows)
        at, footer, progress = self._footer
        if at == section.id:
            return TextView(section.id, (*blocks, *footer), progress)
        return TextView(section.id, tuple(blocks))


def _first_lines(text: str) -> tuple[str, str]:
    """Split a text into the first lines, as many as fit into a section, and the rest."""
    end = rows = 0
    while rows < SECTION_ROWS and end < SECTION_BYTES:
        end = text.find("\n", end) + 1
        if end == 0:
            return text, ""
        rows += 1
    return text[:end], text[end:]


def notices(cut: Collection[CutOutput]) -> list[Block]:
    """Return a notice for each cut, followed by the last lines that were cut."""
    blocks: list[Block] = []
    for each in cut:
        left = [f"{each.lines:,} line{'s' * (each.lines != 1)} ({text_size(each.bytes)})"] if each.lines else []
        left += [f"{each.rich:,} rich result{'s' * (each.rich != 1)}"] if each.rich else []
        notice = f"… {' and '.join(left)} not shown"
        if each.lines:
            ranks = ",".join(str(rank) for rank in sorted({source.rank for source in each.sources})[:16])
            notice += f"; %mesh logs -r {ranks} --to FILE writes all of it"
            if each.tail:
                notice += "; the last lines were:"
        blocks.append(Block(each.sources, "notice", (notice,)))
        if each.tail:
            blocks.append(Block(each.sources, "stdout", each.tail))
    return blocks


def _rich_key(data: MimeBundle) -> Key:
    return ("rich", json.dumps(data, sort_keys=True, default=repr))


def _bundle_size(data: MimeBundle) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else len(repr(value)) for value in data.values())


@dataclass(slots=True)
class RawText:
    """Lines for one stream, and the rich result that the last line represents, if any."""

    stream: str
    text: str
    data: MimeBundle | None = None
    metadata: MimeBundle = field(default_factory=dict[str, object])


class RawLines:
    """The pending lines of `%%mesh --raw`, prefixed with their rank and limited like folded output."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._unfinished: dict[tuple[Source, str], str] = {}
        self._count: dict[Source, tuple[int, int]] = {}  # lines and characters
        self._meshes: set[str] = set()
        self._waiting: list[RawText] = []

    def feed(self, source: Source, kind: str, stream: str, data: Any) -> None:
        """Add one event of a rank; see `monarch_kernel.output.RankOutput`."""
        self._meshes.add(source.mesh)
        if self._count.get(source, (0, 0))[0] > self._limits.lines:
            return  # the notice that further output is hidden has been added
        if kind == "text":
            *lines, rest = (self._unfinished.pop((source, stream), "") + data).split("\n")
            while len(rest) >= LONGEST_LINE:
                lines.append(rest[:LONGEST_LINE])
                rest = rest[LONGEST_LINE:]
            if rest:
                self._unfinished[source, stream] = rest
            for line in lines:
                self._line(source, stream, _without_movements(line))
        elif kind in ("display", "result"):
            shown = data.get("data") or {}
            for line in str(shown.get("text/plain", "")).split("\n"):
                self._line(source, stream, line)
            if set(shown) - {"text/plain"} and self._waiting:
                last = self._waiting[-1]
                last.data, last.metadata = shown, data.get("metadata") or {}

    def take(self, final: bool) -> list[RawText]:
        """Return the lines since the last call, with unfinished ones if `final`. Join adjacent lines of a stream."""
        if final:
            for (source, stream), rest in self._unfinished.items():
                self._line(source, stream, rest)
            self._unfinished.clear()
        waiting, self._waiting = self._waiting, []
        joined: list[RawText] = []
        for each in waiting:
            if joined and joined[-1].stream == each.stream and joined[-1].data is None:
                before = joined[-1]
                before.text += each.text
                before.data, before.metadata = each.data, each.metadata
            else:
                joined.append(each)
        return joined

    def _line(self, source: Source, stream: str, line: str) -> None:
        lines, size = self._count.get(source, (0, 0))
        lines, size = lines + 1, size + len(line) + 1
        self._count[source] = lines, size
        name = len(self._meshes) > 1
        if lines <= self._limits.lines and size <= self._limits.bytes:
            self._waiting.append(RawText(stream, raw_line(source, line, name_mesh=name) + "\n"))
        elif lines - 1 <= self._limits.lines and size - len(line) - 1 <= self._limits.bytes:
            hint = f"… no more of this rank is shown here; %mesh logs -r {source.rank} --to FILE writes all of it"
            self._waiting.append(RawText(stream, raw_line(source, hint, name_mesh=name) + "\n"))


def _without_movements(line: str) -> str:
    """Return the text as shown by a front end that only appends: without cursor movements and overwritten text."""
    return only_colours(line.rstrip("\r").rpartition("\r")[2]) if STEERING.search(line) else line


class CellOutput:
    """The output of ranks for one cell.

    Args:
        publisher: shows the output.
        raw: show line by line, prefixed with the rank, instead of folded.
        expected: the ranks that will write, if known.
        limits: how much of one rank's output is shown.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        raw: bool = False,
        expected: Collection[Source] = (),
        limits: Limits | None = None,
    ) -> None:
        self._publisher = publisher
        self._raw = RawLines(limits or Limits()) if raw else None
        self._folding = Folding(limits)
        self._active = set(expected)
        self._progress = ""
        self._abandoned = False
        self._notice = ""
        self._names_shown = False
        self._published: set[int] = set()
        self._begun: set[Source] = set()
        self._ended: dict[Source, set[str]] = {}
        self._undivided = False  # something was recorded since the last `make_way`
        self._lock = threading.Lock()
        self._publishing = threading.RLock()
        self.tooltip: Tooltip | None = None

    @property
    def live(self) -> bool:
        """Whether lines that are shown can be replaced later."""
        return self._publisher.live

    def feed(self, source: Source, kind: str, stream: str, data: Any) -> bool:
        """Record one event; returns whether there is something new to show."""
        with self._lock:
            if kind == "begin":
                self._begun.add(source)
                return False
            if kind == "end":
                self._ended.setdefault(source, set()).add(stream)
                if stream == "stdout":
                    self._active.discard(source)
                return False
            if self._raw is not None and kind != "clear":
                self._raw.feed(source, kind, stream, data)
            elif kind == "text":
                self._folding.text(source, stream, data)
            elif kind in ("display", "result"):
                self._folding.display(
                    source,
                    data.get("data") or {},
                    data.get("metadata") or {},
                    display_id=data.get("display_id"),
                    update=bool(data.get("update")),
                    result=kind == "result",
                )
            elif kind == "clear":
                self._folding.clear(source, bool(data.get("wait")))
            else:
                return False
            self._undivided = True
            return True

    def make_way(self) -> None:
        """Show the output so far, because the cell is about to show its own; later rank output appears below that."""
        if not self._undivided:
            return
        with self._lock:
            self._undivided = False
            self._folding.divide()
        self.show(final=True)

    def abandon(self, why: str) -> bool:
        """Replace the progress line with `why` permanently, as the kernel ends. Returns whether there was a line."""
        with self._lock:
            self._abandoned = bool(self._progress)
            if self._abandoned:
                self._progress, self._notice = why, ""
            return self._abandoned

    def progress(self, line: str) -> bool:
        """Set the progress line; returns whether it changed."""
        with self._lock:
            if self._abandoned:
                return False
            changed, self._progress = line != self._progress, line
        return changed

    def notice(self, text: str) -> bool:
        """Set the notice below the progress line; "" removes it. Returns whether it changed."""
        with self._lock:
            changed, self._notice = text != self._notice, text
        return changed

    def _footer(self) -> str:
        return "\n".join(filter(None, (self._progress, self._notice)))

    def has_begun(self, source: Source) -> bool:
        """Whether a rank has begun to run this cell."""
        with self._lock:
            return source in self._begun

    def missing(self, sources: Iterable[Source]) -> list[Source]:
        """The `sources` whose output for this cell has not completely arrived."""
        with self._lock:
            return [source for source in sources if len(self._ended.get(source, ())) < 2]

    def finish(self, source: Source | None = None) -> None:
        """Expect no more output from a rank; from any rank if it is None."""
        with self._lock:
            self._folding.finish(source)
            if source is None:
                self._active.clear()
            else:
                self._active.discard(source)

    def show_text(self, stream: str, text: str) -> None:
        """Write the kernel's own text to the cell."""
        with self._publishing:
            self._publisher.write(stream, text)

    def show(self, *, final: bool = False) -> bool:
        """Show what is new; returns whether some output is held back for a moment.

        Args:
            final: hold no output back.
        """
        with self._publishing:
            if self._raw is not None:
                return self._show_raw(final)
            if not self._publisher.live:
                return self._show_settled(final)
            with self._lock:
                names = len(self._folding.meshes) > 1
                if names and not self._names_shown:
                    self._folding.touch_all()
                self._names_shown = names
                views = self._folding.take(self._footer())
            for view in views:
                self._show_view(view)
            return False

    def _show_view(self, view: View) -> None:
        data = bundle(view, name_meshes=self._names_shown, tooltip=self.tooltip)
        metadata = view.metadata if isinstance(view, RichView) else {}
        update = view.id in self._published
        if update or any(data.values()):
            self._published.add(view.id)
            self._publisher.show(view.id, data, metadata, update=update)

    def _show_settled(self, final: bool) -> bool:
        with self._lock:
            blocks = self._folding.take_settled(self._active, hold=0 if final else 0.3)
            if final:
                blocks += self._folding.new_notices()
            names = len(self._folding.meshes) > 1
            waiting = self._folding.unsettled
            progress = self._progress
        if blocks:
            self._publisher.write("stdout", blocks_text(blocks, name_meshes=names) + "\n")
        self._publisher.progress(progress)
        return waiting

    def _show_raw(self, final: bool) -> bool:
        assert self._raw is not None
        with self._lock:
            items = self._raw.take(final)
            progress = self._footer()
        for each in items:
            self._publisher.write(each.stream, each.text)
            if each.data is not None and self._publisher.live:
                self._published.add(len(self._published))
                self._publisher.show(len(self._published), each.data, each.metadata, update=False)
        if self._publisher.live:
            key = -1
            if progress or key in self._published:
                self._publisher.show(key, bundle(TextView(key, (), progress)), {}, update=key in self._published)
                self._published.add(key)
        else:
            self._publisher.progress(progress)
        return False


# Route every rank's output live to the cell that caused it, even if another cell runs or the cell has ended.
#
# `monarch_kernel.output.subscribe` calls `OutputRouter.on_event` on the polling thread; it only records the event. The
# router's own thread shows changes a few times a second. When a cell ends, its own thread shows the rest, so the final
# state is exact.

#: The shortest time between two updates of what a cell shows (seconds).
PERIOD = 0.12
#: The time that output waits for output of other ranks before it is shown (seconds).
GATHER = 0.03

_MOST_CELLS = 500


class OutputRouter:
    """Records the events of all ranks with their cells, and schedules updates of the cells.

    Args:
        fallback: for events that name no known cell, returns a key and the output of the running (or last) cell; None
            if there is no such cell.
        describe: returns the text of a label's tooltip for some ranks.
    """

    def __init__(
        self, fallback: Callable[[str], tuple[str, CellOutput] | None], describe: Tooltip | None = None
    ) -> None:
        self._fallback = fallback
        self._describe = describe
        self._cells: OrderedDict[str, CellOutput] = OrderedDict()
        self._places: dict[Source, tuple[str, int]] = {}
        self._dirty: dict[CellOutput, None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, cell: str, output: CellOutput) -> CellOutput:
        """Record the events of `cell` with `output`."""
        output.tooltip = self._describe
        self._cells[cell] = output
        while len(self._cells) > _MOST_CELLS:
            self._cells.popitem(last=False)
        return output

    def on_event(self, event: RankOutput) -> None:
        """Record one event of a rank. Fast; may be called on any thread."""
        source = Source(event.mesh, event.rank)
        if event.kind == "begin":
            self._places[source] = event.host, event.pid
        if event.kind in ("flush", "comm"):
            return
        output = self._cells.get(event.cell)
        if output is None:
            if event.kind in ("begin", "end"):
                return
            found = self._fallback(event.cell)
            if found is None:
                return
            key, output = found
            if self._cells.get(key) is not output:
                self.open(key, output)
        if output.feed(source, event.kind, event.stream, event.data):
            self.touch(output)

    def get(self, cell: str) -> CellOutput | None:
        """Return the output that `cell` was opened with; None if it is unknown."""
        return self._cells.get(cell)

    def whereabouts(self, source: Source) -> tuple[str, int]:
        """Return host and pid of a rank that has run a cell; "" and 0 for other ranks."""
        return self._places.get(source, ("", 0))

    def touch(self, output: CellOutput) -> None:
        """Schedule an update of `output`."""
        with self._changed:
            if self._closed:
                return
            self._dirty[output] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-cells", daemon=True)
                self._thread.start()
            self._changed.notify()

    def abandon(self, why: str) -> None:
        """Replace the progress of cells that still run with `why`, as the kernel ends."""
        for output in list(self._cells.values()):
            if output.abandon(why):
                output.show()

    def close(self) -> None:
        """Show the remaining output, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(2)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed)
                if self._closed and not self._dirty:
                    return
                self._changed.wait_for(lambda: self._closed, GATHER)
                outputs, self._dirty = list(self._dirty), {}
            again: list[CellOutput] = []
            for output in outputs:
                try:
                    if output.show(final=self._closed) and not self._closed:
                        again.append(output)
                except Exception:  # the front end's socket may be closed; continue with other cells
                    import logging

                    logging.getLogger(__name__).exception("the output of a cell could not be shown")
            with self._changed:
                self._dirty.update(dict.fromkeys(again))
                self._changed.wait_for(lambda: self._closed, PERIOD)
