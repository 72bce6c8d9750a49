"""A folder, and a client that scans it as one does that is started anew each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from workspace_sync.model.workspace import Links, Workspace
from workspace_sync.scanning import Index, Scan, scan


class Client:
    """Scans a folder as the root of its tree.

    Args:
        tmp_path: where it keeps what it remembers.
        tree: the folder.
        links: see ``Workspace``.
    """

    def __init__(self, tmp_path: Path, tree: Path, links: Links = "refuse") -> None:
        self.workspace = Workspace(dirs={tree: ""}, links=links)
        self.memory = tmp_path / "memory"

    def index(self) -> Index:
        return Index(self.workspace.id, str(self.memory))

    def scan(self) -> Scan:
        return scan(self.workspace, self.index())

    def paths(self) -> set[str]:
        """The files of a scan."""
        return {path.decode() for path, _ in self.scan().manifest.files()}


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


@pytest.fixture
def client(tmp_path: Path, tree: Path) -> Client:
    return Client(tmp_path, tree)


@pytest.fixture
def no_git_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without settings of git; returns it."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return home
