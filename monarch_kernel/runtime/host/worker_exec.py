"""Turn a process into a worker: it continues in ``worker_main``, or executes a new interpreter that does.

Cleanup finds all processes of a worker by the environment that they were started with. The environment of the worker
must therefore contain the marks of its run from the start. If launchers set them (``WorkerCommand.marks``), no new
interpreter is needed.

If one is needed, the imports of this module are loaded twice before hosts can be used. They are therefore few, without
msgspec or json.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable
from typing import NoReturn

from monarch_kernel import programs
from monarch_kernel.runtime.host import cleanup
from monarch_kernel.runtime.host.cleanup import RunDir
from monarch_kernel.runtime.host.start_command import interpreter_command, memfd
from monarch_kernel.runtime.host.worker_start import WorkerConfig, WorkerStart


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


def stay_worker(start: WorkerStart, run_dir: RunDir, complete: Callable[[], WorkerStart], own: int) -> NoReturn:
    """Become a worker without executing another interpreter; the arguments are those of ``worker_main.start_here``."""
    from monarch_kernel.runtime.host.worker_main import start_here

    start_here(start, os.environ[cleanup.AGENT_MARKER], run_dir, complete, own)


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
