"""Detect async functions without ``inspect``, whose import takes a tenth of the import time of this package."""

from __future__ import annotations

from types import FunctionType
from typing import Any

_COROUTINE = 0x80  # inspect.CO_COROUTINE


def is_coroutine_function(function: Any) -> bool:
    """Return the same as ``inspect.iscoroutinefunction``."""
    if type(function) is FunctionType and not function.__dict__:  # marks of ``inspect`` are in ``__dict__``
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function)
