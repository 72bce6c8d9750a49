"""`NDSlice`: a strided selection of numbers as a plain value, with Monarch's name and methods."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import SupportsIndex, overload


class _NegativeError(OverflowError, TypeError, IndexError, ValueError):
    """A negative index. It is several builtin errors at once, because Monarch's methods raise different ones."""


def unsigned(value: SupportsIndex) -> int:
    """Return the index; raise Monarch's error if it is negative."""
    number = operator.index(value)
    if number < 0:
        raise _NegativeError(f"can't convert negative int to unsigned: {number}")
    return number


class NDSlice:
    """The numbers `offset + sum(c[i] * strides[i])` for all coordinates `c` below `sizes`, in row-major order.

    A sequence of those numbers, which supports indexing, iteration and membership tests. Immutable and hashable.

    Raises `ValueError` for sizes and strides that do not match or are negative (an `OverflowError`, too), and for
    strides with which two coordinates could map to the same number: each stride must exceed the range of all smaller
    ones.
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
            raise _NegativeError(f"offset, sizes and strides of {self!r} must not be negative")
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
        """Return the slice with the numbers from 0 upwards in row-major order for these sizes."""
        whole = [operator.index(size) for size in sizes]
        return cls(offset=0, sizes=whole, strides=dense_strides(whole))

    @classmethod
    def from_list(cls, numbers: Iterable[SupportsIndex]) -> list[NDSlice]:
        """Return one-dimensional slices that together contain these numbers, in ascending order."""
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
        """Return the coordinates of a number; `ValueError` if it is not in the slice."""
        found = self._coordinates(unsigned(value))
        if found is None:
            raise ValueError(f"value {value!r} not in slice {self!r}")
        return found

    def index(self, value: SupportsIndex) -> int:
        """Return the position of a number in row-major order; `ValueError` if it is not in the slice."""
        at = 0
        for coordinate, size in zip(self.coordinates(value), self._sizes, strict=True):
            at = at * size + coordinate
        return at

    def get(self, index: SupportsIndex) -> int:
        """Return the number at a position in row-major order; `ValueError` if the position is out of range."""
        at = unsigned(index)
        if at >= len(self):
            raise ValueError(f"index {at} out of range {len(self)}")
        value = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            at, coordinate = divmod(at, size)
            value += coordinate * stride
        return value

    def nditem(self, coordinates: Sequence[SupportsIndex]) -> int:
        """Return the number at these coordinates.

        `IndexError` if there are too many or too few, or one is out of range.
        """
        places = [unsigned(coordinate) for coordinate in coordinates]
        if len(places) != self.ndim:
            raise IndexError(f"invalid dims: expected {self.ndim} coordinates, got {len(places)}")
        if any(place >= size for place, size in zip(places, self._sizes, strict=True)):
            raise IndexError(f"coordinates {places} are out of range for sizes {self.sizes}")
        return self._offset + sum(map(operator.mul, places, self._strides))

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: builtins.slice[object, object, object]) -> tuple[int, ...]: ...
    def __getitem__(self, at: SupportsIndex | builtins.slice[object, object, object]) -> int | tuple[int, ...]:
        if isinstance(at, builtins.slice):
            return tuple([self.get(i) for i in range(*at.indices(len(self)))])
        try:
            return self.get(at)
        except _NegativeError:
            raise
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
        return f"Slice {{ offset: {self._offset}, sizes: {self.sizes}, strides: {self.strides} }}"  # as Monarch's

    def __reduce__(self) -> tuple[object, ...]:
        return _ndslice, self._key()


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major layout with these sizes."""
    return tuple(accumulate(reversed(sizes[1:]), operator.mul, initial=1))[::-1] if sizes else ()


def _ndslice(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)


def strings_of(data: bytes) -> tuple[list[str], bytes]:
    """Parse the list of strings at the start of Monarch's bytes. Return it and the remaining bytes."""
    (count,), data = integers_of(data, 1)
    found: list[str] = []
    for _ in range(count):
        (length,), data = integers_of(data, 1)
        found.append(data[:length].decode())
        data = data[length:]
    return found, data


def integers_of(data: bytes, count: int = -1) -> tuple[list[int], bytes]:
    """Parse this many integers at the start of Monarch's bytes (-1: a list, after its length).

    Return them and the remaining bytes.

    Raises:
        ValueError: the bytes end earlier.
    """
    if count < 0:
        (count,), data = integers_of(data, 1)
    if len(data) < 8 * count:
        raise ValueError(f"these are not the bytes of a shape: they end {8 * count - len(data)} bytes too early")
    return [int.from_bytes(data[8 * at : 8 * at + 8], "little") for at in range(count)], data[8 * count :]
