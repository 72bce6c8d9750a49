"""Checks on a GPU: ``python -m tests.gpu`` runs them in the order of what tells most, each in a process of its own.

A check is a function that is registered with `check`. It raises if what it sees is wrong, raises `Skipped` if this
machine cannot show it, and may return a text of what it measured. It compares with values that the CPU computed, or
with a limit that it measures in the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from monarch_kernel.actor import Actor, endpoint

#: The modules with checks; most telling first.
MODULES = ("memory", "ranks", "tensors", "tools", "jobs", "speed")
#: Of a byte count that is printed.
MIB = 1 << 20


class Skipped(Exception):
    """This machine cannot show it; the message says why."""


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        deadline: when it counts as hanging (seconds).
        cpu: whether it has a form for machines without a GPU.
        alone: whether nothing else may use the card meanwhile.
    """

    name: str
    run: Callable[[], str | None]
    deadline: float
    cpu: bool
    alone: bool


_checks: dict[str, Check] = {}


def check(deadline: float = 40, cpu: bool = False, alone: bool = False) -> Callable[[Any], Any]:
    """Register a function as the check of its name."""

    def register(function: Callable[[], str | None]) -> Callable[[], str | None]:
        _checks[function.__name__] = Check(function.__name__, function, deadline, cpu, alone)
        return function

    return register


def all_checks() -> dict[str, Check]:
    """All checks by name, in their order."""
    for module in MODULES:
        import_module(f"tests.gpu.{module}")
    return _checks


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; asks no library, which would open it."""
    return os.path.isdir("/proc/driver/nvidia/gpus") and bool(os.listdir("/proc/driver/nvidia/gpus"))


def device() -> str:
    """``cuda`` or ``cpu``."""
    return "cuda" if has_gpu() else "cpu"


def equal(found: Any, wanted: Any) -> None:
    """Compare two values, with both in the error."""
    assert found == wanted, f"{found!r} is not {wanted!r}"


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compare two tensors on the CPU."""
    import torch

    torch.testing.assert_close(found.detach().cpu(), wanted.detach().cpu(), rtol=tolerance, atol=tolerance)


def until(condition: Callable[[], Any], what: str, deadline: float = 20) -> Any:
    """Poll until a condition holds; returns what it gave."""
    end = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.02)
    return found


def card_used() -> int:
    """Memory of the first card that is in use by anyone (bytes), by NVML."""
    return int(_nvml().nvmlDeviceGetMemoryInfo(_nvml().nvmlDeviceGetHandleByIndex(0)).used)


def card_pids() -> set[int]:
    """Processes with a context on the first card, by NVML."""
    nvml = _nvml()
    return {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))}


def _nvml() -> Any:
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    return nvml


class Runner(Actor):
    """Calls any function on a rank; what is set on it stays there."""

    kept: Any = None

    @endpoint
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(*args)``."""
        return function(*args)

    @endpoint
    def with_self(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(self, *args)``."""
        return function(self, *args)
