"""``remotemount``: what programs on the hosts see, and what crosses for it."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, wait_until
from tests.sync.mounts.conftest import MountHosts
from tests.sync.trees import difference, mutate, snapshot, write
from tests.waiting import patience
from workspace_sync.mounts import MountError, remotemount

Hosts = Callable[[int], MountHosts]


#: The number of the system call ``read``: x86-64, others.
READ = ("0", "63")


def egress(handle: Any) -> int:
    """How many bytes the client has sent."""
    return handle._opened.source.sent.call_one().get(patience(20))


def test_hosts_see_what_the_client_has_and_the_client_sends_it_once(hosts: Hosts, tree: Path) -> None:
    on = hosts(2)
    write(tree / ".gitignore", "*\n")
    write(tree / ".git" / "HEAD", "ref\n")
    write(tree / "__pycache__" / "m.pyc", "compiled")
    want = snapshot(tree)
    with remotemount(on.mesh, str(tree), "~/mnt") as handle:
        for home in on.homes:
            assert not difference(want, snapshot(home / "mnt"))
            assert subprocess.run([home / "mnt" / "tool"], check=False).returncode == 0
            times = [os.stat(place / "large.bin").st_mtime_ns for place in (tree, home / "mnt")]
            assert times[0] == times[1]
        size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
        assert egress(handle) <= 1.01 * size
    assert not any((home / "mnt").exists() for home in on.homes)


def test_nothing_can_be_written(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    with remotemount(on.mesh, str(tree), "~/mnt"):
        for change in (
            lambda at: (at / "new").write_text("x"),
            lambda at: (at / "tool").unlink(),
            lambda at: (at / "tool").chmod(0o777),
            lambda at: (at / "folder").mkdir(),
        ):
            with pytest.raises(OSError) as refused:
                change(on.homes[0] / "mnt")
            assert refused.value.errno == errno.EROFS


def test_a_large_file_is_read_where_it_is_needed(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    content = random.Random(5).randbytes(64 << 20)
    write(tmp_path / "source" / "weights", content)
    with remotemount(on.mesh, str(tmp_path / "source"), "~/mnt") as handle:
        with open(on.homes[0] / "mnt" / "weights", "rb") as file:
            assert os.pread(file.fileno(), 1000, 50 << 20) == content[50 << 20 : (50 << 20) + 1000]
        mapped = (
            "import mmap, sys\n"
            "file = open(sys.argv[1])\n"
            "print(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[-10:].hex())"
        )
        command = [sys.executable, "-c", mapped, on.homes[0] / "mnt" / "weights"]
        assert subprocess.check_output(command, text=True).strip() == content[-10:].hex()
        assert egress(handle) < 48 << 20
        assert (on.homes[0] / "mnt" / "weights").read_bytes() == content


READER = """
import hashlib, mmap, sys
file = open(sys.argv[1], "rb")
other = open(sys.argv[1], "rb")
memory = mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ)
start = file.read(1 << 20)
print(memory[:10].hex(), flush=True)
input()
print(hashlib.sha256(start + file.read()).hexdigest(), hashlib.sha256(memory[:]).hexdigest())
"""


def test_a_reader_keeps_its_version_when_the_mount_shows_another(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    at = on.homes[0] / "mnt"
    old = random.Random(1).randbytes(3 << 20)
    new = random.Random(2).randbytes(3 << 20)
    write(tree / "file", old)
    with remotemount(on.mesh, str(tree), "~/mnt") as handle:
        command = [sys.executable, "-c", READER, at / "file"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline().strip() == old[:10].hex()
            same = os.stat(at / "tool").st_ino
            write(tree / "file", new)
            assert (at / "file").read_bytes() == old
            handle.refresh()
            assert (at / "file").read_bytes() == new  # the page cache now has the new version
            assert reader.communicate("\n", timeout=patience(30))[0].split() == [hashlib.sha256(old).hexdigest()] * 2
        assert os.stat(at / "tool").st_ino == same
        assert (at / "file").read_bytes() == new


def test_every_change_is_seen_after_a_refresh(hosts: Hosts, tree: Path) -> None:
    on = hosts(2)
    draw = random.Random(3)
    with remotemount(on.mesh, str(tree), "~/mnt") as handle:
        for _ in range(3):
            for home in on.homes:
                snapshot(home / "mnt")  # the kernel now has all of it cached
            mutate(tree, draw)
            handle.refresh()
            want = snapshot(tree)
            for home in on.homes:
                assert not difference(want, snapshot(home / "mnt"))


def test_what_changed_at_the_client_unread_is_an_error_until_a_refresh(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    source, at = tmp_path / "source", on.homes[0] / "mnt"
    write(source / "data", random.Random(1).randbytes(2 << 20))
    write(source / "other", "other")
    with remotemount(on.mesh, str(source), "~/mnt") as handle:
        write(source / "data", random.Random(2).randbytes(2 << 20))
        with pytest.raises(OSError) as changed:
            (at / "data").read_bytes()
        assert changed.value.errno == errno.EIO
        assert (at / "other").read_text() == "other"
        handle.refresh()
        assert (at / "data").read_bytes() == random.Random(2).randbytes(2 << 20)


def test_modules_are_imported_and_a_running_program_finds_new_ones(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    source = tmp_path / "source"
    write(source / "package" / "__init__.py", "")
    write(source / "package" / "first.py", "VALUE = 1\n")
    program = f"""
import sys
sys.path.insert(0, {str(on.homes[0] / "mnt")!r})
import package.first
print(package.first.VALUE, flush=True)
input()
import importlib
try:
    import package.second
except ImportError:
    print("stale")
else:
    print(package.second.VALUE, importlib.reload(package.first).VALUE)
"""
    with remotemount(on.mesh, str(source), "~/mnt") as handle:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            write(source / "package" / "second.py", "VALUE = 2\n")
            write(source / "package" / "first.py", "VALUE = 10\n")
            handle.refresh()
            assert process.communicate("\n", timeout=patience(20))[0] == "2 10\n"


def test_another_folder_can_take_its_place(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    write(tmp_path / "one" / "name", "one")
    write(tmp_path / "two" / "name", "two")
    with remotemount(on.mesh, str(tmp_path / "one"), "~/mnt") as handle:
        assert (on.homes[0] / "mnt" / "name").read_text() == "one"
        handle.refresh(str(tmp_path / "two"))
        assert (on.homes[0] / "mnt" / "name").read_text() == "two"
        assert handle.sourcepath == str(tmp_path / "two")


def test_another_user_cannot_read(hosts: Hosts, tmp_path: Path, other_user: Any) -> None:
    on = hosts(1)
    write(tmp_path / "source" / "name", "secret", 0o666)
    at = Path("/tmp") / f"mk-mount-{os.getpid()}"
    with remotemount(on.mesh, str(tmp_path / "source"), str(at)):
        assert (at / "name").read_text() == "secret"
        said = other_user.run(
            """
            for path in sys.argv[1:]:
                try:
                    os.stat(path), os.listdir(path)
                except OSError as e:
                    print(e.errno)
            """,
            at,
        )
        assert said.split() == [str(errno.EACCES)]


# -- deaths --------------------------------------------------------------------------------------------


def test_a_killed_server_leaves_no_mount_and_the_folder_can_be_mounted_again(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    at = on.homes[0] / "mnt"
    at.mkdir()
    handle = remotemount(on.mesh, str(tree), "~/mnt").open()
    reader = os.open(at / "large.bin", os.O_RDONLY)
    [pid] = on.servers()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError):
        os.pread(reader, 1 << 20, 5 << 20)
    with suppress(OSError):
        os.close(reader)
    wait_until(lambda: not on.servers(), "the mount is gone")
    with pytest.raises(MountError, match="node0"):
        handle.refresh()
    handle.close()
    assert os.listdir(at) == []
    with handle.open():
        assert not difference(snapshot(tree), snapshot(at))


def test_a_dead_mount_is_removed_by_the_next(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    handle = remotemount(on.mesh, str(tree), "~/mnt").open()
    for guardian in handle._opened._processes._guardians:
        guardian.kill()
        guardian.wait()
    [pid] = on.servers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), "the server has ended")
    assert [each.dead for each in on.mounts()] == [True]
    with pytest.raises(OSError) as dead:
        os.listdir(on.homes[0] / "mnt")
    assert dead.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    handle.close()
    with handle.open():
        assert [each.dead for each in on.mounts()] == [False]
        assert not difference(snapshot(tree), snapshot(on.homes[0] / "mnt"))


def test_a_reader_that_waits_for_the_client_can_be_killed(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    with remotemount(on.mesh, str(tree), "~/mnt") as handle:
        [source] = handle._opened._processes._tools[0].pids().values()
        os.kill(source, signal.SIGSTOP)
        try:
            with subprocess.Popen(["cat", on.homes[0] / "mnt" / "large.bin"], stdout=subprocess.DEVNULL) as reader:
                in_read = Path(f"/proc/{reader.pid}/syscall")
                wait_until(lambda: in_read.read_text().split()[0] in READ, "it waits for the content")
                reader.send_signal(signal.SIGINT)
                reader.wait(patience(20))
        finally:
            os.kill(source, signal.SIGCONT)
        assert (on.homes[0] / "mnt" / "large.bin").read_bytes() == (tree / "large.bin").read_bytes()


def test_without_the_client_what_is_here_can_be_read_and_the_rest_is_an_error_at_once(hosts: Hosts, tree: Path) -> None:
    on = hosts(2)
    write(tree / "data", random.Random(1).randbytes(9 << 20))
    handle = remotemount(on.mesh, str(tree), "~/mnt").open()
    at = [home / "mnt" for home in on.homes]
    assert (at[0] / "large.bin").read_bytes() == (tree / "large.bin").read_bytes()
    [source] = handle._opened._processes._tools[0].pids().values()
    os.kill(source, signal.SIGKILL)
    assert (at[0] / "large.bin").read_bytes() == (tree / "large.bin").read_bytes()
    with pytest.raises(OSError) as lost:
        (at[0] / "data").read_bytes()
    assert lost.value.errno == errno.EIO
    with pytest.raises(MountError, match="cannot be mounted"):
        handle.refresh()
    handle.close()


def test_space_of_old_versions_is_given_back(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    file, at = tmp_path / "source" / "data", on.homes[0] / "mnt" / "data"
    write(file, random.Random(0).randbytes(9 << 20))
    with remotemount(on.mesh, str(file.parent), "~/mnt") as handle:
        [spool] = [p for p in Path(f"/proc/{on.servers()[0]}/fd").iterdir() if "/mounts/" in os.readlink(p)]
        for version in range(1, 6):
            at.read_bytes()
            write(file, random.Random(version).randbytes(9 << 20))
            handle.refresh()
            assert at.read_bytes() == file.read_bytes()
        wait_until(lambda: os.stat(spool).st_blocks * 512 < 25 << 20, "old versions take no space")


def test_the_other_hosts_go_on_when_one_is_lost(own_hosts: Hosts, tree: Path) -> None:
    on = own_hosts(2)
    handle = remotemount(on.mesh, str(tree), "~/mnt").open()
    os.kill(on.team[0].pid, signal.SIGKILL)
    wait_until(lambda: len(on.servers()) == 1, "the lost host has no mount")
    write(tree / "new", "new")
    with pytest.raises(MountError, match="1 of 2 hosts.*node0"):
        handle.refresh()
    assert not difference(snapshot(tree), snapshot(on.homes[1] / "mnt"))
    handle.close()


CLIENT = """
import os, sys
from monarch_kernel.actor import attach_to_workers
from workspace_sync.mounts import remotemount
hosts = attach_to_workers(workers=[sys.argv[1]], key_file=sys.argv[2])
handle = remotemount(hosts, sys.argv[3], "~/mnt").open()
print("ready", flush=True)
input()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_client_that_ends_leaves_no_mount(hosts: Hosts, tree: Path, how: str) -> None:
    on = hosts(1)
    command = [sys.executable, "-c", CLIENT, on.team[0].url, str(on.team.key_file), str(tree)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        [pid] = on.servers()
        reader = os.open(on.homes[0] / "mnt" / "large.bin", os.O_RDONLY)
        if how == "killed":
            client.kill()
        else:
            client.communicate("\n", timeout=patience(30))
        client.wait(patience(30))
        wait_until(lambda: not on.servers(), "the mount is gone")
        with pytest.raises(OSError):
            os.pread(reader, 1 << 20, 5 << 20)
        with suppress(OSError):
            os.close(reader)
    wait_until(lambda: not alive(pid), "its server has ended")
    on.team[0].wait_idle()


# -- bad input -----------------------------------------------------------------------------------------


def test_what_cannot_be_mounted_is_refused_with_a_reason(hosts: Hosts, tree: Path, tmp_path: Path) -> None:
    on = hosts(1)
    write(on.homes[0] / "full" / "file", "")
    write(on.homes[0] / "file", "")
    for source, at, why in (
        (tmp_path / "missing", "~/mnt", "missing.*No such file"),
        (tree / "tool", "~/mnt", "not a folder"),
        (tree, "~/full", "is not empty"),
        (tree, "~/file", "is not a folder"),
        (tree, "~/no/such/folder", "make that folder first"),
        (tree, "relative", "relative"),
        (tree, str(tree / "empty" / "mnt"), "below the folder"),
        (tree, None, "is not empty|below the folder"),
    ):
        with pytest.raises(MountError, match=why):
            remotemount(on.mesh, str(source), at).open()
    assert not on.servers()
    assert not (tree / "empty" / "mnt").exists()


def test_a_handle_is_used_between_open_and_close(hosts: Hosts, tree: Path) -> None:
    on = hosts(1)
    handle = remotemount(on.mesh, str(tree), "~/mnt")
    with pytest.raises(MountError, match=r"open\(\)"):
        handle.refresh()
    handle.close()
    with handle:
        with pytest.raises(MountError, match="already mounted"):
            handle.open()
        with pytest.raises(MountError, match="already mounted"):
            remotemount(on.mesh, str(tree), "~/mnt").open()
        assert not difference(snapshot(tree), snapshot(on.homes[0] / "mnt"))
    handle.close()
    with pytest.raises(MountError, match=r"open\(\)"):
        handle.refresh()
