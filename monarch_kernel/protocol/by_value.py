"""Pickle definitions of a script or notebook by value, with cloudpickle.

This module is loaded when an object is first pickled by value.
"""

from __future__ import annotations

import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import cloudpickle
from cloudpickle import cloudpickle as internals

from monarch_kernel.protocol.class_identity import current_class, identify
from monarch_kernel.protocol.main_module import (
    MAIN,
    Annotations,
    arrived,
    keep_source,
    main_names,
    names_in_text,
    source_of,
)
from monarch_kernel.protocol.restored_values import (
    MADE_ANEW,
    Anew,
    reduce_anew,
    reduce_function,
    reduce_misnamed,
    reduce_value,
)
from monarch_kernel.protocol.serialize import (
    CACHED_FUNCTION,
    OUT_OF_BAND_KINDS,
    PLAIN,
    goes_by_value,
    is_of_pickler,
    keep_in,
)


class ByValuePickler(cloudpickle.Pickler):
    """cloudpickle's pickler, with tensors' memory out of band, and without changes to classes that the receiver has.

    cloudpickle recognises a class that the receiver has, its own or one received earlier, and then sets all its
    attributes again, to their values on the sender; this pickler prevents that. Definitions of ``__main__`` also carry
    their source, and the names in their annotations that are text. These names are last, so that ``by_value`` can leave
    them out.
    """

    #: Whether to send the objects that annotations name.
    with_names = True

    def __init__(self, file: Any, protocol: int | None = None, buffer_callback: object = None) -> None:
        super().__init__(file, protocol, buffer_callback)
        self._file = file
        self._wanted: list[_Named] = []
        self._seen: set[tuple[int, str]] = set()
        self._anew: dict[int, Anew] = {}
        self._owners: list[Any] = []  # classes and functions that are pickled by value
        #: The object being pickled because an annotation names it, and the start of the first such object.
        self.late: _Named | None = None
        self._began = 0

    @property
    def late_bytes(self) -> int:
        """The number of bytes written for objects that annotations name."""
        return self._file.tell() - self._began if self.late is not None else 0

    def dump(self, obj: object) -> None:
        super().dump(_WithNames(obj) if self.with_names else obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if self.late is not None and self.late_bytes > _MOST_NAMED:
            raise ValueError("too large for what an annotation names")
        reduce = OUT_OF_BAND_KINDS.get(kind.__name__)
        if reduce is not None:
            if self.late is not None and obj.nbytes > _MOST_NAMED:
                raise ValueError("too large for what an annotation names")
            reduced = reduce(obj, kind)
            if reduced is not NotImplemented:
                return reduced
        if kind in _PARTS or kind is Anew:
            return self._reduce_part(obj, kind)
        if isinstance(obj, type):
            identify(obj, _write_by_value)
        elif kind is types.CellType:
            return _reduce_cell(obj, self._anew_of)
        elif kind is not types.FunctionType:
            if kind is CACHED_FUNCTION and not goes_by_value(obj.__wrapped__):
                return NotImplemented
            return reduce_value(obj, kind) or super().reducer_override(obj)
        elif (reduced := reduce_function(obj)) and goes_by_value(obj):
            return reduced
        reduced = super().reducer_override(obj)
        if type(reduced) is not tuple or len(reduced) != 6:
            return reduced
        if isinstance(obj, type) and (elsewhere := reduce_misnamed(obj)):
            return elsewhere
        make, arguments, (state, slots), items, pairs, fill = cast("tuple[Any, ...]", reduced)
        self._owners.append(obj)
        state = self._with_anew(state)
        if isinstance(obj, type):
            annotations = state.get("__annotations__")
            if obj.__module__ == MAIN and isinstance(annotations, dict) and names_in_text(annotations):
                scope = annotations.scope if type(annotations) is Annotations else main_names()
                state = {**state, "__annotations__": Annotations(annotations, self._want(annotations, scope))}
            arguments, make, fill = (make, *arguments), _class_of, _fill_class
            return make, arguments, (state, slots), items, pairs, fill
        slots: dict[str, Any] = {**slots, "__globals__": self._with_anew(slots["__globals__"])}
        if obj.__module__ == MAIN:
            self._want(obj.__annotations__, obj.__globals__)
            slots["__source__"] = source_of(obj)
            fill = _fill_function
        return make, arguments, (state, slots), items, pairs, fill

    def _with_anew(self, names: dict[str, object]) -> dict[str, object]:
        """Mark recreated values among the attributes of a class, or the globals of a function."""
        if MADE_ANEW.isdisjoint(map(type, names.values())):
            return names
        return {name: self._anew_of(value) for name, value in names.items()}

    def _anew_of(self, value: object) -> object:
        if type(value) not in MADE_ANEW:
            return value
        return self._anew.setdefault(id(value), Anew(value))

    def culprit(self) -> str:
        """Name the attribute or global that cannot be pickled, and its class or function.

        The result is "" if it is another value.
        """
        for owner in reversed(self._owners):
            kind, names = "an attribute", vars(owner)
            if isinstance(owner, types.FunctionType):
                used = internals._extract_code_globals(owner.__code__)
                kind, names = "a global", {x: owner.__globals__[x] for x in used if x in owner.__globals__}
            for name, value in names.items():
                if type(value) in PLAIN or type(value) in _DESCRIPTORS:
                    continue
                try:
                    _write_by_value(value, _Nowhere())
                except Exception:
                    return f"{name}, {kind} of {owner.__qualname__}"
        return ""

    def _reduce_part(self, obj: Any, kind: type) -> object:
        if kind is _WithNames:
            return _first, (obj.value, _Names())
        if kind is Anew:
            make, arguments = reduce_anew(obj)
            return make, tuple(self._anew_of(each) for each in arguments)
        if kind is Annotations:
            return Annotations, (dict(obj), obj.scope)
        if kind is _Named:
            if self.late is None:
                self._began = self._file.tell()
            self.late = obj
            return _set_name, (obj.scope, obj.name, obj.value)
        # `_Names`: all that was to be pickled has been, and what its annotations name is known.
        wanted, self._wanted = self._wanted, []
        return (_first, (wanted, _Names())) if wanted else (_first, (None, None))

    def _want(self, annotations: dict[str, object], names: dict[str, object]) -> dict[str, object]:
        """Send along the objects that annotations name. Return the source of their globals at the receiver."""
        scope = self.globals_ref.setdefault(id(names), {})
        if not scope:  # as cloudpickle begins it
            scope.update((key, names[key]) for key in _OF_MODULES if key in names)
        for name in names_in_text(annotations) if self.with_names else ():
            if name in names and (id(names), name) not in self._seen:
                self._seen.add((id(names), name))
                value = names[name]
                if _left_out.get(name) != id(value):
                    self._wanted.append(_Named(scope, name, value))
        return scope


#: The maximum size of the objects that annotations name in a message (bytes). Some of them are large data.
_MOST_NAMED = 1 << 18
#: Names in annotations whose objects are not sent, with the identity of the value that could not be pickled.
_left_out: dict[str, int] = {}
#: Modules of the exceptions by which picklers reject an object.
_PICKLES = ("builtins", "_pickle")
_OF_MODULES = ("__package__", "__name__", "__path__", "__file__")


class _WithNames:
    """An object to be pickled, followed by the objects that its annotations name."""

    def __init__(self, value: object) -> None:
        self.value = value


class _Names:
    """Stands for the objects that annotations of all earlier objects name."""


class _Named:
    """The value of a name in an annotation, and the globals of its class or function."""

    def __init__(self, scope: dict[str, object], name: str, value: object) -> None:
        self.scope, self.name, self.value = scope, name, value


_PARTS = frozenset({_WithNames, _Names, _Named, Annotations})


def _reduce_cell(cell: types.CellType, anew_of: Callable[[object], object]) -> object:
    try:
        content = cell.cell_contents
    except ValueError:
        return internals._make_empty_cell, ()
    return internals._make_cell, (anew_of(content),)


def _first(value: object, _names: object) -> object:
    return value


def _set_name(scope: dict[str, object], name: str, value: object) -> None:
    scope.setdefault(name, value)


def by_value(obj: object, kept: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Pickle an object like ``cloudpickle.dumps``. Large buffers are added to ``kept``, if it is given.

    Objects that only an annotation names are left out if they are large or cannot be pickled.
    """
    while True:
        out = io.BytesIO()
        pickler = ByValuePickler(out, 5, buffer_callback=None if kept is None else keep_in(kept))
        try:
            pickler.dump(obj)
            if pickler.late_bytes <= _MOST_NAMED:
                return out.getvalue()
        except Exception as error:
            if pickler.late is None:
                # other errors are more specific, for example that a tensor is among the arguments
                plain = type(error).__module__ in _PICKLES
                if plain and is_of_pickler(error) and (culprit := pickler.culprit() or _attribute_in(obj)):
                    raise TypeError(f"{error} ({culprit})") from error
                raise
        late = cast("_Named", pickler.late)
        _left_out[late.name] = id(late.value)
        if kept is not None:
            kept.clear()


def _attribute_in(value: object, depth: int = 8) -> str:
    """Name the outermost attribute of an object that cannot be pickled, and its class; "" if there is none."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        items = value.values() if isinstance(value, dict) else value
        return next((_attribute_in(each, depth - 1) for each in items if not _can_go(each)), "") if depth else ""
    attributes = getattr(value, "__dict__", None)
    names = [name for name, each in attributes.items() if not _can_go(each)] if type(attributes) is dict else []
    return f"{names[0]}, an attribute of a {type(value).__qualname__}" if names else ""


def _can_go(value: object) -> bool:
    try:
        _write_by_value(value, _Nowhere())
    except Exception:
        return False
    return True


#: Parts of classes that Python creates, and that are never sent.
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType})


class _Nowhere:
    """A file that discards a pickle."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return len(data)

    def tell(self) -> int:
        return 0


def _write_by_value(obj: object, out: object) -> None:
    pickler = ByValuePickler(out, 5)
    pickler.dump(pickler._anew_of(obj))


#: Classes that were created from a pickle, and have no attributes yet.
_empty_classes: weakref.WeakSet[type] = weakref.WeakSet()


def _class_of(make: Callable[..., type], *arguments: Any) -> type:
    """Find the class of this identity, the next-to-last element of `arguments`.

    If there is none here, create a new, empty class.
    """
    identity = arguments[-2]
    known = current_class(identity, internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity), _write_by_value)
    if known is not None:
        return known
    made = make(*arguments)
    _empty_classes.add(made)
    return made


def _fill_class(made: type, state: object) -> None:
    """Set the attributes of a class that has none yet. Other classes are not changed."""
    if made in _empty_classes:
        internals._class_setstate(made, state)
        _empty_classes.discard(made)
        arrived(made)


def _fill_function(function: Callable[..., object], state: Any) -> None:
    """Set the state of a function of another process's ``__main__``."""
    source = state[1].pop("__source__")
    internals._function_setstate(function, state)
    if source is not None:
        keep_source(source)
    arrived(function)
