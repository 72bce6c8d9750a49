"""Replace actor classes and tensor engines in tests of programs: ``patch_actor`` and ``patch_tensor_engine``.

A replacement applies in this process, and in the procs that this process spawns while it is active.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from functools import wraps
from typing import Any

from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.definition import is_coroutine_function
from monarch_kernel.runtime.actor.extensions import tensor_functions

_actors: dict[type, type] = {}
_engines: dict[type, Callable[[Any], Any] | None] = {}


class _Patch(ContextDecorator):
    """A temporary entry of a table: a context manager, and a decorator for sync and async functions."""

    def __init__(self, table: dict[type, Any], key: type, value: Any) -> None:
        self._table = table
        self._key = key
        self._value = value
        self._before: list[dict[type, Any]] = []

    def __enter__(self) -> Any:
        self._before.append({self._key: self._table[self._key]} if self._key in self._table else {})
        self._table[self._key] = self._value
        return None

    def __exit__(self, *_exc: object) -> None:
        self._table.pop(self._key)
        self._table.update(self._before.pop())

    def __call__(self, function: Any) -> Any:
        if not is_coroutine_function(function):
            return super().__call__(function)

        @wraps(function)
        async def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return within


class patch_actor(_Patch):  # noqa: N801  # Monarch's name
    """Spawn ``mock`` wherever the program spawns ``original``: ``with patch_actor(Big, Small):``, or as a decorator."""

    def __init__(self, original: type, mock: type) -> None:
        super().__init__(_actors, original, mock)

    def __enter__(self) -> type:
        super().__enter__()
        return self._value


class patch_tensor_engine(_Patch):  # noqa: N801  # Monarch's name
    """Replace the tensor engine for actors of a class: they activate a mesh from a factory.

    Args:
        actor_class: the class of these actors.
        mock_factory: called with the proc mesh that the actor activates; returns the mesh to activate instead. None
            simulates a mesh with the same number of ranks, which computes only shapes.
    """

    def __init__(self, actor_class: type, mock_factory: Callable[[Any], Any] | None = None) -> None:
        super().__init__(_engines, actor_class, mock_factory)


def stand_in(cls: Any) -> Any:
    """Return the class to spawn in place of this one."""
    return _actors.get(cls, cls) if _actors else cls


def mock_mesh(procs: Any) -> Any:
    """Return the mesh that the running actor activates in place of these procs; None: the procs themselves."""
    here = current.get() if _engines else None
    running = getattr(here.actor_instance, "object", None) if here is not None else None
    for cls in type(running).__mro__:
        if cls in _engines:
            factory = _engines[cls]
            return _simulated(procs) if factory is None else factory(procs)
    return None


def _simulated(procs: Any) -> object:
    return tensor_functions().Simulator(hosts=1, gpus=len(procs)).mesh


class _WithStandIns:
    """A bootstrap of new procs that first sets the replacements of the process that spawns them."""

    def __init__(self, bootstrap: Callable[[], object] | None) -> None:
        self._bootstrap = bootstrap
        self._state = dict(_actors), dict(_engines)

    def __call__(self) -> object:
        actors, engines = self._state
        _actors.update(actors)
        _engines.update(engines)
        return self._bootstrap() if self._bootstrap is not None else None


def bootstrap_with_stand_ins(bootstrap: Callable[[], object] | None) -> Callable[[], object] | None:
    """Return the bootstrap of new procs, extended by the replacements that are active here, if there are any."""
    return _WithStandIns(bootstrap) if _actors or _engines else bootstrap
