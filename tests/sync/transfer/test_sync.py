"""``sync`` over real hosts: what arrives, what crosses, and what a receipt says."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import this_host
from monarch_kernel.meshes import list_proc_meshes
from tests.sync.hosts import StoreHosts, current_tree
from tests.sync.trees import difference, mutate, snapshot
from workspace_sync import Workspace, rollback, status, sync, verify
from workspace_sync.transfer.calls import Calls

Hosts = Callable[[int], StoreHosts]
#: How many workers the tests share.
STANDING = 3


def all_equal(hosts: StoreHosts, tree: Path) -> None:
    expected = snapshot(tree)
    for got in hosts.trees():
        assert got is not None
        assert not (what := difference(got, expected)), what


def at_root(tree: Path) -> Workspace:
    return Workspace(dirs={tree: ""})


@pytest.mark.parametrize("hosts", [1, 3])
def test_every_host_has_the_tree_and_each_byte_was_sent_once(store_hosts: Hosts, tree: Path, hosts: int) -> None:
    made = store_hosts(hosts)
    report = sync(made.mesh, at_root(tree))
    all_equal(made, tree)
    assert report.sent <= 1.2 * report.bytes
    assert [host.switched for host in report.hosts] == [True] * hosts
    assert all(host.received >= report.bytes for host in report.hosts)
    assert {host.digest for host in report.hosts} == {report.digest}
    assert not list_proc_meshes(), "agents are no meshes of the user"

    draw = random.Random(7)
    for _ in range(3):
        mutate(tree, draw)
        report = sync(made.mesh, at_root(tree))
        all_equal(made, tree)
    again = sync(made.mesh, at_root(tree))
    assert again.sent == 0
    assert not any(host.switched for host in again.hosts)
    assert again.digest == report.digest


def test_this_host(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNEL_SYNC_FOLDER", str(tmp_path / "store"))
    report = sync(this_host(), at_root(tree))
    got = current_tree(tmp_path / "store")
    assert got is not None
    assert not difference(got, snapshot(tree))
    assert report.hosts[0].path.startswith(str(tmp_path / "store"))


def test_there_and_back(store_hosts: Hosts, tree: Path) -> None:
    made = store_hosts(2)
    first = sync(made.mesh, at_root(tree))
    before = snapshot(tree)
    (tree / "tool").write_text("changed")
    second = sync(made.mesh, at_root(tree))
    assert all(host.received < 20_000 for host in second.hosts)
    report = rollback(made.mesh, at_root(tree))
    assert [host.digest for host in report.hosts] == [first.digest] * 2
    for got in made.trees():
        assert got is not None
        assert not difference(got, before)


def test_a_dry_run_says_what_would_be_done_and_does_nothing(store_hosts: Hosts, tree: Path) -> None:
    made = store_hosts(2)
    sync(made.mesh, at_root(tree))
    before = made.trees()
    (tree / "tool").unlink()
    (tree / "fresh.bin").write_bytes(b"f" * 100_000)
    report = sync(made.mesh, at_root(tree), dry_run=True)
    assert report.dry_run
    assert [host.lacks for host in report.hosts] == [100_000] * 2
    assert [host.deleted for host in report.hosts] == [["tool"]] * 2
    assert report.sent < 10_000
    assert made.trees() == before
    assert [state.generation for state in status(made.mesh, at_root(tree))] == [1, 1]


def test_damage_on_a_host_is_found_and_mended(store_hosts: Hosts, tree: Path) -> None:
    made = store_hosts(2)
    sync(made.mesh, at_root(tree))
    victim = next(made.stores[1].glob("w/*/current/tree/tool"))
    victim.write_text("#!/bin/sh\nexit 1\n")
    found = verify(made.mesh, at_root(tree))
    assert [bool(host.problems) for host in found.hosts] == [False, True]
    assert "tool" in found.hosts[1].problems[0]
    sync(made.mesh, at_root(tree))
    all_equal(made, tree)
    assert not any(host.problems for host in verify(made.mesh, at_root(tree)).hosts)


def test_a_slice_and_a_mesh_of_ranks(store_hosts: Hosts, tree: Path) -> None:
    made = store_hosts(3)
    report = sync(made.mesh.slice(hosts=1), at_root(tree))
    assert [got is not None for got in made.trees()] == [False, True, False]
    procs: Any = made.mesh.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2})
    report = sync(procs, at_root(tree))
    assert len(report.hosts) == 2
    assert [host.switched for host in report.hosts] == [True, False]
    assert [got is not None for got in made.trees()] == [True, True, False]


def test_two_threads_sync_different_workspaces(store_hosts: Hosts, tree: Path, tmp_path: Path) -> None:
    made = store_hosts(2)
    other = tmp_path / "other"
    other.mkdir()
    (other / "only.bin").write_bytes(random.Random(2).randbytes(3 << 20))
    with ThreadPoolExecutor(2) as pool:
        reports = []
        for count in range(3):
            (other / "count").write_text(str(count))
            reports = list(pool.map(lambda folder: sync(made.mesh, at_root(folder)), [tree, other]))
    assert reports[0].workspace != reports[1].workspace
    for folder, report in zip((tree, other), reports, strict=True):
        expected = snapshot(folder)
        for host in report.hosts:
            assert not difference(snapshot(f"{host.path}/current/tree"), expected)


def test_ctrl_c_in_the_switch_is_raised_when_all_have_switched(
    store_hosts: Hosts, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store_hosts(2)
    real = Calls.ask

    def ask(calls: Calls, host: str, about: str, *args: Any) -> None:
        real(calls, host, about, *args)
        if about == "commit":
            monkeypatch.setattr(Calls, "ask", real)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Calls, "ask", ask)
    with pytest.raises(KeyboardInterrupt) as caught:
        sync(made.mesh, at_root(tree))
    assert caught.value.__notes__ == ["the switch had begun: the hosts have the new tree"]
    all_equal(made, tree)


def test_modules_that_two_folders_offer_and_old_extensions_are_named(store_hosts: Hosts, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "src" / "shared").mkdir(parents=True)
        (tmp_path / name / "src" / "shared" / "__init__.py").touch()
        (tmp_path / name / "setup.py").touch()
    (tmp_path / "one" / f"{name}.py").touch()
    (tmp_path / "one" / "fast.c").write_text("new")
    (tmp_path / "one" / "fast.so").write_text("old")
    os.utime(tmp_path / "one" / "fast.so", (1, 1))
    report = sync(store_hosts(1).mesh, [tmp_path / "one", tmp_path / "two"])
    one, two = (f"{tmp_path}/{name}/src" for name in ("one", "two"))
    assert report.notes == [
        f"{one} and {two} have a module shared each: ranks import that of the folder that comes first in sys.path",
        "one/fast.so is older than a source beside it: build it again",
    ]
