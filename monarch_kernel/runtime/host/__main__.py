"""The entry point of a host agent, run by ``launch``.

The fork server and the agent start in parallel, in two processes. This module loads what both need and forks; then each
side loads its own part. The imports of this module largely determine how long the first mesh takes to start.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec

# Both sides need it, so it is loaded before the fork.
import monarch_kernel.runtime.node.node  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel.runtime.host import cleanup, forkserver
from monarch_kernel.runtime.host.fork_requests import ACTOR_API, ASYNC_ACTORS, RANK_ENTRY
from monarch_kernel.runtime.host.start_command import AgentConfig
from monarch_kernel.runtime.node import descriptors

#: How long a killed agent may take to exit (seconds).
_END_TIME = 5.0


def main() -> None:
    """Run the agent: read the config from standard input, fork the fork server, serve."""
    config = _read_config()
    if config is None:
        return
    try:
        controller = os.pidfd_open(config.owner_pid)
    except ProcessLookupError:
        controller = -1
    if controller < 0 or os.getppid() != config.owner_pid:
        # The controller has died, and another process may have its pid.
        os.close(config.lock_fd)
        cleanup.remove_if_stale(config.run_dir)
        return
    os.chdir("/")  # keep no file system busy
    forkserver.become_subreaper()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    restore_python_path(config.python_path)
    descriptors.raise_limit(config.descriptors)
    ours, theirs = forkserver.make_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve_forks(theirs, config.id, config.run_dir, config.lock_fd, config.sys_path, controller)
    theirs.close()
    forkserver.set_name("monarch-agent")
    from monarch_kernel.runtime.host.agent import OwnedAgent

    logging.basicConfig(format="%(asctime)s agent %(levelname)s %(message)s", level=logging.INFO)
    sys.exit(OwnedAgent(config, ours, pid, controller).run())


def restore_python_path(path: str | None) -> None:
    """Restore the user's PYTHONPATH for ranks to inherit; this process itself was started with another."""
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path


def serve_forks(
    sock: socket.socket,
    agent: str,
    run_dir: str,
    lock_fd: int,
    sys_path: list[str],
    controller: int | None,
) -> NoReturn:
    """Run an agent's fork server, and a rank in each fork.

    Args:
        sock: the socket to the agent.
        agent: the agent's id.
        run_dir: the run folder, removed when the agent and its controller (if it has one) are dead.
        lock_fd: the run folder's lock.
        sys_path: the import path of ranks.
        controller: a pidfd of the controller, or None.
    """
    forkserver.set_name(cleanup.FORK_SERVER)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.close(lock_fd)
    sys.path[:] = sys_path
    # torch then allocates large CPU tensors in huge pages, as numpy does, which is three times as fast.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    importlib.import_module(RANK_ENTRY.partition(":")[0])
    importlib.import_module("cloudpickle")  # most ranks get classes of scripts and notebooks, by value
    forkserver.freeze()

    parent = os.getppid()

    def orphaned() -> None:
        cleanup.kill_run(agent, cleanup.AGENT_MARKER)
        # A dying agent closes its socket, which triggers this call, before it releases the run folder's lock.
        end = time.monotonic() + _END_TIME
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.001)
        if controller is not None:
            # A living controller kills this process and removes the folder later; if it is dead, do it here.
            select.select([controller], [], [])
        cleanup.remove_if_stale(run_dir)

    job = forkserver.ForkServer(sock, RANK_ENTRY, ASYNC_ACTORS, ACTOR_API, orphaned).serve()
    if job is None:
        os._exit(0)
    forkserver.run_rank(job, RANK_ENTRY)


def _read_config() -> AgentConfig | None:
    with socket.socket(fileno=os.dup(0)) as sock:
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            piece = sock.recv(65536)
            if not piece:
                return None  # the controller died while it started this process
            data += piece
    return msgspec.msgpack.decode(data[4:], type=AgentConfig)


if __name__ == "__main__":
    main()
