"""Ranks agree on a point of their program, as a function of what each has issued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_kernel.debugger.controller.common_point import agree
from monarch_kernel.debugger.rank import common_point
from tests.conftest import wait_until
from tests.waiting import patience


@pytest.fixture(autouse=True)
def no_points() -> Iterator[None]:
    """Nothing was proposed before, and nothing is left."""
    common_point.forget(set())
    yield
    common_point.forget(set())


def never() -> None:
    raise AssertionError("they do agree")


class Ranks:
    """Ranks that have issued so many collectives; those of ``hurry`` issue as many more before each question."""

    def __init__(self, issued: list[int | None], hurry: dict[int, int] | None = None, runs: bool = True) -> None:
        self.issued = issued
        self.hurry = hurry or {}
        self.runs = runs
        self.points: list[dict[str, tuple[int | None, bool]]] = [{} for _ in issued]

    def ask(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for rank, issued in enumerate(self.issued):
            now = None if issued is None else issued + self.hurry.get(rank, 0)
            self.issued[rank] = now
            if function is common_point.progress:
                answers[rank] = (now, self.runs)
            elif function is common_point.propose:
                key, at = args
                answers[rank] = now is None or at is None or now < at
                if answers[rank]:
                    self.points[rank][key] = (at, False)
            elif args[1]:
                self.points[rank][args[0]] = (self.points[rank].get(args[0], (None, False))[0], True)
            else:
                self.points[rank].pop(args[0], None)
        return answers


def test_all_agree_on_a_number_that_none_has_reached() -> None:
    ranks = Ranks([7, 9, 8])
    assert agree(ranks.ask, "k", never) == 10
    assert [point["k"] for point in ranks.points] == [(10, True)] * 3


def test_a_rank_that_was_faster_than_the_proposal_gets_a_later_one() -> None:
    ranks = Ranks([7, 9, 8], {1: 3})
    at = agree(ranks.ask, "k", never)
    assert at is not None and {point["k"] for point in ranks.points} == {(at, True)}


def test_ranks_without_a_group_or_without_a_running_program_begin_at_once() -> None:
    for ranks in (Ranks([None, None]), Ranks([5, 5], runs=False), Ranks([5])):
        assert agree(ranks.ask, "k", never) is None
        assert all(point["k"] == (None, True) for point in ranks.points)


def test_ranks_that_are_always_faster_begin_at_once_and_that_is_told() -> None:
    ranks, told = Ranks([7, 9, 8], {1: 10_000}), list[str]()
    assert agree(ranks.ask, "k", lambda: told.append("alone")) is None
    assert told == ["alone"] and all(point["k"][1] for point in ranks.points)


def test_a_rank_that_gets_there_before_the_decision_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 4)
    assert not common_point.propose("k", 4)  # it is there already
    assert common_point.propose("k", 5) and not common_point.is_reached("k")
    monkeypatch.setattr(common_point, "issued", lambda: 5)
    reached: list[bool] = []
    waiting = threading.Thread(target=lambda: reached.append(common_point.is_reached("k")))
    waiting.start()
    assert not reached
    common_point.decide("k", True)
    waiting.join(patience(10))
    assert reached == [True] and common_point.is_reached("k")


def test_a_decision_that_never_comes_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "PATIENCE", 0.05)
    assert common_point.propose("k", None)
    assert not common_point.is_reached("k")


def test_a_loop_without_collectives_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 4)
    monkeypatch.setattr(common_point, "STALE", 0.1)
    assert common_point.propose("k", 6)
    common_point.decide("k", True)
    wait_until(lambda: common_point.is_reached("k"), "the breakpoint counts", 10)
