"""Replace the code of existing functions, so that every reference to them sees the new source.

All functions of a module are found, wherever they are referenced: methods, functions below decorators, closures,
callbacks in registries. Each is paired with the new code of its qualified name.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

# Record the steps of a change in place, so that all of it can be undone.

_MISSING: Any = object()
_OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__", "__qualname__")


class Journal:
    """The undo steps, newest last."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def roll_back(self) -> None:
        """Undo everything."""
        while self._steps:
            self._steps.pop()()

    def note(self, step: Callable[[], object]) -> None:
        """Record how to undo the next step."""
        self._steps.append(step)

    def note_dict(self, mapping: dict[Any, Any]) -> None:
        """Record the current content of a dict."""
        before = dict(mapping)

        def undo() -> None:
            for key in [key for key in mapping if key not in before]:
                del mapping[key]
            mapping.update(before)

        self.note(undo)

    def note_function(self, function: FunctionType) -> None:
        """Record the current state of a function."""
        before = {name: getattr(function, name) for name in _OF_FUNCTION}
        attributes = dict(function.__dict__)

        def undo() -> None:
            for name, value in before.items():
                setattr(function, name, value)
            function.__dict__.clear()
            function.__dict__.update(attributes)

        self.note(undo)

    def set_in_class(self, cls: type, name: str, value: Any) -> None:
        """Set an attribute of a class, bypassing its metaclass."""
        before = vars(cls).get(name, _MISSING)
        self.note(lambda: _put(cls, name, before))
        type.__setattr__(cls, name, value)

    def delete_in_class(self, cls: type, name: str) -> None:
        """Delete an attribute of a class, bypassing its metaclass."""
        before = vars(cls)[name]
        self.note(lambda: _put(cls, name, before))
        type.__delattr__(cls, name)

    def set_bases(self, cls: type, bases: tuple[type, ...]) -> None:
        """Set the bases of a class; raise TypeError if Python does not allow it."""
        before = cls.__bases__
        cls.__bases__ = bases
        self.note(lambda: setattr(cls, "__bases__", before))

    def set_item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an item of a dict."""
        before = mapping.get(key, _MISSING)
        self.note(lambda: mapping.pop(key, None) if before is _MISSING else mapping.__setitem__(key, before))
        mapping[key] = value


def _put(cls: type, name: str, value: Any) -> None:
    if value is not _MISSING:
        type.__setattr__(cls, name, value)
    elif name in vars(cls):
        type.__delattr__(cls, name)


def functions_of(namespaces: Iterable[dict[str, Any]]) -> dict[int, list[FunctionType]]:
    """Return the live functions whose globals these are, by the id of the globals, in one pass over the heap."""
    wanted = {id(namespace): namespace for namespace in namespaces}
    found: dict[int, dict[int, FunctionType]] = {key: {} for key in wanted}
    held: list[Any] = gc.get_referrers(*wanted.values())
    for namespace in wanted.values():
        held += _members(namespace, set())  # the collector does not see objects that a fork server has frozen
    for thing in held:
        if type(thing) is FunctionType and id(thing.__globals__) in wanted:
            found[id(thing.__globals__)][id(thing)] = thing
    return {key: list(functions.values()) for key, functions in found.items()}


def _members(namespace: dict[str, Any], seen: set[int]) -> list[Any]:
    found: list[Any] = []
    for value in list(namespace.values()):
        if isinstance(value, type) and id(value) not in seen and value.__module__ == namespace.get("__name__"):
            seen.add(id(value))
            found += _members({**vars(value), "__name__": value.__module__}, seen)
        found += unwrapped(value)
    return found


def unwrapped(value: Any) -> list[FunctionType]:
    """Return the functions in a member of a class or module: a property, static or class method, endpoint, wrapper."""
    found: list[FunctionType] = []
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if type(thing) is FunctionType:
            found.append(thing)
        if isinstance(thing, property):
            todo += [each for each in (thing.fget, thing.fset, thing.fdel) if each is not None]
        elif not isinstance(thing, type):
            for name in ("__func__", "__wrapped__", "function", "func"):
                inner = inspect.getattr_static(thing, name, None)
                if type(inner) is FunctionType or isinstance(inner, staticmethod | classmethod):
                    todo.append(inner)
    return found


def codes_of(code: CodeType) -> dict[str, list[CodeType]]:
    """Return the code of all functions in a module's code, by qualified name, in source order."""
    found: dict[str, list[CodeType]] = {}
    for each in _tree(code):
        if each.co_flags & inspect.CO_OPTIMIZED:  # classes and modules are not functions
            found.setdefault(each.co_qualname, []).append(each)
    return found


def class_bodies_of(code: CodeType) -> dict[str, list[CodeType]]:
    """Return the code of all class statements outside functions, by qualified name."""
    found: dict[str, list[CodeType]] = {}
    for each in _tree(code):
        if not each.co_flags & inspect.CO_OPTIMIZED and each is not code and "<locals>" not in each.co_qualname:
            found.setdefault(each.co_qualname, []).append(each)
    return found


def _tree(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _tree(constant)


class FunctionUpdate:
    """Updates the code of the functions of one module.

    Args:
        old: the code of the module as loaded; None if unknown.
        new: the code of the new source.
        journal: records the changes.
    """

    def __init__(self, old: CodeType | None, new: CodeType, journal: Journal) -> None:
        self._old = None if old is None else codes_of(old)
        self._new = codes_of(new)
        self._journal = journal
        #: The parts of the change that old functions do not follow.
        self.notes: list[str] = []
        #: The functions that have new code.
        self.updated: set[int] = set()

    def update(self, functions: Iterable[FunctionType]) -> None:
        """Replace the code of old functions, wherever a new one of the same name fits."""
        by_name: dict[str, list[FunctionType]] = {}
        for function in functions:
            by_name.setdefault(function.__code__.co_qualname, []).append(function)
        for name, same in by_name.items():
            candidates = self._new.get(name)
            if candidates:
                self._pair(name, same, candidates)

    def _pair(self, name: str, functions: list[FunctionType], candidates: list[CodeType]) -> None:
        live = sorted({id(f.__code__): f.__code__ for f in functions}.values(), key=lambda code: code.co_firstlineno)
        before = live
        if self._old is not None and all(code in self._old.get(name, ()) for code in live):
            before = self._old[name]
        unclear = 0
        for function in functions:
            code = function.__code__
            if code not in before:
                continue
            new = candidates[before.index(code)] if len(before) == len(candidates) else _equal(code, candidates)
            if new is None and len(candidates) == 1 and len(live) == 1:
                new = candidates[0]
            if new is None:
                unclear += 1
            elif self.set_code(function, new):
                self.updated.add(id(function))
        if unclear:
            self.notes.append(f"{name}: there are several of that name, so those that exist keep their code")

    def set_code(self, function: FunctionType, code: CodeType) -> bool:
        """Replace the code of a function; return False if its closure does not fit."""
        if function.__code__.co_freevars != code.co_freevars:
            self.notes.append(
                f"{code.co_qualname}: it closes over {_names(code.co_freevars)} now, and over "
                f"{_names(function.__code__.co_freevars)} before, so functions that exist keep their code"
            )
            return False
        self._journal.note_function(function)
        with warnings.catch_warnings():  # a function may become a generator
            warnings.simplefilter("ignore", DeprecationWarning)
            function.__code__ = code
        return True

    def adopt(self, old: FunctionType, new: FunctionType) -> bool:
        """Make a function equal to a new one, except for its closure; return False if the closure does not fit."""
        if not self.set_code(old, new.__code__):
            return False
        self.updated.add(id(old))
        old.__defaults__ = new.__defaults__
        old.__kwdefaults__ = new.__kwdefaults__
        old.__doc__ = new.__doc__
        old.__annotations__ = new.__annotations__
        old.__qualname__ = new.__qualname__
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)
        return True


def _equal(code: CodeType, candidates: list[CodeType]) -> CodeType | None:
    """Return the only candidate with equal behaviour, whatever its line numbers."""
    same = [each for each in candidates if _content(each) == _content(code)]
    return same[0] if len(same) == 1 else None


def _content(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(_content(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
