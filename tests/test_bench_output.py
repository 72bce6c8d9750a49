"""`python -m bench.output` measures what it says, on a small amount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent


def test_it_measures() -> None:
    command = [sys.executable, "-m", "bench.output", "--ranks", "2", "--lines", "3000", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    measured, best = done.stdout.splitlines()
    assert "processor time" in measured and "rank" in measured and "kernel" in measured
    assert best.startswith("best of 1: ")
