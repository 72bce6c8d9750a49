"""What a store makes of a damaged link ``current``, of what killed syncs have left, and of processes that wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sync.store.trees import Content, expected, on_disk, roll_back, sync
from tests.waiting import patience
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder

OLD, NEW = Content({b"a": b"old", b"dir/b": b"b" * 100}), Content({b"a": b"new", b"dir/b": b"b" * 100})
ENV = Content({b"bin/python": b"#!"})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WorkspaceFolder]:
    with Store(str(tmp_path / "store")) as store:
        yield store.workspace("w")


def seen(folder: WorkspaceFolder, part: str = "tree") -> object:
    """What ranks see."""
    return on_disk(f"{folder.path}/current/{part}")


# -- the link ---------------------------------------------------------------------------------------------


def unlink(folder: WorkspaceFolder) -> None:
    os.unlink(f"{folder.path}/current")


def lead_elsewhere(folder: WorkspaceFolder) -> None:
    unlink(folder)
    os.symlink("/etc", f"{folder.path}/current")


def lead_nowhere(folder: WorkspaceFolder) -> None:
    unlink(folder)
    os.symlink("generations/77", f"{folder.path}/current")


def lose_the_links(folder: WorkspaceFolder) -> None:
    generation = Path(folder.path, "generations", "3")
    for link in generation.iterdir():
        link.unlink()
    generation.rmdir()


def lead_to_another_slot(folder: WorkspaceFolder) -> None:
    link = Path(folder.path, "generations", "3", "tree")
    other = "tree-1" if os.readlink(link).endswith("tree-2") else "tree-2"
    link.unlink()
    link.symlink_to(f"../../slots/{other}")


def lose_the_record(folder: WorkspaceFolder) -> None:
    Path(folder.path, "generations", "3.state").unlink()


DAMAGES = [unlink, lead_elsewhere, lead_nowhere, lose_the_links, lead_to_another_slot, lose_the_record]


@pytest.mark.parametrize("repair", ["sync", "verify", "another tree", "rollback"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_link_is_set_again(
    folder: WorkspaceFolder, damage: Callable[[WorkspaceFolder], None], repair: str
) -> None:
    sync(folder, OLD)
    sync(folder, ENV, "env")
    sync(folder, NEW)
    Path(folder.path, "current/tree/rank.log").write_text("log")
    damage(folder)
    assert (
        "current" in folder.state().repair
        or "generations/3" in folder.state().repair
        or "record" in (folder.state().repair)
    )
    if repair == "verify":
        [problem] = folder.verify()
        assert "again" in str(problem)
        wanted = NEW
    elif repair == "rollback":
        roll_back(folder)
        wanted = OLD
    else:
        wanted = NEW if repair == "sync" else Content({b"c": b"third"})
        staging, _ = sync(folder, wanted)
        assert "again" in staging.notes[0]
        assert staging.files == (0 if repair == "sync" else 1), "what is here is not sent again"
    assert seen(folder) == expected(wanted) | {b"rank.log": (b"log", 0o644)}
    assert seen(folder, "env") == expected(ENV)
    assert not folder.state().repair and folder.verify() == []


@pytest.mark.parametrize("damage", [unlink, lead_nowhere])
def test_without_a_whole_tree_a_new_one_is_made(
    folder: WorkspaceFolder, damage: Callable[[WorkspaceFolder], None]
) -> None:
    sync(folder, OLD)
    sync(folder, NEW)
    damage(folder)
    for slot in folder.slots.names():
        Path(folder.slots.path(slot) + ".state").unlink()
    assert "none of the trees" in str(folder.verify()[0])
    assert folder.state().repair
    staging, _ = sync(folder, NEW)
    assert "makes a new one" in staging.notes[0]
    assert seen(folder) == expected(NEW) and not folder.state().repair and folder.verify() == []


def test_a_slot_that_is_gone_is_made_again(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    sync(folder, ENV, "env")
    sync(folder, NEW)
    slot = Path(os.path.realpath(f"{folder.path}/current/tree"))
    slot.rename(slot.parent.parent / "elsewhere")
    assert "is missing" in folder.state().repair
    sync(folder, NEW)
    assert seen(folder) == expected(NEW) and seen(folder, "env") == expected(ENV)
    assert not folder.state().repair and folder.verify() == []


# -- what killed processes leave -----------------------------------------------------------------------------

HALF = """
import os, sys
from tests.sync.store.trees import Content
from workspace_sync.store import Store
content = Content({b"a": b"one", b"dir/b": b"two", b"dir/c": b"three"})
folder = Store(sys.argv[1]).workspace("w")
with folder.lock("one that is killed", 5):
    staging = folder.stage({"tree": content.manifest})
    for digest, _ in staging.missing[:2]:
        staging.put(digest, memoryview(content.pieces[digest]))
    os._exit(0)
"""


def left_half(folder: WorkspaceFolder) -> Content:
    """Leave what a sync leaves that is killed after two of three files."""
    store = str(Path(folder.path).parents[1])
    subprocess.run([sys.executable, "-c", HALF, store], check=True, timeout=patience(60))
    return Content({b"a": b"one", b"dir/b": b"two", b"dir/c": b"three"})


def test_what_a_killed_sync_has_left_is_told_and_used_again(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    content = left_half(folder)
    assert "tree-2 half made: the next one uses or removes it" in folder.state().left
    assert folder.verify() == [] and seen(folder) == expected(OLD)
    with folder.lock("another", 5):
        assert not folder.state().left, "a staging that is under way is none that was left"
    staging, _ = sync(folder, content)
    [note] = staging.notes
    assert note.endswith("tree-2 half made: 2 of the 2 whole files in it are used again, and the rest was removed")
    assert staging.files == 1
    assert not folder.state().left and seen(folder) == expected(content)


def test_what_a_killed_sync_has_left_is_removed_if_it_is_of_no_use(folder: WorkspaceFolder) -> None:
    sync(folder, OLD)
    left_half(folder)
    staging, generation = sync(folder, OLD)
    assert generation.number == 1
    [note] = staging.notes
    assert note.endswith("tree-2 half made: it was removed")
    assert folder.slots.names() == ["tree-1"] and not folder.state().left


WRITES = """
import os, sys, time
from workspace_sync.store import Store
store = Store(sys.argv[1])
fd, name = store.objects._begin()
os.write(fd, b"half")
print(name, flush=True)
sys.stdin.read()
"""


def test_half_written_objects_go_when_nobody_can_be_writing_them(folder: WorkspaceFolder) -> None:
    store = Path(folder.path).parents[1]
    command = [sys.executable, "-c", WRITES, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        staging, _ = sync(folder, OLD)
        assert staging.notes == [] and (store / "objects" / name).read_bytes() == b"half"
        writer.kill()
    staging, _ = sync(folder, NEW)
    assert "1 half-written pieces" in staging.notes[0]
    assert not list((store / "objects" / "new").iterdir())


# -- several processes ------------------------------------------------------------------------------------------


def test_who_tidies_up_gives_way(folder: WorkspaceFolder) -> None:
    """The older tree follows on a thread of low priority, which must not keep the next sync from beginning."""
    sync(folder, OLD)
    begun, asked = threading.Event(), [0]

    def stopped() -> bool:
        begun.set()
        asked[0] += 1
        while not folder._lock.is_awaited():  # it would go on for ever
            pass
        return False

    follower = threading.Thread(target=folder.follow, args=(stopped,))
    follower.start()
    begun.wait()
    with Store(str(Path(folder.path).parents[1])) as other:
        sync(other.workspace("w"), NEW)
    follower.join()
    assert asked[0] == 1, "it stops at once"
    folder.follow()
    assert [on_disk(folder.slots.path(slot)) for slot in folder.slots.names()] == [expected(NEW)] * 2


OPENS = """
import sys
from workspace_sync.store import Store
sys.stdin.readline()
with Store(sys.argv[1]) as store:
    print(store.identity(), store.workspace("w").state().generation)
"""


def test_a_store_that_is_new_can_be_opened_by_several_at_once(tmp_path: Path) -> None:
    """As by the agents of hosts that have their home folder in common."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPENS, str(tmp_path / f"store{n // 4}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(8)
    ]
    said = [process.communicate("go\n", timeout=patience(60)) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, said
    assert len({out for out, _ in said}) == 2
    assert sorted(os.listdir(tmp_path / "store0")) == ["identity", "objects", "store.state", "w"]
