"""Watches of real meshes: what they see, when, and what is left when they are closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

import monarch_kernel.actor as runtime
from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.watch import RankState, Snapshot, Watch, advanced, watch

#: How long anything may take that is waited for (seconds).
LIMIT = 30.0


@pytest.fixture(autouse=True)
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime, "unhandled_fault_hook", lambda _failure: None)
    yield
    shutdown_context().get()
    assert not [thread for thread in threading.enumerate() if thread.name == "monarch-watch"]


def spawn(ranks: int) -> ProcMesh:
    mesh = this_host().spawn_procs({"gpus": ranks})
    mesh.initialized.get(LIMIT)
    return mesh


def until(seen: Watch, *states: RankState) -> Snapshot:
    """Wait until the ranks of the newest mesh have these states."""
    snapshot = seen.snapshot()
    for delta in seen.changes(LIMIT):
        snapshot = advanced(snapshot, delta)
        if snapshot.ranks and tuple(rank.state for rank in list(snapshot.ranks.values())[-1]) == states:
            return snapshot
    raise AssertionError(f"the states never were {states}: {snapshot}")


IDLE, DEAD = RankState.IDLE, RankState.DEAD


def test_ranks_that_are_there_are_seen_at_once() -> None:
    mesh = spawn(2)
    with watch() as seen:
        snapshot = seen.snapshot()
    (view,) = snapshot.meshes.values()
    assert (view.name, view.labels, view.sizes) == (mesh.name, ("gpus",), (2,))
    ranks = snapshot.ranks[view.key]
    assert [rank.pid for rank in ranks] == list(mesh.pids().values())
    assert [rank.state for rank in ranks] == [IDLE, IDLE]
    assert {rank.host for rank in ranks} == set(view.hosts) == set(snapshot.hosts)


def test_a_killed_rank_is_dead_with_its_cause_and_idle_again_when_healed() -> None:
    with watch() as seen:
        mesh = spawn(2)
        until(seen, IDLE, IDLE)
        os.kill(mesh.pids().get(1), signal.SIGKILL)
        snapshot = until(seen, IDLE, DEAD)
        (ranks,) = snapshot.ranks.values()
        assert "SIGKILL" in ranks[1].cause
        assert [(failure.kind, failure.ranks) for failure in snapshot.failures] == [("death", (1,))]
        mesh.heal().get(LIMIT)
        until(seen, IDLE, IDLE)


def test_host_and_processes_have_figures() -> None:
    mesh = spawn(1)
    with watch() as seen:
        snapshot = seen.snapshot()
        (rank,) = next(iter(snapshot.ranks.values()))
        (host,) = snapshot.hosts.values()
        for delta in seen.changes(LIMIT):
            snapshot = advanced(snapshot, delta)
            (rank,) = next(iter(snapshot.ranks.values()))
            (host,) = snapshot.hosts.values()
            if rank.rss and host.memory_total:
                break
    assert rank.pid == mesh.pids().get(0)
    assert 0 < rank.started < snapshot.time
    assert host.cores == os.cpu_count()
    assert 0 < host.memory_used < host.memory_total


def test_a_watch_follows_to_the_next_runtime() -> None:
    with watch() as seen:
        spawn(1)
        until(seen, IDLE)
        shutdown_context().get()
        assert not seen.snapshot().meshes
        mesh = spawn(2)
        (view,) = until(seen, IDLE, IDLE).meshes.values()
        assert view.name == mesh.name


def test_a_callback_that_raises_or_blocks_stops_no_other_watch() -> None:
    blocked = threading.Event()
    told = threading.Event()
    with watch(period=0.05) as bad, watch(period=0.05) as good:
        bad.subscribe(lambda _delta: 1 / 0)
        bad.subscribe(lambda _delta: blocked.wait(LIMIT))
        good.subscribe(lambda delta: told.set() if delta.meshes else None, since=0)
        spawn(1)
        assert told.wait(LIMIT)
        blocked.set()


def test_a_closed_watch_says_so() -> None:
    seen = watch()
    seen.close()
    seen.close()
    with pytest.raises(RuntimeError, match="open another"):
        seen.snapshot()
    with pytest.raises(ValueError, match=r"at least 0\.05"):
        watch(period=0)
