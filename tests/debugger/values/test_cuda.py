"""Tensors on a CUDA device: read there, to the same digests as on the CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from monarch_kernel.debugger.rank.values.blocks import BLOCK_BYTES, Deadline
from monarch_kernel.debugger.rank.values.probe import sendable
from monarch_kernel.debugger.rank.values.reduce import Parts

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

from monarch_kernel.debugger.rank.values.tensors import TensorArray  # noqa: E402


def read(tensor: Any) -> TensorArray:
    array = TensorArray(tensor)
    array.read(Deadline(60))
    return array


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64], ids=str)
def test_a_digest_is_the_same_on_every_device(kind: Any) -> None:
    tensor = torch.arange(150 * BLOCK_BYTES // 4 + 13).remainder(251).to(kind)
    tensor = tensor.view(-1, 1).expand(-1, 3)[:, 1]
    there, here = read(tensor.cuda()), read(tensor)
    assert there.digests == here.digests
    assert there.stats is not None
    assert here.stats is not None
    assert there.stats.norm == pytest.approx(here.stats.norm, rel=1e-4)
    assert (there.stats.low, there.stats.high) == (here.stats.low, here.stats.high)


def test_elements_are_compared_across_devices() -> None:
    tensor = torch.randn(100_000)
    other = tensor.cuda()
    other[70_000] = float("nan")
    here, there = read(tensor), read(other)
    found = there.contrast(here.block, here.piece(here.block, 100_000 - here.block))
    assert (found.index, found.ours, found.count) == ((70_000,), "nan", 1)
    assert there.stats is not None
    assert there.stats.nans == 1
    assert there.facts() == "float32 [100000], cuda"


def test_a_device_that_does_not_get_ready_is_not_waited_for() -> None:
    tensor = torch.ones(1000, device="cuda")
    read(tensor)
    torch.cuda._sleep(20_000_000_000)  # cycles on the default stream, as a collective that waits for another rank
    started = time.monotonic()
    array = read(tensor)
    assert array.unsettled
    assert not torch.cuda.default_stream().query()
    assert time.monotonic() - started < 5
    assert "still computing" in Parts([tensor], Deadline(60)).reading().sampled
    torch.cuda.synchronize()


def test_what_is_sent_is_on_the_cpu() -> None:
    module = torch.nn.Linear(3, 4, device="cuda")
    sent = sendable({"net": module, "x": torch.ones(3, device="cuda")})
    assert sent["x"].device.type == "cpu"
    assert sent["net"].weight.device.type == "cpu"
    assert module.weight.is_cuda
