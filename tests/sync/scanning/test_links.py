"""Symbolic links within the workspace are kept; those that lead out of it are refused, followed or kept, as said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sync.scanning.conftest import Client
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import digest_of
from workspace_sync.model.workspace import Workspace
from workspace_sync.scanning import Index, scan


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    (folder / "data").write_bytes(b"data")
    (folder / "deep" / "more").write_bytes(b"more")
    return folder


def links(client: Client) -> dict[bytes, bytes]:
    folders = client.scan().manifest.folders
    return {os.path.join(path, name): to for path, folder in folders.items() for name, to in folder.links.items()}


def test_links_within_are_kept(client: Client, tree: Path) -> None:
    (tree / "a" / "up").symlink_to("../run.sh")
    (tree / "a" / "folder").symlink_to("b")
    (tree / "dangling").symlink_to("not/here")
    (tree / "itself").symlink_to("itself")
    (tree / "a" / "b" / "round").symlink_to("../../a")
    for _ in range(2):
        assert links(client) == {
            b"a/up": b"../run.sh",
            b"a/folder": b"b",
            b"dangling": b"not/here",
            b"itself": b"itself",
            b"a/b/round": b"../../a",
        }


def test_absolute_links_within_become_relative(client: Client, tree: Path) -> None:
    (tree / "a" / "b" / "script").symlink_to(tree / "run.sh")
    (tree / "a" / "top").symlink_to(tree)
    (tree / "a" / "around").symlink_to(f"../../{tree.name}/empty")
    assert links(client) == {b"a/b/script": b"../../run.sh", b"a/top": b"..", b"a/around": b"../empty"}


def test_links_between_folders_of_a_workspace_are_within(tmp_path: Path, tree: Path, outside: Path) -> None:
    (tree / "a" / "data").symlink_to(outside / "data")
    workspace = Workspace(dirs={tree: "x/tree", outside: "other"})
    found = scan(workspace, Index(workspace.id, str(tmp_path / "memory"))).manifest
    assert found.folders[b"x/tree/a"].links == {b"data": b"../../../other/data"}


def test_links_to_outside_are_refused_by_name(client: Client, tree: Path, outside: Path) -> None:
    (tree / "a" / "data").symlink_to(outside / "data")
    (tree / "etc").symlink_to("/etc")
    (tree / "up").symlink_to("..")
    (tree / "b").symlink_to("a/../../outside")
    for _ in range(2):
        with pytest.raises(ScanError) as e:
            client.scan()
        text = str(e.value)
        assert "4 paths are links that lead out of the workspace" in text
        assert f"{tree}/a/data -> {outside}/data" in text
        assert f"{tree}/etc -> /etc" in text
        assert f"{tree}/up -> .." in text
        assert f"{tree}/b -> a/../../outside" in text
        assert "follow" in text
        assert "keep" in text
    (tree / ".meshignore").write_text("data\netc\nup\n/b\n")
    assert links(client) == {}


def test_an_error_names_ten_links_and_counts_the_rest(client: Client, tree: Path) -> None:
    for i in range(25):
        (tree / f"link{i:02}").symlink_to("/etc/hosts")
    with pytest.raises(ScanError, match=r"25 paths are links .*link09 -> /etc/hosts, and 15 more") as e:
        client.scan()
    assert "link10" not in str(e.value)


def test_links_to_outside_may_be_kept(tmp_path: Path, tree: Path, outside: Path) -> None:
    (tree / "data").symlink_to(outside / "data")
    (tree / "run").symlink_to(tree / "run.sh")
    assert links(Client(tmp_path, tree, "keep")) == {b"data": os.fsencode(outside / "data"), b"run": b"run.sh"}


def test_links_to_outside_may_be_followed(tmp_path: Path, tree: Path, outside: Path) -> None:
    (tree / "a" / "data").symlink_to(outside / "data")
    (tree / "a" / "all").symlink_to(outside)
    (outside / "inner").symlink_to("deep/more")
    (outside / "script").symlink_to(tree / "run.sh")
    client = Client(tmp_path, tree, "follow")
    for _ in range(2):
        found = client.scan()
        files = {path: entry.digest for path, entry in found.manifest.files()}
        assert files[b"a/data"] == files[b"a/all/data"] == digest_of(b"data")
        assert files[b"a/all/deep/more"] == digest_of(b"more")
        assert found.manifest.folders[b"a/all"].links == {b"inner": b"deep/more", b"script": b"../../run.sh"}
    (outside / "data").write_bytes(b"DATA")
    (outside / "deep" / "new").write_bytes(b"new")
    found = client.scan()
    files = {path: entry.digest for path, entry in found.manifest.files()}
    assert files[b"a/data"] == files[b"a/all/data"] == digest_of(b"DATA")
    buffer = bytearray(3)
    found.read(files[b"a/all/deep/new"], memoryview(buffer))
    assert buffer == b"new"


def test_followed_links_that_lead_back_or_nowhere_are_refused(tmp_path: Path, tree: Path, outside: Path) -> None:
    (tree / "out").symlink_to(outside)
    (outside / "back").symlink_to(outside)
    (tree / "above").symlink_to(tmp_path)
    (tree / "gone").symlink_to(outside / "gone")
    with pytest.raises(ScanError) as e:
        Client(tmp_path, tree, "follow").scan()
    assert f"{tree}/above -> {tmp_path}" in str(e.value)
    assert "back to a folder that holds it" in str(e.value)
    assert f"{tree}/gone -> {outside}/gone" in str(e.value)
