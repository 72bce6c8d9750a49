"""The verbs: whom each reaches, what it returns, and in which order."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Extent,
    Future,
    Point,
    ValueMesh,
    as_endpoint,
    endpoint,
    send,
)
from tests.actor.actors import PATIENCE, AsyncBasic, Basic
from tests.actor.conftest import Procs


def test_call_gives_a_value_for_every_rank(four: Any) -> None:
    call = four.add.call(1, b=2, c=3)
    assert isinstance(call, Future)
    result = call.get()
    assert isinstance(result, ValueMesh)
    assert list(result.values()) == [6, 6, 6, 6]
    assert result.extent == Extent(("gpus",), (4,))
    assert len(set(four.pid.call().get().values())) == 4


def test_arrays_that_come_and_go_can_be_written(four: Any) -> None:
    one = four.slice(gpus=0)
    for size in (8, 16_376, 16_384, 40_000, 65_535, 65_536, 400_000, 2_000_000):
        for order in ("C", "F"):
            sent = np.zeros((size // 8, 1), order=order)
            came = one.incremented.call_one({"a": sent, "b": bytearray(size)}).get()
            came["a"] += 1
            came["b"][0] = 9
            assert (came["a"] == 2).all() and came["b"][:2] == b"\x09\x02" and not sent.any()


def test_call_reaches_only_the_slice(procs: Procs) -> None:
    mesh = procs(hosts=2, gpus=2).spawn("basic", Basic)
    part = mesh.slice(hosts=1)
    part.note.call("here").get()
    assert list(mesh.get_notes.call().get().values()) == [[], [], ["here"], ["here"]]
    result = part.where.call().get()
    assert [value["coords"] for value in result.values()] == [{"gpus": 0}, {"gpus": 1}]
    assert result.extent == Extent(("gpus",), (2,))


def test_call_one(four: Any) -> None:
    one = four.slice(gpus=2)
    assert one.where.call_one().get()["spawn_rank"] == 2
    # The slice has no dimensions left, or one of size 1: both are one actor.
    assert four.slice(gpus=slice(1, 2)).echo.call_one(7).get() == 7
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 4"):
        four.echo.call_one(1)


def test_choose_reaches_one_rank_and_all_of_them_in_the_end(two: Any) -> None:
    assert {two.where.choose().get()["message_rank"] for _ in range(40)} == {0, 1}
    for _ in range(10):
        two.note.choose("x").get()
    assert sum(len(notes) for notes in two.get_notes.call().get().values()) == 10


def test_stream_gives_a_future_for_each_rank(four: Any) -> None:
    elements = list(four.where.stream())
    assert len(elements) == 4
    assert all(isinstance(element, Future) for element in elements)
    assert sorted(element.get()["message_rank"] for element in elements) == [0, 1, 2, 3]


def test_stream_is_in_the_order_of_completion(procs: Procs) -> None:
    class Gated(Actor):
        @endpoint
        def work(self, gate: Any) -> int:
            from monarch_kernel.actor import Channel, current_rank

            rank = current_rank().rank
            port, receiver = Channel.open()
            gate.send((rank, port))
            receiver.recv().get(30)
            return rank

    mesh = procs(3).spawn("gated", Gated)
    gate, gates = Channel.open()
    stream = mesh.work.stream(gate)
    ports = dict(gates.recv().get(PATIENCE) for _ in range(3))
    seen = []
    for rank in (2, 0, 1):
        ports[rank].send("go")
        seen.append(next(stream).get(PATIENCE))
    assert seen == [2, 0, 1]
    with pytest.raises(StopIteration):
        next(stream)


def test_stream_raises_only_at_the_element_that_failed(four: Any) -> None:
    good, bad = [], []
    for element in four.boom_at.stream([1, 3]):
        try:
            good.append(element.get())
        except ActorError as e:
            bad.append(e)
    assert sorted(good) == [0, 20]
    assert sorted(e.failures[0].rank for e in bad) == [1, 3]


def test_broadcast_returns_nothing_and_comes_before_the_next_call(four: Any) -> None:
    assert four.note.broadcast("a") is None
    assert list(four.get_notes.call().get().values()) == [["a"]] * 4


def test_200_broadcasts_and_calls_are_in_order(two: Any) -> None:
    expected = []
    for i in range(200):
        two.note.broadcast(i)
        expected.append(i)
        if i % 20 == 7:
            two.note.call(f"call {i}")
            expected.append(f"call {i}")
        if i % 50 == 9:
            two.slice(gpus=0).note.call_one(f"one {i}")
    first, second = two.get_notes.call().get().values()
    assert second == expected
    assert [x for x in first if not str(x).startswith("one")] == expected
    assert first.index("one 9") == first.index(9) + 1


def test_order_holds_for_large_and_small_messages(one: Any) -> None:
    for i in range(20):
        one.note.broadcast((i, bytes(300_000 if i % 3 == 0 else 3)))
    assert [i for i, _ in one.get_notes.call_one().get()] == list(range(20))


def test_order_holds_when_a_message_is_sent_right_after_spawn(procs: Procs) -> None:
    mesh = procs(2).spawn("basic", Basic)
    for i in range(50):
        mesh.note.broadcast(i)
    assert list(mesh.get_notes.call().get().values()) == [list(range(50))] * 2


def test_as_endpoint_calls_an_unmarked_method(procs: Procs) -> None:
    class Plain(Actor):
        def double(self, x: int) -> int:
            return 2 * x

        def answer(self, port: Any, x: int) -> None:
            port.send(x + 1)

        @endpoint
        def marked(self) -> str:
            return "marked"

    mesh = procs(2).spawn("plain", Plain)
    assert list(as_endpoint(mesh.double).call(4).get().values()) == [8, 8]
    assert as_endpoint(mesh.slice(gpus=1).double).call_one(5).get() == 10
    assert list(as_endpoint(mesh.answer, explicit_response_port=True).call(1).get().values()) == [2, 2]
    with pytest.raises(RuntimeError, match="not annotated as an endpoint"):
        mesh.double(4)
    with pytest.raises(RuntimeError, match="not annotated as an endpoint"):
        mesh.double.call(4)
    with pytest.raises(ValueError, match="method of a spawned actor mesh"):
        as_endpoint(Plain.double)


def test_as_endpoint_works_with_async_actors(procs: Procs) -> None:
    class Plain(Actor):
        async def double(self, x: int) -> int:
            return 2 * x

        @endpoint
        async def marked(self) -> str:
            return "marked"

    mesh = procs(1).spawn("plain", Plain)
    assert as_endpoint(mesh.double).call_one(4).get() == 8


def test_send_replies_to_the_port(four: Any) -> None:
    port, receiver = Channel.open_ranked()
    send(four.where, (), {}, port)
    got = dict(receiver.recv().get(PATIENCE) for _ in range(4))
    assert {rank: where["message_rank"] for rank, where in got.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    send(four.add, (1,), {"b": 4}, port, selection="choose")
    assert receiver.recv().get(PATIENCE)[1] == 5
    # Without a port it is a broadcast.
    send(four.note, ("sent",), {})
    assert list(four.get_notes.call().get().values()) == [["sent"]] * 4
    with pytest.raises(ValueError, match="selection must be 'all' or 'choose'"):
        send(four.note, (1,), {}, selection="some")  # type: ignore[arg-type]


def test_send_gives_the_port_the_exception(two: Any) -> None:
    port, receiver = Channel.open()
    send(two.slice(gpus=1).boom, ("sent",), {}, port)
    with pytest.raises(ValueError, match="sent"):
        receiver.recv().get(PATIENCE)
    assert two.slice(gpus=1).echo.call_one("lives").get() == "lives"


def test_accumulator(four: Any) -> None:
    total = Accumulator(four.add, 100, operator.add)
    assert total.accumulate(1, 2).get() == 112
    assert total.accumulate(0, 0).get() == 100  # the identity is not used up
    seen = Accumulator(four.where, frozenset(), lambda acc, w: acc | {w["message_rank"]})
    assert seen.accumulate().get() == {0, 1, 2, 3}
    with pytest.raises(ActorError, match="boom on 2"):
        Accumulator(four.boom_at, 0, operator.add).accumulate([2]).get()


def test_verbs_of_async_actors(procs: Procs) -> None:
    mesh = procs(2).spawn("async", AsyncBasic)
    assert list(mesh.echo.call(1).get().values()) == [1, 1]
    assert mesh.slice(gpus=0).echo.call_one("x").get() == "x"
    assert mesh.echo.choose(3).get() == 3
    assert [element.get() for element in mesh.echo.stream(2)] == [2, 2]
    mesh.step.broadcast("a")
    assert list(mesh.get_notes.call().get().values()) == [["start a", "end a"]] * 2


def test_one_name_for_two_meshes_on_the_same_procs(procs: Procs) -> None:
    world = procs(2)
    first, second = world.spawn("same", Basic, "1"), world.spawn("same", Basic, "2")
    assert list(first.get_tag.call().get().values()) == ["1", "1"]
    assert list(second.get_tag.call().get().values()) == ["2", "2"]


def test_inheritance_of_endpoints(procs: Procs) -> None:
    class Base(Actor):
        def __init__(self, x: int) -> None:
            self.x = x

        @endpoint
        def get(self) -> int:
            return self.x

        @endpoint
        def kind(self) -> str:
            return "base"

    class Derived(Base):
        @endpoint
        def kind(self) -> str:
            return "derived"

        @endpoint
        def both(self) -> tuple[int, str]:
            return self.get(), self.kind()  # inside the actor these are plain methods

    mesh = procs(1).spawn("derived", Derived, x=3)
    assert mesh.get.call_one().get() == 3
    assert mesh.kind.call_one().get() == "derived"
    assert mesh.both.call_one().get() == (3, "derived")


def test_points_are_of_the_slice_and_ranks_of_the_spawn(procs: Procs) -> None:
    mesh = procs(hosts=2, gpus=3).spawn("basic", Basic)
    tail = mesh.slice(gpus=slice(1, 3))
    seen = list(tail.where.call().get().items())
    assert [point.rank for point, _ in seen] == [0, 1, 2, 3]
    assert all(isinstance(point, Point) for point, _ in seen)
    for point, where in seen:
        assert where["message_rank"] == point.rank
        assert where["coords"] == dict(point)
        assert where["size"] == {"hosts": 2, "gpus": 2}
        assert where["spawn_coords"] == {"hosts": point["hosts"], "gpus": point["gpus"] + 1}
        assert where["spawn_rank"] == point["hosts"] * 3 + point["gpus"] + 1
    (flat,) = {tuple(v["size"]) for v in mesh.flatten("all").where.call().get().values()}
    assert flat == ("all",)


def test_choose_gives_the_point_in_the_whole_mesh(four: Any) -> None:
    where = four.where.choose().get()
    assert where["size"] == {"gpus": 4}
    assert where["message_rank"] == where["spawn_rank"]
