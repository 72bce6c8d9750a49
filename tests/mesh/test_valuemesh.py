"""ValueMesh: indexing, slicing, iteration, pickling and what a person sees."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from monarch_kernel.runtime.mesh import Extent, ValueMesh

EXTENT = Extent(["hosts", "gpus"], [2, 4])


@pytest.fixture
def values() -> ValueMesh[int]:
    return ValueMesh(EXTENT, range(10, 18))


def test_access_by_rank_and_coordinates(values: ValueMesh[int]) -> None:
    assert values.get(6) == values[6] == values.item(hosts=1, gpus=2) == 16
    assert values[1, 2] == values[{"hosts": 1, "gpus": 2}] == values[EXTENT.point(6)] == 16
    assert list(values.values()) == list(range(10, 18))
    assert list(values) == list(values.items()) == [(point, 10 + point.rank) for point in EXTENT.points()]
    assert len(values) == 8


def test_slices_are_value_meshes_with_points_of_their_own(values: ValueMesh[int]) -> None:
    part = values.slice(hosts=1, gpus=slice(1, None))
    assert part.extent == {"gpus": 3}
    assert [(dict(point), value) for point, value in part] == [
        ({"gpus": 0}, 15),
        ({"gpus": 1}, 16),
        ({"gpus": 2}, 17),
    ]
    assert list(values[1, 1:].values()) == [15, 16, 17]
    assert list(values.flatten("r")[2:4].values()) == [12, 13]
    assert values.split(gpus=("a", "b"), a=2).item(hosts=0, a=1, b=1) == 13
    assert values.rename(gpus="x").sizes == {"hosts": 2, "x": 4}


def test_a_singleton_has_one_item(values: ValueMesh[int]) -> None:
    one = values.slice(hosts=1, gpus=3)
    assert one.item() == one[0] == one[()] == 17
    assert repr(one) == "ValueMesh({}): 17"


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (8, IndexError, r"index 8 out of range .len=8."),
        (-1, IndexError, "index -1 out of range"),
        ((1,), IndexError, "needs 2 coordinates, got 1"),
        ((1, 4), IndexError, "index 4 is out of range for dimension 'gpus'"),
        ({"hosts": 1}, KeyError, "'gpus' is missing"),
        ({"hosts": 1, "gpus": 0, "x": 0}, KeyError, "unknown dimensions 'x'"),
        ((0, "a"), TypeError, "int or a slice"),
        ("a", TypeError, "indexed by a rank, a tuple of coordinates or a dict"),
        (slice(0, 1), IndexError, "needs 2 coordinates"),
    ],
)
def test_bad_indices(values: ValueMesh[int], index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        values[index]


def test_the_number_of_values_must_match() -> None:
    with pytest.raises(ValueError, match="needs 8 values, got 3"):
        ValueMesh(EXTENT, [1, 2, 3])


def test_a_region_gives_the_shape() -> None:
    mesh = ValueMesh(EXTENT.region.slice(gpus=slice(0, 4, 2)), "abcd")
    assert mesh.item(hosts=1, gpus=0) == "c"


def test_pickling(values: ValueMesh[int]) -> None:
    again = pickle.loads(pickle.dumps(values.slice(gpus=1)))
    assert list(again) == list(values.slice(gpus=1))


def test_repr_puts_equal_values_on_one_line() -> None:
    mesh = ValueMesh(EXTENT, ["ok", "ok", "ok", "bad", "ok", "ok", "ok", "ok"])
    assert repr(mesh) == (
        "ValueMesh({hosts: 2, gpus: 4}):\n"
        "  hosts=0,gpus=0-2; hosts=1,gpus=0-3  'ok'\n"
        "  hosts=0,gpus=3                      'bad'"
    )


def test_repr_is_bounded_and_indents_values_of_several_lines() -> None:
    text = repr(ValueMesh(Extent(["r"], [1000]), range(1000)))
    assert text.count("\n") < 25
    assert text.endswith("… and 980 more different values")

    class Matrix:
        def __repr__(self) -> str:
            return "[1\n 2]"

    assert repr(ValueMesh(Extent(["r"], [1]), [Matrix()])) == "ValueMesh({r: 1}):\n  r=0  [1\n        2]"


def test_arithmetic_is_of_the_values_and_keeps_the_shape() -> None:
    values = ValueMesh(Extent(("hosts", "gpus"), (2, 2)), [1, 2, 3, 4])
    other = ValueMesh(values.extent, [10, 20, 30, 40])
    for made, wanted in (
        (values + 1, [2, 3, 4, 5]),
        (1 - values, [0, -1, -2, -3]),
        (other - values, [9, 18, 27, 36]),
        (2 * values, [2, 4, 6, 8]),
        (other / values, [10.0] * 4),
        (12 / values, [12.0, 6.0, 4.0, 3.0]),
        (other // 3 % 4, [3, 2, 2, 1]),
        (100 // other, [10, 5, 3, 2]),
        (7 % values, [0, 1, 1, 3]),
        (values**2, [1, 4, 9, 16]),
        (2**values, [2, 4, 8, 16]),
        (abs(-values), [1, 2, 3, 4]),
        (+values, [1, 2, 3, 4]),
        (values.map(str), ["1", "2", "3", "4"]),
        (values.map(max, other, values), [10, 20, 30, 40]),
    ):
        assert (list(made.values()), made.extent) == (wanted, values.extent)
    texts = values.map(str)
    assert list((texts + "x").values()) == ["1x", "2x", "3x", "4x"]
    assert list(("x" + texts).values()) == ["x1", "x2", "x3", "x4"]


def test_arithmetic_with_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    values = ValueMesh(Extent(("gpus",), (2,)), [numpy.eye(2), numpy.ones((2, 2))])
    for made in (numpy.ones(2) + values, values + numpy.ones(2)):
        assert isinstance(made, ValueMesh)
        assert [value.sum() for value in made.values()] == [6.0, 8.0]
    assert [value.sum() for value in (values @ numpy.ones(2)).values()] == [2.0, 4.0]
    assert [value.sum() for value in (numpy.ones(2) @ values).values()] == [2.0, 4.0]


def test_what_goes_wrong_names_the_rank() -> None:
    values = ValueMesh(Extent(("gpus",), (3,)), [1, 0, 2])
    with pytest.raises(ZeroDivisionError) as caught:
        1 / values
    assert caught.value.__notes__ == ["at rank 1 of a ValueMesh (gpus=1)"]
    with pytest.raises(ValueError, match=r"\{gpus: 2\} cannot be combined with one of \{gpus: 3\}"):
        values + values[0:2]
