"""What ranks that vote at a breakpoint call the same passage."""

from __future__ import annotations

import pytest

from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank import rank_debugger as rank


def test_without_a_group_hits_are_counted() -> None:
    debugger = rank.RankDebugger()
    assert [debugger._passage(1, hit) for hit in (1, 2, 5)] == [1, 2, 5]


def test_ranks_that_were_armed_a_step_apart_meet_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def passages(first_step: int) -> list[int]:
        debugger = rank.RankDebugger()
        found: list[int] = []
        for hit, step in enumerate(range(first_step, 6), 1):
            monkeypatch.setattr(common_point, "issued", lambda step=step: 3 * step)
            found += [debugger._passage(1, hit), debugger._passage(2, hit)]
        return found

    early, late = passages(2), passages(3)
    assert early[2:] == late
    assert len(set(early)) == len(early) // 2


def test_several_passages_between_two_collectives_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_point, "issued", lambda: 7)
    debugger = rank.RankDebugger()
    several = [debugger._passage(1, hit) for hit in range(1, 4)]
    assert sorted(set(several)) == several
    monkeypatch.setattr(common_point, "issued", lambda: 8)
    assert debugger._passage(1, 4) > several[-1]
