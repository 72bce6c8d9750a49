"""Stacks and verdicts of ranks that run operations: they name the operation, and the line that issued it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_kernel.debug import diff, hang, stacks
from monarch_kernel.tensor import fetch_shard, inspect, remote


@remote(propagate=lambda t, path, ranks: t)
def hold(t: Any, path: str, ranks: int) -> Any:
    import time

    if int(t[0]) < ranks:
        with open(f"{path}-{int(t[0])}", "w"):
            pass
        while not os.path.exists(path):
            time.sleep(0.01)
    return t


@pytest.fixture
def gate(four: Any, tmp_path: Path) -> Iterator[Path]:
    """Ranks that hold are let go when this file exists."""
    path = tmp_path / "gate"
    yield path
    path.touch()
    with four.activate():
        inspect(torch.ones(1))


def arrived(gate: Path, ranks: int) -> None:
    from tests.conftest import wait_until

    wait_until(lambda: len(list(gate.parent.glob("gate-*"))) == ranks, "the ranks that hold")


def test_stacks_name_the_operation_and_its_line(four: Any, gate: Path) -> None:
    with four.activate():
        x = torch.ones(1) * four.rank_tensor("gpus")
        y = hold(x, str(gate), 4)
        fetch_shard(y)  # sends it
    arrived(gate, 4)
    text = repr(stacks(four))
    assert "operation hold, stream main" in text
    assert "y = hold(x, str(gate), 4)" in text and "test_stuck_operations.py" in text
    assert "while not os.path.exists(path)" in text or "time.sleep(0.01)" in text
    gate.touch()
    assert diff(y, "y", timeout=20.0).failed == ()
    assert len(diff(y, "y").groups) == 4


def test_a_verdict_names_the_operation_in_which_ranks_wait(four: Any, gate: Path) -> None:
    with four.activate():
        x = torch.ones(1) * four.rank_tensor("gpus")
        inspect(x.reduce("gpus"))  # the group is formed
        held = hold(x, str(gate), 1)
        total = held.reduce("gpus")
        waits = fetch_shard(total, gpus=1)
    arrived(gate, 1)
    verdict = hang(four)
    said = repr(verdict)
    here = r"at test_stuck_operations.py:\d+"
    assert re.match(rf"Ranks 1-3 wait in all_reduce #\d+ of group \d+ {here}; rank 0 has not entered it", said)
    assert "running the operation hold" in said and "in the operation reduced" in said
    assert "total = held.reduce" in repr(stacks(four))
    gate.touch()
    assert waits.get().item() == 6.0
