"""The start of a worker: its parameters, how a process becomes one, and its announcement to waiting processes.

The process continues in ``worker_main``, or executes a new interpreter that does. Cleanup finds all processes of a
worker by the environment that they were started with. The environment of the worker must therefore contain the marks of
its run from the start. If launchers set them (``WorkerCommand.marks``), no new interpreter is needed. If one is needed,
the imports of this module are loaded twice before hosts can be used. They are therefore few, without msgspec or json,
and the parameters are named tuples.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from monarch_kernel import programs
from monarch_kernel._version import __version__
from monarch_kernel.protocol.private_files import write_own_file
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.cleanup import RunDir
from monarch_kernel.runtime.host.start_command import interpreter_command, memfd

if TYPE_CHECKING:
    from monarch_kernel.protocol.announcement import WorkerAnnouncement


class WorkerStart(NamedTuple):
    """The options of a worker.

    Attributes:
        address: the address to listen on, as parsed by ``worker_address``.
        announce_to: descriptors that receive its announcement, and are then closed.
        announce_in: files that receive its announcement.
        name: the name of its host; "": the host's own name.
        key_file: None: the user's default.
        key: the key itself, as written by ``key_line``, if it is not in a file.
        key_from: the origin of the key, for messages.
        allow: the file of its allow-list; None: the default.
        audit: the file of the audit log; "": only the log records connections.
        lifeline: a descriptor whose closing ends the worker; -1: none.
        keep: the folder of a kept mesh; "": it keeps none.
        idle: how long it may be unused before it ends (seconds); 0: forever.
        ends_at: when the provider ends it (Unix time); 0: unknown.
        quiet: whether its standard output is reserved for the announcement.
        folder_lock: the lock of the folder of its socket, held until it ends; -1: none.
    """

    address: str
    announce_to: list[int]
    announce_in: list[str]
    name: str = ""
    key_file: str | None = None
    key: str = ""
    key_from: str = ""
    allow: str | None = None
    audit: str = ""
    lifeline: int = -1
    keep: str = ""
    idle: float = 0.0
    ends_at: float = 0.0
    quiet: bool = False
    folder_lock: int = -1


class WorkerConfig(NamedTuple):
    """The data that a worker reads from the descriptor on its command line, as lists by ``marshal``."""

    id: str
    run_dir: str
    lock_fd: int  # the run folder's lock, inherited
    python_path: str | None  # the user's PYTHONPATH
    key_fd: int  # the key, for this process only; -1: the key is in a file, or in ``start``
    start: WorkerStart


def announce(start: WorkerStart, said: WorkerAnnouncement) -> None:
    """Announce the worker to each waiting process.

    Unreachable ones are skipped, because a controller may still connect.

    Files are written first, so that a reader of a descriptor finds them.
    """
    line = said.line()
    for path in start.announce_in:
        with contextlib.suppress(OSError):
            write_own_file(path, line)
    for fd in start.announce_to:
        with contextlib.suppress(OSError):
            os.write(fd, line)
        with contextlib.suppress(OSError):
            os.close(fd)
    start.announce_to.clear()
    start.announce_in.clear()


def report_failure(start: WorkerStart, error: Exception) -> None:
    """Report why the worker cannot start, on stderr and to waiting processes, because a log may be full."""
    import socket

    from monarch_kernel.protocol.announcement import WorkerAnnouncement

    announce(start, WorkerAnnouncement(monarch_kernel=__version__, host=socket.gethostname(), error=str(error)))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"monarch-kernel worker: {error}\n")
        sys.stderr.flush()


def marked_run() -> RunDir | None:
    """Return the run folder named by the marks that this process was started with; None: it has no marks of its own.

    Raises:
        OSError: the temporary folder is not writable.
    """
    run = os.environ.get(cleanup.MARKER, "")
    if not run.isalnum() or os.environ.get(cleanup.AGENT_MARKER) != f"worker-{run}":
        return None
    try:
        return cleanup.make_run_dir(name=run)
    except FileExistsError:  # the marks belong to another worker, one of whose ranks has started this process
        return None


def exec_worker(start: WorkerStart) -> NoReturn:
    """Become a worker: this process executes a fresh interpreter whose environment has the markers of a run.

    Raises:
        OSError: the temporary folder is not writable.
    """
    run_dir = cleanup.make_run_dir()
    worker = f"worker-{os.urandom(5).hex()}"
    python_path = os.environ.get("PYTHONPATH")
    # Not in the config: the fork server and the ranks inherit the config in memory, and must not have the key.
    key_fd = memfd("key", start.key.encode()) if start.key else -1
    config = WorkerConfig(worker, run_dir.path, run_dir.lock_fd, python_path, key_fd, start._replace(key=""))
    fd = memfd("config", marshal.dumps([*config[:-1], list(config.start)]))
    for inherited in (fd, key_fd, run_dir.lock_fd, start.lifeline, start.folder_lock, *start.announce_to):
        if inherited >= 0:
            os.set_inheritable(inherited, True)
    env = {
        **os.environ,
        cleanup.MARKER: cleanup.run_name(run_dir.path),
        cleanup.AGENT_MARKER: worker,
        "PYTHONPATH": os.pathsep.join(filter(None, (programs.ROOT, python_path))),
    }
    programs.become(interpreter_command(f"{__package__}.worker_main", str(fd)), env)
