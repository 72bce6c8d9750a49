"""Whatever one can wait for, and every way in which what is waited for can die: the wait ends at once, and says why."""

from __future__ import annotations

import asyncio
import operator
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.actor import Accumulator, Actor, Channel, MeshFailure, SupervisionError, endpoint
from monarch_kernel.rdma import RDMABuffer
from tests.actor.actors import PATIENCE
from tests.actor.conftest import Procs
from tests.conftest import wait_until
from tests.deaths import Mortal

#: How long a wait over something dead may take (seconds). Nothing here takes a tenth of it.
AT_ONCE = 8.0


class Victim(Mortal):
    """What is waited for. It keeps ports, and is busy with something else when it is asked to be."""

    def __init__(self, block: bool = False, port: Any = None) -> None:
        self.kept: list[Any] = [port]
        if block:
            time.sleep(600)

    @endpoint
    def block(self, started: Any) -> None:
        started.send(None)
        time.sleep(600)

    @endpoint
    def keep(self, port: Any) -> None:
        self.kept.append(port)

    @endpoint
    def send(self, value: Any) -> None:
        self.kept[-1].send(value)

    @endpoint
    def forget(self) -> None:
        self.kept.clear()

    @endpoint
    def pass_on(self, port: Any, to: Any) -> None:
        to.keep.call(port).get(PATIENCE)

    @endpoint(explicit_response_port=True)
    def leave_to(self, port: Any, to: Any) -> None:
        to.keep.broadcast(port)

    @endpoint
    def checkpoint(self) -> int:
        return 1

    @endpoint
    def opens(self) -> Any:
        port, self.receiver = Channel.open()
        return port

    @endpoint
    def buffer(self) -> RDMABuffer:
        import numpy as np

        return RDMABuffer(np.zeros(8, "i8"))


def _busy(victim: Any) -> None:
    """Whatever is asked of it from now on waits."""
    port, receiver = Channel.open()
    victim.block.broadcast(port)
    receiver.recv().get(AT_ONCE)


def _queued(begin: Callable[[Any], list[Any]]) -> Callable[[Any, Any], list[Any]]:
    def wait(_world: Any, victim: Any) -> list[Any]:
        _busy(victim)
        return begin(victim)

    return wait


def _port(_world: Any, victim: Any) -> list[Any]:
    port, receiver = Channel.open()
    victim.keep.call_one(port).get(AT_ONCE)
    _busy(victim)
    return [receiver.recv(), receiver.recv()]


def _port_on_its_way(_world: Any, victim: Any) -> list[Any]:
    _busy(victim)
    port, receiver = Channel.open()
    victim.keep.broadcast([port])
    return [receiver.recv()]


def _port_once(_world: Any, victim: Any) -> list[Any]:
    port, receiver = Channel.open_ranked(once=True)
    victim.keep.choose(port).get(AT_ONCE)
    return [receiver.recv()]


def _port_of_the_constructor(world: Any, _victim: Any) -> list[Any]:
    port, receiver = Channel.open()
    world.spawn("victim", Victim, False, port).initialized.get(AT_ONCE)
    return [receiver.recv()]


def _port_by_a_port(_world: Any, victim: Any) -> list[Any]:
    inner, receiver = Channel.open()
    victim.opens.call_one().get(AT_ONCE).send({"inner": inner})
    return [receiver.recv()]


def _transfer(_world: Any, victim: Any) -> list[Any]:
    buffer, pid = victim.buffer.call_one().get(AT_ONCE), victim.pid.call_one().get(AT_ONCE)
    buffer.fetch_add(1).get(AT_ONCE)
    os.kill(pid, signal.SIGSTOP)
    return [buffer.fetch_add(1, timeout=None)]


#: What begins to wait for the only actor of a mesh, on its proc; the futures that wait.
WAITS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "call": _queued(lambda victim: [victim.echo.call(1)]),
    "call_one": _queued(lambda victim: [victim.echo.call_one(1)]),
    "choose": _queued(lambda victim: [victim.echo.choose(1)]),
    "stream": _queued(lambda victim: list(victim.echo.stream(1))),
    "accumulate": _queued(lambda victim: [Accumulator(victim.echo, 0, operator.add).accumulate(1)]),
    "checkpoint": _queued(lambda victim: [victim.checkpoint.call()]),
    "port": _port,
    "port on its way": _port_on_its_way,
    "port once": _port_once,
    "port of the constructor": _port_of_the_constructor,
    "port by a port": _port_by_a_port,
    "initialized": lambda world, _victim: [world.spawn("victim", Victim, True).initialized],
    "transfer": _transfer,
}

#: How its process ends, and what the error says of that.
ENDS = {
    "sigkill": "killed by SIGKILL",
    "segfault": "segmentation fault",
    "os_exit": "exited with code 3",
    "stopped and killed": "killed by SIGKILL",
    "agent": "agent",
}


def _end(how: str, killer: Any) -> None:
    pid = killer.pid.call_one().get(AT_ONCE) if how != "agent" else 0
    if how == "agent":
        os.kill(killer._system.agent_process.pid, signal.SIGKILL)
    elif how == "stopped and killed":
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
    else:
        killer.die.broadcast(how)


def _check(error: BaseException | None, wait: str, how: str) -> None:
    text = str(error)
    assert ENDS[how] in text
    assert re.search(r"\bpid \d+", text)
    if wait == "transfer":
        assert "is gone" in text
    else:
        assert isinstance(error, SupervisionError)
        assert isinstance(error, MeshFailure)
        assert error.ranks == (0,)
        assert f"of mesh '{'procs-' if wait == 'port by a port' else 'victim'}" in text


def _ways() -> list[Any]:
    # A process that is stopped, as that of the transfer, neither exits nor takes other signals than SIGKILL.
    return [
        pytest.param(w, e, marks=pytest.mark.own_runtime if e == "agent" else ())
        for e in ENDS
        for w in WAITS
        if w != "transfer" or e in ("stopped and killed", "agent")
    ]


@pytest.mark.parametrize(("wait", "how"), _ways())
def test_a_wait_ends_with_what_it_waits_for(wait: str, how: str, procs: Procs, faults: Any) -> None:
    world = procs(1)
    killer = world.spawn("killer", Mortal)
    victim = world.spawn("victim", Victim)
    killer.pid.call_one().get(PATIENCE)
    pid = killer.pid.call_one().get(PATIENCE)
    waiting = WAITS[wait](world, victim)
    assert not any(future.done() for future in waiting)
    if wait == "transfer" and how != "agent":
        os.kill(pid, signal.SIGKILL)
    else:
        _end(how, killer)
    for future in waiting:
        _check(future.exception(AT_ONCE), wait, how)


class Third(Actor):
    """Waits for others' actors, in a process of its own."""

    @endpoint
    def wait(self, wait: str, begun: Any, world: Any, victim: Any) -> list[Any]:
        waiting = WAITS[wait](world, victim)
        begun.send([future.done() for future in waiting])
        return [future.exception(AT_ONCE) for future in waiting]

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True


class AsyncThird(Actor):
    @endpoint
    async def wait(self, wait: str, begun: Any, world: Any, victim: Any) -> list[Any]:
        waiting = await asyncio.to_thread(WAITS[wait], world, victim)
        begun.send([future.done() for future in waiting])
        async with asyncio.timeout(AT_ONCE):
            return await asyncio.gather(*[f.as_asyncio() for f in waiting], return_exceptions=True)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return True


@pytest.mark.parametrize("kind", [Third, AsyncThird])
@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait != "transfer"])
def test_a_third_partys_wait_ends_too(wait: str, kind: type, procs: Procs, faults: Any) -> None:
    world = procs(1)
    killer, victim = world.spawn("killer", Mortal), world.spawn("victim", Victim)
    third: Any = procs(1).spawn("third", kind)
    begun, begins = Channel.open()
    killer.pid.call_one().get(PATIENCE)
    answer = third.wait.call_one(wait, begun, world, victim)
    assert not any(begins.recv().get(PATIENCE))
    _end("sigkill", killer)
    errors = answer.get(PATIENCE)
    assert errors
    for error in errors:
        _check(error, wait, "sigkill")


# -- what does not fail, but ends --------------------------------------------------------------------------


@pytest.mark.own_runtime
@pytest.mark.parametrize("how", ["sigkill", "agent"])
def test_a_stop_over_what_dies_is_done(how: str, procs: Procs, faults: Any) -> None:
    world = procs(1)
    killer, victim = world.spawn("killer", Mortal), world.spawn("victim", Victim)
    killer.pid.call_one().get(PATIENCE)
    _busy(victim)
    stopping = victim.stop()
    assert not stopping.done()
    _end(how, killer)
    stopping.get(AT_ONCE)


@pytest.mark.own_runtime
def test_questions_to_a_host_agent_end_with_it(procs: Procs, faults: Any) -> None:
    world = procs(2)
    victim = world.spawn("victim", Victim)
    victim.echo.call(1).get(PATIENCE)
    agent = victim._system.agent_process.pid
    os.kill(agent, signal.SIGSTOP)
    stopped = world.slice(gpus=1)
    asked = {
        "status": world.status(),
        "stop": stopped.stop(),
        "kill": stopped.kill(),
        "spawn_procs": procs(1).initialized,
    }
    assert not any(future.done() for future in asked.values())
    os.kill(agent, signal.SIGKILL)
    states = asked.pop("status").get(AT_ONCE)
    assert [status.state for status in states.values()] == ["dead", "dead"]
    assert "agent" in states.get(0).cause
    for what in ("stop", "kill"):
        assert asked.pop(what).get(AT_ONCE) is None, "what was to end has ended"
    for what, future in asked.items():
        error = future.exception(AT_ONCE)
        assert isinstance(error, SupervisionError), what
        assert "agent" in str(error)


def test_questions_to_procs_end_with_them(procs: Procs, faults: Any) -> None:
    world = procs(2)
    victim = world.spawn("victim", Victim)
    pid = victim.slice(gpus=1).pid.call_one().get(PATIENCE)
    os.kill(pid, signal.SIGSTOP)
    asked = [world.interrupt(), world.logging_option(level=30)]
    assert not any(future.done() for future in asked)
    os.kill(pid, signal.SIGKILL)
    for future in asked:
        error = future.exception(AT_ONCE)
        assert isinstance(error, SupervisionError)
        assert error.ranks == (1,)


class DiesAtBirth(Actor):
    """Lives the first time; its successors do not get far."""

    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            os.kill(os.getpid(), signal.SIGKILL)
        with open(path, "w"):
            pass

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_healing_ends_when_the_successor_dies(procs: Procs, faults: Any, tmp_path: Any) -> None:
    world = procs(1)
    actors = world.spawn("fragile", DiesAtBirth, str(tmp_path / "born"))
    os.kill(actors.pid.call_one().get(PATIENCE), signal.SIGKILL)
    faults.get(timeout=PATIENCE)
    error = world.heal().exception(AT_ONCE)
    assert isinstance(error, SupervisionError)
    assert "killed by SIGKILL" in str(error)


@pytest.mark.own_runtime
def test_healing_goes_on_with_a_new_agent_when_the_agent_dies(procs: Procs, faults: Any) -> None:
    world = procs(1)
    victim = world.spawn("victim", Victim)
    os.kill(victim.pid.call_one().get(PATIENCE), signal.SIGKILL)
    faults.get(timeout=PATIENCE)
    agent = victim._system.agent_process.pid
    os.kill(agent, signal.SIGSTOP)
    healing = world.heal()
    wait_until(lambda: len(victim._system.node.calls) > 0, "the heal has begun")
    os.kill(agent, signal.SIGKILL)
    assert healing.get(PATIENCE).replaced, "on a new host agent"
    assert victim._system.agent_process.pid != agent
    assert victim.echo.call_one(1).get(PATIENCE) == 1
