"""What a host has is used again: by reflink, hard link or copy, whole or in pieces, and always hashed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sync.store.trees import Content, expected, file, missing, on_disk, roll_back, sync
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder

CHUNK = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "store")) as made:
        yield made


def tree(folder: WorkspaceFolder, part: str = "tree") -> str:
    return f"{folder.path}/current/{part}"


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def edited(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def test_a_small_change_in_a_large_file_is_one_piece(store: Store) -> None:
    folder = store.workspace("w")
    versions = [noise(40 * CHUNK + 17, 1)]
    for n in range(1, 4):
        versions.append(edited(versions[-1], n * 7 * CHUNK + 5, b"edit %d" % n))
    contents = [Content({b"large": data, b"small": b"%d" % n}, CHUNK) for n, data in enumerate(versions)]
    sync(folder, contents[0])
    folder.follow()
    inode = os.stat(f"{folder.path}/slots/tree-2/large").st_ino
    for content in contents[1:]:
        staging, _ = sync(folder, content)
        assert staging.reused == 39 * CHUNK + 17
        assert on_disk(tree(folder)) == expected(content)
        folder.follow()
        assert folder.verify() == []
    # Without reflinks, the file is changed where it is: nothing but what differs was written.
    assert store.facts().reflink or os.stat(f"{folder.path}/slots/tree-2/large").st_ino == inode
    for content in reversed(contents[:-1]):
        roll_back(folder)
        assert on_disk(tree(folder)) == expected(content)
        assert folder.verify() == []


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_large_file_that_a_process_uses_is_not_changed_under_it(store: Store, how: str) -> None:
    folder = store.workspace("w")
    data = noise(20 * CHUNK, 1)
    sync(folder, Content({b"dir/large": data}, CHUNK))
    code = """
import mmap, sys
file = open(sys.argv[1], "rb")
seen = file if sys.argv[2] == "open" else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
if sys.argv[2] == "mapped":
    file.close()
print("ready", flush=True)
sys.stdin.readline()
seen.seek(0)
sys.stdout.buffer.write(seen.read())
"""
    command = [sys.executable, "-c", code, os.path.realpath(f"{tree(folder)}/dir/large"), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for n in range(3):
            sync(folder, Content({b"dir/large": edited(data, n * CHUNK, b"edit")}, CHUNK))
            folder.follow()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stdout.read() == data


@pytest.mark.parametrize("how", ["inserted", "cut", "grown"])
def test_pieces_that_move_are_found(store: Store, how: str) -> None:
    folder = store.workspace("w")
    pieces = [noise(CHUNK, seed) for seed in range(12)]
    new = {
        "inserted": [noise(CHUNK, 99), *pieces],
        "cut": pieces[:3] + pieces[5:],
        "grown": [*pieces, noise(CHUNK, 99)],
    }[how]
    sync(folder, Content({b"large": b"".join(pieces)}, CHUNK))
    content = Content({b"large": b"".join(new), b"other": b"".join(reversed(pieces))}, CHUNK)
    assert len(missing(folder, content)) == (how != "cut")
    for _ in range(2):
        sync(folder, content)
        assert on_disk(tree(folder)) == expected(content)
        folder.follow()
        roll_back(folder)
        assert on_disk(tree(folder)) == expected(Content({b"large": b"".join(pieces)}, CHUNK))
        assert folder.verify() == []


def test_reflinks_share_the_bytes_of_all_trees(reflink_disk: Path) -> None:
    with Store(str(reflink_disk / "store")) as store:
        assert store.facts().reflink
        folder = store.workspace("w")
        data = noise(48 << 20, 1)
        before = store.facts().free
        contents = [Content({b"large": edited(data, n << 20, b"edit")}, 1 << 20) for n in range(5)]
        for content in contents:
            sync(folder, content)
            folder.follow()
            assert on_disk(tree(folder)) == expected(content)
        os.sync()
        assert before - store.facts().free < 90 << 20  # two slots and five generations: 5 to 7 × 48 MB as copies
        for content in reversed(contents[:-1]):
            roll_back(folder)
            assert on_disk(tree(folder)) == expected(content)


def test_files_of_an_environment_are_hard_links_where_nobody_can_write_to_them(user: Callable[..., str]) -> None:
    said = user(
        """
        with Store(sys.argv[1]) as store:
            assert store.facts().hard_links
            folder = store.workspace("w")
            content = Content({b"lib/a.py": b"a = 1", b"bin/run": file(b"#!/bin/sh", 0o755), b"lib/b.py": b"b = 1"})
            for part in ("env", "tree"):
                sync(folder, content, part)
            sync(folder, Content({b"lib/a.py": b"a = 2", b"bin/run": file(b"#!/bin/sh", 0o755)}), "env")
            folder.follow()
            slots = f"{folder.path}/slots"
            print(os.stat(f"{slots}/env-1/bin/run").st_nlink, os.stat(f"{slots}/env-2/lib/a.py").st_nlink)
            print(oct(os.stat(f"{folder.path}/current/env/bin/run").st_mode & 0o777))
            about = os.stat(f"{folder.path}/current/tree/lib/a.py")
            print(about.st_nlink, oct(about.st_mode & 0o777))
            try:
                open(f"{folder.path}/current/env/lib/a.py", "w")
            except PermissionError:
                print("refused")
            print(folder.verify())
            roll_back(folder)
            print(open(f"{folder.path}/current/env/lib/b.py").read(), folder.verify())
        """
    )
    assert said.splitlines() == ["2 2", "0o555", "1 0o644", "refused", "[]", "b = 1 []"]


def test_trees_of_ranks_never_share_a_file(store: Store) -> None:
    folder = store.workspace("w")
    data = {b"f%d" % n: b"%d" % n * 100 for n in range(20)}
    for n in range(3):
        sync(folder, Content({**data, b"g": b"%d" % n}))
        sync(folder, Content({**data, b"g": b"%d" % n}), "env")
        folder.follow()
    links = [os.stat(os.path.join(at, name)).st_nlink for at, _, names in os.walk(store.path) for name in names]
    assert store.facts().hard_links or set(links) == {1}


def test_workspaces_serve_each_other(store: Store) -> None:
    content = Content({b"large": noise(40 * CHUNK, 1), b"dir/x": noise(2 << 20, 2)}, CHUNK)
    one, other = store.workspace("one"), store.workspace("other")
    sync(one, content)
    assert missing(other, content) == []
    sync(other, content)
    assert on_disk(tree(other)) == expected(content)


def test_damaged_content_counts_as_missing_and_is_reported(store: Store) -> None:
    folder = store.workspace("w")
    data = noise(20 * CHUNK, 1)
    sync(folder, Content({b"dir/large": data, b"a": b"a" * 1000}, CHUNK))
    with open(f"{tree(folder)}/dir/large", "r+b") as opened:
        opened.seek(3 * CHUNK)
        opened.write(b"tampered")
    with open(f"{tree(folder)}/a", "r+b") as opened:
        opened.write(b"tampered")
    content = Content({b"dir/large": data + b"more", b"a": b"a" * 1000}, CHUNK)
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        lacking = {digest for digest, _ in staging.missing}
        assert len(lacking) == 3  # the piece that was changed, the one that is new, and the other file
        assert {problem.path.rpartition("/")[2] for problem in staging.problems} == {"large", "a"}
        for digest in lacking:
            staging.put(digest, memoryview(content.pieces[digest]))
        staging.finish()
        staging.commit()
    assert on_disk(tree(folder)) == expected(content) and folder.verify() == []


def test_a_tampered_object_is_not_used(store: Store) -> None:
    folder = store.workspace("w")
    for n in range(3):
        sync(folder, Content({b"f": b"content %d" % n}))
    objects = [Path(at) / name for at, _, names in os.walk(f"{store.path}/objects") for name in names]
    assert objects
    for each in objects:
        each.write_bytes(b"tampered!")
    content = Content({b"f": b"content 0"})
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        assert [digest for digest, _ in staging.missing] == list(content.pieces)
        assert [problem.path for problem in staging.problems] == [str(objects[0])]
        staging.abort()


def test_files_are_renamed_without_being_written(store: Store) -> None:
    folder = store.workspace("w")
    files = {b"old/f%d" % n: noise(1000, n) for n in range(50)}
    sync(folder, Content(files))
    folder.follow()
    inodes = {path.stat().st_ino for path in Path(f"{folder.path}/slots/tree-2/old").iterdir()}
    renamed = Content({b"new/deep/" + path[4:]: data for path, data in files.items()})
    staging, _ = sync(folder, renamed)
    assert on_disk(tree(folder)) == expected(renamed)
    assert {path.stat().st_ino for path in Path(f"{tree(folder)}/new/deep").iterdir()} == inodes
    assert staging.reused == 50_000


def test_pieces_arrive_in_any_order_from_any_thread(store: Store) -> None:
    folder = store.workspace("w")
    files: dict[bytes, bytes] = {b"d%d/f%d" % (n % 90, n): b"%d" % (n // 2) for n in range(600)}
    content = Content({**files, b"large": noise(1 << 20, 1)}, 4096)
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        pieces = staging.missing
        random.Random(1).shuffle(pieces)
        assert len(pieces) == 300 + 256
        with ThreadPoolExecutor(8) as pool:  # each piece twice
            list(pool.map(lambda piece: staging.put(piece[0], memoryview(content.pieces[piece[0]])), pieces * 2))
        staging.finish()
        staging.commit()
    assert on_disk(tree(folder)) == expected(content)
    assert folder.verify() == []


def test_a_mode_is_changed_where_the_file_is(store: Store) -> None:
    folder = store.workspace("w")
    sync(folder, Content({b"f": b"x" * 1000}))
    folder.follow()
    staging, _ = sync(folder, Content({b"f": file(b"x" * 1000, 0o755)}))
    assert staging.files == 0 and os.stat(f"{tree(folder)}/f").st_mode & 0o777 == 0o755
