"""What a client remembers belongs to its user alone, survives its death, and does no harm when it is damaged."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.manifest import Manifest
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan


def file_of(client: Client, name: str = "index") -> Path:
    return Path(client.index().path) / name


def test_its_files_are_private(client: Client, tmp_path: Path) -> None:
    found = client.scan()
    client.index().remember(found.manifest)
    seen = list(client.memory.rglob("*"))
    assert len(seen) == 4
    for path in (client.memory, *seen):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_one_that_others_could_write_is_not_used(client: Client) -> None:
    before = client.scan().manifest.digest
    Path(client.index().path).chmod(0o777)
    found = client.scan()
    assert (found.manifest.digest, found.hashed) == (before, 26)


@pytest.mark.parametrize("position", [0, 20, 60, 200, -1])
def test_a_damaged_one_is_made_anew(client: Client, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workspace_sync.scanning.scanner.RECENT", -(10**15))
    before = client.scan().manifest.digest
    data = bytearray(file_of(client).read_bytes())
    assert client.scan().hashed == 0
    data[position] ^= 1
    file_of(client).write_bytes(data)
    found = client.scan()
    assert (found.manifest.digest, found.hashed) == (before, 26)
    assert client.scan().hashed == 0


@pytest.mark.parametrize("size", [0, 10, 48, 100])
def test_a_truncated_one_is_made_anew(client: Client, size: int) -> None:
    before = client.scan().manifest.digest
    os.truncate(file_of(client), size)
    assert client.scan().manifest.digest == before


def test_one_of_other_folders_is_not_used(client: Client, tree: Path, tmp_path: Path) -> None:
    client.scan()
    index = Index(client.workspace.id, str(client.memory))
    found = scan(Workspace(dirs={tree / "a": ""}), index)
    assert {path for path, _ in found.manifest.files()} == {b"one.py", b"b/two.py"}


def test_a_disk_that_takes_nothing_is_no_error(client: Client, tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file where the folder should be")
    assert client.scan().hashed == client.scan().hashed == 26


_SCANS = """
import os, sys
from pathlib import Path
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan
workspace = Workspace(dirs={sys.argv[1]: ""})
for i in range(10**9):
    Path(sys.argv[1], f"new{i % 7}").write_text(str(i))
    index = Index(workspace.id, sys.argv[2])
    index.remember(scan(workspace, index).manifest)
    print(i, flush=True)
"""


def test_a_client_that_is_killed_leaves_one_that_can_be_used(client: Client, tree: Path) -> None:
    rng = random.Random(1)
    for i in range(200):
        (tree / "a" / f"m{i}").write_text(str(i))
    for _ in range(6):
        command = [sys.executable, "-c", _SCANS, str(tree), str(client.memory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(1, 4)):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        found = client.scan().manifest
        assert found.digest == Client(client.memory / "fresh" / os.urandom(4).hex(), tree).scan().manifest.digest


def test_two_clients_at_once_do_each_other_no_harm(client: Client, tree: Path) -> None:
    command = [sys.executable, "-c", _SCANS, str(tree), str(client.memory)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for _ in range(10):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert client.scan().manifest.digest == Client(client.memory / "fresh", tree).scan().manifest.digest


def test_the_last_manifests_are_known_by_their_digests(client: Client, tree: Path) -> None:
    index = client.index()
    manifests: list[Manifest] = []
    for i in range(12):
        (tree / "run.sh").write_text(str(i))
        manifests.append(scan(client.workspace, index).manifest)
        index.remember(manifests[-1])
    fresh = client.index()
    known = [fresh.remembered(each.digest) for each in manifests]
    assert [each is not None for each in known] == [False] * 4 + [True] * 8
    assert known[-1] is not None
    assert dict(known[-1].files()) == dict(manifests[-1].files())
    assert fresh.remembered(bytes(32)) is None


def test_the_tree_of_the_last_scan_is_known_without_being_remembered(tmp_path: Path, tree: Path) -> None:
    # A new client needs it to tell hosts what has changed since then.
    workspace = Workspace(dirs={tree: "deep/down"})
    before = scan(workspace, Index(workspace.id, str(tmp_path / "memory"))).manifest
    (tree / "run.sh").write_text("changed")
    index = Index(workspace.id, str(tmp_path / "memory"))
    after = scan(workspace, index).manifest
    assert after.digest != before.digest
    known = index.remembered(before.digest)
    assert known is not None
    assert dict(known.files()) == dict(before.files())


def test_a_damaged_manifest_is_not_known(client: Client) -> None:
    manifest = client.scan().manifest
    client.index().remember(manifest)
    path = file_of(client, f"{manifest.digest.hex()}.manifest")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert client.index().remembered(manifest.digest) is None
