"""Extents, points and regions: every selection must equal NumPy's on an array of ranks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.runtime.mesh import Extent, MeshTrait, Point, Region, UnknownDimensionError

HOSTS_GPUS = Extent(["hosts", "gpus"], [2, 4])


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    sizes = draw(st.lists(st.integers(1, 5), max_size=4))
    return Extent([f"d{i}" for i in range(len(sizes))], sizes)


def as_array(region: Region) -> np.ndarray[Any, Any]:
    return np.array(region.ranks()).reshape(region.sizes)


@st.composite
def selections(draw: st.DrawFn, region: Region) -> dict[str, int | slice]:
    chosen: dict[str, int | slice] = {}
    for label, size in zip(region.labels, region.sizes):
        kind = draw(st.sampled_from(["all", "index", "slice"]))
        if kind == "index":
            chosen[label] = draw(st.integers(0, size - 1))
        elif kind == "slice":
            part = draw(st.slices(size).filter(lambda s, n=size: s.indices(n)[2] > 0 and range(n)[s]))
            chosen[label] = part
    return chosen


@given(st.data())
def test_slicing_twice_is_numpy_indexing(data: st.DataObject) -> None:
    extent = data.draw(extents())
    region = Region.from_extent(extent)
    expected = np.arange(extent.nelements).reshape(extent.sizes)
    for _ in range(2):
        chosen = data.draw(selections(region))
        expected = expected[tuple(chosen.get(label, slice(None)) for label in region.labels)]
        region = region.slice(**chosen)
        np.testing.assert_array_equal(as_array(region), expected)
        assert region.nelements == len(region) == expected.size
        assert [region.position(rank) for rank in region.ranks()] == list(range(len(region)))
        outside = set(range(-1, extent.nelements + 1)) - set(region.ranks())
        assert all(region.position(rank) is None and rank not in region for rank in outside)


@given(st.data())
def test_split_is_numpy_reshape(data: st.DataObject) -> None:
    extent = data.draw(extents().filter(lambda e: len(e) > 0))
    region = extent.region.slice(**data.draw(selections(extent.region)))
    if not region.labels:
        return
    label = data.draw(st.sampled_from(region.labels))
    size = region.extent[label]
    first = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    given_part = data.draw(st.sampled_from([{"a": first}, {"b": size // first}]))
    split = region.split(**{label: ("a", "b")}, **given_part)
    at = region.labels.index(label)
    sizes = (*region.sizes[:at], first, size // first, *region.sizes[at + 1 :])
    assert split.labels == (*region.labels[:at], "a", "b", *region.labels[at + 1 :])
    np.testing.assert_array_equal(as_array(split), as_array(region).reshape(sizes))


@given(st.data())
def test_flatten_keeps_order_and_refuses_gaps(data: st.DataObject) -> None:
    extent = data.draw(extents())
    region = extent.region.slice(**data.draw(selections(extent.region)))
    ranks = region.ranks()
    if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        flat = region.flatten("x")
        assert (flat.labels, flat.ranks()) == (("x",), ranks)
    else:
        with pytest.raises(ValueError, match="cannot flatten a sparse mesh"):
            region.flatten("x")


@given(st.data())
def test_values_survive_pickling_and_are_shared(data: st.DataObject) -> None:
    extent = data.draw(extents())
    region = extent.region.slice(**data.draw(selections(extent.region)))
    point = extent.point(data.draw(st.integers(0, extent.nelements - 1)))
    for value in (extent, region, point):
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)
    once, twice = (pickle.loads(pickle.dumps(region)) for _ in range(2))
    assert once is twice


def test_extent_is_a_mapping_of_labels_to_sizes() -> None:
    assert HOSTS_GPUS.labels == ["hosts", "gpus"]
    assert HOSTS_GPUS.sizes == [2, 4]
    assert HOSTS_GPUS.nelements == 8
    assert len(HOSTS_GPUS) == 2
    assert HOSTS_GPUS == {"hosts": 2, "gpus": 4}
    assert Extent(["hosts", "gpus"], [2, 4]) == HOSTS_GPUS
    assert Extent(["gpus", "hosts"], [4, 2]) != HOSTS_GPUS
    assert HOSTS_GPUS != 8
    assert dict(HOSTS_GPUS) == {"hosts": 2, "gpus": 4}
    assert "gpus" in HOSTS_GPUS
    assert "x" not in HOSTS_GPUS
    assert repr(HOSTS_GPUS) == "{hosts: 2, gpus: 4}"
    assert [point.rank for point in HOSTS_GPUS.points()] == list(range(8))


def test_extent_without_dimensions_is_one_element() -> None:
    extent = Extent([], [])
    assert extent.nelements == 1
    assert dict(extent.point(0)) == {}
    assert extent.region.ranks() == (0,)
    assert repr(extent) == "{}"


@pytest.mark.parametrize(
    ("labels", "sizes", "error", "message"),
    [
        (["a"], [1, 2], ValueError, "one size for each dimension"),
        (["a", "a"], [1, 2], ValueError, "'a' is named twice"),
        (["a"], [0], ValueError, "'a' must have a size of at least 1, got 0"),
        (["a"], [-3], ValueError, "at least 1, got -3"),
        (["a"], [1.5], TypeError, "whole numbers"),
        (["a"], ["2"], TypeError, "whole numbers"),
        ([""], [2], TypeError, "non-empty string"),
        ([3], [2], TypeError, "non-empty string, got 3"),
    ],
)
def test_bad_extents(labels: Any, sizes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Extent(labels, sizes)


def test_numpy_sizes_become_plain_ints() -> None:
    extent = Extent(["a"], [np.int64(3)])
    assert extent == Extent(["a"], [3])
    assert type(extent.sizes[0]) is int


def test_point_is_a_mapping_of_labels_to_coordinates() -> None:
    point = Point(6, HOSTS_GPUS)
    assert (point.rank, point["hosts"], point["gpus"]) == (6, 1, 2)
    assert dict(point) == {"hosts": 1, "gpus": 2} == point
    assert point.size("gpus") == 4
    assert len(point) == 2
    assert point == HOSTS_GPUS.point(6)
    assert point != HOSTS_GPUS.point(5)
    assert point != Point(6, Extent(["x"], [8]))
    assert {point: "v"}[HOSTS_GPUS.point(6)] == "v"
    assert repr(point) == "{'hosts': 1/2, 'gpus': 2/4}"
    assert point.get("x") is None
    with pytest.raises(KeyError, match="does not have a dimension 'x'"):
        point["x"]
    with pytest.raises(IndexError, match="rank 8 is not in a mesh of 8"):
        HOSTS_GPUS.point(8)
    with pytest.raises(IndexError):
        HOSTS_GPUS.point(-1)


@given(extents())
def test_rank_of_coordinates_inverts_point(extent: Extent) -> None:
    for point in extent.points():
        assert extent.rank(point) == point.rank
        assert point.rank == 0 or tuple(point.values()) == np.unravel_index(point.rank, extent.shape)


def test_rank_of_bad_coordinates() -> None:
    with pytest.raises(KeyError, match="'gpus' is missing"):
        HOSTS_GPUS.rank({"hosts": 1})
    with pytest.raises(KeyError, match="unknown dimensions 'x'"):
        HOSTS_GPUS.rank({"hosts": 1, "gpus": 1, "x": 0})
    with pytest.raises(IndexError, match="index 9 is out of range for dimension 'gpus' of size 4"):
        HOSTS_GPUS.rank({"hosts": 1, "gpus": 9})
    with pytest.raises(IndexError):
        HOSTS_GPUS.rank({"hosts": -1, "gpus": 0})


@pytest.mark.parametrize(
    ("selection", "error", "message"),
    [
        ({"gpus": -1}, IndexError, "index -1 is out of range for dimension 'gpus' of size 4"),
        ({"gpus": 4}, IndexError, r"index 4 is out of range .* \(0 to 3\)"),
        ({"x": 1}, TypeError, "dimension 'x'; its dimensions are 'hosts', 'gpus'"),
        ({"gpus": "a"}, TypeError, "an int or a slice, got str 'a'"),
        ({"gpus": [1, 2]}, TypeError, "an int or a slice, got list"),
        ({"gpus": None}, TypeError, "an int or a slice, got NoneType"),
        ({"gpus": slice(2, 2)}, ValueError, "slice 2:2 .* selects nothing"),
        ({"gpus": slice(4, None)}, ValueError, "slice 4: .* selects nothing"),
        ({"gpus": slice(None, None, -1)}, ValueError, "positive step, got -1"),
    ],
)
def test_bad_slices(selection: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HOSTS_GPUS.region.slice(**selection)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"gpus": ("a", "b")}, "cannot infer the sizes of 'a' and 'b'"),
        ({"gpus": ("a", "b"), "a": 3}, r"size 4 does not divide evenly into \(a=3, b=\?\)"),
        ({"gpus": ("a", "b"), "a": 2, "b": 3}, r"evenly into \(a=2, b=3\)"),
        ({"gpus": ("a", "b"), "a": 1, "b": 2}, "does not divide evenly"),
        ({"gpus": ()}, "does not divide evenly"),
        ({"gpus": ("a", "hosts"), "a": 2}, "'hosts' is named twice"),
        ({"a": 2}, "got a size for 'a', which no dimension is split into"),
        ({"gpus": "ab", "a": 2}, "sequence of new labels, got the string 'ab'"),
        ({"gpus": ("a", "b"), "a": 0}, "at least 1, got 0"),
        ({"x": ("a", "b"), "a": 2}, "dimension 'x'"),
    ],
)
def test_bad_splits(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HOSTS_GPUS.region.split(**parts)
    with pytest.raises(TypeError, match="sequence of labels or a size for 'gpus', got float"):
        HOSTS_GPUS.region.split(gpus=1.5)  # type: ignore[arg-type]


def test_split_may_reuse_its_own_label_and_rename_alone() -> None:
    assert HOSTS_GPUS.region.split(gpus=("gpus", "b"), b=2).extent == {"hosts": 2, "gpus": 2, "b": 2}
    assert HOSTS_GPUS.region.split(gpus=["a"]).extent == {"hosts": 2, "a": 4}


def test_rename() -> None:
    region = HOSTS_GPUS.region
    assert region.rename(gpus="dp").extent.labels == ["hosts", "dp"]
    assert region.rename(gpus="hosts", hosts="gpus").extent.labels == ["gpus", "hosts"]
    with pytest.raises(ValueError, match="named twice"):
        region.rename(gpus="hosts")
    with pytest.raises(UnknownDimensionError, match="dimension 'x'"):
        region.rename(x="y")


def test_flatten_ignores_strides_that_are_never_used() -> None:
    one_host = HOSTS_GPUS.region.slice(hosts=slice(1, 2), gpus=slice(0, 2))
    assert one_host.flatten("x").ranks() == (4, 5)


class _Mesh(MeshTrait):
    def __init__(self, region: Region) -> None:
        self.region = region

    @property
    def _region(self) -> Region:
        return self.region

    def _new_with_region(self, region: Region) -> _Mesh:
        return _Mesh(region)


def test_mesh_trait() -> None:
    mesh = _Mesh(HOSTS_GPUS.region)
    assert (len(mesh), mesh.size(), mesh.size("gpus"), mesh.size(("hosts", "gpus"))) == (8, 8, 4, 8)
    assert mesh.sizes == {"hosts": 2, "gpus": 4}
    assert mesh.extent == HOSTS_GPUS
    part = mesh.slice(hosts=1).split(gpus=("dp", "pp"), pp=2).rename(dp="x").slice(pp=0)
    assert type(part) is _Mesh
    assert part.extent == {"x": 2}
    assert part.region.ranks() == (4, 6)
    assert mesh.flatten("all").sizes == {"all": 8}
    for error in (TypeError, KeyError, ValueError):  # Monarch raises any of these for a wrong dimension
        with pytest.raises(error, match="dimensions are 'hosts', 'gpus'"):
            mesh.size("x")


def test_an_unknown_dimension_prints_as_a_sentence() -> None:
    with pytest.raises(UnknownDimensionError) as caught:
        _Mesh(Extent([], []).region).slice(gpus=0)
    expected = "mesh does not have a dimension 'gpus'; its dimensions are none (it is a single element)"
    assert str(caught.value) == expected
    assert str(pickle.loads(pickle.dumps(caught.value))) == expected
