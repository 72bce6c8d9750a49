"""The program of docs/fault_tolerance.md on hosts from an engine: as it is there, while one of its hosts is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launchers.conformance import clean, script

__all__ = ["clean"]

ROOT = Path(__file__).parents[2]
LOSE = """
    if step == 5 and not lost:
        lost.append(job.job_id)
        Conformance._lose(None, job, 1)
"""


@pytest.fixture
def program() -> str:
    """The program, with the loss of a host in its loop."""
    page = (ROOT / "docs" / "fault_tolerance.md").read_text()
    (found,) = re.findall(r"```python\n(from monarch_kernel\.actor [^`]*)```", page)
    loop = "while step < 20:\n"
    assert found.count(loop) == 1
    return "from tests.launchers.conformance import Conformance\nlost = []\n" + found.replace(loop, loop + LOSE)


def test_the_program_goes_on_when_a_host_of_its_job_is_lost(program: str) -> None:
    said = script(program, PYTHONPATH=str(ROOT))
    assert "steps: 20" in said and "ranks: 6" in said
