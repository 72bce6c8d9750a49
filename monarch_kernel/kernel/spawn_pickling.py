"""Makes classes and functions of cells work in processes that `multiprocessing` spawns, such as DataLoader workers.

A spawned process has no cells, so it cannot look up their classes and functions by name. While a process is being
spawned, they are pickled by value. The child stores them in its `__main__`, where later pickles find them by name.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from types import FunctionType
from typing import Any

from monarch_kernel.introspection import after_import


def install() -> None:
    """Patch the pickler of `multiprocessing` as soon as this process imports it."""
    after_import("multiprocessing.context", _prepare)


def _prepare(_context: Any) -> None:
    from multiprocessing.context import get_spawning_popen
    from multiprocessing.reduction import ForkingPickler

    def reducer_override(_pickler: Any, value: Any) -> Any:
        if not isinstance(value, type | FunctionType) or value.__module__ != "__main__":
            return NotImplemented
        if getattr(get_spawning_popen(), "method", "fork") == "fork":  # a queue, or a forked child, which has the cells
            return NotImplemented
        import cloudpickle

        return restore, (cloudpickle.dumps(value),)

    ForkingPickler.reducer_override = reducer_override  # type: ignore[attr-defined]


def restore(pickled: bytes) -> Any:
    """In the child: load the class or function, and store it in `__main__`."""
    from multiprocessing.reduction import ForkingPickler

    import cloudpickle

    ForkingPickler.reducer_override = _by_name  # type: ignore[attr-defined]
    value = cloudpickle.loads(pickled)
    main = sys.modules["__main__"]
    if "." not in value.__qualname__ and not hasattr(main, value.__qualname__):
        setattr(main, value.__qualname__, value)
    return value


def _by_name(_pickler: Any, value: Any) -> Any:
    """In the child: pickle restored classes and functions by name, so that the parent gets its own objects back."""
    if not isinstance(value, type | FunctionType) or value.__module__ != "__main__" or "<" in value.__qualname__:
        return NotImplemented
    return find, (value.__qualname__,)


def find(qualname: str) -> Any:
    """Find a class or function in `__main__`."""
    return attrgetter(qualname)(sys.modules["__main__"])
