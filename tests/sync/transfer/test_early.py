"""First syncs, whose content is sent while the scan goes on: what arrives is what the manifest says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.sync.hosts import StoreHosts, leftovers
from tests.sync.transfer.test_losses import Midway, agent_pid, at_root, same
from tests.sync.trees import make_tree, snapshot
from tests.waiting import patience
from workspace_sync import ScanError, SyncProgress, sync
from workspace_sync.scanning import hashing

Hosts = Callable[..., StoreHosts]
#: How many workers the tests share.
STANDING = 2
MIB = 1 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A tree with everything that a folder can hold, and 40 MiB of small and large files."""
    root = make_tree(tmp_path / "source", files=60)
    draw = random.Random(4)
    for number in range(56):
        (root / f"f{number}.bin").write_bytes(draw.randbytes(MIB // 2))
    return root


@pytest.fixture
def at_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Callable[[], object]], None]:
    """``at_read(name, offset, act)``: calls something when the scan is about to read there, once."""

    def install(name: str, offset: int, act: Callable[[], object]) -> None:
        real = hashing.read_fully
        todo = [act]

        def read(fd: int, into: memoryview, at: int) -> bool:
            if todo and at == offset and os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{name}"):
                todo.pop()()
            return real(fd, into, at)

        monkeypatch.setattr(hashing, "read_fully", read)

    return install


def equal(hosts: StoreHosts, tree: Path) -> bool:
    expected = snapshot(tree)
    return all(same(found, expected) for found in hosts.trees())


def test_content_is_there_before_the_scan_is_over(
    store_hosts: Hosts, large: Path, at_read: Callable[..., None]
) -> None:
    made = store_hosts(2)

    def something_arrived() -> None:
        for store in made.stores:
            wait_until(lambda store=store: any(store.glob("w/*/slots/tree-1/*.bin")), f"{store} has a file")
            assert not list(store.glob("w/*/current"))

    at_read("f55.bin", 0, something_arrived)
    report = sync(made.mesh, at_root(large))
    assert equal(made, large)
    assert report.sent <= 1.2 * report.bytes
    assert all(leftovers(store) == [] for store in made.stores)
    assert sync(made.mesh, at_root(large)).sent == 0


def test_what_changes_while_it_is_sent_arrives_as_it_is(
    store_hosts: Hosts, large: Path, at_read: Callable[..., None]
) -> None:
    made = store_hosts(1)

    def rewrite() -> None:
        with (large / "large.bin").open("r+b") as file:
            file.write(b"new" * MIB)

    at_read("large.bin", 6 * MIB, rewrite)  # its first pieces are on their way
    sync(made.mesh, at_root(large))
    assert equal(made, large)


def test_a_scan_that_fails_leaves_nothing(store_hosts: Hosts, large: Path, at_read: Callable[..., None]) -> None:
    made = store_hosts(2)

    def fail() -> None:
        raise OSError(5, "Input/output error")

    at_read("f55.bin", 0, fail)
    with pytest.raises(ScanError, match="f55.bin"):
        sync(made.mesh, at_root(large))
    for store in made.stores:
        assert leftovers(store) == []
        assert not list(store.glob("w/*/slots/*"))
        assert not list(store.glob("w/*/kept/*"))
    sync(made.mesh, at_root(large))
    assert equal(made, large)


def test_ctrl_c_leaves_nothing(store_hosts: Hosts, large: Path) -> None:
    made = store_hosts(2)
    with pytest.raises(KeyboardInterrupt):
        sync(made.mesh, at_root(large), progress=Midway(lambda: signal.raise_signal(signal.SIGINT)))
    for store in made.stores:
        assert leftovers(store) == []
        assert not list(store.glob("w/*/slots/*"))
    sync(made.mesh, at_root(large))
    assert equal(made, large)


_CLIENT = """
import os, signal, sys, time
from pathlib import Path
from monarch_kernel.actor import attach_to_workers
from workspace_sync import Workspace, sync
from workspace_sync.scanning import hashing

key_file, tree, stores, urls = sys.argv[1], sys.argv[2], sys.argv[3:5], sys.argv[5:]
really_read = hashing.read_fully

def read(fd, into, at):
    if os.readlink(f"/proc/self/fd/{fd}").endswith("/f55.bin"):
        while any(len(list(Path(store).glob("w/*/slots/tree-1/*.bin"))) < 30 for store in stores):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return really_read(fd, into, at)

hashing.read_fully = read
sync(attach_to_workers(workers=urls, key_file=key_file), Workspace(dirs={tree: ""}))
"""


def test_what_a_killed_client_has_sent_is_used_again(store_hosts: Hosts, large: Path) -> None:
    """It dies while it scans, when each host has more than half of the files."""
    made = store_hosts(2)
    arguments = [str(made.team.key_file), str(large), *map(str, made.stores), *made.team.urls]
    command = [sys.executable, "-c", _CLIENT, *arguments]
    ended = subprocess.run(command, timeout=patience(60), capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert made.trees() == [None, None]
    for worker in made.team:
        worker.wait_idle()
    report = sync(made.mesh, at_root(large))
    assert equal(made, large)
    assert report.sent < 0.8 * report.bytes
    assert any("what is whole in it is used again" in note for host in report.hosts for note in host.notes)
    for store in made.stores:
        assert leftovers(store) == []
        assert not list(store.glob("w/*/kept/*"))


def test_an_agent_that_is_killed_meanwhile_is_named_and_the_others_switch(store_hosts: Hosts, large: Path) -> None:
    made = store_hosts(2)
    with pytest.raises(Exception, match="node1") as caught:
        sync(made.mesh, at_root(large), progress=Midway(lambda: os.kill(agent_pid(made.team[1]), signal.SIGKILL)))
    assert [host.switched for host in caught.value.report.hosts] == [True, False]  # type: ignore[attr-defined]
    sync(made.mesh, at_root(large))
    assert equal(made, large)
    assert not list(made.stores[1].glob("w/*/kept/*"))


def test_a_store_that_has_the_content_of_another_workspace_does_not_get_it_again(
    store_hosts: Hosts, large: Path, tmp_path: Path
) -> None:
    made = store_hosts(1)
    sync(made.mesh, at_root(large))
    other = tmp_path / "moved"
    large.rename(other)
    report = sync(made.mesh, at_root(other))
    assert report.sent < 0.1 * report.bytes


def test_a_large_one_is_announced_before_anything_is_sent(
    store_hosts: Hosts, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workspace_sync.scanning.index.FILES", 10)
    (large / ".gitignore").write_text("*.log\n")
    (large / "x.log").write_text("left out")
    made = store_hosts(1)
    said: list[str] = []

    def show(progress: SyncProgress) -> None:
        if progress.note:
            said.append(progress.note)
            assert not list(made.stores[0].glob("w/*/slots/*"))

    sync(made.mesh, at_root(large), progress=show)
    assert len(said) == 1
    assert str(large) in said[0]
    assert ".gitignore:1: *.log" in said[0]
