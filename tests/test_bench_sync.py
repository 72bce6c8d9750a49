"""The bench of syncs: its trees, its bars, and one real measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import report
from bench.sync.rows import ROWS, SyncRow
from bench.sync.trees import BenchTree, TreeSpec
from tests.sync.trees import snapshot
from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent


def test_a_spec_gives_the_same_tree_again_and_a_tree_is_kept(tmp_path: Path) -> None:
    spec = TreeSpec("tree", 300, 3_000_000)
    (tmp_path / "other").mkdir()
    one = BenchTree(spec, tmp_path).make()
    other = BenchTree(spec, tmp_path / "other").make()
    (one.path / "edited.py").unlink()
    (other.path / "edited.py").unlink()
    assert snapshot(one.path) == snapshot(other.path)
    assert sum(len(name) > 0 for name in snapshot(one.path)) > 300
    assert 2_900_000 < one.size <= 3_000_000
    before = (one.path / one.sample()[1]).stat().st_ino
    assert (BenchTree(spec, tmp_path).make().path / one.sample()[1]).stat().st_ino == before


def test_changes_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    tree = BenchTree(TreeSpec("tree", 100, 1_000_000), tmp_path).make()
    before = snapshot(tree.path)
    names = {name.encode() for name in tree.change_small(10)}
    after = snapshot(tree.path)
    assert {path for path in after if after[path] != before[path]} == names and len(names) == 10
    name = tree.change_inside(4096).encode()
    assert {path for path, what in snapshot(tree.path).items() if what != after[path]} == {name}


@pytest.mark.parametrize(
    "row, ours, rsync, said",
    [
        (SyncRow("x", "x", most=0.5, of_rsync=0.5), 0.4, 1.0, "<= 0.5 ok, <= 0.5 x rsync ok"),
        (SyncRow("x", "x", most=0.5, of_rsync=0.5), 0.6, 1.0, "<= 0.5 MISS, <= 0.5 x rsync MISS"),
        (SyncRow("x", "x", of_rsync=0.5), 0.6, None, "<= 0.5 x rsync ?"),
        (SyncRow("x", "x", most=1), None, 1.0, "<= 1 ?"),
        (SyncRow("x", "x"), 1.0, 1.0, ""),
    ],
)
def test_a_bar_of_a_sync_is_met_or_missed(row: SyncRow, ours: float | None, rsync: float | None, said: str) -> None:
    assert row.verdict(ours, rsync) == said


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({row.metric for row in ROWS}) == len(ROWS)


@pytest.mark.slow
def test_a_change_inside_a_large_file_is_measured(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.sync", "--quick", "--peers", "ours,rsync", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--json", str(found), "inside"], cwd=ROOT, capture_output=True, text=True, timeout=patience(150)
    )
    assert done.returncode == 0, done.stderr
    medians = report.medians(json.loads(found.read_text())["results"])
    assert medians["ours", "inside_s"] > 0
    assert 4096 <= medians["ours", "inside_bytes"] < 3 << 20
    assert medians["ours", "inside_chunks"] <= 2
    assert "bytes sent" in done.stdout
