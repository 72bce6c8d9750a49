"""Strided selections as plain values: `NDSlice`, and `Shape`, which names the dimensions of an `NDSlice`.

Meshes themselves use regions (`shape.py`); these two classes are for programs, with Monarch's names and methods.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, SupportsIndex, overload

from monarch_kernel.runtime.mesh.shape import Extent, Region, dense_strides


class NDSlice:
    """The numbers `offset + sum(c[i] * strides[i])` for all coordinates `c` below `sizes`, in row-major order.

    A sequence of those numbers, which supports indexing, iteration and membership tests. Immutable and hashable.

    Raises `ValueError` for sizes and strides that do not match or are negative, and for strides with which two
    coordinates could map to the same number: each stride must exceed the range of all smaller ones.
    """

    __slots__ = ("_offset", "_sizes", "_strides")

    def __init__(
        self, *, offset: SupportsIndex, sizes: Sequence[SupportsIndex], strides: Sequence[SupportsIndex]
    ) -> None:
        self._offset = operator.index(offset)
        self._sizes = tuple([operator.index(size) for size in sizes])
        self._strides = tuple([operator.index(stride) for stride in strides])
        if len(self._sizes) != len(self._strides):
            raise ValueError(
                f"invalid dims: expected one stride per size, got {len(self._sizes)} sizes and "
                f"{len(self._strides)} strides"
            )
        if self._offset < 0 or any(size < 0 for size in self._sizes) or any(stride < 0 for stride in self._strides):
            raise ValueError(f"offset, sizes and strides of {self!r} must not be negative")
        reached = 1
        for stride, size in sorted(zip(self._strides, self._sizes, strict=True)):
            if size > 1:
                if stride < reached:
                    raise ValueError(
                        f"nonunique strides: in {self!r} the stride {stride} must be at least {reached}, the space of "
                        "the smaller strides, or two coordinates could give the same number"
                    )
                reached = stride * size

    @classmethod
    def new_row_major(cls, sizes: Sequence[SupportsIndex]) -> NDSlice:
        """The numbers from 0 upwards, arranged in these sizes."""
        whole = [operator.index(size) for size in sizes]
        return cls(offset=0, sizes=whole, strides=dense_strides(whole))

    @classmethod
    def from_list(cls, numbers: Iterable[SupportsIndex]) -> list[NDSlice]:
        """One-dimensional slices that together contain these numbers, in ascending order."""
        left = sorted(operator.index(number) for number in numbers)
        slices: list[NDSlice] = []
        at = 0
        while at < len(left):
            start, stop = left[at], at + 1
            step = left[stop] - start if stop < len(left) else 0
            if step:
                while stop < len(left) and left[stop] - left[stop - 1] == step:
                    stop += 1
            slices.append(cls(offset=start, sizes=[stop - at], strides=[step or 1]))
            at = stop
        return slices

    @property
    def offset(self) -> int:
        """The first number."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """Sizes of the dimensions, outermost first."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """The distance between neighbours along each dimension."""
        return list(self._strides)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._sizes)

    def coordinates(self, value: SupportsIndex) -> list[int]:
        """The coordinates of a number; `ValueError` if it is not in the slice."""
        found = self._coordinates(operator.index(value))
        if found is None:
            raise ValueError(f"value {value!r} not in slice {self!r}")
        return found

    def index(self, value: SupportsIndex) -> int:
        """The position of a number in row-major order; `ValueError` if it is not in the slice."""
        at = 0
        for coordinate, size in zip(self.coordinates(value), self._sizes, strict=True):
            at = at * size + coordinate
        return at

    def get(self, index: SupportsIndex) -> int:
        """The number at a position in row-major order; `ValueError` if the position is out of range."""
        at = operator.index(index)
        if not 0 <= at < len(self):
            raise ValueError(f"index {at} out of range {len(self)}")
        value = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            at, coordinate = divmod(at, size)
            value += coordinate * stride
        return value

    def nditem(self, coordinates: Sequence[SupportsIndex]) -> int:
        """The number at these coordinates; `IndexError` if there are too many or too few, or one is out of range."""
        places = [operator.index(coordinate) for coordinate in coordinates]
        if len(places) != self.ndim:
            raise IndexError(f"invalid dims: expected {self.ndim} coordinates, got {len(places)}")
        if any(not 0 <= place < size for place, size in zip(places, self._sizes, strict=True)):
            raise IndexError(f"coordinates {places} are out of range for sizes {self.sizes}")
        return self._offset + sum(map(operator.mul, places, self._strides))

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: builtins.slice[Any, Any, Any]) -> tuple[int, ...]: ...
    def __getitem__(self, at: SupportsIndex | builtins.slice[Any, Any, Any]) -> int | tuple[int, ...]:
        if isinstance(at, builtins.slice):
            return tuple([self.get(i) for i in range(*at.indices(len(self)))])
        try:
            return self.get(at)
        except ValueError as e:
            raise IndexError(str(e)) from None

    def __len__(self) -> int:
        return prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return (self.get(i) for i in range(len(self)))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self._coordinates(value) is not None

    def _coordinates(self, value: int) -> list[int] | None:
        left = value - self._offset
        if left < 0 or not len(self):
            return None
        found = [0] * self.ndim
        # No dimension reaches the next larger stride, so dividing by the largest stride first is exact.
        for axis in sorted(range(self.ndim), key=self._strides.__getitem__, reverse=True):
            if self._sizes[axis] > 1:
                found[axis], left = divmod(left, self._strides[axis])
                if found[axis] >= self._sizes[axis]:
                    return None
        return found if left == 0 else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NDSlice):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self._offset, self._sizes, self._strides

    def __repr__(self) -> str:
        return f"NDSlice(offset={self._offset}, sizes={self.sizes}, strides={self.strides})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ndslice, self._key()


def _ndslice(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)


class Shape:
    """An `NDSlice` whose dimensions have names. Immutable and hashable.

    Raises `ValueError` for labels that do not match the slice or are repeated, and for a slice without elements.
    """

    __slots__ = ("_ndslice", "_region")

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:  # noqa: A002  # Monarch's name for it
        if len(labels) != slice.ndim:
            raise ValueError(f"label slice dimension mismatch: {len(labels)} labels, {slice.ndim} dimensions")
        self._ndslice = slice
        self._region = Region(labels, slice.sizes, slice.strides, slice.offset)

    @classmethod
    def unity(cls) -> Shape:
        """The shape of a single element, without dimensions."""
        return cls((), NDSlice.new_row_major(()))

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return list(self._region.labels)

    @property
    def ndslice(self) -> NDSlice:
        """The slice without the names."""
        return self._ndslice

    @property
    def extent(self) -> Extent:
        """Names and sizes of the dimensions."""
        return self._region.extent

    @property
    def region(self) -> Region:
        """The same selection as a `Region`, which meshes use."""
        return self._region

    def ranks(self) -> list[int]:
        """The selected ranks in row-major order."""
        return list(self._region.ranks())

    def coordinates(self, rank: SupportsIndex) -> dict[str, int]:
        """The coordinates of a rank; `ValueError` if it is not selected."""
        return dict(zip(self._region.labels, self._ndslice.coordinates(rank), strict=True))

    def at(self, label: str, index: SupportsIndex) -> Shape:
        """The part at one index of a dimension, which is dropped; `ValueError` for a wrong label or index."""
        return self.index(**{label: index})

    def index(self, **indices: SupportsIndex) -> Shape:
        """The part at one index of each named dimension, which are dropped; `ValueError` as for `at`."""
        try:
            return self._part(self._region.slice(**indices))
        except IndexError as e:
            raise ValueError(str(e)) from None

    def select(self, label: str, slice: builtins.slice[Any, Any, Any]) -> Shape:  # noqa: A002  # Monarch's name, too
        """The part that a slice of a dimension selects; `ValueError` for a wrong label, or if it selects nothing."""
        if not isinstance(slice, builtins.slice):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"select() takes a slice, got {slice!r}: use at({label!r}, {slice!r})")
        return self._part(self._region.slice(**{label: slice}))

    def _part(self, region: Region) -> Shape:
        return Shape(region.labels, _ndslice(region.offset, region.sizes, region.strides))

    def __len__(self) -> int:
        return self._region.nelements

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return self._region == other._region

    def __hash__(self) -> int:
        return hash(self._region)

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self.extent.items()) + "}"

    def __repr__(self) -> str:
        return f"Shape({self.labels}, {self._ndslice!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shape, (self._region.labels, self._ndslice)
