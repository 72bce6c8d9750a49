"""What mounting needs: another user's mount with fusermount3, and the sentence where there is no FUSE."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[3]

# What the mount needs is imported before root is given up: the other user may not read where this interpreter lies.
SERVER = """
import os, sys
from workspace_sync.model.manifest import FileEntry, Folder, digest_of, seal
from workspace_sync.mounts.mounting import Mount, mine, start_guardian
from workspace_sync.mounts.protocol import Caching, FuseSession
from workspace_sync.mounts.host_mount import ManifestTree
uid, at = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setgid(uid); os.setuid(uid)

class Word:
    def read(self, entry, offset, size, done):
        done([b"hello"[offset:offset + size]])

entry = FileEntry(5, 0o644, digest_of(b"hello"))
mount = Mount(at, "remotemount")
tree = ManifestTree(seal({b"": Folder(0o755, {b"word": entry}, {}, {})}), Word())
session = FuseSession(mount.device, tree, Caching(None, True))
assert session.wait_ready(10)
if os.fork() == 0:
    with open(at + "/word") as file:
        print(file.read(), flush=True)
    os._exit(0)
os.wait()
[each] = mine()
print(f"user_id={uid}" in open("/proc/self/mounts").read(), each.dead)
mount.close()
print(os.path.exists(at), list(mine()))
"""


# Where no udev runs, the device is open to root alone; elsewhere its mode is 666.
WITH_OPEN_DEVICE = 'mknod -m 666 "$1/fuse" c 10 229 && mount --bind "$1/fuse" /dev/fuse && shift && exec "$@"'


def test_another_user_mounts_with_fusermount(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("fusermount3") or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can become another user, who needs fusermount3 and /dev/fuse")
    user = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(prefix="mk-nobody-", dir="/tmp") as folder:
        os.chown(folder, user.pw_uid, user.pw_gid)
        command = [sys.executable, "-c", SERVER, str(user.pw_uid), f"{folder}/mnt"]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", WITH_OPEN_DEVICE, "sh", str(tmp_path), *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
    assert done.stdout.split("\n")[:3] == ["hello", "True False", "False []"], done.stderr


REFUSED = """
import sys
from workspace_sync.mounts import MountError
from workspace_sync.mounts.mounting import Mount
try:
    Mount(sys.argv[1], "remotemount")
except MountError as e:
    print(e)
"""


WITHOUT_DEVICE = 'mount -t tmpfs none /dev && exec "$@"'
WITHOUT_RIGHT = 'exec setpriv --bounding-set -sys_admin --inh-caps -sys_admin env PATH=/nowhere "$@"'


@pytest.mark.parametrize(("start", "why"), [(WITHOUT_DEVICE, "modprobe fuse"), (WITHOUT_RIGHT, "apt install fuse3")])
def test_where_nothing_can_be_mounted_it_says_what_is_missing(tmp_path: Path, start: str, why: str) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("only root has namespaces to make and capabilities to give up")
    program = [sys.executable, "-c", REFUSED, str(tmp_path / "mnt")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", start, "sh", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert why in done.stdout.replace("\n", " "), done.stderr
    assert not (tmp_path / "mnt").exists()
