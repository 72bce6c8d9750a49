"""The output of ranks, line by line, for a view that follows it."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from monarch_kernel.engines import engine
from monarch_kernel.output import RankOutput

#: Lines are pushed at most this often (seconds).
PERIOD = 0.2
#: How many lines are pushed at a time; of more, the older ones are dropped and counted.
MOST_LINES = 500
#: How much of a line is pushed (characters).
LONGEST = 4_000


class LogFollower:
    """Pushes the lines that ranks of one mesh write, from its making until it is closed.

    Args:
        mesh: the name of the mesh.
        ranks: the ranks; None for all.
        search: only lines in which this is found, as a regular expression if it is a valid one.
        push: called with `lines` and `dropped`, on a thread of this object.
    """

    def __init__(
        self, mesh: str, ranks: Iterable[int] | None, search: str, push: Callable[[dict[str, Any]], object]
    ) -> None:
        self._mesh = mesh
        self._ranks = None if ranks is None else frozenset(ranks)
        self._found = _searcher(search)
        self._push = push
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, str, str]] = deque()
        self._dropped = 0
        self._begun: dict[tuple[str, str], str] = {}  # the line that has no end yet, by process and stream
        self._closed = False
        self._subscription = engine().subscribe(self._on_output)
        threading.Thread(target=self._run, name="monarch-log", daemon=True).start()

    def close(self) -> None:
        """Push no more. Closing again does nothing."""
        self._subscription.close()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _on_output(self, output: RankOutput) -> None:
        """Take output. Called on the polling thread, so it only keeps it."""
        if output.mesh != self._mesh or (self._ranks is not None and output.rank not in self._ranks):
            return
        if output.kind != "text":
            return
        key = (output.proc, output.stream)
        *whole, rest = f"{self._begun.get(key, '')}{output.data}".split("\n")
        self._begun[key] = rest[-LONGEST:]
        for line in whole:
            # A bar of tqdm returns to the beginning of its line: its last state is what counts.
            text = line.rstrip("\r").rpartition("\r")[2]
            if self._found(text):
                with self._changed:
                    self._lines.append((output.rank, output.stream, text[:LONGEST]))
                    if len(self._lines) > MOST_LINES:
                        self._lines.popleft()
                        self._dropped += 1
                    self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines) or self._closed)
                if self._closed:
                    return
                lines, self._lines = self._lines, deque()
                dropped, self._dropped = self._dropped, 0
            self._push({"lines": [list(line) for line in lines], "dropped": dropped})
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, PERIOD):
                    return


def _searcher(search: str) -> Callable[[str], object]:
    if not search:
        return lambda _text: True
    try:
        return re.compile(search, re.IGNORECASE).search
    except re.error:
        wanted = search.casefold()
        return lambda text: wanted in text.casefold()
