"""PyTorch's profiler and its records of GPU memory, on the ranks of the active mesh, in order with their operations."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

from monarch_kernel.runtime.tensor.api.remote_function import remote


class Schedule(NamedTuple):
    """Which steps are profiled; the arguments of ``torch.profiler.schedule``."""

    wait: int
    warmup: int
    active: int
    repeat: int = 0
    skip_first: int = 0


_numbers = count()
# On a rank: what is being profiled, and the records of sections that have begun.
_profiles: dict[int, Any] = {}
_sections: dict[int, Any] = {}


def _begin(number: int, folder: str | None, schedule: Schedule | None, options: dict[str, Any]) -> None:
    handler = None
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        handler = torch.profiler.tensorboard_trace_handler(folder, worker_name=f"pid{os.getpid()}")
    steps = torch.profiler.schedule(**schedule._asdict()) if schedule is not None else None
    _profiles[number] = torch.profiler.profile(schedule=steps, on_trace_ready=handler, **options)
    _profiles[number].__enter__()


def _step(number: int) -> None:
    _profiles[number].step()


def _end(number: int) -> None:
    _profiles.pop(number).__exit__(None, None, None)


def _begin_section(number: int, name: str, args: str | None) -> None:
    _sections[number] = torch.profiler.record_function(name, args)
    _sections[number].__enter__()


def _end_section(number: int) -> None:
    _sections.pop(number).__exit__(None, None, None)


def _record(options: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(**options)  # pyright: ignore[reportPrivateUsage]  # as PyTorch's docs


def _dump(folder: str, prefix: str) -> None:
    if torch.cuda.is_available():
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{prefix}_pid{os.getpid()}.pickle")
        torch.cuda.memory._dump_snapshot(path)  # pyright: ignore[reportPrivateUsage]


_begin_remote = remote(_begin, propagate=lambda *_: None)
_step_remote = remote(_step, propagate=lambda *_: None)
_end_remote = remote(_end, propagate=lambda *_: None)
_begin_section_remote = remote(_begin_section, propagate=lambda *_: None)
_end_section_remote = remote(_end_section, propagate=lambda *_: None)
_record_remote = remote(_record, propagate=lambda *_: None)
_dump_remote = remote(_dump, propagate=lambda *_: None)


class profile:  # noqa: N801  # Monarch's name
    """``torch.profiler.profile`` on every rank of the active mesh.

    Args:
        on_trace_ready: the folder on each host where every rank writes its traces; None: none is written.
        schedule: which of the steps that ``step`` ends are profiled; None: all.
        options: further arguments of ``torch.profiler.profile``, such as ``record_shapes=True``.
    """

    def __init__(
        self,
        *,
        activities: Sequence[Any] | None = None,
        schedule: Schedule | None = None,
        on_trace_ready: str | None = None,
        **options: Any,
    ) -> None:
        if on_trace_ready is not None and not isinstance(on_trace_ready, str):
            raise TypeError(f"on_trace_ready={on_trace_ready!r} must be a folder, in which ranks write their traces")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule={schedule!r} must be a Schedule")
        self._number = next(_numbers)
        self._arguments = on_trace_ready, schedule, {"activities": activities, **options}

    def __enter__(self) -> profile:
        _begin_remote(self._number, *self._arguments)
        return self

    def step(self) -> None:
        """End a step, on every rank."""
        _step_remote(self._number)

    def __exit__(self, *_exc: object) -> None:
        _end_remote(self._number)


@contextmanager
def record_function(name: str, args: str | None = None) -> Generator[None]:
    """Give the operations of a ``with`` block a name in the traces of `profile`, on every rank."""
    number = next(_numbers)
    _begin_section_remote(number, name, args)
    try:
        yield
    finally:
        _end_section_remote(number)


def record_memory_history(**options: Any) -> None:
    """Record the history of GPU memory on every rank of the active mesh; nothing where there is no GPU.

    Args:
        options: the arguments of ``torch.cuda.memory._record_memory_history``.
    """
    _record_remote(options)


def dump_memory_snapshot(dir_snapshots: str = "./snapshots", dump_local: bool = True, prefix: str = "memory") -> None:
    """Write the recorded history of GPU memory to a file of each rank; nothing where there is no GPU.

    Args:
        dir_snapshots: the folder on each host.
        dump_local: accepted as in Monarch; files are local.
        prefix: how the names of the files begin.
    """
    _dump_remote(dir_snapshots, prefix)
