"""Tensors read where they lie: digests that depend on contents alone, and figures that are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.debugger.rank.values.blocks import BLOCK_BYTES, Deadline, TimeLimitError, blocks_of, is_steady

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from monarch_kernel.debugger.rank.values import tensors  # noqa: E402
from monarch_kernel.debugger.rank.values.tensors import TensorArray, window  # noqa: E402

PATIENCE = Deadline(3600)
MANY = 3 * BLOCK_BYTES // 4 + 1001  # float32 elements: three whole blocks, and one that is shorter


def read(tensor: Any, slab: int | None = None) -> TensorArray:
    array = TensorArray(tensor, slab=slab)
    array.read(PATIENCE)
    return array


def digest(tensor: Any, slab: int | None = None) -> bytes:
    return read(tensor, slab).digests


def values(count: int = MANY, seed: int = 0) -> Any:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_there_is_a_digest_for_each_block() -> None:
    assert len(blocks_of(digest(values()))) == 4
    assert digest(torch.empty(0, 3)) == b""


@pytest.mark.parametrize("slab", [BLOCK_BYTES, 2 * BLOCK_BYTES, 100 * BLOCK_BYTES])
def test_how_many_blocks_are_read_at_once_does_not_matter(slab: int) -> None:
    # Several rows at once is how a device reads.
    tensor = values()
    tensor[[5, BLOCK_BYTES // 4 + 7]] = torch.tensor([math.nan, math.inf])
    one, other = read(tensor), read(tensor, slab)
    assert one.digests == other.digests
    assert one.stats is not None
    assert other.stats is not None
    assert one.stats.norm == pytest.approx(other.stats.norm)
    assert (one.stats.low, one.stats.high) == (other.stats.low, other.stats.high)
    assert (one.stats.nans, one.stats.infs) == (other.stats.nans, other.stats.infs) == (1, 1)


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: torch.stack([t, t], 2)[:, :, 1],
        lambda t: torch.cat([torch.zeros(3), t.flatten()])[3:].view_as(t),
        lambda t: t.flip(0).flip(0),
    ],
)
def test_how_it_lies_in_memory_does_not_matter(layout: Any) -> None:
    tensor = values(400 * 700).view(400, 700)
    same = layout(tensor)
    assert torch.equal(same, tensor)
    assert digest(same) == digest(tensor)


def test_channels_last_and_expanded() -> None:
    tensor = values(2 * 3 * 50 * 70).view(2, 3, 50, 70)
    assert digest(tensor.to(memory_format=torch.channels_last)) == digest(tensor)
    row = values(500)
    assert digest(row.expand(300, 500)) == digest(row.repeat(300, 1))
    assert digest(tensor[:, 1]) == digest(tensor[:, 1].contiguous())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=60)
def test_a_window_is_what_lies_there_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    start = data.draw(st.integers(0, tensor.numel() - 1))
    count = data.draw(st.integers(1, tensor.numel() - start))
    found = window(tensor, start, count)
    assert found.is_contiguous()
    assert found.tolist() == tensor.reshape(-1)[start : start + count].tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[0].mul_(-1),
        lambda t: t[[100, 101]].mul_(-1),
        lambda t: t.__setitem__([101, 103, 2001, 50003], -t[[101, 103, 2001, 50003]]),  # only sign bits, evenly many
        lambda t: t.__setitem__([7, 9], t[[9, 7]]),
        lambda t: t[-1].add_(1e-3),
        lambda t: t.__setitem__(12, torch.nextafter(t[12], torch.tensor(9.0))),
        lambda t: t.__setitem__(slice(None), t.roll(1)),
        lambda t: t.neg_(),
    ],
)
def test_any_change_is_noticed(change: Any) -> None:
    tensor = values()
    before = digest(tensor)
    changed = tensor.clone()
    change(changed)
    assert torch.equal(changed, tensor) == (digest(changed) == before)
    assert digest(tensor) == before


def test_one_flipped_bit_anywhere_changes_the_digest_of_its_block_only() -> None:
    tensor = torch.zeros(MANY)
    before = blocks_of(digest(tensor))
    words = tensor.view(torch.int32)
    for at in (0, 1, 70_000, MANY - 1):
        for bit in range(32):
            flip = 1 << bit if bit < 31 else -(1 << 31)
            words[at] ^= flip
            after = blocks_of(digest(tensor))
            words[at] ^= flip
            differing = [block for block, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
            assert differing == [at // (BLOCK_BYTES // 4)]


TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type_is_read_and_compared(kind: Any) -> None:
    counted = torch.arange(1003).remainder(2 if kind is torch.bool else 5)
    changed = counted.clone()
    changed[[17, 900]] = 1 - changed[[17, 900]].clamp(max=1)
    tensor, other = counted.to(kind), changed.to(kind)
    one, two = read(tensor), read(other)
    assert one.digests == digest(tensor.clone())
    assert one.digests != two.digests
    assert one.leaf("w", PATIENCE).stats is not None
    found = two.contrast(0, one.piece(0, 1003))
    assert found.index == (17,)
    assert found.most is not None
    assert found.most > 0
    assert found.compared == 1003
    assert two.contrast(0, two.piece(0, 1003)).index is None


def test_figures_are_those_of_torch() -> None:
    tensor = values()
    stats = read(tensor).stats
    assert stats is not None
    assert stats.norm == pytest.approx(float(tensor.double().norm()), rel=1e-5)
    assert (stats.low, stats.high) == (float(tensor.min()), float(tensor.max()))
    assert (stats.nans, stats.infs) == (0, 0)


def test_nan_and_infinite_elements_are_counted_and_left_out() -> None:
    tensor = torch.tensor([math.nan, 3.0, math.inf, -4.0, -math.inf, math.nan])
    stats = read(tensor).stats
    assert stats is not None
    assert (stats.norm, stats.low, stats.high, stats.nans, stats.infs) == (5.0, -4.0, 3.0, 2, 2)
    stats = read(torch.full((9,), math.nan)).stats
    assert stats is not None
    assert (stats.norm, stats.low, stats.high, stats.nans) == (0.0, None, None, 9)


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-40, 3e38])
def test_norms_neither_overflow_nor_vanish(size: float) -> None:
    stats = read(torch.full((10_000,), size)).stats
    assert stats is not None
    assert stats.norm == pytest.approx(float(torch.tensor(size)) * 100, rel=1e-4)


def test_integers_are_exact() -> None:
    stats = read(torch.tensor([2**62 + 1, -(2**63)])).stats
    assert stats is not None
    assert (stats.norm, stats.low, stats.high) == (None, -(2**63), 2**62 + 1)


def test_a_contrast_says_where_first_and_by_how_much() -> None:
    theirs = values(60_000).view(200, 300)
    ours = theirs.clone()
    ours[3, 4] += 0.5
    ours[150, 7] = math.nan
    ours[199, 299] *= -1
    one, two = read(ours), read(theirs)
    found = one.contrasts([(0, two.piece(0, 60_000))])
    assert found.index == (3, 4)
    assert float(found.ours) == pytest.approx(float(ours[3, 4]), rel=1e-5)
    assert found.count == 3
    assert found.most == pytest.approx(max(0.5, 2 * abs(float(theirs[199, 299]))), rel=1e-5)
    assert found.relative == pytest.approx(2.0) or found.relative == pytest.approx(
        0.5 / abs(float(ours[3, 4])), rel=0.9
    )


def test_values_that_differ_only_in_bits_are_told_apart() -> None:
    found = read(torch.tensor([0.0, 1.0])).contrast(0, read(torch.tensor([-0.0, 1.0])).piece(0, 2))
    assert found.count == 1
    assert found.most == 0.0
    assert {found.ours, found.theirs} == {"0", "-0"} or {found.ours, found.theirs} == {"0.0", "-0.0"}


def test_lazy_views_are_resolved() -> None:
    tensor = torch.randn(5000, dtype=torch.complex64)
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj())
    assert digest(tensor.conj().imag) == digest(tensor.conj().imag.clone())


def test_what_changes_meanwhile_is_noticed() -> None:
    tensor = values()
    array = read(tensor)
    assert is_steady(array, [0, 3])
    tensor[BLOCK_BYTES // 4] += 1
    assert is_steady(array, [0, 2, 3])
    assert not is_steady(array, [1])


def test_several_threads_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(40 * BLOCK_BYTES // 4 + 5)
    expected = digest(tensor)
    monkeypatch.setattr(tensors, "_SPANS_PER_WORKER", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    array = read(tensor)
    assert array.digests == expected
    assert array.stats is not None
    assert array.stats.norm == pytest.approx(float(tensor.norm()), rel=1e-4)


def test_reading_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    read(values())
    assert torch.get_num_threads() == before


def test_reading_ends_when_the_time_is_over() -> None:
    with pytest.raises(TimeLimitError, match="longer than 0 s"):
        TensorArray(values()).read(Deadline(0))


def test_the_tensor_is_not_touched() -> None:
    parameter = torch.nn.Parameter(values(100))
    (parameter * 2).sum().backward()
    read(parameter)
    assert parameter.grad is not None
    assert parameter.requires_grad
    assert torch.equal(parameter.detach(), values(100))
