"""Breakpoints, stops and steps over a real mesh, through the debugger of the controller."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.debug import hang, stacks
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.controller.hub import MeshDebugger
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.controller.viewers import DriverError
from monarch_kernel.debugger.events import RankGone, RankResumed, RankStopped
from monarch_kernel.debugger.rank import rank_debugger
from monarch_kernel.errors import ActorError, SupervisionError
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until
from tests.debugger.debuggee import FILE, Waiter, Worker, line, texts


@pytest.fixture
def debugger() -> Iterator[MeshDebugger]:
    debugger = get_debugger()
    yield debugger
    if debugger.breakpoints():
        debugger.clear()


def stopped(debugger: MeshDebugger, count: int) -> Any:
    stops = debugger.wait(lambda stops: len(stops) == count, PATIENCE)
    assert len(stops) == count, stops
    return debugger.select()


def test_all_ranks_stop_at_a_line_and_go_on(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(3)
    workers = mesh.spawn("worker", Worker)
    made = debugger.break_at(FILE, line("loop"), mesh=mesh, condition="i == 2")
    wait_until(lambda: len(made.bound) == 3, "all ranks are armed")
    assert all(bound.verified and bound.line == line("loop") for bound in made.bound.values())
    asked = workers.count.call(5)
    chosen = stopped(debugger, 3)
    (group,) = chosen.groups
    assert group.ranks == (0, 1, 2)
    assert group.place == (FILE, line("loop"), "Worker.count")
    assert texts(chosen.print("(rank, i, total)")) == {0: "(0, 2, 1)", 1: "(1, 2, 1)", 2: "(2, 2, 1)"}
    at = chosen.stops[0]
    assert (at.stop.actor, at.stop.endpoint, at.stop.reason, at.stop.breakpoint) == (
        "worker",
        "count",
        "breakpoint",
        made.id,
    )
    debugger.clear(made.id)
    chosen.cont()
    assert list(asked.get(PATIENCE).values()) == [10, 10, 10]
    wait_until(lambda: debugger.stops() == [], "the ends of the stops, which come apart from the answers, are told")


def test_a_loop_that_runs_already_is_reached(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    asked = mesh.spawn("worker", Worker).spin.call(PATIENCE)
    debugger.break_at(FILE, line("spin"), mesh=mesh, ranks=[1])
    chosen = stopped(debugger, 1)
    assert chosen.ranks == (1,)
    assert texts(chosen.print("end = 0")) == {1: ""}
    debugger.clear()
    chosen.cont()
    debugger.wait(lambda stops: not stops, PATIENCE)  # rank 1 is no longer the one that is stopped
    debugger.pause(mesh, [0])
    chosen = stopped(debugger, 1)
    assert chosen.ranks == (0,)
    assert chosen.stops[0].stop.reason == "pause"
    chosen.print("end = 0")
    chosen.cont()
    assert len(asked.get(PATIENCE)) == 2


def test_a_step_that_parts_the_set_says_so(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(4)
    workers = mesh.spawn("worker", Worker)
    debugger.break_at(FILE, line("fork"), mesh=mesh)
    asked = workers.fork.call([1])
    chosen = stopped(debugger, 4)
    assert not chosen.next(PATIENCE).diverged
    moved = chosen.next(PATIENCE)
    assert moved.diverged
    assert [(group.ranks, group.place[1]) for group in moved.groups] == [
        ((0, 2, 3), line("right")),
        ((1,), line("left")),
    ]
    right, left = chosen.split()
    assert not right.next(PATIENCE).diverged
    assert texts(right.print("way")) == {0: "'right'", 2: "'right'", 3: "'right'"}
    assert texts(left.print("way")) == {1: "''"}
    left.cont()
    right.cont()
    assert list(asked.get(PATIENCE).values()) == ["right", "left", "right", "right"]


def test_up_and_down_look_at_the_caller(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    debugger.break_at(FILE, line("added"), mesh=mesh)
    asked = workers.count.call(1)
    chosen = stopped(debugger, 2)
    assert texts(chosen.print("value")) == {0: "0", 1: "0"}
    assert chosen.up() == 1
    assert chosen.up() == 1
    assert texts(chosen.print("total")) == {0: "0", 1: "0"}
    assert "NameError" in texts(chosen.print("value"))[0]
    assert chosen.down() == 0
    moved = chosen.out(PATIENCE)
    assert moved.groups[0].place[2] == "Worker.count"
    moved = chosen.next(PATIENCE)
    moved = chosen.next(PATIENCE)
    assert moved.groups[0].place[1] == line("after")
    moved = chosen.next(PATIENCE)  # beyond the end of the endpoint there is nothing to stop at
    assert moved.running == ((mesh.name, 0), (mesh.name, 1))
    assert not moved.groups
    assert list(asked.get(PATIENCE).values()) == [0, 0]


def test_stop_where_ranks_differ(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(3)
    workers = mesh.spawn("worker", Worker)
    debugger.break_at(FILE, line("added"), mesh=mesh, differs="value")
    assert list(workers.count.call(4).get(PATIENCE).values()) == [6, 6, 6]
    asked = workers.count.call(4, odd=1)
    chosen = stopped(debugger, 3)
    assert texts(chosen.print("value")) == {0: "2", 1: "-1", 2: "2"}
    debugger.clear()
    chosen.cont()
    assert list(asked.get(PATIENCE).values()) == [6, 3, 6]


def test_only_the_first_stops(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(3)
    workers = mesh.spawn("worker", Worker)
    debugger.break_at(FILE, line("after"), mesh=mesh, first=True)
    answers = list(workers.count.stream(1))
    chosen = stopped(debugger, 1)
    for slot in answers[:2]:
        slot.get(PATIENCE)
    assert len(debugger.stops()) == 1
    chosen.cont()
    answers[2].get(PATIENCE)


def test_breakpoint_in_the_code_needs_no_preparation(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(3)
    workers = mesh.spawn("worker", Worker)
    asked = workers.slice(gpus=slice(1, 3)).stop_here.call()
    chosen = stopped(debugger, 2)
    assert chosen.ranks == (1, 2)
    assert chosen.stops[0].stop.reason == "breakpoint()"
    assert chosen.stops[0].point == {"gpus": 1}
    assert texts(chosen.print("inside")) == {1: "5", 2: "5"}
    chosen.cont()
    assert list(asked.get(PATIENCE).values()) == [6, 6]


def test_stop_where_an_endpoint_fails(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    debugger.break_on_error("ValueError", mesh=mesh, ranks=[1])
    asked = workers.fail.call(4)
    chosen = stopped(debugger, 1)
    assert chosen.stops[0].stop.text == "ValueError: it was 8"
    assert texts(chosen.print("(value, twice)")) == {1: "(4, 8)"}
    chosen.cont()
    with pytest.raises(ActorError, match="it was 8"):
        asked.get(PATIENCE)


def test_frames_of_failures_are_kept(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    with pytest.raises(ActorError):
        workers.fail.call(3).get(PATIENCE)
    opened = debugger.post_mortem(mesh)
    assert [(at.rank, at.stop.reason, at.stop.text) for at in opened] == [
        (0, "post mortem", "ValueError: it was 6"),
        (1, "post mortem", "ValueError: it was 6"),
    ]
    assert {at.key for at in debugger.post_mortem(mesh)} == {at.key for at in opened}
    chosen = debugger.select(mesh)
    assert len(chosen.groups) == 1
    assert texts(chosen.print("twice")) == {0: "6", 1: "6"}
    chosen.cont()
    assert debugger.stops() == []
    assert list(workers.count.call(2).get(PATIENCE).values()) == [1, 1]


def test_breakpoints_for_all_meshes_hold_on_later_ones(procs: Any, debugger: MeshDebugger) -> None:
    made = debugger.break_at(FILE, line("after"))
    mesh = procs(2)
    debugger.joined(mesh)
    wait_until(lambda: len(made.bound) == 2, "both ranks are armed")
    asked = mesh.spawn("worker", Worker).count.call(1)
    chosen = stopped(debugger, 2)
    debugger.clear()
    chosen.cont()
    asked.get(PATIENCE)


def test_a_stopped_rank_that_dies_is_gone(procs: Any, debugger: MeshDebugger, faults: Any) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    heard: list[Any] = []
    end = debugger.subscribe(heard.append)
    asked = workers.stop_here.call()
    chosen = stopped(debugger, 2)
    os.kill(chosen.stops[1].pid, signal.SIGKILL)
    assert len(debugger.wait(lambda stops: len(stops) == 1, PATIENCE)) == 1
    assert any(isinstance(event, RankGone) and event.rank == 1 and "SIGKILL" in event.cause for event in heard)
    assert any(isinstance(event, RankResumed) and event.how == "gone" for event in heard)
    assert "killed by SIGKILL" in texts(chosen.print("inside"))[1]
    with pytest.raises(SupervisionError):
        asked.get(PATIENCE)
    debugger.select().cont()
    wait_until(lambda: not debugger.stops(), "rank 0 goes on")
    end()
    assert any(isinstance(event, RankStopped) for event in heard)


def test_a_replaced_rank_has_the_breakpoints(procs: Any, debugger: MeshDebugger, faults: Any) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    made = debugger.break_at(FILE, line("after"), mesh=mesh, ranks=[1])
    assert (mesh.name, 1) in made.bound
    with pytest.raises(SupervisionError):
        os.kill(mesh.status().get(PATIENCE).get(1).pid, signal.SIGKILL)
        workers.spin.call(PATIENCE).get(PATIENCE)
    wait_until(lambda: (mesh.name, 1) not in made.bound, "a dead process holds no breakpoint")
    mesh.heal().get(PATIENCE)
    wait_until(lambda: (mesh.name, 1) in made.bound, "the new process is armed")
    asked = workers.slice(gpus=1).count.call(1)
    chosen = stopped(debugger, 1)
    chosen.cont()
    asked.get(PATIENCE)


def test_a_silent_rank_blocks_nobody(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    workers = mesh.spawn("worker", Worker)
    asked = workers.stop_here.call()
    chosen = stopped(debugger, 2)
    os.kill(chosen.stops[0].pid, signal.SIGSTOP)
    try:
        found = texts(chosen.print("inside", timeout=0.5))
        assert "no answer" in found[0]
        assert found[1] == "5"
    finally:
        os.kill(chosen.stops[0].pid, signal.SIGCONT)
    chosen.cont()
    wait_until(lambda: not debugger.stops(), "both go on")
    asked.get(PATIENCE)


def test_a_rank_at_a_breakpoint_that_cannot_answer_is_said_to_stand_there(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(2)
    asked = mesh.spawn("worker", Worker).stop_here.call()
    chosen = stopped(debugger, 2)
    rank = psutil.Process(chosen.stops[1].pid)
    frozen = [rank, *(each for each in rank.parents() if os.getpid() in {above.pid for above in each.parents()})]
    for each in frozen:  # its host agent, too, which would read it from outside
        each.suspend()
    try:
        found = stacks(mesh, [1], timeout=0.3).notes
        verdict = hang(mesh, timeout=1.0)
    finally:
        for each in frozen:
            each.resume()
    where = rf"{Path(FILE).name}:\d+ in Worker.stop_here"
    (note,) = found
    assert re.fullmatch(rf"stands at a breakpoint, {where}; it did not answer within 0.3 s", note.text)
    assert re.search(rf"1\s+stopped in the debugger at {where}", str(verdict))
    chosen.cont()
    asked.get(PATIENCE)


def test_endpoints_that_run_side_by_side(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(1)
    waiter = mesh.spawn("waiter", Waiter)
    debugger.break_at(FILE, line("awaited"), mesh=mesh)
    answers = [waiter.wait.call_one(name) for name in ("a", "b")]
    seen: set[str] = set()
    while len(seen) < 2:
        chosen = stopped(debugger, 1)
        (name,) = texts(chosen.print("name")).values()
        seen.add(name)
        key = chosen.stops[0].key
        chosen.cont()
        debugger.wait(lambda stops, key=key: all(at.key != key for at in stops), PATIENCE)
    assert seen == {"'a'", "'b'"}
    assert [answer.get(PATIENCE) for answer in answers] == ["A", "B"]


def test_one_viewer_has_control(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(1)
    asked = mesh.spawn("worker", Worker).stop_here.call()
    stops = stopped(debugger, 1).stops
    one, two = debugger.viewer("cell 3"), debugger.viewer("a terminal")
    one.drive()
    with pytest.raises(DriverError, match="cell 3 controls"):
        debugger.resume(stops, viewer=two)
    assert debugger.stops()
    one.close()
    assert debugger.stops()
    debugger.resume(stops, viewer=two)
    asked.get(PATIENCE)
    two.close()


def test_what_makes_no_sense_is_refused(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(1)
    with pytest.raises(ValueError, match="no line 0"):
        debugger.break_at(FILE, 0)
    with pytest.raises(ValueError, match="is not an expression"):
        debugger.break_at(FILE, 1, condition="x =")
    with pytest.raises(ValueError, match="no rank 4"):
        debugger.break_at(FILE, 1, mesh=mesh, ranks=[4])
    with pytest.raises(ValueError, match="no mesh 'nowhere'"):
        debugger.break_at(FILE, 1, mesh="nowhere")
    with pytest.raises(ValueError, match="no breakpoint 99"):
        debugger.clear(99)
    with pytest.raises(ValueError, match="is not a way to continue"):
        debugger.resume([], "sideways")
    assert debugger.breakpoints() == []


def test_a_request_that_was_overtaken_does_not_arm_older_breakpoints(procs: Any, debugger: MeshDebugger) -> None:
    mesh = procs(1)
    workers = mesh.spawn("worker", Worker)
    debugger.break_at(FILE, line("loop"), mesh=mesh)
    controller = debugger.breakpoint_table._of_process
    assert ask(mesh, rank_debugger.arm, (controller, 0), [], timeout=PATIENCE).values == {0: []}
    asked = workers.count.call(1)
    stopped(debugger, 1)
    debugger.clear()
    debugger.select().cont()
    asked.get(PATIENCE)
