"""Slices and shapes as values: every one must agree with NumPy's strided view of the numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel import Extent, NDSlice, Shape


@st.composite
def slices(draw: st.DrawFn) -> NDSlice:
    """Any permutation of dimensions, with gaps between them."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    strides = [0] * len(sizes)
    reached = 1
    for axis in draw(st.permutations(range(len(sizes)))):
        strides[axis] = reached + draw(st.integers(0, 3))
        reached = strides[axis] * sizes[axis]
    return NDSlice(offset=draw(st.integers(0, 9)), sizes=sizes, strides=strides)


@given(slices())
def test_a_slice_is_a_strided_view(s: NDSlice) -> None:
    strides = np.array(s.strides, dtype=int).reshape(-1, *[1] * s.ndim)
    grid = s.offset + (np.indices(s.sizes) * strides).sum(axis=0) if s.ndim else np.array(s.offset)
    numbers = grid.ravel().tolist()
    assert list(s) == numbers == [s[i] for i in range(len(s))] == [s.get(i) for i in range(len(s))]
    assert s[1::2] == tuple(numbers[1::2])
    for at, number in enumerate(numbers):
        place = s.coordinates(number)
        assert tuple(place) == np.unravel_index(at, s.sizes)
        assert s.nditem(place) == number
        assert s.index(number) == at
    assert [n for n in range(max(numbers) + 2) if n in s] == sorted(numbers)
    assert pickle.loads(pickle.dumps(s)) == s and hash(s) == hash(pickle.loads(pickle.dumps(s)))


@given(st.lists(st.integers(0, 30)))
def test_slices_of_a_list_hold_its_numbers(numbers: list[int]) -> None:
    parts = NDSlice.from_list(numbers)
    assert [n for part in parts for n in part] == sorted(numbers)
    assert all(part.ndim == 1 for part in parts)


def test_slices_that_cannot_be() -> None:
    for offset, sizes, strides, message in (
        (0, [2], [1, 2], "invalid dims: expected one stride per size, got 1 sizes and 2 strides"),
        (0, [2, 2], [1, 1], "nonunique strides: .* stride 1 must be at least 2"),
        (0, [2, 3], [2, 1], "nonunique strides"),
        (-1, [2], [1], "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            NDSlice(offset=offset, sizes=sizes, strides=strides)
    s = NDSlice(offset=4, sizes=[2, 2], strides=[8, 1])
    with pytest.raises(ValueError, match="value 6 not in slice"):
        s.index(6)
    with pytest.raises(ValueError, match="index 4 out of range 4"):
        s.get(4)
    with pytest.raises(IndexError, match="can't convert negative int to unsigned: -1"):
        s[-1]
    with pytest.raises(IndexError, match=r"coordinates \[2, 0\] are out of range for sizes \[2, 2\]"):
        s.nditem((2, 0))
    assert not NDSlice.new_row_major([0, 3]) and 0 not in NDSlice.new_row_major([0, 3])


def test_shapes() -> None:
    shape = Shape(["hosts", "gpus"], NDSlice(offset=4, sizes=[2, 4], strides=[8, 1]))
    assert shape.labels == ["hosts", "gpus"] and str(shape) == "{hosts=2,gpus=4}" and len(shape) == 8
    assert shape.extent == Extent(["hosts", "gpus"], [2, 4]) and shape.region.ranks() == tuple(shape.ranks())
    assert shape.coordinates(14) == {"hosts": 1, "gpus": 2}
    assert shape.at("hosts", 1) == shape.index(hosts=1) == Shape(["gpus"], NDSlice(offset=12, sizes=[4], strides=[1]))
    assert shape.index(hosts=1, gpus=2).ranks() == [14]
    assert shape.select("gpus", slice(1, None, 2)).ranks() == [5, 7, 13, 15]
    assert Shape.unity().ranks() == [0] and Shape.unity().coordinates(0) == {}
    assert pickle.loads(pickle.dumps(shape)) == shape and hash(pickle.loads(pickle.dumps(shape))) == hash(shape)
    for attempt in (
        lambda: shape.at("hosts", 2),
        lambda: shape.index(zones=0),
        lambda: shape.select("gpus", slice(2, 2)),
        lambda: shape.coordinates(8),
        lambda: Shape(["hosts"], shape.ndslice),
    ):
        with pytest.raises(ValueError):
            attempt()
    with pytest.raises(TypeError, match=r"use at\('gpus', 1\)"):
        shape.select("gpus", 1)  # type: ignore[arg-type]
