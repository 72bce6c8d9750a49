"""Timers of sections of a program on the ranks of the active mesh, in order with their operations."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from monarch_kernel.runtime.tensor.api.remote_function import remote

_DEFAULT = "default"


class ExecutionTimer:
    """Times of named sections in this process, in milliseconds."""

    _begun: dict[str, float]
    _times: dict[str, list[float]]
    _begun, _times = {}, {}

    @classmethod
    def start(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """Begin a section; without ``use_cpu``, once the GPU has done what it was given before."""
        _wait(use_cpu)
        cls._begun[name or _DEFAULT] = time.perf_counter()

    @classmethod
    def stop(cls, name: str | None = None, use_cpu: bool = False) -> None:
        """End a section.

        Raises:
            ValueError: it was not begun.
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
        """The last time of a section.

        Raises:
            KeyError: it has not ended yet.
        """
        return cls._times[name or _DEFAULT][-1]

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """For each section the count, and the mean, total, least and greatest time."""
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
        """Forget all times."""
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
    """The mean time of a section on each rank of the active mesh, a float64 tensor of no dimension."""
    return _average_remote(name)


def get_latest_timer_measurement(name: str | None = None) -> torch.Tensor:
    """The last time of a section on each rank of the active mesh, a float64 tensor of no dimension."""
    return _latest_remote(name)
