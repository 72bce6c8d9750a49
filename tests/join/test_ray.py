"""Actors of Ray and workers of Ray Train that were prepared: each is a rank of the job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown
from tests.join.conftest import needs, wait_for_ranks
from tests.join.test_launchers import HERE, running
from tests.kernel.harness import Kernel
from tests.launchers.ray_nodes import Ray, ray_nodes

__all__ = ["ray_nodes"]


def test_actors_of_ray(ray_nodes: Ray, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "ray_actors.py"), str(tmp_path / "ends")]
    with running(tmp_path, "actors", 2, command) as job:
        assert job.engine == "Ray" and job.launch.startswith("Ray job ")
        wait_until(lambda: pids(tmp_path), "the actors answer")
        assert sorted(each.pid for each in job.ranks) == pids(tmp_path)


@pytest.mark.slow  # Train starts eight processes, most of which import all of it
@pytest.mark.torch
def test_workers_of_train(ray_nodes: Ray, notebook: Kernel, tmp_path: Path) -> None:
    for package in ("torch", "pandas", "pyarrow"):
        needs(package)
    program = HERE / "ray_train.py"
    # Its controller can be joined, too, until the workers know that they are ranks.
    with running(tmp_path, "trained", 2, [sys.executable, str(program), str(tmp_path / "ends")]):
        wait_for_ranks("trained")
        assert "2 ranks (ranks=2)" in shown(notebook.ok("%mesh join trained"))
        line = program.read_text().split("\n").index("        optimizer.zero_grad()") + 1
        notebook.ok(f"%mesh break {program}:{line}")
        wait_until(lambda: "0-1" in shown(notebook.ok("%mesh debug list")), "both workers stop there", 90)
        assert "loss = tensor" in shown(notebook.ok("%mesh debug print loss"))
        assert f"ray_train.py:{line + 1}" in shown(notebook.ok("%mesh debug next"))
        notebook.ok("%mesh clear\n%mesh debug continue")
        notebook.ok("%%mesh -o rank\nimport torch.distributed as dist\ndist.get_rank()")
        assert "[0, 1]" in shown(notebook.ok("list(rank.values())"))
        assert "goes on" in shown(notebook.ok("%mesh leave"))


def pids(folder: Path) -> list[int]:
    """What the program says of its actors."""
    found = re.search(r"^pids (\d+) (\d+)$", (folder / "log").read_text(), re.MULTILINE)
    return sorted(map(int, found.groups())) if found else []
