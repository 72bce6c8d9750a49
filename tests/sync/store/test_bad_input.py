"""What cannot be stored is refused with its path and what to do; the old tree stays, and nothing is left staged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sync.store.trees import Content, expected, file, missing, on_disk, roll_back, sync
from workspace_sync.model.errors import StoreError, TamperedError, WorkspaceBusyError
from workspace_sync.store.records import SlotRecord, read_record, write_record
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WorkspaceFolder]:
    with Store(str(tmp_path / "store")) as store:
        yield store.workspace("w")


def tree(folder: WorkspaceFolder) -> str:
    return f"{folder.path}/current/tree"


def names(root: str) -> set[str]:
    return {os.path.join(at, name) for at, folders, files in os.walk(root) for name in [*folders, *files]}


OLD = Content({b"a": b"old", b"dir/b": b"b" * 100})


def test_a_full_disk(limited_disk: Callable[[int], Path]) -> None:
    with Store(str(limited_disk(4 << 20) / "store")) as store:
        folder = store.workspace("w")
        sync(folder, OLD)
        folder.follow()
        before = names(folder.path)
        large = Content({b"a": b"new", b"large": os.urandom(8 << 20)})
        with folder.lock("the test", 5), pytest.raises(StoreError, match=r"No space left .*8388611 bytes"):
            folder.stage({"tree": large.manifest})
        # Something else fills the disk while it is staged.
        content = Content({b"a": b"new", **{b"f%d" % n: os.urandom(100_000) for n in range(20)}})
        with folder.lock("the test", 5):
            staging = folder.stage({"tree": content.manifest})
            filler = Path(store.path).parent / "filler"
            with pytest.raises(StoreError, match=r"slots/tree-2/f\d+: .*the disk is full: free some space") as caught:
                for n, (digest, data) in enumerate(content.pieces.items()):
                    staging.put(digest, memoryview(data))
                    if n == 3:
                        filler.write_bytes(bytes(store.facts().free - 150_000))
            assert isinstance(caught.value.__cause__, OSError)
            staging.abort()
        assert on_disk(tree(folder)) == expected(OLD)
        left = {path for path in names(folder.path) - before if "/manifests/" not in path and "/slots/" not in path}
        made = {path for path in names(folder.path) if "/slots/" in path and os.path.basename(path).startswith("f")}
        assert left == set() and not made
        filler.unlink()
        sync(folder, content)
        assert on_disk(tree(folder)) == expected(content) and folder.verify() == []


def test_a_first_sync_that_fails_leaves_nothing(limited_disk: Callable[[int], Path]) -> None:
    with Store(str(limited_disk(2 << 20) / "store")) as store:
        folder = store.workspace("w")
        content = Content({b"dir/%d/f" % n: os.urandom(100_000) for n in range(15)})
        filler = Path(store.path).parent / "filler"
        with folder.lock("the test", 5):
            staging = folder.stage({"tree": content.manifest})
            filler.write_bytes(bytes(1 << 20))
            with pytest.raises(StoreError, match="disk is full"):
                for digest, data in content.pieces.items():
                    staging.put(digest, memoryview(data))
            staging.abort()
        assert os.listdir(f"{folder.path}/slots") == [] and os.listdir(f"{folder.path}/manifests") == []
        assert folder.state().generation == 0


def test_a_read_only_file_system(limited_disk: Callable[[int], Path]) -> None:
    disk = limited_disk(4 << 20)
    with Store(str(disk / "store")) as store:
        folder = store.workspace("w")
        sync(folder, OLD)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StoreError, match=r"w/w/.*read-only"), folder.lock("the test", 5):
            folder.stage({"tree": Content({b"a": b"new"}).manifest})
        assert on_disk(tree(folder)) == expected(OLD)
    with pytest.raises(StoreError, match=r"other.*read-only.*MONARCH_KERNEL_SYNC_FOLDER"):
        Store(str(disk / "other"))


def test_a_name_that_is_too_long(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    before = names(folder.path)
    with folder.lock("the test", 5), pytest.raises(StoreError, match=r"w/w/slots/.*/dir/xxx.*300 bytes.*takes 255"):
        folder.stage({"tree": Content({b"a": b"new", b"dir/" + b"x" * 300: b"x"}).manifest})
    assert on_disk(tree(folder)) == expected(OLD)
    assert {path for path in names(folder.path) - before if "/lock" not in path} == set()


def test_a_tree_deeper_than_any_path(folder: WorkspaceFolder) -> None:
    path = b"/".join(b"%03d" % n + b"d" * 60 for n in range(100))  # 6,400 bytes
    for n in range(3):
        content = Content({path + b"/f": b"%d" % n, path[:3000].rpartition(b"/")[0] + b"/half": b"%d" % n})
        sync(folder, content)
        folder.follow()
        assert on_disk(tree(folder)) == expected(content)
        assert folder.verify() == []
    sync(folder, Content({b"flat": b""}))
    assert on_disk(tree(folder)) == expected(Content({b"flat": b""}))


def test_names_that_are_one_name_here(case_insensitive_disk: Path) -> None:
    with Store(str(case_insensitive_disk / "store")) as store:
        assert store.facts().case_insensitive
        folder = store.workspace("w")
        sync(folder, OLD)
        with (
            folder.lock("the test", 5),
            pytest.raises(StoreError, match=r"slots/tree-2/dir: 'Name' and 'name' are one"),
        ):
            folder.stage({"tree": Content({b"dir/Name": b"1", b"dir/name": b"2"}).manifest})
        assert on_disk(tree(folder)) == expected(OLD)


def test_names_that_leave_the_tree(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    for name in (b"..", b".", b"../x", b""):
        content = Content({b"x": b"x"})
        root = content.manifest.folders[b""]
        root.files[name] = root.files.pop(b"x")
        root.digest = b"1" * 32
        with folder.lock("the test", 5), pytest.raises(StoreError):
            folder.stage({"tree": content.manifest})
    assert on_disk(tree(folder)) == expected(OLD)


def test_a_folder_of_another_user(user: Callable[..., str], shared: Path) -> None:
    user("Store(sys.argv[1]).close()")
    with pytest.raises(StoreError, match=r"/home belongs to .* uid .*MONARCH_KERNEL_SYNC_FOLDER"):
        Store(str(shared / "home" / "store"))
    (shared / "mine").mkdir(mode=0o777)
    (shared / "mine").chmod(0o777)
    with pytest.raises(StoreError, match="mine"):
        Store(str(shared / "mine" / "store"))


def test_folders_without_the_right_to_write(user: Callable[..., str]) -> None:
    said = user(
        """
        with Store(sys.argv[1]) as store:
            folder = store.workspace("w")
            for n in range(3):
                content = Content({b"dir/": 0o555, b"dir/f": b"%d" % n, b"dir/sub/": 0o500, b"dir/sub/g%d" % n: b"g"})
                sync(folder, content)
                folder.follow()
                assert on_disk(f"{folder.path}/current/tree") == expected(content)
                assert folder.verify() == []
            sync(folder, Content({b"x": b"x"}))
            sync(folder, Content({b"x": b"y"}))
            assert on_disk(f"{folder.path}/current/tree") == expected(Content({b"x": b"y"}))
            print("done")
        """
    )
    assert said == "done\n"


def test_a_piece_that_is_not_what_it_should_be(folder: WorkspaceFolder) -> None:
    content = Content({b"a": b"content"})
    with folder.lock("the test", 5):
        staging = folder.stage({"tree": content.manifest})
        [(digest, _)] = staging.missing
        with pytest.raises(TamperedError, match=digest.hex()[:12]):
            staging.put(digest, memoryview(b"contenT"))
        with pytest.raises(StoreError, match="1 pieces have not arrived, among them one of a: sync again"):
            staging.finish()
        with pytest.raises(StoreError, match="finish it first"):
            staging.commit()
        staging.put(digest, memoryview(b"content"))
        staging.finish()
        staging.commit()
    assert on_disk(tree(folder)) == expected(content)


def test_two_clients_of_one_workspace(folder: WorkspaceFolder, tmp_path: Path) -> None:
    with Store(str(tmp_path / "store")) as other, folder.lock("ann@laptop, process 7", 1):
        busy = pytest.raises(WorkspaceBusyError, match=r"w/w is being synced by ann@laptop, process 7")
        with busy, other.workspace("w").lock("bob", 0.05):
            raise AssertionError("two have the lock")
        sync_elsewhere = other.workspace("another")
        sync(sync_elsewhere, OLD)
    with folder.lock("bob", 0):
        pass


@pytest.mark.parametrize("damage", ["cut off", "changed", "no MessagePack", "empty"])
@pytest.mark.parametrize("which", ["generations/2.state", "slots/tree-2.state", "slots/tree-1.state", "manifests"])
def test_a_damaged_record_is_named_and_repaired(folder: WorkspaceFolder, which: str, damage: str) -> None:
    sync(folder, OLD)
    new = Content({b"a": b"new", b"dir/b": b"b" * 100})
    sync(folder, new)
    (Path(tree(folder)) / "rank.log").write_text("log")
    path = Path(folder.path) / which
    if path.is_dir():
        [path] = path.glob(f"{new.manifest.digest.hex()}*")
    data = path.read_bytes()
    if damage == "no MessagePack":
        from workspace_sync.model.manifest import digest_of

        head = len(b"monarch sync 0001\n")
        path.write_bytes(data[:head] + digest_of(b"\xc1\xc1") + b"\xc1\xc1")
    else:
        path.write_bytes({"cut off": data[:-3], "changed": data[:-1] + b"?", "empty": b""}[damage])
    with Store(os.path.dirname(os.path.dirname(folder.path))) as store:
        again = store.workspace("w")
        assert on_disk(tree(again)).keys() == {*expected(new), b"rank.log"}
        spare = which == "slots/tree-1.state"
        problem = again.state().repair or "".join(str(each) for each in again.verify())
        assert spare or str(path) in problem
        sync(again, new)
        assert again.verify() == [] and not again.state().repair
        third = Content({b"a": b"third"})
        sync(again, third)
        again.follow()
        assert again.verify() == [] and on_disk(tree(again)).keys() == {b"a", b"rank.log"}
        assert not os.listdir(f"{again.path}/kept")


@pytest.mark.parametrize("which", ["store.state", "w/w/generations/1.state", "w/w/slots/tree-1.state"])
def test_a_store_of_a_newer_version(folder: WorkspaceFolder, which: str) -> None:
    sync(folder, OLD)
    root = Path(folder.path).parent.parent
    path = root / which
    path.write_bytes(path.read_bytes().replace(b"monarch sync 0001", b"monarch sync 0002"))
    newer = pytest.raises(StoreError, match=rf"{which} was written by a newer version .*update this host")
    with newer, Store(str(root)) as store:
        store.workspace("w").state()
    assert on_disk(tree(folder)) == expected(OLD)


def test_after_a_reboot_trees_are_verified_before_they_are_used(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    new = Content({b"a": b"new", b"dir/b": b"b" * 100, b"c": b"cc"})
    sync(folder, new)

    def reboot() -> None:
        for slot in folder.slots.names():
            record = folder.slots.record(slot)
            assert record is not None
            record.boot = "another boot"
            write_record(folder.slots._folder, f"{slot}.state", record)

    reboot()
    assert "before this machine started" in folder.state().repair
    _, same = sync(folder, new)
    assert same.number == 2 and not folder.state().repair
    reboot()
    Path(tree(folder), "c").write_bytes(b"")  # what had not reached the disk
    Path(folder.slots.path("tree-1"), "dir/b").write_bytes(b"")
    assert [size for _, size in missing(folder, new)] == [2]
    sync(folder, new)
    assert on_disk(tree(folder)) == expected(new) and folder.verify() == []
    assert read_record(folder.slots._folder, f"{folder.slots.names()[0]}.state", SlotRecord).boot == folder.slots.boot


def test_what_a_rollback_needs_and_is_gone(folder: WorkspaceFolder) -> None:
    for n in range(3):
        sync(folder, Content({b"f": b"content %d" % n}))
        folder.follow()
    shutil.rmtree(f"{folder.path}/../../objects")
    os.mkdir(f"{folder.path}/../../objects", 0o700)
    with Store(os.path.dirname(os.path.dirname(folder.path))) as store:
        with pytest.raises(StoreError, match=r"1 pieces \(9 bytes\) of generation 2 are not on this host any more"):
            roll_back(store.workspace("w"))
        with pytest.raises(
            StoreError, match=r"no generation to go back to \(7 before the current one\); it keeps 3, 2, 1"
        ):
            roll_back(store.workspace("w"), 7)
        assert on_disk(tree(folder)) == expected(Content({b"f": b"content 2"}))


def test_only_the_holder_of_the_lock_changes_anything(folder: WorkspaceFolder) -> None:
    with pytest.raises(StoreError, match="only by a process that holds its lock"):
        folder.stage({"tree": OLD.manifest})
    with pytest.raises(StoreError, match="only by a process that holds its lock"):
        folder.rollback()


def test_a_rewriter_that_is_missing(folder: WorkspaceFolder) -> None:
    from workspace_sync.model.manifest import Rewrite

    content = Content({b"bin/x": file(b"#!/old/bin/python", rewrite=Rewrite("text", b"/old"))})
    with folder.lock("the test", 5):
        staging = folder.stage({"env": content.manifest})
        [(digest, _)] = staging.missing
        with pytest.raises(StoreError, match=r"bin/x names the prefix"):
            staging.put(digest, memoryview(content.pieces[digest]))
        staging.abort()
