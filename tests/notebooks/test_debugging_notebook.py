"""The debugger's notebook: three bugs, each on one rank, and whether it is the right rank and line that are shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def debugging(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    needs("torch")
    done = run(ROOT / "notebooks" / "05_debugging.ipynb")
    assert done.status == 0, done.printed
    return done


def line_of(debugging: Run, text: str) -> int:
    """The line of the trainer's cell that has this text."""
    source = next(cell.source for cell in debugging.notebook.cells if cell.id == "trainer")
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


def test_the_rank_with_the_wrong_weights_is_named(debugging: Run) -> None:
    shown = debugging.text("diff")
    assert "2 distinct values on 4 ranks" in shown
    assert "1 of 4 arrays differs, compared with [0-1,3]" in shown
    assert any(row.startswith("2.bias") and "[2]" in row for row in shown.splitlines())


def test_all_ranks_stop_where_they_first_differ(debugging: Run) -> None:
    where = debugging.text("where")
    assert where.startswith("0-3")
    assert f"In[2]:{line_of(debugging, 'self.optimizer.step()')} in Trainer.train" in where
    common, odd = debugging.text("print").splitlines()
    assert common.startswith("0-1,3")
    assert odd.startswith("2 ")
    assert "(3, [" in common and "(3, [" in odd
    assert "Ranks 0-3 continue" in debugging.text("go")


def test_the_deadlock_names_the_rank_that_never_came(debugging: Run) -> None:
    line = line_of(debugging, "dist.all_reduce(loss)")
    assert "[0,2-3] trainers.validate()" in debugging.text("stacks")
    verdict = debugging.text("hang").splitlines()[0]
    assert "Ranks 0, 2-3 wait in all_reduce" in verdict
    assert f"In[2]:{line}" in verdict
    assert "rank 1 never entered it" in verdict


def test_the_frames_of_the_crash_are_there(debugging: Run) -> None:
    shown = debugging.text("pm")
    assert shown.partition(" ago:\n")[2].startswith("2 ")
    assert f"In[2]:{line_of(debugging, 'total += float(value)')} in Trainer.load" in shown
    assert "could not convert string to float: 'oops'" in shown
    assert "(1, '11,oops')" in debugging.text("pm-print")
