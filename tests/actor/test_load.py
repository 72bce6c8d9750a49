"""Much at once: many calls in flight, many threads, many actors, large arguments."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import Channel
from tests.actor.actors import PATIENCE, AsyncBasic, Basic
from tests.actor.conftest import Procs
from tests.waiting import patience

MB = 1 << 20


def test_a_thousand_calls_in_flight(four: Any) -> None:
    calls = [four.echo.call(i) for i in range(1000)]
    assert [list(call.get(PATIENCE).values()) for call in calls] == [[i] * 4 for i in range(1000)]


def test_calls_may_be_collected_in_any_order(two: Any) -> None:
    calls = [two.slice(gpus=i % 2).echo.call_one(i) for i in range(200)]
    for i in reversed(range(200)):
        assert calls[i].get(PATIENCE) == i


def test_calls_whose_results_are_dropped(two: Any) -> None:
    for i in range(500):
        two.note.call(i)
    assert list(two.get_notes.call().get(PATIENCE).values()) == [list(range(500))] * 2
    assert not two._system.node.calls or len(two._system.node.calls) < 5


def test_many_threads_call_at_once(procs: Procs) -> None:
    world = procs(3)
    meshes = [world.spawn("sync", Basic), world.spawn("async", AsyncBasic)]
    failures: list[Any] = []

    def work(number: int) -> None:
        for i in range(40):
            mesh = meshes[i % 2]
            value = (number, i)
            try:
                if list(mesh.echo.call(value).get(PATIENCE).values()) != [value] * 3:
                    failures.append(value)
                if mesh.slice(gpus=i % 3).echo.call_one(value).get(PATIENCE) != value:
                    failures.append(value)
                if [e.get(PATIENCE) for e in mesh.echo.stream(value)] != [value] * 3:
                    failures.append(value)
            except Exception as e:
                failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert failures == []


def test_threads_inside_an_actor_call_others(procs: Procs) -> None:
    from monarch_kernel.actor import Actor, endpoint

    class Threads(Actor):
        @endpoint
        def work(self, other: Any, n: int) -> list[int]:
            import threading

            results: list[int] = []

            def ask(i: int) -> None:
                for _ in range(10):
                    results.append(sum(other.echo.call(i).get(30).values()))

            threads = [threading.Thread(target=ask, args=(i,)) for i in range(n)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sorted(results)

    world = procs(2)
    other = world.spawn("other", Basic)
    mesh = world.spawn("threads", Threads)
    assert list(mesh.work.call(other, 4).get(PATIENCE).values()) == [sorted([2 * i for i in range(4)] * 10)] * 2


@pytest.mark.parametrize("cls", [Basic, AsyncBasic])
def test_large_arrays_arrive_intact(procs: Procs, cls: type) -> None:
    mesh = procs(2).spawn("basic", cls)
    array = np.random.default_rng(1).integers(0, 255, 64 * MB, dtype=np.uint8)
    one = mesh.slice(gpus=1)
    assert np.array_equal(one.echo.call_one(array).get(PATIENCE), array)
    mixed = {"a": array[: 8 * MB], "b": array[::2][: 8 * MB], "c": [array[:10], "text"], "d": array.reshape(2, -1).T}
    back = one.echo.call_one(mixed).get(PATIENCE)
    for key in ("a", "b", "d"):
        assert np.array_equal(back[key], mixed[key])
    assert np.array_equal(back["c"][0], array[:10])


def test_large_values_of_every_size_around_the_limits(two: Any) -> None:
    for size in (0, 1, 4095, 4096, 16383, 16384, 32768, 65535, 65536, 65537, 131072, MB - 1, MB, MB + 1, 5 * MB):
        data = np.full(size, size % 251, dtype=np.uint8)
        raw = data.tobytes()
        for value, back in ((data, two.echo.call(data)), (raw, two.echo.call(raw))):
            for got in back.get(PATIENCE).values():
                assert len(got) == size
                assert bytes(got) == bytes(value)


def test_large_messages_in_both_directions_at_once(two: Any) -> None:
    array = np.arange(4 * MB, dtype=np.int32)
    calls = [two.echo.call(array + i) for i in range(6)]
    for i, call in enumerate(calls):
        for got in call.get(PATIENCE).values():
            assert got[0] == i
            assert got[-1] == 4 * MB - 1 + i


def test_received_arrays_can_be_written_to_or_copied(one: Any) -> None:
    array = np.zeros(MB)
    got = one.echo.call_one(array).get(PATIENCE)
    copy = got.copy()
    copy[0] = 1
    assert array[0] == 0


def test_large_values_through_a_port(two: Any) -> None:
    port, receiver = Channel.open()
    array = np.arange(2 * MB)
    port.send(array)
    assert np.array_equal(receiver.recv().get(PATIENCE), array)


def test_many_actor_meshes_on_one_world(procs: Procs) -> None:
    world = procs(2)
    meshes = [world.spawn(f"a{i}", Basic, str(i)) for i in range(40)]
    calls = [mesh.get_tag.call() for mesh in meshes]
    assert [list(call.get(PATIENCE).values()) for call in calls] == [[str(i)] * 2 for i in range(40)]
    for mesh in meshes:
        mesh.stop()
    assert list(world.spawn("last", Basic).echo.call(1).get(PATIENCE).values()) == [1, 1]


def test_meshes_come_and_go(procs: Procs) -> None:
    for i in range(15):
        world = procs(2)
        assert list(world.spawn("basic", Basic).echo.call(i).get(PATIENCE).values()) == [i, i]
        world.stop().get(PATIENCE)


def test_sixteen_ranks(procs: Procs) -> None:
    mesh = procs(hosts=4, gpus=4).spawn("basic", Basic)
    assert [w["coords"] for w in mesh.where.call().get(PATIENCE).values()] == [
        {"hosts": h, "gpus": g} for h in range(4) for g in range(4)
    ]
