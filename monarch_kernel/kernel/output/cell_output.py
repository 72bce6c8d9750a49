"""The output of ranks in one cell: recorded as it arrives, and shown when something is new.

Events are recorded under one lock, quickly, and shown under another, so a slow front end never delays the events of
ranks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.display.tables import only_colours
from monarch_kernel.kernel.output.folding import Folding
from monarch_kernel.kernel.output.publisher import MimeBundle, Publisher, RichView, Source, TextView, View
from monarch_kernel.kernel.output.rank_lines import LONGEST_LINE, STEERING, Limits
from monarch_kernel.kernel.output.render import Tooltip, blocks_text, bundle, raw_line
from monarch_kernel.output import RankOutput


@dataclass(slots=True)
class RawText:
    """Lines for one stream, and the rich result that the last line represents, if any."""

    stream: str
    text: str
    data: MimeBundle | None = None
    metadata: MimeBundle = field(default_factory=dict[str, Any])


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
        elif kind == "error":
            for line in data.get("traceback") or ():
                self._line(source, "stderr", line)

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
            elif kind == "error":
                self._folding.text(source, "stderr", "\n".join(data.get("traceback") or ()) + "\n")
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
