"""A scan finds what a folder holds, reads only what has changed, and is not misled by times and sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import digest_of
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan
from workspace_sync.scanning.hashing import CHUNK

LONG_AGO = 1_700_000_000_000_000_000


def digests(client: Client) -> dict[bytes, bytes]:
    return {path: entry.digest for path, entry in client.scan().manifest.files()}


def settle(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan, with nothing distrusted because it is recent."""
    with monkeypatch.context() as patch:
        patch.setattr("workspace_sync.scanning.scanner.RECENT", -(10**15))
        client.scan()


def test_a_manifest_says_what_a_folder_holds(client: Client) -> None:
    found = client.scan().manifest
    assert set(found.folders) == {b"", b"a", b"a/b", b"empty"}
    entry = found.file(b"a/one.py")
    assert entry is not None
    assert (entry.size, entry.digest) == (8, digest_of(b"one = 1\n"))
    script = found.file(b"run.sh")
    assert script is not None
    assert script.mode == 0o750
    assert found.count() == (3, 26)


def test_an_unchanged_tree_has_the_same_digest_and_is_not_read(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(client, monkeypatch)
    index = client.index()
    first = scan(client.workspace, index)
    again = scan(client.workspace, index)
    assert (first.hashed, again.hashed) == (0, 0)
    assert (
        first.manifest.digest
        == again.manifest.digest
        == Client(client.memory / "new", _root(client)).scan().manifest.digest
    )


def _root(client: Client) -> Path:
    return Path(next(iter(client.workspace.roots())))


def test_every_kind_of_change_is_seen(client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(client, monkeypatch)
    seen = {client.scan().manifest.digest}

    def changed() -> set[bytes]:
        found = client.scan().manifest
        assert found.digest not in seen
        seen.add(found.digest)
        fresh = Client(client.memory / found.digest.hex(), tree).scan().manifest
        assert fresh.digest == found.digest  # what is remembered and what is read anew agree
        return {path for path, _ in found.files()}

    (tree / "a" / "new.py").write_text("new")
    assert b"a/new.py" in changed()
    (tree / "a" / "new.py").rename(tree / "a" / "b" / "new.py")
    assert b"a/b/new.py" in changed()
    (tree / "run.sh").chmod(0o640)
    changed()
    (tree / "empty").chmod(0o700)
    changed()
    (tree / "empty").rmdir()
    changed()
    (tree / "empty").write_text("a file now")
    assert b"empty" in changed()
    (tree / "empty").unlink()
    (tree / "empty").symlink_to("a")
    assert b"empty" not in changed()
    (tree / "empty").unlink()
    (tree / "empty").symlink_to("run.sh")
    changed()
    (tree / "a").rename(tree / "c")
    assert b"c/b/two.py" in changed()
    (tree / "c" / "b" / "deep" / "er").mkdir(parents=True)
    changed()


def test_an_edit_of_the_same_size_and_mtime_is_seen(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree / "a" / "one.py"
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    settle(client, monkeypatch)
    path.write_bytes(b"one = 7\n")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    assert digests(client)[b"a/one.py"] == digest_of(b"one = 7\n")


def test_an_edit_in_the_same_tick_of_the_clock_is_seen(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Let the edit leave no trace in what lstat says, as it does if the clock has not moved on.
    path = tree / "a" / "one.py"
    real = os.scandir
    before = path.stat()

    class Entry:
        def __init__(self, entry: os.DirEntry[bytes]) -> None:
            self.name, self.entry = entry.name, entry

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            return self.entry.is_dir(follow_symlinks=follow_symlinks)

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            return before if self.name == b"one.py" else self.entry.stat(follow_symlinks=follow_symlinks)

    class Entries:
        def __init__(self, folder: bytes) -> None:
            self.entries = real(folder)

        def __enter__(self) -> list[Entry]:
            return [Entry(entry) for entry in self.entries]

        def __exit__(self, *_: object) -> None:
            self.entries.close()

    assert digests(client)[b"a/one.py"] == digest_of(b"one = 1\n")
    path.write_bytes(b"one = 7\n")
    monkeypatch.setattr(os, "scandir", Entries)
    assert digests(client)[b"a/one.py"] == digest_of(b"one = 7\n")


def test_a_touched_file_is_read_and_the_tree_is_the_same(
    client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(client, monkeypatch)
    before = client.scan().manifest.digest
    os.utime(tree / "run.sh", ns=(LONG_AGO, LONG_AGO))
    found = client.scan()
    assert (found.manifest.digest, found.hashed) == (before, 10)


def test_several_folders_have_places_of_their_own(tmp_path: Path, tree: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "three.py").write_text("3")
    workspace = Workspace(dirs={tree: "src/main", other: "lib"})
    index = Index(workspace.id, str(tmp_path / "memory"))
    scan(workspace, index)
    for found in (scan(workspace, index), scan(workspace, Index(workspace.id, str(tmp_path / "memory")))):
        assert {path for path, _ in found.manifest.files()} == {
            b"src/main/a/one.py",
            b"src/main/a/b/two.py",
            b"src/main/run.sh",
            b"lib/three.py",
        }
        buffer = bytearray(1)
        found.read(digest_of(b"3"), memoryview(buffer))
        assert buffer == b"3"


def test_a_workspace_without_folders_is_an_empty_tree(tmp_path: Path) -> None:
    found = scan(Workspace(), Index("none", str(tmp_path)))
    assert found.manifest.count() == (0, 0)


def test_odd_names(client: Client, tree: Path) -> None:
    names = [
        b"\xff\xfe not utf-8",
        b"line\nbreak",
        b" ",
        b"-rf",
        b"a\tb",
        b"quote\"'",
        "ü".encode(),
        b"x" * 255,
        b"...",
    ]
    for name in names:
        with open(os.fsencode(tree) + b"/" + name, "wb") as file:
            file.write(name)
    client.scan()
    found = client.scan()
    assert {path for path, _ in found.manifest.files()} >= set(names)
    for name in names:
        buffer = bytearray(len(name))
        found.read(digest_of(name), memoryview(buffer))
        assert buffer == name


def test_what_is_no_file_is_left_out_and_said(client: Client, tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    for _ in range(2):
        found = client.scan()
        assert found.manifest.file(b"pipe") is None
        assert [(each.source, each.example) for each in found.ignored] == [("cannot be synced: FIFO", b"pipe")]


def test_hard_links_and_sparse_files_are_files(client: Client, tree: Path) -> None:
    os.link(tree / "run.sh", tree / "a" / "same.sh")
    with open(tree / "holes", "wb") as file:
        file.truncate(3 * CHUNK + 5)
        file.seek(CHUNK)
        file.write(b"data")
    found = client.scan()
    files = dict(found.manifest.files())
    assert files[b"a/same.sh"].digest == files[b"run.sh"].digest
    assert files[b"holes"].sizes == (CHUNK, CHUNK, CHUNK, 5)
    assert files[b"holes"].digest == digest_of((tree / "holes").read_bytes())
    for digest, offset, size in files[b"holes"].pieces():
        buffer = bytearray(size)
        found.read(digest, memoryview(buffer))
        assert buffer == (tree / "holes").read_bytes()[offset : offset + size]


def test_4_kb_changed_in_a_large_file_are_one_new_chunk(client: Client, tree: Path) -> None:
    data = bytearray(os.urandom(9 * CHUNK + 123))
    (tree / "large").write_bytes(data)
    before = client.scan().manifest.file(b"large")
    data[5 * CHUNK - 2048 : 5 * CHUNK + 2048] = bytes(4096)
    (tree / "large").write_bytes(data)
    after = client.scan().manifest.file(b"large")
    assert before is not None
    assert after is not None
    assert len(set(after.chunks) - set(before.chunks)) == 2
    assert after.digest == digest_of(data)


def test_several_large_files_at_once(client: Client, tree: Path) -> None:
    content = {f"large{i}": os.urandom(2 * CHUNK + i) for i in range(12)}
    for name, data in content.items():
        (tree / name).write_bytes(data)
    found = digests(client)
    assert {name: found[name.encode()] for name in content} == {name: digest_of(data) for name, data in content.items()}


def test_a_missing_folder_is_named(client: Client, tree: Path) -> None:
    tree.rename(tree.with_name("moved"))
    with pytest.raises(ScanError, match=f"{tree} is gone"):
        client.scan()


def test_progress_is_told_and_a_scan_can_be_cancelled(client: Client, tree: Path) -> None:
    (tree / "large").write_bytes(bytes(30 * CHUNK))
    said: list[tuple[int, int]] = []
    found = scan(client.workspace, client.index(), progress=lambda done, total: said.append((done, total)))
    assert said[-1] == (found.hashed, found.hashed) == (30 * CHUNK + 26,) * 2
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    stop: list[tuple[int, int]] = []
    fresh = Index(client.workspace.id, str(client.memory / "fresh"))
    with pytest.raises(ScanError, match="cancelled"):
        scan(
            client.workspace,
            fresh,
            progress=lambda done, total: stop.append((done, total)),
            cancelled=lambda: bool(stop),
        )
    assert fresh.records == {}


def test_a_pipe_in_place_of_a_file_is_told_once(client: Client, tree: Path) -> None:
    assert not client.scan().notes
    (tree / "run.sh").unlink()
    os.mkfifo(tree / "run.sh")
    found = client.scan()
    assert found.manifest.file(b"run.sh") is None
    assert found.notes == [
        f"{tree / 'run.sh'} is a FIFO where a file was synced before: hosts have no such file any more"
    ]
    assert not client.scan().notes
