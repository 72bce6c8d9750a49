"""``ProcMesh.interrupt()``: KeyboardInterrupt in what runs, and everything usable afterwards."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, concurrent_endpoint, endpoint
from tests.actor.actors import PATIENCE, AsyncBasic, Basic, MainThread, started
from tests.actor.conftest import Procs


@pytest.mark.parametrize("endpoint_name", ["spin", "sleep"])
@pytest.mark.parametrize("cls", [MainThread, Basic], ids=["main thread", "first actor"])
def test_an_actor_on_the_main_thread(procs: Procs, cls: type, endpoint_name: str) -> None:
    world = procs(2)
    mesh = world.spawn("busy", cls)
    pending = started(mesh, endpoint_name)
    names = world.interrupt().get(PATIENCE)
    assert list(names.values()) == [[f"busy.{endpoint_name}"]] * 2
    with pytest.raises(ActorError) as caught:
        pending.get(PATIENCE)
    assert [type(failure.exception) for failure in caught.value.failures] == [KeyboardInterrupt] * 2
    assert "KeyboardInterrupt" in str(caught.value)
    assert "failed on all 2 ranks" in str(caught.value)
    # Actor and mesh are as good as before, and can be interrupted again.
    pending = started(mesh, endpoint_name)
    world.interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        pending.get(PATIENCE)
    assert list(world.spawn("other", Basic).echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_an_actor_on_a_thread_of_its_own(procs: Procs) -> None:
    world = procs(1)
    world.spawn("first", Basic).initialized.get(PATIENCE)  # has the main thread
    mesh = world.spawn("busy", Basic)
    pending = started(mesh, "spin")
    assert world.interrupt().get(PATIENCE)[0] == ["busy.spin"]
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        pending.get(PATIENCE)
    assert mesh.echo.call_one(1).get(PATIENCE) == 1


def test_an_async_actor(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("busy", AsyncBasic)
    pending = started(mesh)
    assert list(world.interrupt().get(PATIENCE).values()) == [["busy.sleep"]] * 2
    with pytest.raises(ActorError):
        pending.get(PATIENCE)
    assert list(mesh.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_an_async_actor_that_computes(procs: Procs) -> None:
    class Spins(Actor):
        @endpoint
        async def spin(self, port: Any) -> None:
            port.send(None)
            while True:
                pass

        @endpoint
        async def ping(self) -> int:
            return 1

    world = procs(1)
    mesh = world.spawn("busy", Spins)
    pending = started(mesh, "spin")
    world.interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt|Cancelled"):
        pending.get(PATIENCE)
    assert mesh.ping.call_one().get(PATIENCE) == 1


def test_concurrent_endpoints(procs: Procs) -> None:
    class Waits(Actor):
        @concurrent_endpoint
        async def wait(self, port: Any) -> None:
            port.send(None)
            await asyncio.Event().wait()

        @endpoint
        async def ping(self) -> int:
            return 1

    world = procs(1)
    mesh = world.spawn("busy", Waits)
    calls = [started(mesh, "wait") for _ in range(3)]
    world.interrupt().get(PATIENCE)
    for call in calls:
        with pytest.raises(ActorError):
            call.get(PATIENCE)
    assert mesh.ping.call_one().get(PATIENCE) == 1


def test_nothing_to_interrupt(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("idle", Basic)
    mesh.initialized.get(PATIENCE)
    assert list(world.interrupt().get(PATIENCE).values()) == [[], []]
    assert list(mesh.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_only_the_slice_is_interrupted(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("busy", Basic)
    first, second = started(mesh.slice(gpus=0)), started(mesh.slice(gpus=1))
    world.slice(gpus=0).interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        first.get(PATIENCE)
    assert not second.done()
    assert mesh.slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1
    world.interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        second.get(PATIENCE)


def test_code_that_catches_the_interrupt(procs: Procs) -> None:
    class Catches(Actor):
        @endpoint
        def work(self, port: Any) -> str:
            try:
                port.send(None)  # the interrupt may come at once
                while True:
                    pass
            except KeyboardInterrupt:
                return "caught it"

    world = procs(1)
    mesh = world.spawn("catches", Catches)
    pending = started(mesh, "work")
    world.interrupt().get(PATIENCE)
    assert pending.get(PATIENCE).item(gpus=0) == "caught it"


def test_a_rank_that_waits_for_another(procs: Procs) -> None:
    class Waits(Actor):
        @endpoint
        def wait(self, port: Any, mesh: Any) -> None:
            mesh.sleep.call(port).get()

    world = procs(2)
    target = world.slice(gpus=1).spawn("target", Basic)
    mesh = world.slice(gpus=0).spawn("waits", Waits)
    pending = started(mesh, "wait", target)
    world.slice(gpus=0).interrupt().get(PATIENCE)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        pending.get(PATIENCE)
    world.slice(gpus=1).interrupt().get(PATIENCE)
    assert target.echo.call_one(1).get(PATIENCE) == 1
    assert world.slice(gpus=0).spawn("fine", Basic).echo.call_one(1).get(PATIENCE) == 1


def test_sigint_to_the_rank_itself(procs: Procs) -> None:
    world = procs(1)
    mesh = world.spawn("busy", Basic)
    pid = mesh.pid.call_one().get()
    pending = started(mesh, "sleep")
    os.kill(pid, signal.SIGINT)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        pending.get(PATIENCE)
    os.kill(pid, signal.SIGINT)  # nothing runs: it is ignored
    assert mesh.echo.call_one(1).get(PATIENCE) == 1


class InterruptedLock:
    """A lock whose owner is interrupted at the moment when it gets it."""

    def __init__(self) -> None:
        self.held = True
        # Written in C, so that the handler of the signal is called in the frame of its caller.
        self.__enter__ = functools.partial(signal.raise_signal, signal.SIGINT)
        self.__exit__ = lambda *_: setattr(self, "held", False)
        self.acquire = self.release = lambda: True


class Locking(Actor):
    @endpoint
    def wait(self) -> None:
        self.lock = InterruptedLock()
        with threading.Condition(self.lock):  # type: ignore[arg-type]
            threading.Event().wait()

    @endpoint
    def held(self) -> bool:
        return self.lock.held


def test_a_lock_that_is_being_taken_is_not_left_held(procs: Procs) -> None:
    mesh = procs(1).spawn("locking", Locking)
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        mesh.wait.call_one().get(PATIENCE)
    assert mesh.held.call_one().get(PATIENCE) is False


def test_many_interrupts_in_a_row_do_no_harm(procs: Procs) -> None:
    world = procs(2)
    mesh = world.spawn("busy", Basic)
    for _ in range(20):
        pending = [started(mesh, "spin"), mesh.echo.call("next")]
        interrupts = [world.interrupt() for _ in range(3)]
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            pending[0].get(PATIENCE)
        for each in interrupts:
            each.get(PATIENCE)
        error = pending[1].exception(PATIENCE)  # it may have been hit as well
        assert error is None or "KeyboardInterrupt" in str(error)
    assert list(mesh.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_raising_keyboard_interrupt_oneself_is_fatal(procs: Procs, faults: Any) -> None:
    from monarch_kernel.actor import SupervisionError

    class Raises(Actor):
        @endpoint
        def work(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(SupervisionError, match="KeyboardInterrupt"):
        procs(1).spawn("raises", Raises).work.call_one().get(PATIENCE)
    assert faults.get(timeout=PATIENCE).mesh == "raises"


class _Limited(Actor):
    @endpoint
    def limited(self, seconds: float) -> str:
        """Wait until a handler of SIGALRM ends it."""

        def expire(_number: int, _frame: object) -> None:
            raise TimeoutError("the time is over")

        signal.signal(signal.SIGALRM, expire)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            threading.Event().wait(PATIENCE)
        except TimeoutError as error:
            return str(error)
        return "it was not ended"


def test_alarms_limit_the_first_actor_of_a_process(procs: Procs) -> None:
    """It has the main thread; another is told so."""
    mesh = procs(1)
    first, second = mesh.spawn("first", _Limited), mesh.spawn("second", _Limited)
    assert first.limited.call_one(0.01).get(PATIENCE) == "the time is over"
    with pytest.raises(ValueError, match="spawn this actor first, or on procs of its own"):
        second.limited.call_one(0.01).get(PATIENCE)
