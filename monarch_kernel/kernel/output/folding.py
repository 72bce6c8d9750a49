"""Folds the output of many ranks into one transcript: events in, views of its sections out.

Pure: no I/O, no threads, no IPython. `rank_lines.py` splits a rank's output into lines, and `rows.py` decides which row
each line joins. For a front end that can update its display, each section has its own id, and only changed sections
are published again (`take`). A terminal cannot update, so rows are printed once they have settled (`take_settled`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from monarch_kernel.display.quantities import text_size
from monarch_kernel.kernel.output.rank_lines import Limits, RankLines
from monarch_kernel.kernel.output.rows import SECTION_BYTES, SECTION_ROWS, Key, Row, Rows, Section, blocks_of
from monarch_kernel.kernel.output.transcript import Block, CutOutput, MimeBundle, RichView, Source, TextView, View


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
