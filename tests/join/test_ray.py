"""Actors of Ray whose workers were prepared: each is a rank of the job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.conftest import wait_until
from tests.join.test_launchers import HERE, running
from tests.launchers.ray_nodes import Ray, ray_nodes

__all__ = ["ray_nodes"]


def test_actors_of_ray(ray_nodes: Ray, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "ray_actors.py"), str(tmp_path / "ends")]
    with running(tmp_path, "actors", 2, command) as job:
        assert job.engine == "Ray" and job.launch.startswith("Ray job ")
        wait_until(lambda: pids(tmp_path), "the actors answer")
        assert sorted(each.pid for each in job.ranks) == pids(tmp_path)


def pids(folder: Path) -> list[int]:
    """What the program says of its actors."""
    found = re.search(r"^pids (\d+) (\d+)$", (folder / "log").read_text(), re.MULTILINE)
    return sorted(map(int, found.groups())) if found else []
