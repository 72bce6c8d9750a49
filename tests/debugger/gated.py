"""A training loop whose ranks go on only as a test lets them, by files: `Gates` has both sides of that."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from monarch_kernel.actor import Actor, current_rank, endpoint
from tests.conftest import wait_until

FILE = __file__


class Gates:
    """Gates of ranks in a folder; each is named by a rank, a step and a place."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def are_open(self) -> bool:
        """Whether all may go on everywhere."""
        return (self.folder / "open").exists()

    def _file(self, kind: str, rank: int, step: int, place: str) -> Path:
        return self.folder / f"{kind}-{rank}-{step}-{place}"

    def pass_through(self, rank: int, step: int, place: str) -> None:
        """In a rank: say that it is there, and wait until it may go on."""
        self._file("at", rank, step, place).touch()
        gate = self._file("go", rank, step, place)
        while not gate.exists() and not self.are_open:
            time.sleep(0.01)

    def open(self, rank: int, step: int, *places: str) -> None:
        """In a test: let a rank go on at these places of a step, also before it is there."""
        for place in places:
            self._file("go", rank, step, place).touch()

    def open_all(self) -> None:
        """Let all ranks go on everywhere."""
        (self.folder / "open").touch()

    def wait(self, rank: int, step: int, place: str) -> None:
        """Wait until a rank is at a gate."""
        wait_until(self._file("at", rank, step, place).exists, f"rank {rank} is {place} in step {step}", 60)


def join_group(rank: int, size: int, folder: str) -> Any:
    """Make the default process group of these ranks; returns `torch.distributed`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return dist


def train(rank: int, folder: str, dist: Any, steps: int) -> int:
    """Make steps, each with a line between two gates, and then a collective."""
    import torch

    gates = Gates(folder)
    done = 0
    for step in range(steps):
        gates.pass_through(rank, step, "before")
        done = step + 1  # mark: step
        gates.pass_through(rank, step, "after")
        dist.all_reduce(torch.ones(1))
    return done


class Trainer(Actor):
    """A rank of a mesh that trains so."""

    @endpoint
    def join(self, folder: str) -> None:
        rank = current_rank()
        self.folder, self.rank = folder, rank.rank
        self.dist = join_group(rank.rank, rank.extent.nelements, folder)

    @endpoint
    def train(self, steps: int) -> int:
        return train(self.rank, self.folder, self.dist, steps)

    @endpoint
    def step(self, step: int) -> None:
        gates = Gates(self.folder)
        gates.pass_through(self.rank, step, "before")
        done = step + 1  # mark: called
        gates.pass_through(self.rank, done - 1, "after")
        self._meet()

    @endpoint
    def save(self) -> None:
        Gates(self.folder).pass_through(self.rank, 0, "before")
        if self.rank == 0:
            self.saved = True  # mark: save
        self._meet()

    @endpoint
    def prepare(self) -> None:
        gates = Gates(self.folder)
        if self.rank == 0:
            (gates.folder / "at-0-0-prepares").touch()
            while not gates.are_open:
                time.sleep(0.01)  # mark: prepare
        self._meet()

    def _meet(self) -> None:
        import torch

        self.dist.all_reduce(torch.ones(1))

    @endpoint
    def leave(self) -> None:
        self.dist.destroy_process_group()


def line(mark: str) -> int:
    """The line with that mark."""
    lines = Path(FILE).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# mark: {mark}"))


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(dist.get_rank(), f"{sys.argv[1]}.gates", dist, 6)
    dist.destroy_process_group()
