"""The controller's side of common points: which moment of the program is a breakpoint's, decided for all its ranks.

What a rank does is told in ``rank.common_point``. Across the boundary go requests to the ranks' debug agents, each
answered by ``rank.common_point.Report`` or nothing; ranks send nothing by themselves:

1. `report` of ranks whose point is open. Each of them has threads wait at the line, so the highest number of
   collectives that any has issued, plus one, is a number that none has passed there. A rank that has not answered is
   waited for, and then left out, which is told; it has never agreed.
2. `decide` tells that number to all ranks, also to those that did not answer: they take it when they can.
3. Until all have issued so many, they are asked again, for what only all reports together tell: a thread that is
   held at a line that it comes to once, ranks in a loop without collectives, a process group that was replaced.

If a rank dies, the others are decided without it. If ranks answer no more, they keep what they were told. If the
controller dies, ranks go on after ``rank.common_point.PATIENCE``. The breakpoint owns its point: the point ends with
it, with its mesh, and with this process.
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

#: How long a rank is waited for that does not answer, or that others wait for (seconds). Less than ranks wait.
LIMIT = 8.0
#: A line that a rank comes to again and again while no rank issues a collective for so long is in a loop without any
#: (seconds).
STALE = 10.0
#: How often ranks are asked: at first, and at last (seconds).
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.5

NO_COLLECTIVES = (
    f"no rank has issued a collective of the default process group for {STALE:g} s, so each stops where it is, maybe "
    "at another step than the others"
)


class CommonPoint:
    """One point of one breakpoint (or cell) on one mesh, from when its ranks begin to open it.

    Args:
        ask: ``ask(function, *args, ranks=...)`` calls a function in ranks; see `query.ask`.
        key: names the point.
        ranks: of the breakpoint (or cell).
        note: is told, in a sentence for people, why ranks may stop apart.
        over: whether nobody needs the point any more.
        on_decided: called when the ranks know their number.
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
        self._ranks = self._all  # who answers
        self._armed: dict[int, int] = {}  # by rank: the collectives that it had issued when it was first asked

    def begin(self, timeout: float) -> None:
        """Begin on a new thread; wait until the ranks know their number, or until a timeout in seconds."""
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
        """Decide on a number; returns whether that is to come."""
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
        """Ask again until all ranks have begun."""
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
        """Let ranks that are held at the line stop there, or go on."""
        count = min((each.held for each in reports.values() if each.held is not None), default=None)
        if count is None:
            return
        stops = stops_there(reports, self._armed, count, patient)
        if stops:
            self._tell(common_point.decide, count)
        elif stops is not None:
            self._tell(common_point.let_past, count)


def is_stale(reports: Iterable[Report]) -> bool:
    """Whether ranks that have issued no collective for long will not, or run nothing."""
    return any(each.times > 1 for each in reports) or not any(each.runs for each in reports)


def stops_there(
    reports: Mapping[int, Report], armed: Mapping[int, int], count: int, patient: bool = True
) -> bool | None:
    """Whether ranks stop that are held at the line with ``count`` collectives issued, which is less than was decided.

    Args:
        reports: of all ranks.
        armed: how many collectives each had issued when its point was open already.
        count: the lowest number with which any is held.
        patient: whether ranks that may still come there are waited for.

    Returns:
        None: that is not known yet.
    """
    if any(each.held == count and each.once for each in reports.values()):
        return True  # it would not come there again, whatever others do
    others = {rank: each for rank, each in reports.items() if each.held != count and each.runs}
    if any((each.issued or 0) > count and armed.get(rank, 0) >= count for rank, each in others.items()):
        return False  # that one may have passed the line before it had the breakpoint, and will come there again
    if patient and any((each.issued or 0) <= count for each in others.values()):
        return None
    return True
