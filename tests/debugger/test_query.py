"""Questions to all ranks with one deadline, whatever state they are in."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, endpoint
from monarch_kernel.debugger.controller.query import ask
from tests.actor.actors import PATIENCE, Basic
from tests.conftest import wait_until
from tests.deaths import Mortal


def fail(text: str) -> None:
    raise ValueError(text)


def pids_of(mesh: ProcMesh) -> list[int]:
    """As the ranks themselves say; signals to a process that has not begun would go elsewhere."""
    return [pid for _, pid in sorted(ask(mesh, os.getpid, timeout=PATIENCE).values.items())]


def test_every_rank_answers(procs: Any) -> None:
    mesh: ProcMesh = procs(hosts=1, gpus=3)
    answers = ask(mesh, os.getpid, timeout=PATIENCE)
    mesh.initialized.get(PATIENCE)
    assert answers.values == dict(enumerate(mesh.pids().values()))
    assert not answers.errors
    assert not answers.late
    assert not answers.dead


def test_slices_and_actors_are_asked_by_their_own_ranks(procs: Any) -> None:
    mesh = procs(4)
    pids = pids_of(mesh)
    tail = mesh.slice(gpus=slice(2, 4))
    assert ask(tail, os.getpid, timeout=PATIENCE).values == {0: pids[2], 1: pids[3]}
    actors = tail.spawn("basic", Basic)
    assert ask(actors, os.getpid, ranks=[1], timeout=PATIENCE).values == {1: pids[3]}


def test_what_raises_is_told(procs: Any) -> None:
    answers = ask(procs(2), fail, "on purpose", timeout=PATIENCE)
    assert sorted(answers.errors) == [0, 1]
    assert "on purpose" in str(answers.errors[0])


def test_a_busy_main_thread_does_not_matter(procs: Any) -> None:
    mesh = procs(2)
    actors = mesh.spawn("mortal", Mortal)
    held = actors.sleep.call(PATIENCE)
    assert sorted(ask(mesh, os.getpid, timeout=PATIENCE).values) == [0, 1]
    assert not held.done()
    mesh.kill().get(PATIENCE)


def test_agents_leave_the_main_thread_to_the_program(procs: Any) -> None:
    mesh = procs(1)
    ask(mesh, os.getpid, timeout=PATIENCE)
    assert mesh.spawn("basic", OnMain).on_main.call_one().get(PATIENCE)


class OnMain(Basic):
    @endpoint
    def on_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()


def test_a_stopped_rank_is_late_and_nobody_waits_for_it(procs: Any) -> None:
    mesh = procs(3)
    pids = pids_of(mesh)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        answers = ask(mesh, os.getpid, timeout=0.5)
        assert sorted(answers.values) == [0, 2]
        assert answers.late == (1,)
        assert "late" not in ask(mesh, os.getpid, ranks=[0, 2], timeout=PATIENCE).dead
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert sorted(ask(mesh, os.getpid, timeout=PATIENCE).values) == [0, 1, 2]


def test_a_dead_rank_is_told_with_its_cause(procs: Any, faults: Any) -> None:
    mesh = procs(3)
    os.kill(pids_of(mesh)[2], signal.SIGKILL)
    wait_until(mesh.dead, "the death is known")
    answers = ask(mesh, os.getpid, timeout=PATIENCE)
    assert sorted(answers.values) == [0, 1]
    assert "SIGKILL" in answers.dead[2]
    faults.get(timeout=PATIENCE)


def test_a_rank_that_dies_meanwhile_is_dead_and_not_late(procs: Any, faults: Any) -> None:
    mesh = procs(2)
    answers = ask(mesh, die_if, 1, timeout=PATIENCE)
    assert sorted(answers.values) == [0]
    assert list(answers.dead) == [1]


def die_if(rank: int) -> None:
    from monarch_kernel.debugger.rank.rank_debugger import rank_of

    if rank_of()[1] == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_replaced_rank_has_an_agent_again(procs: Any, faults: Any) -> None:
    mesh = procs(2)
    before = pids_of(mesh)
    os.kill(before[1], signal.SIGKILL)
    wait_until(mesh.dead, "the death is known")
    faults.get(timeout=PATIENCE)
    mesh.heal().get(PATIENCE)
    answers = ask(mesh, os.getpid, timeout=PATIENCE)
    assert answers.values[0] == before[0]
    assert answers.values[1] not in before


def test_wrong_ranks_and_no_meshes_are_refused(procs: Any) -> None:
    with pytest.raises(ValueError, match=r"no rank 7: the mesh has 1 \(0 to 0\)"):
        ask(procs(1), os.getpid, ranks=[7])
    with pytest.raises(TypeError, match="a mesh of procs or actors is needed"):
        ask(3, os.getpid)


def test_many_questions_at_once(procs: Any) -> None:
    mesh = procs(2)
    found: list[dict[int, int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(ask(mesh, os.getpid, timeout=PATIENCE).values)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    slow = ask(mesh, time.sleep, 60, timeout=0.2)
    for thread in threads:
        thread.join(PATIENCE)
    assert slow.late == (0, 1)
    assert len(found) == 8
    assert all(sorted(each) == [0, 1] for each in found)
