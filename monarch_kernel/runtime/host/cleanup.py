"""Finding and killing what a run has left behind, and removing its folder.

Every process below a host agent has the agent's environment in ``/proc/<pid>/environ``, and in it a
marker that names the run folder. So what survives (the fork server, the controller, the next
launch) can find what is left of a run without any bookkeeping that could die with its keeper.
"""

from __future__ import annotations

import logging
import os
import signal
import time

from monarch_kernel import environment
from monarch_kernel.protocol.private_files import PrivateFolder, temporary_folder

log = logging.getLogger(__name__)

MARKER = environment.RUN
"""Environment variable that the agent is started with; its value is the run folder."""

AGENT_MARKER = environment.AGENT
"""The same for one agent of the run: a dead agent is replaced, and its successor must not be mistaken for its rest."""

ROOT_MARKER = environment.ROOT
"""On a worker, the same for one controller; in the environment of what ranks execute, not in that of forked ranks."""

FORK_SERVER = "monarch-forks"
"""What the fork server calls itself (``/proc/<pid>/comm``)."""

PREFIX = "monarch"
_LONGEST_BASE = 40

#: A killed process in an uninterruptible system call may take this long to go (seconds).
_PATIENCE = 5.0
#: For so long a process that executes a program may show no environment (seconds).
_EXEC_TIME = 0.2


def kill_group(pid: int) -> None:
    """SIGKILL a process and its process group, if any of it is left."""
    for kill in (os.kill, os.killpg):  # the group is not there yet in the first moments of a rank
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def kill_below(last: int) -> list[tuple[int, int]]:
    """SIGKILL and reap every process below this one, which must be a subreaper, until none is left.

    The child ``last`` goes last: as long as it lives it would go on in our place if we were killed now.
    Returns the (pid, wait status) of our children, given and adopted ones.
    """
    reaped: list[tuple[int, int]] = []
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        below = _below(os.getpid())
        for pid in below - {last} or below:
            _signal(pid)
        try:
            while (got := os.waitpid(-1, os.WNOHANG))[0]:
                reaped.append(got)
        except ChildProcessError:
            break
        # What was killed is on its way out; its own children come to us when it is gone.
        time.sleep(0.001)
    return reaped


def kill_adopted(own: int) -> None:
    """SIGKILL all children of this process, a subreaper, but its ``own`` one, and all below them. Reaps none."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        adopted = [pid for pid, parent in _parents().items() if parent == os.getpid() and pid != own]
        if not adopted:
            return
        for pid in adopted:
            _signal(pid)
        time.sleep(0.001)  # what was below them comes to us when they are gone


def _parents() -> dict[int, int]:
    """The living processes of this machine, and the parent of each."""
    parents: dict[int, int] = {}
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The command, in parentheses, may itself hold parentheses and blanks.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            parents[pid] = int(fields[1])
    return parents


def _below(root: int) -> set[int]:
    """The living descendants of a process."""
    parents = _parents()
    below: set[int] = set()
    for pid in parents:
        path = {pid}
        parent = parents[pid]
        while parent in parents and parent != root and parent not in below and parent not in path:
            path.add(parent)
            parent = parents[parent]
        if parent == root or parent in below:
            below |= path
    return below - {root}


def kill_run(value: str, variable: str = MARKER) -> int:
    """SIGKILL every process that carries a marker with this value, except this one. Returns how many.

    The run's fork server goes last, as it does the same work when its agent is dead: so one of us may be killed.
    """
    marker = f"{variable}={value}".encode()
    killed: set[int] = set()
    start = time.monotonic()
    while time.monotonic() < start + _PATIENCE:
        ours: set[int] = set()
        unclear = False
        for pid in _all_pids():
            if pid != os.getpid():
                carries = _carries(pid, marker)
                if carries:
                    ours.add(pid)
                unclear = unclear or carries is None
        if not ours and (not unclear or time.monotonic() > start + _EXEC_TIME):
            break
        for pid in {pid for pid in ours if _command(pid) != FORK_SERVER} or ours:
            _kill_if(pid, marker)
            killed.add(pid)
        time.sleep(0.001)
    return len(killed)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def _carries(pid: int, marker: bytes) -> bool | None:
    """Whether a process has the marker; None: cannot be said, it may be about to execute a program."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
        if environ:
            return marker in environ.split(b"\0")
        os.readlink(f"/proc/{pid}/exe")  # fails for zombies and the kernel's threads
        return None
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


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# -- run folders ------------------------------------------------------------------------------

_WHAT = "run folder"
#: What lies in a run folder: all that is ever removed from one.
_FILES = ("*.sock", "agent.log", "logs/*.log", "logs/*.log.old")


class RunDir:
    """A folder for the sockets and logs of one controller, known as living by a lock.

    The lock belongs to the open file, which the host agent inherits: it is free when neither lives.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self.path = folder.path

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock."""
        return self._folder.lock_fd

    def remove(self) -> None:
        """Remove the folder and give up its lock. Only for its owner, at the end."""
        if self._folder.fd >= 0:
            _remove(self._folder)
            self._folder.close()


def make_run_dir(base: str | None = None) -> RunDir:
    """A new run folder, mode 0700; removes those that dead controllers have left.

    Raises:
        OSError: the temporary folder cannot be written, or is not safe from other users.
    """
    base = base or _base()
    remove_stale(base)
    folder = PrivateFolder.make(os.path.join(base, f"{PREFIX}-{os.getuid()}-{os.urandom(5).hex()}"))
    folder.claim(_WHAT)
    return RunDir(folder)


def _base() -> str:
    return temporary_folder(_LONGEST_BASE)


def remove_stale(base: str | None = None) -> list[str]:
    """Clean up after runs of this user whose controller and agent are both dead. Returns their folders."""
    base = base or _base()
    start = f"{PREFIX}-{os.getuid()}-"
    try:
        names = [name for name in os.listdir(base) if name.startswith(start)]
    except OSError:
        return []
    return [path for path in (os.path.join(base, name) for name in names) if remove_if_stale(path)]


def remove_if_stale(path: str) -> bool:
    """Kill what is left of a run and remove its folder, unless a living process holds its lock."""
    try:
        with PrivateFolder.open(path) as folder:
            if not folder.take(_WHAT):
                return False
            kill_run(path)
            _remove(folder)
            return True
    except OSError:
        return False  # being made right now, being removed right now, or none of ours


def remove_run_dir(path: str, lock_fd: int) -> None:
    """Remove a run folder whose lock this process has inherited."""
    try:
        with PrivateFolder.open(path) as folder:
            folder.hold(lock_fd, _WHAT)
            _remove(folder)
    except OSError as e:
        log.warning("the run folder stays: %s", e)


def _remove(folder: PrivateFolder) -> None:
    left = folder.remove(_FILES)
    if left:
        log.warning("the run folder %s stays: it holds what is not ours: %s", folder.path, ", ".join(left))
