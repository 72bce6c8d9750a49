"""Programs that hang in a known way, made from seeds, run on real ranks; is the right rank named, and the right line?

``python -m tests.debugger.hang.matrix --seeds 50`` runs fifty of them and says what was found.
"""

from __future__ import annotations

import argparse
import linecache
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from monarch_kernel.actor import Actor, context, endpoint, this_host
from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.debugger.controller.hang.verdict import NOTHING, Verdict
from tests.waiting import patience

KINDS = ("skipped", "extra", "reordered", "shape", "exception", "loader", "stopped", "killed")
#: What may be said of each, if it is decided.
FITTING = {
    "skipped": {"skipped", "order", "shape", "dead", "root"},
    "extra": {"extra", "order", "shape", "dead", "root"},
    "reordered": {"order", "shape", "skipped", "extra", "dead", "root"},
    "shape": {"shape", "dead"},
    "exception": {"failed"},
    "loader": {"loader", "standing", "running"},
    "stopped": {"silent"},
    "killed": {"dead"},
}
#: How long a program may take until nothing moves (seconds).
PATIENCE = patience(60.0)


@dataclass(frozen=True, slots=True)
class Program:
    """A program that all ranks run, and what is wrong with it.

    Attributes:
        seed: it was made from.
        kind: what is wrong.
        size: how many ranks there are.
        guilty: the rank that does wrong.
        source: Python; `rank`, `dist`, `torch` and some helpers are there.
        lines: those that may be named.
    """

    seed: int
    kind: str
    size: int
    guilty: int
    source: str
    lines: frozenset[int]

    @property
    def file(self) -> str:
        """What its lines are said to be in."""
        return f"<program {self.seed}>"


def make(seed: int, kind: str | None = None, size: int | None = None) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    size = size or chance.choice([2, 3, 3, 4, 4, 5])
    guilty = chance.randrange(size)
    steps = chance.randint(1, 4)
    calls = [_call(chance, size) for _ in range(chance.randint(2, 5))]
    if kind == "reordered":
        calls += ["dist.all_reduce(torch.ones(64))", "dist.barrier()"]
    if kind == "shape":
        calls.append("dist.all_reduce(torch.ones(64))")
    wrong_step, wrong_call = chance.randrange(steps), chance.randrange(len(calls))
    if kind in ("reordered", "shape"):
        wrong_call = len(calls) - (2 if kind == "reordered" else 1)
    there = f"rank == {guilty} and step == {wrong_step}"
    lines = [f"for step in range({steps}):"]
    named: set[int] = set()

    def add(text: str, name: bool = False) -> None:
        lines.append(text)
        if name:
            named.add(len(lines))

    if kind == "loader" and chance.random() < 0.5:
        add(f"    batch = next(slow_loader(rank == {guilty} and step == {wrong_step}))", True)
    else:
        add("    batch = torch.ones(8)")
        if kind == "loader":
            wrong_call = 0
    for at, call in enumerate(calls):
        if at != wrong_call or kind == "killed":
            add(f"    {call}", kind == "reordered" and at == wrong_call + 1)
            if at == wrong_call:
                add(f"    if {there}: os.kill(os.getpid(), signal.SIGKILL)")
        elif kind == "skipped":
            add(f"    if not ({there}):")
            add(f"        {call}", True)
        elif kind == "extra":
            add(f"    if {there}:")
            add(f"        {_call(chance, size)}", True)
            add(f"    {call}")
        elif kind == "reordered":
            add(f"    if {there}:")
            add(f"        {calls[at + 1]}", True)
            add(f"    {call}", True)
        elif kind == "shape":
            sizes = "32 if " if chance.random() < 0.5 else "96 if "
            add(f"    dist.all_reduce(torch.ones({sizes}{there} else 64))", True)
        elif kind == "exception":
            add(f"    if {there}: raise ValueError('the loss is not finite')", True)
            add(f"    {call}")
        elif kind == "loader":
            if named:
                add(f"    {call}")
            else:
                add(f"    if {there}: slow()", True)
                add(f"    {call}")
        else:
            add(f"    if {there}: os.kill(os.getpid(), signal.SIGSTOP)", True)
            add(f"    {call}")
    lines.append("dist.barrier()")
    if kind == "extra":  # where it is the only one left that waits, or where two calls are taken for one another
        named |= {len(lines)}
    return Program(seed, kind, size, guilty, "\n".join(lines), frozenset(named))


def _call(chance: random.Random, size: int) -> str:
    count = chance.choice([1, 5, 16, 16, 300])
    return chance.choice(
        [
            f"dist.all_reduce(torch.ones({count}))",
            f"dist.all_reduce(torch.ones({count}))",
            f"dist.all_reduce(torch.ones({count}), async_op=True).wait()",
            f"dist.broadcast(torch.ones({count}), src={chance.randrange(size)})",
            f"dist.all_gather([torch.ones({count}) for _ in range({size})], torch.ones({count}))",
            f"dist.reduce_scatter_tensor(torch.ones({count}), torch.ones({count * size}))",
            "dist.barrier()",
            f"dist.all_gather_object([None] * {size}, 'text')",
        ]
    )


class Runner(Actor):
    """Runs programs in a process group."""

    def __init__(self, store: str, size: int) -> None:
        import torch.distributed as dist

        self._rank = context().actor_instance.rank.rank
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=self._rank, world_size=size)

    @endpoint
    def run(self, source: str, file: str) -> None:
        """Run a program."""
        import warnings

        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        names: dict[str, Any] = {"rank": self._rank, "dist": dist, "torch": torch, "os": os, "signal": signal}
        names |= {"slow": lambda: time.sleep(600), "slow_loader": _loader}
        exec(compile(source, file, "exec"), names)


def _loader(slow: bool) -> Any:
    import torch.utils.data

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if slow:
                time.sleep(600)
            return torch.ones(4)

    return iter(torch.utils.data.DataLoader(Data(), batch_size=4))


def run(program: Program) -> Verdict:
    """Run a program on a mesh of its own until nothing moves, and say why."""
    with tempfile.TemporaryDirectory() as folder:
        procs = this_host().spawn_procs(per_host={"gpus": program.size}, name="hang", preload=("torch",))
        try:
            runners = procs.spawn("runner", Runner, os.path.join(folder, "store"), program.size)
            runners.initialized.get(120)
            # One by one: a failure in a call over all of them would release those that wait, and nothing would hang.
            each = [runners.slice(gpus=rank) for rank in range(program.size)]
            calls = [runner.run.call_one(program.source, program.file) for runner in each]
            return settled(procs)
        finally:
            procs.kill(reason="the program has hung long enough").get(60)
            procs.stop("the program has hung long enough").get(60)
            for slot in calls:
                slot.exception(60)


def settled(procs: Any) -> Verdict:
    """The verdict, once it has been the same twice."""
    deadline = time.monotonic() + PATIENCE
    before: Verdict | None = None
    while True:
        found = hang(procs)
        if before is not None and found.kind != NOTHING and (found.kind, found.ranks) == (before.kind, before.ranks):
            return found
        if time.monotonic() > deadline:
            return found
        before = found


def wrong(program: Program, found: Verdict) -> str:
    """What is wrong with a verdict; '' if nothing is."""
    if found.kind == NOTHING:
        return "nothing was found"
    if program.guilty not in found.ranks:
        return f"rank {program.guilty} is not named"
    if not found.decided:
        return ""
    if found.ranks != (program.guilty,):
        return f"others than rank {program.guilty} are named"
    if found.kind not in FITTING[program.kind]:
        return f"{found.kind} does not fit"
    culprit = found.culprits[0]
    named = [place for place in (culprit.place, culprit.instead) if place is not None]
    if any(place.file == __file__ for place in named) or not program.lines or found.kind in ("dead", "silent"):
        return ""
    if any(place.file == program.file and place.line in program.lines for place in named):
        return ""
    return f"none of {named} is the line: {sorted(program.lines)}"


def main() -> None:
    """Run programs and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--show", action="store_true", help="print programs and whole verdicts")
    options = parser.parse_args()
    counts = {"right": 0, "undecided": 0, "wrong": 0}
    for seed in range(options.first, options.first + options.seeds):
        program = make(seed, options.kind)
        began = time.monotonic()
        found = run(program)
        error = wrong(program, found)
        which = "wrong" if error else "right" if found.decided else "undecided"
        counts[which] += 1
        print(
            f"{seed:3} {program.kind:9} {program.size} ranks, rank {program.guilty}: {which:9} "
            f"{time.monotonic() - began:4.1f} s  {found.sentence} {error and f'<-- {error}'}",
            flush=True,
        )
        if options.show or error:
            numbered = [f"{at:4} {line}" for at, line in enumerate(program.source.split("\n"), 1)]
            print("\n".join(numbered), found, sep="\n", flush=True)
    print(f"{options.seeds} seeds: {counts}")


if __name__ == "__main__":
    main()
