"""The start of a worker: a process executes a fresh interpreter, forks its fork server, and serves.

As in ``host.__main__``, each of both loads its own part after the fork.
"""

from __future__ import annotations

import logging
import marshal
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from monarch_kernel.runtime.host import cleanup, forkserver
from monarch_kernel.runtime.host.__main__ import restore_python_path, serve_forks
from monarch_kernel.runtime.host.worker_exec import report_failure
from monarch_kernel.runtime.host.worker_start import WorkerConfig
from monarch_kernel.runtime.node import descriptors

if TYPE_CHECKING:
    from monarch_kernel.runtime.host.worker_agent import WorkerAgent


def main() -> None:
    """Run a worker in this process, which ``exec_worker`` has prepared: fork the fork server, serve."""
    fd = int(sys.argv[1])
    with open(fd, "rb") as file:
        config = msgspec.convert(marshal.load(file), WorkerConfig)
    start = config.start
    own = [config.key_fd, start.lifeline, start.folder_lock, *start.announce_to]
    for inherited in (config.lock_fd, *own):
        if inherited >= 0:
            os.set_inheritable(inherited, False)
    forkserver.become_subreaper()
    # Ctrl-C signals the terminal's whole foreground process group; only this process handles it.
    heard = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    restore_python_path(config.python_path)
    descriptors.raise_limit()
    ours, theirs = forkserver.make_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for inherited in own:
            if inherited >= 0:
                os.close(inherited)
        serve_forks(theirs, config.id, config.run_dir, config.lock_fd, sys.path, None, asyncio=True)
    theirs.close()
    forkserver.set_name("monarch-worker")
    level = logging.INFO if start.lifeline < 0 else logging.WARNING
    logging.basicConfig(format="%(asctime)s worker %(levelname)s %(message)s", level=level)
    try:
        worker = _worker_class(config)(config, ours, pid)
        for number in heard:
            signal.signal(number, worker._on_sigterm)
        code = worker.run()
    except (OSError, ValueError) as e:
        cleanup.kill_below(pid)
        cleanup.remove_run_dir(config.run_dir, config.lock_fd)
        report_failure(start, e)
        sys.exit(1)
    sys.exit(code)


def _worker_class(config: WorkerConfig) -> type[WorkerAgent]:
    if config.start.keep:
        from monarch_kernel.runtime.host.keeper_agent import KeeperAgent

        return KeeperAgent
    from monarch_kernel.runtime.host.worker_agent import WorkerAgent

    return WorkerAgent


if __name__ == "__main__":
    main()
