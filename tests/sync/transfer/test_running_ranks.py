"""What ``sync`` does with ranks: those that run are told, and later ones start in the tree, also if a host failed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host
from tests.actor.actors import PATIENCE
from tests.conftest import alive, wait_until
from tests.sync.hosts import StoreHosts
from workspace_sync import SyncError, Workspace, rollback, sync
from workspace_sync.reload.live import sync_live
from workspace_sync.transfer.staging_run import StagingRun


class Importer(Actor):
    @endpoint
    def look(self) -> tuple[str, str]:
        """The module that this rank imports, and its working directory."""
        import synced_module  # type: ignore[import-not-found]

        return synced_module.VERSION, os.path.realpath(os.getcwd())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, in which this process runs."""
    made = tmp_path / "folder"
    made.mkdir()
    (made / "synced_module.py").write_text("VERSION = 'one'\n")
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(made)
    return made


def look(mesh: Any) -> list[tuple[str, str]]:
    return list(mesh.look.call().get(PATIENCE).values())


def test_ranks_that_run_are_told_and_a_host_that_is_lost_in_the_switch_is_unknown(
    store_hosts: Callable[..., StoreHosts], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store_hosts(2)
    workspace = Workspace(dirs=["."])
    sync(made.mesh, workspace)
    agents = [pid for worker in made.team for pid in worker.ranks()]
    old = made.mesh.spawn_procs().spawn("old", Importer)
    slots = [where for _, where in look(old)]
    assert [str(store) in where for store, where in zip(made.stores, slots, strict=True)] == [True, True]

    (folder / "synced_module.py").write_text("VERSION = 'second'\n")
    report = sync(made.mesh, workspace)
    assert [(each.name, each.ranks, each.state) for each in report.stale] == [("synced_module", "0-1", "stale")]
    assert [version for version, _ in look(old)] == ["one", "one"]
    now = [where for _, where in look(old)]
    assert all(before != after for before, after in zip(slots, now, strict=True)), "they work in the new tree"
    assert not rollback(made.mesh, workspace).stale, "ranks have what the hosts have again"

    # The agent of a host ends when the switch has begun: nobody knows whether it has switched.
    (folder / "synced_module.py").write_text("VERSION = 'the third'\n")
    real = StagingRun.commit

    def commit(run: StagingRun) -> None:
        os.kill(agents[1], signal.SIGKILL)
        wait_until(lambda: not alive(agents[1]), "the agent is dead")
        real(run)

    with monkeypatch.context() as patch, pytest.raises(SyncError, match="node1") as caught:
        patch.setattr(StagingRun, "commit", commit)
        sync(made.mesh, workspace)
    partly: Any = caught.value.report
    assert "has switched" in partly.hosts[1].error
    assert [host.switched for host in partly.hosts] == [True, False]
    assert [each.name for each in partly.stale] == ["synced_module"]
    fresh = made.mesh.spawn_procs().spawn("fresh", Importer)
    assert [version for version, _ in look(fresh)] == ["the third", "one"]
    assert sync(made.mesh, workspace).hosts[1].switched
    shutdown_context().get(PATIENCE)


def test_ranks_that_started_before_the_first_sync_are_named_and_moved_by_a_restart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "store"))
    workspace = Workspace(dirs=["."])
    procs = this_host().spawn_procs({"gpus": 2}, name="early")
    try:
        early = procs.spawn("early", Importer)
        assert {where for _, where in look(early)} == {str(folder)}
        report = sync(procs, workspace)
        said = "ranks 0-1 of mesh early do not run this tree: they started before the first sync"
        assert any(said in note for note in report.notes)
        (folder / "synced_module.py").write_text("VERSION = 'second'\n")
        assert not sync(procs, workspace).notes, "it is said once"
        live = sync_live(procs, workspace, how="restart")
        assert not live.sync.notes
        assert {version for version, _ in look(early)} == {"second"}
        assert all(where.startswith(str(tmp_path / "store")) for _, where in look(early))
    finally:
        procs.stop().get(PATIENCE)


def test_a_rank_that_does_not_respond_is_named_and_holds_up_nobody(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "store"))
    workspace = Workspace(dirs=["."])
    sync(this_host(), workspace)
    procs = this_host().spawn_procs({"gpus": 2}, name="half")
    try:
        importers = procs.spawn("importers", Importer)
        look(importers)
        sync(procs, workspace)  # the ranks have been met
        silent = procs.pids().get(1)
        os.kill(silent, signal.SIGSTOP)
        wait_until(lambda: 1 in procs.unresponsive(), "its host agent has missed it")
        (folder / "synced_module.py").write_text("VERSION = 'second'\n")
        report = sync(procs, workspace)
        assert [(each.name, each.ranks) for each in report.stale] == [("synced_module", "0")]
        assert any("rank 1 of mesh half cannot be told: it does not respond (" in note for note in report.notes)
        os.kill(silent, signal.SIGCONT)
        wait_until(lambda: not procs.unresponsive(), "it responds again")
        assert [(each.name, each.ranks) for each in sync(procs, workspace).stale] == [("synced_module", "0-1")]
    finally:
        procs.stop().get(PATIENCE)
