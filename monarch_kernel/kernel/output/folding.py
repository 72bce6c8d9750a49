"""Output of many ranks folded into one transcript: events in, sections to show out.

Pure: no I/O, no threads, no IPython. A line that several ranks write is one *row* with the set of ranks
that wrote it; the rows of one rank stand in the order in which it wrote them. A rank joins the first row
after its own last one that has the same content, so ranks that print the same at different speeds fold.
Else it joins an earlier such row if its own rows since then can be moved before that row without changing any
rank's order, so lines in common after lines that differ fold too. Else it appends a row.

Rows live in *sections*: runs of text rows of bounded size, and rich results one by one. A front end that
can update what it showed publishes each section under an id of its own and repeats only those that
changed (`take`). A terminal cannot: there, rows are printed once they have settled (`take_settled`).
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from monarch_kernel.kernel.output.transcript import Block, RichView, Row, Section, Source, TextView, View, blocks_of

_SECTION_ROWS = 100
_SECTION_BYTES = 16_384
#: A longer line is cut into several.
LONGEST_LINE = 32_768
_TAIL_BYTES = 8_192
# How many rows back a rank may join one, and how many rows a section may grow to by that.
_WINDOW = 400
_SECTION_MOST_ROWS = 3 * _SECTION_ROWS
_SMALLEST_GAP = 1e-6

_order_of = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one rank's output one cell shows."""

    lines: int = 2_000
    bytes: int = 1_000_000
    rich: int = 200
    rich_bytes: int = 20_000_000
    tail: int = 20


@dataclass(slots=True)
class _Written:
    """What one source has written so far."""

    last: Row | None = None
    lines: int = 0
    bytes: int = 0
    rich: int = 0
    rich_bytes: int = 0
    cut_lines: int = 0
    cut_bytes: int = 0
    cut_rich: int = 0
    tail: deque[str] = field(default_factory=deque)
    tail_bytes: int = 0
    partial: dict[str, str] = field(default_factory=dict)
    clear_next: bool = False
    shown: dict[str, Row] = field(default_factory=dict)  # display id -> row


class Folding:
    """The folded output of one cell."""

    def __init__(self, limits: Limits | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or Limits()
        self.meshes: set[str] = set()
        self._clock = clock
        self._sections: list[Section] = []
        self._written: dict[Source, _Written] = {}
        self._alike: dict[tuple[str, ...], list[Row]] = {}
        self._unsettled: list[Row] = []
        self._footer: tuple[int, tuple[Block, ...], str] = (-1, (), "")
        self._told: list[Block] = []

    # -- events ------------------------------------------------------------------------------

    def text(self, source: Source, stream: str, text: str) -> None:
        """`source` wrote `text`, which may hold any number of lines and end in the middle of one."""
        state = self._cleared(source)
        if "\n" not in text and len(text) < 256 and "\r" not in text:
            partial = state.partial.get(stream, "") + text
            if "\r" not in partial and len(partial) < LONGEST_LINE:
                state.partial[stream] = partial
                return
        if state.lines >= self.limits.lines and "\r" not in text:
            text = self._cut_lines(state, stream, text)
        *lines, partial = (state.partial.get(stream, "") + text).split("\n")
        for line in lines:
            self._line(source, state, stream, _overwritten(line.removesuffix("\r")))
        if "\r" in partial:
            partial = _overwritten(partial.rstrip("\r")) + "\r" * partial.endswith("\r")
        while len(partial) >= LONGEST_LINE:
            self._line(source, state, stream, partial[:LONGEST_LINE])
            partial = partial[LONGEST_LINE:]
        state.partial[stream] = partial

    def display(
        self,
        source: Source,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        display_id: str | None = None,
        update: bool = False,
        result: bool = False,
    ) -> None:
        """`source` displayed a MIME bundle, or replaced the one it displayed under `display_id`."""
        state = self._state(source)
        if update:
            if display_id is not None and display_id in state.shown:
                self._replace(source, state, display_id, data, metadata or {})
            return
        state = self._cleared(source)
        self._finish_lines(source, state)
        if set(data) == {"text/plain"} and display_id is None:
            self._result(source, state, str(data["text/plain"]), "result" if result else "stdout")
            return
        size = _bundle_size(data)
        if state.rich >= self.limits.rich or state.rich_bytes + size > self.limits.rich_bytes:
            state.cut_rich += 1
            return
        state.rich += 1
        state.rich_bytes += size
        count = len(self._sections)
        row = self._join(source, state, _rich_key(data), data, metadata or {})
        if len(self._sections) > count:
            self._by_rank(source, row)
        if display_id is not None:
            state.shown[display_id] = row

    def clear(self, source: Source, wait: bool = False) -> None:
        """`source` asked for its output so far to be removed, now or when it next writes."""
        state = self._state(source)
        if wait:
            state.clear_next = True
            return
        for section in self._sections:
            for row in list(section.rows):
                if source in row.sources:
                    self._leave(source, row)
        self._written[source] = _Written()

    def finish(self, source: Source | None = None) -> None:
        """No more is expected of `source` (or of anyone) for now: what it left unfinished is a line too."""
        for known, state in self._written.items():
            if source is None or known == source:
                self._finish_lines(known, state)

    def divide(self) -> None:
        """Something else is shown now: what ranks write from here on stands below it, and folds only with its like."""
        self.finish()
        self._alike.clear()
        if self._sections:
            self._sections[-1].closed = True

    # -- what to show ------------------------------------------------------------------------

    def take(self, progress: str = "") -> list[View]:
        """The sections that changed since the last time, oldest first.

        Unfinished lines, notices of what was cut, and `progress` stand at the end of the last section.
        """
        self._place_footer(progress)
        changed = [section for section in self._sections if section.dirty]
        for section in changed:
            section.dirty = False
        return [self._view(section) for section in changed]

    def take_settled(self, expected: Collection[Source] = (), *, hold: float = 0.3) -> list[Block]:
        """Rows that will not grow any more, for a display that can only append.

        A row is settled when every one of `expected` has written it or something after it, or when it is
        `hold` seconds old; with `hold=0` all are.
        """
        now = self._clock()
        settled: list[Row] = []
        # Rows that settled before all stand before these, whatever was moved since.
        self._unsettled.sort(key=_order_of)
        for row in self._unsettled:
            waiting = hold > 0 and now - row.born < hold
            if waiting and not all(self._has_passed(source, row) for source in expected):
                break
            settled.append(row)
        del self._unsettled[: len(settled)]
        for row in settled:
            self._forget(row)
        return blocks_of([row for row in settled if row.sources], rich_text=True)

    def notices(self) -> list[Block]:
        """What was cut, for each set of ranks of which the same was."""
        alike: dict[tuple[Any, ...], set[Source]] = {}
        for source, state in self._written.items():
            if state.cut_lines or state.cut_rich:
                key = (state.cut_lines, state.cut_bytes, state.cut_rich, tuple(state.tail))
                alike.setdefault(key, set()).add(source)
        blocks: list[Block] = []
        for (lines, size, rich, tail), sources in alike.items():
            cut = [f"{lines:,} lines ({_human(size)})"] * bool(lines) + [f"{rich:,} rich results"] * bool(rich)
            hidden = f"… {' and '.join(cut)} not shown"
            if lines:
                ranks = ",".join(str(rank) for rank in sorted({source.rank for source in sources})[:16])
                hidden += f"; %mesh logs -r {ranks} has all of the text"
                if tail:
                    hidden += "; the last lines were:"
            blocks.append(Block(frozenset(sources), "notice", (hidden,)))
            if tail:
                blocks.append(Block(frozenset(sources), "stdout", tail))
        return blocks

    def new_notices(self) -> list[Block]:
        """The notices, if there is more to tell than the last time."""
        notices = self.notices()
        new, self._told = notices != self._told, notices
        return notices if new else []

    def touch_all(self) -> None:
        """Have `take` give every section again."""
        for section in self._sections:
            section.dirty = True

    @property
    def unsettled(self) -> bool:
        """Whether `take_settled` holds something back."""
        return bool(self._unsettled)

    @property
    def empty(self) -> bool:
        """Whether nothing at all is to be shown."""
        return not any(section.rows for section in self._sections) and not self._footer_blocks()

    # -- rows --------------------------------------------------------------------------------

    def _state(self, source: Source) -> _Written:
        state = self._written.get(source)
        if state is None:
            state = self._written[source] = _Written()
            self.meshes.add(source.mesh)
        return state

    def _has_passed(self, source: Source, row: Row) -> bool:
        state = self._written.get(source)
        return state is not None and state.last is not None and state.last.order >= row.order

    def _cleared(self, source: Source) -> _Written:
        """The state of `source`, about to write: this is when `clear(wait=True)` takes effect."""
        if self._state(source).clear_next:
            self.clear(source)
        return self._state(source)

    def _finish_lines(self, source: Source, state: _Written) -> None:
        for stream, partial in list(state.partial.items()):
            if partial:
                self._line(source, state, stream, partial.rstrip("\r"))
        state.partial.clear()

    def _line(self, source: Source, state: _Written, stream: str, line: str) -> None:
        size = len(line) + 1
        if state.lines >= self.limits.lines or state.bytes + size > self.limits.bytes:
            self._cut(state, line)
            return
        state.lines += 1
        state.bytes += size
        self._join(source, state, ("text", stream, line))

    def _result(self, source: Source, state: _Written, text: str, stream: str) -> None:
        lines = text.split("\n")
        size = len(text) + 1
        if state.lines + len(lines) > self.limits.lines or state.bytes + size > self.limits.bytes:
            for line in lines:
                self._line(source, state, stream, line)
            return
        state.lines += len(lines)
        state.bytes += size
        self._join(source, state, ("text", stream, text))

    def _cut(self, state: _Written, line: str) -> None:
        state.cut_lines += 1
        state.cut_bytes += len(line) + 1
        state.tail.append(line)
        state.tail_bytes += len(line)
        while state.tail and (len(state.tail) > self.limits.tail or state.tail_bytes > _TAIL_BYTES):
            state.tail_bytes -= len(state.tail.popleft())

    def _cut_lines(self, state: _Written, stream: str, text: str) -> str:
        """Count the lines of ``text``, of which only the last few can be shown any more; gives the rest."""
        end = len(text)
        for _ in range(self.limits.tail + 1):
            end = text.rfind("\n", 0, end)
            if end < 0:
                return text
        before = state.partial.get(stream, "")
        if "\r" in before:
            return text
        state.partial[stream] = ""
        state.cut_lines += text.count("\n", 0, end + 1)
        state.cut_bytes += len(before) + end + 1
        return text[end + 1 :]

    def _join(
        self,
        source: Source,
        state: _Written,
        key: tuple[str, ...],
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Row:
        row = self._partner(source, state, key)
        if row is None:
            row = self._append(key, data, metadata)
            self._remember(row)
        row.sources.add(source)
        self._touch(row)
        state.last = row
        return row

    def _partner(self, source: Source, state: _Written, key: tuple[str, ...]) -> Row | None:
        """The row with this content that `source` can join, if there is one."""
        rows = self._alike.get(key)
        if not rows or state.last is None:
            return rows[0] if rows else None
        at = bisect_right(rows, state.last.order, key=_order_of)
        if at < len(rows):
            return rows[at]
        for row in rows[-8:]:  # the earliest possible; all but the last few are too far back
            if source not in row.sources and self._moved_before(row, state.last):
                return row
        return None

    def _moved_before(self, row: Row, last: Row) -> bool:
        """Move `last`, and what must precede it, before `row`; False if any rank's order forbids that."""
        must: list[Row] = []
        who: set[Source] = set()
        seen = 0
        for section in reversed(self._sections[row.section.id : last.section.id + 1]):
            for other in reversed(section.rows):
                if other.order > last.order or other.target is not None:
                    continue
                if other is row:
                    break
                seen += 1
                if seen > _WINDOW:
                    return False
                if other is last or other.sources & who:
                    if other.data is not None:
                        return False  # a rich result stays where it was shown
                    who |= other.sources
                    must.append(other)
        target = row.label or row
        if row.sources & who or len(target.section.rows) + len(must) > _SECTION_MOST_ROWS:
            return False
        must.reverse()
        self._insert_before(target, must)
        return True

    def _insert_before(self, target: Row, rows: list[Row]) -> None:
        before = self._order_before(target)
        if (target.order - before) / (len(rows) + 1) < _SMALLEST_GAP:
            everything = [row for section in self._sections for row in section.rows]
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

    def _by_rank(self, source: Source, new: Row) -> None:
        """Have rich results that ranks show at about the same time stand by rank, not by who was first.

        `new` is the last row. The results that it may precede trade places: the first of each rank in rank order, then
        the second of each. None passes a line of a rank that showed it.
        """
        run = self._movable()
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
        lines = [row for section in self._sections[run[at].section.id :] for row in section.rows]
        last = max((row for row in lines if row.data is None and source in row.sources), key=_order_of, default=None)
        if last is not None and not self._moved_before(run[at], last):
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
            self._touch(row)

    def _movable(self) -> list[Row]:
        """The rich rows at the end, without the very last, that may move back: no rank of theirs wrote lines after."""
        found: list[Row] = []
        wrote: set[Source] = set()
        seen = 0
        for section in reversed(self._sections[:-1]):
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

    def _order_before(self, target: Row) -> float:
        at = target.section.rows.index(target)
        if at:
            return target.section.rows[at - 1].order
        for section in reversed(self._sections[: target.section.id]):
            if section.rows:
                return section.rows[-1].order
        return target.order - 1.0

    def _append(self, key: tuple[str, ...], data: dict[str, Any] | None, metadata: dict[str, Any] | None) -> Row:
        if data is None:
            row = self._new_row(self._text_section(), key, key[1], key[2])
            row.section.size += len(row.text)
            return row
        label = self._new_row(self._text_section(), key, "label", "")
        section = self._new_section(rich=True)
        row = self._new_row(section, key, "rich", "")
        row.data, row.metadata = data, metadata or {}
        row.label, label.target = label, row
        return row

    def _new_row(self, section: Section, key: tuple[str, ...], stream: str, text: str) -> Row:
        last = next((other.rows[-1] for other in reversed(self._sections) if other.rows), None)
        order = 0.0 if last is None else last.order + 1.0
        row = Row(order, key, stream, text, section, self._clock())
        section.rows.append(row)
        section.dirty = True
        if stream != "label":
            self._unsettled.append(row)
        return row

    def _new_section(self, *, rich: bool) -> Section:
        section = Section(len(self._sections), rich)
        self._sections.append(section)
        return section

    def _text_section(self) -> Section:
        last = self._sections[-1] if self._sections else None
        full = last is not None and (len(last.rows) >= _SECTION_ROWS or last.size >= _SECTION_BYTES)
        if last is None or last.rich or last.closed or full:
            return self._new_section(rich=False)
        return last

    def _touch(self, row: Row) -> None:
        row.section.dirty = True
        if row.label is not None:
            row.label.section.dirty = True

    def _leave(self, source: Source, row: Row) -> None:
        row.sources.discard(source)
        self._touch(row)
        if not row.sources:
            self._forget(row)
            if row.label is not None:
                row.label.section.rows.remove(row.label)
            if not row.section.rich:
                row.section.rows.remove(row)

    def _forget(self, row: Row) -> None:
        """Let no further source join `row`."""
        rows = self._alike.get(row.key)
        if rows and row in rows:
            rows.remove(row)
            if not rows:
                del self._alike[row.key]

    def _replace(
        self,
        source: Source,
        state: _Written,
        display_id: str,
        data: dict[str, Any],
        metadata: dict[str, Any],
    ) -> None:
        row = state.shown[display_id]
        key = _rich_key(data)
        if row.key == key:
            return
        twin = next((other for other in self._alike.get(key, ()) if source not in other.sources), None)
        if twin is None and row.sources == {source}:
            self._forget(row)
            row.key, row.data, row.metadata = key, data, metadata
            self._remember(row)
            self._touch(row)
            return
        self._leave(source, row)
        if twin is None:
            twin = self._append(key, data, metadata)
            self._remember(twin)
        twin.sources.add(source)
        self._touch(twin)
        state.shown[display_id] = twin
        theirs = (row for section in self._sections for row in section.rows if source in row.sources)
        state.last = max(theirs, key=_order_of)

    def _remember(self, row: Row) -> None:
        rows = self._alike.setdefault(row.key, [])
        rows.insert(bisect_right(rows, row.order, key=_order_of), row)

    # -- views -------------------------------------------------------------------------------

    def _footer_blocks(self) -> tuple[Block, ...]:
        alike: dict[tuple[str, str], set[Source]] = {}
        for source, state in self._written.items():
            for stream, partial in state.partial.items():
                if partial.rstrip("\r"):
                    alike.setdefault((stream, partial.rstrip("\r")), set()).add(source)
        blocks = [Block(frozenset(who), stream, (text,)) for (stream, text), who in alike.items()]
        return (*blocks, *self.notices())

    def _place_footer(self, progress: str) -> None:
        blocks = self._footer_blocks()
        at, old_blocks, old_progress = self._footer
        if (blocks or progress) and (not self._sections or self._sections[-1].rich):
            self._new_section(rich=False)
        last = len(self._sections) - 1
        if (last, blocks, progress) == (at, old_blocks, old_progress):
            return
        if at >= 0 and (old_blocks or old_progress):
            self._sections[at].dirty = True
        if last >= 0 and (blocks or progress):
            self._sections[last].dirty = True
        self._footer = (last, blocks, progress)

    def _view(self, section: Section) -> View:
        if section.rich:
            row = section.rows[0]
            data = row.data if row.sources and row.data else {}
            return RichView(section.id, frozenset(row.sources), data, row.metadata)
        blocks = blocks_of(section.rows)
        at, footer, progress = self._footer
        if at == section.id:
            return TextView(section.id, (*blocks, *footer), progress)
        return TextView(section.id, tuple(blocks))


def _rich_key(data: dict[str, Any]) -> tuple[str, ...]:
    return ("rich", json.dumps(data, sort_keys=True, default=repr))


def _bundle_size(data: dict[str, Any]) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else len(repr(value)) for value in data.values())


def _overwritten(line: str) -> str:
    """`line` after its carriage returns: what a terminal would show of it."""
    if "\r" not in line:
        return line
    shown = ""
    for part in line.split("\r"):
        # Colour codes take no width, so that columns cannot be counted: the later text wins whole.
        shown = (part or shown) if "\x1b" in line else part + shown[len(part) :]
    return shown


def _human(size: int) -> str:
    if size < 1_000:
        return f"{size} bytes"
    return f"{size / 1_000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"
