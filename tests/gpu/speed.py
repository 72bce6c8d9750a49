"""What is measured on a GPU, each beside its limit in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from monarch_kernel.actor import this_host
from monarch_kernel.rdma import RDMABuffer
from tests.gpu import MIB, Runner, check
from tests.gpu.memory import register


def median(work: Callable[[], object], times: int = 7) -> float:
    """The median duration of a call after a first one (seconds), to the end of what it queued on the card."""
    import torch

    took: list[float] = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


@check(deadline=60, alone=True)
def copy_between_processes() -> str:
    """1 GiB from another process's GPU memory to this one's, beside a copy within this process."""
    import torch

    size = 1024 * MIB
    owner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Runner)
    buffer: RDMABuffer = owner.with_self.call_one(register, (size // 4,)).get()
    here, there = (torch.zeros(size // 4, device="cuda") for _ in range(2))
    ours = median(lambda: buffer.read_into(here).get(timeout=30))
    back = median(lambda: buffer.write_from(here).get(timeout=30))
    limit = median(lambda: there.copy_(here))
    assert ours < 10 * limit, (ours, limit)
    rates = [size / took / 1e9 for took in (ours, back, limit)]
    return f"read {rates[0]:.0f} GB/s, write {rates[1]:.0f}, cudaMemcpy {rates[2]:.0f}: {rates[0] / rates[2]:.2f} of it"


@check(deadline=60, alone=True)
def copy_from_the_host() -> str:
    """256 MiB from CPU memory into another process's GPU memory, beside copies of pageable and page-locked memory."""
    import torch

    size = 256 * MIB
    owner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Runner)
    buffer: RDMABuffer = owner.with_self.call_one(register, (size // 4,)).get()
    pageable = torch.ones(size // 4)
    pinned = pageable.pin_memory()
    here = torch.zeros(size // 4, device="cuda")
    took = [
        median(lambda: buffer.write_from(pageable).get(timeout=30)),
        median(lambda: buffer.write_from(pinned).get(timeout=30)),
        median(lambda: here.copy_(pageable)),
        median(lambda: here.copy_(pinned, non_blocking=True)),
        median(lambda: buffer.read_into(pageable).get(timeout=30)),
    ]
    assert took[0] < 10 * took[2], took
    write, write_pinned, by_torch, limit, read = (size / each / 1e9 for each in took)
    return (
        f"write {write:.1f} GB/s, of page-locked memory {write_pinned:.1f}, read {read:.1f}; "
        f"torch {by_torch:.1f}, of page-locked memory {limit:.1f}"
    )


def _layers() -> Any:
    import torch
    from torch import nn

    layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 1))
    with torch.no_grad():  # the same wherever it is made
        for number, each in enumerate(layers.parameters()):
            each.copy_(torch.arange(each.numel()).view(each.shape).add(number).mul(0.7).sin().mul(0.1))
    return layers


@check(deadline=60, alone=True)
def operations_per_second() -> str:
    """Small operations on a mesh of one rank on the card, beside plain torch in this process."""
    import torch

    from monarch_kernel.tensor import inspect

    count = 5000
    procs = this_host().spawn_procs(per_host={"gpus": 1}, preload=("torch",))

    def work(x: Any) -> Any:
        for _ in range(count):
            x = x.add(1.0)
        return x

    with procs.activate():
        first = torch.zeros(16)
        inspect(work(first))
        took: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            total = inspect(work(first))
            took.append(time.perf_counter() - began)
    assert float(total[0]) == count
    ours = statistics.median(took)
    here = torch.zeros(16, device="cuda")
    limit = median(lambda: work(here), 5)
    return f"{count / ours / 1e3:.0f}k/s, plain torch {count / limit / 1e3:.0f}k/s: {limit / ours:.2f} of it"


@check(deadline=150, alone=True)
def replayed_step() -> str:
    """A recorded training step on the card, beside torch eager, `torch.compile` and a CUDA graph in one process."""
    import torch

    from monarch_kernel.tensor import compile, inspect  # noqa: A004  # Monarch's name

    steps = 50
    procs = this_host().spawn_procs(per_host={"gpus": 1}, preload=("torch",))

    def train(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    with procs.activate():
        model = _layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.ones(64, 256)
        step = compile(lambda batch: train(model, optimizer, batch))
        for _ in range(4):
            inspect(step(x).detach())
        took: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(steps):
                loss = step(x)
            last = float(inspect(loss.detach()))
            took.append((time.perf_counter() - began) / steps)
        replayed = step.replayed
    ours = statistics.median(took)
    assert replayed >= 5 * steps, replayed

    model = _layers().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.ones(64, 256, device="cuda")
    for _ in range(4 + 5 * steps):
        loss = train(model, optimizer, x)
    found = float(loss.detach())
    assert abs(found - last) <= 1e-3 * abs(last), (found, last)
    eager = median(lambda: [train(model, optimizer, x) for _ in range(steps)], 5) / steps
    captured_model = _layers().cuda()
    captured_optimizer = torch.optim.SGD(captured_model.parameters(), lr=1e-4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # nodes of autograd that are made on the default stream cannot be captured
        for _ in range(3):
            train(captured_model, captured_optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(captured_model, captured_optimizer, x)
    captured = median(lambda: [graph.replay() for _ in range(steps)], 5) / steps
    compiled = torch.compile(lambda batch: model(batch).pow(2).mean())

    def train_compiled() -> None:
        optimizer.zero_grad(set_to_none=False)
        compiled(x).backward()
        optimizer.step()

    by_compile = median(lambda: [train_compiled() for _ in range(steps)], 5) / steps
    return (
        f"replay {ours * 1e6:.0f} µs, eager {eager * 1e6:.0f}, torch.compile {by_compile * 1e6:.0f}, "
        f"CUDA graph {captured * 1e6:.0f}: {ours / eager:.2f} × eager"
    )


def _pid() -> int:
    import os

    return os.getpid()


@check(deadline=60, alone=True)
def first_answer_of_eight() -> str:
    """The first answer of 8 ranks with torch preloaded, and of the card on each, beside one `import torch`."""
    import subprocess
    import sys

    began = time.perf_counter()
    procs = this_host().spawn_procs(per_host={"gpus": 8}, preload=("torch",))
    actors = procs.spawn("actors", Runner)
    assert len({pid for _, pid in actors.run.call(_pid).get().items()}) == 8
    answered = time.perf_counter() - began
    began = time.perf_counter()
    assert [total for _, total in actors.run.call(_card_sum).get().items()] == [3.0] * 8
    card = time.perf_counter() - began
    began = time.perf_counter()
    again = this_host().spawn_procs(per_host={"gpus": 8}, preload=("torch",)).spawn("again", Runner)
    again.run.call(_pid).get()
    warm = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    limit = time.perf_counter() - began
    return (
        f"{answered:.2f} s, a second mesh {warm:.3f} s, first sum on the card {card:.2f} s; import torch {limit:.2f} s"
    )


def _card_sum() -> float:
    import torch

    return float(torch.ones(3, device="cuda").sum())
