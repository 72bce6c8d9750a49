"""Logging on the ranks, in order with their operations."""

from __future__ import annotations

import logging
from typing import Any

import torch

from monarch_kernel.runtime.tensor.api.remote_function import remote

_logger = logging.getLogger("monarch.ranks")


def _log(level: int, message: str, args: tuple[Any, ...]) -> None:
    _logger.log(level, message, *[x.tolist() if isinstance(x, torch.Tensor) else x for x in args])


_log_remote = remote(_log, propagate=lambda *_: None)
_set_level_remote = remote(_logger.setLevel, propagate=lambda _: None)


def log_remote(message: str, *args: Any, level: int = logging.WARNING) -> None:
    """Log on every rank of the active mesh: ``log_remote("loss %s", loss)`` logs each rank's value of a tensor."""
    _log_remote(level, message, args)


def set_logging_level_remote(level: int) -> None:
    """From which level on the ranks of the active mesh log what `log_remote` sends."""
    _set_level_remote(level)
