"""Tells async functions from others without ``inspect``, which takes a tenth of the time of importing this package."""

from __future__ import annotations

from types import FunctionType
from typing import Any

_COROUTINE = 0x80  # inspect.CO_COROUTINE


def is_coroutine_function(function: Any) -> bool:
    """As ``inspect.iscoroutinefunction``."""
    if type(function) is FunctionType and not function.__dict__:  # marks of ``inspect`` are there
        return bool(function.__code__.co_flags & _COROUTINE)
    import inspect

    return inspect.iscoroutinefunction(function)
