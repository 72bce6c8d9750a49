"""Ports and channels, and endpoints that answer through a port of their own."""

from __future__ import annotations

import asyncio
import gc
import pickle
import typing
import weakref
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    Future,
    Port,
    PortReceiver,
    SupervisionError,
    ValueMesh,
    current_rank,
    endpoint,
)
from tests.actor.actors import PATIENCE, Basic, Parent
from tests.actor.conftest import Procs
from tests.conftest import wait_until


class Answers(Actor):
    """Answers through explicit ports, in every way one can."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint(explicit_response_port=True)
    def plain(self, port: Port[int], x: int, y: int = 1) -> None:
        port.send(x + y)

    @endpoint(explicit_response_port=True)
    def politely(self, port: Port[int]) -> None:
        port.exception(ValueError("politely"))

    @endpoint(explicit_response_port=True)
    def twice(self, port: Port[int]) -> None:
        port.send(1)
        port.send(2)

    @endpoint(explicit_response_port=True)
    def raises(self, port: Port[int]) -> None:
        raise ValueError("on an explicit port")

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[int]) -> None:
        self.kept.append(port)

    @endpoint
    def release(self, value: Any) -> None:
        for port in self.kept:
            port.send(value)
        self.kept.clear()

    @endpoint(explicit_response_port=True)
    def hand_over(self, port: Port[int], other: Any, value: Any) -> None:
        other.forward.broadcast(port, value)

    @endpoint
    def tell_rank(self, port: Port[int]) -> None:
        port.send(current_rank().rank * 10)

    @endpoint
    def tell(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def fail(self, port: Port[Any]) -> None:
        port.exception(KeyError("sent"))

    @endpoint
    def opened_here(self) -> Any:
        port, self.receiver = Channel.open()
        return port

    @endpoint
    def received(self) -> Any:
        return self.receiver.recv().get(PATIENCE)


class AsyncAnswers(Actor):
    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[int]) -> None:
        async def answer() -> None:
            await asyncio.sleep(0)
            port.send(5)

        self.task = asyncio.create_task(answer())

    @endpoint
    async def receive(self, port: Any) -> Any:
        mine, receiver = Channel.open()
        port.send(mine)
        return await receiver.recv()


@pytest.fixture
def answers(procs: Procs) -> Any:
    return procs(2).spawn("answers", Answers)


def test_a_channel_in_one_process() -> None:
    port, receiver = Channel.open()
    assert isinstance(port, Port)
    assert isinstance(receiver, PortReceiver)
    waiting = receiver.recv()
    assert not waiting.done()
    port.send(1)
    port.send([2])
    assert waiting.get(PATIENCE) == 1
    assert receiver.recv().get(PATIENCE) == [2]


def test_values_come_in_order(answers: Any) -> None:
    port, receiver = Channel.open()
    answers.slice(gpus=0).tell.call_one(port, list(range(100))).get()
    assert [receiver.recv().get(PATIENCE) for _ in range(100)] == list(range(100))


def test_a_port_can_be_used_by_many(answers: Any) -> None:
    port, receiver = Channel.open()
    answers.tell_rank.call(port)
    assert sorted(receiver.recv().get(PATIENCE) for _ in range(2)) == [0, 10]


def test_recv_raises_the_exception_that_was_sent(answers: Any) -> None:
    port, receiver = Channel.open()
    answers.slice(gpus=0).fail.call_one(port).get()
    with pytest.raises(KeyError, match="sent") as caught:
        receiver.recv().get(PATIENCE)
    assert type(caught.value) is KeyError
    port.send("still open")
    assert receiver.recv().get(PATIENCE) == "still open"


def test_once(answers: Any) -> None:
    port, receiver = Channel.open(once=True)
    port.send(1)
    assert receiver.recv().get(PATIENCE) == 1


def test_ranked(answers: Any) -> None:
    from monarch_kernel.actor import send

    port, receiver = Channel.open_ranked()
    send(answers.plain, (1,), {}, port)
    assert dict(receiver.recv().get(PATIENCE) for _ in range(2)) == {0: 2, 1: 2}
    port, plain = Channel.open()
    ranked = plain.ranked()
    send(answers.plain, (2,), {}, port)
    assert dict(ranked.recv().get(PATIENCE) for _ in range(2)) == {0: 3, 1: 3}


def test_recv_can_be_awaited(answers: Any) -> None:
    async def main() -> list[Any]:
        port, receiver = Channel.open()
        answers.tell_rank.broadcast(port)
        return sorted([await receiver.recv(), await receiver.recv()])

    assert asyncio.run(main()) == [0, 10]


def test_ports_into_actors(answers: Any, procs: Procs) -> None:
    port = answers.slice(gpus=1).opened_here.call_one().get()
    port.send({"from": "client"})
    assert answers.slice(gpus=1).received.call_one().get(PATIENCE) == {"from": "client"}
    # And an async actor that waits for its port without blocking its loop.
    mesh = procs(1).spawn("async", AsyncAnswers)
    gate, gates = Channel.open()
    call = mesh.receive.call_one(gate)
    gates.recv().get(PATIENCE).send("x")
    assert call.get(PATIENCE) == "x"


def test_receivers_stay_where_they_are(answers: Any) -> None:
    port, receiver = Channel.open()
    with pytest.raises(TypeError, match="a PortReceiver cannot be pickled: send the Port"):
        pickle.dumps(receiver)
    with pytest.raises(TypeError, match="a PortReceiver cannot be pickled"):
        answers.tell_rank.call(receiver)
    again = pickle.loads(pickle.dumps(port))
    again.send(3)
    assert receiver.recv().get(PATIENCE) == 3


def test_a_value_that_cannot_be_pickled_raises_at_the_sender() -> None:
    port, receiver = Channel.open()
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        port.send(x for x in "abc")
    port.send(1)
    assert receiver.recv().get(PATIENCE) == 1


def test_sending_to_a_process_that_is_gone_tells(answers: Any, procs: Procs) -> None:
    port = answers.slice(gpus=0).opened_here.call_one().get()
    world = next(iter(answers._system.proc_meshes.values()))
    world.stop().get(PATIENCE)
    with pytest.raises(ConnectionError, match="process that holds this port's receiver is gone"):
        port.send(1)
    port.return_undeliverable = False
    port.send(1)


def test_explicit_response_port(answers: Any) -> None:
    assert list(answers.plain.call(1).get().values()) == [2, 2]
    assert answers.slice(gpus=1).plain.call_one(1, y=4).get() == 5
    assert answers.plain.choose(3).get() == 4
    assert [element.get() for element in answers.plain.stream(1)] == [2, 2]
    with pytest.raises(TypeError, match="too many positional arguments"):
        answers.plain.call(1, 2, 3)


def test_port_exception_fails_the_call_and_not_the_actor(answers: Any) -> None:
    with pytest.raises(ActorError, match="politely") as caught:
        answers.politely.call().get(PATIENCE)
    assert isinstance(caught.value.exception, ValueError)
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert list(answers.plain.call(1).get().values()) == [2, 2]


def test_an_answer_in_a_later_message(answers: Any) -> None:
    calls = [answers.keep.call() for _ in range(3)]
    answers.release.call("now").get()
    assert [list(call.get(PATIENCE).values()) for call in calls] == [["now", "now"]] * 3


def test_an_answer_from_a_task(procs: Procs) -> None:
    assert procs(1).spawn("async", AsyncAnswers).later.call_one().get(PATIENCE) == 5


def test_an_answer_by_another_actor(answers: Any, procs: Procs) -> None:
    other = procs(1).spawn("other", Parent)
    assert list(answers.hand_over.call(other, "from other").get(PATIENCE).values()) == ["from other"] * 2


def test_a_second_answer_ends_the_actor(answers: Any, faults: Any) -> None:
    # The first one is good.
    assert answers.slice(gpus=0).twice.call_one().get(PATIENCE) == 1
    failure = faults.get(timeout=PATIENCE)
    assert failure.ranks == (0,)
    assert "already sent" in failure.report()
    with pytest.raises(SupervisionError, match="actor explicitly aborted due to: .*already sent"):
        answers.slice(gpus=0).plain.call_one(1).get(PATIENCE)
    assert answers.slice(gpus=1).plain.call_one(1).get(PATIENCE) == 2


def test_raising_on_an_explicit_port_ends_the_actor(answers: Any, faults: Any) -> None:
    with pytest.raises(SupervisionError, match="actor explicitly aborted due to: .*on an explicit port"):
        answers.raises.call().get(PATIENCE)
    assert {faults.get(timeout=PATIENCE).ranks for _ in range(2)} == {(0,), (1,)}


def test_a_broadcast_to_an_explicit_port_has_no_answer(answers: Any) -> None:
    answers.plain.broadcast(1)
    assert list(answers.plain.call(1).get().values()) == [2, 2]


def test_dropped_receivers_leave_nothing_behind(two: Any) -> None:
    node = two._system.node
    two.echo.call(1).get()
    before = len(node.calls)
    for _ in range(50):
        port, receiver = Channel.open()
        port.send(1)
        receiver.recv().get()
        del port, receiver
    assert len(node.calls) == before


def test_basic_receive_timeout(two: Any) -> None:
    _port, receiver = Channel.open()
    with pytest.raises(TimeoutError, match=r"no answer to recv\(\) within 0.01 s"):
        receiver.recv().get(0.01)


def test_a_timed_out_recv_does_not_swallow_the_next_value(one: Any) -> None:
    port, receiver = Channel.open()
    late = receiver.recv()
    with pytest.raises(TimeoutError):
        late.get(0.01)
    port.send(1)
    # The future that was given first gets it: nothing is lost.
    assert late.get(PATIENCE) == 1


def test_ports_are_shared_by_actors_of_one_proc(procs: Procs) -> None:
    world = procs(1)
    mesh, other = world.spawn("a", Answers), world.spawn("b", Parent)
    port = mesh.opened_here.call_one().get()
    other.forward.call_one(port, "neighbour").get()
    assert mesh.received.call_one().get(PATIENCE) == "neighbour"
    assert world.spawn("c", Basic).echo.call_one(1).get() == 1


def test_an_actor_that_ends_fails_what_it_has_not_answered(answers: Any, faults: Any, procs: Procs) -> None:
    stopped, aborted = answers.slice(gpus=0), answers.slice(gpus=1)
    calls = [stopped.keep.call_one(), aborted.keep.call_one()]
    other = procs(1).spawn("other", Parent)
    handed_on = aborted.hand_over.call_one(other, "answered by another")
    assert handed_on.get(PATIENCE) == "answered by another"
    stopped.stop("enough").get(PATIENCE)
    with pytest.raises(SupervisionError, match="enough"):
        calls[0].get(PATIENCE)
    with pytest.raises(SupervisionError):
        aborted.raises.call_one().get(PATIENCE)
    with pytest.raises(SupervisionError, match="on an explicit port"):
        calls[1].get(PATIENCE)


def test_an_answer_that_cannot_be_pickled_can_be_replaced(procs: Procs) -> None:
    class Tries(Actor):
        @endpoint(explicit_response_port=True)
        def work(self, port: Any) -> None:
            try:
                port.send(x for x in "abc")
            except TypeError:
                port.send("a better answer")

    assert procs(1).spawn("tries", Tries).work.call_one().get(PATIENCE) == "a better answer"


def test_values_go_to_futures_in_the_order_of_their_first_wait() -> None:
    port, receiver = Channel.open()
    first, second, dropped = receiver.recv(), receiver.recv(), receiver.recv()
    del dropped  # and takes nothing
    for value in range(3):
        port.send(value)
    wait_until(first.done, "the values are here")
    assert [second.get(PATIENCE), first.get(PATIENCE), second.get(PATIENCE)] == [0, 1, 0]
    assert receiver.recv().get(PATIENCE) == 2


def test_a_future_that_waited_is_served_before_later_ones() -> None:
    port, receiver = Channel.open()
    first, second = receiver.recv(), receiver.recv()
    with pytest.raises(TimeoutError):
        first.get(0)
    thrown_away = receiver.recv()
    with pytest.raises(TimeoutError):
        thrown_away.get(0)
    del thrown_away
    called: list[Any] = []
    receiver.recv().add_done_callback(lambda future: called.append(future.get()))  # nothing else holds it
    for value in "abc":
        port.send(value)
    assert [second.get(PATIENCE), first.get(PATIENCE), called] == ["c", "a", ["b"]]


def test_a_task_that_awaits_is_not_collected() -> None:
    port, receiver = Channel.open()

    async def main() -> list[Any]:
        got: list[Any] = []
        here = asyncio.Event()

        async def listen() -> None:
            got.append(await receiver.recv())
            here.set()

        asyncio.get_running_loop().create_task(listen())
        await asyncio.sleep(0)
        gc.collect()
        port.send("a")
        await asyncio.wait_for(here.wait(), PATIENCE)
        return got

    assert asyncio.run(main()) == ["a"]
    assert not receiver._inlet.held  # type: ignore[attr-defined]


def test_a_port_of_one_value() -> None:
    port, receiver = Channel.open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match="a single value"):
        port.send(2)
    assert receiver.recv().get(PATIENCE) == 1
    with pytest.raises(ValueError, match="already used"):
        receiver.recv()


def test_a_callback_is_called_although_nothing_else_holds_its_future() -> None:
    port, receiver = Channel.open()
    called: list[Any] = []
    receiver.recv().add_done_callback(lambda future: called.append(future.get()))
    dropped = weakref.ref(receiver)
    del receiver
    gc.collect()
    port.send("a")
    assert called == ["a"]
    gc.collect()
    assert dropped() is None


def test_an_await_that_is_cancelled_takes_nothing() -> None:
    port, receiver = Channel.open()

    async def main() -> list[Any]:
        kept = receiver.recv()
        for awaited in (kept, receiver.recv()):
            task = asyncio.ensure_future(awaited.as_asyncio())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task, awaited
        port.send("a")
        port.send("b")
        return [await receiver.recv(), await kept]

    assert asyncio.run(main()) == ["a", "b"]


def test_an_unread_value_goes_to_the_next_future() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    with pytest.raises(TimeoutError):
        future.get(0)
    port.send("a")
    port.send("b")
    wait_until(future.done, "it has got its value")
    del future
    assert [receiver.recv().get(PATIENCE), receiver.recv().get(PATIENCE)] == ["a", "b"]


def test_types_in_annotations() -> None:
    def function(values: ValueMesh[int], port: Port[int], error: ActorError) -> Future[int]: ...

    hints = typing.get_type_hints(function)
    assert hints["values"] is ValueMesh
    assert hints["port"] is Port
    assert hints["error"] is ActorError
    assert hints["return"] is Future[int]
