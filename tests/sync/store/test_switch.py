"""Trees are made beside the current one and switched to at once; what a host has is not sent again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.sync.store.trees import Content, Link, expected, file, on_disk, sync
from workspace_sync.model.errors import StoreError
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "store")) as made:
        yield made


@pytest.fixture
def folder(store: Store) -> WorkspaceFolder:
    return store.workspace("w-1")


def tree(folder: WorkspaceFolder, part: str = "tree") -> str:
    return f"{folder.path}/current/{part}"


FIRST = {
    b"a.py": b"a = 1\n",
    b"empty": b"",
    b"run.sh": file(b"#!/bin/sh\n", 0o755),
    b"pkg/b.py": b"b = 1\n",
    b"pkg/deep/er/c.py": b"c = 1\n",
    b"hollow/": 0o700,
    b"link": Link(b"pkg/b.py"),
    b"out": Link(b"/etc"),
    b"odd \xff\n\t\xe2\x82\xac": b"odd\n",
    b"large": os.urandom(5000),
}


def test_a_first_sync_makes_the_whole_tree(folder: WorkspaceFolder) -> None:
    content = Content(FIRST, chunk=1000)
    staging, generation = sync(folder, content)
    assert on_disk(tree(folder)) == expected(content)
    assert generation.number == 1 and generation.digests == {"tree": content.manifest.digest}
    assert staging.reused == 0 and staging.files == 7
    assert os.stat(f"{tree(folder)}/a.py").st_mtime_ns == 1_700_000_000_123_456_789
    assert folder.state().digests == {"tree": content.manifest.digest} and not folder.state().repair


def test_changes_of_all_kinds(folder: WorkspaceFolder) -> None:
    sync(folder, Content(FIRST, chunk=1000))
    second = dict(FIRST)
    del second[b"a.py"], second[b"pkg/deep/er/c.py"], second[b"link"]
    second |= {
        b"a.py/now/a/folder": b"x",  # a file that becomes a folder
        b"pkg/deep": b"now a file",  # a folder that becomes a file
        b"link": b"now a file",
        b"out": Link(b"elsewhere"),
        b"run.sh": file(b"#!/bin/sh\n", 0o700),
        b"hollow/": 0o555,
        b"large": FIRST[b"large"][:2000] + b"new" * 300 + FIRST[b"large"][2900:],  # type: ignore[operator]
    }
    content = Content(second, chunk=1000)
    for _ in range(2):  # each slot once
        for each in (content, Content(FIRST, chunk=1000)):
            sync(folder, each)
            assert on_disk(tree(folder)) == expected(each)
            assert folder.verify() == []


def test_only_what_is_missing_is_asked_for(folder: WorkspaceFolder) -> None:
    sync(folder, Content(FIRST, chunk=1000))
    second = dict(FIRST)
    second[b"moved/large"] = second.pop(b"large")
    second[b"pkg/again.py"] = FIRST[b"a.py"]
    second[b"new.py"] = b"new = 1\n"
    content = Content(second, chunk=1000)
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        assert [content.pieces[digest] for digest, _ in staging.missing] == [b"new = 1\n"]
        staging.abort()


def test_a_rollback_needs_nobody(folder: WorkspaceFolder) -> None:
    contents = [Content({b"f": b"%d" % n, b"same": b"same", b"dir%d/x" % n: b"x" * n}) for n in range(4)]
    for content in contents:
        sync(folder, content)
        folder.follow()
    for content in reversed(contents[:-1]):
        with folder.lock("the test", 5):
            staging = folder.rollback()
            staging.finish()
            staging.commit()
        assert on_disk(tree(folder)) == expected(content)


def test_nothing_changes_nothing(folder: WorkspaceFolder) -> None:
    content = Content(FIRST)
    _, first = sync(folder, content)
    staging, again = sync(folder, content)
    assert again.number == first.number and staging.files == 0


def test_a_step_back_skips_generations_with_the_same_trees(folder: WorkspaceFolder) -> None:
    first, second = Content({b"a.py": b"a = 1\n"}), Content({b"a.py": b"a = 2\n"})
    sync(folder, first)
    sync(folder, second)
    with open(f"{tree(folder)}/a.py", "wb") as file_of_tree:
        file_of_tree.write(b"broken")
    assert folder.verify()
    _, repaired = sync(folder, second)
    assert repaired.number == 3 and repaired.digests == {"tree": second.manifest.digest}
    with folder.lock("the test", 5):
        staging = folder.rollback()
        staging.finish()
        staging.commit()
    assert on_disk(tree(folder)) == expected(first)
    with folder.lock("the test", 5), pytest.raises(StoreError, match="no generation to go back to"):
        folder.rollback()


def test_threads_have_one_object_of_a_workspace(tmp_path: Path) -> None:
    """Each knows only of the locks that are held through it."""
    with Store(str(tmp_path / "store")) as store, ThreadPoolExecutor(8) as pool:
        for number in range(20):
            together = Barrier(8)

            def opened(name: str, together: Barrier = together) -> int:
                together.wait(60)
                return id(store.workspace(name))

            assert len(set(pool.map(opened, [f"{number:016x}"] * 8))) == 1
