"""Shapes of meshes: extents, points and strided selections of ranks. Pure values, no I/O.

An `Extent` names the dimensions of a mesh and their sizes. A `Point` is one position in an extent. A `Region` selects
ranks of some *base* mesh: slicing a mesh returns one, and a message to a slice carries one. All three are immutable and
hashable, have small pickles, and cache computed values. (This file is long because these classes refer to one another.)
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Self, SupportsIndex

from monarch_kernel.runtime.mesh.ndslice import NDSlice, dense_strides, integers_of, strings_of, unsigned

# `slice` is also the name of a method below, to which annotations in a class body would resolve.
IndexOrSlice = SupportsIndex | builtins.slice


class UnknownDimensionError(TypeError, ValueError, KeyError):
    """A program named a dimension that the mesh does not have.

    It is three builtin errors at once, because Monarch raises different ones in different methods, and programs may
    catch any of them.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


def unknown_dimension(label: object, labels: Sequence[str]) -> UnknownDimensionError:
    """Return the error for a dimension `label` that is not among `labels`."""
    known = ", ".join(repr(name) for name in labels) or "none (it is a single element)"
    return UnknownDimensionError(f"mesh does not have a dimension {label!r}; its dimensions are {known}")


class Extent(Mapping[str, int]):
    """Names and sizes of a mesh's dimensions, outermost first; a mapping from label to size.

    Raises `ValueError` for labels and sizes that do not match, repeated labels, and sizes below 1.
    """

    __slots__ = ("_hash", "_region", "names", "nelements", "shape", "strides")

    #: Labels and sizes as tuples, which can be dictionary keys.
    names: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nelements: int
    _hash: int
    _region: Region | None

    def __init__(self, labels: Sequence[str], sizes: Sequence[SupportsIndex]) -> None:
        self.names = tuple(labels)
        try:
            self.shape = tuple([operator.index(size) for size in sizes])
        except TypeError:
            raise TypeError(f"sizes of a mesh must be whole numbers, got {list(sizes)!r}") from None
        if len(self.names) != len(self.shape):
            raise ValueError(
                f"a mesh needs one size for each dimension, got {len(self.names)} labels "
                f"{self.names!r} and {len(self.shape)} sizes {self.shape!r}"
            )
        for label, size in zip(self.names, self.shape, strict=True):
            if not isinstance(label, str) or not label:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"a dimension's label must be a non-empty string, got {label!r}")
            if size < 1:
                raise ValueError(f"dimension {label!r} must have a size of at least 1, got {size}")
        if len(set(self.names)) != len(self.names):
            twice = next(label for label in self.names if self.names.count(label) > 1)
            raise ValueError(f"dimension {twice!r} is named twice in {self.names!r}; labels must differ")
        self.nelements = prod(self.shape)
        self.strides = dense_strides(self.shape)
        self._hash = hash((self.names, self.shape))
        self._region = None

    @staticmethod
    def from_bytes(bytes: bytes) -> Extent:  # noqa: A002  # Monarch's name
        """Decode an extent from the bytes in Monarch's pickles."""
        labels, rest = strings_of(bytes)
        return Extent(labels, integers_of(rest)[0])

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return list(self.names)

    @property
    def sizes(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self.shape)

    def point(self, rank: int) -> Point:
        """Return the point of `rank` in row-major order; raise `IndexError` if the rank is out of range."""
        return Point(rank, self)

    def points(self) -> Iterator[Point]:
        """Iterate over all points in row-major order."""
        return (Point(rank, self) for rank in range(self.nelements))

    def rank(self, coords: Mapping[str, SupportsIndex]) -> int:
        """Return the rank at `coords`, which must name every dimension once.

        Raises `KeyError` for missing or extra labels and `IndexError` for a coordinate out of range.
        """
        rank = 0
        for label, size, stride in zip(self.names, self.shape, self.strides, strict=True):
            if label not in coords:
                raise KeyError(f"coordinate for dimension {label!r} is missing; give one for each of {self}")
            rank += _checked_index(label, coords[label], size) * stride
        if len(coords) != len(self.names):
            extra = ", ".join(repr(label) for label in coords if label not in self.names)
            raise KeyError(f"coordinates name unknown dimensions {extra}; the mesh has {self}")
        return rank

    @property
    def region(self) -> Region:
        """The region that selects everything."""
        if self._region is None:
            self._region = Region(self.names, self.shape, self.strides, 0)
        return self._region

    def __getitem__(self, label: str) -> int:
        try:
            return self.shape[self.names.index(label)]
        except ValueError:
            raise unknown_dimension(label, self.names) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of dimensions; `nelements` is the number of points."""
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self is other or (self.names == other.names and self.shape == other.shape)
        return isinstance(other, Mapping) and dict(self) == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {self[label]}" for label in self.names) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return _shared_extent, (self.names, self.shape)


@lru_cache(maxsize=4096)
def _shared_extent(labels: tuple[str, ...], sizes: tuple[int, ...]) -> Extent:
    """Return one object per distinct extent, so that a process computes its cached values once."""
    return Extent(labels, sizes)


class Point(Mapping[str, int]):
    """One position in an extent: a mapping from dimension label to coordinate, and a `rank`."""

    __slots__ = ("extent", "rank")

    rank: int
    extent: Extent

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise IndexError(f"rank {rank} is not in a mesh of {extent.nelements} ({extent})")
        self.rank = rank
        self.extent = extent

    @staticmethod
    def from_bytes(bytes: bytes) -> Point:  # noqa: A002  # Monarch's name
        """Decode a point from the bytes in Monarch's pickles."""
        (rank,), rest = integers_of(bytes, 1)
        return Point(rank, Extent.from_bytes(rest))

    def size(self, label: str) -> int:
        """Return the size of the dimension `label`."""
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        extent = self.extent
        try:
            at = extent.names.index(label)
        except ValueError:
            raise unknown_dimension(label, extent.names) from None
        return self.rank // extent.strides[at] % extent.shape[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent.names)

    def __len__(self) -> int:
        return len(self.extent.names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self.rank == other.rank and self.extent == other.extent
        return isinstance(other, Mapping) and dict(self) == other

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {v}/{self.extent[k]}" for k, v in self.items()) + "}"

    def __reduce__(self) -> tuple[object, ...]:
        return Point, (self.rank, self.extent)


class Region:
    """An n-dimensional strided selection of the ranks of some base mesh.

    The element at coordinates `c` is base rank `offset + sum(c[i] * strides[i])`. Its *position* is its index in
    row-major order, which is its rank in the selected mesh.
    """

    __slots__ = ("_hash", "_positions", "_ranks", "extent", "offset", "strides")

    extent: Extent
    strides: tuple[int, ...]
    offset: int
    _hash: int | None
    _ranks: tuple[int, ...] | None
    _positions: dict[int, int] | None

    def __init__(self, labels: Sequence[str], sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> None:
        self.extent = _shared_extent(tuple(labels), tuple(sizes))
        self.strides = tuple(strides)
        self.offset = offset
        if len(self.strides) != len(self.extent.shape):
            raise ValueError(f"a region of {self.extent} needs one stride per dimension, got {self.strides}")
        self._hash = None
        self._ranks = None
        self._positions = None

    @classmethod
    def from_extent(cls, extent: Extent) -> Region:
        """Return the region that selects everything in `extent`."""
        return extent.region

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the dimensions, outermost first."""
        return self.extent.names

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.extent.shape

    @property
    def nelements(self) -> int:
        """The number of selected ranks."""
        return self.extent.nelements

    def __len__(self) -> int:
        return self.extent.nelements

    def ranks(self) -> tuple[int, ...]:
        """Return the selected base ranks in row-major order."""
        if self._ranks is None:
            if self.is_dense:
                self._ranks = tuple(range(self.offset, self.offset + self.nelements))
            else:
                found = [self.offset]
                for size, stride in zip(self.sizes, self.strides, strict=True):
                    steps = range(0, size * stride, stride) if stride else (0,) * size
                    found = [base + step for base in found for step in steps]
                self._ranks = tuple(found)
        return self._ranks

    def position(self, base_rank: int) -> int | None:
        """Return the position of `base_rank` in this selection, or None if it is not selected."""
        if self.is_dense:
            at = base_rank - self.offset
            return at if 0 <= at < self.nelements else None
        if self._positions is None:
            self._positions = {rank: at for at, rank in enumerate(self.ranks())}
        return self._positions.get(base_rank)

    def __contains__(self, base_rank: object) -> bool:
        return isinstance(base_rank, int) and self.position(base_rank) is not None

    @property
    def is_dense(self) -> bool:
        """Whether the selection is one contiguous run of base ranks in order."""
        # The stride of a dimension of size 1 is never used, so it is ignored.
        return self.strides == self.extent.strides or all(
            size == 1 or stride == dense
            for size, stride, dense in zip(self.sizes, self.strides, self.extent.strides, strict=True)
        )

    def slice(self, **selections: IndexOrSlice) -> Region:
        """Select part of the named dimensions: an index drops its dimension, a slice keeps it.

        Raises `UnknownDimensionError`, `IndexError` for an index out of range (as negative indices are), and
        `ValueError` for a slice that selects nothing or has a step below 1.
        """
        known = self.labels
        for label in selections:
            if label not in known:
                raise unknown_dimension(label, known)
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        offset = self.offset
        for label, size, stride in zip(known, self.sizes, self.strides, strict=True):
            chosen = selections.get(label)
            if chosen is None and label not in selections:
                start, step, count = 0, 1, size
            elif isinstance(chosen, builtins.slice):
                start, step, count = _checked_slice(label, chosen, size)
            else:
                offset += _checked_index(label, chosen, size) * stride
                continue
            labels.append(label)
            sizes.append(count)
            strides.append(stride * step)
            offset += start * stride
        return Region(labels, sizes, strides, offset)

    def split(self, **parts: Sequence[str] | SupportsIndex) -> Region:
        """Split dimensions: `split(gpus=("dp", "pp"), pp=2)`. One size per split may be omitted.

        Raises `UnknownDimensionError`, and `ValueError` if names clash or the product of the sizes is wrong.
        """
        names: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for label, value in parts.items():
            if isinstance(value, str):
                raise ValueError(
                    f"split of dimension {label!r} needs a sequence of new labels, got the string {value!r}"
                )
            if isinstance(value, Sequence):
                if label not in self.labels:
                    raise unknown_dimension(label, self.labels)
                names[label] = tuple(value)
            else:
                given[label] = _checked_size(label, value)
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            new = names.get(label, (label,))
            new_sizes = _split_sizes(label, size, new, given) if label in names else (size,)
            labels += new
            sizes += new_sizes
            strides += [stride * inner for inner in dense_strides(new_sizes)]
        unused = [label for label in given if not any(label in new for new in names.values())]
        if unused:
            example = f'{self.labels[0] if self.labels else "dim"}=("{unused[0]}", "rest")'
            raise ValueError(
                f"split got a size for {', '.join(map(repr, unused))}, which no dimension is split into; "
                f"name it in a split, e.g. split({example}, {unused[0]}={given[unused[0]]})"
            )
        return Region(labels, sizes, strides, self.offset)

    def flatten(self, name: str) -> Region:
        """Merge all dimensions into one called `name`; `ValueError` if the selection has gaps."""
        if not self.is_dense:
            raise ValueError(
                f"cannot flatten a sparse mesh: {self.extent} selects ranks with gaps (strides "
                f"{self.strides}, dense would be {self.extent.strides}); flatten before slicing"
            )
        return Region((name,), (self.nelements,), (1,), self.offset)

    def rename(self, **names: str) -> Region:
        """Rename dimensions: `rename(old="new")`; the new names must differ from each other."""
        for label in names:
            if label not in self.labels:
                raise unknown_dimension(label, self.labels)
        return Region([names.get(label, label) for label in self.labels], self.sizes, self.strides, self.offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self is other or (
            self.offset == other.offset and self.strides == other.strides and self.extent == other.extent
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.extent, self.strides, self.offset))
        return self._hash

    def __repr__(self) -> str:
        return f"Region({self.extent}, strides={self.strides}, offset={self.offset})"

    def __reduce__(self) -> tuple[object, ...]:
        return _shared_region, (self.labels, self.sizes, self.strides, self.offset)


@lru_cache(maxsize=4096)
def _shared_region(labels: tuple[str, ...], sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Region:
    """Return one object per distinct region that arrives in messages, so that a process computes its ranks once."""
    return Region(labels, sizes, strides, offset)


class MeshTrait:
    """The operations of every mesh on its shape: slice, split, flatten, rename, and sizes.

    A mesh class implements `_region` (a property) and `_new_with_region(region)`, which returns a mesh of the same kind
    over another selection of the same base ranks.
    """

    __slots__ = ()

    @property
    def _region(self) -> Region:
        raise NotImplementedError(f"{type(self).__name__} has no shape")

    def _new_with_region(self, region: Region) -> Self:
        raise NotImplementedError(f"{type(self).__name__} cannot be sliced")

    def slice(self, **selections: IndexOrSlice) -> Self:
        """Select by dimension: `mesh.slice(hosts=0, gpus=slice(0, 4))`. An index drops its dimension."""
        return self._new_with_region(self._region.slice(**selections)) if selections else self

    def split(self, **parts: Sequence[str] | SupportsIndex) -> Self:
        """Split dimensions into several: `mesh.split(gpus=("dp", "pp"), pp=2)`."""
        return self._new_with_region(self._region.split(**parts))

    def flatten(self, name: str) -> Self:
        """Return the same elements along one dimension called `name`."""
        return self._new_with_region(self._region.flatten(name))

    def rename(self, **names: str) -> Self:
        """Return the same mesh with dimensions renamed: `mesh.rename(gpus="dp")`."""
        return self._new_with_region(self._region.rename(**names))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the number of elements of the mesh, or along one or several dimensions."""
        extent = self._region.extent
        if dim is None:
            return extent.nelements
        if isinstance(dim, str):
            return extent[dim]
        return prod(extent[label] for label in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension, outermost first."""
        return dict(self._region.extent)

    @property
    def extent(self) -> Extent:
        """Names and sizes of the dimensions."""
        return self._region.extent

    @property
    def _labels(self) -> list[str]:
        """Names of the dimensions; programs written for Monarch read it."""
        return list(self._region.labels)

    @property
    def _ndslice(self) -> NDSlice:
        """The selected ranks of the mesh as spawned, as an ``NDSlice``. Programs written for Monarch read it."""
        region = self._region
        return NDSlice(offset=region.offset, sizes=region.sizes, strides=region.strides)

    def __len__(self) -> int:
        return self._region.nelements


def _checked_index(label: str, index: object, size: int) -> int:
    try:
        at = operator.index(index)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(
            f"dimension {label!r} is selected by an int or a slice, got {type(index).__name__} {index!r}"
        ) from None
    if not 0 <= at < size:
        raise IndexError(f"index {at} is out of range for dimension {label!r} of size {size} (0 to {size - 1})")
    return at


def _checked_slice(label: str, chosen: builtins.slice[object, object, object], size: int) -> tuple[int, int, int]:
    start, stop, step = chosen.indices(size)
    if step < 1:
        raise ValueError(f"slice of dimension {label!r} must have a positive step, got {step}")
    count = len(range(start, stop, step))
    if not count:
        raise ValueError(f"slice {_slice_text(chosen)} of dimension {label!r} of size {size} selects nothing")
    return start, step, count


def _slice_text(chosen: builtins.slice[object, object, object]) -> str:
    parts = ["" if part is None else str(part) for part in (chosen.start, chosen.stop, chosen.step)]
    return ":".join(parts if parts[2] else parts[:2])


def _checked_size(label: str, value: object) -> int:
    try:
        size = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(
            f"split takes a sequence of labels or a size for {label!r}, got {type(value).__name__} {value!r}"
        ) from None
    if size < 1:
        raise ValueError(f"dimension {label!r} must have a size of at least 1, got {size}")
    return size


def _split_sizes(label: str, size: int, new: tuple[str, ...], given: dict[str, int]) -> tuple[int, ...]:
    """Return the sizes of the dimensions `new` that `label` is split into; at most one of them is inferred."""
    unknown = [name for name in new if name not in given]
    if len(unknown) > 1:
        raise ValueError(
            f"cannot infer the sizes of {' and '.join(map(repr, unknown))} in the split of {label!r}; "
            f"give at least {len(unknown) - 1} of them, e.g. {unknown[-1]}={size}"
        )
    known = prod(given[name] for name in new if name in given)
    if size % known or (not unknown and known != size):
        shown = ", ".join(f"{name}={given.get(name, '?')}" for name in new)
        raise ValueError(f"dimension {label!r} of size {size} does not divide evenly into ({shown})")
    return tuple(given.get(name, size // known) for name in new)


#: The extent of a single element, which has no dimensions.
SINGLE = Extent((), ())


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

    @staticmethod
    def from_bytes(bytes: bytes) -> Shape:  # noqa: A002  # Monarch's name
        """Decode a shape from the bytes in Monarch's pickles."""
        labels, rest = strings_of(bytes)
        (offset,), rest = integers_of(rest, 1)
        sizes, rest = integers_of(rest)
        return Shape(labels, NDSlice(offset=offset, sizes=sizes, strides=integers_of(rest)[0]))

    @classmethod
    def unity(cls) -> Shape:
        """Return the shape of a single element, without dimensions."""
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
        """Return the selected ranks in row-major order."""
        return list(self._region.ranks())

    def coordinates(self, rank: SupportsIndex) -> dict[str, int]:
        """Return the coordinates of a rank; raise `ValueError` if it is not selected."""
        return dict(zip(self._region.labels, self._ndslice.coordinates(rank), strict=True))

    def at(self, label: str, index: SupportsIndex) -> Shape:
        """Return the part at one index of a dimension, which is removed.

        Raise `ValueError` for a wrong label or index.
        """
        return self.index(**{label: index})

    def index(self, **indices: SupportsIndex) -> Shape:
        """Return the part at one index of each named dimension.

        These dimensions are removed. Errors are as for `at`.
        """
        for index in indices.values():
            unsigned(index)
        try:
            return self._part(self._region.slice(**indices))
        except IndexError as e:
            raise ValueError(str(e)) from None

    def select(self, label: str, slice: builtins.slice[object, object, object]) -> Shape:  # noqa: A002  # Monarch's name, too
        """Return the part that a slice of a dimension selects.

        Raises:
            ValueError: the label is wrong, or the slice selects nothing.
        """
        if not isinstance(slice, builtins.slice):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"select() takes a slice, got {slice!r}: use at({label!r}, {slice!r})")
        return self._part(self._region.slice(**{label: slice}))

    def _part(self, region: Region) -> Shape:
        return Shape(region.labels, NDSlice(offset=region.offset, sizes=region.sizes, strides=region.strides))

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
        labels = ", ".join(f'"{label}"' for label in self.labels)
        return f"Shape {{ labels: [{labels}], slice: {self._ndslice!r} }}"  # as Monarch's

    def __reduce__(self) -> tuple[object, ...]:
        return Shape, (self._region.labels, self._ndslice)
