"""Ranks of a process group, and references, forked from the test, which has loaded torch."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
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


def run_module(
    command: list[str],
    *,
    input: str,  # noqa: A002  # as there
    cwd: str,
    env: Mapping[str, str],
    **_: object,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE`` as ``monarch_kernel.programs.run`` does, but fork the process from this one."""
    python, option, module = command
    assert (python, option) == (sys.executable, "-m")
    importlib.import_module("torch._dynamo")
    with TemporaryDirectory() as name:
        given, said = Path(name, "input"), Path(name, "errors")
        given.write_text(input)
        process = _CONTEXT.Process(target=_run_module, args=(module, given, said, cwd, dict(env)), daemon=True)
        process.start()
        process.join(_LIMIT)
        try:
            assert process.exitcode is not None, f"{module} has not ended after {_LIMIT:.0f} s"
            return subprocess.CompletedProcess(command, process.exitcode, "", said.read_text())
        finally:
            process.kill()
            process.join()


def _run_module(module: str, given: Path, said: Path, folder: str, environment: dict[str, str]) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    for number, path, flags in ((0, given, os.O_RDONLY), (1, Path(os.devnull), os.O_WRONLY)):
        os.dup2(os.open(path, flags), number)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    warnings.resetwarnings()  # they are those of pytest
    for name, loaded in list(sys.modules.items()):  # a new process has loaded nothing of the user's
        if name == module or str(getattr(loaded, "__file__", None)).startswith(folder):
            del sys.modules[name]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
