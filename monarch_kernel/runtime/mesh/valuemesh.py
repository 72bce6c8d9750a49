"""`ValueMesh`: one value for each element of a mesh, such as the result of a call on a mesh."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar, cast, overload

from monarch_kernel.runtime.mesh.ndslice import unsigned
from monarch_kernel.runtime.mesh.rankset import format_points
from monarch_kernel.runtime.mesh.shape import Extent, IndexOrSlice, MeshTrait, Point, Region, Shape

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")

_SHOWN_ROWS = 20


class ValueMesh(MeshTrait, Generic[T_co]):
    """Values laid out over an extent, in row-major order.

    Iteration yields `(Point, value)` pairs. `values[3]` is the value of rank 3, `values[1, 2]` and
    `values[{"hosts": 1, "gpus": 2}]` the value at coordinates; with slices among the coordinates the result is a
    smaller ValueMesh. `losses / 2`, `after - before` and `map` compute with the values of each rank. Slicing,
    splitting and renaming work as on any mesh.
    """

    __slots__ = ("_extent", "_values")

    _extent: Extent
    _values: tuple[T_co, ...]

    def __class_getitem__(cls, _item: object) -> type[ValueMesh[object]]:
        """``ValueMesh[int]`` at run time is ``ValueMesh``, so that annotations can be compared by ``is``."""
        return cls

    def __init__(self, shape: Extent | Region | Shape, values: Iterable[T_co]) -> None:
        self._extent = shape if isinstance(shape, Extent) else shape.extent
        self._values = tuple(values)
        if len(self._values) != self._extent.nelements:
            wanted = self._extent.nelements
            raise ValueError(f"a ValueMesh of {self._extent} needs {wanted} values, got {len(self._values)}")

    @staticmethod
    def from_indexed(shape: Extent | Region | Shape, pairs: Iterable[tuple[int, object]]) -> ValueMesh[Any]:
        """Create a ValueMesh from ``(rank, value)`` pairs in any order.

        Of several values for one rank, the last one counts.

        Raises:
            ValueError: a rank is missing or out of range.
        """
        extent = shape if isinstance(shape, Extent) else shape.extent
        found = {unsigned(rank): value for rank, value in pairs}
        if sorted(found) != list(range(extent.nelements)):
            raise ValueError(
                f"a ValueMesh of {extent} needs a value for each of its {extent.nelements} ranks, got {sorted(found)}"
            )
        return ValueMesh(extent, [found[rank] for rank in range(extent.nelements)])

    @property
    def _region(self) -> Region:
        return self._extent.region

    def _new_with_region(self, region: Region) -> ValueMesh[T_co]:
        return ValueMesh(region.extent, [self._values[rank] for rank in region.ranks()])

    def items(self) -> Iterator[tuple[Point, T_co]]:
        """Yield `(Point, value)` pairs in rank order."""
        return zip(self._extent.points(), self._values, strict=True)

    def values(self) -> list[T_co]:
        """Return the values in rank order."""
        return list(self._values)

    def item(self, **coords: SupportsIndex) -> T_co:
        """Return the value at the coordinates, one for each dimension.

        Without arguments, return the only value of a single element.

        Raises `KeyError` for missing or extra dimensions and `IndexError` for a coordinate out of range.
        """
        return self._values[self._extent.rank(coords)]

    def get(self, index: SupportsIndex) -> T_co:
        """Return the value of the rank `index`; raise `IndexError` if the rank is out of range."""
        rank = operator.index(index)
        if not 0 <= rank < len(self._values):
            raise IndexError(f"index {rank} out of range (len={len(self._values)})")
        return self._values[rank]

    @overload
    def __getitem__(self, index: SupportsIndex | Mapping[str, int]) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> ValueMesh[T_co]: ...
    @overload
    def __getitem__(self, index: tuple[IndexOrSlice, ...]) -> Any: ...
    def __getitem__(self, index: SupportsIndex | Mapping[str, int] | slice | tuple[IndexOrSlice, ...]) -> Any:
        if isinstance(index, Mapping):
            return self._values[self._extent.rank(index)]
        if isinstance(index, SupportsIndex):
            return self.get(index)
        if isinstance(index, slice):
            index = (index,)
        if not isinstance(index, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "a ValueMesh is indexed by a rank, a tuple of coordinates or a dict of coordinates, "
                f"got {type(index).__name__} {index!r}"
            )
        labels = self._extent.names
        if len(index) != len(labels):
            raise IndexError(f"{self._extent} needs {len(labels)} coordinates, got {len(index)}: {index!r}")
        coords = dict(zip(labels, index, strict=True))
        if any(isinstance(part, slice) for part in index):
            return self.slice(**coords)
        return self._values[self._extent.rank(coords)]  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[tuple[Point, T_co]]:
        return self.items()

    # -- values from values --------------------------------------------------------------------

    def map(self, function: Callable[..., R], *others: ValueMesh[object]) -> ValueMesh[R]:
        """Compute `function(value)` for every rank, in the same shape; values of `others` are further arguments.

        It runs in this process, rank by rank. An exception propagates with a note that names the rank.

        Raises:
            ValueError: one of `others` has another shape.
        """
        for other in others:
            if other._extent != self._extent:
                raise ValueError(f"a ValueMesh of {other._extent} cannot be combined with one of {self._extent}")
        found: list[R] = []
        for rank, value in enumerate(self._values):
            try:
                found.append(function(value, *(other._values[rank] for other in others)))
            except Exception as error:
                where = format_points([rank], self._extent)
                error.add_note(f"at rank {rank} of a ValueMesh" + (f" ({where})" if where else ""))
                raise
        return ValueMesh(self._extent, found)

    def _with(self, operation: Callable[[Any, Any], Any], other: object, swap: bool = False) -> ValueMesh[object]:
        if isinstance(other, ValueMesh):
            return self.map(operation, cast("ValueMesh[Any]", other))
        if swap:
            return self.map(lambda value: operation(other, value))
        return self.map(lambda value: operation(value, other))

    #: Makes NumPy defer operations between an array and a ValueMesh to this class.
    __array_ufunc__ = None

    def __add__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.add, other)

    def __radd__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.add, other, swap=True)

    def __sub__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.sub, other)

    def __rsub__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.sub, other, swap=True)

    def __mul__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.mul, other)

    def __rmul__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.mul, other, swap=True)

    def __truediv__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.truediv, other, swap=True)

    def __floordiv__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.floordiv, other)

    def __rfloordiv__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.floordiv, other, swap=True)

    def __mod__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.mod, other)

    def __rmod__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.mod, other, swap=True)

    def __pow__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.pow, other)

    def __rpow__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.pow, other, swap=True)

    def __matmul__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.matmul, other)

    def __rmatmul__(self, other: object) -> ValueMesh[object]:
        return self._with(operator.matmul, other, swap=True)

    def __neg__(self) -> ValueMesh[object]:
        return self.map(operator.neg)

    def __pos__(self) -> ValueMesh[object]:
        return self.map(operator.pos)

    def __abs__(self) -> ValueMesh[object]:
        return self.map(operator.abs)

    def __repr__(self) -> str:
        head = f"ValueMesh({self._extent})"
        if not self._extent.names:
            return f"{head}: {self._values[0]!r}"
        # Equal values share a line, so that differences between ranks stand out.
        alike: dict[str, list[int]] = {}
        for rank, value in enumerate(self._values):
            alike.setdefault(repr(value), []).append(rank)
        rows = [(format_points(ranks, self._extent, limit=6), text) for text, ranks in alike.items()]
        shown = rows if len(rows) <= _SHOWN_ROWS + 1 else rows[:_SHOWN_ROWS]
        width = min(40, max(len(label) for label, _ in shown))
        lines = [f"  {label:<{width}}  {_indented(text, width + 4)}" for label, text in shown]
        if len(shown) < len(rows):
            lines.append(f"  … and {len(rows) - len(shown)} more different values")
        return "\n".join([head + ":", *lines])

    def __reduce__(self) -> tuple[object, ...]:
        return ValueMesh, (self._extent, self._values)


def _indented(text: str, by: int) -> str:
    lines: Sequence[str] = text.split("\n")
    return ("\n" + " " * by).join(lines)
