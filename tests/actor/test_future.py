"""Future: sync and await, again and again, timeouts, callbacks, and what it refuses."""

from __future__ import annotations

import asyncio
import pickle
import threading
import warnings
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, Channel, Future, endpoint
from tests.actor.actors import PATIENCE, Basic
from tests.actor.conftest import Procs


@pytest.fixture
def gated(procs: Procs) -> Any:
    """An actor whose ``work`` returns when one sends to the port that it hands out."""

    class Gated(Actor):
        @endpoint
        def work(self, gate: Any) -> Any:
            from monarch_kernel.actor import Channel

            port, receiver = Channel.open()
            gate.send(port)
            value = receiver.recv().get(30)
            if value == "fail":
                raise ValueError("as told")
            return value

    mesh = procs(1).spawn("gated", Gated)

    class Call:
        def __init__(self) -> None:
            gate, gates = Channel.open()
            self.future: Future[Any] = mesh.work.call_one(gate)
            self.port = gates.recv().get(PATIENCE)

        def answer(self, value: Any) -> None:
            self.port.send(value)

    return Call


def test_get_result_and_await_are_repeatable(two: Any) -> None:
    future = two.echo.call([1])
    first = future.get()
    assert future.get() is first
    assert future.result() is first
    assert future.exception() is None

    async def again() -> Any:
        assert await future is first
        return await future

    assert asyncio.run(again()) is first
    assert asyncio.run(again()) is first  # also on a loop made later


def test_a_failure_is_repeatable_too(one: Any) -> None:
    future = one.boom.call_one("again")
    for _ in range(2):
        with pytest.raises(ActorError, match="again"):
            future.get()
    error = future.exception()
    assert isinstance(error, ActorError)
    assert future.exception() is error

    async def awaited() -> None:
        with pytest.raises(ValueError, match="again"):
            await future

    asyncio.run(awaited())


def test_timeout_and_the_result_afterwards(gated: Any) -> None:
    call = gated()
    with pytest.raises(TimeoutError, match=r"no answer to gated.work within 0.01 s"):
        call.future.get(timeout=0.01)
    with pytest.raises(TimeoutError):
        call.future.exception(timeout=0)
    assert not call.future.done()
    call.answer("late")
    assert call.future.get(PATIENCE) == "late"
    assert call.future.get(timeout=0) == "late"


def test_a_remote_timeout_error_is_not_taken_for_ours(procs: Procs) -> None:
    class Times(Actor):
        @endpoint
        def out(self) -> None:
            raise TimeoutError("remote")

    future = procs(1).spawn("times", Times).out.call_one()
    with pytest.raises(ActorError, match="remote"):
        future.get(PATIENCE)
    assert future.done()
    error = future.exception(0)
    assert isinstance(error, ActorError)
    assert isinstance(error.exception, TimeoutError)


def test_timeout_names_the_awaited_ranks(procs: Procs) -> None:
    world = procs(3)
    mesh = world.spawn("basic", Basic)
    busy, others = mesh.slice(gpus=1), mesh.slice(gpus=slice(0, 3, 2))
    port, receiver = Channel.open()
    busy.sleep.broadcast(port)
    receiver.recv().get(PATIENCE)
    call = mesh.echo.call(1)
    others.echo.call(1).get()  # the calls are answered in order: these two ranks have answered the first as well
    with pytest.raises(TimeoutError, match="waiting for gpus=1"):
        call.get(timeout=0.01)
    world.kill().get(PATIENCE)


def test_done_and_callbacks(gated: Any) -> None:
    call = gated()
    seen: list[Any] = []
    called = threading.Event()

    def note(future: Future[Any]) -> None:
        seen.append(future.get())
        called.set()

    assert call.future.done() is False
    call.future.add_done_callback(note)
    call.future.add_done_callback(lambda _f: 1 / 0)  # is logged, and harms nobody
    assert not seen
    call.answer("value")
    assert call.future.get(PATIENCE) == "value"
    assert called.wait(PATIENCE)
    assert seen == ["value"]
    assert call.future.done() is True
    call.future.add_done_callback(note)  # done already: at once
    assert seen == ["value", "value"]


def test_callbacks_run_without_a_waiter(gated: Any) -> None:
    call = gated()
    called = threading.Event()
    call.future.add_done_callback(lambda _f: called.set())
    call.answer(1)
    assert called.wait(PATIENCE)


def test_then(one: Any) -> None:
    assert one.echo.call_one(3).then(lambda x: x + 1).get() == 4
    with pytest.raises(ZeroDivisionError):
        one.echo.call_one(3).then(lambda x: x / 0).get()
    with pytest.raises(ActorError, match="boom"):
        one.boom.call_one().then(lambda x: x + 1).get()


def test_get_inside_a_running_loop_is_silent(two: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async def cell() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return list(two.echo.call(1).get().values()), list((await two.echo.call(2)).values())

    assert asyncio.run(cell()) == ([1, 1], [2, 2])
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_await_lets_the_loop_run(gated: Any) -> None:
    call = gated()

    async def main() -> list[str]:
        order: list[str] = []

        async def other() -> None:
            order.append("other ran")
            call.answer("value")

        task = asyncio.create_task(other())
        order.append(await call.future)
        await task
        return order

    assert asyncio.run(main()) == ["other ran", "value"]


def test_many_concurrent_awaits(two: Any) -> None:
    async def main() -> list[Any]:
        return [list(v.values()) for v in await asyncio.gather(*(two.echo.call(i) for i in range(300)))]

    assert asyncio.run(main()) == [[i, i] for i in range(300)]


def test_one_future_awaited_by_many_tasks_and_threads(gated: Any) -> None:
    call = gated()
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(call.future.get(PATIENCE))) for _ in range(4)]
    for thread in threads:
        thread.start()

    async def wait() -> Any:
        return await call.future

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(wait()) for _ in range(4)]
        await asyncio.sleep(0)
        call.answer("value")
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["value"] * 4
    for thread in threads:
        thread.join(PATIENCE)
    assert results == ["value"] * 4


def test_a_cancelled_await_leaves_the_result_to_others(gated: Any) -> None:
    call = gated()

    async def main() -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call.future, 0.01)
        call.answer("value")
        return await call.future

    assert asyncio.run(main()) == "value"


def test_as_asyncio(one: Any) -> None:
    async def main() -> None:
        future = one.echo.call_one(5).as_asyncio()
        assert asyncio.isfuture(future)
        done, _ = await asyncio.wait([future, one.boom.call_one().as_asyncio()])
        assert sorted(f.exception() is None for f in done) == [False, True]
        assert future.result() == 5

    asyncio.run(main())


def test_stream_elements_can_be_awaited(two: Any) -> None:
    async def main() -> list[Any]:
        return [await element for element in two.echo.stream(3)]

    assert asyncio.run(main()) == [3, 3]


def test_futures_are_not_pickled(one: Any) -> None:
    future = one.echo.call_one(1)
    with pytest.raises(TypeError, match="a Future cannot be pickled"):
        pickle.dumps(future)
    with pytest.raises(TypeError, match=r"an argument of basic.echo cannot be pickled: a Future cannot be pickled"):
        one.echo.call_one(future)
    with pytest.raises(TypeError, match="an endpoint cannot be pickled: send the actor mesh"):
        one.echo.call_one(one.echo)
    assert future.get() == 1


def test_repr_tells_the_state(gated: Any, one: Any) -> None:
    call = gated()
    assert repr(call.future) == "<Future gated.work pending>"
    call.answer(1)
    call.future.get(PATIENCE)
    assert repr(call.future) == "<Future gated.work done>"
    failed = one.boom.call_one()
    failed.exception()
    assert repr(failed) == "<Future basic.boom failed>"


def test_waiting_inside_a_callback_says_why_it_cannot_work(gated: Any, one: Any) -> None:
    call = gated()
    caught: list[BaseException | None] = []
    called = threading.Event()

    def ask(_future: Future[Any]) -> None:
        try:
            one.echo.call_one(1).get(PATIENCE)
            caught.append(None)
        except RuntimeError as e:
            caught.append(e)
        called.set()

    call.future.add_done_callback(ask)
    call.answer(1)
    assert called.wait(PATIENCE)
    (error,) = caught
    assert error is None or "inside the delivery of a message" in str(error)
