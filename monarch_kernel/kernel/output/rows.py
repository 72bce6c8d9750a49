"""The rows of folded output: which row a line joins, and the order of the rows.

Pure. A *row* is one line with the set of ranks that wrote it. The rows of one rank are in the order in which it wrote
them. A rank joins the first row after its own last one that has the same content, so ranks that print the same lines at
different speeds fold. Otherwise it joins an earlier row with the same content, if its own rows since then can be moved
before that row without changing any rank's order; common lines after differing lines then also fold. Otherwise it
appends a row.

Rows are grouped in *sections*, which are displayed separately: runs of text rows of bounded size, and single rich
results.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from monarch_kernel.kernel.output.transcript import Block, MimeBundle, Source

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
