"""Whenever a sync is killed, ranks see the old tree or the new one, and the next sync repairs what is left."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.store.kills import _CALLS
from tests.waiting import patience


@pytest.mark.skipif(platform.machine() not in _CALLS, reason="the numbers of system calls are not listed here")
def test_a_killed_sync_leaves_the_old_or_the_new_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sync.store.kills", str(tmp_path / "store"), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    if done.stdout.startswith("cannot trace"):
        pytest.skip(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count(": old") > 15 and done.stdout.count(": new") > 15
