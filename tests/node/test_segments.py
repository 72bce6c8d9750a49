"""Large buffers through shared memory: contents, lifetimes, limits, and deaths on either side."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import Actor, SupervisionError, endpoint, this_host
from monarch_kernel.meshes import list_proc_meshes
from monarch_kernel.runtime.actor.process import get_system
from tests.conftest import wait_until

MB = 1 << 20


class Keeper(Actor):
    """Does with arrays what user code may do with them."""

    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def total(self, array: Any) -> int:
        return int(array.sum())

    @endpoint
    def make(self, size: int, value: int) -> Any:
        return np.full(size, value, np.uint8)

    @endpoint
    def overwrite(self, array: Any) -> int:
        array[:] = 9
        return int(array[0])

    @endpoint
    def keep(self, array: Any) -> None:
        self.kept = array

    @endpoint
    def kept_array(self) -> Any:
        return self.kept

    @endpoint
    def kept_total(self) -> int:
        return int(self.kept.sum())


def held() -> dict[int, set[str]]:
    """Our segments that somebody still uses."""
    return {s.number: set(s.holders) for s in get_system().node.segments._all.values() if s.holders}


def all_back() -> None:
    gc.collect()
    wait_until(lambda: not held(), f"all segments have come back: {held()}")


def test_arrays_arrive_whole_and_segments_come_back_and_are_used_again() -> None:
    actor = this_host().spawn_procs().spawn("k", Keeper)
    array = np.arange(MB, dtype=np.uint8)
    want = int(array.sum())
    for _ in range(20):
        assert actor.total.call_one(array).get() == want
    all_back()
    assert len(get_system().node.segments._all) <= 3, "segments are reused, not piled up"


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", "f8", "c16", "?", "M8[s]", "S3"])
def test_arrays_of_any_kind_and_order_arrive_as_they_were(dtype: str) -> None:
    actor = this_host().spawn_procs().spawn("k", Keeper)
    numbers = (np.arange(MB // 2) % 1000).reshape(64, -1).astype(dtype)
    for array in (numbers, np.asfortranarray(numbers), numbers[:, ::2]):
        actor.keep.call_one(array).get()
        back = actor.kept_array.call_one().get()
        assert back.dtype == array.dtype and back.shape == array.shape and (back == array).all()
        assert back.flags.f_contiguous == array.flags.f_contiguous


def test_results_come_through_segments_and_are_writable() -> None:
    actor = this_host().spawn_procs().spawn("k", Keeper)
    first = actor.make.call_one(MB, 3).get()
    second = actor.make.call_one(MB, 4).get()
    assert (first == 3).all() and (second == 4).all()
    first[0] = 77
    assert actor.make.call_one(MB, 5).get()[0] == 5 and first[0] == 77 and second[0] == 4


def test_a_receiver_may_write_into_what_it_got_and_nobody_else_sees_it() -> None:
    actors = this_host().spawn_procs({"gpus": 3}).spawn("k", Keeper)
    array = np.ones(MB, np.uint8)
    assert list(actors.overwrite.call(array).get().values()) == [9, 9, 9]
    assert (array == 1).all()
    assert list(actors.total.call(array).get().values()) == [MB] * 3
    one = actors.slice(gpus=0)
    assert one.overwrite.call_one(array).get() == 9
    assert one.total.call_one(array).get() == MB


def test_what_a_receiver_keeps_is_not_overwritten_by_later_messages() -> None:
    actors = this_host().spawn_procs({"gpus": 2}).spawn("k", Keeper)
    array = np.ones(MB, np.uint8)
    actors.keep.call(array).get()
    array[:] = 2
    for _ in range(5):
        actors.total.call(array).get()
    assert list(actors.kept_total.call().get().values()) == [MB, MB]
    actors.keep.call(None).get()
    all_back()


def test_a_result_that_nobody_reads_gives_its_segment_back() -> None:
    actor = this_host().spawn_procs().spawn("k", Keeper)
    futures = [actor.make.call_one(MB, 1) for _ in range(4)]
    actor.total.call_one(np.ones(1)).get()
    futures.clear()
    gc.collect()

    looker = list_proc_meshes()[-1].spawn("looker", Looker)
    wait_until(lambda: looker.held.call_one().get() == 0, "the rank has all its segments back")


class Looker(Actor):
    """Looks at the segments of its own process."""

    @endpoint
    def held(self) -> int:
        return len(held())


def test_a_receiver_that_is_killed_gives_everything_back() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    actors = procs.spawn("k", Keeper)
    actors.keep.call(np.ones(MB, np.uint8)).get()
    assert len(held()) == 1
    os.kill(procs.pids()[0], signal.SIGKILL)
    with pytest.raises(SupervisionError):
        actors.slice(gpus=0).total.call_one(np.ones(MB, np.uint8)).get()
    actors.slice(gpus=1).keep.call(None).get()
    all_back()


def test_memory_of_an_owner_that_was_killed_stays_readable() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    actors = procs.spawn("k", Keeper)
    result = actors.slice(gpus=0).make.call_one(MB, 6).get()
    os.kill(procs.pids()[0], signal.SIGKILL)
    with pytest.raises(SupervisionError):
        actors.slice(gpus=0).total.call_one(np.ones(1)).get()
    assert (result == 6).all()


def test_beyond_the_limit_buffers_travel_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_system().node.segments, "_limit", 2 * MB)
    actor = this_host().spawn_procs().spawn("k", Keeper)
    array = np.ones(8 * MB, np.uint8)
    assert actor.total.call_one(array).get() == 8 * MB
    assert not get_system().node.segments._all


def test_more_than_is_kept_is_given_up_and_unmapped_by_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_system().node.segments, "_keep", 0)
    actor = this_host().spawn_procs().spawn("k", Keeper)
    for _ in range(3):
        assert actor.total.call_one(np.ones(MB, np.uint8)).get() == MB
    wait_until(lambda: not get_system().node.segments._all, "every segment was given up")


@pytest.mark.torch
def test_tensors_arrive_as_they_were_sent() -> None:
    torch = pytest.importorskip("torch")
    actor = this_host().spawn_procs().spawn("e", Echo)
    base = torch.arange(MB // 4, dtype=torch.float32).view(512, 512)
    tensors = [
        base,
        base.t(),
        base[::2, ::3],
        base.bfloat16(),
        base.clone().requires_grad_(),
        torch.nn.Parameter(base),
        torch.tensor(3.0),
        torch.empty(0),
        base > 5,
        base.to(torch.complex64).conj(),
    ]
    for tensor in tensors:
        back = actor.echo.call_one(tensor).get()
        assert torch.equal(back, tensor)
        assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
        assert type(back) is type(tensor)
    layer = torch.nn.Linear(300, 300)
    assert torch.equal(actor.echo.call_one(layer).get().weight, layer.weight)


class Echo(Actor):
    """Gives back what it gets."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value
