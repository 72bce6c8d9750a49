"""What ranks make in a tree is theirs: it moves along when the tree is switched, and is never removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sync.store.trees import Content, expected, file, on_disk, roll_back, sync
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WorkspaceFolder]:
    with Store(str(tmp_path / "store")) as store:
        yield store.workspace("w")


def tree(folder: WorkspaceFolder) -> Path:
    return Path(folder.path) / "current" / "tree"


def version(n: int, **more: bytes) -> Content:
    return Content({b"pkg/m.py": b"N = %d\n" % n, **{name.encode(): data for name, data in more.items()}})


def test_they_move_along(folder: WorkspaceFolder) -> None:
    sync(folder, version(1))
    (tree(folder) / "out.log").write_text("log")
    (tree(folder) / "pkg" / "ckpt").mkdir()
    (tree(folder) / "pkg" / "ckpt" / "step1").write_text("1")
    (tree(folder) / "odd\n").symlink_to("/nowhere")
    with (tree(folder) / "out.log").open("a") as opened:  # a rank writes on, whatever is switched
        for n in range(2, 6):
            _, generation = sync(folder, version(n))
            assert sorted(generation.moved) == ["tree/odd\n", "tree/out.log", "tree/pkg/ckpt"]
            assert generation.kept == []
            opened.write(f" {n}")
            opened.flush()
            folder.follow()
    assert (tree(folder) / "out.log").read_text() == "log 2 3 4 5"
    assert (tree(folder) / "pkg" / "ckpt" / "step1").read_text() == "1"
    assert os.readlink(tree(folder) / "odd\n") == "/nowhere"
    generation = roll_back(folder)
    assert len(generation.moved) == 3 and (tree(folder) / "out.log").exists()
    assert folder.verify() == []


def test_a_file_of_the_client_wins_and_the_rank_s_is_kept(folder: WorkspaceFolder) -> None:
    sync(folder, version(1))
    (tree(folder) / "clash").write_text("of a rank")
    (tree(folder) / "sub").mkdir()
    (tree(folder) / "sub" / "deep").write_text("of a rank, too")
    _, generation = sync(folder, version(2, clash=b"of the client", sub=b"now a file"))
    assert (tree(folder) / "clash").read_text() == "of the client"
    assert len(generation.kept) == 2 and generation.moved == []
    places = [Path(line.partition(": ")[2]) for line in sorted(generation.kept)]
    assert places[0].read_text() == "of a rank" and (places[1] / "deep").read_text() == "of a rank, too"


def test_files_in_a_folder_that_the_client_has_removed_stay(folder: WorkspaceFolder) -> None:
    sync(folder, version(1, **{"runs/readme": b"r"}))
    (tree(folder) / "runs" / "1").mkdir()
    (tree(folder) / "runs" / "1" / "log").write_text("log")
    for n in range(2, 5):
        _, generation = sync(folder, version(n))
        assert (tree(folder) / "runs" / "1" / "log").read_text() == "log" and generation.kept == []
        assert not (tree(folder) / "runs" / "readme").exists()
        folder.follow()


def test_files_of_both_trees_are_merged(folder: WorkspaceFolder) -> None:
    sync(folder, version(1))
    first = Path(os.path.realpath(tree(folder)))
    (first / "logs").mkdir()
    (first / "logs" / "a").write_text("a")
    sync(folder, version(2))
    (first / "logs").mkdir()  # a rank that still works in the tree before
    (first / "logs" / "b").write_text("b")
    folder.follow()
    assert {path.name: path.read_text() for path in (tree(folder) / "logs").iterdir()} == {"a": "a", "b": "b"}


def test_a_compiled_module_never_survives_its_source(folder: WorkspaceFolder) -> None:
    """Python trusts size and time: a change that keeps both would run the old code."""

    def ran() -> str:
        code = f"import sys; sys.path.insert(0, {str(tree(folder))!r}); import m; print(m.N, m.__cached__)"
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        number, _, cached = done.stdout.strip().partition(" ")
        assert os.path.exists(cached)
        return number

    for n in (1, 2, 3, 4, 5):
        sync(folder, Content({b"m.py": file(b"N = %d\n" % n), b"other.py": b""}))
        assert ran() == str(n)
        if n > 2:
            folder.follow()
    roll_back(folder)
    assert ran() == "4"


def test_caches_stay(folder: WorkspaceFolder) -> None:
    sync(folder, version(1))
    (tree(folder) / "pkg" / "__pycache__").mkdir()
    (tree(folder) / "pkg" / "__pycache__" / "same.cpython-311.pyc").write_text("compiled")
    _, generation = sync(folder, version(2))
    assert generation.moved == [] and not (tree(folder) / "pkg" / "__pycache__").exists()
    sync(folder, version(3))
    assert (tree(folder) / "pkg" / "__pycache__" / "same.cpython-311.pyc").exists()
    sync(folder, Content({b"x": b"x"}))
    sync(folder, Content({b"x": b"y"}))  # the slot of the first tree, whose folder is gone
    assert on_disk(tree(folder)) == expected(Content({b"x": b"y"}))


def test_what_is_added_to_a_cache_of_the_client_stays(folder: WorkspaceFolder) -> None:
    """In an environment, compiled files are content; ranks compile more, of modules that may change."""
    files = {b"a.py": b"a", b"b.py": b"1", b"__pycache__/a.cpython-311.pyc": b"compiled"}
    sync(folder, Content(files))
    (tree(folder) / "__pycache__" / "b.cpython-311.pyc").write_text("compiled by a rank")
    content = Content({**files, b"b.py": b"2"})
    _, generation = sync(folder, content)
    assert generation.moved == [] and on_disk(tree(folder)) == expected(content)
    sync(folder, Content({**files, b"b.py": b"3"}))
    assert on_disk(tree(folder)) == expected(Content({**files, b"b.py": b"3"}))


def test_a_slot_in_which_a_process_works_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "linked").symlink_to("home")
    with Store(str(tmp_path / "linked" / "store")) as store:
        slot_in_use(store.workspace("w"))


def slot_in_use(folder: WorkspaceFolder) -> None:
    sync(folder, version(1))
    working = os.path.realpath(tree(folder) / "pkg")
    before = on_disk(os.path.dirname(working))
    with subprocess.Popen(["cat"], cwd=working, stdin=subprocess.PIPE) as process:
        for n in range(2, 6):
            sync(folder, version(n))
            folder.follow()
            assert on_disk(os.path.dirname(working)) == before
        assert len(folder.slots.names()) == 3
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    folder.follow()
    assert len(folder.slots.names()) == 2, "what is not needed any more goes"
    assert on_disk(tree(folder)) == expected(version(5))
    for n in range(4, 0, -1):
        roll_back(folder)
        assert on_disk(tree(folder)) == expected(version(n))


def test_a_workspace_file_that_a_rank_has_changed_comes_back(folder: WorkspaceFolder) -> None:
    sync(folder, version(1, a=b"aaaa", b=b"bbbb", c=b"cccc"))
    folder.follow()
    (tree(folder) / "a").write_text("rank")
    (tree(folder) / "b").unlink()
    (tree(folder) / "c").unlink()
    (tree(folder) / "c").mkdir()
    (tree(folder) / "c" / "inner").write_text("rank")
    problems = folder.verify()
    assert sorted(os.path.basename(problem.path) for problem in problems) == ["a", "b", "c"]
    assert folder.state().repair
    assert folder.verify(repair=True)  # what was wrong
    assert folder.verify() == [] and not folder.state().repair
    assert on_disk(tree(folder)) == expected(version(1, a=b"aaaa", b=b"bbbb", c=b"cccc"))
    folder.follow()
    kept = [path.read_text() for path in (Path(folder.path) / "kept").rglob("*") if path.is_file()]
    assert sorted(kept) == ["rank", "rank"], "what the rank wrote is not lost"


def test_an_older_tree_that_a_rank_has_changed_is_not_used_as_it_is(folder: WorkspaceFolder) -> None:
    sync(folder, version(1, a=b"aaaa"))
    (tree(folder) / "a").write_text("rank")
    sync(folder, version(2, a=b"aaaa"))
    assert (tree(folder) / "a").read_text() == "aaaa"
    folder.follow()  # looks at the first tree, which is the next one to be changed
    sync(folder, version(3, a=b"aaaa"))
    assert folder.verify() == []


def test_a_link_of_a_rank_leads_nothing_outside(folder: WorkspaceFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "m.py").write_text("precious")
    sync(folder, version(1, **{"dir/x": b"x"}))
    first = Path(os.path.realpath(tree(folder)))
    sync(folder, version(2, **{"dir/x": b"y"}))
    for name in ("pkg", "dir"):
        moved = first / f"{name}-moved"
        (first / name).rename(moved)
        (first / name).symlink_to(outside)
    for n in range(3, 6):
        sync(folder, version(n, **({"dir/x": b"%d" % n} if n % 2 else {})))
        assert folder.verify() == []
        assert {path.name: path.read_text() for path in outside.iterdir()} == {"m.py": "precious"}
