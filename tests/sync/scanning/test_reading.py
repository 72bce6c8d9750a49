"""Content is read as it was scanned, or not at all; what cannot be read is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import digest_of
from workspace_sync.scanning.hashing import CHUNK


def test_a_file_that_changed_since_the_scan_is_refused(client: Client, tree: Path) -> None:
    (tree / "large").write_bytes(os.urandom(2 * CHUNK))
    found = client.scan()
    for path, change in ((tree / "a" / "one.py", b"one = 7\n"), (tree / "run.sh", b"#!"), (tree / "large", b"")):
        entry = found.manifest.file(os.fsencode(path.relative_to(tree)))
        assert entry is not None
        path.write_bytes(change)
        for digest, _, size in entry.pieces():
            with pytest.raises(ScanError, match=f"{path} changed while it was read"):
                found.read(digest, memoryview(bytearray(size)))
    (tree / "a" / "b" / "two.py").unlink()
    with pytest.raises(ScanError, match="two.py changed"):
        found.read(digest_of(b"two = 2\n"), memoryview(bytearray(8)))
    with pytest.raises(KeyError):
        found.read(bytes(32), memoryview(bytearray(1)))


def test_a_copy_stands_in_for_a_file_that_changed(client: Client, tree: Path) -> None:
    for name in ("copy1", "copy2", "copy3"):
        (tree / name).write_text("the same")
    found = client.scan()
    (tree / "copy1").unlink()
    (tree / "copy2").write_text("other")
    buffer = bytearray(8)
    found.read(digest_of(b"the same"), memoryview(buffer))
    assert buffer == b"the same"


def test_many_pieces_are_read_by_many_threads(client: Client, tree: Path) -> None:
    content = [b"%d" % i * (i % 50 + 1) for i in range(500)] + [os.urandom(3 * CHUNK)]
    for i, data in enumerate(content):
        (tree / f"file{i}").write_bytes(data)
    found = client.scan()
    before = len(os.listdir("/proc/self/fd"))
    failures: list[BaseException] = []

    def read_all() -> None:
        try:
            wanted = [piece for _, entry in found.manifest.files() for piece in entry.pieces()]
            buffers = [(digest, bytearray(size)) for digest, _, size in wanted]
            for digest, buffer in buffers:
                found.read(digest, memoryview(buffer))
            assert all(digest_of(buffer) == digest for digest, buffer in buffers)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(os.listdir("/proc/self/fd")) == before


class Writer:
    """Changes a file whenever the scan reads it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, times: int, change: Callable[[int], None]) -> None:
        self.left = times
        real = os.preadv

        def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            count = real(fd, buffers, offset)
            if self.left and os.fstat(fd).st_ino == inode:
                self.left -= 1
                change(self.left)
            return count

        inode = path.stat().st_ino
        monkeypatch.setattr("workspace_sync.scanning.hashing.os.preadv", read)


def test_a_file_that_changes_while_it_is_read_is_read_again(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree / "run.sh"
    Writer(path, monkeypatch, 2, lambda left: os.truncate(path, left + 1))
    entry = client.scan().manifest.file(b"run.sh")
    assert entry is not None
    assert entry.digest == digest_of(b"#")


def test_a_file_that_changes_without_pause_is_named(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree / "run.sh"
    Writer(path, monkeypatch, 100, lambda left: os.truncate(path, left))
    with pytest.raises(ScanError, match=f"1 path changes without pause while being read: {path}"):
        client.scan()


def test_deletions_during_a_scan_do_no_harm(client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    class Listed:
        """A listing of a folder whose entries are deleted as soon as they are listed."""

        def __init__(self, folder: bytes) -> None:
            with real(folder) as entries:
                self.entries = list(entries)
            if os.path.basename(folder) == b"tree":
                for name in ("run.sh", "a/one.py", "a/b/two.py"):
                    (tree / name).unlink()
                (tree / "a" / "b").rmdir()
                (tree / "a").rmdir()

        def __enter__(self) -> list[os.DirEntry[bytes]]:
            return self.entries

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Listed)
    found = client.scan().manifest
    monkeypatch.undo()
    assert set(found.folders) == {b"", b"empty"}
    assert client.scan().manifest.digest == found.digest


def test_a_file_that_vanishes_before_it_is_read_is_left_out(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def vanishing(path: object, *args: object, **kwargs: object) -> int:
        if isinstance(path, bytes) and path.endswith(b"/one.py"):
            (tree / "a" / "one.py").unlink(missing_ok=True)
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("workspace_sync.scanning.hashing.os.open", vanishing)
    assert client.scan().manifest.file(b"a/one.py") is None


_SCAN = """
import sys
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan
workspace = Workspace(dirs={sys.argv[1]: ""})
try:
    scan(workspace, Index(workspace.id, sys.argv[2]))
except Exception as e:
    print(type(e).__name__, e)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root reads everything, unless setpriv takes that away")
def test_unreadable_paths_are_named(client: Client, tree: Path) -> None:
    for i in range(12):
        (tree / f"secret{i:02}").touch(0)
    (tree / "a" / "b").chmod(0)
    take_away = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*take_away, sys.executable, "-c", _SCAN, str(tree), str(client.memory)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"ScanError 13 paths cannot be read by you: {tree}/a/b, {tree}/secret00")
    assert "and 3 more. Change their permissions" in said
