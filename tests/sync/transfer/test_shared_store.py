"""Hosts whose home folder is the same: they have one store, in which one of them makes the trees for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from monarch_kernel.actor import Actor, endpoint
from tests.sync.hosts import StoreHosts, current_tree, leftovers
from tests.sync.trees import difference, snapshot
from tests.waiting import patience
from workspace_sync import Workspace, rollback, sync, verify

Hosts = Callable[..., StoreHosts]


class Reader(Actor):
    """Reads a file of its working directory."""

    @endpoint
    def read(self, name: str) -> str:
        """Its text."""
        return Path(name).read_text()


def test_one_host_makes_the_tree_for_all(own_hosts: Hosts, tmp_path: Path) -> None:
    tree = tmp_path / "project"
    tree.mkdir()
    (tree / "said").write_text("one")
    workspace = Workspace(dirs={tree: ""})
    shared, own = tmp_path / "shared", tmp_path / "own"
    hosts = own_hosts(shared, own, shared, shared)

    report = sync(hosts.mesh, workspace)
    assert [bool(host.shares) for host in report.hosts] == [False, False, True, True]
    assert all(host.switched and host.digest == report.digest for host in report.hosts)
    assert [host.received > 0 for host in report.hosts] == [True, True, False, False]
    for store in (shared, own):
        got = current_tree(store)
        assert got is not None
        assert not difference(got, snapshot(tree))

    here = os.getcwd()
    os.chdir(tree)
    try:
        readers = hosts.mesh.spawn_procs({"gpus": 1}).spawn("reader", Reader)
    finally:
        os.chdir(here)
    assert set(readers.read.call("said").get(patience(60)).values()) == {"one"}

    (tree / "said").write_text("two")
    assert all(host.switched for host in sync(hosts.mesh, workspace).hosts)
    assert set(readers.read.call("said").get(patience(60)).values()) == {"two"}
    assert all(host.switched for host in rollback(hosts.mesh, workspace).hosts)
    assert set(readers.read.call("said").get(patience(60)).values()) == {"one"}
    assert not any(host.problems for host in verify(hosts.mesh, workspace).hosts)
    assert not leftovers(shared)


def test_without_the_host_that_made_it_another_one_does(own_hosts: Hosts, tmp_path: Path) -> None:
    tree = tmp_path / "project"
    tree.mkdir()
    (tree / "said").write_text("one")
    workspace = Workspace(dirs={tree: ""})
    shared = tmp_path / "shared"
    hosts = own_hosts(shared, shared)
    sync(hosts.mesh, workspace)
    (tree / "said").write_text("two")
    report = sync(hosts.mesh.slice(hosts=1), workspace)
    assert [(host.shares, host.switched) for host in report.hosts] == [("", True)]
    got = current_tree(shared)
    assert got is not None
    assert not difference(got, snapshot(tree))
    assert [host.switched for host in sync(hosts.mesh, workspace).hosts] == [False, False]
