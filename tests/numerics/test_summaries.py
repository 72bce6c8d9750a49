"""Summaries of shards add up to that of the whole, and their hashes show every changed bit."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from monarch_kernel.numerics.summaries import (  # noqa: E402
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    hash_of,
    summarize,
)

pytestmark = pytest.mark.torch

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    whole = torch.randn(shape, dtype=torch.complex128) * 5 if dtype.is_complex else torch.randn(shape) * 5
    return whole.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 7, 5), (3, 2049), (130_000, 2)], ids=str)
def test_shards_add_up_to_the_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(shape, dtype)
    whole = summarize(tensor)
    parts = []
    for rows in (slice(0, 2), slice(2, shape[0])):
        for columns in (slice(0, 1), slice(1, shape[1])):
            offsets = (rows.start, columns.start, *([0] * (len(shape) - 2)))
            parts.append(summarize(tensor[rows, columns], Placement(shape, offsets)))
    scale = math.sqrt(whole.sum_of_squares)
    assert sum(each.sum_of_squares for each in parts) == pytest.approx(whole.sum_of_squares, rel=1e-6)
    assert max(each.maximum for each in parts) == whole.maximum
    assert sum(each.projection for each in parts) == pytest.approx(whole.projection, abs=1e-6 * scale)
    wide = torch.view_as_real(tensor).double() if dtype.is_complex else tensor.double()
    assert whole.sum_of_squares == pytest.approx(float(wide.square().sum()), rel=1e-6)
    assert whole.maximum == float(wide.abs().max())


def test_elements_that_are_not_finite_are_counted_and_left_out() -> None:
    tensor = torch.ones(1000)
    tensor[3], tensor[5], tensor[900] = math.nan, -math.inf, math.inf
    found = summarize(tensor)
    assert (found.nonfinite, found.sum_of_squares, found.maximum) == (3, 997.0, 1.0)
    assert math.isfinite(found.projection)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_that_single_precision_cannot_hold(scale: float) -> None:
    tensor = torch.randn(2000) * scale
    assert math.sqrt(summarize(tensor).sum_of_squares) == pytest.approx(float(tensor.double().norm()), rel=1e-6)


def test_a_permutation_changes_the_projection_but_not_the_norm() -> None:
    tensor = torch.randn(8, 8)
    one, two = summarize(tensor), summarize(tensor.T)
    assert one.sum_of_squares == pytest.approx(two.sum_of_squares, rel=1e-6)
    assert abs(one.projection - two.projection) > 0.1
    assert one.hash != two.hash


def test_equal_values_have_equal_hashes_whatever_their_strides() -> None:
    tensor = torch.randn(33, 17)
    assert summarize(tensor.T.contiguous().T).hash == summarize(tensor).hash
    assert summarize(torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(33, 17)).hash == summarize(tensor).hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_each_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = values((1001,), dtype) if dtype.is_floating_point else torch.arange(1001).to(dtype)
    whole = hash_of(tensor)
    size = tensor.element_size()
    for at in (0, 999, 1000):
        for bit in range(8 * size):
            changed = tensor.clone().view(torch.uint8)
            changed[at * size + bit // 8] ^= 1 << bit % 8
            assert hash_of(changed.view(dtype)) != whole, (at, bit)
    if dtype.is_floating_point:
        assert hash_of(-tensor) != whole


def test_empty_and_single() -> None:
    assert summarize(torch.zeros(0, 3)).sum_of_squares == 0
    found = summarize(torch.tensor(-2.0))
    assert (found.shape, found.sum_of_squares, found.maximum) == ((), 4.0, 2.0)


def test_placements_by_patterns_of_names() -> None:
    placements = Placements(
        {"*.wq.weight": Shard(0), "*.wq:output": Shard(-1, size=2), "*.bias": Replicate(), "*.partial": Partial()}, 3, 4
    )
    tensor = torch.zeros(2, 6)
    assert placements.of("layers.0.wq.weight", tensor) == Placement((8, 6), (6, 0), replicas=1)
    assert placements.of("layers.0.wq:output", tensor) == Placement((2, 12), (0, 6), replicas=2)
    assert placements.of("x.bias", tensor) == Placement((2, 6), (0, 0), replicas=4)
    assert placements.of("x.partial", tensor) == Placement((2, 6), (0, 0), partial=True)
    assert placements.of("layers.0.wk.weight", tensor) is None
    assert not placements.unused


def test_an_uneven_split() -> None:
    last = Shard(0, ranks=(0, 2, 5), length=7)
    assert [last.place((rows,), rank, 8).offsets for rank, rows in ((0, 3), (2, 3), (5, 1))] == [(0,), (3,), (6,)]


@pytest.mark.parametrize(
    "split, shape, said",
    [
        (Shard(2), (3, 3), r"placement 'x' of x: Shard\(2\) does not fit a tensor with 2 dimensions"),
        (Shard(0, ranks=(1, 2)), (3,), r"rank 0 is not one of the ranks \[1, 2\]"),
        (Shard(0, length=5, size=2), (6,), "part 0 of 2 does not have 6 of 5 elements"),
    ],
)
def test_a_split_that_does_not_fit_is_named(split: Shard, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Placements({"x": split}, 0, 2).of("x", torch.zeros(shape))


def test_a_placement_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"placements\['x'\] is 0: give Shard\(DIM\)"):
        Placements({"x": 0}, 0, 1)  # type: ignore[dict-item]
