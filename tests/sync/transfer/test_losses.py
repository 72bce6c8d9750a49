"""Deaths, stalls and full disks in the middle of a sync: who has what afterwards, and what the report says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, wait_until
from tests.sync.hosts import StoreHosts
from tests.sync.trees import Snapshot, difference, snapshot
from tests.waiting import patience
from workspace_sync import StoreError, SyncError, SyncProgress, Workspace, WorkspaceBusyError, sync

Hosts = Callable[..., StoreHosts]
#: How many workers the tests share.
STANDING = 3
MIB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A tree of 48 MiB, in files of 1 MiB."""
    root = tmp_path / "large"
    root.mkdir()
    draw = random.Random(3)
    for number in range(48):
        (root / f"f{number}.bin").write_bytes(draw.randbytes(MIB))
    return root


def at_root(tree: Path) -> Workspace:
    return Workspace(dirs={tree: ""})


def agent_pid(worker: Any) -> int:
    """The process of the agent on a worker: the only rank there."""
    (pid,) = worker.ranks()
    return pid


class Midway:
    """A progress callback that does something once, when so much has arrived."""

    def __init__(self, act: Callable[[], object], share: float = 0.2) -> None:
        self.done = False
        self._act = act
        self._share = share

    def __call__(self, progress: SyncProgress) -> None:
        if not self.done and progress.phase == "send" and progress.done > self._share * max(1, progress.total):
            self.done = True
            self._act()


def same(got: Snapshot | None, expected: Snapshot) -> bool:
    return got is not None and not difference(got, expected)


def nothing_staged(store: Path) -> bool:
    """Whether no slot of a store is being changed: the next sync would have nothing to repair."""
    from workspace_sync.store.store import Store

    with Store(str(store)) as opened:
        return all(not opened.workspace(name).state().repair for name in opened.workspaces())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_agent_that_is_lost_midway_is_named_and_the_others_switch(
    store_hosts: Hosts, large: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workspace_sync.session.PATIENCE", 3.0)
    made = store_hosts(3)
    seed = large.parent / "seed"
    seed.mkdir()
    sync(made.mesh, at_root(seed))  # the agents run now
    pid = agent_pid(made.team[1])
    act = Midway(lambda: os.kill(pid, how))
    with pytest.raises(SyncError) as caught:
        sync(made.mesh, at_root(large), progress=act)
    assert act.done
    wait_until(lambda: not alive(pid), "an agent that does not answer is ended, as it holds a lock")
    report = caught.value.report
    assert [bool(host.error) for host in report.hosts] == [False, True, False]
    assert [host.switched for host in report.hosts] == [True, False, True]
    assert "node1" in str(caught.value)
    assert "agent" in report.hosts[1].error
    assert report.sent <= 1.5 * report.bytes
    assert sync(made.mesh, at_root(large)).hosts[1].switched


def test_a_worker_that_dies_midway_is_routed_around(own_hosts: Hosts, large: Path, tmp_path: Path) -> None:
    made = own_hosts(*(tmp_path / f"host{n}" for n in range(4)))
    act = Midway(lambda: made.team[2].process.kill())
    with pytest.raises(SyncError, match="node2") as caught:
        sync(made.mesh, at_root(large), progress=act)
    assert act.done
    expected = snapshot(large)
    trees = made.trees()
    assert [same(tree, expected) for tree in trees] == [True, True, False, True]
    assert trees[2] is None
    # A handle that still has the lost host names it, and serves the others.
    (large / "f0.bin").write_bytes(b"new")
    with pytest.raises(SyncError, match="1 of 4 hosts"):
        sync(made.mesh, at_root(large))
    expected = snapshot(large)
    assert [same(tree, expected) for tree in made.trees()] == [True, True, False, True]
    assert caught.value.report.sent <= 1.6 * caught.value.report.bytes


def test_a_full_disk_on_one_host_is_named_and_the_others_switch(
    limited_disk: Callable[[int], Path], own_hosts: Hosts, large: Path, tmp_path: Path
) -> None:
    small = limited_disk(24 * MIB)
    made = own_hosts(tmp_path / "one", small / "store", tmp_path / "three")
    with pytest.raises(StoreError, match="node1") as caught:
        sync(made.mesh, at_root(large))
    assert "No space left" in str(caught.value)
    expected = snapshot(large)
    trees = made.trees()
    assert trees[1] is None
    assert same(trees[0], expected)
    assert same(trees[2], expected)
    for file in sorted(large.iterdir())[8:]:
        file.unlink()
    report = sync(made.mesh, at_root(large))
    assert all(host.switched for host in report.hosts)
    assert [same(tree, snapshot(large)) for tree in made.trees()] == [True] * 3


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_ctrl_c_leaves_nothing_staged(store_hosts: Hosts, large: Path, share: float) -> None:
    made = store_hosts(2)
    (large / "f0.bin").rename(large.parent / "f0.bin")
    sync(made.mesh, at_root(large))
    before = made.trees()
    draw = random.Random(5)
    for number in range(1, 48):
        (large / f"f{number}.bin").write_bytes(draw.randbytes(MIB))
    with pytest.raises(KeyboardInterrupt):
        sync(made.mesh, at_root(large), progress=Midway(lambda: signal.raise_signal(signal.SIGINT), share))
    assert made.trees() == before
    assert all(map(nothing_staged, made.stores))
    report = sync(made.mesh, at_root(large))
    assert all(host.switched for host in report.hosts)
    assert [same(tree, snapshot(large)) for tree in made.trees()] == [True, True]


_CLIENT = """
import os, signal, sys
from pathlib import Path
from monarch_kernel.actor import attach_to_workers
from workspace_sync import Workspace, sync

def show(progress):
    if progress.phase == "send" and progress.done > 0.3 * max(1, progress.total):
        os.kill(os.getpid(), signal.SIGKILL)

hosts = attach_to_workers(workers=sys.argv[3:], key_file=sys.argv[1])
sync(hosts, Workspace(dirs={sys.argv[2]: ""}), progress=show)
"""


def test_a_client_that_is_killed_leaves_the_old_trees_and_the_next_sync_goes_on(
    store_hosts: Hosts, large: Path
) -> None:
    made = store_hosts(2)
    seed = snapshot(large)
    sync(made.mesh, at_root(large))
    draw = random.Random(6)
    for number in range(48):
        (large / f"f{number}.bin").write_bytes(draw.randbytes(MIB))
    command = [sys.executable, "-c", _CLIENT, str(made.team.key_file), str(large), *made.team.urls]
    ended = subprocess.run(command, timeout=patience(60), capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert [same(tree, seed) for tree in made.trees()] == [True, True]
    report = sync(made.mesh, at_root(large))
    assert [same(tree, snapshot(large)) for tree in made.trees()] == [True, True]
    assert report.sent < report.bytes, "what had arrived was not sent again"


def test_two_clients_of_one_workspace(store_hosts: Hosts, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for a while, and then is told who is at it."""
    monkeypatch.setattr("workspace_sync.session.BUSY_WAIT", 0.5)
    made = store_hosts(2)
    sync(made.mesh, at_root(large))
    (large / "f1.bin").write_bytes(b"new")
    from workspace_sync.store.store import Store

    with Store(str(made.stores[1])) as store:
        (name,) = store.workspaces()
        with store.workspace(name).lock("ann on box (process 7)", 10):
            with pytest.raises(WorkspaceBusyError, match=r"ann on box \(process 7\)"):
                sync(made.mesh, at_root(large))
            assert made.trees()[0] == made.trees()[1], "no host switches alone"
    sync(made.mesh, at_root(large))
    assert [same(tree, snapshot(large)) for tree in made.trees()] == [True, True]
