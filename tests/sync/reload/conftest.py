"""A workspace whose modules are imported in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.runtime.actor.hosts import host_mesh
from tests.sync.reload.sources import Sources
from workspace_sync.reload.loaded import loaded_modules


@pytest.fixture(autouse=True)
def ranks_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test loads torch here. No rank of the others needs it, and each test has an agent that would load it."""
    monkeypatch.setattr(host_mesh, "SHARED", ())


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    """An empty folder that is on ``sys.path``, and whose modules are watched."""
    folder = str(tmp_path)
    sys.path.insert(0, folder)
    loaded_modules.watch([(folder, folder)])
    made = Sources(tmp_path)
    yield made
    loaded_modules.close()
    sys.path.remove(folder)
    made.drop()


@pytest.fixture
def procs(sources: Sources) -> ProcMesh:
    """Two ranks of this host that import from the same folder."""
    return this_host().spawn_procs({"ranks": 2})
