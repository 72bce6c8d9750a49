"""The checks of ``python -m tests.gpu``: here those run that have a form for the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import patience

pytestmark = pytest.mark.torch


def run(*options: str) -> tuple[int, str]:
    """Run the program; its exit code and output."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu", *options],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=patience(170),
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_all_checks_pass_or_say_why_they_are_skipped() -> None:
    pytest.importorskip("torch")
    code, said = run("--seconds", f"{patience(160):.0f}")
    assert code == 0, said
    assert re.search(r"^ok +activate ", said, re.MULTILINE), said
    assert re.search(r"^(ok|skipped) +rdma_buffers ", said, re.MULTILINE), said
    assert re.search(r"^\d+ passed, 0 failed, \d+ skipped$", said, re.MULTILINE), said


def test_a_check_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    code, said = run("--only", "nothing")
    assert code == 2 and "there is no check nothing; there are rdma_buffers, " in said
    # No time for it: it does not count as passed.
    code, said = run("--only", "activate", "--seconds", "0.5")
    assert code == 0 and re.search(r"^skipped activate .*no time is left$", said, re.MULTILINE), said
    code, said = run("--only", "activate", "--seconds", "1.5")
    assert code == 1 and re.search(r"^FAILED +activate .*did not end within ", said, re.MULTILINE), said
    assert said.endswith("0 passed, 1 failed, 0 skipped\n")
