"""Brings every rank's output to the cell that caused it, live, whatever runs meanwhile and after the cell's end.

`OutputRouter.on_event` is what `monarch_kernel.output.subscribe` calls, on whichever thread polls: it only files
the event. One thread of the router's shows what has changed, a few times a second; a cell's own thread shows
the rest when the cell ends, so that the last state is exact.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from monarch_kernel.kernel.output.folding import Folding
from monarch_kernel.kernel.output.lines import LONGEST_LINE, Limits
from monarch_kernel.kernel.output.publisher import Publisher
from monarch_kernel.kernel.output.render import Tooltip, blocks_text, bundle, raw_line
from monarch_kernel.kernel.output.transcript import RichView, Source, TextView

#: The shortest time between two updates of what a cell shows (seconds).
PERIOD = 0.12
#: How long output waits for other ranks' before it is shown (seconds).
PATIENCE = 0.03

_MOST_CELLS = 500


class CellOutput:
    """What ranks put out for one cell.

    Args:
        publisher: shows it.
        raw: line by line with a rank in front, instead of folded.
        expected: the ranks that will write, where that is known.
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
        self._raw = _RawLines(limits or Limits()) if raw else None
        self._folding = Folding(limits)
        self._active = set(expected)
        self._progress = ""
        self._abandoned = False
        self._notice = ""
        self._names_shown = False
        self._published: set[int] = set()
        self._begun: set[Source] = set()
        self._ended: dict[Source, set[str]] = {}
        self._undivided = False  # something was filed since the last `make_way`
        self._lock = threading.Lock()
        self._publishing = threading.RLock()
        self.tooltip: Tooltip | None = None

    def feed(self, source: Source, kind: str, stream: str, data: Any) -> bool:
        """File one event; whether there is something new to show."""
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
        """The cell is about to show something of its own: what came before stands above it, the rest below."""
        if not self._undivided:
            return
        with self._lock:
            self._undivided = False
            self._folding.divide()
        self.show(final=True)

    def abandon(self, why: str) -> bool:
        """No more will come, as the kernel ends: `why` replaces the progress line for good. Whether there was one."""
        with self._lock:
            self._abandoned = bool(self._progress)
            if self._abandoned:
                self._progress, self._notice = why, ""
            return self._abandoned

    def progress(self, line: str) -> bool:
        """Set the progress line; whether that changed it."""
        with self._lock:
            if self._abandoned:
                return False
            changed, self._progress = line != self._progress, line
        return changed

    def notice(self, text: str) -> bool:
        """Set what stands below the progress line, until it is set to nothing; whether that changed it."""
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
        """Those of `sources` whose output for this cell has not all arrived."""
        with self._lock:
            return [source for source in sources if len(self._ended.get(source, ())) < 2]

    def finish(self, source: Source | None = None) -> None:
        """No more is expected of a rank (or of any)."""
        with self._lock:
            self._folding.finish(source)
            if source is None:
                self._active.clear()
            else:
                self._active.discard(source)

    def show_text(self, stream: str, text: str) -> None:
        """Write text of our own to the cell."""
        with self._publishing:
            self._publisher.write(stream, text)

    def show(self, *, final: bool = False) -> bool:
        """Show what is new; whether something is held back for a moment.

        Args:
            final: hold nothing back.
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
                self._show_view(view.id, view)
            return False

    def _show_view(self, key: int, view: TextView | RichView) -> None:
        data = bundle(view, name_meshes=self._names_shown, tooltip=self.tooltip)
        metadata = view.metadata if isinstance(view, RichView) else {}
        update = key in self._published
        if update or any(data.values()):
            self._published.add(key)
            self._publisher.show(key, data, metadata, update=update)

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
        for stream, text, data, metadata in items:
            self._publisher.write(stream, text)
            if data is not None and self._publisher.live:
                self._published.add(len(self._published))
                self._publisher.show(len(self._published), data, metadata, update=False)
        if self._publisher.live:
            key = -1
            if progress or key in self._published:
                self._publisher.show(key, bundle(TextView(key, (), progress)), {}, update=key in self._published)
                self._published.add(key)
        else:
            self._publisher.progress(progress)
        return False


class _RawLines:
    """The lines of `--raw`, each with its rank; bounded as folded output is."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._partial: dict[tuple[Source, str], str] = {}
        self._count: dict[Source, tuple[int, int]] = {}
        self._meshes: set[str] = set()
        self._items: list[tuple[str, str, dict[str, Any] | None, dict[str, Any]]] = []

    def feed(self, source: Source, kind: str, stream: str, data: Any) -> None:
        self._meshes.add(source.mesh)
        if self._count.get(source, (0, 0))[0] > self._limits.lines:
            return  # it was told that no more is shown
        if kind == "text":
            *lines, rest = (self._partial.pop((source, stream), "") + data).split("\n")
            while len(rest) >= LONGEST_LINE:
                lines.append(rest[:LONGEST_LINE])
                rest = rest[LONGEST_LINE:]
            if rest:
                self._partial[source, stream] = rest
            for line in lines:
                self._line(source, stream, line)
        elif kind in ("display", "result"):
            shown = data.get("data") or {}
            rich = set(shown) - {"text/plain"}
            for line in str(shown.get("text/plain", "")).split("\n"):
                self._line(source, stream, line)
            if rich and self._items:
                last = self._items.pop()
                self._items.append((*last[:2], shown, data.get("metadata") or {}))
        elif kind == "error":
            for line in data.get("traceback") or ():
                self._line(source, "stderr", line)

    def take(self, final: bool) -> list[tuple[str, str, dict[str, Any] | None, dict[str, Any]]]:
        if final:
            for (source, stream), rest in self._partial.items():
                self._line(source, stream, rest)
            self._partial.clear()
        items, self._items = self._items, []
        joined: list[tuple[str, str, dict[str, Any] | None, dict[str, Any]]] = []
        for item in items:  # neighbours travel together
            if joined and joined[-1][0] == item[0] and joined[-1][2] is None:
                joined[-1] = (item[0], joined[-1][1] + item[1], *item[2:])
            else:
                joined.append(item)
        return joined

    def _line(self, source: Source, stream: str, line: str) -> None:
        lines, size = self._count.get(source, (0, 0))
        lines, size = lines + 1, size + len(line) + 1
        self._count[source] = lines, size
        name = len(self._meshes) > 1
        full = lines > self._limits.lines or size > self._limits.bytes
        if not full:
            self._items.append((stream, raw_line(source, line, name_mesh=name) + "\n", None, {}))
        elif lines - 1 <= self._limits.lines and size - len(line) - 1 <= self._limits.bytes:
            hint = f"… no more of this rank is shown here; %mesh logs -r {source.rank} has all"
            self._items.append((stream, raw_line(source, hint, name_mesh=name) + "\n", None, {}))


class OutputRouter:
    """Files the events of all ranks with their cells, and has them shown.

    Args:
        fallback: makes the output of the cell that runs (or ran last), for events that name no known cell,
            and the key under which to keep it; None where there is no such cell.
        describe: what a label's tooltip says of some ranks.
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
        """Have the events of `cell` filed with `output`."""
        output.tooltip = self._describe
        self._cells[cell] = output
        while len(self._cells) > _MOST_CELLS:
            self._cells.popitem(last=False)
        return output

    def on_event(self, event: Any) -> None:
        """File one event of a rank. Quick; called by any thread."""
        source = Source(event.mesh, event.rank)
        if event.kind == "begin":
            self._places[source] = event.host, event.pid
        if event.kind == "flush":
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
        """The output that `cell` was opened with."""
        return self._cells.get(cell)

    def whereabouts(self, source: Source) -> tuple[str, int]:
        """Host and pid of a rank that has run a cell; empty and 0 if it has not."""
        return self._places.get(source, ("", 0))

    def touch(self, output: CellOutput) -> None:
        """Have `output` shown soon."""
        with self._changed:
            if self._closed:
                return
            self._dirty[output] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-cells", daemon=True)
                self._thread.start()
            self._changed.notify()

    def abandon(self, why: str) -> None:
        """The kernel ends: cells that still run say so, and not for ever how far they were."""
        for output in list(self._cells.values()):
            if output.abandon(why):
                output.show()

    def close(self) -> None:
        """Show what is left, and stop."""
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
                self._changed.wait_for(lambda: self._closed, PATIENCE)
                outputs, self._dirty = list(self._dirty), {}
            again: list[CellOutput] = []
            for output in outputs:
                try:
                    if output.show(final=self._closed) and not self._closed:
                        again.append(output)
                except Exception:  # the front end's socket may be closed; other cells go on
                    import logging

                    logging.getLogger(__name__).exception("the output of a cell could not be shown")
            with self._changed:
                self._dirty.update(dict.fromkeys(again))
                self._changed.wait_for(lambda: self._closed, PERIOD)
