"""What a sync refuses and survives: the error names host and path, and every host keeps the tree that it has."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.otheruser import OtherUser
from tests.sync.hosts import StoreHosts, current_folder, leftovers
from tests.sync.trees import difference, make_tree, snapshot, write
from tests.waiting import patience
from workspace_sync import Workspace, sync, verify
from workspace_sync.model.errors import ScanError, SyncError
from workspace_sync.model.sync_report import SyncReport
from workspace_sync.store.store import Store

Hosts = Callable[..., StoreHosts]
MB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree of 1 MB with everything that a folder can hold."""
    return make_tree(tmp_path / "source", large=9 * MB, files=40)


def synced(hosts: StoreHosts, tree: Path) -> SyncReport:
    """Sync, which must succeed on all hosts."""
    report = sync(hosts.mesh, Workspace(dirs={tree: ""}))
    expected = snapshot(tree)
    for found in hosts.trees():
        assert found is not None and not difference(found, expected), difference(found or {}, expected)
    return report


def refused(hosts: StoreHosts, tree: Path, *said: str, error: type[SyncError] = SyncError) -> SyncError:
    """Sync, which must fail with a message that has all of this; afterwards nothing is left staged."""
    with pytest.raises(error) as caught:
        sync(hosts.mesh, Workspace(dirs={tree: ""}))
    for each in said:
        assert each in str(caught.value), str(caught.value)
    for store in hosts.stores:
        assert leftovers(store) == []
    return caught.value


# -- at the client --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../elsewhere", "/etc", "a/../../b"])
def test_a_place_outside_the_tree_is_refused(small: Path, place: str) -> None:
    with pytest.raises(ValueError, match="outside"):
        Workspace(dirs={small: place})


def test_a_link_out_of_the_tree_is_named_and_nothing_is_sent(store_hosts: Hosts, small: Path, tmp_path: Path) -> None:
    hosts = store_hosts(1)
    synced(hosts, small)
    before = hosts.trees()
    write(tmp_path / "secret", "not yours")
    (small / "pkg0" / "leak").symlink_to(tmp_path / "secret")
    refused(hosts, small, "pkg0/leak", str(tmp_path / "secret"), ".meshignore", error=ScanError)
    assert hosts.trees() == before


def test_pipes_sockets_devices_and_set_uid_stay_at_home_and_odd_names_arrive(
    store_hosts: Hosts, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = store_hosts(1)
    names = (
        b"-rf",
        b"a\nb",
        b"$(touch taken)",
        b"\xff\x1b[31m",
        b"; rm -r .",
        "\u202egpj.exe".encode(),
        b" ",
        b"%s",
        b"x" * 255,
    )
    for name in names:
        with open(os.fsencode(small) + b"/pkg0/" + name, "wb") as file:
            file.write(b"of " + name)
    for name, mode in (("set-uid", 0o6755), ("sticky", 0o1644)):
        write(small / name, name)
        (small / name).chmod(mode)
    expected = snapshot(small)
    os.mkfifo(small / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        fd = os.open(small, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{fd}/socket")
        os.close(fd)
        if os.geteuid() == 0:
            os.mknod(small / "memory", stat.S_IFCHR | 0o666, os.makedev(1, 1))
            os.mknod(small / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))
        sync(hosts.mesh, Workspace(dirs={small: ""}))
    (found,) = hosts.trees()
    assert found is not None
    for name, mode in ((b"set-uid", 0o755), (b"sticky", 0o644)):
        kind, _, *rest = expected[name]
        expected[name] = (kind, oct(mode), *rest)
    assert not difference(found, expected), difference(found, expected)
    assert b"pkg0/$(touch taken)" in found and not {b"pipe", b"socket", b"memory", b"disk", b"taken"} & found.keys()
    assert "\x1b[31m" not in "".join(capsys.readouterr())


def test_a_file_that_changes_without_pause_is_named(store_hosts: Hosts, small: Path) -> None:
    hosts = store_hosts(1)
    synced(hosts, small)
    before = hosts.trees()
    with written_all_the_time(small / "pkg0" / "log"):
        refused(hosts, small, "pkg0/log", "change", error=ScanError)
    assert hosts.trees() == before
    synced(hosts, small)


@contextmanager
def written_all_the_time(path: Path) -> Iterator[None]:
    """A program that rewrites a file of some MB from its start, again and again."""
    end = threading.Event()
    started = threading.Event()

    def work() -> None:
        number = 0
        with path.open("wb", buffering=0) as file:
            while not end.is_set():
                number += 1
                os.pwrite(file.fileno(), number.to_bytes(8, "big") * MB, 0)
                started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


#: A client that is not root, which may read everything; it prints the error.
UNPRIVILEGED = """
import os, sys
from workspace_sync import Workspace
from workspace_sync.scanning import Index, scan
workspace = Workspace(dirs={sys.argv[2]: ""})
scan(workspace, Index(workspace.id, sys.argv[2] + "-root"))  # imports what the other user may not read
os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)
try:
    scan(workspace, Index(workspace.id, sys.argv[2] + "-client"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_files_that_this_user_may_not_read_are_named(shared: Path, other_user: OtherUser) -> None:
    tree = make_tree(shared / "source", files=10, large=1)
    write(tree / "pkg0" / "private", "of root", 0o600)
    command = [sys.executable, "-c", UNPRIVILEGED, str(other_user.uid), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.startswith("ScanError"), done.stdout + done.stderr
    assert "cannot be read by you" in done.stdout and "pkg0/private" in done.stdout


# -- on a host ------------------------------------------------------------------------------------------


def test_a_host_without_room_is_named_and_the_others_go_on(
    limited_disk: Callable[..., Path], own_hosts: Hosts, small: Path, tmp_path: Path
) -> None:
    hosts = own_hosts(tmp_path / "roomy", limited_disk(40 * MB) / "store")
    synced(hosts, small)
    old = hosts.trees()[1]
    write(small / "much", os.urandom(60 * MB))
    error = refused(hosts, small, "node1", str(hosts.stores[1]), "free some space")
    assert hosts.trees() == [snapshot(small), old]
    assert isinstance(error.report, SyncReport)
    assert [host.switched for host in error.report.hosts] == [True, False]
    (small / "much").unlink()
    synced(hosts, small)


def test_a_disk_that_is_full_in_the_middle_gets_its_room_back(
    limited_disk: Callable[..., Path], own_hosts: Hosts, small: Path, tmp_path: Path
) -> None:
    """No more files can be made there, which nothing announces before."""
    disk = limited_disk(200 * MB, 700)
    hosts = own_hosts(tmp_path / "roomy", disk / "store")
    synced(hosts, small)
    old = hosts.trees()[1]
    for number in range(700):
        write(small / f"many{number % 9}" / f"file{number}", f"{number}")
    refused(hosts, small, "node1", str(hosts.stores[1]), "disk is full")
    assert hosts.trees() == [snapshot(small), old]
    assert os.statvfs(disk).f_ffree > 200
    for number in range(700):
        (small / f"many{number % 9}" / f"file{number}").unlink()
    synced(hosts, small)


def test_a_read_only_target_is_named(
    limited_disk: Callable[..., Path], own_hosts: Hosts, small: Path, tmp_path: Path
) -> None:
    disk = limited_disk(80 * MB)
    hosts = own_hosts(tmp_path / "roomy", disk / "store")
    synced(hosts, small)
    old = hosts.trees()[1]
    write(small / "pkg0" / "more", "new")
    read_only = ["mount", "-o", "remount,ro", str(disk)]
    # It is refused for as long as the agent writes there: after a switch, the older slot follows.
    wait_until(lambda: subprocess.run(read_only, capture_output=True).returncode == 0, "nothing writes there")
    try:
        refused(hosts, small, "node1", str(disk), "read-only")
        assert hosts.trees() == [snapshot(small), old]
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    synced(hosts, small)


@pytest.mark.parametrize("length", [200, 185])
def test_a_name_that_is_too_long_there_is_named(
    short_name_disk: Path, own_hosts: Hosts, tmp_path: Path, length: int
) -> None:
    """Both are longer than what can be stored; the file system claims to take the second."""
    small = tmp_path / "source"
    write(small / "pkg0" / "short.py", "VALUE = 1\n")
    hosts = own_hosts(short_name_disk / "store", tmp_path / "roomy")
    synced(hosts, small)
    old = hosts.trees()[0]
    long = small / "pkg0" / ("n" * length)
    write(long, "long")
    refused(hosts, small, "node0", f"pkg0/{long.name}", "shorten it")
    assert hosts.trees() == [old, snapshot(small)]
    long.rename(small / "pkg0" / "n")
    synced(hosts, small)


def test_names_that_are_one_name_there_are_named(case_insensitive_disk: Path, own_hosts: Hosts, tmp_path: Path) -> None:
    small = tmp_path / "source"
    write(small / "pkg0" / "module.py", "VALUE = 1\n")
    hosts = own_hosts(case_insensitive_disk / "store", tmp_path / "roomy")
    synced(hosts, small)
    old = hosts.trees()[0]
    write(small / "pkg0" / "Module.py", "VALUE = 2\n")
    refused(hosts, small, "node0", "pkg0", "'module.py' and 'Module.py' are one name")
    assert hosts.trees() == [old, snapshot(small)]
    (small / "pkg0" / "Module.py").unlink()
    synced(hosts, small)


# -- a store that was tampered with ---------------------------------------------------------------------


def test_verify_finds_a_changed_file_and_the_next_sync_repairs_it(store_hosts: Hosts, small: Path) -> None:
    hosts = store_hosts(2)
    synced(hosts, small)
    victim = current_folder(hosts.stores[1]) / "tree" / "pkg0" / "sub0" / "m0.py"
    status = victim.stat()
    victim.write_bytes(b"X" * status.st_size)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = verify(hosts.mesh, Workspace(dirs={small: ""}))
    assert "pkg0/sub0/m0.py" in str(report.hosts[1]) and "m0.py" not in str(report.hosts[0])
    synced(hosts, small)


def test_changed_content_is_found_when_it_is_used(store_hosts: Hosts, small: Path) -> None:
    """The host has the bytes of a file that is renamed, and must not take them as they are."""
    hosts = store_hosts(1)
    synced(hosts, small)
    slots = current_folder(hosts.stores[0]).parents[1] / "slots"
    for file in slots.rglob("m0.py"):
        file.write_bytes(b"X" * file.stat().st_size)
    for file in slots.rglob("large.bin"):
        with file.open("r+b") as large:
            large.write(b"tampered")
    (small / "pkg0" / "sub0" / "m0.py").rename(small / "renamed.py")
    (small / "large.bin").rename(small / "renamed.bin")
    synced(hosts, small)


# -- two clients ----------------------------------------------------------------------------------------


def test_two_clients_that_sync_one_workspace_do_not_mix(store_hosts: Hosts, small: Path, tmp_path: Path) -> None:
    hosts = store_hosts(2)
    synced(hosts, small)
    write(small / "more.bin", os.urandom(8 * MB))
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sync.chaos.client", hosts.team.key_file, str(small), *hosts.team.urls],
            env={**os.environ, "MONARCH_KERNEL_SYNC_FOLDER": str(tmp_path / f"client{n}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    for client in clients:
        _, said = client.communicate(timeout=patience(90))
        assert client.returncode == 0 or "is being synced by" in said, said
    assert any(client.returncode == 0 for client in clients)
    expected = snapshot(small)
    assert hosts.trees() == [expected, expected]
    assert [leftovers(store) for store in hosts.stores] == [[], []]
    synced(hosts, small)


def test_a_large_tree_waits_for_a_busy_host(store_hosts: Hosts, tmp_path: Path) -> None:
    """Its manifest does not fit into a message, and is offered again when the host is free."""
    large = tmp_path / "source"
    for number in range(2500):
        write(large / f"folder{number % 50}" / f"{number}.txt", os.urandom(40))
    hosts = store_hosts(1)
    workspace = Workspace(dirs={large: ""})
    with Store(str(hosts.stores[0])) as store:
        lock = store.workspace(f"{workspace.name}-{workspace.id}").lock("another client", 5.0)
        lock.__enter__()
        release = threading.Timer(1.5, lambda: lock.__exit__(None, None, None))
        release.start()
        try:
            synced(hosts, large)
        finally:
            release.join()
