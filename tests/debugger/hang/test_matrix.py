"""Programs with one thing wrong, on real ranks: no innocent rank is named, and the line is right."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from tests.debugger.hang import matrix

pytest.importorskip("torch")

#: Two seeds of each kind, with three to five ranks; `python -m tests.debugger.hang.matrix` runs as many as one likes.
SEEDS = [(kind, seed) for at, kind in enumerate(matrix.KINDS) for seed in (1000 + at, 1100 + at)]


@pytest.mark.parametrize("kind, seed", SEEDS)
def test_the_right_rank_and_line_are_named(kind: str, seed: int, runtime: None, faults: queue.Queue[Any]) -> None:
    program = matrix.make(seed, kind, size=3 + seed % 3)
    found = matrix.run(program)
    assert not matrix.wrong(program, found), f"{program.source}\n{found}"
    # gloo may crash ranks that have received too much, or whose peers are gone; there may be too few left to tell.
    assert found.decided or "(SIG" in found.sentence, f"{program.source}\n{found}"


def test_programs_follow_from_their_seeds() -> None:
    assert matrix.make(7) == matrix.make(7)
    assert {matrix.make(seed).kind for seed in range(8)} == set(matrix.KINDS)
