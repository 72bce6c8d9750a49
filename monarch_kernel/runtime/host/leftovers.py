"""Finding and killing what a run has left behind, and removing its folder.

Every process below a host agent has the agent's environment in ``/proc/<pid>/environ``, and in it a
marker that names the run folder. So whoever survives (the fork server, the controller, the next
launch) can find what is left of a run without any bookkeeping that could die with its keeper.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time

MARKER = "MONARCH_KERNEL_RUN"
"""Environment variable that the agent is started with; its value is the run folder."""

PREFIX = "monarch"
LOCK = "lock"

#: A killed process in an uninterruptible system call may take this long to go (seconds).
_PATIENCE = 5.0


def kill_group(pid: int) -> None:
    """SIGKILL a process and its process group, if any of it is left."""
    for kill in (os.kill, os.killpg):  # the group is not there yet in the first moments of a rank
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def children(pid: int | None = None) -> list[int]:
    """The living children (zombies included) of a process, this one by default."""
    me = str(os.getpid() if pid is None else pid)
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command, in parentheses, may itself hold parentheses and blanks.
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[1].decode() == me:
                found.append(int(name))
    return found


def kill_children() -> list[tuple[int, int]]:
    """SIGKILL and reap every child of this process until none is left; for a subreaper: every descendant.

    Returns the (pid, wait status) of those reaped.
    """
    reaped: list[tuple[int, int]] = []
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        try:
            reaped.append(os.waitpid(-1, os.WNOHANG))
            while reaped[-1][0]:
                reaped.append(os.waitpid(-1, os.WNOHANG))
            reaped.pop()
        except ChildProcessError:
            break
        # Something was killed and is on its way out; its own children come to us when it is gone.
        time.sleep(0.001)
    return [(pid, status) for pid, status in reaped if pid]


def kill_run(run_dir: str) -> int:
    """SIGKILL every process that carries ``run_dir``'s marker, except this one. Returns how many."""
    marker = f"{MARKER}={run_dir}".encode()
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        left = [pid for pid in _all_pids() if pid != os.getpid() and _carries(pid, marker)]
        if not left:
            break
        for pid in left:
            _kill_if(pid, marker)
            killed.add(pid)
        time.sleep(0.001)
    return len(killed)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")  # empty for a zombie
    except OSError:
        return False


def _kill_if(pid: int, marker: bytes) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Looked at again, now that the number cannot be given to another process unnoticed.
        if _carries(pid, marker):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(pidfd)


# -- run folders ------------------------------------------------------------------------------


class RunDir:
    """A folder for the sockets and logs of one controller, known as living by a lock.

    The lock belongs to the open file, which the host agent inherits: it is free when neither lives.
    """

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    def remove(self) -> None:
        """Remove the folder and give up its lock. Only for its owner, at the end."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def make_run_dir(base: str | None = None) -> RunDir:
    """A new run folder, mode 0700; removes those that dead controllers have left.

    Raises:
        OSError: the temporary folder cannot be written.
    """
    base = base or tempfile.gettempdir()
    remove_stale(base)
    path = tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getuid()}-", dir=base)
    # Locked before it has its name: nobody else can find it unlocked.
    new = os.path.join(path, LOCK + ".new")
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(new, os.path.join(path, LOCK))
    return RunDir(path, lock)


def remove_stale(base: str | None = None) -> list[str]:
    """Clean up after runs of this user whose controller and agent are both dead. Returns their folders."""
    base = base or tempfile.gettempdir()
    start = f"{PREFIX}-{os.getuid()}-"
    try:
        names = [name for name in os.listdir(base) if name.startswith(start)]
    except OSError:
        return []
    return [path for path in (os.path.join(base, name) for name in names) if remove_if_stale(path)]


def remove_if_stale(path: str) -> bool:
    """Kill what is left of a run and remove its folder, unless a living process holds its lock."""
    try:
        if os.lstat(path).st_uid != os.getuid():
            return False
        lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # being made right now, being removed right now, or none of ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        kill_run(path)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock)
