"""Show the verdict of `monarch_kernel.debug.hang` below a cell's progress line when nothing has moved for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict

#: A verdict is shown when nothing has moved for this long (seconds).
STILL = 10.0
#: The first analysis runs this long before that; a verdict is shown once two analyses agree on it (seconds).
AHEAD = 2.0
#: While a verdict is shown and nothing moves, the analysis is repeated this often (seconds).
AGAIN = 10.0


class HangMonitor:
    """Detects that a cell makes no progress, runs the analysis on a separate thread, and decides what to show.

    It reads no clock itself.

    Args:
        look: returns a verdict; may take seconds.
        now: when the cell started, on the same clock as the later ``now`` arguments.
    """

    def __init__(self, look: Callable[[], Verdict], now: float) -> None:
        self._look = look
        self._seen: object = None
        self._since = now
        self._due = now + STILL - AHEAD
        self._found: list[Verdict | None] = []
        self._looking = False
        self._before = ""
        self.text = ""

    def tick(self, seen: object, suspect: bool, now: float) -> str:
        """Return what to show now: a sentence, or "".

        Args:
            seen: a value that changes whenever the cell makes progress.
            suspect: whether there is a sign that ranks wait for others; otherwise no rank is queried.
        """
        if seen != self._seen:
            self._seen, self._since, self._due = seen, now, now + STILL - AHEAD
            self.text = self._before = ""
            self._found = []  # an analysis in flight concerns the state before
            self._looking = False
        elif self._found:
            self._take(self._found.pop(), now)
        elif not self._looking and suspect and now >= self._due:
            self._begin(self._found)
        return self.text if now - self._since >= STILL else ""

    def _take(self, found: Verdict | None, now: float) -> None:
        self._looking = False
        said = found.sentence if found is not None and is_worth_telling(found) else ""
        if said == self._before:
            self.text = said
            self._due = now + AGAIN
        else:
            self._before = said
            self._due = now + AHEAD / 2

    def _begin(self, found: list[Verdict | None]) -> None:
        self._looking = True

        def run() -> None:
            try:
                found.append(self._look())
            except Exception:  # the mesh was stopped meanwhile; the cell itself reports that
                found.append(None)

        threading.Thread(target=run, name="hang-verdict", daemon=True).start()


def is_worth_telling(found: Verdict) -> bool:
    """Return whether ranks wait for others. Ranks that a debugger has stopped are shown elsewhere."""
    from monarch_kernel.debugger.controller.hang.verdict import NOTHING, PAUSED

    return found.kind not in (NOTHING, PAUSED)
