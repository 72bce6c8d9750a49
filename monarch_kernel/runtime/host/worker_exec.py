"""How a process becomes a worker: it executes a fresh interpreter, which runs ``worker_main``.

What is loaded here is loaded twice for each worker, before hosts can be used: it is little, and not msgspec or json.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
from typing import NoReturn

from monarch_kernel._version import __version__
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.start_command import interpreter_command, memfd, package_root
from monarch_kernel.runtime.host.worker_start import WorkerConfig, WorkerStart, announce


def exec_worker(start: WorkerStart) -> NoReturn:
    """Become a worker: this process executes a fresh interpreter whose environment has the markers of a run.

    Raises:
        OSError: the temporary folder is not writable.
    """
    run_dir = cleanup.make_run_dir()
    worker = f"worker-{os.urandom(5).hex()}"
    python_path = os.environ.get("PYTHONPATH")
    # Not in the config: the fork server and so the ranks inherit that in memory, and the key is not for them.
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
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root(), python_path))),
    }
    command = interpreter_command(f"{__package__}.worker_main", str(fd))
    os.execve(command[0], command, env)


def report_failure(start: WorkerStart, error: Exception) -> None:
    """Report why the worker cannot start: on stderr, and to those that wait for it, as a log may be full."""
    import socket

    from monarch_kernel.protocol.announcement import WorkerAnnouncement

    announce(start, WorkerAnnouncement(monarch_kernel=__version__, host=socket.gethostname(), error=str(error)))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"monarch-kernel worker: {error}\n")
        sys.stderr.flush()
