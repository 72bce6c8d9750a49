"""Profile, record GPU memory, time and log on the ranks of the active mesh, in order with their operations."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch

from monarch_kernel.runtime.tensor.api.remote_function import remote


class Schedule(NamedTuple):
    """The steps to profile; the arguments of ``torch.profiler.schedule``."""

    wait: int
    warmup: int
    active: int
    repeat: int = 0
    skip_first: int = 0


_numbers = count()
# On a rank: the running profiles, and the open sections.
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
    """Run ``torch.profiler.profile`` on every rank of the active mesh.

    Args:
        on_trace_ready: the folder on each host to which every rank writes its traces; None: no traces are written.
        schedule: the steps to profile (``step`` ends a step); None: all.
        options: further arguments of ``torch.profiler.profile``, such as ``record_shapes=True``.
    """

    def __init__(
        self,
        *,
        activities: Sequence[object] | None = None,
        schedule: Schedule | None = None,
        on_trace_ready: str | None = None,
        **options: object,
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
        """End a step on every rank."""
        _step_remote(self._number)

    def __exit__(self, *_exc: object) -> None:
        _end_remote(self._number)


@contextmanager
def record_function(name: str, args: str | None = None) -> Generator[None]:
    """Name the operations of a ``with`` block in the traces of `profile`, on every rank."""
    number = next(_numbers)
    _begin_section_remote(number, name, args)
    try:
        yield
    finally:
        _end_section_remote(number)


def record_memory_history(**options: object) -> None:
    """Record the history of GPU memory on every rank of the active mesh. Ranks without a GPU do nothing.

    Args:
        options: the arguments of ``torch.cuda.memory._record_memory_history``.
    """
    _record_remote(options)


def dump_memory_snapshot(dir_snapshots: str = "./snapshots", dump_local: bool = True, prefix: str = "memory") -> None:
    """Write the recorded history of GPU memory to a file for each rank. Ranks without a GPU do nothing.

    Args:
        dir_snapshots: the folder on each host.
        dump_local: accepted as in Monarch; files are local.
        prefix: the prefix of the file names.
    """
    _dump_remote(dir_snapshots, prefix)


_logger = logging.getLogger("monarch.ranks")


def _log(level: int, message: str, args: tuple[object, ...]) -> None:
    _logger.log(level, message, *[x.tolist() if isinstance(x, torch.Tensor) else x for x in args])


_log_remote = remote(_log, propagate=lambda *_: None)
_set_level_remote = remote(_logger.setLevel, propagate=lambda _: None)


def log_remote(message: str, *args: object, level: int = logging.WARNING) -> None:
    """Log on every rank of the active mesh. ``log_remote("loss %s", loss)`` logs each rank's value of a tensor."""
    _log_remote(level, message, args)


def set_logging_level_remote(level: int) -> None:
    """Set the level of `log_remote` messages to log on the ranks of the active mesh."""
    _set_level_remote(level)


_DEFAULT = "default"


class ExecutionTimer:
    """Times of named sections in this process (milliseconds)."""

    _begun: dict[str, float]
    _times: dict[str, list[float]]
    _begun, _times = {}, {}

    @classmethod
    def start(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Begin a section. Without ``use_cpu``, it begins when the GPU has finished its earlier work."""
        _wait(use_cpu)
        cls._begun[name or _DEFAULT] = time.perf_counter()

    @classmethod
    def stop(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """End a section.

        Raises:
            ValueError: the section was not begun.
        """
        begun = cls._begun.pop(name or _DEFAULT, None)
        if begun is None:
            raise ValueError(f"the section {name or _DEFAULT!r} was not started")
        _wait(use_cpu)
        cls._times.setdefault(name or _DEFAULT, []).append((time.perf_counter() - begun) * 1e3)

    @classmethod
    @contextmanager
    def time(cls, name: str | None = None, use_cpu: bool = False) -> Generator[None]:
        """Time a ``with`` block."""
        cls.start(name, use_cpu)
        try:
            yield
        finally:
            cls.stop(name, use_cpu)

    @classmethod
    def get_latest_measurement(cls, name: str | None = None) -> float:
        """Return the last time of a section.

        Raises:
            KeyError: the section has not ended yet.
        """
        return cls._times[name or _DEFAULT][-1]

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """Return the count, and the mean, total, minimum and maximum time of each section."""
        return {
            name: {
                "count": len(times),
                "mean_ms": sum(times) / len(times),
                "total_ms": sum(times),
                "min_ms": min(times),
                "max_ms": max(times),
            }
            for name, times in cls._times.items()
        }

    @classmethod
    def reset(cls) -> None:
        """Delete all times."""
        cls._begun.clear()
        cls._times.clear()


def _wait(use_cpu: bool) -> None:
    if not use_cpu and torch.cuda.is_available():
        torch.cuda.synchronize()


def _average(name: str) -> torch.Tensor:
    return torch.tensor(ExecutionTimer.summary()[name]["mean_ms"], dtype=torch.float64)


def _latest(name: str | None) -> torch.Tensor:
    return torch.tensor(ExecutionTimer.get_latest_measurement(name), dtype=torch.float64)


def _number(_name: str | None) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


_start_remote = remote(ExecutionTimer.start, propagate=lambda *_: None)
_stop_remote = remote(ExecutionTimer.stop, propagate=lambda *_: None)
_average_remote = remote(_average, propagate=_number)
_latest_remote = remote(_latest, propagate=_number)


def execution_timer_start(name: str | None = None, use_cpu: bool = False) -> None:
    """Begin a section on every rank of the active mesh."""
    _start_remote(name, use_cpu)


def execution_timer_stop(name: str | None = None, use_cpu: bool = False) -> None:
    """End a section on every rank of the active mesh."""
    _stop_remote(name, use_cpu)


def get_execution_timer_average_ms(name: str = _DEFAULT) -> torch.Tensor:
    """Return the mean time of a section on each rank of the active mesh, as a float64 scalar tensor."""
    return _average_remote(name)


def get_latest_timer_measurement(name: str | None = None) -> torch.Tensor:
    """Return the last time of a section on each rank of the active mesh, as a float64 scalar tensor."""
    return _latest_remote(name)
