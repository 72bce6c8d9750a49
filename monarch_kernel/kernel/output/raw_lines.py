"""Output as `%%mesh --raw` shows it: every line as it arrives, prefixed with its rank, not folded. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.display.controls import only_colours
from monarch_kernel.kernel.output.rank_lines import LONGEST_LINE, Limits
from monarch_kernel.kernel.output.render import raw_line
from monarch_kernel.kernel.output.terminal_screen import STEERING
from monarch_kernel.kernel.output.transcript import MimeBundle, Source


@dataclass(slots=True)
class RawText:
    """Lines for one stream, and the rich result that the last line represents, if any."""

    stream: str
    text: str
    data: MimeBundle | None = None
    metadata: MimeBundle = field(default_factory=dict[str, Any])


class RawLines:
    """The lines that are still to be shown; limited for each rank like folded output."""

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
            return  # the notice that no more is shown has been added
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
        """The lines since the last call, and unfinished ones if `final`. Adjacent lines of one stream are joined."""
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
    """The text as a front end shows it that appends: without what steers a cursor, and what is overwritten."""
    return only_colours(line.rstrip("\r").rpartition("\r")[2]) if STEERING.search(line) else line
