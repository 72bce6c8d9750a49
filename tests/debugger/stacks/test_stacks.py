"""The stacks of real ranks: where they diverge, which are idle, late, stopped or dead, and those read from outside."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.controller.stacks import Stacks, stacks
from monarch_kernel.debugger.controller.stacks.merge import StackBranch
from monarch_kernel.debugger.model.stops import ENDPOINT, NATIVE, TASK, THREAD
from monarch_kernel.debugger.rank.stacks import MOVES, snapshot
from monarch_kernel.introspection import stacks_from_outside
from tests.conftest import wait_until
from tests.debugger.stacks.workers import Loader, Trainer
from tests.waiting import patience, waiters

Procs = Callable[..., ProcMesh]
#: When ranks that should answer count as late (seconds), and ranks that cannot.
ANSWERS, IS_LATE = patience(20), patience(2)


class Team:
    """A mesh of trainers that wait where they are told to, until `gate` is opened."""

    def __init__(self, mesh: ProcMesh, folder: Path) -> None:
        self.mesh = mesh
        self.folder = folder
        self.trainers: Any = mesh.spawn("trainer", Trainer, str(folder))
        self.pids = [pid for _, pid in self.trainers.pid.call().get(patience(30)).items()]
        self._calls: list[Any] = []
        self._gate = open(folder / "gate", "w")  # noqa: SIM115  # closed with all else
        fcntl.flock(self._gate, fcntl.LOCK_EX)

    def at(self, call: Any, ranks: int) -> None:
        """Wait until so many ranks are where that call leads them."""
        self._calls.append(call)
        wait_until(lambda: waiters(self.folder / "gate") >= ranks, "all are there")

    def close(self) -> None:
        """Let all go."""
        self._gate.close()
        for call in self._calls:
            call.get(patience(60))


@pytest.fixture
def team(procs: Procs, tmp_path: Path) -> Iterator[Team]:
    """Four ranks, two hosts."""
    team = Team(procs(hosts=2, gpus=2), tmp_path)
    yield team
    team.close()


def names(found: Stacks, kind: str = ENDPOINT) -> dict[str, list[tuple[list[str], list[int]]]]:
    """Each root's paths of user functions, with their ranks."""
    told: dict[str, list[tuple[list[str], list[int]]]] = {}

    def look(branch: StackBranch, path: list[str], paths: list[tuple[list[str], list[int]]]) -> None:
        for child in branch.children:
            below = [*path, child.frame.place.name] if child.frame.user else path
            if not child.children:
                paths.append((below, child.ranks))
            look(child, below, paths)

    for root in found.tree:
        if root.kind == kind:
            look(root, [], told.setdefault(root.name, []))
    return told


def test_ranks_that_wait_for_messages_are_idle(team: Team) -> None:
    found = stacks(team.mesh, timeout=ANSWERS)
    assert found.idle == (0, 1, 2, 3)
    assert found.text().splitlines()[-1] == "[0-3] idle: waiting for a message"


def test_one_rank_is_elsewhere(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    found = stacks(team.mesh, values=True, timeout=ANSWERS)
    assert names(found) == {
        "trainer.step": [
            (["Trainer.step", "Trainer.load", "Trainer.here"], [2]),
            (["Trainer.step", "Trainer.reduce", "Trainer.here"], [0, 1, 3]),
        ]
    }
    text = found.text()
    assert "[0-3] trainer.step()" in text
    assert "├─ [2]  (hosts=1,gpus=0)" in text
    assert "workers.py" in text and "self.load(batch)" in text
    assert not found.late and not found.dead
    assert json.loads(json.dumps(found.asdict()))["classes"][0]["ranks"] == [2]
    assert "ranks diverge here" in found.html()


def test_only_some_ranks(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    assert stacks(team.mesh, ranks=[1, 2]).ranks == (1, 2)
    part = stacks(team.mesh.slice(hosts=1), timeout=ANSWERS)  # ranks 2 and 3 of the whole
    assert part.ranks == (0, 1)
    path, ranks = names(part)["trainer.step"][0]
    assert path[1] == "Trainer.load" and ranks == [0]
    assert names(stacks(team.trainers.slice(hosts=1, gpus=1), timeout=ANSWERS))["trainer.step"][0][1] == [0]


def test_what_is_wrong_is_said(team: Team) -> None:
    with pytest.raises(ValueError, match=r"there is no rank 4: the mesh has 4 \(0 to 3\)"):
        stacks(team.mesh, ranks=[4])
    with pytest.raises(ValueError, match="timeout is a number of seconds above 0"):
        stacks(team.mesh, timeout=0)
    with pytest.raises(ValueError, match="over is a number of seconds of at least 0"):
        stacks(team.mesh, over=-1)
    with pytest.raises(TypeError, match="a mesh of procs or actors is needed"):
        stacks(object())


def test_threads_of_the_user_s_beside_idle_actors(team: Team) -> None:
    team.at(team.trainers.start_thread.call(), 4)
    found = stacks(team.mesh, timeout=ANSWERS)
    assert names(found, THREAD) == {"here": [(["Trainer.here"], [0, 1, 2, 3])]}
    assert not found.idle


def test_recursions_of_different_depths(team: Team) -> None:
    team.at(team.trainers.recurse.call(10), 4)
    text = stacks(team.mesh, timeout=ANSWERS).text()
    assert "Trainer.down ×10–13" in text


def test_tasks_are_shown_with_what_they_await(procs: Procs) -> None:
    mesh = procs(2)
    loaders: Any = mesh.spawn("loader", Loader)
    call = loaders.go.call()
    # Concurrency of the loop is all there is to wait for: until each rank has got to its awaits.
    found: list[Stacks] = []

    def told() -> bool:
        found.append(stacks(mesh, timeout=ANSWERS))
        there = names(found[-1]).get("loader.go", ())
        return len(there) == 2 and all(ranks == [0, 1] for _, ranks in there) and bool(names(found[-1], TASK))

    wait_until(told, "the tasks wait")
    assert names(found[-1]) == {
        "loader.go": [(["Loader.go", "Loader.one"], [0, 1]), (["Loader.go", "Loader.two"], [0, 1])]
    }
    assert names(found[-1], TASK) == {"prefetch": [(["Loader.prefetch", "Loader.batches"], [0, 1])]}
    assert "[0-1] 1 of 2 at once" in found[-1].text() and "[0-1] task prefetch" in found[-1].text()
    assert len(found[-1].classes) == 1
    loaders.release.call().get(patience(20))
    call.get(patience(20))


def test_a_stopped_rank_is_read_from_outside(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    os.kill(team.pids[2], signal.SIGSTOP)
    try:
        found = stacks(team.mesh, timeout=IS_LATE)
        assert list(found.late) == [2]
        assert found.late[2].startswith(
            f"did not answer within {IS_LATE:g} s: it is stopped (SIGSTOP); read from outside, on "
        )
        # Its stack joins those of the others as if it had told it itself.
        assert names(found)["trainer.step"][0] == (["Trainer.step", "Trainer.load", "Trainer.here"], [2])
        assert names(found)["trainer.step"][1][1] == [0, 1, 3]
        wait_until(team.mesh.unresponsive, "its host agent has noticed")
        again = stacks(team.mesh, timeout=30.0)  # asks it no more, hence does not wait for it
        assert list(again.late) == [2] and again.seconds < 20
    finally:
        os.kill(team.pids[2], signal.SIGCONT)
    wait_until(lambda: not team.mesh.unresponsive(), "its host agent has noticed")
    assert not stacks(team.mesh, timeout=ANSWERS).late


def test_a_rank_whose_interpreter_is_held(team: Team) -> None:
    team.at(team.trainers.slice(hosts=1, gpus=1).hold.call(), 1)
    found = stacks(team.mesh, timeout=IS_LATE)
    assert found.late[3].startswith(f"did not answer within {IS_LATE:g} s: its interpreter lock is held by native code")
    assert found.idle == (0, 1, 2)
    assert "■ holds the interpreter lock" in found.text()
    assert names(found) == {"Trainer.hold": [(["Trainer.hold"], [3])]}


def test_dead_ranks_have_their_cause(team: Team, faults: Any) -> None:
    os.kill(team.pids[1], signal.SIGKILL)
    wait_until(team.mesh.dead, "it is known")
    found = stacks(team.mesh, timeout=ANSWERS)
    assert list(found.dead) == [1] and "SIGKILL" in found.dead[1]
    assert found.idle == (0, 2, 3)
    assert found.text().splitlines()[1].startswith("[1] dead: ")


def test_over_time(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    found = stacks(team.mesh, over=0.2, timeout=ANSWERS)
    assert "■ has not moved for 0.2 s" in found.text() and MOVES not in found.text()
    assert found.seconds >= 0.2


def test_a_stop_of_the_debugger(team: Team) -> None:
    call = team.trainers.stop_here.call()
    debugger = get_debugger()
    debugger.wait(lambda stops: len(stops) == 4, timeout=patience(30))
    found = stacks(team.mesh, timeout=ANSWERS)
    debugger.resume(debugger.stops())
    call.get(patience(30))
    assert names(found) == {"trainer.stop_here": [(["Trainer.stop_here"], [0, 1, 2, 3])]}
    assert found.text().splitlines()[-1] == "  ■ stopped: breakpoint()"


def test_native_frames(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    found = stacks(team.mesh, native=True, timeout=ANSWERS)
    frames = [frame for each in found.snapshots.values() for stack in each.stacks for frame in stack.frames]
    assert [frame for frame in frames if frame.place.kind == NATIVE]
    assert set(names(found)) == {"trainer.step"}
    assert not found.late
    assert all(not found.snapshots[rank].outside for rank in range(4))


def test_native_frames_of_a_stopped_rank_are_left_out(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    os.kill(team.pids[0], signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(team.pids[0]).status() == psutil.STATUS_STOPPED, "it is stopped")
        reads = stacks_from_outside(team.mesh, [0, 1], native=True, timeout=20)
    finally:
        os.kill(team.pids[0], signal.SIGCONT)
    assert "SIGSTOP" in reads[0].why and "Trainer.reduce" in reads[0].dump and "libc" not in reads[0].dump
    assert reads[1].why == "" and "libc" in reads[1].dump


def test_all_threads(team: Team) -> None:
    found = stacks(team.mesh, all_threads=True, timeout=ANSWERS)
    assert any("monarch" in root.name for root in found.tree)
    assert not found.idle
    assert all(snapshot.hidden == 0 for snapshot in found.snapshots.values())


def test_several_at_once(team: Team) -> None:
    team.at(team.trainers.step.call(2), 4)
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(stacks(team.mesh, timeout=ANSWERS).text())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert len(texts) == 8
    for text in texts:
        assert text.splitlines() == texts[0].splitlines()


def test_on_other_hosts(workers: Any, tmp_path: Path) -> None:
    """Their own agents read ranks that do not answer."""
    mesh = workers(2, "tcp").attach().spawn_procs(per_host={"gpus": 2})
    team = Team(mesh, tmp_path)
    team.at(team.trainers.step.call(2), 4)
    os.kill(team.pids[2], signal.SIGSTOP)
    try:
        found = stacks(mesh, timeout=3.0)
    finally:
        os.kill(team.pids[2], signal.SIGCONT)
    assert found.late[2].endswith("it is stopped (SIGSTOP); read from outside, on node1")
    assert names(found)["trainer.step"][0] == (["Trainer.step", "Trainer.load", "Trainer.here"], [2])
    assert names(found)["trainer.step"][1][1] == [0, 1, 3]
    native = stacks(mesh, native=True, timeout=patience(60))
    assert all("native" not in why for why in native.late.values()) and "» native: " in native.text()
    team.close()


def test_from_outside_where_it_cannot_be(team: Team, faults: Any) -> None:
    os.kill(team.pids[1], signal.SIGKILL)
    wait_until(team.mesh.dead, "it is known")
    reads = stacks_from_outside(team.mesh, [0, 1])
    assert "SIGKILL" in reads[1].error and not reads[1].dump
    assert reads[0].dump and not reads[0].error
    # So little time that not even py-spy begins.
    hurried = stacks_from_outside(team.mesh, [0], timeout=0.0001)
    assert hurried[0].dump or "py-spy" in hurried[0].error


def test_of_this_process(procs: Procs) -> None:
    """The controller has no agent of its own to ask, and needs none."""
    assert all("test_of_this_process" not in stack.name for stack in snapshot().stacks)
