"""Torchrun's agent and its ranks, forked from a process that has loaded torch, which takes each of them seconds.

The agent is torchrun's own, with what ``torchrun --standalone`` tells it, but for its way to start the ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
#: The optimizers of torch load the last.
_LOADED = ["torch.distributed.run", "torch.distributed.device_mesh", "torch._dynamo"]


@contextmanager
def loaded() -> Generator[None]:
    """The process from which they are forked."""
    _CONTEXT.set_forkserver_preload(_LOADED)
    forkserver.ensure_running()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Torchrun:
    """``torchrun --standalone --nproc-per-node RANKS -m monarch_kernel.join WORDS``, as ``subprocess.Popen`` has it."""

    def __init__(self, ranks: int, words: list[str], log: Path, environment: dict[str, str]) -> None:
        self._process = _CONTEXT.Process(target=_agent, args=(ranks, words, log, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end (seconds)."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("torchrun", timeout or 0)
        return self._process.exitcode


def _agent(ranks: int, words: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, _rank)(*words)


def _rank(*words: str) -> None:
    """What ``python -m monarch_kernel.join WORDS`` does."""
    atexit._clear()  # what is registered is not the rank's
    sys.argv = ["-m", *words]
    try:
        runpy.run_module("monarch_kernel.join", run_name="__main__", alter_sys=True)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as Python does
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
