"""Make classes and functions of cells and scripts available in child processes of `multiprocessing`.

A forked process has those, by name, that existed before the fork. A spawned process has none, and an earlier fork lacks
later ones. For these processes they are pickled by value, each with a key by which the receiver recognises those that
it already has. They are found by name in the child's `__main__`.
"""

from __future__ import annotations

import functools
import os
import weakref
from types import FunctionType
from typing import Any

from monarch_kernel.loading import after_import
from monarch_kernel.protocol.main_module import MAIN, arrivals, arrived_before, install_rank_main

#: Keys of classes and functions that have been sent or received, and the reverse.
_keys: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
_objects: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
#: Objects received from the parent process, by key.
_from_parent: dict[str, object] = {}


class _Children:
    """The children of this process."""

    #: Whether a child was started without a fork, so that it has no objects.
    spawned = False
    #: Objects that arrived before this number are in all forks; 0: there is no fork yet.
    forked = 0


def install() -> None:
    """Patch the pickler of `multiprocessing` as soon as this process imports it."""
    after_import("multiprocessing.context", _prepare)
    after_import("multiprocessing.spawn", _watch_spawn)


def _prepare(_context: object) -> None:
    from multiprocessing.reduction import ForkingPickler

    ForkingPickler.reducer_override = _reduce  # type: ignore[attr-defined]
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _watch_spawn(spawn: Any) -> None:
    prepare = spawn.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> Any:
        _Children.spawned = True
        return prepare(name)

    spawn.get_preparation_data = get_preparation_data


def _before_fork() -> None:
    _Children.forked = _Children.forked or arrivals()


def _after_fork() -> None:
    _Children.forked, _Children.spawned = 0, False


def _reduce(_pickler: object, value: object) -> object:
    if not isinstance(value, type | FunctionType) or value.__module__ != MAIN:
        return NotImplemented
    key = _keys.get(value)
    if key in _from_parent and not _Children.spawned:
        return find, (key, value.__qualname__)
    from multiprocessing.context import get_spawning_popen

    if getattr(get_spawning_popen(), "method", "") == "fork":
        return NotImplemented
    if not _Children.spawned and (not _Children.forked or arrived_before(value, _Children.forked)):
        return NotImplemented
    if key is None:
        import uuid

        key = _keys[value] = uuid.uuid4().hex
        _objects[key] = value
    from monarch_kernel.protocol.by_value import by_value

    return restore, (key, by_value(value))


def restore(key: str, pickled: bytes) -> Any:
    """In the receiver: return the class or function of this key, unpickling it if it is new."""
    value = _objects.get(key)
    if value is None:
        import pickle
        from multiprocessing.reduction import ForkingPickler

        ForkingPickler.reducer_override = _reduce  # type: ignore[attr-defined]
        install_rank_main()
        value = _from_parent[key] = _objects[key] = pickle.loads(pickled)
        _keys[value] = key
    return value


def find(key: str, qualname: str) -> object:
    """In the parent: return an object that a child received from this process."""
    value = _objects.get(key)
    if value is None:
        raise AttributeError(f"{qualname} of a child process is no longer in the process that started it")
    return value
