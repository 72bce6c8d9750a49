"""Output of ranks on the terminal of a script."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import msgspec

from monarch_kernel.runtime.actor.output.rank_output import RankOutput
from monarch_kernel.runtime.actor.process import System
from monarch_kernel.runtime.mesh.rankset import format_ranks
from monarch_kernel.runtime.node.poller import Timer

#: The number of characters of a line that are kept until its end arrives.
LONGEST_LINE = 1_000_000


class LoggingOption(msgspec.Struct):
    """The ``logging_option`` of one mesh."""

    prefix: bool = False
    window: float | None = None


NO_OPTION = LoggingOption()


class _Line(msgspec.Struct):
    """The beginning of a line whose end has not arrived."""

    parts: list[str] = msgspec.field(default_factory=list)
    size: int = 0

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)


class ScriptTerminal:
    """Shows ranks' output on a script's stdout and stderr in whole lines; lines of megabytes are shown in pieces."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._partial: dict[tuple[str, str], _Line] = {}
        #: By mesh: what is held of each stream, and what shows it at the end of its window.
        self._held: dict[str, tuple[Timer, dict[str, dict[str, set[int]]]]] = {}
        self._prefixed: dict[str, tuple[int, LoggingOption]] = {}
        #: By stream: the proc whose unfinished line was shown last.
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()

    def show(self, output: RankOutput, option: LoggingOption) -> None:
        """Print the text of one event."""
        if output.kind == "text":
            text: str = output.data
        elif output.kind in ("display", "result"):
            text = (output.data.get("data") or {}).get("text/plain", "")
            text = text + "\n" if text else ""
        elif output.kind == "error":
            text = "\n".join(output.data.get("traceback") or ()) + "\n"
        else:
            return
        key = (output.proc, output.stream)
        self._prefixed[output.proc] = (output.rank, option)
        lines, newline, rest = text.rpartition("\n")
        if newline:
            begun = self._partial.pop(key, None)
            if begun is not None:
                lines = "".join((*begun.parts, lines))
            self._lines(output, lines.split("\n"), option)
        if rest:
            line = self._partial.setdefault(key, _Line())
            line.add(rest)
            if line.size > LONGEST_LINE:
                del self._partial[key]
                self._lines(output, ["".join(line.parts)], option, end="" if option.window is None else "\n")

    def end(self, proc: str) -> None:
        """Show the last, unfinished lines of a proc that has ended."""
        rank, option = self._prefixed.get(proc, (0, NO_OPTION))
        for stream in ("stdout", "stderr"):
            begun = self._partial.pop((proc, stream), None)
            if begun is not None or self._open.get(stream) == proc:
                line = "".join(begun.parts) if begun is not None else ""
                self._lines(RankOutput("", proc, rank, {}, "", 0, stream, "", "text", ""), [line], option)

    def close(self) -> None:
        """Show all unfinished lines, as the script ends."""
        for proc in {proc for proc, _ in self._partial} | set(self._open.values()):
            self.end(proc)

    def _lines(self, output: RankOutput, lines: Sequence[str], option: LoggingOption, end: str = "\n") -> None:
        stream = output.stream
        if option.window is not None:
            uid = output.proc.rpartition(".")[0]
            with self._lock:
                if uid not in self._held:
                    timer = self._system.node.poller.call_later(option.window, lambda: self.flush(uid))
                    self._held[uid] = (timer, {})
                held = self._held[uid][1].setdefault(stream, {})
                for line in lines:
                    held.setdefault(line, set()).add(output.rank)
            return
        unfinished = self._open.pop(stream, None)
        if option.prefix:
            goes_on = unfinished == output.proc
            lines = [line if goes_on and k == 0 else f"[{output.rank}] {line}" for k, line in enumerate(lines)]
        if unfinished not in (None, output.proc):
            lines = ["", *lines]
        if not end:
            self._open[stream] = output.proc
        self._write(stream, lines, end)

    def flush(self, uid: str | None = None) -> None:
        """Show the lines held for aggregation: of one mesh, or of all."""
        with self._lock:
            wanted = [uid] if uid in self._held else [] if uid is not None else list(self._held)
            held = [self._held.pop(each) for each in wanted]
        for timer, streams in held:
            timer.cancel()
            for stream, lines in streams.items():
                self._write(stream, [f"[{format_ranks(ranks)}] {line}" for line, ranks in lines.items()])

    def _write(self, stream: str, lines: Sequence[str], end: str = "\n") -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write("\n".join(lines) + end)
            target.flush()
        except (OSError, ValueError):  # the script closed its stdout
            pass
