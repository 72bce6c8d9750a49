"""`map`, `submit`, `scatter` and `gather` of a proc mesh, on real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, ProcMesh, SupervisionError
from monarch_kernel.pool import Mapping
from monarch_kernel.pool.pool import concatenated, parts
from tests.actor.actors import PATIENCE
from tests.conftest import wait_until

Procs = Callable[..., ProcMesh]


def double(x: int) -> int:
    return 2 * x


def where(_item: Any) -> int:
    return os.getpid()


def passes(item: int, gate: Path) -> int:
    """Item 0 waits until the gate is there."""
    while item == 0 and not gate.exists():
        time.sleep(0.002)
    return item


def fails_at_3(item: int) -> int:
    if item == 3:
        raise LookupError("not this one")
    return item


def dies_once(item: int, mark: Path) -> int:
    if item == 5 and not mark.exists():
        mark.touch()
        os._exit(3)
    return item


def dies_at_5(item: int) -> int:
    if item == 5:
        os._exit(3)
    return item


def spins(item: int, folder: Path) -> None:
    (folder / str(item)).touch()
    while True:
        time.sleep(0.001)


def test_values_come_in_the_order_of_the_items(procs: Procs) -> None:
    mesh = procs(hosts=2, gpus=2)
    assert mesh.map(double, range(50)).get() == [2 * x for x in range(50)]
    assert list(mesh.map(pow, [1, 2, 3], itertools.count())) == [1, 2, 9]
    assert list(mesh.map(double, range(50), chunk=7)) == [2 * x for x in range(50)]
    assert list(mesh.map(double, [])) == []
    offset = 100
    assert list(mesh.map(lambda x: x + offset, range(3))) == [100, 101, 102]
    pids = set(mesh.slice(hosts=1).map(where, range(20)))
    assert pids <= {mesh.slice(hosts=1).pids().get(rank) for rank in range(2)}
    assert asyncio.run(_awaited(mesh)) == ([0, 2, 4], [0, 2, 4])


async def _awaited(mesh: ProcMesh) -> tuple[list[int], list[int]]:
    return await mesh.map(double, range(3)), [value async for value in mesh.map(double, range(3))]


@pytest.mark.parametrize("before", [0, 100])  # after many short ones, each rank has a second item waiting
def test_a_slow_item_holds_up_no_other(procs: Procs, tmp_path: Path, before: int) -> None:
    gate = tmp_path / "gate"
    mesh = procs(3)
    assert mesh.map(double, range(before)).get() == [2 * x for x in range(before)]
    done = mesh.map(passes, range(9), itertools.repeat(gate)).as_completed()
    others = {next(done) for _ in range(8)}
    assert others == {(item, item) for item in range(1, 9)}
    gate.touch()
    assert list(done) == [(0, 0)]


def test_items_are_read_only_so_far_ahead(procs: Procs) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in itertools.count():
            read.append(item)
            yield item

    mapping = procs(2).map(double, items(), ahead=6, chunk=2)
    assert len(read) == 6
    assert [next(mapping) for _ in range(5)] == [0, 2, 4, 6, 8]
    assert len(read) <= 5 + 6 + 1
    mapping.cancel()
    assert mapping.total is None and len(read) <= 5 + 6 + 1


def test_a_failed_item_is_named_and_ends_the_map(procs: Procs) -> None:
    mapping = procs(2).map(fails_at_3, itertools.count(), ahead=4)
    assert [next(mapping) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="not this one") as caught:
        next(mapping)
    assert isinstance(caught.value, ActorError)
    assert caught.value.failures[0].rank in (0, 1)
    text = str(caught.value)
    assert "of 2 (gpus=" in text and "item 3 of the map: 3" in text and "pool_executor.py" not in text
    assert mapping.ended and list(mapping) == []


def test_errors_can_be_values(procs: Procs) -> None:
    values = procs(2).map(fails_at_3, range(6), chunk=3, return_errors=True).get()
    assert values[:3] + values[4:] == [0, 1, 2, 4, 5]
    assert isinstance(values[3], LookupError)
    assert "item 3 of the map: 3" in str(values[3])


def test_items_of_a_rank_that_dies_go_to_others(procs: Procs, tmp_path: Path, faults: Any) -> None:
    mesh = procs(3)
    values = mesh.map(dies_once, range(20), itertools.repeat(tmp_path / "mark")).get()
    assert values == list(range(20))
    assert len(mesh.dead()) == 1


def test_an_item_that_kills_ranks_is_named(procs: Procs, faults: Any) -> None:
    mesh = procs(4)
    with pytest.raises(SupervisionError) as caught:
        mesh.map(dies_at_5, range(20)).get()
    (note,) = caught.value.__notes__
    dead = ",".join(map(str, sorted(mesh.dead())))
    assert len(mesh.dead()) == 2, "it is not given to all ranks, one after the other"
    assert note.endswith("died while they ran item 5 of the map") and f"ranks {dead}" in note.replace("-", ",")
    assert mesh.map(double, range(4)).get() == [0, 2, 4, 6], "the others go on"


def test_where_no_rank_is_left(procs: Procs, faults: Any) -> None:
    mesh = procs(1)
    with pytest.raises(SupervisionError, match="no rank of mesh .* is left for item 5 of the map: rank 0: exited"):
        mesh.map(dies_at_5, range(20)).get()


def test_cancelling_interrupts_what_runs(procs: Procs, tmp_path: Path) -> None:
    mesh = procs(2)
    mapping = mesh.map(spins, range(50), itertools.repeat(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks spin")
    mapping.cancel()
    assert mapping.ended and list(mapping) == []
    assert mesh.map(double, range(4)).get() == [0, 2, 4, 6], "the ranks are free again"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_map_that_is_dropped_does_not_go_on(procs: Procs, tmp_path: Path) -> None:
    mesh = procs(1)
    gate = tmp_path / "gate"
    mapping: Mapping | None = mesh.map(passes, range(20), itertools.repeat(gate))
    assert mapping is not None
    chunks = [chunk.future for chunk in mapping._chunks]
    mapping = None
    gate.touch()
    assert all(future.cancelled() for future in chunks[2:])
    assert mesh.submit(double, 4).get(PATIENCE) == 8


def test_futures(procs: Procs, tmp_path: Path) -> None:
    mesh = procs(2)
    futures = [mesh.submit(pow, 2, exponent, mod=5) for exponent in range(4)]
    done, _ = concurrent.futures.wait(futures, PATIENCE)
    assert done == set(futures)
    assert [future.result() for future in futures] == [1, 2, 4, 3]
    assert {future.rank for future in futures} <= {0, 1}
    with pytest.raises(LookupError) as caught:
        mesh.submit(fails_at_3, 3).get(PATIENCE)
    assert "of 2 (gpus=" in str(caught.value)

    async def wait() -> int:
        return await mesh.submit(double, 21)

    assert asyncio.run(wait()) == 42
    spinning = mesh.submit(spins, 0, tmp_path)
    wait_until(lambda: (tmp_path / "0").exists(), "it runs")
    spinning.interrupt()
    with pytest.raises(ActorError, match="interrupted"):
        spinning.get(PATIENCE)


def test_bad_input_is_refused_at_once(procs: Procs) -> None:
    mesh = procs(1)
    for wrong in (
        lambda: mesh.map(3, []),  # type: ignore[arg-type]
        lambda: mesh.map(double),
        lambda: mesh.map(double, 5),  # type: ignore[arg-type]
        lambda: mesh.submit("no"),  # type: ignore[arg-type]
        lambda: mesh.scatter("x", 5),
        lambda: mesh.scatter("x", {"a": 1}),
        lambda: mesh.map((i for i in range(3)).send, [1]),
    ):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (
        lambda: mesh.map(double, [], chunk=0),
        lambda: mesh.map(double, [], ahead=0),
        lambda: mesh.scatter("no name", []),
    ):
        with pytest.raises(ValueError):
            wrong()


# -- data -----------------------------------------------------------------------------------------


def test_scatter_and_gather(procs: Procs) -> None:
    mesh = procs(hosts=2, gpus=2)
    sizes = mesh.scatter("part", list(range(10)))
    assert list(sizes.values()) == [3, 3, 2, 2] and sizes.extent == mesh.extent
    assert mesh.gather("part") == list(range(10))
    mesh.scatter("part", "ab")
    assert mesh.gather("part") == "ab"
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(21).reshape(7, 3)
    mesh.scatter("rows", rows)
    assert (mesh.gather("rows") == rows).all()
    with pytest.raises(NameError, match="there is no variable 'nothing'"):
        mesh.gather("nothing")


def test_pieces_are_as_equal_as_can_be() -> None:
    for total, count in ((10, 4), (3, 5), (0, 2), (8, 4)):
        cut = parts(total, count)
        assert [item for part in cut for item in range(total)[part]] == list(range(total))
        lengths = [len(range(total)[part]) for part in cut]
        assert max(lengths) - min(lengths) <= 1
    assert concatenated([(1,), (), (2, 3)]) == (1, 2, 3)
    assert concatenated([b"a", b"b"]) == b"ab"
    assert concatenated([range(2), range(2, 4)]) == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="int cannot be joined"):
        concatenated([1, 2])
