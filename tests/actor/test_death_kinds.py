"""Of which kind each way of dying is, as the errors of calls have it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from monarch_kernel.actor import Actor, SupervisionError, endpoint, this_host, this_proc
from monarch_kernel.errors import Death as Told
from monarch_kernel.errors import DeathKind
from monarch_kernel.runtime.actor.process import get_system
from tests.actor.actors import PATIENCE, Basic, started
from tests.actor.conftest import Procs
from tests.conftest import wait_until
from tests.deaths import Death, Mortal
from tests.workers import Start

#: A rank that has lost its sockets lives on, or ends before anything else is known of it.
PROCESS = {"lost_socket": {DeathKind.UNREACHABLE, DeathKind.EXITED}}


def told(call: Any) -> Told:
    """The death that a call fails with."""
    with pytest.raises(SupervisionError) as caught:
        call.get(PATIENCE)
    assert caught.value.death is not None
    return caught.value.death


def test_a_rank_that_dies(procs: Procs, faults: Any, death: Death) -> None:
    mesh = procs(2).spawn("mortal", Mortal)
    mesh.initialized.get(PATIENCE)
    mesh.slice(gpus=1).die.broadcast(death.kind)
    failure = faults.get(timeout=PATIENCE)
    kinds = PROCESS.get(death.kind, {DeathKind.EXITED}) if death.of_process else {DeathKind.ACTOR_FAILED}
    assert failure.death.kind in kinds
    assert told(mesh.echo.call(1)).kind in kinds


def test_what_was_stopped(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("basic", Basic)
    mesh.stop("enough").get(PATIENCE)
    assert told(mesh.echo.call(1)).kind is DeathKind.STOPPED
    other = world.spawn("other", Basic)
    other.initialized.get(PATIENCE)
    world.stop("enough").get(PATIENCE)
    assert told(other.echo.call(1)).kind is DeathKind.STOPPED


class Unmade(Actor):
    """Cannot be read where it is to be made."""

    def __init__(self, bomb: Any) -> None: ...

    @endpoint
    def echo(self) -> None: ...


class Bomb:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ValueError("boom")


def test_an_actor_that_could_not_be_made(procs: Procs, faults: Any) -> None:
    mesh = procs(1).spawn("unmade", Unmade, Bomb())
    assert faults.get(timeout=PATIENCE).death.kind is DeathKind.NO_ACTOR
    assert told(mesh.echo.call()).kind is DeathKind.NO_ACTOR


def test_a_module_that_cannot_be_preloaded(faults: Any) -> None:
    mesh = this_host().spawn_procs(per_host={"gpus": 1}, preload=["no_such_module"]).spawn("basic", Basic)
    assert told(mesh.echo.call(1)).kind is DeathKind.PRELOAD_FAILED


@pytest.mark.own_runtime
def test_a_host_agent_that_dies(two: Any, faults: Any) -> None:
    pending = started(two)
    node = two._system.node
    agent = two._system.agent.id
    os.kill(two._system.agent_process.pid, signal.SIGKILL)
    assert told(pending).kind is DeathKind.HOST_LOST
    wait_until(lambda: agent in node.deaths, "the death of the agent is known")
    # Its connection ends before or after its exit status is known.
    assert node.deaths[agent].kind in (DeathKind.AGENT_CLOSED, DeathKind.AGENT_EXITED)


@pytest.mark.own_runtime
def test_a_host_that_is_silent(workers: Start, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_HEARTBEAT_TIMEOUT", "1")
    far = workers(1, "tcp")
    basic = far.attach().spawn_procs().spawn("basic", Basic)
    basic.pid.call().get(PATIENCE)
    os.kill(far[0].pid, signal.SIGSTOP)
    try:
        assert told(basic.echo.call(1)).kind is DeathKind.HOST_LOST
        node = basic._system.node
        assert node.deaths[basic._target().procs[0].agent].kind is DeathKind.AGENT_UNREACHABLE
    finally:
        os.kill(far[0].pid, signal.SIGCONT)
    far[0].wait_idle()


def test_a_death_is_not_copied_within_a_process(faults: Any, procs: Procs) -> None:
    """What an actor of this process died of, and what is known here of a rank, is what errors have: the same object."""
    local = this_proc().spawn("local", Mortal)
    local.initialized.get(PATIENCE)
    local.die.call_one("sys_exit")
    known = faults.get(timeout=PATIENCE).death
    assert told(local.echo.call_one(1)) is known
    mesh = procs(1).spawn("mortal", Mortal)
    mesh.initialized.get(PATIENCE)
    waiting = mesh.sleep.call_one(600)
    rank = mesh._target().procs[0].id
    os.kill(mesh._system.node.pids[rank], signal.SIGKILL)
    assert told(waiting) is get_system().node.deaths[rank]
