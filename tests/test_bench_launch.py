"""The bench of launches: its bars, and the order of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.launch.__main__ import GROUPS, SCRIPTS, arguments, command, missed, plan
from bench.launch.rows import LaunchRow
from tests.test_project import ROOT


@pytest.mark.parametrize(
    "row, ours, limit, said",
    [
        (LaunchRow("t", "x", most=2), 2.0, None, "<= 2 ok"),
        (LaunchRow("t", "x", most=2), 2.1, None, "<= 2 MISS"),
        (LaunchRow("t", "x", most=2), None, None, "<= 2 ?"),
        (LaunchRow("t", "x", beyond=1.5), 1.9, 0.5, "<= limit + 1.5 ok"),
        (LaunchRow("t", "x", beyond=1.5), 2.1, 0.5, "<= limit + 1.5 MISS"),
        (LaunchRow("t", "x", beyond=1.5), 1.0, None, "<= limit + 1.5 ?"),
        (LaunchRow("t", "x", least=1, as_limit=True), 1.2, 1.3, ">= 1 ok, >= limit MISS"),
        (LaunchRow("t", "x", least=1, as_limit=True), 0.9, 0.4, ">= 1 MISS, >= limit ok"),
        (LaunchRow("t", "x"), 1.0, 1.0, ""),
    ],
)
def test_a_bar_knows_its_direction_and_its_limit(
    row: LaunchRow, ours: float | None, limit: float | None, said: str
) -> None:
    assert row.verdict(ours, limit) == said


def test_a_missed_bar_is_named() -> None:
    medians = {("ours", "ssh8_s"): 3.0, ("limit", "ssh8_s"): 1.0, ("ours", "replace_s"): 1.0}
    assert missed(medians) == ["8 hosts by ssh, until all are attached (s)"]


def test_peers_take_turns_and_clusters_run_within_a_slurm() -> None:
    args = arguments(["--quick"])
    assert "ssh64" not in args.groups and "ssh64" in arguments([]).groups
    assert plan(["slurm", "message"], ["ours", "limit", "ray"]) == [
        ("slurm", "ours"),
        ("slurm", "limit"),
        ("slurm", "ray"),
        ("message", "ours"),
        ("message", "limit"),
    ]
    inside = [sys.executable, "-m", "bench.launch.within"]
    assert command("ray", Path("/env/python"), "slurm")[:4] == [*inside, "/env/python"]
    assert all((ROOT / "bench" / "launch" / f"{SCRIPTS[group]}.py").is_file() for group in GROUPS)
