"""Rank sets: what is written can be read back, and is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.runtime.mesh import Extent, format_points, format_ranks, parse_ranks

GPUS = Extent(["gpus"], [8])
HOSTS_GPUS = Extent(["hosts", "gpus"], [2, 4])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([7, 2, 1, 0, 3, 3], "0-3,7"),
        ([1, 3], "1,3"),
        ([0, 2, 4, 6], "0,2,4,6"),
        (range(0, 1000, 8), "0:993:8"),
        (range(1000), "0-999"),
        ([1, 4, 5, 6, 9], "1,4-6,9"),
    ],
)
def test_format_ranks(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_format_ranks_with_a_limit_counts_what_it_leaves_out() -> None:
    assert format_ranks([0, 1, 2, 5, 8, 9], limit=2) == "0-2,5,… (2 more)"
    assert format_ranks([0, 1, 2, 5], limit=2) == "0-2,5"


@pytest.mark.parametrize(
    ("ranks", "extent", "text"),
    [
        ([0, 1, 2, 3], GPUS, "gpus=0-3"),
        ([1, 3], GPUS, "gpus=1,3"),
        ([4, 5, 7], HOSTS_GPUS, "hosts=1,gpus=[0-1,3]"),
        (range(8), HOSTS_GPUS, "hosts=0-1,gpus=0-3"),
        ([1, 5], HOSTS_GPUS, "hosts=0-1,gpus=1"),
        ([2, 4, 5, 6, 7], HOSTS_GPUS, "hosts=0,gpus=2; hosts=1,gpus=0-3"),
        ([0], Extent([], []), ""),
        ([], GPUS, ""),
    ],
)
def test_format_points(ranks: list[int], extent: Extent, text: str) -> None:
    assert format_points(ranks, extent) == text


def test_format_points_with_a_limit() -> None:
    extent = Extent(["a", "b"], [4, 4])
    assert format_points([0, 5, 10, 15], extent, limit=2) == "a=0,b=0; a=1,b=1; … (2 more)"


@given(st.data())
def test_what_is_written_can_be_read(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    extent = Extent([f"d{i}" for i in range(len(sizes))], sizes)
    ranks = data.draw(st.sets(st.integers(0, extent.nelements - 1), min_size=1))
    assert parse_ranks(format_ranks(ranks), extent) == tuple(sorted(ranks))
    assert parse_ranks(format_points(ranks, extent), extent) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("*", range(8)),
        ("all", range(8)),
        ("0-3", range(4)),
        ("0-1, 7", [0, 1, 7]),
        ("[0-1,7]", [0, 1, 7]),
        ("0:8:2", [0, 2, 4, 6]),
        ("6:", [6, 7]),
        ("-2:", [6, 7]),
        (":2", [0, 1]),
        ("gpus=0:2", [0, 1, 4, 5]),
        ("hosts=1,gpus=0-3", [4, 5, 6, 7]),
        ("hosts=1,gpus=0,3", [4, 7]),
        ("hosts = 1 , gpus = [0,3]", [4, 7]),
        ("hosts=*,gpus=1", [1, 5]),
        ("hosts=0,gpus=1; hosts=1; 0", [0, 1, 4, 5, 6, 7]),
    ],
)
def test_parse_ranks(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text, HOSTS_GPUS) == tuple(ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no ranks given"),
        ("x", "cannot read 'x' as a rank set; write e.g. 0-3,7"),
        ("1,,2", "cannot read '' as a rank set"),
        ("-1", "cannot read '-1'"),
        ("3-1", "range '3-1' ends before it begins"),
        ("8", r"rank '8' is out of range: there are 8 \(0 to 7\)"),
        ("0-9", "rank '0-9' is out of range"),
        ("8:", "slice '8:' selects nothing"),
        ("0:8:0", "positive step"),
        ("gpus=4", r"gpus '4' is out of range: there are 4 \(0 to 3\)"),
        ("x=1", "does not have a dimension 'x'; its dimensions are 'hosts', 'gpus'"),
        ("gpus=1,gpus=2", "'gpus' is named twice"),
        ("1,gpus=2", "'1' in '1,gpus=2' does not belong to a dimension; write dim=1"),
        ("gpus=", "cannot read '' as a gpus set"),
    ],
)
def test_parse_ranks_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ranks(text, HOSTS_GPUS)
