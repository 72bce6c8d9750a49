"""After a switch the older slot follows, and what nothing needs goes; what something needs stays, whoever needs it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sync.store.trees import Content, expected, file, missing, on_disk, roll_back, sync
from tests.waiting import patience
from workspace_sync.model.manifest import FileEntry, Rewrite
from workspace_sync.store import store as store_module
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "store")) as made:
        yield made


@pytest.fixture
def old_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects count as old at once."""
    monkeypatch.setattr(store_module, "_GRACE", -1.0)


def tree(folder: WorkspaceFolder, part: str = "tree") -> str:
    return f"{folder.path}/current/{part}"


def objects(store: Store) -> int:
    return sum(about.st_size for _, about in store.objects.all())


def noise(seed: int, size: int = 1000) -> bytes:
    return random.Random(seed).randbytes(size)


def test_both_slots_hold_the_current_tree(store: Store) -> None:
    folder = store.workspace("w")
    for n in range(4):
        content = Content({b"f%d" % k: noise(100 * n + k) for k in range(30)} | {b"dir%d/" % n: 0o755})
        sync(folder, content)
        folder.follow()
        assert [on_disk(folder.slots.path(slot)) for slot in folder.slots.names()] == [expected(content)] * 2


def test_it_stops_when_it_is_told_to_and_goes_on_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workspace_sync.store.slot_change._ASKED", -1.0)  # it asks between all files
    folder = store.workspace("w")
    content = Content({b"d%d/f%d" % (k % 3, k): noise(k) for k in range(100)})
    sync(folder, content)
    for limit in (1, 5, 40, 60):
        asked = 0

        def stopped(limit: int = limit) -> bool:
            nonlocal asked
            asked += 1
            return asked > limit

        folder.follow(stopped)
        assert folder.verify() == []
    sync(folder, Content({b"d%d/f%d" % (k % 3, k): noise(k) for k in range(100)} | {b"d0/f0": b"new"}))
    assert folder.verify() == []
    folder.follow()
    assert on_disk(folder.slots.path("tree-1")) == on_disk(folder.slots.path("tree-2"))


def test_it_does_nothing_while_a_sync_is_under_way(store: Store, tmp_path: Path) -> None:
    folder = store.workspace("w")
    sync(folder, Content({b"a": b"1"}))
    with Store(str(tmp_path / "store")) as other, folder.lock("the test", 1):
        other.workspace("w").follow()
        assert folder.slots.names() == ["tree-1"]


def test_objects_that_nothing_needs_go_the_oldest_first(store: Store, old_objects: None) -> None:
    folder = store.workspace("w")
    for n in range(12):
        sync(folder, Content({b"f": noise(n)}))
        folder.follow()
    # Six generations are kept: the objects of the other six are what may go.
    assert objects(store) == 11_000 and len(folder.state().generations) == 6
    dates = {digest: about.st_ctime_ns for digest, about in store.objects.all()}
    assert store.collect(limit=9_500) == 0 and objects(store) == 9_000
    left = store.objects.names()
    assert max(dates[digest] for digest in dates.keys() - left) < min(dates[digest] for digest in left)
    assert store.collect(limit=0) == 5_000, "what generations need stays"
    for n in reversed(range(6, 11)):
        roll_back(folder)
        assert on_disk(tree(folder)) == expected(Content({b"f": noise(n)}))


def test_what_another_workspace_needs_stays(store: Store, old_objects: None) -> None:
    one, other = store.workspace("one"), store.workspace("other")
    for folder in (one, other):
        sync(folder, Content({b"f": noise(1)}))
        sync(folder, Content({b"f": noise(2)}))
    for n in range(3, 12):
        sync(one, Content({b"f": noise(n)}))
        one.follow()
    store.collect(limit=0)
    roll_back(other)
    assert on_disk(tree(other)) == expected(Content({b"f": noise(1)}))


def test_pieces_that_a_rollback_needs_stay(store: Store, old_objects: None) -> None:
    folder = store.workspace("w")
    data = noise(1, 100_000)
    contents = [Content({b"f": b"%05d" % n + data}, 4096) for n in range(5)]
    for content in contents:
        sync(folder, content)
        folder.follow()
        store.collect(limit=0)
    for content in reversed(contents[:-1]):
        roll_back(folder)
        assert on_disk(tree(folder)) == expected(content)


def test_generations_go_if_they_take_too_much(store: Store, old_objects: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_KEEP", "2500")
    folder = store.workspace("w")
    for n in range(6):
        sync(folder, Content({b"f": noise(n)}))
        folder.follow()
        assert objects(store) <= 2500
    assert [each.number for each in folder.state().generations] == [6, 5, 4]
    assert len(os.listdir(f"{folder.path}/manifests")) == 3


def test_manifests_are_noted_as_differences_until_it_has_followed(store: Store, tmp_path: Path) -> None:
    folder = store.workspace("w")
    files = {b"d%d/f%d" % (k % 20, k): noise(k, 50) for k in range(400)}
    for n in range(12):  # longer than a chain may be
        files[b"d3/f3"] = b"%d" % n
        sync(folder, Content(files))
    sizes = [path.stat().st_size for path in Path(folder.path, "manifests").iterdir()]
    assert len([size for size in sizes if size < 5000]) >= 9
    with Store(str(tmp_path / "store")) as again:
        assert not again.workspace("w").state().repair and again.workspace("w").verify() == []
        roll_back(again.workspace("w"), 3)
        assert Path(tree(folder), "d3/f3").read_bytes() == b"8"
        again.workspace("w").follow()
    assert all(len(name) == 64 for name in os.listdir(f"{folder.path}/manifests"))


PREFIX = Rewrite("text", b"/client/env")


def rewriter(entry: FileEntry, data: bytes, *, path: bytes, read: object) -> bytes:
    return data.replace(b"/client/env", b"/a/much/longer/path/on/the/host")


def test_rewritten_files_keep_both_digests(store: Store) -> None:
    folder = store.workspace("w")

    def environment(n: int) -> Content:
        large = b"".join(b"%d /client/env/x\n" % k for k in range(n, 4000 + n))
        return Content(
            {
                b"bin/tool": file(b"#!/client/env/bin/python %d\n" % n, 0o755, rewrite=PREFIX),
                b"same": file(b"/client/env", rewrite=PREFIX),
                b"large": file(large, rewrite=PREFIX),
                b"plain": b"%d" % n,
            },
            4096,
        )

    def seen(content: Content) -> dict[bytes, bytes]:
        return {
            path: rewriter(entry, b"".join(content.pieces[d] for d, _, _ in entry.pieces()), path=path, read=None)
            if entry.rewrite
            else b"".join(content.pieces[d] for d, _, _ in entry.pieces())
            for path, entry in content.manifest.files()
        }

    def found() -> dict[bytes, bytes]:
        return {path: value[0] for path, value in on_disk(tree(folder, "env")).items() if isinstance(value, tuple)}

    contents = [environment(n) for n in range(4)]
    for content in contents:
        _, generation = sync(folder, content, "env", rewriter=rewriter)
        assert generation.digests == {"env": content.manifest.digest}, "the digest is the client's"
        assert found() == seen(content)
        assert folder.verify() == []
        folder.follow()
        assert on_disk(folder.slots.path("env-1")) == on_disk(folder.slots.path("env-2"))
    with Store(store.path) as again:  # nothing of it is only in memory
        for content in reversed(contents[:-1]):
            roll_back(again.workspace("w"))
            assert found() == seen(content)
            assert again.workspace("w").verify() == []
    Path(tree(folder, "env"), "bin/tool").chmod(0o755)
    Path(tree(folder, "env"), "bin/tool").write_bytes(b"#!/client/env/bin/python 0\n")  # as it is at the client
    [problem] = folder.verify()
    assert problem.path.endswith("/bin/tool")
    assert folder.verify(repair=True) and folder.verify() == [] and found() == seen(contents[0])


def test_a_tree_and_an_environment_are_switched_apart_and_together(store: Store) -> None:
    folder = store.workspace("w")
    one, two, env = Content({b"f": b"1"}), Content({b"f": b"2"}), Content({b"e": b"1"})
    sync(folder, one)
    sync(folder, env, "env")
    _, generation = sync(folder, two)
    assert generation.digests == {"tree": two.manifest.digest, "env": env.manifest.digest}
    assert on_disk(tree(folder, "env")) == expected(env) and on_disk(tree(folder)) == expected(two)
    roll_back(folder)
    assert folder.state().digests == {"tree": one.manifest.digest, "env": env.manifest.digest}


SYNCS = """
import sys
from tests.sync.store.trees import Content, sync, on_disk, expected
from workspace_sync.store import Store
root, name, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Store(root) as store:
    folder = store.workspace(name)
    for n in range(turns):
        shared = {b"shared/%d" % k: b"content %d " % ((k + n) % 40) * 50 for k in range(40)}
        content = Content({**shared, b"n": b"%d" % n})
        sync(folder, content)
        assert on_disk(f"{folder.path}/current/tree") == expected(content)
        folder.follow()
        store.collect(limit=0)
    assert folder.verify() == []
"""


def test_several_processes_use_one_store(tmp_path: Path) -> None:
    """Two workspaces, whose content moves through the same objects, and two clients of one of them."""
    command = [sys.executable, "-c", SYNCS, str(tmp_path / "store")]
    runs = [subprocess.Popen([*command, name, "12"]) for name in ("one", "other")]
    assert [run.wait(timeout=patience(100)) for run in runs] == [0, 0]
    with Store(str(tmp_path / "store")) as store:
        assert store.workspaces() == ["one", "other"]
        assert missing(store.workspace("one"), Content({b"n": b"11"})) == []
        assert not list(Path(store.path, "objects", "new").glob("*"))
