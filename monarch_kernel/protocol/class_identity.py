"""Identify equal classes of a ``__main__``: rerunning an unchanged cell defines the same classes again.

cloudpickle gives each class an identity by which receivers recognise it. A class that replaces another class of the
same name, and equals it as it was when first sent, gets the same identity. Members of an enum then stay equal at actors
that hold the old class, and ``except`` catches their exceptions.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import io
import linecache
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.main_module import MAIN, file_of_class, main_names

#: Larger attributes are not compared, and count as different (bytes).
_MOST_COMPARED = 1 << 16
#: The number of definitions remembered for one name.
_MOST_DEFINITIONS = 8

_SKIPPED = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__firstlineno__", "__module__", "_abc_impl", "__annotations_cache__"}
    | {"__slotnames__"}  # what pickle has cached
    | {"_value2member_map_"}  # where enum caches combinations of flags; members are attributes, too
    | {f"__pydantic_{name}__" for name in ("core_schema", "validator", "serializer", "parent_namespace")}
)
_FIELD = tuple(name for name in dataclasses.Field.__slots__ if name not in ("_field_type",))


class _Definition:
    """A class as it was when it was first sent: its identity, its code, and its code with everything that it uses."""

    def __init__(self, identity: str, code: object, whole: object) -> None:
        self.identity = identity
        self.code = code
        self.whole = whole


_definitions: dict[str, list[_Definition]] = {}
_warned: set[str] = set()  # names of classes
_described: set[int] = set()  # classes that are being described


def identify(cls: type, pickle_value: Callable[[object, object], object]) -> None:
    """Give a class of ``__main__`` the identity of an equal class that it replaces.

    If it replaces none, cloudpickle creates a new identity.

    Args:
        cls: the class.
        pickle_value: writes the pickle of a value to a file.
    """
    from cloudpickle import cloudpickle

    by_class = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    if cls in by_class or not _is_defined_here(cls) or id(cls) in _described:
        return
    code = _text_of(cls) or _Description(False, pickle_value).of(cls)
    whole = _Description(True, pickle_value).of(cls)
    known = _definitions.setdefault(cls.__qualname__, [])
    same = next((each for each in known if each.whole == whole), None)
    if same is not None:
        with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
            by_class[cls] = same.identity
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[same.identity] = cls
        return
    if cls.__qualname__ not in _warned and any(each.code == code for each in known):
        _warned.add(cls.__qualname__)
        warnings.warn(
            f"{cls.__qualname__} was defined again with the same code, but something that it uses has changed: actors "
            "that got it before do not recognize the new class; spawn them again, or send them values of the old one",
            RuntimeWarning,
            stacklevel=2,
        )
    known.append(_Definition(cloudpickle._get_or_create_tracker_id(cls), code, whole))
    del known[:-_MOST_DEFINITIONS]


def current_class(identity: str, known: type | None, pickle_value: Callable[[object, object], object]) -> type | None:
    """Find the current class of ``__main__`` with this identity, even if another class had it when it was sent.

    If there is none, return ``known``.
    """
    from cloudpickle import cloudpickle

    name = known.__qualname__ if known is not None else _name_of(identity)
    if name is None or (known is not None and known.__module__ != MAIN):
        return known
    now = _defined(name)
    if isinstance(now, type) and now is not known:
        identify(now, pickle_value)
        if cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(now) == identity:
            return now
    return known


def _name_of(identity: str) -> str | None:
    return next((name for name, all_ in _definitions.items() if any(each.identity == identity for each in all_)), None)


def _is_defined_here(cls: type) -> bool:
    """Return whether a class is the current value of its name in ``__main__``.

    Actor classes are new each time that their cell has run.
    """
    return cls.__module__ == MAIN and not hasattr(cls, "__tool__") and _defined(cls.__qualname__) is cls


def _defined(qualname: str) -> object:
    first, *rest = qualname.split(".")
    found = main_names().get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found


def _text_of(cls: type) -> str | None:
    """Find the source of a class; None if its cell or file is unknown."""
    file = file_of_class(cls)
    text = "".join(linecache.getlines(file)) if file is not None else ""
    if not text:
        return None
    try:
        found: list[ast.stmt] = ast.parse(text).body
    except SyntaxError:
        return None
    definition: ast.stmt | None = None
    for name in cls.__qualname__.split("."):
        named = [each for each in found if isinstance(each, ast.ClassDef) and each.name == name]
        if not named:
            return None
        definition, found = named[-1], named[-1].body
    return ast.unparse(definition) if definition is not None else None


class _Description:
    """Describes values so that equal descriptions mean equal definitions.

    Args:
        whole: also describe values of attributes and globals, in addition to the code.
        pickle_value: writes the pickle of a value to a file.
    """

    def __init__(self, whole: bool, pickle_value: Callable[[object, object], object]) -> None:
        self._whole = whole
        self._pickle_value = pickle_value
        self._seen: dict[int, int] = {}  # in the order in which they were met

    def of(self, value: Any) -> object:
        kind = type(value)
        if kind in (int, float, str, bytes, bool, complex, type(None), type(...)):
            return kind, value
        if isinstance(value, types.CodeType):
            return self._code(value)
        if id(value) in self._seen:
            return "met", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, classmethod | staticmethod):
            return kind, self.of(value.__func__)
        if isinstance(value, property):
            return kind, self.of(value.fget), self.of(value.fset), self.of(value.fdel)
        if isinstance(value, functools.cached_property):
            return kind, self.of(value.func)
        if isinstance(value, functools.singledispatchmethod):
            return kind, self.of(value.dispatcher), self.of(value.func)
        if isinstance(value, typing.TypeVar):
            rest = (value.__bound__, *value.__constraints__)
            return kind, value.__name__, value.__covariant__, value.__contravariant__, [self.of(each) for each in rest]
        if hasattr(value, "cache_parameters"):
            return kind, self.of(value.__wrapped__), repr(value.cache_parameters())
        if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
            return kind, value.__name__
        if isinstance(value, enum.Enum):
            return "member", value.name, self.of(value.value)
        if not self._whole:
            return kind.__module__, kind.__qualname__
        if typing.get_origin(value) is not None:
            return kind, self.of(typing.get_origin(value)), [self.of(each) for each in typing.get_args(value)]
        if kind is dataclasses.Field:
            return kind, [self.of(getattr(value, name)) for name in _FIELD], value._field_type.name
        if kind in (tuple, list):
            return kind, [self.of(each) for each in value]
        if kind in (dict, types.MappingProxyType):
            return kind, [(self.of(key), self.of(each)) for key, each in value.items()]
        if kind in (set, frozenset):
            return kind, sorted(repr(self.of(each)) for each in value)
        if kind.__module__ == MAIN and isinstance(getattr(value, "__dict__", None), dict):
            return self.of(kind), self.of(vars(value))
        return kind, self._pickled(value)

    def _class(self, cls: type) -> object:
        if cls.__module__ != MAIN:
            return "class", cls.__module__, cls.__qualname__, id(cls)
        _described.add(id(cls))
        try:
            members = [(name, self.of(value)) for name, value in vars(cls).items() if name not in _SKIPPED]
            return cls.__qualname__, type(cls).__qualname__, [self.of(each) for each in cls.__bases__], members
        finally:
            _described.discard(id(cls))

    def _function(self, function: types.FunctionType) -> object:
        if isinstance(registry := getattr(function, "registry", None), types.MappingProxyType):  # of `singledispatch`
            return "singledispatch", function.__qualname__, self.of(registry)
        code = self._code(function.__code__)
        if not self._whole or (function.__module__ != MAIN and function.__globals__.get("__name__") != MAIN):
            return function.__qualname__, code
        names = _names_in(function.__code__)
        used = [(name, self.of(function.__globals__[name])) for name in names if name in function.__globals__]
        cells = [self.of(_content(cell)) for cell in function.__closure__ or ()]
        rest = (function.__defaults__, function.__kwdefaults__, function.__annotations__, vars(function))
        return function.__qualname__, code, used, cells, [self.of(each) for each in rest]

    def _code(self, code: types.CodeType) -> object:
        """Describe a code object without its file and its lines."""
        constants = [self._code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return code.co_code, constants, shape, names

    def _pickled(self, value: object) -> object:
        """Pickle a value of another module.

        If it has none, or a large one, return something that equals no other value.
        """
        out = _Limited()
        try:
            self._pickle_value(value, out)
        except Exception:
            return object()
        return out.getvalue()


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names_in(code: types.CodeType) -> list[str]:
    """List the names that code and nested code use, in order, including globals."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names_in(constant)))
    return list(found)


class _Limited(io.BytesIO):
    """Accepts a small pickle."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > _MOST_COMPARED:
            raise ValueError("too large to compare")
        return super().write(data)
