"""Recreate values at the receiver instead of pickling them: caches, locks, context variables and sentinels.

Classes and functions that are pickled by value have these among their attributes and globals. A cache arrives empty and
a lock free; a sentinel is the same object in every message.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

_LRU = type(functools.lru_cache(lambda: None))
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_DISPATCH = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]
Reduced = Any

#: Objects that only have an identity, by key: those sent and those received.
_known: dict[str, Any] = {}
_keys: dict[int, str] = {}


def reduce_value(value: Any, kind: type) -> Reduced:
    """Reduce a value that pickle refuses or copies wrongly. Return None for all others.

    Raises:
        TypeError: the value has no meaning in another process.
    """
    reduced = _REDUCERS.get(kind)
    if reduced is not None:
        return reduced(value)
    module = kind.__module__
    name = _constants(module).get(id(value)) if kind.__reduce_ex__ is object.__reduce_ex__ else None
    if name is None or getattr(sys.modules.get(module), name, None) is not value or not _is_constant(value, module):
        return None  # it has acquired a state since it was looked up
    return _attribute, (module, name)


def reduce_function(function: types.FunctionType) -> Reduced:
    """Reduce a ``functools.singledispatch`` function that is pickled by value. Return None for all others."""
    if function.__code__ is not _DISPATCH:
        return None
    return _dispatcher, (), dict(function.registry), None, None, _fill_dispatcher  # type: ignore[attr-defined]


def reduce_misnamed(cls: type) -> Reduced:
    """Reduce a class that is missing in the module that it names, by a module that has it.

    Return None if no module has it.

    Raises:
        TypeError: it is compiled, so that it cannot go by value either.
    """
    module, name = cls.__module__, cls.__qualname__
    if module == "__main__" or "<" in name or module not in sys.modules or _in(sys.modules[module], name) is cls:
        return None
    first = name.partition(".")[0]
    having = [
        each
        for each, candidate in list(sys.modules.items())
        if each != "__main__" and first in getattr(candidate, "__dict__", ()) and _in(candidate, name) is cls
    ]
    if having:
        best = min(having, key=lambda each: ("._" in f".{each}", len(each)))
        return (_attribute, (best, name)) if "." not in name else (_nested, (best, name))
    if any(isinstance(each, _COMPILED) for key, each in vars(cls).items() if key not in ("__dict__", "__weakref__")):
        raise TypeError(f"cannot pickle the class {module}.{name}: it is compiled, and no module has it by its name")
    return None


_COMPILED = types.MethodDescriptorType | types.GetSetDescriptorType | types.ClassMethodDescriptorType


def _in(module: object, name: str) -> object:
    for each in name.split("."):
        module = getattr(module, "__dict__", {}).get(each)
    return module


def _nested(module: str, name: str) -> object:
    first, *rest = name.split(".")
    return functools.reduce(getattr, rest, _attribute(module, first))


def _dispatcher() -> object:
    return functools.singledispatch(lambda value: value)


def _fill_dispatcher(dispatcher: Any, registry: dict[type, Callable[..., object]]) -> None:
    for kind, function in registry.items():
        dispatcher.register(kind, function)
    functools.update_wrapper(dispatcher, registry[object])


def _reduce_lru(cached: Any) -> Reduced:
    parameters = cached.cache_parameters()
    return _cached, (parameters["maxsize"], parameters["typed"], cached.__wrapped__)


def _cached(maxsize: int | None, typed: bool, function: Callable[..., object]) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_cached_property(value: Any) -> Reduced:
    return _cached_property, (value.func, value.attrname)


def _cached_property(function: Callable[..., object], name: str | None) -> object:
    made: functools.cached_property[object] = functools.cached_property(function)
    made.attrname = name
    return made


class Anew:
    """Stands in a pickle for a lock of a class or of globals. As an argument, a lock has no meaning elsewhere."""

    def __init__(self, value: Any) -> None:
        self.value = value


#: Types that are recreated if they are attributes of a class or globals of a function.
MADE_ANEW = frozenset(
    {_LOCK, _RLOCK, threading.Event, threading.Condition, threading.Semaphore, threading.BoundedSemaphore}
    | {threading.local}
)


def reduce_anew(anew: Anew) -> Reduced:
    """Reduce a marked value, so that the receiver recreates it.

    Raises:
        TypeError: it is a lock that is held.
    """
    value = anew.value
    kind = type(value)
    if kind is _LOCK or kind is _RLOCK:
        if value._is_owned() if kind is _RLOCK else value.locked():
            raise TypeError("cannot pickle a lock that is held")
        return (threading.Lock if kind is _LOCK else threading.RLock), ()
    if kind is threading.Event:
        return _event, (value.is_set(),)
    if kind is threading.Condition:
        return kind, (value._lock,)
    return kind, () if kind is threading.local else (value._value,)


def _event(is_set: bool) -> threading.Event:
    made = threading.Event()
    if is_set:
        made.set()
    return made


def _reduce_weak_dictionary(value: Any) -> Reduced:
    return type(value), (dict(value),)


def _reduce_context_variable(variable: contextvars.ContextVar[object]) -> Reduced:
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__dict__", {}).get(variable.name) is variable:
            return _attribute, (name, variable.name)
    try:
        default = (contextvars.Context().run(variable.get),)
    except LookupError:
        default = ()
    return _context_variable, (_key(variable), variable.name, *default)


def _context_variable(key: str, name: str, *default: object) -> object:
    if key not in _known:
        made = contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name)
        _keep(key, made)
    return _known[key]


def _reduce_object(value: object) -> Reduced:
    return _object, (_key(value),)


def _object(key: str) -> object:
    if key not in _known:
        _keep(key, object())
    return _known[key]


def _key(value: object) -> str:
    key = _keys.get(id(value))
    if key is None:
        key = uuid.uuid4().hex
        _keep(key, value)
    return key


def _keep(key: str, value: object) -> None:
    _known[key] = value
    _keys[id(value)] = key


@functools.lru_cache(maxsize=256)
def _constants(module: str) -> dict[int, str]:
    """Map the ids of stateless objects of a module's own classes, such as ``dataclasses.MISSING``, to their names."""
    names = getattr(sys.modules.get(module), "__dict__", {}) if module != "__main__" else {}
    return {id(value): name for name, value in list(names.items()) if _is_constant(value, module)}


def _is_constant(value: object, module: str) -> bool:
    kind = type(value)
    return (
        kind.__module__ == module
        and getattr(value, "__dict__", None) == {}  # those of C, which have none, keep their state elsewhere
        and kind.__reduce__ is object.__reduce__
        and not any("__slots__" in vars(each) for each in kind.__mro__)
    )


def _attribute(module: str, name: str) -> object:
    __import__(module)
    return getattr(sys.modules[module], name)


_REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    _LRU: _reduce_lru,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
    contextvars.ContextVar: _reduce_context_variable,
    object: _reduce_object,
}
