"""Which card a rank sees, who opens it, and process groups on it."""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch_kernel.actor import this_host
from monarch_kernel.errors import SupervisionError
from monarch_kernel.spmd import Group, ProcessGroups
from tests.gpu import MIB, Runner, card_pids, card_used, check, device, equal, until


def seen() -> tuple[str | None, list[str]]:
    """On a rank: the variable, and the cards by UUID."""
    import torch

    cards = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
    return os.environ.get("CUDA_VISIBLE_DEVICES"), cards


@check()
def devices_of_ranks() -> str:
    """A rank sees the card that it was given; more ranks than cards are refused, or share it when not asked for one."""
    import subprocess

    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    one = this_host().spawn_procs(per_host={"gpus": 1}, devices=1).spawn("one", Runner)
    variable, cards = one.run.call_one(seen).get()
    equal((variable, len(cards)), ("0", 1))
    assert cards[0] in said, (cards, said)
    sharing = this_host().spawn_procs(per_host={"gpus": 2}).spawn("sharing", Runner)
    equal([each for _, each in sharing.run.call(seen).get().items()], [(None, cards)] * 2)
    try:
        this_host().spawn_procs(per_host={"gpus": 2}, devices=1).initialized.get()
    except SupervisionError as e:
        assert "rank 1 of" in str(e) and "1 (0)" in str(e), e
    else:
        raise AssertionError("two ranks got one card as if it were two")
    return said.split("(")[0].strip()


def opened() -> tuple[int, bool]:
    """On a rank: its pid, and whether it has loaded torch."""
    return os.getpid(), "torch" in sys.modules


def initialized() -> tuple[int, bool, float]:
    """On a rank: its pid, whether it had opened the card already, and a sum that the card makes."""
    import torch

    before = torch.cuda.is_initialized()
    return os.getpid(), before, float(torch.arange(5, device=device()).sum())


@check(alone=True)
def card_left_alone() -> str:
    """Ranks and fork servers open no card before their program does, with torch preloaded or not."""
    before, others = card_used(), card_pids()
    plain = this_host().spawn_procs(per_host={"gpus": 4}).spawn("plain", Runner)
    loaded = [each for _, each in plain.run.call(opened).get().items()]
    equal([each[1] for each in loaded], [False] * 4)
    preloaded = this_host().spawn_procs(per_host={"gpus": 4}, preload=("torch",)).spawn("preloaded", Runner)
    equal([each[1] for _, each in preloaded.run.call(opened).get().items()], [True] * 4)
    assert card_pids() == others, card_pids()
    assert abs(card_used() - before) < MIB, f"{card_used() - before} bytes more are in use"
    found = [each for _, each in preloaded.run.call(initialized).get().items()]
    equal([each[1:] for each in found], [(False, 10.0)] * 4)
    contexts = (card_used() - before) / 4 / MIB
    named = {each[0] for each in found} <= card_pids()
    return f"a context takes {contexts:.0f} MiB; NVML {'names' if named else 'does not name'} its process"


def joined(runner: Runner, group: Group, kind: str) -> tuple[list[float], str]:
    """On a rank: join, and reduce, broadcast and gather tensors on the card."""
    import torch
    import torch.distributed as dist

    if kind == "cuda":
        torch.cuda.set_device(0)
    group.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), float(rank + 1), device=kind)
    dist.all_reduce(x)
    y = torch.full((3,), float(rank), device=kind)
    dist.broadcast(y, size - 1)
    z = [torch.zeros(2, device=kind) for _ in range(size)]
    dist.all_gather(z, torch.full((2,), float(rank), device=kind))
    dist.barrier()
    return [float(x.sum()), float(y.sum()), float(torch.cat(z).sum())], x.device.type


@check(deadline=60)
def nccl_of_one_rank() -> None:
    """A group of one rank by NCCL, formed twice."""
    procs = this_host().spawn_procs(per_host={"gpus": 1}, devices=1, preload=("torch",))
    actors = procs.spawn("actors", Runner)
    groups = ProcessGroups(procs, "nccl")
    for _ in range(2):
        equal(actors.with_self.call_one(joined, groups.form().get(), "cuda").get(), ([1000.0, 0.0, 0.0], "cuda"))


@check(deadline=60, cpu=True)
def gloo_of_two_ranks() -> None:
    """A group of two ranks on one card by gloo, formed anew after a death."""
    import signal

    procs = this_host().spawn_procs(per_host={"gpus": 2}, preload=("torch",))
    actors = procs.spawn("actors", Runner)
    groups = ProcessGroups(procs, "gloo")
    wanted = [([3000.0, 3.0, 2.0], device())] * 2
    equal([each for _, each in actors.with_self.call(joined, groups.form().get(), device()).get().items()], wanted)
    os.kill(actors.slice(gpus=1).run.call_one(os.getpid).get(), signal.SIGKILL)
    group = groups.form().get()
    equal([each.rank for each in group.healed.replaced], [1])
    again = procs.spawn("again", Runner)
    equal([each for _, each in again.with_self.call(joined, group, device()).get().items()], wanted)


def use(cycles: int) -> None:
    """On a rank: keep the card busy for a while, and hold memory."""
    import torch

    global _kept
    _kept = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(20):
        torch.cuda._sleep(cycles)
    torch.cuda.synchronize()


_kept: Any = None


@check(alone=True)
def figures_of_the_card() -> str:
    """Use and memory of the card, and of each rank on it, in the watch model and in the metrics."""
    from monarch_kernel.watch import GpuView, metrics, watch

    actors = this_host().spawn_procs(per_host={"gpus": 2}, name="figures").spawn("actors", Runner)
    metrics().start()
    with watch() as board:

        def busy() -> GpuView | None:
            cards = [gpu for host in board.snapshot().hosts.values() for gpu in host.gpus]
            return next((gpu for gpu in cards if gpu.use > 0 and gpu.memory_used > 1024 * MIB), None)

        def by_rank() -> list[int]:
            ranks = [rank for ranks in board.snapshot().ranks.values() for rank in ranks]
            held = [rank.gpu_memory.get(0, 0) for rank in ranks]
            return held if len(held) == 2 and min(held) > 512 * MIB else []

        running = actors.run.call(use, 200_000_000)
        gpu = until(busy, "the card is busy")
        text = metrics().text().decode()
        running.get()
        samples = [line for line in text.split("\n") if line.startswith("monarch_gpu")]
        equal(len(samples), 3)
        assert any('kind="total"' in line for line in samples), samples
        assert max(float(line.split()[-1]) for line in samples) == gpu.memory_total > 10_000 * MIB, samples
        ranks = until(by_rank, "the memory of each rank is told") if card_pids() else "no processes are named by NVML"
    metrics().stop()
    return f"{gpu.name}: {gpu.use:.0f} % busy, {gpu.memory_used / MIB:.0f} of {gpu.memory_total / MIB:.0f} MiB; {ranks}"
