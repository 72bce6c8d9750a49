"""When a verdict is asked for and shown below a cell. No clock, no mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from monarch_kernel.debugger.controller.hang.verdict import NOTHING, PAUSED, STANDING, Verdict
from monarch_kernel.kernel.call_progress import HangMonitor
from tests.conftest import wait_until


class Looks:
    """Verdicts in turn, and how many were asked for."""

    def __init__(self, *verdicts: Verdict | Exception) -> None:
        self.verdicts = list(verdicts)
        self.count = 0

    def __call__(self) -> Verdict:
        self.count += 1
        found = self.verdicts[min(self.count, len(self.verdicts)) - 1]
        if isinstance(found, Exception):
            raise found
        return found


BLAME = Verdict(STANDING, (), "Rank 2 stands.")


def shown(looks: Callable[[], Verdict], seconds: int, moves: tuple[int, ...] = (), suspect: bool = True) -> list[str]:
    """What is shown at each second."""
    watch = HangMonitor(looks, 0.0)
    said: list[str] = []
    seen = 0
    for second in range(1, seconds + 1):
        seen += second in moves
        said.append(watch.tick(seen, suspect, float(second)))
        wait_until(lambda: not any(t.name == "hang-verdict" for t in threading.enumerate()), "it has looked", 5)
    return said


def test_what_was_found_twice_is_shown_after_ten_seconds() -> None:
    looks = Looks(BLAME)
    said = shown(looks, 16)
    assert said[:9] == [""] * 9
    assert said[12:] == ["Rank 2 stands."] * 4
    assert looks.count == 2


def test_no_rank_is_asked_while_the_cell_moves_or_nothing_is_suspected() -> None:
    looks = Looks(BLAME)
    assert not any(shown(looks, 40, moves=(5, 10, 15, 20, 25, 30, 35)))
    assert not any(shown(looks, 40, suspect=False))
    assert looks.count == 0


def test_what_moves_takes_the_verdict_away() -> None:
    said = shown(Looks(BLAME), 22, moves=(18,))
    assert said[15] == "Rank 2 stands."
    assert said[17:] == [""] * 5


@pytest.mark.parametrize("kind", [NOTHING, PAUSED])
def test_no_verdict_is_shown_where_no_rank_waits(kind: str) -> None:
    assert not any(shown(Looks(Verdict(kind, (), "Nothing.")), 30))


def test_a_verdict_that_changes_is_shown_once_it_is_the_same_twice() -> None:
    other = Verdict(STANDING, (), "Rank 3 stands.")
    said = shown(Looks(other, BLAME, BLAME), 16)
    assert "Rank 3 stands." not in said
    assert said[-1] == "Rank 2 stands."


def test_a_look_that_fails_says_nothing() -> None:
    assert not any(shown(Looks(RuntimeError("the mesh was stopped")), 16))
