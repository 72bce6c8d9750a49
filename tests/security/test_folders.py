"""Nothing of ours removes, or writes to, a folder that it cannot prove its own."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.meshes import KeptError, attach, end_kept, keep, kept
from monarch_kernel.protocol.private_files import (
    LOCK,
    NotOursError,
    NotPrivateError,
    PrivateFolder,
    open_way,
    read_own_file,
    remove_socket,
    remove_torch_memory,
    temporary_folder,
    temporary_folders,
    write_own_file,
)
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.workers import make_job_folder, remove_job_folder
from tests.kernel.harness import PATIENCE, Kernel
from tests.otheruser import OtherUser

ROOT = Path(__file__).parents[2]


def work_in(folder: Path, mode: int = 0o755) -> set[Path]:
    """A folder with what a person has made over the years."""
    for name in ("chapter.tex", "data/run.csv", ".ssh/id_ed25519", LOCK, "worker.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    folder.chmod(mode)
    old = time.time() - 86400
    os.utime(folder, (old, old))
    return tree(folder)


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_no_code_of_ours_removes_a_tree() -> None:
    found = [path for path in (ROOT / "monarch_kernel").rglob("*.py") if "rmtree" in path.read_text()]
    assert not found


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=oct)
def test_a_folder_that_is_no_kept_mesh_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    thesis = tmp_path / "thesis"
    before = work_in(thesis, mode)
    monkeypatch.chdir(tmp_path)
    for use in (attach, end_kept):
        with pytest.raises(KeptError, match=r"thesis is (no kept mesh|open to other users).*nothing was changed"):
            use("./thesis")
    monkeypatch.setenv("MONARCH_KERNEL_KEPT_DIR", str(tmp_path))
    assert kept() == []
    with pytest.raises(KeptError, match="thesis"):
        keep("thesis")
    assert tree(thesis) == before


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = work_in(tmp_path / "thesis", 0o700)
    (tmp_path / "kept").mkdir(0o700)
    (tmp_path / "kept" / "m").symlink_to(tmp_path / "thesis")
    monkeypatch.setenv("MONARCH_KERNEL_KEPT_DIR", str(tmp_path / "kept"))
    assert kept() == []
    with pytest.raises(KeptError, match="is a link"):
        attach("m")
    assert tree(tmp_path / "thesis") == before


@pytest.mark.parametrize("how", ["link", "folder"])
def test_the_place_of_kept_meshes_may_be_another_users(
    how: str, other_user: OtherUser, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONARCH_KERNEL_KEPT_DIR", raising=False)
    home = tmp_path / "home"
    before = work_in(home, 0o700)
    made = other_user.run(
        """
        base, home, how = sys.argv[1:]
        os.mkdir(base)
        os.mkdir(base + "/kept") if how == "folder" else os.symlink(home, base + "/kept")
        """,
        *(shared / f"monarch-kernel-{os.getuid()}", home, how),
    )
    assert made == ""
    whose = rf"monarch-kernel-{os.getuid()} belongs to the user with uid {other_user.uid}.*MONARCH_KERNEL_KEPT_DIR"
    for use in (kept, lambda: keep("m"), lambda: attach("nothing"), lambda: end_kept("data")):
        with pytest.raises(KeptError, match=whose):
            use()
    assert tree(home) == before


def test_a_notebook_says_whose_folder_is_in_the_way(
    other_user: OtherUser,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_kernel: Callable[[], Kernel],
) -> None:
    monkeypatch.delenv("MONARCH_KERNEL_KEPT_DIR", raising=False)
    before = work_in(tmp_path / "home", 0o700)
    code = 'os.mkdir(sys.argv[1]); os.symlink(sys.argv[2], sys.argv[1] + "/kept")'
    other_user.run(code, shared / f"monarch-kernel-{os.getuid()}", tmp_path / "home")
    kernel = start_kernel()
    listed = kernel.ok("%mesh ls").stdout
    assert f"belongs to the user with uid {other_user.uid}" in listed and "No mesh is up" in listed
    assert kernel.client.complete("%mesh down ", reply=True, timeout=PATIENCE)["content"]["matches"] == []
    for command in ("attach nothing", "down data", "up m --procs 1 --keep"):
        failed = kernel.run(f"%mesh {command}")
        assert failed.ename == "UsageError"
        assert f"uid {other_user.uid}" in failed.evalue
    assert tree(tmp_path / "home") == before


def test_a_link_of_another_user_on_the_way_is_not_followed(other_user: OtherUser, shared: Path, tmp_path: Path) -> None:
    before = work_in(tmp_path / "home")
    other_user.run("os.symlink(*sys.argv[1:])", tmp_path, shared / "way")
    with pytest.raises(NotPrivateError, match=f"way is a link of the user with uid {other_user.uid}"):
        open_way(str(shared / "way" / "home"))
    os.symlink(tmp_path, shared / "own")
    os.close(open_way(str(shared / "own" / "home")))
    assert tree(tmp_path / "home") == before


def test_run_folders_of_others_are_left_alone(other_user: OtherUser, shared: Path, tmp_path: Path) -> None:
    before = work_in(tmp_path / "home")
    dead = cleanup.make_run_dir()
    text = (Path(dead.path) / LOCK).read_text()
    start = f"monarch-{os.getuid()}-"
    other_user.run(
        """
        shared, home, start, text = sys.argv[1:]
        os.symlink(home, f"{shared}/{start}link")
        os.makedirs(f"{shared}/{start}folder/logs")
        Path(f"{shared}/{start}folder/lock").write_text(text)
        """,
        *(shared, tmp_path / "home", start, text),
    )
    (shared / f"{start}mine").mkdir(0o700)  # by that name, and yet not made by this package
    (shared / f"{start}mine" / LOCK).write_text("mine")
    dead._folder.close()  # as the end of its process does
    assert cleanup.remove_stale() == [dead.path]
    assert tree(tmp_path / "home") == before
    assert {path.name for path in shared.iterdir()} == {f"{start}link", f"{start}folder", f"{start}mine"}


def test_what_is_not_ours_in_a_folder_of_ours_stays(tmp_path: Path) -> None:
    run = cleanup.make_run_dir(str(tmp_path))
    folder = Path(run.path)
    for name in ("agent.log", "logs/r.1.log", "logs/r.1.log.old", "logs/notes.txt"):
        (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
        (folder / name).touch()
    (folder / "agent.sock").write_text("no socket")
    (folder / "deep").mkdir()
    run._folder.close()
    cleanup.remove_stale(str(tmp_path))
    assert sorted(str(path.relative_to(folder)) for path in tree(folder)) == ["deep", LOCK, "logs", "logs/notes.txt"]
    (folder / "deep").rmdir()
    (folder / "logs" / "notes.txt").unlink()
    assert cleanup.remove_stale(str(tmp_path)) == [run.path]
    assert not folder.exists()


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with PrivateFolder.make(path) as made:
        made.claim("job")
        with PrivateFolder.open(path) as second:
            assert not second.take("job")
            with pytest.raises(NotOursError, match="no kept mesh of monarch_kernel: its file 'lock' does not say so"):
                second.take("kept mesh")
    with PrivateFolder.open(path) as second:
        os.replace(os.path.join(path, LOCK), tmp_path / "stolen")
        with pytest.raises(NotOursError, match="has no file 'lock'"):
            second.take("job")
    assert os.listdir(path) == []


def test_a_job_folder_is_removed_by_the_same_rules(shared: Path, tmp_path: Path) -> None:
    before = work_in(tmp_path / "thesis", 0o700)
    with pytest.raises(NotOursError, match="thesis is no job of monarch_kernel"):
        remove_job_folder(str(tmp_path / "thesis"))
    assert tree(tmp_path / "thesis") == before
    with make_job_folder() as folder:
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    remove_job_folder(folder.path)
    assert not os.path.exists(folder.path)
    remove_job_folder(folder.path)  # it is gone already


def test_a_temporary_folder_that_others_can_change_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_user: OtherUser, shared: Path
) -> None:
    other_user.run("os.mkdir(sys.argv[1])", shared / "theirs")
    monkeypatch.setattr("tempfile.tempdir", str(shared / "theirs"))
    assert temporary_folder(60) == "/tmp"
    assert str(shared / "theirs") in temporary_folders(60), "what an older program has put there is found"
    os.chmod(shared, 0o777)
    with pytest.raises(NotPrivateError, match=rf"other users may write to {shared} \(mode 777\)"):
        open_way(str(shared / "x"))


def test_files_are_read_only_if_this_user_alone_writes_them(
    other_user: OtherUser, shared: Path, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    write_own_file(str(path), b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_own_file(str(path)) == b"x"
    path.chmod(0o622)
    with pytest.raises(NotPrivateError, match="other users may write to .*chmod 600"):
        read_own_file(str(path))
    os.symlink(path, tmp_path / "link")
    with pytest.raises(NotPrivateError, match="is a link"):
        read_own_file(str(tmp_path / "link"))
    other_user.run("Path(sys.argv[1]).write_text('x')", shared / "theirs")
    with pytest.raises(NotPrivateError, match=f"theirs belongs to the user with uid {other_user.uid}"):
        read_own_file(str(shared / "theirs"))
    other_user.run("os.symlink(*sys.argv[1:])", path, shared / "bait")
    write_own_file(str(shared / "bait"), b"y")
    assert path.read_bytes() == b"x"


def test_only_a_socket_is_removed_as_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert not remove_socket(str(tmp_path / "notes.txt"))
    assert remove_socket(str(tmp_path / "none"))
    assert (tmp_path / "notes.txt").exists()


def test_memory_that_torch_left_is_removed_of_one_process_only(tmp_path: Path) -> None:
    kept = ["torch_12_1_0_link", "torch_121_5_0", "torch_12", "monarch_12_1"]
    for name in ("torch_12_1_0", "torch_12_77_3", *kept[1:]):
        (tmp_path / name).write_text("mine")
    os.symlink(tmp_path / "monarch_12_1", tmp_path / kept[0])
    remove_torch_memory(12, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    remove_torch_memory(12, str(tmp_path / "nowhere"))
