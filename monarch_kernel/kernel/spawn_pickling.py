"""Classes and functions of cells in processes that `multiprocessing` spawns, such as a DataLoader's workers.

A spawned process has no cells, so that what comes from them cannot be found there by its name. While a process is being
spawned, it is pickled by value; in the child it takes its place in `__main__`, where later pickles find it by name.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from types import FunctionType
from typing import Any

from monarch_kernel.introspection import after_import


def install() -> None:
    """Prepare `multiprocessing`, as soon as this process imports it."""
    after_import("multiprocessing.context", _prepare)


def _prepare(_context: Any) -> None:
    from multiprocessing.context import get_spawning_popen
    from multiprocessing.reduction import ForkingPickler

    def reducer_override(_pickler: Any, value: Any) -> Any:
        if not isinstance(value, type | FunctionType) or value.__module__ != "__main__":
            return NotImplemented
        if getattr(get_spawning_popen(), "method", "fork") == "fork":  # a queue, or a child that has all of ours
            return NotImplemented
        import cloudpickle

        return restore, (cloudpickle.dumps(value),)

    ForkingPickler.reducer_override = reducer_override  # type: ignore[attr-defined]


def restore(pickled: bytes) -> Any:
    """In the child: the class or function, which is in its `__main__` from now on."""
    from multiprocessing.reduction import ForkingPickler

    import cloudpickle

    ForkingPickler.reducer_override = _by_name  # type: ignore[attr-defined]
    value = cloudpickle.loads(pickled)
    main = sys.modules["__main__"]
    if "." not in value.__qualname__ and not hasattr(main, value.__qualname__):
        setattr(main, value.__qualname__, value)
    return value


def _by_name(_pickler: Any, value: Any) -> Any:
    """In the child: what came with the classes and functions above is the parent's own again when it goes back."""
    if not isinstance(value, type | FunctionType) or value.__module__ != "__main__" or "<" in value.__qualname__:
        return NotImplemented
    return find, (value.__qualname__,)


def find(qualname: str) -> Any:
    """The class or function of `__main__`."""
    return attrgetter(qualname)(sys.modules["__main__"])
