"""A scan finds what a folder holds, reads only what has changed, and is not misled by times and sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workspace_sync.model.manifest import digest_of
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, Scan, scan


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "a" / "one.py").write_bytes(b"one = 1\n")
    (folder / "a" / "b" / "two.py").write_bytes(b"two = 2\n")
    (folder / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "run.sh").chmod(0o750)
    return folder


class Client:
    """Scans as a client does that is started anew each time."""

    def __init__(self, tmp_path: Path, tree: Path, **options: object) -> None:
        self.workspace = Workspace(dirs={tree: ""}, **options)  # type: ignore[arg-type]
        self.memory = tmp_path / "memory"

    def index(self) -> Index:
        return Index(self.workspace.id, str(self.memory))

    def scan(self) -> Scan:
        return scan(self.workspace, self.index())


@pytest.fixture
def client(tmp_path: Path, tree: Path) -> Client:
    return Client(tmp_path, tree)


def old(*paths: Path) -> None:
    """Let files look as if they had not been touched for long, as far as a program can."""
    for path in paths:
        os.utime(path, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))


def test_a_manifest_says_what_a_folder_holds(client: Client, tree: Path) -> None:
    found = client.scan().manifest
    assert set(found.folders) == {b"", b"a", b"a/b", b"empty"}
    entry = found.file(b"a/one.py")
    assert entry is not None
    assert (entry.size, entry.digest) == (8, digest_of(b"one = 1\n"))
    script = found.file(b"run.sh")
    assert script is not None
    assert script.mode == 0o750
    assert found.count() == (3, 26)


def test_an_unchanged_tree_has_the_same_digest_and_is_not_read(client: Client) -> None:
    index = client.index()
    first = scan(client.workspace, index)
    assert first.hashed == 26
    assert scan(client.workspace, index).manifest.digest == first.manifest.digest
    assert client.scan().manifest.digest == first.manifest.digest
