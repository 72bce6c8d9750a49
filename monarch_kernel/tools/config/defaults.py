"""Provide TorchX's defaults, with the names of ``monarch.tools.config.defaults``. TorchX must be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["component_fn", "dryrun_info_formatter", "scheduler_factories"]

_MODULES = {"local_cwd": "local", "local_docker": "docker", "slurm": "slurm", "k8s": "kubernetes"}


def component_fn(scheduler: str) -> NoReturn:
    """Raise an error: no scheduler has a default component, in Monarch either.

    Raises:
        NotImplementedError: always; the message says what to use.
    """
    raise NotImplementedError(
        f"no default component_fn for scheduler {scheduler!r}: give TorchX an AppDef, or take hosts from a job "
        "(monarch.job)"
    )


def scheduler_factories() -> dict[str, Callable[..., object]]:
    """Return the factory of each scheduler of TorchX, by its name.

    Raises:
        ImportError: TorchX is not installed.
    """
    place = "torchx.schedulers.{}_scheduler"
    found = {name: importlib.import_module(place.format(module)) for name, module in _MODULES.items()}
    return {name: module.create_scheduler for name, module in found.items()}


def dryrun_info_formatter(dryrun_info: Any) -> Callable[..., str]:
    """Return the function that formats a dry run of TorchX."""
    return dryrun_info._fmt
