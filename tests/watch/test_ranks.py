"""What a watch sees of real ranks that work, stop, die and come back, and what is left when nothing watches."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import monarch_kernel.actor as runtime
from monarch_kernel.actor import Actor, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.debug import get_debugger
from monarch_kernel.protocol.observation import Observe, Observed
from monarch_kernel.runtime.actor.inspection import mesh_observer
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.watch import RankState, RankView, Snapshot, Watch, advanced, watch
from tests.conftest import wait_until
from tests.workers import workers

__all__ = ["workers"]
pytestmark = pytest.mark.own_runtime

#: How long anything may take that is waited for (seconds).
LIMIT = 60.0
PERIOD = 0.05


class Trainer(Actor):
    """Works until a file is there."""

    @endpoint
    def step(self, gate: str) -> int:
        while not os.path.exists(gate):
            time.sleep(0.01)
        return 1

    @endpoint
    def fail(self) -> None:
        raise ValueError("no more data")

    @endpoint
    def stop_here(self) -> None:
        breakpoint()

    @endpoint
    def looks(self) -> int:
        """How many timers of this rank look at its actors."""
        timers = get_system().node.poller._timers
        return sum("RankObserver" in str(timer.callback) for _, _, timer in timers if timer.callback is not None)


class Waiter(Actor):
    """Is made when a file is there."""

    def __init__(self, gate: str) -> None:
        while not os.path.exists(gate):
            time.sleep(0.01)

    @endpoint
    def ping(self) -> None:
        """Nothing."""


class Tool(Actor):
    """What users do not see."""

    __tool__ = True

    @endpoint
    def ping(self) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime, "unhandled_fault_hook", lambda _failure: None)
    yield
    shutdown_context().get()
    assert not [thread for thread in threading.enumerate() if thread.name == "monarch-watch"]


def spawn(ranks: int) -> tuple[ProcMesh, Any]:
    mesh = this_host().spawn_procs({"gpus": ranks}, name="train")
    trainer = mesh.spawn("trainer", Trainer)
    trainer.initialized.get(LIMIT)
    return mesh, trainer


def until(seen: Watch, holds: Callable[[tuple[RankView, ...]], bool]) -> Snapshot:
    """Wait until something holds of the ranks of the newest mesh."""
    snapshot = seen.snapshot()
    for delta in seen.changes(LIMIT):
        snapshot = advanced(snapshot, delta)
        if snapshot.ranks and holds(list(snapshot.ranks.values())[-1]):
            return snapshot
    raise AssertionError(f"it never held: {snapshot}")


def states(*wanted: RankState) -> Callable[[tuple[RankView, ...]], bool]:
    return lambda ranks: tuple(rank.state for rank in ranks) == wanted


def test_what_actors_do_is_seen_without_those_of_tools(tmp_path: Any) -> None:
    mesh, trainer = spawn(2)
    mesh.spawn("tool", Tool).ping.call().get(LIMIT)
    gate = tmp_path / "gate"
    with watch(period=PERIOD) as seen:
        before = time.time()
        calls = [trainer.slice(gpus=1).step.call(str(gate)) for _ in range(3)]
        snapshot = until(seen, lambda ranks: ranks[1].waiting == 2)
        idle, busy = next(iter(snapshot.ranks.values()))
        assert (idle.state, busy.state, busy.doing) == (RankState.IDLE, RankState.RUNNING, "trainer.step")
        assert before - 0.1 < busy.doing_since < time.time()
        (actor,) = busy.actors
        assert (actor.name, actor.cls, actor.endpoint, actor.waiting) == ("trainer", "Trainer", "step", 2)
        gate.touch()
        for call in calls:
            call.get(LIMIT)
        with pytest.raises(runtime.ActorError, match="no more data"):
            trainer.slice(gpus=1).fail.call().get(LIMIT)
        snapshot = until(seen, lambda ranks: ranks[1].state is RankState.IDLE and ranks[1].failures == 1)
        (rank,) = [rank for rank in next(iter(snapshot.ranks.values())) if rank.calls]
        assert (rank.rank, rank.calls, rank.doing, rank.waiting) == (1, 4, "", 0)
        assert rank.sent > 0 and rank.received > 0


def test_a_rank_that_was_running_before_is_seen_with_its_start(tmp_path: Any) -> None:
    _, trainer = spawn(1)
    gate = tmp_path / "gate"
    before = time.time()
    call = trainer.step.call(str(gate))
    wait_until(lambda: time.time() - before > 1.5, "the call has run for a while")
    with watch(period=PERIOD) as seen:
        snapshot = until(seen, states(RankState.RUNNING))
    ((rank,),) = snapshot.ranks.values()
    assert before - 0.1 < rank.doing_since < before + 1
    gate.touch()
    call.get(LIMIT)


def test_a_stopped_process_is_unresponsive_until_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_PING_PERIOD", "0.1")
    mesh, _ = spawn(2)
    with watch(period=PERIOD) as seen:
        os.kill(mesh.pids().get(0), signal.SIGSTOP)
        snapshot = until(seen, states(RankState.UNRESPONSIVE, RankState.IDLE))
        assert "SIGSTOP" in next(iter(snapshot.ranks.values()))[0].cause
        assert [(failure.kind, failure.ranks) for failure in snapshot.failures] == [("unresponsive", (0,))]
        os.kill(mesh.pids().get(0), signal.SIGCONT)
        until(seen, states(RankState.IDLE, RankState.IDLE))


def test_a_rank_is_healing_between_its_death_and_its_successor(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    mesh = this_host().spawn_procs({"gpus": 1}, name="train")
    mesh.spawn("waiter", Waiter, str(gate)).initialized.get(LIMIT)
    gate.unlink()
    with watch(period=PERIOD) as seen:
        first = mesh.pids().get(0)
        os.kill(first, signal.SIGKILL)
        until(seen, states(RankState.DEAD))
        healed = mesh.heal()  # until the gate is there
        snapshot = until(seen, states(RankState.HEALING))
        assert "SIGKILL" in next(iter(snapshot.ranks.values()))[0].cause
        gate.touch()
        healed.get(LIMIT)
        # The successor's actors are there, though they were reported before the mesh had it.
        snapshot = until(seen, lambda ranks: ranks[0].state is RankState.IDLE and bool(ranks[0].actors))
        ((rank,),) = snapshot.ranks.values()
        assert (rank.pid, rank.cause) == (mesh.pids().get(0), "")
        assert rank.pid != first


def test_a_lost_host_takes_its_ranks_along(workers: Any) -> None:
    team = workers(2, "tcp")
    near, far = team
    mesh = team.attach().spawn_procs({"gpus": 2}, name="train")
    mesh.initialized.get(LIMIT)
    with watch(period=PERIOD) as seen:
        snapshot = until(seen, lambda ranks: all(rank.rss for rank in ranks))
        assert sorted(host.name for host in snapshot.hosts.values()) == sorted((near.name, far.name))
        far.end(signal.SIGKILL)
        idle, dead = RankState.IDLE, RankState.DEAD
        snapshot = until(seen, states(idle, idle, dead, dead))
        snapshot = seen.snapshot()
        gone = {host.name: bool(host.gone) for host in snapshot.hosts.values()}
        assert gone == {near.name: False, far.name: True}
        assert snapshot.failures[-1].ranks == (2, 3)


def test_where_a_rank_is_stopped_in_the_debugger() -> None:
    _, trainer = spawn(2)
    with watch(period=PERIOD) as seen:
        call = trainer.slice(gpus=1).stop_here.call()
        snapshot = until(seen, states(RankState.IDLE, RankState.STOPPED))
        stop = next(iter(snapshot.ranks.values()))[1].stop
        assert stop is not None
        assert (stop.reason, stop.file) == ("breakpoint()", "test_ranks.py")
        assert stop.function.endswith("stop_here")
        debugger = get_debugger()
        debugger.resume(debugger.stops())
        call.get(LIMIT)
        until(seen, states(RankState.IDLE, RankState.IDLE))


def test_a_stopped_mesh_is_gone_with_its_host() -> None:
    mesh, _ = spawn(1)
    with watch(period=PERIOD) as seen:
        until(seen, lambda ranks: bool(ranks[0].rss))
        version = seen.snapshot().version
        mesh.stop().get(LIMIT)
        delta = seen.since(version)
        assert delta.gone_meshes == (mesh._mesh_uid,)
        assert len(delta.gone_hosts) == 1
        assert not seen.snapshot().failures


def test_nothing_is_sent_and_no_timer_runs_while_nothing_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: list[type] = []
    send, dispatch = Node.send, Node._dispatch

    def noted_send(self: Node, proc: str, message: Any, body: Any = b"") -> bool:
        crossed.append(type(message))
        return send(self, proc, message, body)

    def noted_dispatch(self: Node, link: Any, message: Any, body: Any) -> None:
        crossed.append(type(message))
        dispatch(self, link, message, body)

    monkeypatch.setattr(Node, "send", noted_send)
    monkeypatch.setattr(Node, "_dispatch", noted_dispatch)
    _, trainer = spawn(2)
    threads = set(threading.enumerate())
    assert list(trainer.looks.call().get(LIMIT).values()) == [0, 0]
    assert not {Observe, Observed} & set(crossed)
    first, second = watch(period=PERIOD), watch()
    told = threading.Event()
    second.subscribe(lambda _delta: told.set(), since=0)
    assert told.wait(LIMIT)
    until(first, lambda ranks: all(rank.actors for rank in ranks))
    assert list(trainer.looks.call().get(LIMIT).values()) == [1, 1]
    assert {Observe, Observed} <= set(crossed)
    first.close()
    assert list(trainer.looks.call().get(LIMIT).values()) == [1, 1]  # the other one is still open
    second.close()
    # What was sent before the end of the lease arrives; the ranks then tell that they look no more.
    wait_until(lambda: list(trainer.looks.call().get(LIMIT).values()) == [0, 0], "the ranks look no more")
    crossed.clear()
    for _ in range(20):
        trainer.looks.call().get(LIMIT)
    assert not {Observe, Observed} & set(crossed)
    assert set(threading.enumerate()) <= threads


def test_a_lease_is_renewed_and_ends_if_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = spawn(1)
    monkeypatch.setattr(mesh_observer, "LEASE", 2.0)
    asked: list[float] = []
    ask = mesh_observer.MeshObserver._ask

    def noted(self: Any, system: Any, agents: Any, lease: float, again: bool = False) -> None:
        asked.append(lease)
        if len(asked) <= 4:
            ask(self, system, agents, lease, again)

    monkeypatch.setattr(mesh_observer.MeshObserver, "_ask", noted)
    with watch(period=PERIOD) as seen:
        until(seen, lambda ranks: bool(ranks[0].actors))
        wait_until(lambda: len(asked) > 3, "the lease was renewed a few times")
        assert trainer.looks.call_one().get(LIMIT) == 1
        # From now on no renewal arrives.
        wait_until(lambda: trainer.looks.call_one().get(LIMIT) == 0, "the lease is over")
