"""A venv at another prefix has the bytes of one that was made there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.environment.trees import assert_equal_trees, installed, moved, stored
from workspace_sync.environment import environment_manifest
from workspace_sync.scanning import Index


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two venvs of one name, at paths of different lengths."""
    root = tmp_path_factory.mktemp("venvs")
    made: list[Path] = []
    for parent in ("a", "b" * 60):
        prefix = root / parent / "env"
        subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
        made.append(prefix)
    return made


@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["longer", "shorter"])
def test_a_moved_venv_is_a_fresh_one(venvs: list[Path], way: tuple[int, int], tmp_path: Path) -> None:
    source, target = (venvs[i] for i in way)
    scanned = environment_manifest(source, Index("e", str(tmp_path / "sync")))
    assert scanned.environment.kind == "venv" and scanned.needs.base == sys.base_prefix
    assert_equal_trees(moved(scanned, target), target)


def test_the_store_of_a_host_makes_it(venvs: list[Path], tmp_path: Path) -> None:
    scanned = environment_manifest(venvs[0], Index("e", str(tmp_path / "sync")))
    made = stored(scanned, tmp_path / "store", str(venvs[1]))
    assert_equal_trees(installed(made), venvs[1])
