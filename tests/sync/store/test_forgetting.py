"""A workspace goes from a host with all that it has there; what ranks have made stays until somebody asks otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import workspace_sync.store.store as store_module
from tests.sync.store.trees import Content, Link, expected, on_disk, sync
from tests.waiting import patience
from workspace_sync.model.errors import TamperedError, WorkspaceBusyError
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder

CONTENT = Content(
    {b"a.py": b"a = 1\n", b"dir/b": b"b" * 100, b"hollow/": 0o500, b"out": Link(b"/etc"), b"dir/link": Link(b"../a.py")}
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "store")) as made:
        yield made


def forget(folder: WorkspaceFolder, *, kept: bool = False) -> None:
    with folder.lock("the test", 5):
        folder.forget(kept=kept)


def files(store: Store) -> dict[str, str]:
    """What is left below the workspaces."""
    return {path.name: path.read_text() for path in Path(store.path, "w").rglob("*") if path.is_file()}


def with_files_of_ranks(store: Store) -> WorkspaceFolder:
    """A workspace with trees, an environment, and files of ranks: one in the tree, one that was in the way of it."""
    folder = store.workspace("w")
    sync(folder, Content({b"a.py": b"a = 0\n"}))
    sync(folder, CONTENT)
    sync(folder, Content({b"bin/python": b"#!"}), "env")
    folder.follow()
    tree = Path(folder.path, "current", "tree")
    (tree / "logs" / "deep").mkdir(parents=True)
    (tree / "logs" / "deep" / "log").write_text("log")
    (tree / "logs" / "out").symlink_to("/etc")
    cache = tree / "__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_text("compiled")
    (tree / "dir" / "mine").write_text("mine")
    sync(folder, Content({b"a.py": b"a = 1\n", b"dir/mine": b"the client's", b"dir/b": b"b" * 100}))
    return folder


def test_all_goes_but_files_of_ranks_and_these_when_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_files_of_ranks(store)
    about = folder.footprint()
    assert (about.generations, about.kept_files, about.kept_size, about.users) == (4, 1, 4, [])
    forget(folder)
    assert files(store) == {"log": "log", "mine": "mine"}
    assert os.listdir(folder.path) == ["kept"]
    folder = store.workspace("w")  # as another client would find it
    assert folder.state().generation == 0 and not folder.state().repair
    assert len(folder.kept().files) == 3, "two files and a link"
    forget(folder, kept=True)
    assert os.listdir(f"{store.path}/w") == [] and os.path.exists("/etc/hostname")

    staging, _ = sync(store.workspace("w"), CONTENT)
    assert staging.reused >= 106, "the content is still here"
    forget(store.workspace("w"))
    monkeypatch.setattr(store_module, "_GRACE", -1.0)
    store.collect(0)
    assert not list(store.objects.all()), "nothing needs it"


def test_what_was_kept_is_removed_by_itself(store: Store) -> None:
    folder = with_files_of_ranks(store)
    before = on_disk(f"{folder.path}/current/tree")
    with folder.lock("the test", 5):
        assert folder.remove_kept() == (1, 4)
    assert on_disk(f"{folder.path}/current/tree") == before
    assert folder.verify() == [] and not folder.kept().files and not os.listdir(f"{folder.path}/kept")


def test_a_file_that_is_in_use_is_not_removed(store: Store) -> None:
    folder = with_files_of_ranks(store)
    [mine] = Path(folder.path, "kept").rglob("mine")
    with mine.open("a") as opened:
        child = subprocess.Popen(["sleep", "60"], stdin=opened)
    try:
        with folder.lock("the test", 5):
            assert folder.remove_kept() == (0, 0)
    finally:
        child.kill()
        child.wait()
    assert mine.read_text() == "mine"


def test_processes_that_use_a_tree_are_named(store: Store) -> None:
    folder = with_files_of_ranks(store)
    child = subprocess.Popen(["sleep", "60"], cwd=f"{folder.path}/current/tree/dir")
    try:
        assert folder.footprint().users == [f"process {child.pid} (sleep 60)"]
    finally:
        child.kill()
        child.wait()
    assert folder.footprint().users == []


KILLED = """
import os, sys
from workspace_sync.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder
folder = Store(sys.argv[1]).workspace("w")
after = int(sys.argv[2])
real = WorkspaceFolder._clear
def clear(self, *args):
    global after
    after -= 1
    if after < 0:
        os._exit(0)
    real(self, *args)
WorkspaceFolder._clear = clear
with folder.lock("one that is killed", 5):
    folder.forget(kept=False)
"""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_one_that_is_killed_is_ended_by_the_next(store: Store, after: int) -> None:
    folder = with_files_of_ranks(store)
    subprocess.run([sys.executable, "-c", KILLED, store.path, str(after)], check=True, timeout=patience(60))
    assert not os.path.lexists(f"{folder.path}/current")
    state = folder.state()
    assert (state.generation, state.repair, state.left) == (0, "", "")
    if after == 1:  # or the next is a sync
        sync(folder, CONTENT)
        assert on_disk(f"{folder.path}/current/tree").items() >= expected(CONTENT).items()
        assert folder.verify() == []
    forget(folder, kept=True)
    assert os.listdir(f"{store.path}/w") == []


def test_who_waits_or_comes_later_begins_anew(store: Store) -> None:
    """Another agent has the folders open that are removed."""
    folder = store.workspace("w")
    sync(folder, CONTENT)
    with Store(store.path) as other:
        old = other.workspace("w")
        assert old.state().generation == 1
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                with old.lock("one that waits", 30):
                    pass
            except WorkspaceBusyError as e:
                waiting.append(e)

        with folder.lock("the test", 5):
            thread = threading.Thread(target=wait)
            thread.start()
            while not folder._lock.is_awaited():
                time.sleep(0.001)
            folder.forget(kept=False)
        thread.join()
        assert "forgotten" in str(waiting[0])
        assert other.workspace("w") is not old
        sync(other.workspace("w"), CONTENT)
        assert on_disk(f"{folder.path}/current/tree") == expected(CONTENT)


def test_what_is_not_ours_stays(store: Store) -> None:
    folder = store.workspace("w")
    sync(folder, CONTENT)
    Path(folder.path, "notes.txt").write_text("of a person")
    Path(folder.path, "slots", "tree-x").mkdir()
    forget(folder)
    assert sorted(os.listdir(folder.path)) == ["notes.txt", "slots"] and os.listdir(f"{folder.path}/slots") == [
        "tree-x"
    ]
    sync(store.workspace("w"), CONTENT)
    os.unlink(f"{folder.path}/current")
    os.mkdir(f"{folder.path}/current")
    with pytest.raises(TamperedError, match=r"w/w/current is not a link any more: move it away"):
        forget(store.workspace("w"))
