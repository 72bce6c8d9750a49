"""Agree with all ranks of a breakpoint on the moment in the program from which it takes effect (controller's side).

``rank.common_point`` describes the side of the rank. The controller sends requests to the debug agents of the ranks.
Each answers with ``rank.common_point.Report`` or nothing. Ranks send nothing on their own:

1. `report` queries ranks whose point is open. Each of them lets threads wait at the line. The highest number of
   collectives that any rank has issued, plus one, is therefore a number that no rank has passed there. A rank that does
   not answer within `LIMIT` is left out, with a note to the user; it has never agreed.
2. `decide` sends that number to all ranks, including those that did not answer. They receive it when they can.
3. Until all ranks have issued that many collectives, they are queried again. Only their reports together show some
   conditions: a thread is held at a line that it reaches only once, ranks loop without collectives, or a process group
   was replaced.

If a rank dies, the others decide without it. Ranks that stop answering keep the last decision that they received. If
the controller dies, ranks continue after ``rank.common_point.PATIENCE``. The breakpoint owns its point: the point ends
with the breakpoint, with its mesh, or with this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.common_point import Report
from monarch_kernel.meshes import name_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.query import Answers

log = logging.getLogger(__name__)

#: The time limit for a rank that does not answer, or that others wait for (seconds). Ranks wait longer than this.
LIMIT = 8.0
#: A line that a rank reaches repeatedly counts as a loop without collectives if no rank issues any for this long
#: (seconds).
STALE = 10.0
#: The first and the longest pause between queries (seconds).
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.5

NO_COLLECTIVES = (
    f"no rank has issued a collective of the default process group for {STALE:g} s, so each stops where it is, maybe "
    "at another step than the others"
)


class CommonPoint:
    """The common point of one breakpoint (or cell) on one mesh, from the moment when its ranks begin to open it.

    Args:
        ask: ``ask(function, *args, ranks=...)`` calls a function in ranks; see `query.ask`.
        key: identifies the point.
        ranks: the ranks of the breakpoint (or cell).
        note: called with a sentence for the user if ranks may stop at different moments.
        over: returns whether the point is no longer needed.
        on_decided: called when the ranks have received their number.
    """

    def __init__(
        self,
        ask: Callable[..., Answers],
        key: str,
        ranks: Iterable[int],
        note: Callable[[str], object],
        over: Callable[[], bool],
        on_decided: Callable[[], object] = lambda: None,
    ) -> None:
        self._ask = ask
        self._key = key
        self._all = sorted(ranks)
        self._note = note
        self._over = over
        self._on_decided = on_decided
        self._decided = threading.Event()
        self._ranks = self._all  # the ranks that answer
        self._armed: dict[int, int] = {}  # by rank: the collectives that it had issued when it was first asked

    def begin(self, timeout: float) -> None:
        """Begin on a new thread. Wait until the ranks have received their number, or until the timeout (seconds)."""
        threading.Thread(target=self._run, name="monarch-debugger-point", daemon=True).start()
        self._decided.wait(timeout)

    def _run(self) -> None:
        try:
            if self._agree():
                self._follow()
        except Exception:  # the mesh, or this controller's runtime, has ended
            log.debug("point %s ends", self._key, exc_info=True)
        finally:
            self._tell_decided()

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        self._ask(function, self._key, *args, ranks=self._all)

    def _tell_decided(self) -> None:
        if not self._decided.is_set():
            self._on_decided()
            self._decided.set()

    def _agree(self) -> bool:
        """Decide on a number of collectives. Return whether there is one that ranks have yet to reach."""
        until = time.monotonic() + LIMIT
        while True:
            answers = self._ask(common_point.report, self._key, ranks=self._ranks)
            reports: dict[int, Report] = {rank: each for rank, each in answers.values.items() if each is not None}
            missing = sorted({*answers.late, *answers.values} - set(reports))
            if self._over():
                return False
            if not missing or time.monotonic() > until:
                break
            time.sleep(FIRST_PAUSE)
        if missing:
            self._note(
                f"{name_ranks(missing, limit=6)} did not answer within {LIMIT:g} s and may stop at another step than "
                "the others, which did not wait longer"
            )
        self._ranks = sorted(reports)
        self._armed = {rank: each.issued for rank, each in reports.items() if each.issued is not None}
        alone = len(reports) + len(missing) < 2 or not any(each.runs for each in reports.values())
        at = None if alone or not self._armed else max(self._armed.values()) + 1
        self._tell(common_point.decide, at)
        self._tell_decided()
        return at is not None

    def _follow(self) -> None:
        """Repeat the queries until the breakpoint has taken effect on all ranks."""
        pause, since, held_since = FIRST_PAUSE, time.monotonic(), time.monotonic()
        issued: Mapping[int, int | None] = {}
        held: Mapping[int, int | None] = {}
        heard = dict.fromkeys(self._ranks, since)
        while not self._over():
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_PAUSE)
            answers = self._ask(common_point.report, self._key, ranks=sorted(heard))
            reports: dict[int, Report] = {rank: each for rank, each in answers.values.items() if each is not None}
            now = time.monotonic()
            heard.update(dict.fromkeys(reports, now))
            heard = {rank: at for rank, at in heard.items() if rank in reports or rank in answers.late}
            heard = {rank: at for rank, at in heard.items() if now - at < LIMIT}
            if all(each.begun for each in reports.values()) and set(heard) <= set(reports):
                return
            before, issued = issued, {rank: each.issued for rank, each in reports.items()}
            held_before, held = held, {rank: each.held for rank, each in reports.items()}
            if any((count or 0) < self._armed.get(rank, 0) for rank, count in issued.items()):
                self._tell(common_point.begin_anew)  # there is a new process group
                self._ranks = sorted(heard)
                if not self._agree():
                    return
                issued = {}
            since = now if issued != before else since
            held_since = now if held != held_before else held_since
            if now - since > STALE and is_stale(reports.values()):
                if any(each.runs for each in reports.values()):
                    self._note(NO_COLLECTIVES)
                self._tell(common_point.decide, None)
                return
            self._judge(reports, now - held_since < LIMIT)

    def _judge(self, reports: Mapping[int, Report], patient: bool) -> None:
        """Stop ranks that are held at the line, or let them continue."""
        count = min((each.held for each in reports.values() if each.held is not None), default=None)
        if count is None:
            return
        stops = stops_there(reports, self._armed, count, patient)
        if stops:
            self._tell(common_point.decide, count)
        elif stops is not None:
            self._tell(common_point.let_past, count)


def is_stale(reports: Iterable[Report]) -> bool:
    """Return whether ranks that have issued no collective for long loop without collectives, or are all idle."""
    return any(each.times > 1 for each in reports) or not any(each.runs for each in reports)


def stops_there(
    reports: Mapping[int, Report], armed: Mapping[int, int], count: int, patient: bool = True
) -> bool | None:
    """Decide whether ranks stop that are held at the line after ``count`` collectives, fewer than the decided number.

    Args:
        reports: the reports of all ranks.
        armed: by rank, how many collectives it had issued when its point was already open.
        count: the lowest number of collectives after which a rank is held.
        patient: whether to wait for ranks that may still reach the line.

    Returns:
        Whether they stop; None if that is not known yet.
    """
    if any(each.held == count and each.once for each in reports.values()):
        return True  # it would not come there again, whatever others do
    others = {rank: each for rank, each in reports.items() if each.held != count and each.runs}
    if any((each.issued or 0) > count and armed.get(rank, 0) >= count for rank, each in others.items()):
        return False  # that one may have passed the line before it had the breakpoint, and will come there again
    if patient and any((each.issued or 0) <= count for each in others.values()):
        return None
    return True
