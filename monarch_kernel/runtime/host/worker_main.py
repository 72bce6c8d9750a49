"""The entry point of a worker: the process forks its fork server, and serves.

Either ``exec_worker`` has executed a new interpreter, whose environment has the markers of the run, or the process was
started with these markers (``start_here``). As in ``host.__main__``, worker and fork server load in parallel what they
do not both need.
"""

from __future__ import annotations

import gc
import logging
import marshal
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from monarch_kernel.runtime.host import cleanup, forkserver
from monarch_kernel.runtime.host.__main__ import restore_python_path, serve_forks
from monarch_kernel.runtime.host.worker_start import WorkerConfig, WorkerStart, report_failure
from monarch_kernel.runtime.node import descriptors

if TYPE_CHECKING:
    from monarch_kernel.runtime.host.worker_agent import WorkerAgent


def main() -> None:
    """Run a worker in this process, which ``exec_worker`` has prepared: fork the fork server, and serve."""
    fd = int(sys.argv[1])
    with open(fd, "rb") as file:
        config = msgspec.convert(marshal.load(file), WorkerConfig)
    for inherited in (config.lock_fd, *_own(config)):
        if inherited >= 0:
            os.set_inheritable(inherited, False)
    restore_python_path(config.python_path)
    server = _FirstFork(config, _own(config))
    start = config.start
    if config.key_fd >= 0:
        with open(config.key_fd) as file:
            start = start._replace(key=file.read())
    server.serve(config._replace(start=start))


def start_here(start: WorkerStart, run_dir: cleanup.RunDir, complete: Callable[[], WorkerStart], own: int) -> NoReturn:
    """Become a worker in this process, whose environment has the markers of the run since it was started.

    Args:
        start: its options, without the key.
        run_dir: its run folder, named in a marker.
        complete: reads the key, and returns the options with it. It is called after the fork of the fork server, so
            that this and the ranks do not have the key in their memory.
        own: another descriptor that they must not inherit; -1: none.
    """
    gc.disable()
    worker = os.environ[cleanup.AGENT_MARKER]
    config = WorkerConfig(worker, run_dir.path, run_dir.lock_fd, os.environ.get("PYTHONPATH"), -1, start)
    server = _FirstFork(config, [own, *_own(config)])
    try:
        start = complete()
    except (OSError, ValueError) as e:
        server.fail(config, e)
    server.serve(config._replace(start=start))


class _FirstFork:
    """Forks the fork server of a worker before the worker opens anything. This process then becomes the worker.

    Args:
        config: its settings.
        own: descriptors that the fork server must not inherit.
    """

    def __init__(self, config: WorkerConfig, own: list[int]) -> None:
        forkserver.become_subreaper()
        # Ctrl-C signals the terminal's whole foreground process group; only the worker handles it.
        self._heard = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        for number in self._heard:
            signal.signal(number, signal.SIG_IGN)
        descriptors.raise_limit()
        self._socket, theirs = forkserver.make_pair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            for inherited in own:
                if inherited >= 0:
                    os.close(inherited)
            serve_forks(theirs, config.id, config.run_dir, config.lock_fd, sys.path, None)
        theirs.close()
        forkserver.set_name("monarch-worker")

    def serve(self, config: WorkerConfig) -> NoReturn:
        """Serve until told to end."""
        level = logging.INFO if config.start.lifeline < 0 else logging.WARNING
        logging.basicConfig(format="%(asctime)s worker %(levelname)s %(message)s", level=level)
        try:
            worker = _worker_class(config)(config, self._socket, self._pid)
            for number in self._heard:
                signal.signal(number, worker._on_sigterm)
            code = worker.run()
        except (OSError, ValueError) as e:
            self.fail(config, e)
        sys.exit(code)

    def fail(self, config: WorkerConfig, error: Exception) -> NoReturn:
        """Report why the worker cannot start, and end."""
        cleanup.kill_below(self._pid)
        cleanup.remove_inherited_run_dir(config.run_dir, config.lock_fd)
        report_failure(config.start, error)
        sys.exit(1)


def _own(config: WorkerConfig) -> list[int]:
    """Return the descriptors that only the worker may have; -1: none."""
    start = config.start
    return [config.key_fd, start.lifeline, start.folder_lock, *start.announce_to]


def _worker_class(config: WorkerConfig) -> type[WorkerAgent]:
    if config.start.keep:
        from monarch_kernel.runtime.host.keeper_agent import KeeperAgent

        return KeeperAgent
    from monarch_kernel.runtime.host.worker_agent import WorkerAgent

    return WorkerAgent


if __name__ == "__main__":
    main()
