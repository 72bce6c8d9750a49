"""Breakpoints on which ranks decide together, without any ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.debugger.controller.breakpoints import ROUNDS_KEPT, Differs, First


def test_all_stop_where_one_differs() -> None:
    votes = Differs()
    assert votes.vote(0, 1, "a", range(3)) == {}
    assert votes.vote(2, 1, "a", range(3)) == {}
    assert votes.vote(1, 1, "b", range(3)) == {0: True, 1: True, 2: True}


def test_all_go_on_where_they_agree() -> None:
    votes = Differs()
    for rank in range(2):
        assert votes.vote(rank, 1, "a", range(3)) == {}
    assert votes.vote(2, 1, "a", range(3)) == {0: False, 1: False, 2: False}


def test_a_late_rank_is_measured_by_what_was_decided() -> None:
    votes = Differs()
    votes.vote(0, 1, "a", range(3))
    assert votes.decide(1) == {0: False}
    assert votes.vote(1, 1, "a", range(3)) == {1: False}
    assert votes.vote(2, 1, "b", range(3)) == {2: True}
    votes.vote(0, 2, "a", range(3))
    votes.vote(1, 2, "b", range(3))
    assert votes.decide(2) == {0: True, 1: True}
    assert votes.vote(2, 2, "a", range(3)) == {2: True}


def test_rounds_do_not_mix() -> None:
    votes = Differs()
    assert votes.vote(0, 1, "a", range(2)) == {}
    assert votes.vote(0, 2, "b", range(2)) == {}
    assert votes.vote(1, 1, "a", range(2)) == {0: False, 1: False}
    assert votes.vote(1, 2, "b", range(2)) == {0: False, 1: False}
    assert votes.decide(7) == {}


def test_old_rounds_are_forgotten() -> None:
    votes = Differs()
    for hit in range(1, 3 * ROUNDS_KEPT):
        votes.vote(0, hit, "a", range(1))
    assert len(votes._rounds) <= ROUNDS_KEPT + 1


@given(st.permutations(range(5)), st.lists(st.sampled_from("ab"), min_size=5, max_size=5), st.integers(0, 5))
def test_nobody_waits_for_ever_and_all_hear_the_same(order: list[int], values: list[str], enough: int) -> None:
    votes = Differs()
    heard: dict[int, bool] = {}
    for at, rank in enumerate(order):
        if at == enough:
            heard.update(votes.decide(1))
        for who, stops in votes.vote(rank, 1, values[rank], range(5)).items():
            assert who not in heard
            heard[who] = stops
    heard.update(votes.decide(1))
    assert sorted(heard) == list(range(5))
    if enough in (0, 5):
        assert set(heard.values()) == {len(set(values)) > 1}
    else:
        together = {values[rank] for rank in order[:enough]}
        for rank in order[enough:]:
            assert heard[rank] == (len(together) > 1 or values[rank] not in together)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_first_stops_alone_until_it_goes_on(order: tuple[int, ...]) -> None:
    first = First()
    assert [first.vote(rank) for rank in order] == [True, False, False]
    first.released(order[1])
    assert not first.vote(order[2])
    first.released(order[0])
    assert first.vote(order[2])
