"""Ranks of torchrun that are killed and started again, also with another world size, in a notebook's mesh."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import TRAIN, Job
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch


@pytest.fixture
def agent() -> list[str]:
    """The command of an agent with two ranks, of one or two such agents."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meet = f"localhost:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    return [*torchrun, "--rdzv-endpoint", meet, "--rdzv-conf", "last_call_timeout=1"]


@pytest.fixture
def job(agent: list[str], tmp_path: Path) -> Iterator[Job]:
    gate = str(tmp_path / "elastic.ends")
    job = Job("elastic", [*agent, "-m", "monarch_kernel.join", str(TRAIN), gate, "--mesh"], tmp_path, 2)
    try:
        yield job
    finally:
        job.process.terminate()
        job.process.wait(30)


def test_ranks_come_again_and_more_of_them(job: Job, agent: list[str], notebook: Kernel, tmp_path: Path) -> None:
    assert "2 ranks (" in shown(notebook.ok("%mesh join elastic"))
    wait_until(lambda: notebook.run("%%mesh\nlen(losses)").status == "ok", "it trains", 90)
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
    until(notebook, "%mesh stacks", r"\[0-1\].*\n.*train\.py")
    wait_until(lambda: notebook.run("%%mesh -o rank\ndist.get_rank()").status == "ok", "it trains again", 90)
    assert "[0, 1]" in shown(notebook.ok("list(rank.values())"))

    with (tmp_path / "second.log").open("wb") as log:
        gate = str(tmp_path / "elastic.ends")
        command = [*agent, "-m", "monarch_kernel.join", str(TRAIN), gate, "--mesh"]
        environment = {**os.environ, "MONARCH_KERNEL_JOIN": "elastic", "OMP_NUM_THREADS": "1"}
        second = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: re.search(r"=4\b|dp=2", shown(notebook.ok("%mesh ls"))), "the mesh has 4 ranks", 100)
        until(notebook, "%mesh stacks", r"\[0-3\].*\n.*train\.py")
        notebook.ok("%mesh leave")
        assert job.end().count("ends after") == 2
        assert second.wait(60) == 0
    finally:
        second.kill()
        second.wait()
