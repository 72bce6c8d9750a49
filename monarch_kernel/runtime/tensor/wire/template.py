"""The arguments of an operation with slots in place of what differs from record to record."""

from __future__ import annotations

from typing import Any


class Slot:
    """A place in a template: the `index`-th of its kind in the record."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"


class TensorSlot(Slot):
    """A value of the rank."""

    __slots__ = ()


class FloatSlot(Slot):
    """A float: by value, since the scalars of an optimizer differ at every step."""

    __slots__ = ()


class RankDevice:
    """The device of the rank, in place of one that the controller named: it may have none of that kind."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "RANK_DEVICE"

    def __repr__(self) -> str:
        return "RANK_DEVICE"


RANK_DEVICE = RankDevice()
