"""Change existing classes in place: a class statement of the new source updates the class of its name.

While a module's new source is executed, its class statements do not create classes. Their bodies are executed, and the
results are put into the existing classes. A class thus keeps its identity: `isinstance`, pickles by name and live
objects remain valid, as do subclasses in other modules; decorators and registries get the same class again. If this is
not sound, the statement raises `Unsound`, or creates a class as usual, which `replacement` later compares with the old
class.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import enum
import gc
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, cast

# Replace the code of existing functions, so that every reference to them sees the new source.
#
# All functions of a module are found, wherever they are referenced: methods, functions below decorators, closures,
# callbacks in registries. Each is paired with the new code of its qualified name.

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

    def set_in_class(self, cls: type, name: str, value: object) -> None:
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

    def set_item(self, mapping: dict[Any, Any], key: object, value: object) -> None:
        """Set an item of a dict."""
        before = mapping.get(key, _MISSING)
        self.note(lambda: mapping.pop(key, None) if before is _MISSING else mapping.__setitem__(key, before))
        mapping[key] = value


def _put(cls: type, name: str, value: object) -> None:
    if value is not _MISSING:
        type.__setattr__(cls, name, value)
    elif name in vars(cls):
        type.__delattr__(cls, name)


def functions_of(namespaces: Iterable[dict[str, object]]) -> dict[int, list[FunctionType]]:
    """Return the live functions whose globals these are, by the id of the globals, in one pass over the heap."""
    wanted = {id(namespace): namespace for namespace in namespaces}
    found: dict[int, dict[int, FunctionType]] = {key: {} for key in wanted}
    held: list[object] = gc.get_referrers(*wanted.values())
    for namespace in wanted.values():
        held += _members(namespace, set())  # the collector does not see objects that a fork server has frozen
    for thing in held:
        if type(thing) is FunctionType and id(thing.__globals__) in wanted:
            found[id(thing.__globals__)][id(thing)] = thing
    return {key: list(functions.values()) for key, functions in found.items()}


def _members(namespace: dict[str, object], seen: set[int]) -> list[object]:
    found: list[object] = []
    for value in list(namespace.values()):
        if isinstance(value, type) and id(value) not in seen and value.__module__ == namespace.get("__name__"):
            seen.add(id(value))
            found += _members({**vars(value), "__name__": value.__module__}, seen)
        found += unwrapped(value)
    return found


def unwrapped(value: object) -> list[FunctionType]:
    """Return the functions in a member of a class or module: a property, static or class method, endpoint, wrapper."""
    found: list[FunctionType] = []
    todo: list[object] = [value]
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


#: Metaclasses whose classes can be changed in place.
PLAIN = (type, abc.ABCMeta)

# Created by the interpreter or `abc`, not by the body of a class.
_OF_MACHINERY = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__slots__", "__orig_bases__"),
        *("__abstractmethods__", "_abc_impl", "__parameters__", "__annotations__", "__firstlineno__"),
        *("__static_attributes__", "__type_params__", "__annotate__", "__annotations_cache__", "__annotate_func__"),
    }
)
# Created by the decorator `dataclass`, which creates them again unless they exist.
_OF_DATACLASS = frozenset(
    {
        *("__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__match_args__", "__replace__"),
        *("__setattr__", "__delattr__", "__dataclass_fields__", "__dataclass_params__", "__getstate__", "__setstate__"),
    }
)


class Unsound(Exception):
    """A change that existing objects cannot follow; the message names it and the reason."""


class ClassUpdate:
    """Updates of the class statements of one module.

    Args:
        name: of the module.
        namespace: of the module.
        before: the namespace before the update.
        bodies: the code of the class statements of the new source, by qualified name.
        old_names: the names that the old body of each class sets, by qualified name; classes that are missing are
            unknown.
        functions: updates the code of functions.
        journal: records the changes.
    """

    def __init__(
        self,
        name: str,
        namespace: dict[str, object],
        before: dict[str, object],
        bodies: dict[str, list[types.CodeType]],
        old_names: dict[str, set[str]],
        functions: FunctionUpdate,
        journal: Journal,
    ) -> None:
        self._name = name
        self._namespace = namespace
        self._before = before
        self._bodies = bodies
        self._old_names = old_names
        self._functions = functions
        self._journal = journal
        self._thread = threading.get_ident()
        #: The changed classes.
        self.changed: list[type] = []
        #: Why the module cannot be changed in place; recorded, as the module's own code may catch the exception.
        self.refusal: Unsound | None = None
        #: The parts of the change that live objects do not follow.
        self.notes: list[str] = []
        self._fields: dict[type, list[str]] = {}

    @contextmanager
    def watching(self) -> Any:
        """Make class statements of the module update its classes."""
        make: Callable[..., object] = builtins.__build_class__

        def build(body: Any, name: str, *bases: object, **keywords: object) -> object:
            if getattr(body, "__globals__", None) is self._namespace and threading.get_ident() == self._thread:
                old = self._old(body)
                if old is not None:
                    try:
                        return self._reopen(old, make, body, name, bases, keywords)
                    except Unsound as e:
                        self.refusal = self.refusal or e
                        raise
            return make(body, name, *bases, **keywords)

        builtins.__build_class__ = build
        try:
            yield
        finally:
            builtins.__build_class__ = make

    def _old(self, body: types.FunctionType) -> type | None:
        """Return the class that a class statement updates; None if it creates a new one."""
        path = body.__code__.co_qualname
        if len(self._bodies.get(path, ())) != 1:
            return None  # in a function, or several of this name in one module: the counterpart is unknown
        old = self.find(self._before, path)
        return old if old is not None and type(old) in PLAIN else None

    def find(self, namespace: dict[str, object], path: str) -> type | None:
        """Return the class of this module with a qualified name; None if there is none."""
        thing: Any = None
        inside = namespace
        for part in path.split("."):
            thing = inside.get(part)
            if not isinstance(thing, type):
                return None
            inside = dict(vars(thing))
        own = thing.__module__ == self._name and thing.__qualname__ == path
        return cast("type", thing) if own else None

    # -- a class statement ---------------------------------------------------------------------------

    def _reopen(
        self,
        old: type,
        make: Callable[..., object],
        body: types.FunctionType,
        name: str,
        bases: tuple[object, ...],
        keywords: dict[str, object],
    ) -> object:
        where = f"class {old.__qualname__}"
        resolved = types.resolve_bases(bases)
        metaclass, members, keywords = types.prepare_class(name, resolved, dict(keywords))
        if metaclass not in PLAIN and _is_named_tuple(old):
            return make(body, name, *bases, **keywords)
        if metaclass not in PLAIN:
            raise Unsound(f"{where}: its metaclass is {_label(metaclass)} now, and was {_label(type(old))}")
        # Nested functions of the body refer to the module, and `super()` finds the class through this cell.
        exec(body.__code__, self._namespace, members, closure=body.__closure__)  # type: ignore[call-overload]
        if _slots(members) != _slots(vars(old)):
            if "__slots__" not in members and dataclasses.is_dataclass(old):
                if resolved is not bases:
                    members["__orig_bases__"] = bases
                return metaclass(name, resolved, members, **keywords)  # `dataclass(slots=True)` makes another from it
            raise Unsound(
                f"{where}: its __slots__ are {_slots(members)} now, and were {_slots(vars(old))}: objects that exist "
                "have no other places"
            )
        if metaclass is not type(old):
            raise Unsound(f"{where}: its metaclass is {_label(metaclass)} now, and was {_label(type(old))}")
        self._set_bases(old, resolved, where)
        if resolved is not bases:
            members["__orig_bases__"] = bases
        cell = members.pop("__classcell__", None)
        if cell is not None:
            cell.cell_contents = old
        classdict = members.pop("__classdictcell__", None)
        if classdict is not None:
            classdict.cell_contents = members
        if dataclasses.is_dataclass(old):
            self._fields[old] = [each.name for each in dataclasses.fields(old)]
        self._fill(old, members)
        self.changed.append(old)
        for key, value in members.items():
            hook = getattr(type(value), "__set_name__", None)
            if hook is not None:
                hook(value, old, key)
        super(old, old).__init_subclass__(**keywords)  # type: ignore[misc]
        abc.update_abstractmethods(old)
        return old

    def _set_bases(self, old: type, bases: tuple[Any, ...], where: str) -> None:
        wanted = bases or (object,)
        if wanted == old.__bases__:
            return
        try:
            self._journal.set_bases(old, wanted)
        except TypeError as e:
            names = ", ".join(each.__qualname__ for each in wanted)
            raise Unsound(f"{where}: its bases are {names} now, which Python cannot change in place ({e})") from None

    def _fill(self, old: type, members: dict[str, object]) -> None:
        before = dict(vars(old))
        gone = self._gone(old, before, members)
        for key in gone:
            self._journal.delete_in_class(old, key)
        for key, value in members.items():
            if key in ("__dict__", "__weakref__", "__slots__"):
                continue
            if key in ("__init_subclass__", "__class_getitem__") and isinstance(value, types.FunctionType):
                value = classmethod(value)
            elif key == "__new__" and isinstance(value, types.FunctionType):
                value = staticmethod(value)
            self._journal.set_in_class(old, key, self._member(before.get(key), value))
        for key in ("__doc__", "__annotations__"):
            if key not in members and before.get(key):
                self._journal.set_in_class(old, key, None if key == "__doc__" else {})
        if "__eq__" in members and "__hash__" not in members:
            self._journal.set_in_class(old, "__hash__", None)

    def _gone(self, old: type, before: dict[str, object], members: dict[str, object]) -> list[str]:
        """Return the attributes that only the old body of a class set. Attributes set by a program are not included."""
        known = self._old_names.get(old.__qualname__)
        found: list[str] = []
        for key, value in before.items():
            if key in members or key in _OF_MACHINERY:
                continue
            if known is not None:
                own = key in known
            else:
                own = callable(value) or isinstance(value, property | staticmethod | classmethod)
            if own or key == "__hash__" or ("__dataclass_fields__" in before and key in _OF_DATACLASS):
                found.append(key)
        return found

    def _member(self, before: object, value: object) -> object:
        """Return the value to put into a class: the existing function with the new code, if that fits."""
        if (
            type(before) is types.FunctionType
            and type(value) is types.FunctionType
            and before.__globals__ is value.__globals__ is self._namespace
            and before.__qualname__ == value.__qualname__
            and before.__code__.co_freevars == value.__code__.co_freevars
            and set(value.__code__.co_freevars) <= {"__class__"}
            and self._functions.adopt(before, value)
        ):
            return before
        return value

    # -- after the execution of the module -----------------------------------------------------------

    def check_fields(self) -> None:
        """Record the fields of dataclasses that live objects do not have."""
        for cls, before in self._fields.items():
            if not dataclasses.is_dataclass(cls):
                continue
            added = [each.name for each in dataclasses.fields(cls) if each.name not in before]
            lacking = [name for name in added if name not in vars(cls)]
            if lacking:
                self.notes.append(f"class {cls.__qualname__}: objects that exist lack the new {', '.join(lacking)}")

    def replacement(self, old: type, new: type, same_source: bool) -> None:
        """Update a class from the class that the new source has created in its place.

        Raises:            Unsound: the class cannot be updated.
        """
        where = f"class {old.__qualname__}"
        if type(new) is not type(old):
            raise Unsound(f"{where}: its metaclass is {_label(type(new))} now, and was {_label(type(old))}")
        if isinstance(old, enum.EnumMeta):
            _check_same(where, "members", _members_of(old), _members_of(new))
        elif _is_named_tuple(old):
            for what in ("_fields", "_field_defaults"):
                _check_same(where, what, getattr(old, what), getattr(new, what, None))
        elif type(old) not in PLAIN:
            if not same_source:
                raise Unsound(f"{where}: its metaclass {_label(type(old))} makes of it what cannot be changed in place")
            return
        _check_same(where, "__slots__", _slots(vars(old)), _slots(vars(new)))
        if old.__bases__ != new.__bases__:
            raise Unsound(f"{where}: its bases have changed")
        self._transplant(old, new)

    def _transplant(self, old: type, new: type) -> None:
        plain = type(old) in PLAIN
        before = dict(vars(old))
        for key, value in list(vars(new).items()):
            if key in ("__dict__", "__weakref__", "__slots__") or isinstance(value, types.MemberDescriptorType):
                continue
            functions = unwrapped(value)
            own = [each for each in functions if each.__globals__ is self._namespace]
            if not own and not (plain and key not in _OF_MACHINERY and not functions):
                continue
            for each in own:
                _point_to(each, new, old)
            self._journal.set_in_class(old, key, self._member(before.get(key), value))
        for key, value in before.items():
            if key not in vars(new) and any(each.__globals__ is self._namespace for each in unwrapped(value)):
                self._journal.delete_in_class(old, key)
        self.changed.append(old)


def _is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_field_defaults")


def _point_to(function: types.FunctionType, new: type, old: type) -> None:
    """Make `super()` and `__class__` in a function of a new class refer to the old class."""
    for cell in function.__closure__ or ():
        try:
            if cell.cell_contents is new:
                cell.cell_contents = old
        except ValueError:  # it is empty
            continue


def _members_of(cls: Any) -> dict[str, object]:
    return {name: member.value for name, member in cls.__members__.items()}


def _check_same(where: str, what: str, old: object, new: object) -> None:
    if old != new:
        raise Unsound(f"{where}: its {what} are {new!r} now, and were {old!r}; objects that exist cannot follow")


def _slots(members: Any) -> tuple[str, ...] | None:
    slots = members.get("__slots__")
    if slots is None:
        return None
    return (slots,) if isinstance(slots, str) else tuple(sorted(slots))


def _label(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
