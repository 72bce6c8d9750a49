"""A job that torchrun has started is joined, looked into, stopped, stepped, changed and left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.debugger import gated
from tests.engines.test_tools import shown, until
from tests.join.conftest import TRAIN, Job
from tests.kernel.harness import Kernel

LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1


def test_join_look_stop_change_and_leave(start_torchrun: Callable[..., Job], notebook: Kernel) -> None:
    job = start_torchrun("whole", "--differs")
    assert "whole" in shown(notebook.ok("%mesh jobs"))
    assert "2 ranks (ranks=2)" in shown(notebook.ok("%mesh join whole"))
    assert "train.py" in until(notebook, "%mesh stacks", r"\[0-1\].*\n.*train\.py")
    until(notebook, "%mesh diff model", r"weight .*\[1\]")
    wait_until(lambda: notebook.run("%%mesh\nassert losses").status == "ok", "it trains", 30)
    # A cell runs in the job's own `__main__`, without its output.
    out = notebook.ok("%%mesh -o count\nprint('cell on', dist.get_rank())\nlen(losses) > 0")
    assert "cell on 1" in shown(out) and "[True, True]" in shown(notebook.ok("list(count.values())"))
    notebook.ok(f"%mesh break {TRAIN}:{LINE}")
    until(notebook, "%mesh debug list", "0-1")
    assert "loss = tensor" in shown(notebook.ok("%mesh debug print loss"))
    assert f"train.py:{LINE + 1}" in shown(notebook.ok("%mesh debug next"))
    notebook.ok("%mesh clear\n%mesh debug continue")
    notebook.ok("%%mesh\noptimizer.param_groups[0]['lr'] = 0.0\nheld = model.weight.clone()")
    assert "goes on" in shown(notebook.ok("%mesh leave"))
    text = job.end()
    assert text.count("ends after") == 2 and "cell on" not in text


def test_a_viewer_that_is_killed_releases_what_it_had_stopped(
    start_job: Callable[..., Job], start_kernel: Callable[..., Kernel]
) -> None:
    job = start_job("killed")
    viewer = start_kernel()
    viewer.ok("%mesh join killed")
    wait_until(lambda: viewer.run("%%mesh\nlen(losses)").status == "ok", "it trains", 30)
    viewer.ok(f"%mesh break {TRAIN}:{LINE}")
    until(viewer, "%mesh debug list", r"train\.py")
    viewer.manager.shutdown_kernel(now=True)
    assert job.end().count("ends after") == 2  # it is not stopped there again, either


def test_a_rank_that_cannot_answer_is_joined_and_read_from_outside(
    start_job: Callable[..., Job], notebook: Kernel
) -> None:
    job = start_job("silent")
    stopped = job.pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        notebook.ok("%mesh join silent")
        text = until(notebook, "%mesh stacks", r"SIGSTOP")
        assert "[1]" in text and "train.py" in text
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: "SIGSTOP" not in shown(notebook.ok("%mesh stacks")), "it answers", 30)
    notebook.ok("%mesh leave")


def test_an_unknown_job_is_said_with_those_that_are_there(notebook: Kernel) -> None:
    out = notebook.run("%mesh join nothing")
    assert out.ename == "UsageError" and "'nothing'" in out.evalue and "monarch_kernel.join" in out.evalue


def test_ranks_that_are_not_there_keep_nobody_from_the_others(
    start_job: Callable[..., Job], notebook: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    start_job("half", ranks=0, script=TRAIN.with_name("waiting.py"))
    assert "not there: 1" in shown(notebook.ok("%mesh join half"))
    assert re.search(r"0 .*waiting\.py.*\n.*1 .*dead", shown(notebook.ok("%mesh status")))
    notebook.ok("%%mesh -r 0 -o here\nlen(sys.argv)")
    assert "[2]" in shown(notebook.ok("list(here.values())"))
    out = notebook.run("%%mesh\nlen(sys.argv)")
    assert "Failed on rank 1" in out.evalue and "not found when the job was joined" in out.evalue
    assert "heal" not in out.traceback
    notebook.ok("%mesh leave")


def test_ranks_in_long_steps_stop_in_the_same(start_job: Callable[..., Job], notebook: Kernel, tmp_path: Path) -> None:
    (tmp_path / "stepping.ends.gates").mkdir()
    job = start_job("stepping", ranks=3, script=Path(gated.FILE))
    gates = gated.Gates(f"{job.gate}.gates")
    assert "3 ranks (ranks=3)" in shown(notebook.ok("%mesh join stepping"))
    # Rank 0 waits for the others in a collective, rank 1 is past the line, and rank 2 comes there after the breakpoint.
    for rank in range(3):
        gates.open(rank, 0, "before", "after")
    for rank in range(3):
        gates.wait(rank, 1, "before")
    gates.open(0, 1, "before", "after")
    gates.open(1, 1, "before")
    gates.wait(1, 1, "after")

    def in_collective() -> bool:
        notebook.ok("%%mesh -o counts\ndist.group.WORLD._get_sequence_number_for_group()")
        return "[2, 1, 1]" in shown(notebook.ok("list(counts.values())"))

    wait_until(in_collective, "rank 0 is in the collective", 30)
    notebook.ok(f"%mesh break {gated.FILE}:{gated.line('step')}")
    gates.open(2, 1, "before")
    for rank in range(3):
        for step in range(1, 4):
            gates.open(rank, step, "before", "after")
    until(notebook, "%mesh debug list", r"\b0-2\b.*breakpoint")
    assert "0-2  step = 3" in shown(notebook.ok("%mesh debug print step"))
    notebook.ok("%mesh clear all\n%mesh debug continue")
    gates.open_all()
    notebook.ok("%mesh leave")
