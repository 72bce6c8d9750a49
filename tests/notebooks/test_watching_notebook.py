"""The notebook on watching: what its views say without a kernel, and what is left of a run afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.fixture(scope="module")
def watched(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    done = run(ROOT / "notebooks" / "08_watching.ipynb")
    assert done.status == 0, done.printed
    return done


def test_the_mesh_shows_itself(watched: Run) -> None:
    assert "4 idle" in watched.text("show")
    assert "1 dead" in watched.text("kill") and "killed by SIGKILL" in watched.text("kill")
    assert "1 healed" in watched.text("heal")


def test_the_rank_that_learns_slowly_stands_out(watched: Run) -> None:
    for cell in ("plot", "plot-end"):
        assert re.search(r"loss on 4 ranks of mesh m: .*rank 3 \(.*\) stands out", watched.text(cell)), cell


def test_what_is_left_afterwards(watched: Run) -> None:
    assert "{'running': 4} {'sleepers.nap'}" in watched.text("watch")
    assert len(re.findall(r"^ +[0-3]  running +[1-9]", watched.text("history-ask"), re.M)) == 4
    assert re.search(r"trace.json: [0-9]+ slices of 5 processes", watched.text("trace-off"))
    assert "monarch_ranks" in watched.text("metrics")
