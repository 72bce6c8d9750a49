"""Who gets a block from whom, and how the content of a manifest lies in blocks: without hosts, clocks or files."""

from __future__ import annotations

import random

import pytest

from workspace_sync.model.manifest import FileEntry, Folder, Manifest, digest_of, seal
from workspace_sync.mounts.layout import BLOCK_SIZE, CLIENT, READERS, SLOW, SMALL, BlockRoutes, lay_out

BLOCK = (0, 7)


@pytest.mark.parametrize("hosts", [2, 16, 64])
def test_the_client_sends_a_block_once_and_hosts_pass_it_on(hosts: int) -> None:
    routes = BlockRoutes()
    waiting, reading, sources, rounds = set(range(hosts)), {}, [], 0
    while waiting or reading:
        rounds += 1
        for host in sorted(waiting):
            source = routes.ask(host, BLOCK, now=float(rounds) / 100)
            if source is not None:
                reading[host] = source
                waiting.discard(host)
        per_source = [list(reading.values()).count(source) for source in set(reading.values())]
        assert max(per_source) <= READERS
        sources += reading.values()
        for host, source in reading.items():
            routes.got(host, BLOCK, source)
        reading.clear()
    assert sources.count(CLIENT) == 1
    assert rounds <= 2 + hosts.bit_length()


def test_a_slow_first_receiver_is_not_waited_for() -> None:
    routes = BlockRoutes()
    assert routes.ask(0, BLOCK, 0.0) == CLIENT
    assert routes.ask(1, BLOCK, SLOW / 2) is None
    assert routes.ask(1, BLOCK, SLOW * 1.1) == CLIENT
    routes.got(1, BLOCK, CLIENT)
    assert routes.ask(2, BLOCK, SLOW * 1.2) == 1


def test_a_dead_holder_is_routed_around() -> None:
    routes = BlockRoutes()
    assert routes.ask(0, BLOCK, 0.0) == CLIENT
    routes.got(0, BLOCK, CLIENT)
    assert routes.ask(1, BLOCK, 0.1) == 0
    routes.failed(1, BLOCK, 0)
    routes.dead(0)
    assert routes.ask(1, BLOCK, 0.2, frozenset({0})) == CLIENT
    routes.failed(1, BLOCK, CLIENT)
    assert routes.ask(2, BLOCK, 0.3) == CLIENT


def test_a_block_that_is_not_whole_comes_from_the_client_again() -> None:
    routes = BlockRoutes()
    assert routes.ask(0, BLOCK, 0.0) == CLIENT
    routes.got(0, BLOCK, CLIENT)
    routes.forget(BLOCK)
    assert routes.ask(1, BLOCK, 0.1) == CLIENT


def manifest(files: dict[bytes, int], seed: int = 0) -> Manifest:
    draw = random.Random(seed)
    entries: dict[bytes, FileEntry] = {}
    for name, size in files.items():
        digest = digest_of(draw.randbytes(16))
        count = -(-size // (1 << 20)) if size > 1 << 20 else 0
        chunks = tuple(digest_of(digest + bytes([n])) for n in range(count))
        sizes = tuple(min(1 << 20, size - (n << 20)) for n in range(count))
        entries[name] = FileEntry(size, 0o644, digest, 0, chunks, sizes)
    return seal({b"": Folder(0o755, entries, {}, {})})


def test_blocks_lie_without_gaps_with_code_first_and_every_piece_once() -> None:
    first = manifest(
        {b"big": 30 << 20, b"a.py": 5000, b"b.py": 3 << 19, b"c.txt": SMALL - 1, b"zero": 0, b"data": 9000}
    )
    segment = lay_out(first.files(), 0, set())
    end = 0
    for block in segment.blocks:
        assert block.offset == end
        assert block.size == sum(piece.size for piece in block.pieces) <= BLOCK_SIZE
        end += block.size
    assert segment.size == end
    ahead = {piece.digest for block in segment.blocks[: segment.ahead] for piece in block.pieces}
    assert ahead == {first.folders[b""].files[name].digest for name in (b"a.py", b"c.txt")}
    pieces = [piece.digest for block in segment.blocks for piece in block.pieces]
    wanted = {digest for _, entry in first.files() for digest, _, _ in entry.pieces()}
    assert set(pieces) == wanted
    assert len(pieces) == len(wanted)


def test_a_later_segment_has_only_what_is_new() -> None:
    first = manifest({b"a.py": 5000, b"big": 8 << 20})
    have = {digest for _, entry in first.files() for digest, _, _ in entry.pieces()}
    assert lay_out(first.files(), 1, have).blocks == ()
    new = manifest({b"new.py": 700}, seed=9).folders[b""].files[b"new.py"]
    second = seal({b"": Folder(0o755, {**first.folders[b""].files, b"new.py": new}, {}, {})})
    [block] = lay_out(second.files(), 1, have).blocks
    assert [piece.digest for piece in block.pieces] == [new.digest]
