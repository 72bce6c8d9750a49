"""Who is told of a failure, what that does, and what a script sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import threading
from typing import Any

import pytest

from monarch_kernel.actor import Actor, Channel, MeshFailure, SupervisionError, context, endpoint, this_host
from tests.actor.actors import PATIENCE, Basic
from tests.actor.conftest import Procs
from tests.deaths import Death, Mortal


class SyncOwner(Actor):
    """Owns mortals; what ``__supervise__`` does is chosen at its birth."""

    def __init__(self, port: Any, mode: str) -> None:
        self.port = port
        self.mode = mode

    @endpoint
    def adopt(self, n: int, cls: type = Mortal, *args: Any) -> Any:
        mesh = this_host().spawn_procs(per_host={"gpus": n}).spawn("owned", cls, *args)
        mesh.initialized.get(30)
        return mesh

    @endpoint
    def ping(self) -> str:
        return "alive"

    @endpoint
    def ask(self, mesh: Any) -> str:
        """Calls the owned mesh, and tells what came of it."""
        try:
            mesh.echo.call(1).get(30)
        except SupervisionError as e:
            return str(e)
        return "fine"

    @endpoint
    def hold(self, gate: Any) -> None:
        port, receiver = Channel.open()
        gate.send(port)
        receiver.recv().get(30)
        self.port.send(("hold ended", None))

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((type(failure).__name__, failure.mesh, failure.ranks, failure.report()))
        if self.mode == "raise":
            raise RuntimeError("the hook failed")
        return self.mode == "handle"


class AsyncOwner(Actor):
    def __init__(self, port: Any, mode: str) -> None:
        self.port = port
        self.mode = mode

    @endpoint
    async def adopt(self, n: int, cls: type = Mortal, *args: Any) -> Any:
        return await this_host().spawn_procs(per_host={"gpus": n}).spawn("owned", cls, *args)

    @endpoint
    async def ping(self) -> str:
        return "alive"

    @endpoint
    async def ask(self, mesh: Any) -> str:
        try:
            await mesh.echo.call(1)
        except SupervisionError as e:
            return str(e)
        return "fine"

    @endpoint
    async def hold(self, gate: Any) -> None:
        port, receiver = Channel.open()
        gate.send(port)
        await receiver.recv()
        self.port.send(("hold ended", None))

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((type(failure).__name__, failure.mesh, failure.ranks, failure.report()))
        if self.mode == "raise":
            raise RuntimeError("the hook failed")
        return self.mode == "handle"


class Unaware(Actor):
    """Owns mortals, and has no hook."""

    @endpoint
    def adopt(self, n: int, cls: type = Mortal, *args: Any) -> Any:
        mesh = this_host().spawn_procs(per_host={"gpus": n}).spawn("owned", cls, *args)
        mesh.initialized.get(30)
        return mesh

    @endpoint
    def ping(self) -> str:
        return "alive"


class Backlogged(Actor):
    """Owns a mortal that dies while messages wait; tells what happened, in which order, on which thread."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self.log: list[Any] = []
        self.note_that("init")

    def note_that(self, what: str) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.log.append((what, threading.get_ident(), False))
        else:
            self.log.append((what, threading.get_ident(), True))

    @endpoint
    def lose(self, gate: Any) -> None:
        mesh = this_host().spawn_procs().spawn("owned", Mortal)
        pid = mesh.pid.call_one().get(30)
        port, receiver = Channel.open()
        gate.send(port)
        receiver.recv().get(30)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(SupervisionError):
            mesh.echo.call(1).get(30)
        self.note_that("lost")

    @endpoint
    def note(self) -> None:
        self.note_that("note")

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.note_that("told")
        return True

    def __cleanup__(self, error: Any) -> None:
        self.note_that("cleanup")
        self.port.send(self.log)


class AsyncBacklogged(Backlogged):
    @endpoint
    async def lose(self, gate: Any) -> None:
        mesh = await this_host().spawn_procs().spawn("owned", Mortal)
        pid = await mesh.pid.call_one()
        port, receiver = Channel.open()
        gate.send(port)
        await receiver.recv()
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(SupervisionError):
            await mesh.echo.call(1)
        self.note_that("lost")

    @endpoint
    async def note(self) -> None:
        self.note_that("note")

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.note_that("told")  # and nothing is awaited
        return True

    async def __cleanup__(self, error: Any) -> None:
        Backlogged.__cleanup__(self, error)


class PlainHook(AsyncBacklogged):
    """An async actor whose ``__supervise__`` is no coroutine, and waits as sync code does."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.note_that("told")
        context().actor_instance.proc.spawn("basic", Basic).echo.call_one(1).get(30)
        return True


BACKLOGGED = pytest.mark.parametrize(
    ("cls", "loop"),
    [(Backlogged, [False]), (AsyncBacklogged, [True]), (PlainHook, [False, True])],
    ids=["sync", "async", "plain-hook"],
)

OWNERS = pytest.mark.parametrize("owner_class", [SyncOwner, AsyncOwner], ids=["sync", "async"])


def family(procs: Procs, owner_class: type, mode: str) -> tuple[Any, Any, Any]:
    """An owner, two mortals that it owns, and where its hook tells what it was given."""
    port, receiver = Channel.open()
    owner = procs(1).spawn("owner", owner_class, port, mode)
    mesh = owner.adopt.call_one(2).get(PATIENCE)
    return owner, mesh, receiver


@OWNERS
def test_a_handled_failure_goes_no_further(procs: Procs, faults: Any, owner_class: type, death: Death) -> None:
    owner, mesh, receiver = family(procs, owner_class, "handle")
    death.strike(mesh.slice(gpus=1))
    kind, name, ranks, report = receiver.recv().get(PATIENCE)
    assert (kind, name, ranks) == ("MeshFailure", "owned", (1,))
    assert "Mesh 'owned' lost rank 1 of 2 (gpus=1) on host" in report
    assert owner.ping.call_one().get(PATIENCE) == "alive"
    assert mesh.slice(gpus=0).echo.call_one(1).get(PATIENCE) == 1
    assert faults.empty()


@OWNERS
@pytest.mark.parametrize("mode", ["ignore", "raise"])
def test_a_failure_that_is_not_handled_ends_the_owner(procs: Procs, faults: Any, owner_class: type, mode: str) -> None:
    owner, mesh, receiver = family(procs, owner_class, mode)
    os.kill(mesh.slice(gpus=0).pid.call_one().get(), signal.SIGKILL)
    assert receiver.recv().get(PATIENCE)[2] == (0,)
    failure = faults.get(timeout=PATIENCE)
    assert failure.mesh == "owner"
    report = failure.report()
    assert ("the hook failed" if mode == "raise" else "killed by SIGKILL") in report
    assert "owned" in report
    assert "SIGKILL" in report  # the chain goes down to the first cause
    with pytest.raises(SupervisionError, match="the hook failed" if mode == "raise" else "SIGKILL"):
        owner.ping.call_one().get(PATIENCE)
    # What it owned goes with it, the healthy part as well.
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=1).echo.call_one(1).get(PATIENCE)
    assert faults.empty()


def backlogged(cls: type) -> tuple[Any, Any, Any]:
    """An owner that is about to lose a mesh, where it tells of its life, and the port that lets it go on."""
    port, receiver = Channel.open()
    owner = this_host().spawn_procs().spawn("owner", cls, port)
    gate, opened = Channel.open()
    owner.lose.broadcast(gate)
    return owner, receiver, opened.recv().get(PATIENCE)


@BACKLOGGED
def test_a_failure_is_handled_before_waiting_messages(faults: Any, cls: type, loop: list[bool]) -> None:
    owner, receiver, go = backlogged(cls)
    for _ in range(5):
        owner.note.broadcast()
    go.send(None)
    owner.note.call_one().get(PATIENCE)
    owner.stop().get(PATIENCE)
    log = receiver.recv().get(PATIENCE)
    order = [what for what, _, _ in log]
    assert sorted(order) == sorted(["init", "lost", "told", *["note"] * 6, "cleanup"])
    assert order.index("told") < order.index("note")
    assert len({thread for _, thread, _ in log}) == 1
    assert sorted({running for _, _, running in log}) == loop
    assert faults.empty()


@BACKLOGGED
def test_a_failure_that_waits_when_its_owner_is_stopped_is_dropped(faults: Any, cls: type, loop: list[bool]) -> None:
    owner, receiver, go = backlogged(cls)
    stopped = owner.stop()
    # On the same connection, hence behind it: the owner's process has both before it goes on.
    this = owner.note.call_one()
    go.send(None)
    assert [what for what, _, _ in receiver.recv().get(PATIENCE)] == ["init", "lost", "cleanup"]
    stopped.get(PATIENCE)
    assert isinstance(this.exception(PATIENCE), SupervisionError)
    assert faults.empty()


class Quits(Actor):
    @endpoint
    def quit(self, *reason: str) -> None:
        context().actor_instance.abort(*reason)

    @endpoint
    def ping(self) -> None: ...


@pytest.mark.parametrize("reason", [(), ("out of paper",)], ids=["no-reason", "reason"])
def test_a_report_names_the_class_of_the_actor(faults: Any, reason: tuple[str, ...]) -> None:
    mesh = this_host().spawn_procs(per_host={"a_dim": 2}).spawn("quits", Quits)
    mesh.slice(a_dim=1).quit.broadcast(*reason)
    failure = faults.get(timeout=PATIENCE)
    label = "tests.actor.test_supervision.Quits quits{'a_dim': 1/2}"
    assert f"The actor <{label}> and all its descendants have failed" in failure.report()
    assert "(rank=" in failure.report()
    assert f"actor explicitly aborted due to: {reason[0] if reason else 'abort() was called'}" in failure.report()
    assert str(failure).startswith("MeshFailure: Mesh 'quits' lost rank 1 of 2 (a_dim=1) on host")
    assert (
        failure.actor_class == pickle.loads(pickle.dumps(failure)).actor_class == "tests.actor.test_supervision.Quits"
    )
    with pytest.raises(SupervisionError, match="is unhealthy with reason: actor explicitly aborted") as caught:
        mesh.ping.call().get(PATIENCE)
    assert f"The actor <{label}> and all its descendants have failed" in str(caught.value)


def test_no_hook_is_as_good_as_one_that_returns_false(procs: Procs, faults: Any) -> None:
    owner = procs(1).spawn("owner", Unaware)
    mesh = owner.adopt.call_one(1).get(PATIENCE)
    mesh.die.broadcast("broadcast_exception")
    assert "nobody asked" in faults.get(timeout=PATIENCE).report()
    with pytest.raises(SupervisionError):
        owner.ping.call_one().get(PATIENCE)


@OWNERS
def test_a_failure_goes_up_until_an_owner_handles_it(procs: Procs, faults: Any, owner_class: type) -> None:
    port, receiver = Channel.open()
    top = procs(1).spawn("top", owner_class, port, "handle")
    middle = top.adopt.call_one(1, Unaware).get(PATIENCE)
    mesh = middle.adopt.call_one(1).get(PATIENCE)
    os.kill(mesh.pid.call_one().get(), signal.SIGKILL)
    kind, name, ranks, report = receiver.recv().get(PATIENCE)
    assert (kind, name, ranks) == ("MeshFailure", "owned", (0,))
    assert "SIGKILL" in report
    assert top.ping.call_one().get(PATIENCE) == "alive"
    with pytest.raises(SupervisionError):
        middle.ping.call_one().get(PATIENCE)
    assert faults.empty()


def test_the_chain_to_the_root(procs: Procs, faults: Any) -> None:
    top = procs(1).spawn("top", Unaware)
    middle = top.adopt.call_one(1, Unaware).get(PATIENCE)
    mesh = middle.adopt.call_one(1).get(PATIENCE)
    os.kill(mesh.pid.call_one().get(), signal.SIGKILL)
    failure = faults.get(timeout=PATIENCE)
    assert failure.mesh == "top"
    assert "SIGKILL" in failure.report()
    for actor in (top, middle):
        with pytest.raises(SupervisionError):
            actor.ping.call_one().get(PATIENCE)
    assert faults.empty()


@OWNERS
def test_a_waiting_call_raises_before_the_hook_runs(procs: Procs, faults: Any, owner_class: type) -> None:
    owner, mesh, receiver = family(procs, owner_class, "handle")
    pid = mesh.slice(gpus=0).pid.call_one().get()
    gate, gates = Channel.open()
    mesh.slice(gpus=0).hold.call_one(gate)
    gates.recv().get(PATIENCE)
    asked = owner.ask.call_one(mesh)
    os.kill(pid, signal.SIGKILL)
    assert "rank 0 of 2 of mesh 'owned'" in asked.get(PATIENCE)
    assert receiver.recv().get(PATIENCE)[2] == (0,)
    assert owner.ping.call_one().get(PATIENCE) == "alive"


def test_the_hook_of_a_sync_owner_runs_between_messages(procs: Procs, faults: Any) -> None:
    owner, mesh, receiver = family(procs, SyncOwner, "handle")
    pid = mesh.slice(gpus=1).pid.call_one().get()
    gate, gates = Channel.open()
    owner.hold.call_one(gate)
    go = gates.recv().get(PATIENCE)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):  # here the death is known already
        mesh.slice(gpus=1).pid.call_one().get(PATIENCE)
    go.send(None)
    assert receiver.recv().get(PATIENCE)[0] == "hold ended"
    assert receiver.recv().get(PATIENCE)[0] == "MeshFailure"


def test_the_hook_of_an_async_owner_runs_at_awaits(procs: Procs, faults: Any) -> None:
    owner, mesh, receiver = family(procs, AsyncOwner, "handle")
    pid = mesh.slice(gpus=1).pid.call_one().get()
    gate, gates = Channel.open()
    holding = owner.hold.call_one(gate)
    go = gates.recv().get(PATIENCE)
    os.kill(pid, signal.SIGKILL)
    assert receiver.recv().get(PATIENCE)[0] == "MeshFailure"
    assert not holding.done()
    go.send(None)
    assert receiver.recv().get(PATIENCE)[0] == "hold ended"


@OWNERS
def test_the_hook_is_called_once_for_each_failed_rank(procs: Procs, faults: Any, owner_class: type) -> None:
    owner, mesh, receiver = family(procs, owner_class, "handle")
    for pid in mesh.pid.call().get().values():
        os.kill(pid, signal.SIGKILL)
    told = [receiver.recv().get(PATIENCE)[2] for _ in range(2)]
    assert sorted(told) == [(0,), (1,)]
    assert owner.ping.call_one().get(PATIENCE) == "alive"


@OWNERS
def test_an_owner_can_replace_what_died(procs: Procs, faults: Any, owner_class: type) -> None:
    owner, mesh, receiver = family(procs, owner_class, "handle")
    os.kill(mesh.slice(gpus=0).pid.call_one().get(), signal.SIGKILL)
    receiver.recv().get(PATIENCE)
    again = owner.adopt.call_one(2).get(PATIENCE)
    assert list(again.echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_the_owner_of_procs_is_told_of_their_deaths(procs: Procs, faults: Any) -> None:
    # The owner of the actors handles their end; the procs belong to somebody else, here the root.
    class Guest(Actor):
        @endpoint
        def use(self, world: Any) -> Any:
            return world.spawn("guest", Mortal)

        def __supervise__(self, failure: MeshFailure) -> bool:
            return True

    world = this_host().spawn_procs(per_host={"gpus": 2}, name="world")
    guest = procs(1).spawn("owner", Guest)
    mesh = guest.use.call_one(world).get(PATIENCE)
    with pytest.raises(SupervisionError, match="SystemExit"):
        mesh.slice(gpus=0).die.call_one("sys_exit").get(PATIENCE)
    assert faults.empty()
    os.kill(mesh.slice(gpus=1).pid.call_one().get(), signal.SIGKILL)
    failure = faults.get(timeout=PATIENCE)
    assert (failure.mesh, failure.ranks) == ("world", (1,))


def test_a_stop_is_no_failure(procs: Procs, faults: Any) -> None:
    owner, mesh, receiver = family(procs, SyncOwner, "handle")
    mesh.stop().get(PATIENCE)
    assert owner.ask.call_one(mesh).get(PATIENCE) != "fine"
    assert owner.ping.call_one().get(PATIENCE) == "alive"
    assert faults.empty()
    with pytest.raises(TimeoutError):
        receiver.recv().get(0)


def test_the_replaced_hook_gets_every_fault(procs: Procs, faults: queue.Queue[Any]) -> None:
    first, second = procs(1).spawn("first", Mortal), procs(1).spawn("second", Mortal)
    first.die.broadcast("sys_exit")
    second.die.broadcast("os_exit")
    seen = {failure.mesh: failure for failure in (faults.get(timeout=PATIENCE), faults.get(timeout=PATIENCE))}
    assert set(seen) == {"first", "second"}
    assert isinstance(seen["first"], MeshFailure)
    assert "SystemExit" in seen["first"].report()
    assert "exited with code 3" in seen["second"].report()
    assert procs(1).spawn("third", Basic).echo.call_one(1).get() == 1


def test_an_explicit_abort_tells_where(procs: Procs, faults: Any) -> None:
    mesh = procs(1).spawn("mortal", Mortal)
    mesh.die.broadcast("broadcast_exception")
    report = faults.get(timeout=PATIENCE).report()
    assert "actor explicitly aborted due to: ValueError: nobody asked" in report
    assert "tests/deaths.py" in report
    assert 'raise ValueError("nobody asked")' in report


def test_an_async_owner_that_is_busy_ends_all_the_same(procs: Procs, faults: Any) -> None:
    owner, mesh, _ = family(procs, AsyncOwner, "ignore")
    pid = mesh.slice(gpus=0).pid.call_one().get()
    gate, gates = Channel.open()
    holding = owner.hold.call_one(gate)
    gates.recv().get(PATIENCE)
    os.kill(pid, signal.SIGKILL)
    assert faults.get(timeout=PATIENCE).mesh == "owner"
    with pytest.raises(SupervisionError, match="SIGKILL"):
        holding.get(PATIENCE)


def test_a_failure_during_the_init_of_an_async_owner(procs: Procs, faults: Any) -> None:
    class Early(Actor):
        def __init__(self, port: Any) -> None:
            self.port = port
            mesh = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owned", Mortal)
            try:
                mesh.die.call("sys_exit").get(30)
            except SupervisionError:
                port.send("died")

        @endpoint
        async def ping(self) -> int:
            return 1

        async def __supervise__(self, failure: MeshFailure) -> bool:
            self.port.send(failure.mesh)
            return True

    port, receiver = Channel.open()
    owner = procs(1).spawn("owner", Early, port)
    assert [receiver.recv().get(PATIENCE) for _ in range(2)] == ["died", "owned"]
    assert owner.ping.call_one().get(PATIENCE) == 1
