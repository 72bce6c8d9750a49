"""Record the steps of a change in place, so that all of it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

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
