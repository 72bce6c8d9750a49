"""``forget`` on hosts, of which two share a store: refused while ranks use the trees; then all is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.workers import placement_of
from tests.sync.hosts import StoreHosts, current_tree, workspace_folder
from tests.sync.trees import snapshot, write
from tests.waiting import patience
from workspace_sync import Workspace, WorkspaceBusyError, forget, status, sync, verify
from workspace_sync.session import collect


class Place(Actor):
    """Says where it is."""

    @endpoint
    def where(self) -> tuple[str, str | None]:
        """The working directory, and the root of the tree."""
        return os.getcwd(), os.environ.get("WORKSPACE_DIR")

    @endpoint
    def write(self, name: str, text: str) -> None:
        """A file in the working directory."""
        Path(name).write_text(text)


def test_it_is_forgotten_everywhere(
    own_hosts: Callable[..., StoreHosts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "project"
    write(tree / "said", "one")
    monkeypatch.chdir(tree)
    workspace = Workspace(dirs={tree: ""})
    shared, own = tmp_path / "shared", tmp_path / "own"
    hosts = own_hosts(shared, own, shared)
    assert [each.removed for each in forget(hosts.mesh, workspace)] == [False] * 3
    assert workspace_folder(own) is None, "to look changes nothing"
    sync(hosts.mesh, workspace)
    procs = hosts.mesh.spawn_procs({"gpus": 1})
    places = procs.spawn("place", Place)
    places.write.call("log", "of a rank").get(patience(60))
    with pytest.raises(WorkspaceBusyError, match="nothing was removed, as processes use the workspace") as caught:
        forget(hosts.mesh, workspace)
    assert all(f"node{n}: process" in str(caught.value) for n in range(3))
    assert all(current_tree(store) for store in (shared, own))
    procs.stop().get(patience(60))

    looked = forget(hosts.mesh, workspace, dry_run=True)
    assert [(each.removed, each.shares, each.generations) for each in looked] == [
        (False, "", 1),
        (False, "", 1),
        (False, "node0", 1),
    ]
    done = forget(hosts.mesh, workspace)
    assert [(each.removed, each.kept_files > 0) for each in done] == [(True, True)] * 3
    left = [path.read_text() for path in own.rglob("w/**/*") if path.is_file()]
    assert left == ["of a rank"]
    assert [each.kept_files for each in status(hosts.mesh, workspace)] == [1, 1, 1]
    assert not any(host.problems for host in verify(hosts.mesh, workspace).hosts)
    assert not any(placement and placement.folders for placement in placement_of(hosts.mesh))
    again = hosts.mesh.spawn_procs({"gpus": 1})
    assert set(again.spawn("place", Place).where.call().get(patience(60)).values()) == {(str(tree), None)}
    again.stop().get(patience(60))

    assert [each.kept_files for each in collect(hosts.mesh)] == [1, 1, 1], "it only says so"
    removed = collect(hosts.mesh, kept=True)
    assert sum(each.removed_files for each in removed) == 2 and not any(each.kept_files for each in removed)
    forget(hosts.mesh, workspace, kept=True)
    assert workspace_folder(shared) is None and workspace_folder(own) is None
    assert all(host.switched for host in sync(hosts.mesh, workspace).hosts)
    assert [current_tree(store) for store in (shared, own)] == [snapshot(tree)] * 2
