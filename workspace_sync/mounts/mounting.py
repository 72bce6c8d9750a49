"""Create, find and remove mounts of this user, and the processes that serve and guard them.

The source of a mount in the table is ``monarch_kernel:KIND:PID NAMESPACE:PID:START:RANDOM``: it shows a later process
that this package created the mount, and whether its server process is still alive.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch_kernel import programs
from monarch_kernel.introspection import ToolHost, spawn_tool
from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from workspace_sync.model.errors import MountError
from workspace_sync.mounts import guardian

_DEVICE = "/dev/fuse"
_PREFIX = "monarch_kernel"
_TYPE = f"fuse.{_PREFIX}"
_MAX_READ = 1 << 20
#: The kernel's readahead for a mount, where it can be set (KiB); the default is 128.
_READ_AHEAD = 1024
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOATIME = 1, 2, 4, 1024


@dataclass(frozen=True)
class Mounted:
    """An entry of the mount table that this package has created for this user."""

    mountpoint: bytes
    source: bytes
    device: str

    @property
    def dead(self) -> bool:
        """Whether its server has certainly ended. The server of another container never counts as ended."""
        _, _kind, namespace, pid, started, _ = self.source.split(b":")
        return namespace == _pid_namespace() and _start_time(int(pid)) != started

    def unmount(self) -> str:
        """Unmount it, even while it is in use; return the reason of a failure, or ""."""
        if guardian.source_at(self.mountpoint) != self.source:
            return ""
        return guardian.unmount(self.mountpoint, fusermount())


def mine() -> Iterator[Mounted]:
    """Iterate over the mounts in the mount table that this package has created for this user."""
    with open("/proc/self/mountinfo", "rb") as table:
        lines = table.read().splitlines()
    for line in lines:
        before, _, after = line.partition(b" - ")
        fields = before.split()
        kind, source, options = after.split()[:3]
        source = guardian.unescaped(source)
        if kind != _TYPE.encode() or source.count(b":") != 5 or not source.startswith(_PREFIX.encode() + b":"):
            continue
        if b"user_id=%d" % os.geteuid() in options.split(b","):
            yield Mounted(guardian.unescaped(fields[4]), source, fields[2].decode())


def sweep() -> list[str]:
    """Unmount leftover mounts of killed processes of this user; return the mount points."""
    return [os.fsdecode(each.mountpoint) for each in mine() if each.dead and not each.unmount()]


def fusermount() -> str:
    """Return the program with which users mount; "" if there is none."""
    return shutil.which("fusermount3") or shutil.which("fusermount") or ""


def namespace() -> tuple[str, str]:
    """Identify the boot of the machine and the PID namespace: processes with equal values see each other's pids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), _pid_namespace().decode()


class Mount:
    """A folder mounted by this process.

    Args:
        path: the mount point, absolute. It must be an empty folder of this user; it is created if it is missing.
        kind: the kind of mount, for the mount table.
        outside: device and inode of a folder that must not contain the mount point.

    Attributes:
        path: the mount point, with links resolved.
        device: the descriptor for the kernel's requests; a session takes it over.

    Raises:
        MountError: it cannot be mounted; the message names the reason and the remedy.
    """

    def __init__(self, path: str, kind: str, outside: tuple[int, int] | None = None) -> None:
        sweep()
        _check_device()
        self.path = _resolved(path)
        started = _start_time(os.getpid()).decode()
        space = _pid_namespace().decode()
        self.source = f"{_PREFIX}:{kind}:{space}:{os.getpid()}:{started}:{secrets.token_hex(4)}"
        if any(each.mountpoint == os.fsencode(self.path) for each in mine()):
            raise MountError(
                f"{self.path} is already mounted by monarch_kernel: close that mount, or name another folder"
            )
        self._made = _make_folder(self.path)
        try:
            folder = _open_folder(self.path, outside)
            try:
                self.device = _mount(folder, self.path, self.source)
            finally:
                os.close(folder)
        except BaseException:
            self._remove_folder()
            raise
        self._set_read_ahead()

    def close(self) -> None:
        """Unmount, even while the mount is in use; remove the mount point if it was created for the mount.

        Raises:
            MountError: it could not be unmounted.
        """
        entry = self._entry()
        why = "" if entry is None else entry.unmount()
        if why:
            raise MountError(f"{self.path} could not be unmounted: {why}")
        self._remove_folder()

    def guard(self) -> subprocess.Popen[bytes]:
        """Start the guardian, which unmounts as soon as this process has ended."""
        return start_guardian(os.getpid(), self.path, self.source)

    def _entry(self) -> Mounted | None:
        return next((each for each in mine() if each.source == self.source.encode()), None)

    def _remove_folder(self) -> None:
        if self._made:
            with suppress(OSError):
                os.rmdir(self.path)

    def _set_read_ahead(self) -> None:
        entry = self._entry()
        if entry is not None:
            with suppress(OSError), open(f"/sys/class/bdi/{entry.device}/read_ahead_kb", "w", encoding="ascii") as file:
                file.write(str(_READ_AHEAD))


def start_guardian(pid: int, mountpoint: str, source: str) -> subprocess.Popen[bytes]:
    """Start the guardian of a mount: it unmounts as soon as the server, a process of this machine, has ended.

    It gets a minimal environment, so that it does not count as a process of the run that it watches.
    """
    command = [sys.executable, "-I", "-S", guardian.__file__, str(pid), mountpoint, source, fusermount()]
    started = programs.start(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    assert started.stdout is not None
    started.stdout.readline()
    started.stdout.close()
    return started


# -- the steps of a mount -----------------------------------------------------------------------------


def _check_device() -> None:
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise MountError(
            f"{socket.gethostname()} has no {_DEVICE}: load the kernel's module (modprobe fuse), or start the "
            f"container with the device (--device {_DEVICE})"
        ) from None
    except OSError as e:
        raise MountError(
            f"{_DEVICE} may not be used on {socket.gethostname()} ({e.strerror}): start the container with the device "
            f"(--device {_DEVICE}), or ask its administrator for access"
        ) from None


def _resolved(path: str) -> str:
    path = os.path.expanduser(path)
    if not os.path.isabs(path):
        raise MountError(f"the mount point {path!r} is relative: name the whole path, as hosts have different folders")
    path = os.path.normpath(path)
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _make_folder(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise MountError(
            f"the mount point {path} cannot be made, as {os.path.dirname(path)} does not exist: make that folder first"
        ) from None
    except OSError as e:
        raise MountError(f"the mount point {path} cannot be made: {e.strerror}") from None
    return True


def _open_folder(path: str, outside: tuple[int, int] | None) -> int:
    """Open the mount point, and check that it is suitable."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):
            raise MountError(f"the mount point {path} is not a folder") from None
        if e.errno == errno.ENOTCONN:
            raise MountError(
                f"the mount point {path} has a dead mount of another program: unmount it (fusermount3 -uz {path})"
            ) from None
        raise MountError(f"the mount point {path} cannot be opened: {e.strerror}") from None
    try:
        about = os.fstat(folder)
        if about.st_uid != os.geteuid():
            raise MountError(f"the mount point {path} belongs to another user: name a folder of your own")
        at = path
        while outside is not None:
            here = os.stat(at)
            if (here.st_dev, here.st_ino) == outside:
                raise MountError(f"the mount point {path} is below the folder that is mounted: name one outside")
            if at == "/":
                break
            at = os.path.dirname(at)
        if os.listdir(folder):
            raise MountError(f"the mount point {path} is not empty: name an empty folder, or one that does not exist")
    except BaseException:
        os.close(folder)
        raise
    return folder


def _mount(folder: int, path: str, source: str) -> int:
    """Mount over an open folder, so that no other folder can take its place; return the device."""
    device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = (
        f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},"
        f"default_permissions,max_read={_MAX_READ}"
    )
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    target = f"/proc/self/fd/{folder}"
    if libc.mount(source.encode(), target.encode(), _TYPE.encode(), ctypes.c_ulong(flags), options.encode()) == 0:
        return device
    number = ctypes.get_errno()
    os.close(device)
    if number not in (errno.EPERM, errno.EACCES):
        raise MountError(f"{path} cannot be mounted on {socket.gethostname()}: {os.strerror(number)}")
    program = fusermount()
    if not program:
        raise MountError(
            f"{path} cannot be mounted on {socket.gethostname()}: only root may without the program fusermount3 (apt "
            "install fuse3); a container also needs the right to mount (--cap-add SYS_ADMIN)"
        )
    return _mount_with(program, path, source)


def _mount_with(program: str, path: str, source: str) -> int:
    """Mount with fusermount3, which passes the device to this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    options = f"ro,nosuid,nodev,noatime,default_permissions,max_read={_MAX_READ},fsname={source},subtype={_PREFIX}"
    with ours, theirs:
        done = programs.run(
            [program, "-o", options, "--", path],
            env={"PATH": os.defpath, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=30,
        )
        theirs.close()
        if done.returncode == 0:
            _, sent, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
            for level, kind, data in sent:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    device = array.array("i", data[:4])[0]
                    os.set_inheritable(device, False)
                    return device
    said = done.stderr.decode("utf-8", "replace").strip()
    raise MountError(
        f"{path} cannot be mounted on {socket.gethostname()}: {said or 'fusermount3 failed'}; a container needs the "
        "right to mount (--cap-add SYS_ADMIN)"
    )


# -- identity of processes ---------------------------------------------------------------------------


def _pid_namespace() -> bytes:
    return b"%d" % os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> bytes:
    """Return the start time of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return b""
    return b"" if fields[0] in (b"Z", b"X") else fields[19]


def is_folder(path: str) -> tuple[int, int]:
    """Return device and inode of a folder.

    Raises:
        MountError: it does not exist, or is not a folder.
    """
    try:
        about = os.stat(path)
    except OSError as e:
        raise MountError(f"{path} cannot be mounted elsewhere: {e.strerror}") from None
    if not stat.S_ISDIR(about.st_mode):
        raise MountError(f"{path} cannot be mounted elsewhere: it is not a folder")
    return about.st_dev, about.st_ino


# -- the processes of a mount ---------------------------------------------------------------------

#: The time limit for a host to mount or unmount, and for the client to read its folder (seconds).
PATIENCE = 600.0


class MountedAt(NamedTuple):
    """A mount, as described by its host.

    Attributes:
        pid: of its server process.
        path: the mount point, with links resolved.
        source: its name in the mount table.
        near: whether the caller sees that process, and so can monitor it.
    """

    pid: int
    path: str
    source: str
    near: bool


class Processes:
    """Processes started for one mount."""

    def __init__(self) -> None:
        self._tools: list[Any] = []
        self._guardians: list[subprocess.Popen[bytes]] = []

    def spawn(self, host: ToolHost, name: str, actor: Any, *arguments: object) -> Any:
        """Start a process with one actor on a host."""
        procs = spawn_tool(host, name)
        self._tools.append(procs)
        return procs.spawn(name, actor, *arguments)

    def guard(self, mounted: MountedAt) -> None:
        """Unmount a mount on this machine as soon as its process ends, even if it is killed.

        The server cannot do this itself: if this process is killed, all processes started by its host agent are killed,
        too.
        """
        if mounted.near:
            self._guardians.append(start_guardian(mounted.pid, mounted.path, mounted.source))

    def end(self) -> None:
        """End all processes."""
        for stopping in [tool.stop("the mount is closed") for tool in self._tools]:
            stopping.get(PATIENCE)
        for each in self._guardians:
            each.wait(PATIENCE)
        self._tools.clear()
        self._guardians.clear()


def why(error: Exception) -> str:
    """Describe the reason of a failed call to one host in a sentence."""
    if isinstance(error, SupervisionError):
        causes = [failure.death.cause for failure in error.failures if failure.death is not None]
        return causes[0] if causes else str(error)
    if isinstance(error, ActorError) and error.exception is not None:
        return str(error.exception)
    return str(error)
