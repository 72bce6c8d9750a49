"""GPU memory: how bytes get into and out of it, and which way is chosen. What needs a GPU is marked ``cuda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.rdma import RDMAAction, RDMABuffer, RDMAError
from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.buffer import _arrived
from monarch_kernel.runtime.transfer.handle import Op, encode_handle
from monarch_kernel.runtime.transfer.memory import Layout, Memory, memory_of
from monarch_kernel.runtime.transfer.service import transfer_service
from tests.transfer.arrays import SHAPES, contents

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# PyTorch has no negative strides, and "fortran" is no view of its base.
FORWARD = [name for name, make in SHAPES.items() if all(s > 0 for s in make()[1].strides) and name != "fortran"]
RANGES = [(0, 240), (0, 1), (7, 100), (33, 207), (100, 140), (239, 1)]


def as_device(name: str) -> tuple[Any, Memory]:
    """One of ``SHAPES``, and its memory as if it were a device's: PyTorch moves the CPU's in the same way."""
    base, view = SHAPES[name]()
    tensor = torch.from_numpy(base.reshape(-1).view("u1"))
    return view, Memory(memory_of(view).layout, tensor, device="cpu")


def address(data: bytearray) -> int:
    return memory_of(data).layout.address


@pytest.mark.parametrize("name", FORWARD)
def test_every_part_of_every_shape(name: str) -> None:
    view, memory = as_device(name)
    wanted = bytearray(contents(view))
    for at, size in RANGES:
        out = bytearray(size)
        device.gather(memory, at, size, address(out))
        assert out == wanted[at : at + size]
        new = bytearray((b + 1) % 256 for b in out)
        device.scatter(memory, at, size, address(new))
        wanted[at : at + size] = new
        assert contents(view) == wanted


@pytest.mark.parametrize("name", FORWARD)
def test_between_two_devices_and_between_one_and_the_cpu(name: str) -> None:
    view, memory = as_device(name)
    for at, size in RANGES:
        other_view, other = as_device("inner block")
        device.move(other, 240 - size, memory, at, size)
        assert contents(other_view)[240 - size :] == contents(view)[at : at + size]
        backwards = SHAPES["backwards"]()[1]
        device.move(memory_of(backwards), 240 - size, memory, at, size)
        assert contents(backwards)[240 - size :] == contents(view)[at : at + size]
        fresh = SHAPES["columns"]()[1]
        device.move(memory, at, memory_of(fresh), 0, size)
        assert contents(view)[at : at + size] == contents(fresh)[:size]


@pytest.mark.parametrize("name", FORWARD)
def test_a_range_is_cut_into_few_layouts(name: str) -> None:
    layout = memory_of(SHAPES[name]()[1]).layout
    for at, size in RANGES:
        found = list(device.parts(layout, at, at + size))
        assert [run for part in found for run in bytewise(part)] == bytewise(layout)[at : at + size]
        assert len(found) <= 2 * len(layout.dims) + 1


def bytewise(layout: Layout) -> list[int]:
    return [address + i for address, length in layout.runs() for i in range(length)]


class Pretender(Actor):
    """Owns memory that passes for a device's."""

    @endpoint
    def register(self, name: str) -> RDMABuffer:
        self.view, memory = as_device(name)
        return _arrived(encode_handle(transfer_service().register(memory)))

    @endpoint
    def contents(self) -> bytes:
        return contents(self.view)

    @endpoint
    def words(self) -> RDMABuffer:
        return RDMABuffer(np.arange(30))


@pytest.fixture
def pretender() -> Any:
    procs = this_host().spawn_procs(per_host={"gpus": 1}, name="owner")
    return procs.spawn("pretender", Pretender)


@pytest.mark.parametrize("backend", ["auto", "segment", "tcp", "tcp in the clear"])
def test_the_owner_moves_device_memory_for_others(backend: str, pretender: Any, forced: Callable[[str], None]) -> None:
    forced(backend)
    for name in ("bytes", "columns", "permuted"):
        buffer = pretender.register.call_one(name).get()
        assert buffer.backend == ("segment" if backend == "auto" else backend.partition(" ")[0])
        before = SHAPES[name]()[1]
        into = bytearray(200)
        buffer.read_into(into, offset=33, size=200).get()
        assert into == contents(before)[33:233]
        buffer.write_from(bytes(200), offset=20).get()
        assert pretender.contents.call_one().get() == contents(before)[:20] + bytes(200) + contents(before)[220:]


def test_atomics_on_device_memory(pretender: Any) -> None:
    buffer = pretender.register.call_one("every other").get()
    assert buffer.fetch_add(5, offset=8).get() == 3
    assert buffer.compare_and_swap(8, -1, offset=8).get() == 8
    assert np.frombuffer(pretender.contents.call_one().get(), "i8")[:3].tolist() == [1, -1, 5]


@pytest.mark.parametrize("backend", ["cma", "segment", "tcp"])
def test_local_device_memory_goes_through_the_cpu(backend: str, pretender: Any, forced: Callable[[str], None]) -> None:
    forced(backend)
    buffer = pretender.words.call_one().get()
    view, memory = as_device("columns")
    transfer_service().transfer([Op(False, buffer._handle, 0, memory, 240)], 60).get()
    assert contents(view) == np.arange(30).tobytes()
    view[...] = 0
    transfer_service().transfer([Op(True, buffer._handle, 0, memory, 120)], 60).get()
    into = np.zeros(30, "i8")
    buffer.read_into(into).get()
    assert into.tolist() == [0] * 15 + list(range(15, 30))


def test_cuda_ipc_is_for_gpu_memory(pretender: Any, forced: Callable[[str], None]) -> None:
    forced("cuda_ipc")
    buffer = pretender.words.call_one().get()
    assert buffer.backend == "none"
    with pytest.raises(RDMAError, match="cuda_ipc: it is not GPU memory"):
        buffer.read_into(bytearray(240)).get()
    if not torch.cuda.is_available():
        with pytest.raises(RDMAError, match="cuda_ipc: this process has not imported torch, or has no CUDA device"):
            pretender.register.call_one("bytes").get().read_into(bytearray(240)).get()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="on meta: only memory of the CPU and of CUDA devices"):
        RDMABuffer(torch.zeros(3, device="meta"))


# -- with a GPU -------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: GPU transfers were not tested")


class GpuKeeper(Actor):
    """Owns GPU memory."""

    @endpoint
    def register(self, n: int, step: int = 1) -> RDMABuffer:
        self.tensor = torch.arange(n * step, device="cuda", dtype=torch.int64)[::step]
        return RDMABuffer(self.tensor)

    @endpoint
    def contents(self) -> Any:
        return self.tensor.cpu()

    @endpoint
    def plain(self, n: int) -> RDMABuffer:
        self.tensor = torch.arange(n, dtype=torch.int64)
        return RDMABuffer(self.tensor)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", ["cuda_ipc", "segment", "tcp"])
@pytest.mark.parametrize("mine", ["cpu", "cuda"])
def test_gpu_memory_of_another_process(backend: str, mine: str, forced: Callable[[str], None]) -> None:
    forced(backend)
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", GpuKeeper)
    torch.zeros(1, device="cuda")
    for step in (1, 3):
        n = (9 << 20) // 8
        buffer = keeper.register.call_one(n, step).get()
        assert buffer.backend == backend
        into = torch.zeros(n, dtype=torch.int64, device=mine)
        buffer.read_into(into).get()
        wanted = torch.arange(n * step)[::step]
        assert torch.equal(into.cpu(), wanted)
        buffer.write_from(into + 1).get()
        assert torch.equal(keeper.contents.call_one().get(), wanted + 1)
        assert buffer.fetch_add(5).get() == 1
        part = torch.zeros(10, dtype=torch.int64, device=mine)
        RDMAAction().read_remote(part, buffer, offset=800, size=80).submit().get()
        assert torch.equal(part.cpu(), wanted[100:110] + 1)
        buffer.drop().get()
        with pytest.raises(RDMAError, match="dropped"):
            buffer.read_into(into).get()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", ["cma", "segment", "tcp"])
def test_gpu_memory_of_this_process(backend: str, forced: Callable[[str], None]) -> None:
    forced(backend)
    keeper = this_host().spawn_procs(per_host={"gpus": 1}, name="owner").spawn("keeper", GpuKeeper)
    buffer = keeper.plain.call_one(1 << 20).get()
    into = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    buffer.read_into(into).get()
    assert torch.equal(into.cpu(), torch.arange(1 << 20))
    buffer.write_from(into * 2).get()
    assert torch.equal(keeper.contents.call_one().get(), torch.arange(1 << 20) * 2)
