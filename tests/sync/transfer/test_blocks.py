"""Blocks and messages: what is packed is what arrives, and hosts get what they lack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workspace_sync import TamperedError
from workspace_sync.model.manifest import digest_of
from workspace_sync.transfer.blocks import LARGEST, Piece, block_bytes, fill, pack, pieces_in
from workspace_sync.transfer.messages import FEW, decode_missing, encode_missing

CONTENT = [bytes([number]) * (number * 7 + 1) for number in range(40)]
PIECES = [(digest_of(data), len(data)) for data in CONTENT]
BY_DIGEST = {digest_of(data): data for data in CONTENT}


def read(digest: bytes, into: memoryview) -> None:
    into[:] = BY_DIGEST[digest]


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.sampled_from(PIECES), unique=True), min_size=1))
def test_each_piece_is_in_one_block_for_all_hosts_that_lack_it(lacking: dict[str, list[Piece]]) -> None:
    blocks = pack(lacking, first=5)
    assert [block.number for block in blocks] == list(range(5, 5 + len(blocks)))
    for host, pieces in lacking.items():
        got = [piece for block in blocks if host in block.hosts for piece in block.pieces]
        assert sorted(got) == sorted(pieces)
    everywhere = [piece for block in blocks for piece in block.pieces]
    assert len(everywhere) == len(set(everywhere))


@given(st.lists(st.sampled_from(PIECES), unique=True))
def test_a_block_holds_what_was_put_in(pieces: list[Piece]) -> None:
    memory = bytearray(block_bytes(pieces))
    fill(memoryview(memory), pieces, read)
    assert [(digest, bytes(data)) for digest, data in pieces_in(memoryview(memory))] == [
        (digest, BY_DIGEST[digest]) for digest, _ in pieces
    ]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        found = pieces_in(memoryview(data))
    except TamperedError:
        return
    assert block_bytes([(digest, len(each)) for digest, each in found]) == len(data)


def test_a_block_that_was_cut_is_refused() -> None:
    memory = bytearray(block_bytes(PIECES))
    fill(memoryview(memory), PIECES, read)
    for size in (0, 3, 4, 50, len(memory) - 1):
        with pytest.raises(TamperedError):
            pieces_in(memoryview(memory)[:size])


def test_large_payloads_have_blocks_of_some_mib() -> None:
    pieces = [(number.to_bytes(32, "big"), 1 << 20) for number in range(1000)]
    blocks = pack({"a": pieces, "b": pieces})
    assert all(LARGEST // 2 < block.size <= LARGEST for block in blocks[:-1])
    small = pack({"a": pieces[:8], "b": pieces[:8]})
    assert len(small) == 8, "so that hosts have something to exchange"


@given(st.sets(st.integers(0, 999)), st.sets(st.integers(1000, 1010)))
def test_missing_pieces_cross_as_bits(known: set[int], others: set[int]) -> None:
    order = {number.to_bytes(32, "big"): number for number in range(1000)}
    missing = [(number.to_bytes(32, "big"), number) for number in sorted(known | others)]
    crossed = encode_missing(missing, order)
    assert decode_missing(crossed, order.items()) == missing
    assert len(crossed.named) <= max(FEW, len(others))
