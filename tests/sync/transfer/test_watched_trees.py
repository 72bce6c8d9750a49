"""What a watch sees of syncs: the trees of hosts, and the ranks that run older modules than their hosts have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.actor import shutdown_context
from monarch_kernel.watch import Snapshot, Watch, advanced, watch
from tests.actor.actors import PATIENCE
from tests.sync.hosts import StoreHosts
from tests.sync.transfer.test_running_ranks import Importer, folder, look
from workspace_sync import Workspace, sync

__all__ = ["folder"]
pytestmark = pytest.mark.own_runtime


def until(seen: Watch, holds: Callable[[Snapshot], bool]) -> Snapshot:
    snapshot = seen.snapshot()
    for delta in seen.changes(PATIENCE):
        snapshot = advanced(snapshot, delta)
        if holds(snapshot):
            return snapshot
    raise AssertionError(f"it never held: {snapshot}")


def older(snapshot: Snapshot) -> list[bool]:
    (ranks,) = snapshot.ranks.values()
    return [rank.older for rank in ranks]


def test_trees_and_older_modules_are_seen_after_a_sync_and_by_a_later_watch(
    store_hosts: Callable[..., StoreHosts], folder: Path
) -> None:
    made = store_hosts(1)
    workspace = Workspace(dirs=["."])
    sync(made.mesh, workspace)
    mesh = made.mesh.spawn_procs({"gpus": 2})
    mesh.initialized.get(PATIENCE)
    assert [version for version, _ in look(mesh.slice(gpus=0).spawn("first", Importer))] == ["one"]
    with watch(period=0.05) as seen:
        assert older(until(seen, lambda snapshot: bool(snapshot.ranks))) == [False, False]
        (folder / "synced_module.py").write_text("VERSION = 'second'\n")
        report = sync(made.mesh, workspace)
        snapshot = until(seen, lambda snapshot: any(older(snapshot)))
        assert older(snapshot) == [True, False]
        assert [host.tree for host in snapshot.hosts.values()] == [report.hosts[0].digest]
    with watch(period=0.05) as seen:
        snapshot = until(seen, lambda snapshot: older(snapshot) == [True, False])
        assert [host.tree for host in snapshot.hosts.values()] == [report.hosts[0].digest]
    shutdown_context().get(PATIENCE)
