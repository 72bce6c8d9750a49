"""Memory of a GPU: buffers, arguments and results, and that it is given back."""

from __future__ import annotations

import os
import signal
import struct
from typing import Any

from monarch_kernel.actor import this_host
from monarch_kernel.rdma import RDMABuffer
from tests.gpu import MIB, Runner, Skipped, card_pids, card_used, check, close, device, equal, has_gpu, until

#: What a process may hold on the card beside its tensors and its context, and what the driver itself may do (bytes).
SLACK = 64 * MIB


def register(runner: Runner, shape: tuple[int, ...]) -> RDMABuffer:
    """On a rank: a buffer of a tensor on the GPU, whose element i is i."""
    import torch

    size = 1
    for n in shape:
        size *= n
    runner.kept = torch.arange(size, dtype=torch.float32, device="cuda").view(shape)
    return RDMABuffer(runner.kept)


def register_columns(runner: Runner) -> RDMABuffer:
    """On a rank: a buffer of every second column of its tensor."""
    return RDMABuffer(runner.kept[:, ::2])


def value(runner: Runner) -> Any:
    """On a rank: its tensor, on the CPU."""
    return runner.kept.cpu()


def forget(runner: Runner) -> int:
    """On a rank: let go of its tensor; returns what torch still holds on the card (bytes)."""
    import gc

    import torch

    runner.kept = None
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@check(alone=True)
def rdma_buffers() -> str:
    """Another process reads and writes a tensor by CUDA IPC, from its GPU memory and its CPU memory."""
    import torch

    owner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Runner)
    into = torch.zeros(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    owner.run.call_one(_touch).get()
    before = card_used()
    buffer: RDMABuffer = owner.with_self.call_one(register, (1024, 1024)).get()
    equal(buffer.size(), 4 * MIB)
    wanted = torch.arange(MIB, dtype=torch.float32).view(1024, 1024)
    buffer.read_into(into).get()
    close(into, wanted, 0)
    equal(buffer.backend, "cuda_ipc")
    on_cpu = torch.zeros(1024, 1024)
    buffer.read_into(on_cpu).get()
    close(on_cpu, wanted, 0)
    part = torch.zeros(1000)
    buffer.read_into(part, offset=4 * 4096, size=4000).get()
    close(part, torch.arange(4096, 5096, dtype=torch.float32), 0)
    # Work that was queued on the source when it was passed comes first.
    into.fill_(0)
    torch.cuda._sleep(50_000_000)
    into.add_(7)
    buffer.write_from(into).get()
    close(owner.with_self.call_one(value).get(), torch.full((1024, 1024), 7.0), 0)
    columns: RDMABuffer = owner.with_self.call_one(register_columns).get()
    columns.write_from(torch.arange(1024 * 512, dtype=torch.float32).view(1024, 512)).get()
    got = owner.with_self.call_one(value).get()
    close(got[:, ::2], torch.arange(1024 * 512, dtype=torch.float32).view(1024, 512), 0)
    close(got[:, 1::2], torch.full((1024, 512), 7.0), 0)
    # Two elements in one word: 0 and 7.
    equal(buffer.fetch_add(0, offset=0).get(), struct.unpack("<q", struct.pack("<ff", 0.0, 7.0))[0])
    # What is dropped gives its memory back, though it was mapped here.
    big: RDMABuffer = owner.with_self.call_one(register, (256 * MIB // 4,)).get()
    tail = torch.zeros(16, device="cuda")
    big.read_into(tail, offset=0, size=64).get()
    close(tail, torch.arange(16, dtype=torch.float32), 0)
    held = card_used() - before
    assert held >= 256 * MIB, f"{held} bytes more are in use"
    for each in (big, columns, buffer):
        each.drop().get()
    until(lambda: owner.with_self.call_one(forget).get() == 0, "the owner's memory is free")
    until(lambda: card_used() - before < SLACK, f"{card_used() - before} bytes of the card are given back")
    return f"{held / MIB:.0f} MiB held, {(card_used() - before) / MIB:.0f} MiB after the drop"


def _touch() -> None:
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()


def read_there(buffer: RDMABuffer, write: bool) -> tuple[str, float, bool]:
    """On a rank: backend, sum of the first 1,000 elements, and whether this process has a GPU."""
    import torch

    here = torch.zeros(1000)
    buffer.read_into(here, size=4000).get()
    if write:
        buffer.write_from(here + 1).get()
    return buffer.backend, float(here.sum()), torch.cuda.is_available()


@check()
def rdma_staged() -> str:
    """A process without a GPU reads and writes GPU memory, through the owner; expandable segments work, too."""
    owners = this_host().spawn_procs(
        per_host={"gpus": 1}, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, preload=("torch",)
    )
    owner = owners.spawn("owner", Runner)
    blind = this_host().spawn_procs(per_host={"gpus": 1}, env={"CUDA_VISIBLE_DEVICES": ""}).spawn("blind", Runner)
    seeing = this_host().spawn_procs(per_host={"gpus": 1}).spawn("seeing", Runner)
    buffer: RDMABuffer = owner.with_self.call_one(register, (3 * MIB,)).get()
    equal(blind.run.call_one(read_there, buffer, True).get(), ("segment", 499500.0, False))
    seeing.run.call_one(_touch).get()
    backend, total, sees = seeing.run.call_one(read_there, buffer, False).get()
    equal((total, sees), (500500.0, True))
    close(owner.with_self.call_one(value).get()[:1000].sum(), _tensor(500500.0), 0)
    return f"expandable segments go by {backend}"


def _tensor(number: float) -> Any:
    import torch

    return torch.tensor(number)


@check(cpu=True)
def arguments_and_results() -> str:
    """Tensors of a GPU as arguments and results of endpoints, small and large, also to a process without a GPU."""
    import torch

    procs = this_host().spawn_procs(per_host={"gpus": 2})
    actors = procs.spawn("actors", Runner)
    for size in (3, 300_000):
        sent = torch.arange(size, dtype=torch.float32, device=device())
        got = actors.run.call(_doubled, {"x": sent, "rows": sent.view(-1, 3)[:, 1]}).get()
        for _point, (x, rows, kind) in got.items():
            equal((x.device.type, kind), (device(), device()))
            close(x, 2 * torch.arange(size, dtype=torch.float32), 0)
            close(rows, torch.arange(size).view(-1, 3)[:, 1].float(), 0)
    blind = this_host().spawn_procs(per_host={"gpus": 1}, env={"CUDA_VISIBLE_DEVICES": ""}).spawn("blind", Runner)
    x, _rows, kind = blind.run.call_one(_doubled, {"x": sent, "rows": sent}).get()
    equal((x.device.type, kind), ("cpu", "cpu"))
    weight = actors.slice(gpus=1).run.call_one(_parameter, device()).get()
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    equal(weight.device.type, device())
    return "a process without a GPU gets them on the CPU"


def _doubled(given: dict[str, Any]) -> tuple[Any, Any, str]:
    return given["x"] * 2, given["rows"], given["x"].device.type


def _parameter(kind: str) -> Any:
    import torch

    return torch.nn.Parameter(torch.ones(3, device=kind))


def fill(kind: str) -> int:
    """On a rank: take all memory of the card, which must fail."""
    import torch

    held = []
    while True:
        held.append(torch.empty(4 << 30, dtype=torch.uint8, device=kind))


@check(deadline=60, alone=True)
def out_of_memory() -> str:
    """Out of memory on a rank is an error of that rank with the state of the card, and the mesh lives."""
    from monarch_kernel.errors import ActorError

    actors = this_host().spawn_procs(per_host={"gpus": 2}).spawn("actors", Runner)
    actors.run.call(_touch).get()
    before = card_used()
    pid = actors.slice(gpus=1).run.call_one(os.getpid).get()
    try:
        actors.slice(gpus=1).run.call_one(fill, "cuda").get()
    except ActorError as e:
        text = str(e)
        assert "OutOfMemoryError" in text and "total capacity" in text and f"pid {pid}" in text, text
    else:
        raise AssertionError("the card was never full")
    equal([each for _, each in actors.run.call(_sum, 5).get().items()], [10.0, 10.0])
    actors.run.call(_empty).get()
    until(lambda: card_used() - before < SLACK, "the memory that it held is free")
    return f"{text.count('GiB')} sizes in the error"


def _sum(count: int) -> float:
    import torch

    return float(torch.arange(count, device=device()).sum())


def _empty() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def hold(runner: Runner, kind: str, size: int) -> int:
    """On a rank: hold so many bytes on the card; returns the pid."""
    import torch

    runner.kept = torch.ones(size, dtype=torch.uint8, device=kind)
    if kind == "cuda":
        torch.cuda.synchronize()
    return os.getpid()


@check(cpu=True, alone=True)
def killed_rank() -> str:
    """A killed rank gives its memory back, and is healed; its successor has the card."""
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    actors = procs.spawn("actors", Runner)
    pids = [pid for _, pid in actors.with_self.call(hold, device(), 512 * MIB if has_gpu() else MIB).get().items()]
    used = card_used() if has_gpu() else 0
    if has_gpu() and not card_pids() & set(pids):
        raise Skipped("NVML names no processes here")
    os.kill(pids[1], signal.SIGKILL)
    healed = until(lambda: procs.heal().get(), "its death is known, and healed")
    equal([each.rank for each in healed.replaced], [1])
    if has_gpu():
        until(lambda: used - card_used() > 512 * MIB, "its memory is free")
        assert pids[0] in card_pids() and pids[1] not in card_pids()
    again = procs.spawn("again", Runner)
    new = [pid for _, pid in again.with_self.call(hold, device(), MIB).get().items()]
    assert new[0] == pids[0] and new[1] != pids[1], (pids, new)
    return f"{(used - card_used()) / MIB:.0f} MiB came back" if has_gpu() else ""
