"""``gather_mount``: folders of hosts at the client, as they are at any time, and nothing else of the hosts."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import this_host
from tests.conftest import alive, wait_until
from tests.sync.mounts.conftest import MountHosts, mounts_below
from tests.sync.trees import difference, make_tree, snapshot, write
from tests.waiting import patience
from workspace_sync.mounts import MountError, gather_mount

Hosts = Callable[[int], MountHosts]


def test_folders_of_all_hosts_are_below_each_other(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(2)
    at = tmp_path / "gathered"
    for number, home in enumerate(on.homes):
        make_tree(home / "out", seed=number, files=30, large=9 << 20)
    with gather_mount(on.mesh, "~/out", str(at)):
        assert sorted(os.listdir(at)) == ["hosts_0", "hosts_1"]
        for number, home in enumerate(on.homes):
            assert not difference(snapshot(home / "out"), snapshot(at / f"hosts_{number}"))
        with pytest.raises(OSError) as refused:
            (at / "hosts_0" / "new").write_text("x")
        assert refused.value.errno == errno.EROFS
        copied = subprocess.run(["cmp", on.homes[1] / "out" / "large.bin", at / "hosts_1" / "large.bin"], check=False)
        assert copied.returncode == 0
    assert not at.exists()


def test_a_growing_log_is_followed(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    at = tmp_path / "gathered"
    log = on.homes[0] / "logs" / "train.log"
    with gather_mount(on.mesh, "~/logs", str(at)):
        assert os.listdir(at / "hosts_0") == []  # the folder is not there yet
        write(log, "one\n")
        wait_until(lambda: os.listdir(at / "hosts_0") == ["train.log"], "the folder is seen")
        with open(at / "hosts_0" / "train.log") as reader, log.open("a") as writer:
            assert reader.read() == "one\n"
            for line in ("two\n", "three\n"):
                writer.write(line)
                writer.flush()
                wait_until(lambda line=line: reader.read() == line, "the line is seen")
            log.rename(log.with_suffix(".1"))  # as rotation does
            write(log, "new\n")
            writer.write("last\n")
            writer.flush()
            wait_until(lambda: reader.read() == "last\n", "the reader keeps its file")
        wait_until(lambda: (at / "hosts_0" / "train.log").read_text() == "new\n", "the new file is seen")


def test_a_checkpoint_that_is_replaced_is_never_mixed(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    at = tmp_path / "gathered"
    old, new = random.Random(1).randbytes(9 << 20), random.Random(2).randbytes(9 << 20)
    checkpoint = on.homes[0] / "out" / "model.pt"
    write(checkpoint, old)
    with gather_mount(on.mesh, "~/out", str(at)), open(at / "hosts_0" / "model.pt", "rb") as reader:
        first = reader.read(1 << 20)
        write(checkpoint.with_suffix(".new"), new)
        os.replace(checkpoint.with_suffix(".new"), checkpoint)
        wait_until(lambda: (at / "hosts_0" / "model.pt").read_bytes() == new, "the new one is seen")
        assert first + reader.read() == old


def test_nothing_outside_of_the_folder_is_reached(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    at, out = tmp_path / "gathered", on.homes[0] / "out"
    write(on.homes[0] / "secret", "secret")
    write(out / "a" / "file", "inside")
    (out / "up").symlink_to("../secret")
    (out / "absolute").symlink_to(on.homes[0] / "secret")
    (out / "detour").symlink_to("a/../../secret")
    (out / "folder").symlink_to("..")
    (out / "inside").symlink_to("a/file")
    (out / "whole").symlink_to(out / "a" / "file")
    (out / "a" / "back").symlink_to("../a/file")
    os.mkfifo(out / "pipe")
    with gather_mount(on.mesh, "~/out", str(at)):
        here = at / "hosts_0"
        for name in ("up", "absolute", "detour", "folder"):
            assert (here / name).is_symlink()
            with pytest.raises(PermissionError):
                os.readlink(here / name)
            with pytest.raises(PermissionError):
                os.listdir(here / name)
        for name in ("inside", "whole", "a/back"):
            assert (here / name).read_text() == "inside"
        assert "pipe" not in os.listdir(here)
        assert not (here / "pipe").exists()
        # Not through the mount either: what the host's actor is asked, as a client that was taken over could ask it.
    from workspace_sync.mounts.served_folder import ServedFolder

    served = this_host().spawn_procs(name="served").spawn("served", ServedFolder, str(out))
    for path in (b"..", b"../secret", b"a/../../secret", b"up", b"folder/secret", b"/etc/passwd", b"a//file", b"a/."):
        about = served.stat.call_one(path).get(patience(20))
        opened = served.open.call_one(path, (0, 0)).get(patience(20))
        assert path == b"up" or about in (-errno.EINVAL, -errno.ENOTDIR, -errno.ENOENT), path
        assert isinstance(opened, int)
    assert (
        served.open.call_one(b"up", served.stat.call_one(b"up").get(patience(20)).identity).get(patience(20))
        == -errno.EACCES
    )


def test_each_host_can_have_another_path_and_a_file_alone(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(2)
    for number in range(2):
        write(tmp_path / "data" / f"hosts_{number}" / "train.log", f"host {number}\n")
    with gather_mount(on.mesh, f"{tmp_path}/data/$SUBDIR/train.log", str(tmp_path / "gathered")):
        assert [(tmp_path / "gathered" / f"hosts_{n}").read_text() for n in range(2)] == ["host 0\n", "host 1\n"]


def test_one_host_without_dimensions_is_mounted_itself(tmp_path: Path) -> None:
    write(tmp_path / "data" / "file", "here")
    with gather_mount(this_host(), str(tmp_path / "data"), str(tmp_path / "gathered")):
        name = "file" if not this_host().extent else f"{'_'.join(f'{k}_0' for k in this_host().extent)}/file"
        assert (tmp_path / "gathered" / name).read_text() == "here"


def test_a_dead_host_is_an_error_below_its_name_only(own_hosts: Hosts, tmp_path: Path) -> None:
    on = own_hosts(2)
    at = tmp_path / "gathered"
    for home in on.homes:
        write(home / "out" / "file", home.name)
    mount = gather_mount(on.mesh, "~/out", str(at))
    assert (at / "hosts_0" / "file").read_text() == "home0"
    reader = os.open(at / "hosts_0" / "file", os.O_RDONLY)
    os.kill(on.team[0].pid, signal.SIGKILL)
    on.team[0].process.wait()

    def error_of(work: Callable[[], Any]) -> int:
        try:
            work()
        except OSError as e:
            return e.errno
        return 0

    wait_until(lambda: error_of(lambda: os.listdir(at / "hosts_0")) == errno.EIO, "the host's part is an error")
    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
    wait_until(lambda: error_of(lambda: os.pread(reader, 10, 0)) == errno.EIO, "so are its open files")
    os.close(reader)
    assert (at / "hosts_1" / "file").read_text() == "home1"
    assert sorted(os.listdir(at)) == ["hosts_0", "hosts_1"]
    mount.close()


def test_another_user_cannot_read_what_is_gathered(hosts: Hosts, tmp_path: Path, other_user: Any) -> None:
    on = hosts(1)
    write(on.homes[0] / "out" / "file", "secret", 0o666)
    at = Path("/tmp") / f"mk-gathered-{os.getpid()}"
    with gather_mount(on.mesh, "~/out", str(at)):
        program = """
        try:
            os.listdir(sys.argv[1])
        except OSError as e:
            print(e.errno)
        """
        assert other_user.run(program, at).split() == [str(errno.EACCES)]


CLIENT = """
import os, sys
from monarch_kernel.actor import attach_to_workers
from workspace_sync.mounts import gather_mount
hosts = attach_to_workers(workers=[sys.argv[1]], key_file=sys.argv[2])
mount = gather_mount(hosts, "~/out", sys.argv[3])
print("ready", flush=True)
input()
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_client_that_ends_leaves_nothing_mounted_here(hosts: Hosts, tmp_path: Path, how: str) -> None:
    on = hosts(1)
    write(on.homes[0] / "out" / "file", "here")
    at = tmp_path / "gathered"
    command = [sys.executable, "-c", CLIENT, on.team[0].url, str(on.team.key_file), str(at)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        assert (at / "hosts_0" / "file").read_text() == "here"
        [pid] = [int(each.source.split(b":")[3]) for each in mounts_below(tmp_path)]
        if how == "killed":
            client.kill()
        else:
            client.communicate("\n", timeout=patience(30))
        client.wait(patience(30))
    wait_until(lambda: not mounts_below(tmp_path), "the mount is gone")
    wait_until(lambda: not alive(pid), "its server has ended")
    on.team[0].wait_idle()


def test_what_cannot_be_gathered_is_refused_with_a_reason(hosts: Hosts, tmp_path: Path) -> None:
    on = hosts(1)
    write(tmp_path / "full" / "file", "")
    for remote, local, why in (
        ("relative", tmp_path / "mnt", "relative"),
        ("~/out", tmp_path / "full", "is not empty"),
        ("~/out", tmp_path / "full" / "file", "is not a folder"),
        ("~/out", tmp_path / "no" / "such", "make that folder first"),
    ):
        with pytest.raises(MountError, match=why):
            gather_mount(on.mesh, remote, str(local))
    mount = gather_mount(on.mesh, "~/out", str(tmp_path / "mnt"))
    with pytest.raises(MountError, match="already mounted"):
        gather_mount(on.mesh, "~/out", str(tmp_path / "mnt"))
    mount.close()
    mount.close()
    with pytest.raises(MountError, match="is closed"), mount:
        pass
