"""Ranks of torchrun that are killed and started again, also with another world size, in a notebook's mesh."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import TRAIN, Job
from tests.kernel.harness import Kernel
from tests.ports import free_port
from tests.waiting import patience

pytestmark = pytest.mark.torch


def agent(folder: Path, ranks: int, *options: str) -> list[str]:
    """The command of torchrun for a launch of the same name each time, as of a scheduler that starts a job again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
    torchrun += ["--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    torchrun += ["--rdzv-endpoint", f"localhost:{free_port()}"]
    gate = str(folder / "elastic.ends")
    return [*torchrun, "-m", "monarch_kernel.join", str(TRAIN), gate, *options]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job("elastic", agent(tmp_path, 2, "--mesh"), tmp_path, 2)
    try:
        yield job
    finally:
        job.process.terminate()
        job.process.wait(patience(30))


def test_ranks_come_again_and_another_number_of_them(job: Job, notebook: Kernel, tmp_path: Path) -> None:
    assert "2 ranks (" in shown(notebook.ok("%mesh join elastic"))
    wait_until(lambda: notebook.run("%%mesh\nlen(losses)").status == "ok", "it trains", 60)
    # The program has made its dimensions by now; if it was joined before that, they come when it is joined again.
    notebook.run("%mesh join elastic")
    assert "dp=1, tp=2" in shown(notebook.ok("%mesh ls"))
    first = job.pids()
    status = shown(notebook.ok("%mesh status"))
    assert all(re.search(rf"\b{pid}\b.*MB.*train\.py", status) for pid in first), status
    assert "own program is never interrupted" in shown(notebook.ok("%mesh interrupt"))
    until(notebook, "%mesh stacks", r"\[0-1\] the program\n.*train\.py")

    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: len(job.pids()) == 2 and not set(job.pids()) & set(first), "torchrun has started it again", 60)
    until(notebook, "%mesh status", "(?s)" + ".*".join(map(str, job.pids())))
    wait_until(lambda: notebook.run("%%mesh -o rank\ndist.get_rank()").status == "ok", "it trains again", 90)
    assert "[0, 1]" in shown(notebook.ok("list(rank.values())"))

    job.process.terminate()
    job.process.wait(patience(30))
    again = Job("elastic", agent(tmp_path, 1), tmp_path, 1)
    wait_until(lambda: "ranks=1" in shown(notebook.ok("%mesh ls")), "the mesh has one rank", 60)
    until(notebook, "%mesh stacks", r"the program\n.*train\.py")
    notebook.ok("%mesh leave")
    assert again.end().count("ends after") == 1
