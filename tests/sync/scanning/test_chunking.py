"""A file that has changed keeps the chunks that it had, wherever they are now."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.manifest import digest_of
from workspace_sync.scanning.hashing import CHUNK

DATA = random.Random(1).randbytes(12 * CHUNK + 777)


def changed(client: Client, path: Path, data: bytes) -> tuple[int, int]:
    """Write a file and scan; returns the number and bytes of the chunks that it did not have before."""
    before = client.scan().manifest.file(b"large")
    path.write_bytes(data)
    found = client.scan()
    after = found.manifest.file(b"large")
    assert before is not None
    assert after is not None
    assert after.digest == digest_of(data)
    assert b"".join(_read(client, found.read, after.pieces())) == data
    assert max(after.sizes) <= CHUNK
    new = {digest: size for digest, _, size in after.pieces() if digest not in set(before.chunks)}
    return len(new), sum(new.values())


def _read(client: Client, read: object, pieces: object) -> list[bytes]:
    parts: list[bytes] = []
    for digest, _, size in pieces:  # type: ignore[attr-defined]
        buffer = bytearray(size)
        read(digest, memoryview(buffer))  # type: ignore[operator]
        parts.append(bytes(buffer))
    return parts


@pytest.fixture
def large(client: Client, tree: Path) -> Path:
    path = tree / "large"
    path.write_bytes(DATA)
    client.scan()
    return path


def test_an_insertion_in_front_is_all_that_is_new(client: Client, large: Path) -> None:
    assert changed(client, large, b"a line\n" + DATA) == (1, 7)
    assert changed(client, large, b"another\n" + b"a line\n" + DATA)[1] <= 15


def test_an_insertion_in_the_middle_changes_one_chunk(client: Client, large: Path) -> None:
    middle = 5 * CHUNK + 1000
    pieces, size = changed(client, large, DATA[:middle] + b"inserted" + DATA[middle:])
    assert pieces <= 2
    assert size == CHUNK + 8


def test_a_large_insertion(client: Client, large: Path) -> None:
    middle = 5 * CHUNK + 1000
    inserted = random.Random(2).randbytes(4 * CHUNK + 5000)
    _, size = changed(client, large, DATA[:middle] + inserted + DATA[middle:])
    assert size <= len(inserted) + 2 * CHUNK


def test_a_deletion(client: Client, large: Path) -> None:
    assert changed(client, large, DATA[: 3 * CHUNK + 500] + DATA[3 * CHUNK + 900 :])[1] <= CHUNK
    assert changed(client, large, DATA[1000:])[1] <= 2 * CHUNK
    assert changed(client, large, DATA[:CHUNK] + DATA[6 * CHUNK + 3 :])[1] <= 2 * CHUNK


def test_a_part_that_grew_and_changed(client: Client, large: Path) -> None:
    # As a tensor of a checkpoint with one row more.
    fresh = random.Random(3).randbytes(3 * CHUNK + 4096)
    _, size = changed(client, large, DATA[: 4 * CHUNK + 100] + fresh + DATA[7 * CHUNK + 100 :])
    assert size <= len(fresh) + 2 * CHUNK


def test_what_is_appended_is_new(client: Client, large: Path) -> None:
    assert changed(client, large, DATA + bytes(2 * CHUNK))[1] <= 3 * CHUNK
    assert changed(client, large, DATA)[1] <= CHUNK


def test_another_content_is_new(client: Client, large: Path) -> None:
    data = random.Random(4).randbytes(len(DATA))
    assert changed(client, large, data) == (13, len(data))


def test_edits_in_place_of_a_file_with_uneven_cuts(client: Client, large: Path) -> None:
    data = bytearray(b"a line\n" + DATA)
    changed(client, large, data)
    data[3 * CHUNK + 100 : 3 * CHUNK + 200] = bytes(100)
    data[9 * CHUNK + 7 : 9 * CHUNK + 50] = bytes(43)  # the start of a chunk
    assert changed(client, large, data) == (2, 2 * CHUNK)


def test_repeated_bytes_do_no_harm(client: Client, large: Path) -> None:
    zeros = bytes(20 * CHUNK)
    assert changed(client, large, zeros)[0] == 1
    assert changed(client, large, b"x" + zeros)[0] <= 2
    line = b"the same line again\n" * 300_000
    changed(client, large, line)
    changed(client, large, b"new\n" + line)


def test_many_edits_do_not_leave_many_small_pieces(client: Client, large: Path) -> None:
    rng = random.Random(5)
    data = DATA
    for _ in range(40):
        at = rng.randrange(len(data))
        data = data[:at] + b"+" + data[at:]
        large.write_bytes(data)
        found = client.scan().manifest.file(b"large")
        assert found is not None
        assert found.digest == digest_of(data)
        assert sum(found.sizes) == len(data)
        assert len(found.sizes) <= 40


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 8 * CHUNK, 8 * CHUNK + 1])
def test_sizes_at_the_edges(client: Client, large: Path, size: int) -> None:
    large.write_bytes(DATA[:size])
    found = client.scan().manifest.file(b"large")
    assert found is not None
    assert (found.size, found.digest) == (size, digest_of(DATA[:size]))
    assert sum(found.sizes) == (size if size > CHUNK else 0)
    assert b"".join(DATA[offset : offset + length] for _, offset, length in found.pieces()) == DATA[:size]
