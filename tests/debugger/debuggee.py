"""Actors to stop; the lines are found by their marks."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from monarch_kernel.actor import Actor, concurrent_endpoint, current_rank, endpoint

FILE = __file__


#: What `Worker.fail_full` had in a variable.
held: list[weakref.ref[threading.Event]] = []


def still_held() -> bool:
    """Whether anything keeps that alive."""
    return held[-1]() is not None


class Worker(Actor):
    """Counts, fails, and stops by itself."""

    @endpoint
    def count(self, n: int, odd: int = -1) -> int:
        rank = current_rank().rank
        total = 0
        for i in range(n):
            total += added(i, rank == odd and i == 2)  # mark: loop
        return total  # mark: after

    @endpoint
    def spin(self, seconds: float) -> int:
        turns = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            turns += 1  # mark: spin
            time.sleep(0.001)
        return turns

    @endpoint
    def fork(self, ranks: list[int]) -> str:
        rank = current_rank().rank
        way = ""  # mark: fork
        if rank in ranks:
            way = "left"  # mark: left
        else:
            way = "right"  # mark: right
        return way

    @endpoint
    def fail(self, value: int) -> None:
        twice = value * 2
        raise ValueError(f"it was {twice}")

    @endpoint
    def fail_full(self, kind: type[Exception]) -> None:
        batch = [threading.Event()]
        held.append(weakref.ref(batch[0]))
        raise kind("it is full")

    @endpoint
    def loaded(self, prefix: str) -> list[str]:
        return sorted(name for name in sys.modules if name.startswith(prefix))

    @endpoint
    def stop_here(self) -> int:
        inside = 5
        breakpoint()
        inside += 1
        return inside


class Waiter(Actor):
    """Its endpoints run side by side."""

    @concurrent_endpoint
    async def wait(self, name: str) -> str:
        await asyncio.sleep(0)
        said = name.upper()  # mark: awaited
        return said  # noqa: RET504  # a line to stop at


def added(i: int, odd: bool) -> int:
    value = -1 if odd else i
    return value  # noqa: RET504  # mark: added


def line(mark: str) -> int:
    """The line with that mark."""
    lines = Path(FILE).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# mark: {mark}"))


def texts(evaluated: dict[Any, Any]) -> dict[int, str]:
    """What each rank has said."""
    return {key[1]: value.text or value.error for key, value in evaluated.items()}
