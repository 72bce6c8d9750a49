"""Ranks of a process group, forked from the test, which has loaded torch."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("fork")
_LIMIT = 120.0


def run_ranks(program: Callable[..., Any], size: int, folder: Path, *args: Any) -> list[Any]:
    """Run ``program(rank, *args)`` in ``size`` processes of one gloo group; return what each returned.

    A rank that fails fails the test with its traceback.
    """
    # DDP imports the first, most programs the second: once here is quicker than in each rank.
    importlib.import_module("torch._dynamo")
    importlib.import_module("monarch_kernel.numerics.rules")
    store = folder / f"store_{program.__name__}"
    ends: list[tuple[Any, Connection]] = []
    for rank in range(size):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(program, rank, size, store, theirs, args), daemon=True)
        process.start()
        theirs.close()
        ends.append((process, mine))
    results: list[Any] = []
    try:
        for rank, (_, end) in enumerate(ends):
            assert end.poll(_LIMIT), f"rank {rank} has not finished after {_LIMIT:.0f} s"
            done, value = end.recv()
            assert done, f"rank {rank} failed:\n{value}"
            results.append(value)
    finally:
        for process, _ in ends:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _run(
    program: Callable[..., Any], rank: int, size: int, store: Path, answers: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # an observer looks at all other objects for models and optimizers: at those of this rank alone
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        value = program(rank, *args)
        dist.destroy_process_group()
        answers.send((True, value))
    except BaseException:
        answers.send((False, traceback.format_exc()))
