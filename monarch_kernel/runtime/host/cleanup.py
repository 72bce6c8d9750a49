"""Find and kill the remaining processes of a run, and remove its folder.

Every descendant of a host agent inherits the agent's environment (``/proc/<pid>/environ``), which has a marker that
names the run. Any survivor (the fork server, the controller, the next launch) can therefore find the remaining
processes of a run, without records that could be lost with the process that keeps them.

One kind of process is spared: torch's managers of shared memory (``torch_shm_manager``). A process outside the run that
holds such a tensor is terminated when its manager is gone, and only the manager removes the files in ``/dev/shm``. A
manager ends by itself two seconds after its last client. At the end of a run, a small process enforces that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from monarch_kernel import environment, programs
from monarch_kernel.protocol.private_files import PrivateFolder, temporary_folder

MARKER = environment.RUN
"""The environment variable that an agent is started with; its value is the name of the run (``run_name``)."""

AGENT_MARKER = environment.AGENT
"""The same for one agent of the run. It distinguishes a dead agent's remaining processes from those of its
successor.
"""

ROOT_MARKER = environment.ROOT
"""On a worker, the same for one controller; set for programs that ranks execute, not for forked ranks themselves."""

FORK_SERVER = "monarch-forks"
"""The fork server's process name (``/proc/<pid>/comm``)."""

SHM_MANAGER = "torch_shm_manag"
"""The name of torch's managers of shared memory in ``/proc/<pid>/comm``, which has at most 15 characters."""

MANAGER_LIMIT = 10.0
"""A manager of a run that is over is killed when it has had no client for this long (seconds)."""

PREFIX = "monarch"
_LONGEST_BASE = 40

#: How long to wait for killed processes, which may be in an uninterruptible system call (seconds).
_PATIENCE = 5.0
#: How long a process may show no environment while it executes a program (seconds).
_EXEC_TIME = 0.2


def kill_group(pid: int) -> None:
    """SIGKILL a process and its process group, if they still exist."""
    for kill in (os.kill, os.killpg):  # a rank that has just started has no group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def kill_below(last: int) -> list[tuple[int, int]]:
    """SIGKILL and reap every descendant of this process, which must be a subreaper, until none is left.

    The child ``last`` is killed last: until then, it takes over this work if this process is killed. Managers of shared
    memory are left to end by themselves, within a limit. Returns the (pid, wait status) of this process's children, own
    and adopted.
    """
    reaped: list[tuple[int, int]] = []
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        below = _below(os.getpid())
        managers = set(filter(_is_manager, below))
        below -= managers
        for pid in below - {last} or below:
            _signal(pid)
        try:
            while (got := os.waitpid(-1, os.WNOHANG))[0]:
                reaped.append(got)
        except ChildProcessError:
            break
        if not below:
            _let_end(managers)
            break
        # Killed processes are exiting; this process adopts their children when they are gone.
        time.sleep(0.001)
    return reaped


def kill_adopted(own: int) -> None:
    """SIGKILL all children of this process, a subreaper, except ``own``, and their descendants. Reaps none.

    Managers of shared memory are spared.
    """
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        adopted = [pid for pid, parent in _parents().items() if parent == os.getpid() and pid != own]
        adopted = [pid for pid in adopted if not _is_manager(pid)]
        if not adopted:
            return
        for pid in adopted:
            _signal(pid)
        time.sleep(0.001)  # this process adopts their children when they are gone


def _parents() -> dict[int, int]:
    """Return the living processes of this machine, each with its parent."""
    parents: dict[int, int] = {}
    for pid in _all_pids():
        _note_parent(pid, parents)
    # A process that ended while this was read had children: find their new parent.
    lost = {pid for pid, parent in parents.items() if parent and parent not in parents}
    for pid in lost:
        del parents[pid]
        _note_parent(pid, parents)
    return parents


def _note_parent(pid: int, parents: dict[int, int]) -> None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name, in parentheses, may itself contain parentheses and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return
    # A zombie with several threads is still ending: it keeps its children until the last thread has ended.
    if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
        parents[pid] = int(fields[1])


def _below(root: int) -> set[int]:
    """Return the living descendants of a process."""
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
    """SIGKILL every process that carries a marker with this value, except this one. Return their number.

    The run's fork server is killed last, because it does the same work when its agent dies: if this process is
    killed meanwhile, the fork server completes the work.
    """
    marker = f"{variable}={value}".encode()
    killed: set[int] = set()
    managers: set[int] = set()
    start = time.monotonic()
    while time.monotonic() < start + _PATIENCE:
        ours: set[int] = set()
        unclear = False
        for pid in _all_pids():
            if pid != os.getpid():
                carries = _carries(pid, marker)
                if carries:
                    (managers if _is_manager(pid) else ours).add(pid)
                unclear = unclear or carries is None
        if not ours and (not unclear or time.monotonic() > start + _EXEC_TIME):
            break
        for pid in {pid for pid in ours if _command(pid) != FORK_SERVER} or ours:
            _kill_if(pid, marker)
            killed.add(pid)
        time.sleep(0.001)
    if variable != ROOT_MARKER:
        _let_end(managers)
    return len(killed)


def _is_manager(pid: int) -> bool:
    return _command(pid) == SHM_MANAGER


def _let_end(managers: set[int]) -> None:
    """Start a process that kills these managers of shared memory if they do not end when their clients have ended."""
    if managers:
        from monarch_kernel.runtime.host.start_command import interpreter_command

        env = {name: value for name, value in os.environ.items() if name not in (MARKER, AGENT_MARKER, ROOT_MARKER)}
        with open(os.devnull, "r+b", buffering=0) as null:
            files = dict.fromkeys(range(3), null.fileno())
            programs.spawn(interpreter_command(__name__, *map(str, managers)), env, files, new_session=True)


def main() -> None:
    """Wait until the managers of shared memory with the given pids have ended. Kill those without clients."""
    os.chdir("/")  # keep no file system busy
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # the agent's include the lock of the run folder
    waiting: dict[int, int] = {}  # pidfd -> pid
    for pid in map(int, sys.argv[1:]):
        with contextlib.suppress(ProcessLookupError):
            waiting[os.pidfd_open(pid)] = pid
    served = dict.fromkeys(waiting, time.monotonic())  # when each last had a client
    while waiting:
        for fd in select.select(list(waiting), [], [], MANAGER_LIMIT / 10)[0]:
            del waiting[fd]
        now = time.monotonic()
        for fd, pid in waiting.items():
            if _has_clients(pid):
                served[fd] = now
            elif now > served[fd] + MANAGER_LIMIT:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)


def _has_clients(pid: int) -> bool:
    """Return whether any Unix socket of a process is connected."""
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        with open(f"/proc/{pid}/net/unix", encoding="utf-8", errors="replace") as file:
            sockets = [line.split()[5:7] for line in file]  # state, inode
    except OSError:
        return False  # it has just ended
    return any(state == "03" and f"socket:[{inode}]" in links for state, inode in sockets)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def _carries(pid: int, marker: bytes) -> bool | None:
    """Return whether a process has the marker; None: unknown, because it may be executing a program right now."""
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
        # Check again: with the pidfd open, the pid cannot be reused unnoticed.
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
#: The files of a run folder. Other files are never removed from it.
_FILES = ("*.sock", "agent.log", "logs/*.log", "logs/*.log.old")


class RunDir:
    """A folder for the sockets and logs of one controller, whose lock shows that it is in use.

    The lock belongs to the open file, which the host agent inherits, so it is released when both are dead.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self.path = folder.path

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock."""
        return self._folder.lock_fd

    def remove(self) -> None:
        """Remove the folder and release its lock. Only its owner calls this, at its end."""
        if self._folder.fd >= 0:
            _remove(self._folder)
            self._folder.close()


def make_run_dir(base: str | None = None, name: str = "") -> RunDir:
    """Create a run folder, mode 0700, and remove those that dead controllers have left.

    Args:
        base: the parent folder; None: the temporary folder.
        name: the name of the run; "": a new name.

    Raises:
        OSError: the temporary folder is not writable, or is not safe from other users, or there is a run of this name.
    """
    base = base or _base()
    remove_stale(base)
    folder = PrivateFolder.make(os.path.join(base, f"{PREFIX}-{os.getuid()}-{name or os.urandom(5).hex()}"))
    folder.claim(_WHAT)
    return RunDir(folder)


def run_name(path: str) -> str:
    """Return the name of the run of this folder."""
    return path.rpartition("-")[2]


def _base() -> str:
    return temporary_folder(_LONGEST_BASE)


def remove_stale(base: str | None = None) -> list[str]:
    """Clean up after runs of this user whose controller and agent are both dead. Return their folders."""
    base = base or _base()
    start = f"{PREFIX}-{os.getuid()}-"
    try:
        names = [name for name in os.listdir(base) if name.startswith(start)]
    except OSError:
        return []
    return [path for path in (os.path.join(base, name) for name in names) if remove_if_stale(path)]


def remove_if_stale(path: str) -> bool:
    """Kill the remaining processes of a run and remove its folder, unless a living process holds its lock."""
    try:
        with PrivateFolder.open(path) as folder:
            if not folder.take(_WHAT):
                return False
            kill_run(run_name(path))
            _remove(folder)
            return True
    except OSError:
        return False  # being created, being removed, or another user's


def remove_inherited_run_dir(path: str, lock_fd: int) -> None:
    """Remove a run folder whose lock this process has inherited."""
    try:
        with PrivateFolder.open(path) as folder:
            folder.hold(lock_fd, _WHAT)
            _remove(folder)
    except OSError as e:
        _warn(f"the run folder stays: {e}")


def _remove(folder: PrivateFolder) -> None:
    left = folder.remove(_FILES)
    if left:
        from monarch_kernel.display.quantities import few  # only here: a process that executes a worker loads little

        _warn(f"the run folder {folder.path} stays: it holds what is not ours: {few(left)}")


def _warn(text: str) -> None:
    import logging  # a process that only executes a worker must not load it

    logging.getLogger(__name__).warning("%s", text)
