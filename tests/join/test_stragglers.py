"""Collectives over time in a job that others have started: by its own records once joined, and from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.engines.test_tools import until
from tests.join.conftest import Job
from tests.kernel.harness import Kernel

SCRIPT = Path(__file__).parent / "late_train.py"
LINE = SCRIPT.read_text().split("\n").index("    dist.all_reduce(ends, dist.ReduceOp.MAX)") + 1


def test_the_late_rank_of_a_joined_job_is_named(start_torchrun: Callable[..., Job], notebook: Kernel) -> None:
    job = start_torchrun("late", ranks=2, script=SCRIPT)
    notebook.ok("%mesh join late")
    found = until(notebook, "%mesh stragglers --last 10", r"(?s)Rank 1 keeps the others waiting.*1 \(10\)")
    assert f"mostly to all_reduce at late_train.py:{LINE}." in found
    # Nothing hangs, although rank 0 waits at one line whenever it is looked at.
    until(
        notebook, f"%mesh look --torchrun {job.process.pid} --apart 0.3", "The job seems to make progress, as rank 0 "
    )
    notebook.ok("%mesh leave")
    job.end()
