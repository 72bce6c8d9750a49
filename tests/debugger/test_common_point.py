"""The point of a breakpoint: what the controller decides of what ranks report, and what a rank does meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from monarch_kernel.debugger.controller import common_point as controller
from monarch_kernel.debugger.controller.common_point import CommonPoint, is_stale, stops_there
from monarch_kernel.debugger.controller.query import Answers
from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.common_point import Report
from tests.conftest import wait_until
from tests.waiting import patience


@pytest.fixture(autouse=True)
def no_points() -> Iterator[None]:
    """Nothing was decided before, and nothing is left."""
    common_point.forget(set())
    yield
    common_point.forget(set())


# -- the controller ------------------------------------------------------------------------------------


class Ranks:
    """Ranks that have issued so many collectives, as a controller hears of them."""

    def __init__(self, *issued: int | None, runs: bool = True) -> None:
        self.reports: dict[int, Report | None] = {rank: Report(count, runs, False) for rank, count in enumerate(issued)}
        self.late: set[int] = set()
        self.decided: list[int | None] = []
        self.past: list[int] = []
        self.anew = 0
        self.notes: list[str] = []
        self.asked: list[list[int]] = []
        self.over = False

    def ask(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int]) -> Answers:
        chosen = list(ranks)
        if function is common_point.report:
            self.asked.append(chosen)
            return Answers(
                {rank: self.reports[rank] for rank in chosen if rank in self.reports and rank not in self.late},
                late=tuple(self.late & set(chosen)),
            )
        if function is common_point.decide:
            self.decided.append(args[1])
        elif function is common_point.let_past:
            self.past.append(args[1])
        else:
            self.anew += 1
        return Answers()

    def change(self, rank: int, **changes: Any) -> None:
        report = self.reports[rank]
        assert report is not None
        self.reports[rank] = report._replace(**changes)

    def begin(self) -> CommonPoint:
        point = CommonPoint(self.ask, "k", self.reports, self.notes.append, lambda: self.over)
        point.begin(patience(10))
        return point

    def end(self) -> None:
        """No thread follows them any more."""
        wait_until(lambda: "monarch-debugger-point" not in {each.name for each in threading.enumerate()}, "it ends", 10)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for long."""
    monkeypatch.setattr(controller, "LIMIT", 0.1)
    monkeypatch.setattr(controller, "STALE", 0.1)


def test_the_number_is_one_that_no_rank_has_reached() -> None:
    ranks = Ranks(7, 9, 8)
    ranks.begin()
    assert ranks.decided == [10]
    for rank in ranks.reports:
        ranks.change(rank, issued=10, begun=True)
    ranks.end()
    assert ranks.decided == [10] and not ranks.notes


@pytest.mark.parametrize("ranks", [Ranks(None, None), Ranks(5, 5, runs=False), Ranks(5)], ids=str)
def test_ranks_that_exchange_nothing_begin_at_once(ranks: Ranks) -> None:
    ranks.begin()
    ranks.end()
    assert ranks.decided == [None]


def test_nothing_is_decided_before_each_rank_has_answered() -> None:
    ranks = Ranks(7, 9)
    ranks.late = {1}
    follower = threading.Thread(target=ranks.begin)
    follower.start()
    wait_until(lambda: len(ranks.asked) > 2, "the late rank is asked again", 10)
    assert ranks.decided == []
    ranks.change(1, issued=20)
    ranks.late = set()
    follower.join(patience(10))
    assert ranks.decided == [21]
    ranks.over = True
    ranks.end()


@pytest.mark.usefixtures("brief")
def test_a_rank_that_never_answers_is_named_and_the_others_begin_without_it() -> None:
    ranks = Ranks(7, 9)
    ranks.late = {1}
    ranks.begin()
    assert ranks.decided == [8]
    assert ranks.notes == [
        "rank 1 did not answer within 0.1 s and may stop at another step than the others, which did not wait longer"
    ]
    ranks.change(0, issued=8, begun=True)
    ranks.end()


@pytest.mark.usefixtures("brief")
def test_a_rank_that_falls_silent_or_dies_afterwards_is_asked_no_more() -> None:
    ranks = Ranks(7, 9, 9)
    ranks.begin()
    ranks.late = {1}
    del ranks.reports[2]
    ranks.change(0, issued=10, begun=True)
    ranks.end()
    assert ranks.decided == [10]


def test_a_breakpoint_that_is_cleared_ends_the_questions() -> None:
    ranks = Ranks(7, 9)
    ranks.begin()
    ranks.over = True
    ranks.end()
    assert ranks.decided == [10]


def test_a_new_process_group_gets_a_new_number() -> None:
    ranks = Ranks(7, 9)
    ranks.begin()
    for rank in ranks.reports:
        ranks.change(rank, issued=1)
    wait_until(lambda: ranks.decided[-1] == 2, "it counts the new group's", 10)
    assert ranks.anew
    ranks.over = True
    ranks.end()


@pytest.mark.usefixtures("brief")
def test_a_loop_without_collectives_is_told_and_slow_steps_are_none() -> None:
    ranks = Ranks(7, 7)
    ranks.change(0, times=1)  # it has come to the line once since the last collective
    ranks.begin()
    asked = len(ranks.asked)
    wait_until(lambda: len(ranks.asked) > asked + 10, "more time than a step may take has passed", 10)
    assert ranks.decided == [8]
    ranks.change(0, times=2)
    ranks.end()
    assert ranks.decided == [8, None] and "so each stops where it is" in ranks.notes[0]


def test_ranks_that_are_held_at_the_line_are_judged() -> None:
    ranks = Ranks(7, 7)
    ranks.begin()
    ranks.change(0, held=7)
    asked = len(ranks.asked)
    wait_until(lambda: len(ranks.asked) > asked + 3, "the other is waited for", 10)
    assert ranks.decided == [8] and not ranks.past
    ranks.change(1, held=7)
    wait_until(lambda: len(ranks.decided) > 1, "both stop", 10)
    assert ranks.decided[:2] == [8, 7]
    ranks.over = True
    ranks.end()


HELD = Report(7, True, False, held=7)


@pytest.mark.parametrize(
    "other, armed, stops",
    [
        (HELD, 7, True),
        (Report(7, True, False), 7, None),  # it may still come
        (Report(6, True, False), 6, None),
        (Report(8, True, False), 7, False),  # it may have passed the line before it had the breakpoint
        (Report(8, True, False), 8, False),
        (Report(8, True, False), 6, True),  # it did not come there
        (Report(8, False, False), 8, True),  # it runs nothing
        (Report(None, True, False), 0, None),
    ],
)
def test_a_rank_that_is_held_stops_unless_another_may_be_past(other: Report, armed: int, stops: bool | None) -> None:
    assert stops_there({0: HELD, 1: other}, {0: 7, 1: armed}, 7) is stops
    assert stops_there({0: HELD, 1: other}, {0: 7, 1: armed}, 7, patient=False) is (stops is not False)
    assert stops_there({0: HELD._replace(once=True), 1: other}, {0: 7, 1: armed}, 7) is True


def test_only_a_line_that_is_come_to_again_is_in_a_loop_without_collectives() -> None:
    assert not is_stale([Report(7, True, False, times=1), Report(7, True, False)])
    assert is_stale([Report(7, True, False, times=2), Report(7, True, False)])
    assert is_stale([Report(7, False, False)])


# -- a rank ----------------------------------------------------------------------------------------------


def open_point() -> None:
    with common_point.opening(["k"]):
        pass


def comes(key: str = "k") -> tuple[threading.Thread, list[bool]]:
    """A thread that comes to the line once."""
    reached: list[bool] = []
    thread = threading.Thread(target=lambda: reached.append(common_point.is_reached(key)))
    thread.start()
    return thread, reached


def is_held() -> bool:
    report = common_point.report("k")
    return report is not None and report.held is not None


def test_a_rank_waits_at_the_line_until_the_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 4)
    with common_point.opening(["k"]):
        assert common_point.report("k") is None  # its line is not armed yet
    thread, reached = comes()
    monkeypatch.setattr(common_point, "issued", lambda: 5)
    assert not reached
    common_point.decide("k", 5)
    thread.join(patience(10))
    assert reached == [True] and common_point.is_reached("k")


def test_before_that_number_a_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 4)
    open_point()
    common_point.decide("k", 5)
    for times in (1, 2):
        assert not common_point.is_reached("k")
        assert common_point.report("k") == Report(4, True, False, times)


@pytest.mark.parametrize(
    "verdict, stops",
    [
        (lambda: common_point.decide("k", 4), True),
        (lambda: common_point.decide("k", None), True),
        (lambda: common_point.let_past("k", 4), False),
        (lambda: common_point.forget(set()), False),
    ],
)
def test_a_line_that_is_come_to_once_is_held_for_the_controller(
    verdict: Callable[[], None], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 4)
    open_point()
    common_point.decide("k", 5)
    thread, reached = comes()
    wait_until(is_held, "it is held", 10)
    report = common_point.report("k")
    assert report is not None and (report.held, report.once, report.begun) == (4, True, False)
    common_point.let_past("k", 3)  # that is not this one
    assert not reached
    verdict()
    thread.join(patience(10))
    assert reached == [stops]


def test_a_controller_that_is_gone_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "PATIENCE", 0.05)
    open_point()
    assert not common_point.is_reached("k")
    monkeypatch.setattr(common_point, "PATIENCE", 1e6)
    assert not common_point.is_reached("k")  # once is enough
    common_point.decide("k", None)
    assert common_point.is_reached("k")


def test_a_rank_that_comes_later_has_reached_what_was_decided() -> None:
    common_point.agree_now(["k"])
    open_point()
    assert common_point.is_reached("k")
    assert common_point.report("other") is None and not common_point.is_reached("other")


def test_what_is_come_to_again() -> None:
    found: dict[str, bool] = {}

    def here(name: str) -> None:
        frame = sys._getframe(1)
        found[name] = common_point._in_loop(frame.f_code, frame.f_lasti)

    def run() -> None:
        here("before")
        for _ in range(2):
            here("in a loop")
        here("between")
        while True:
            if found:
                here("in a loop that goes on")
            if len(found) > 3:
                break
        with threading.Lock():
            here("after")
        for _ in range(2):
            here("in a loop that ends there")
            return

    run()
    assert [name for name, again in found.items() if again] == ["in a loop", "in a loop that goes on"]
    assert len(found) == 6
