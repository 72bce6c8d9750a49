"""The tools on a joined job that has what a training has: optimizer, scheduler, data loader, random numbers, tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import Job
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "states_train.py"
LINES = SCRIPT.read_text().split("\n")
LINE = LINES.index("    optimizer.zero_grad()") + 1
REDUCES = LINES.index("        dist.all_reduce(each.grad)") + 1


@pytest.fixture(scope="module")
def job(start_module_job: Callable[..., Job], notebook: Kernel) -> Job:
    """A job that trains, and that the notebook has joined."""
    job = start_module_job("tools", script=SCRIPT)
    notebook.ok("%mesh join tools")
    wait_until(lambda: notebook.run("%%mesh\nassert losses").status == "ok", "it trains", 30)
    return job


def test_stacks_have_tasks_native_frames_and_all_threads(job: Job, notebook: Kernel) -> None:
    text = shown(notebook.ok("%mesh stacks"))
    assert re.search(r"\[0-1\] thread feeder\n(.*\n)+?.*in Feeder.wait_for_input +await self.ready.wait\(\)", text)
    assert "thread monarch-join" not in text
    assert "[0-1] thread monarch-join" in shown(notebook.ok("%mesh stacks --all-threads"))
    until(notebook, "%mesh stacks --native", r"» native: .*libc")


@pytest.mark.parametrize(
    "expression, differs",
    [
        ("optimizer", r"\.param_groups\[0\]\['weight_decay'\] +float +\[1\] +0\.1 +0\.01"),
        ("scheduler", r"\.step_size +int +\[1\] +1001 +1000"),
        ("loader", r"\.batch_size +int +\[1\] +2 +4(.*\n)+?\.sampler\.generator\.get_state\(\) +uint8"),
        ("torch.get_rng_state()", r"torch\.get_rng_state\(\) +uint8 \[5056\] +\[1\]"),
        ("random.getstate()", r"\[1\] +tuple of 625 int"),
    ],
    ids=lambda each: each if each.isidentifier() else "",
)
def test_diff_names_the_part_of_a_state_that_differs(job: Job, notebook: Kernel, expression: str, differs: str) -> None:
    assert re.search(differs, text := shown(notebook.ok(f"%mesh diff {expression}"))), text


def test_values_go_there_and_back_and_are_plotted(job: Job, notebook: Kernel) -> None:
    notebook.ok("rate = 0.125\n%mesh push rate")
    notebook.ok("%%mesh --at-step\nscheduler.step_size = 7 if rate == 0.125 else 0")
    notebook.ok("%mesh pull losses --as seen")
    assert "True" in notebook.ok("all(len(each) > 0 for each in seen.values())").text
    notebook.ok("from monarch_kernel import get_mesh\nplot = get_mesh('tools').plot('len(losses)')")
    until(notebook, "plot.data()", r"\d+\D+\d{2,}")
    notebook.ok("plot.stop()")


def test_ranks_that_disagree_stop_together_and_step_in_lockstep(job: Job, notebook: Kernel) -> None:
    notebook.ok(f"%mesh break {SCRIPT}:{LINE} --when-differs len(batch)")
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    assert "--at-step waits for the program, and ranks 0-1 are stopped" in notebook.run("%%mesh --at-step\n1").evalue
    printed = shown(notebook.ok("%mesh debug print len(batch)"))
    assert "0  len(batch) = 4" in printed and "1  len(batch) = 2" in printed
    assert f"0-1  states_train.py:{LINE + 1}" in shown(notebook.ok("%mesh debug next"))
    assert "len(losses)" in shown(notebook.ok("%mesh debug out"))
    notebook.ok("%mesh clear all\n%mesh debug continue")


def test_ranks_that_cannot_stop_or_step_together_are_told_with_the_reason(job: Job, notebook: Kernel) -> None:
    said = shown(notebook.ok(f"%mesh break -r 0 {SCRIPT}:{LINE}"))
    assert (
        "tools: rank 1 does not stop there, and waits for the stopped ones in the next collective, for up to 30" in said
    )
    until(notebook, "%mesh debug list", r"\b0\b.*breakpoint")
    until(notebook, "%mesh debug groups", r"1 of tools wait in all_reduce for stopped ranks, and give up in 29:")
    notebook.ok("%mesh clear all\n%mesh debug continue")
    said = shown(notebook.ok(f"%mesh break --first {SCRIPT}:{LINE}"))
    assert "tools: the other ranks wait for it in their next collective" in said
    until(notebook, "%mesh debug list", r"breakpoint")
    notebook.ok("%mesh clear all\n%mesh debug continue")

    # All stop, and one of them alone is to step over a collective.
    assert "wait" not in shown(notebook.ok(f"%mesh break {SCRIPT}:{REDUCES}"))
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    notebook.ok("%mesh clear all")
    said = shown(notebook.ok("%mesh debug -r 0 next"))
    assert "Rank 0 continues.\n0 of tools wait in all_reduce for stopped ranks, and give up in 29:" in said
    notebook.ok("%mesh debug continue")
    # The step of rank 0 ends once rank 1 has come to the collective, which may be after a list of the stopped ranks.
    before = steps_of(notebook)

    def train() -> bool:
        notebook.run("%mesh debug continue")
        return min(steps_of(notebook)) > max(before) + 2

    wait_until(train, "both train again")
    assert job.process.poll() is None


def steps_of(notebook: Kernel) -> list[int]:
    """How many steps each rank has trained."""
    notebook.ok("%%mesh -o steps\nlen(losses)")
    return [int(each) for each in re.findall(r"\d+", shown(notebook.ok("list(steps.values())")).partition("[")[2])]


def test_what_a_dead_notebook_holds_passes_to_the_one_that_takes_control(
    job: Job, notebook: Kernel, start_kernel: Callable[..., Kernel]
) -> None:
    holder = start_kernel()
    assert "joined in" in shown(holder.ok("%mesh join tools --drive --hold 300"))
    assert "has control of job tools, and this notebook looks on" in notebook.run("%%mesh\n1").evalue
    assert "2 distinct values" in shown(notebook.ok("%mesh diff len(loader)"))
    holder.ok(f"%mesh break {SCRIPT}:{LINE}")
    until(holder, "%mesh debug list", r"\b0-1\b.*breakpoint")
    assert "has control: its stops are its own" in shown(notebook.ok("%mesh debug"))
    holder.manager.shutdown_kernel(now=True)
    until(notebook, "%mesh join tools --drive", "has control of it now")
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    assert "1  len(batch) = 2" in shown(notebook.ok("%mesh debug print len(batch)"))
    notebook.ok("%mesh debug continue")
    assert job.process.poll() is None
