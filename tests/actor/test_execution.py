"""How actors run: one message at a time, sync and async, concurrent endpoints, threads, construction, cleanup."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, Channel, SupervisionError, concurrent_endpoint, endpoint
from tests.actor.actors import PATIENCE, AsyncBasic, Basic, Cleaned, Concurrent, MainThread, started
from tests.actor.conftest import Procs
from tests.conftest import wait_until


def test_async_endpoints_do_not_overlap(procs: Procs) -> None:
    mesh = procs(2).spawn("async", AsyncBasic)
    calls = [mesh.step.call(name) for name in "abc"]
    for call in calls:
        call.get()
    expected = [f"{what} {name}" for name in "abc" for what in ("start", "end")]
    assert list(mesh.get_notes.call().get().values()) == [expected, expected]


def test_an_async_actor_keeps_order_over_many_messages(procs: Procs) -> None:
    mesh = procs(1).spawn("async", AsyncBasic)
    for i in range(150):  # more than it handles before it yields
        mesh.step.broadcast(str(i))
    notes = mesh.get_notes.call_one().get()
    assert notes == [f"{what} {i}" for i in range(150) for what in ("start", "end")]


def test_a_sync_actor_has_one_thread_and_no_loop(procs: Procs) -> None:
    class Threads(Actor):
        def __init__(self) -> None:
            self.first = threading.get_ident()

        @endpoint
        def same(self) -> bool:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return self.first == threading.get_ident()
            return False

    mesh = procs(1).spawn("threads", Threads)
    assert [mesh.same.call_one().get() for _ in range(5)] == [True] * 5


def test_an_async_actor_has_its_own_loop(procs: Procs) -> None:
    class Loops(Actor):
        def __init__(self) -> None:
            self.loop: Any = None

        @endpoint
        async def same(self) -> bool:
            loop = asyncio.get_running_loop()
            if self.loop is None:
                self.loop = loop
            return self.loop is loop

        @endpoint
        async def background(self, port: Any) -> None:
            async def later() -> None:
                await asyncio.sleep(0)
                port.send("later")

            self.task = asyncio.create_task(later())

    world = procs(1)
    first, second = world.spawn("loops", Loops), world.spawn("loops", Loops)
    assert [m.same.call_one().get() for m in (first, second, first, second)] == [True] * 4
    # A task that an endpoint left behind goes on when the endpoint has returned.
    port, receiver = Channel.open()
    first.background.call_one(port).get()
    assert receiver.recv().get(PATIENCE) == "later"


def test_actors_of_one_proc_run_side_by_side(procs: Procs) -> None:
    world = procs(1)
    busy = world.spawn("busy", Basic)
    free = world.spawn("free", Basic)
    also = world.spawn("async", AsyncBasic)
    pending = started(busy, "sleep")
    assert free.echo.call_one(1).get(PATIENCE) == 1
    assert also.echo.call_one(2).get(PATIENCE) == 2
    assert not pending.done()
    spinning = started(free, "spin")
    assert also.echo.call_one(3).get(PATIENCE) == 3
    assert not spinning.done()
    world.kill().get(PATIENCE)


def test_only_one_actor_of_a_proc_has_the_main_thread(procs: Procs) -> None:
    world = procs(1)
    assert world.spawn("first", Basic).thread.call_one().get()[1] is True
    assert world.spawn("second", Basic).thread.call_one().get() == ("monarch-actor-driver", False)


def test_main_thread_actors(procs: Procs) -> None:
    world = procs(2)
    other = world.spawn("main", MainThread)
    assert list(other.on_main.call().get().values()) == [True, True]
    # The first actor of a proc has it anyway; one that needs it gets it when it is free again.
    other.stop().get(PATIENCE)
    assert list(world.spawn("main", MainThread).on_main.call().get().values()) == [True, True]


def test_concurrent_endpoints_overlap(procs: Procs) -> None:
    mesh = procs(2).spawn("concurrent", Concurrent)
    waiting = [mesh.wait_open.call() for _ in range(5)]
    wait_until(lambda: list(mesh.count.call().get().values()) == [5, 5], "all five run")
    assert not any(call.done() for call in waiting)
    mesh.open.call().get()
    assert [list(call.get(PATIENCE).values()) for call in waiting] == [[5, 5]] * 5
    assert list(mesh.count.call().get().values()) == [0, 0]


def test_a_concurrent_endpoint_that_raises_fails_its_call_only(procs: Procs) -> None:
    mesh = procs(1).spawn("concurrent", Concurrent)
    waiting = mesh.wait_open.call_one()
    with pytest.raises(ValueError, match="concurrent boom"):
        mesh.boom.call_one().get()
    mesh.open.call_one().get()
    assert waiting.get(PATIENCE) == 1


def test_a_concurrent_endpoint_that_raises_on_an_explicit_port_ends_its_actor(procs: Procs, faults: Any) -> None:
    mesh = procs(1).spawn("concurrent", Concurrent)
    waiting = mesh.wait_open.call_one()
    with pytest.raises(SupervisionError, match="nobody catches this"):
        mesh.boom_port.call_one().get(PATIENCE)
    with pytest.raises(SupervisionError):
        waiting.get(PATIENCE)
    with pytest.raises(SupervisionError):
        mesh.count.call_one().get(PATIENCE)
    assert faults.get(timeout=PATIENCE).mesh == "concurrent"


def test_concurrent_endpoints_are_cancelled_before_cleanup(procs: Procs) -> None:
    class Slow(Actor):
        def __init__(self, port: Any) -> None:
            self.port = port

        @concurrent_endpoint
        async def wait(self, started: Any) -> None:
            started.send(None)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.port.send("cancelled")
                raise

        async def __cleanup__(self, error: BaseException | None) -> None:
            self.port.send("cleanup")

    port, receiver = Channel.open()
    mesh = procs(1).spawn("slow", Slow, port)
    waiting = started(mesh, "wait")
    mesh.stop().get(PATIENCE)
    assert [receiver.recv().get(PATIENCE) for _ in range(2)] == ["cancelled", "cleanup"]
    # What was asked of an actor that stopped in the meantime fails, and does not hang.
    with pytest.raises(SupervisionError, match="stopped"):
        waiting.get(PATIENCE)


def test_concurrent_endpoint_contexts_do_not_mix(procs: Procs) -> None:
    class Where(Actor):
        @concurrent_endpoint
        async def here(self) -> dict[str, int]:
            from monarch_kernel.actor import current_size

            await asyncio.sleep(0)
            return current_size()

    mesh = procs(hosts=2, gpus=2).spawn("where", Where)
    whole, part = mesh.here.call(), mesh.slice(gpus=0).here.call()
    assert list(whole.get().values()) == [{"hosts": 2, "gpus": 2}] * 4
    assert list(part.get().values()) == [{"hosts": 2}] * 2


def test_async_and_sync_endpoints_do_not_mix(procs: Procs) -> None:
    class Mixed(Actor):
        @endpoint
        def a(self) -> None: ...

        @endpoint
        async def b(self) -> None: ...

    class AsyncHook(Actor):
        @endpoint
        def a(self) -> None: ...

        async def __cleanup__(self, error: BaseException | None) -> None: ...

    class AsyncSupervise(Actor):
        @endpoint
        def a(self) -> None: ...

        async def __supervise__(self, failure: Any) -> bool:
            return True

    world = procs(1)
    with pytest.raises(ValueError, match=r"Mixed mixes both async and sync endpoints \(async: b; sync: a\)"):
        world.spawn("mixed", Mixed)
    with pytest.raises(ValueError, match="AsyncHook.__cleanup__ must be def, like the endpoints"):
        world.spawn("hook", AsyncHook)
    with pytest.raises(ValueError, match="AsyncSupervise.__supervise__ must be def"):
        world.spawn("hook", AsyncSupervise)
    assert world.spawn("fine", Basic).echo.call_one(1).get() == 1


def test_concurrent_endpoint_is_for_coroutines() -> None:
    with pytest.raises(ValueError, match="@concurrent_endpoint needs an async def, which 'f' is not"):

        @concurrent_endpoint
        def f(self: Any) -> None: ...

    with pytest.raises(ValueError, match="is already an endpoint"):

        @concurrent_endpoint
        @endpoint
        async def g(self: Any) -> None: ...

    with pytest.raises(ValueError, match="is already an endpoint"):

        @endpoint
        @concurrent_endpoint
        async def h(self: Any) -> None: ...


def test_init_runs_before_the_first_message_and_after_spawn_returned(procs: Procs) -> None:
    class Slow(Actor):
        def __init__(self, gate: Any) -> None:
            from monarch_kernel.actor import Channel

            port, receiver = Channel.open()
            gate.send(port)
            self.word = receiver.recv().get(30)

        @endpoint
        def get(self) -> str:
            return self.word

    gate, gates = Channel.open()
    mesh = procs(1).spawn("slow", Slow, gate)
    call = mesh.get.call_one()
    go = gates.recv().get(PATIENCE)
    assert not call.done()
    assert not mesh.initialized.done()
    go.send("word")
    assert call.get(PATIENCE) == "word"
    assert mesh.initialized.done()
    assert mesh.initialized.get() is None


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_init_that_raises(procs: Procs, faults: Any, ranks: list[int]) -> None:
    class Broken(Actor):
        def __init__(self, ranks: list[int]) -> None:
            from monarch_kernel.actor import context

            if context().actor_instance.rank.rank in ranks:
                raise ValueError("cannot be made")

        @endpoint
        def get(self) -> int:
            return 1

    world = procs(2)
    mesh = world.spawn("broken", Broken, ranks)
    with pytest.raises(SupervisionError, match="cannot be made"):
        mesh.get.call().get(PATIENCE)
    # Unlike Monarch's, our `initialized` tells.
    with pytest.raises(ActorError, match="cannot be made") as caught:
        mesh.initialized.get(PATIENCE)
    assert [failure.rank for failure in caught.value.failures] == ranks
    assert type(caught.value) is ActorError and type(caught.value.exception) is ValueError
    seen = {faults.get(timeout=PATIENCE).ranks for _ in ranks}
    assert seen == {(rank,) for rank in ranks}
    # The procs are as good as before.
    assert list(world.spawn("fine", Basic).echo.call(1).get().values()) == [1, 1]
    for rank in {0, 1} - set(ranks):
        assert mesh.slice(gpus=rank).get.call_one().get() == 1


def test_init_that_exits(procs: Procs, faults: Any) -> None:
    class Exits(Actor):
        def __init__(self) -> None:
            raise SystemExit(3)

        @endpoint
        def get(self) -> int:
            return 1

    world = procs(1)
    with pytest.raises(SupervisionError, match="SystemExit"):
        world.spawn("exits", Exits).get.call_one().get(PATIENCE)
    assert world.spawn("fine", Basic).echo.call_one(1).get() == 1
    assert faults.get(timeout=PATIENCE).mesh == "exits"


def test_cleanup_on_stop(procs: Procs) -> None:
    port, receiver = Channel.open()
    mesh = procs(2).spawn("cleaned", Cleaned, port, "x")
    mesh.ping.call().get()
    mesh.stop("no longer needed").get(PATIENCE)
    # stop() is done when cleanup is.
    assert [receiver.recv().get(PATIENCE) for _ in range(2)] == [("x", None)] * 2
    with pytest.raises(SupervisionError, match="no longer needed"):
        mesh.ping.call().get(PATIENCE)


def test_cleanup_on_fatal_error(procs: Procs, faults: Any) -> None:
    port, receiver = Channel.open()
    mesh = procs(1).spawn("cleaned", Cleaned, port, "x")
    with pytest.raises(SupervisionError, match="SystemExit"):
        mesh.exit.call_one().get(PATIENCE)
    assert receiver.recv().get(PATIENCE) == ("x", "SystemExit")
    assert faults.get(timeout=PATIENCE).mesh == "cleaned"


def test_cleanup_that_raises_affects_no_other_actor(procs: Procs) -> None:
    class Bad(Actor):
        @endpoint
        def get(self) -> int:
            return 1

        def __cleanup__(self, error: BaseException | None) -> None:
            raise ValueError("cleanup failed")

    world = procs(1)
    mesh = world.spawn("bad", Bad)
    assert mesh.get.call_one().get() == 1
    mesh.stop().get(PATIENCE)
    assert world.spawn("fine", Basic).echo.call_one(1).get() == 1


def test_stop_lets_the_current_message_finish(procs: Procs) -> None:
    class Gate(Actor):
        @endpoint
        def work(self, gate: Any) -> str:
            from monarch_kernel.actor import Channel

            port, receiver = Channel.open()
            gate.send(port)
            return receiver.recv().get(30)

        @endpoint
        def late(self) -> int:
            return 1

    gate, gates = Channel.open()
    mesh = procs(1).spawn("gate", Gate)
    call = mesh.work.call_one(gate)
    go = gates.recv().get(PATIENCE)
    stopping = mesh.stop()
    late = mesh.late.call_one()
    assert not stopping.done()
    go.send("finished")
    assert call.get(PATIENCE) == "finished"
    stopping.get(PATIENCE)
    with pytest.raises(SupervisionError, match="stopped"):
        late.get(PATIENCE)


def test_an_actor_that_stops_or_aborts_itself(procs: Procs, faults: Any) -> None:
    class Quits(Actor):
        @endpoint
        def stop(self) -> str:
            raise NotImplementedError

        @endpoint
        def quit(self) -> str:
            from monarch_kernel.actor import context

            context().actor_instance.stop("done here")
            return "bye"

        @endpoint
        def abort(self) -> None:
            from monarch_kernel.actor import context

            context().actor_instance.abort("cannot go on")

    class Quitter(Actor):
        quit = Quits.__dict__["quit"]
        abort = Quits.__dict__["abort"]

    world = procs(1)
    with pytest.raises(ValueError, match="an endpoint cannot be called 'stop'"):
        world.spawn("quits", Quits)
    mesh = world.spawn("quitter", Quitter)
    assert mesh.quit.call_one().get() == "bye"
    with pytest.raises(SupervisionError, match="done here"):
        mesh.quit.call_one().get(PATIENCE)
    assert faults.empty()
    other = world.spawn("quitter", Quitter)
    with pytest.raises(SupervisionError, match="cannot go on"):
        other.abort.call_one().get(PATIENCE)
    assert "cannot go on" in faults.get(timeout=PATIENCE).report()


def test_calling_oneself_is_a_plain_call(procs: Procs) -> None:
    class Self(Actor):
        @endpoint
        def one(self) -> int:
            return 1

        @endpoint
        def two(self) -> int:
            return self.one() + self.one()

    assert procs(1).spawn("self", Self).two.call_one().get() == 2


def test_blocking_inside_a_sync_and_an_async_endpoint(procs: Procs) -> None:
    class Blocking(Actor):
        @endpoint
        def ask(self, other: Any) -> list[int]:
            return list(other.echo.call(3).get().values())

    class AsyncBlocking(Actor):
        @endpoint
        async def ask(self, other: Any) -> list[int]:
            import warnings

            warnings.simplefilter("error")
            return [*other.echo.call(3).get().values(), *(await other.echo.call(4)).values()]

    world = procs(2)
    other = world.spawn("other", Basic)
    assert list(world.spawn("sync", Blocking).ask.call(other).get(PATIENCE).values()) == [[3, 3]] * 2
    assert list(world.spawn("async", AsyncBlocking).ask.call(other).get(PATIENCE).values()) == [[3, 3, 4, 4]] * 2


def test_asking_another_actor_of_the_same_proc(procs: Procs) -> None:
    class Asks(Actor):
        @endpoint
        def ask(self, other: Any) -> int:
            return other.echo.call_one(3).get()

    world = procs(1)
    other = world.spawn("other", AsyncBasic)
    again = world.spawn("again", Basic)
    asks = world.spawn("asks", Asks)
    assert asks.ask.call_one(other).get(PATIENCE) == 3
    assert asks.ask.call_one(again).get(PATIENCE) == 3


def test_the_logger_names_the_actor(procs: Procs) -> None:
    class Logs(Actor):
        @endpoint
        def name(self) -> str:
            return self.logger.name

    assert list(procs(2).spawn("logs", Logs).name.call().get().values()) == [
        "monarch_kernel.actors.logs.0",
        "monarch_kernel.actors.logs.1",
    ]
