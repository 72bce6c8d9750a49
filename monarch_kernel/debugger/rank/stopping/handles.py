"""Handles: the numbers by which viewers refer to the values of a stop, as long as the stop lasts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import FrameType
from typing import Any

from monarch_kernel.debugger.model.stops import Evaluation, Variable
from monarch_kernel.debugger.rank.stopping.expressions import Names, assign, value_of
from monarch_kernel.debugger.rank.stopping.short_forms import PAGE, children, counts, long, put, short, type_name


@dataclass(frozen=True, slots=True)
class _Scope:
    """The variables of a frame: its locals, or its globals."""

    frame: FrameType
    local: bool


class Handles:
    """The values of one stop that viewers have seen.

    Attributes:
        extra: names that evaluations have bound and that are not variables of the frames.
    """

    def __init__(self) -> None:
        self.extra: Names = {}
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[FrameType, Any]] = {}

    def scopes(self, frame: FrameType) -> list[Variable]:
        """`Locals` and `Globals` of a frame; only `Globals` at the top level of a module or cell."""
        found = [Variable("Globals", "", "", self._hold(frame, _Scope(frame, False)), len(frame.f_globals), 0)]
        if frame.f_locals is not frame.f_globals:
            scope = _Scope(frame, True)
            found.insert(0, Variable("Locals", "", "", self._hold(frame, scope), len(self._names(scope)), 0))
        return found

    def variables(self, ref: int, start: int, count: int) -> list[Variable]:
        """The children of the value with that number.

        Raises:
            KeyError: there is no such number.
        """
        frame, held = self._of(ref)
        if isinstance(held, _Scope):
            names = list(self._names(held).items())[start : start + (count or PAGE)]
            return [self._variable(frame, name, value) for name, value in names]
        return [self._variable(frame, name, value) for name, _, value in children(held, start, count)]

    def set(self, ref: int, name: str, expression: str) -> Variable:
        """Replace a child by the value of an expression in the frame that it was found from.

        Raises:
            KeyError: there is no such number or child.
            BaseException: raised by the expression or the assignment.
        """
        frame, held = self._of(ref)
        value = value_of(frame, expression, self.extra)
        if not isinstance(held, _Scope):
            put(held, self._key(held, name), value)
        elif not held.local:
            frame.f_globals[name] = value
        elif name in self.extra:
            self.extra[name] = value
        else:
            assign(frame, name, value)
        return self._variable(frame, name, value)

    def evaluation(self, frame: FrameType, value: Any) -> Evaluation:
        """The answer to an evaluation that gave this value."""
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Evaluation(long(value), type_name(value), ref, named, indexed)

    def _variable(self, frame: FrameType, name: str, value: Any) -> Variable:
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Variable(name, short(value), type_name(value), ref, named, indexed)

    def _names(self, scope: _Scope) -> Names:
        if not scope.local:
            return {name: value for name, value in list(scope.frame.f_globals.items()) if not name.startswith("__")}
        # `.0` is the iterator of a generator expression.
        names = {name: value for name, value in list(scope.frame.f_locals.items()) if not name.startswith(".")}
        return {**self.extra, **names}

    def _key(self, held: Any, name: str) -> Any:
        if name.startswith("[") and name.endswith("]") and name[1:-1].isdigit():
            for found, key, _ in children(held, int(name[1:-1]), 1):
                if found == name:
                    return key
        start = 0
        while page := children(held, start, PAGE):
            for found, key, _ in page:
                if found == name:
                    return key
            start += len(page)
        raise KeyError(f"no child is named {name}")

    def _hold(self, frame: FrameType, value: Any) -> int:
        number = next(self._numbers)
        self._held[number] = (frame, value)
        return number

    def _of(self, ref: int) -> tuple[FrameType, Any]:
        if ref not in self._held:
            raise KeyError(f"nothing of this stop has the number {ref}")
        return self._held[ref]


__all__ = ["Handles"]
