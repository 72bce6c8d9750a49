"""The notebook on workspace sync: what is edited and installed here reaches live actors and new ranks of a host."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture


@pytest.fixture(scope="module")
def synced(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    done = run(ROOT / "notebooks" / "07_workspace_sync.ipynb")
    assert done.status == 0, done.printed
    return done


def digest(synced: Run, cell: str) -> str:
    """The digest of the tree that the host has after a cell."""
    found = re.search(r"^node1 +([0-9a-f]{8}) +new", synced.text(cell), re.M)
    assert found is not None, synced.text(cell)
    return found[1]


def test_a_module_reaches_ranks_and_then_live_actors(synced: Run) -> None:
    assert "1 file," in synced.text("first") and digest(synced, "first") != digest(synced, "reload")
    assert "'plain step: 0.90'" in synced.text("actor")
    assert "reloaded: model" in synced.text("reload")
    assert "'careful step: 0.89'" in synced.text("live")  # the object with its weight, and the new method


def test_the_environment_is_that_of_the_notebook(synced: Run) -> None:
    assert "('momentum', 'node1')" in synced.text("env-use")  # the prefix is on the host, and not here
    assert "('adam', 'node1')" in synced.text("env-change")


def test_a_broken_module_is_left_alone_and_rolled_back(synced: Run) -> None:
    assert re.search(r"model was not reloaded: .*model\.py:6: SyntaxError", synced.text("broken"))
    assert "'careful step: 0.88'" in synced.text("still")
    assert digest(synced, "rollback") == digest(synced, "reload") != digest(synced, "broken")
    assert "'careful step: 0.99'" in synced.text("back")
