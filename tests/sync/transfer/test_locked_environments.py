"""Hosts that make an environment from a lock file and their own package caches, and those that cannot."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sync.environment.trees import installed
from tests.sync.environment.uv_projects import UvProject, packages, project, served
from tests.sync.hosts import StoreHosts, leftovers
from workspace_sync import CondaEnvironment, SyncReport, Workspace, sync, verify

#: Less than the package that is worth not to be sent.
SMALL = 256 << 10


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[UvProject]:
    """A locked project that was synced once, so that uv's cache has its packages; their index is gone then."""
    links = packages(tmp_path / "links")
    with served(links) as index:
        made = project(tmp_path, links, index)
        made.sync(made.folder / ".venv")
    yield made


def synced(hosts: StoreHosts, zoo: UvProject) -> SyncReport:
    env = CondaEnvironment(zoo.folder / ".venv", lock=zoo.folder / "uv.lock")
    return sync(hosts.mesh, Workspace({zoo.folder: ""}, env))


def files(workspace: str) -> dict[str, str]:
    """What is in the environment of a host, without the host's path, and without what has its hash."""
    found = installed(Path(workspace, "current", "env").resolve())
    plain = {path: each.replace(workspace.encode(), b"") for path, each in found.items() if isinstance(each, bytes)}
    return {path: hashlib.sha256(data).hexdigest() for path, data in plain.items() if not path.endswith("RECORD")}


def test_a_host_makes_what_it_can_and_the_other_gets_it(
    own_hosts: Callable[..., StoreHosts], zoo: UvProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(zoo.cache))
    hosts = own_hosts(tmp_path / "host0")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    hosts.stores += [tmp_path / "other"]
    hosts.team.start(env={"MONARCH_KERNEL_SYNC_FOLDER": str(hosts.stores[1])})
    hosts.mesh = hosts.team.attach()
    report = synced(hosts, zoo)
    first, second = report.hosts
    assert first.made > 1 << 20 and first.received < SMALL
    assert not second.made and second.received > 1 << 20
    assert first.environment == second.environment == report.environment
    notes = "\n".join(report.notes)
    assert f"{first.host} made 1.1 MB of the environment itself, from uv.lock" in notes
    assert f"{second.host} could not make the environment from uv.lock, so it was sent: " in notes
    trees = [files(host.path) for host in report.hosts]
    assert trees[0] == trees[1] and any(path.endswith("two_data.bin") for path in trees[0])
    assert not any(map(leftovers, hosts.stores))
    assert not any(host.problems for host in verify(hosts.mesh, Workspace({zoo.folder: ""})).hosts)
    # An environment that hosts have is not made again, and neither is a small change of it.
    assert not synced(hosts, zoo).notes
    (zoo.folder / ".venv" / "new.txt").write_text("x")
    assert [host.made for host in synced(hosts, zoo).hosts] == [0, 0]


def test_a_package_that_is_not_as_locked_is_sent(
    own_hosts: Callable[..., StoreHosts], zoo: UvProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's hash is one that the host's package does not have: nothing of it is used."""
    (wheel,) = zoo.links.glob("two-*.whl")
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = zoo.folder / "uv.lock"
    assert right in lock.read_text()
    lock.write_text(lock.read_text().replace(right, "0" * 64))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(zoo.cache))
    hosts = own_hosts(tmp_path / "host0")
    report = synced(hosts, zoo)
    assert not report.hosts[0].made and report.hosts[0].received > 1 << 20
    assert "could not make the environment from uv.lock" in "\n".join(report.notes)


def test_a_file_that_was_changed_after_it_was_installed_is_sent(
    own_hosts: Callable[..., StoreHosts], zoo: UvProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what the client has: a package that somebody has patched there is so on hosts."""
    (data,) = (zoo.folder / ".venv").rglob("two_data.bin")
    changed = os.urandom(1 << 20)
    data.unlink()  # it may be a hard link into uv's cache
    data.write_bytes(changed)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(zoo.cache))
    hosts = own_hosts(tmp_path / "host0")
    (host,) = synced(hosts, zoo).hosts
    assert 0 < host.made < SMALL and host.received > 1 << 20
    (there,) = Path(host.path, "current", "env").resolve().rglob("two_data.bin")
    assert there.read_bytes() == changed


def test_a_lock_file_that_is_not_there(zoo: UvProject) -> None:
    with pytest.raises(FileNotFoundError, match="there is no lock file"):
        CondaEnvironment(zoo.folder / ".venv", lock="none.lock")
