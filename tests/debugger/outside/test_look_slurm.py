"""The ranks of a real Slurm job on two nodes, each read by a step of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.debugger.outside.outside_report import LookRequest, look
from monarch_kernel.debugger.outside.processes import OutsideError
from tests.conftest import wait_until
from tests.launchers.slurm import Slurm, slurm
from tests.waiting import patience

__all__ = ["slurm"]

PROGRAM = """\
import os, sys, time

def load():
    time.sleep(1000)

def compute():
    time.sleep(1000)

load() if os.environ["SLURM_PROCID"] == "1" else compute()
"""
LOAD, COMPUTE = 4, 7


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> Iterator[str]:
    """The number of a job with a rank on each of two nodes."""
    (tmp_path / "train.py").write_text(PROGRAM)
    line = ["srun", "--nodes=2", "--ntasks=2", "--job-name=looked-at", sys.executable, str(tmp_path / "train.py")]
    step = subprocess.Popen(line, stdin=subprocess.DEVNULL)

    def number() -> str:
        return slurm.say("squeue", "-h", "-s", "-o", "%A", "-n", "looked-at")

    try:
        wait_until(lambda: number() or slurm.say("squeue", "-h", "-t", "R", "-n", "looked-at", "-o", "%i"), "it runs")
        yield slurm.say("squeue", "-h", "-n", "looked-at", "-o", "%i")
    finally:
        slurm.say("scancel", "--name=looked-at")
        step.wait(patience(30))
        slurm.wait_until_idle()


def test_ranks_on_two_nodes(job: str) -> None:
    found = look(LookRequest(slurm=job, apart=0.2))

    def seen() -> bool:
        nonlocal found
        if len(found.processes) == 2 and all(each.place is not None for each in found.evidence.values()):
            return True
        found = look(LookRequest(slurm=job, apart=0.2))
        return False

    wait_until(seen, "both ranks run their program")
    assert [(each.host, each.place.rank, each.place.step) for each in found.processes.values()] == [
        ("n1", 0, "0"),
        ("n2", 1, "0"),
    ]
    places = [found.evidence[rank].place for rank in range(2)]
    assert [place.line for place in places if place is not None] == [COMPUTE, LOAD]
    assert found.world == 2 and "2 ranks of Slurm job" in found.text()
    again = look(LookRequest(slurm=f"{job}.0", apart=0.0))
    assert len(again.processes) == 2
    with pytest.raises(OutsideError, match=r"nothing was read of Slurm job \d+\.7\. No process of it is a rank"):
        look(LookRequest(slurm=f"{job}.7", apart=0.0))


def test_a_job_that_is_not_there(slurm: Slurm) -> None:
    with pytest.raises(OutsideError, match=r"^you have no Slurm job 999999 that runs; squeue --me lists"):
        look(LookRequest(slurm="999999"))
    with pytest.raises(OutsideError, match=r"^--slurm takes the number of a job, such as 4711"):
        look(LookRequest(slurm="n1"))
