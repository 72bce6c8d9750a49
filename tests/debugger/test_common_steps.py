"""Ranks that train stop at a new breakpoint in the same step, at whichever moment of their steps it is set."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.controller import common_point
from monarch_kernel.debugger.controller.hub import MeshDebugger
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.rank.common_point import report
from monarch_kernel.engines.join.progress_monitor import issued
from monarch_kernel.errors import SupervisionError
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until
from tests.debugger.gated import FILE, Gates, Trainer, line

pytestmark = pytest.mark.torch


@pytest.fixture
def debugger(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeshDebugger]:
    """The debugger, to which a step is never too long: no time that passes may make ranks stop apart."""
    monkeypatch.setattr(common_point, "STALE", 0.0)
    debugger = get_debugger()
    yield debugger
    if debugger.breakpoints():
        debugger.clear()


class Training:
    """Two ranks with a process group, and what lets them go on."""

    def __init__(self, mesh: Any, folder: Path) -> None:
        self.mesh = mesh
        self.gates = Gates(folder)
        self.trainers = mesh.spawn("trainer", Trainer)
        self.trainers.join.call(str(folder)).get(PATIENCE)

    def issued(self) -> dict[int, int]:
        """How many collectives each rank has issued."""
        return ask(self.mesh, issued, timeout=PATIENCE).values

    def come_to(self, step: int) -> None:
        """Let all come to a step, and wait there before the line."""
        for each in range(step):
            for rank in range(2):
                self.gates.open(rank, each, "before", "after")
        for rank in range(2):
            self.gates.wait(rank, step, "before")

    def stop(self, debugger: MeshDebugger) -> dict[int, int]:
        """Wait until both are stopped; returns in which step."""
        debugger.wait(lambda stops: len(stops) == 2, PATIENCE)
        return {key[1]: int(value.text) for key, value in debugger.select().print("step").items()}

    def go_on(self, debugger: MeshDebugger, *asked: Any) -> None:
        """Let all come to their ends."""
        debugger.clear()
        self.gates.open_all()
        debugger.select().cont()
        for each in asked:
            each.get(PATIENCE)
        self.trainers.leave.call().get(PATIENCE)


def two_with_torch() -> ProcMesh:
    """Two ranks, forked from a process that has loaded torch."""
    return this_host().spawn_procs(per_host={"gpus": 2}, preload=("torch.distributed",))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(two_with_torch(), tmp_path)


def all_before(training: Training, step: int) -> None:
    training.come_to(step)


def one_past(training: Training, step: int) -> None:
    training.come_to(step)
    training.gates.open(0, step, "before")
    training.gates.wait(0, step, "after")


def one_in_the_collective(training: Training, step: int) -> None:
    training.come_to(step)
    before = training.issued()[0]
    training.gates.open(0, step, "before", "after")
    wait_until(lambda: training.issued()[0] > before, "rank 0 is in the collective", PATIENCE)


def all_past(training: Training, step: int) -> None:
    one_past(training, step)
    training.gates.open(1, step, "before")
    training.gates.wait(1, step, "after")


MOMENTS: list[Callable[[Training, int], None]] = [all_before, one_past, one_in_the_collective, all_past]


def test_at_any_moment_of_a_step_all_stop_in_the_same(training: Training, debugger: MeshDebugger) -> None:
    gates, asked = training.gates, training.trainers.train.call(4 * len(MOMENTS))
    for number, moment in enumerate(MOMENTS):
        now = 4 * number
        moment(training, now)
        debugger.break_at(FILE, line("step"), mesh=training.mesh)
        gates.open(1, now, "before")  # the straggler comes to the line first
        # Who is in the collective has issued it, and may have passed the line after it, for all that is known.
        then = now + 2 if moment is one_in_the_collective else now + 1
        for rank in range(2):
            for each in range(now, then + 1):
                gates.open(rank, each, "before", "after")
        assert training.stop(debugger) == {0: then, 1: then}, moment.__name__
        debugger.clear()
        debugger.select().cont()
    training.go_on(debugger, asked)


def test_so_they_do_where_the_controller_calls_each_step(training: Training, debugger: MeshDebugger) -> None:
    gates = training.gates
    for rank in range(2):
        gates.open(rank, 0, "before", "after")
    training.trainers.step.call(0).get(PATIENCE)
    asked = training.trainers.step.call(1)
    one_in_the_collective(training, 1)
    debugger.break_at(FILE, line("called"), mesh=training.mesh)
    gates.open_all()
    asked.get(PATIENCE)
    asked = training.trainers.step.call(2)
    assert training.stop(debugger) == {0: 2, 1: 2}
    training.go_on(debugger, asked)


def test_code_that_only_one_rank_runs_once_stops(tmp_path: Path, debugger: MeshDebugger) -> None:
    mesh = two_with_torch()
    for in_collective in (True, False):
        (tmp_path / str(in_collective)).mkdir()
        training = Training(mesh, tmp_path / str(in_collective))
        asked = training.trainers.save.call()
        training.gates.wait(0, 0, "before")
        if in_collective:
            training.gates.open(1, 0, "before")
            before = training.issued()[0]
            wait_until(lambda: training.issued()[1] > before, "rank 1 is in the collective", PATIENCE)  # noqa: B023
        debugger.break_at(FILE, line("save"), mesh=mesh)
        training.gates.open(0, 0, "before")
        debugger.wait(lambda stops: len(stops) == 1, PATIENCE)
        assert debugger.select().ranks == (0,)
        training.go_on(debugger, asked)


def test_a_loop_without_collectives_stops_where_it_is_and_that_is_told(
    training: Training, debugger: MeshDebugger
) -> None:
    asked = training.trainers.prepare.call()
    training.gates.wait(0, 0, "prepares")
    before = training.issued()[0]
    wait_until(lambda: training.issued()[1] > before, "rank 1 is in the collective", PATIENCE)
    made = debugger.break_at(FILE, line("prepare"), mesh=training.mesh)
    debugger.wait(lambda stops: len(stops) == 1, PATIENCE)
    assert debugger.select().ranks == (0,)
    assert "no rank has issued a collective of the default process group" in made.apart[training.mesh.name]
    training.go_on(debugger, asked)


def stop_process_of(training: Training, rank: int) -> int:
    """Let a rank answer nothing; returns its process."""
    pid: int = training.mesh.status().get(PATIENCE).get(rank).pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_rank_that_does_not_answer_is_named_and_takes_the_decision_when_it_can(
    training: Training, debugger: MeshDebugger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_point, "LIMIT", 2.0)
    asked = training.trainers.train.call(6)
    training.come_to(1)
    silent = stop_process_of(training, 1)
    try:
        made = debugger.break_at(FILE, line("step"), mesh=training.mesh)
        wait_until(lambda: made.apart, "the silent rank is told of", PATIENCE)
        assert "rank 1 did not answer within 2 s" in made.apart[training.mesh.name]
    finally:
        os.kill(silent, signal.SIGCONT)
    key = made.spec.together
    wait_until(lambda: ask(training.mesh, report, key, ranks=[1]).values.get(1), "it has the breakpoint", PATIENCE)
    training.gates.open_all()
    assert training.stop(debugger) == {0: 2, 1: 2}
    training.go_on(debugger, asked)


def test_a_rank_that_dies_before_it_has_answered_is_not_waited_for(
    training: Training, debugger: MeshDebugger, faults: Any
) -> None:
    asked = training.trainers.train.call(6)
    training.come_to(1)
    silent = stop_process_of(training, 1)
    debugger.break_at(FILE, line("step"), mesh=training.mesh)
    training.gates.open(0, 1, "before")
    assert not debugger.stops()  # rank 0 waits at the line
    os.kill(silent, signal.SIGKILL)
    debugger.wait(lambda stops: len(stops) == 1, PATIENCE)
    assert debugger.select().ranks == (0,)
    debugger.clear()
    debugger.select().cont()
    with pytest.raises(SupervisionError):
        asked.get(PATIENCE)
