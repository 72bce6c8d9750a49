"""``python -m monarch_kernel.runtime.host``: the host agent, started by ``launch``."""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from monarch_kernel.runtime.host import forkserver, leftovers
from monarch_kernel.runtime.host.agent import RANK_ENTRY, Agent
from monarch_kernel.runtime.host.launch import AgentConfig


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
        # It has died, and the number may be somebody else's.
        os.close(config.lock_fd)
        leftovers.remove_if_stale(config.run_dir)
        return
    forkserver.become_subreaper()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if config.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = config.python_path
    ours, theirs = forkserver.make_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_forks(config, theirs, controller)
    theirs.close()
    forkserver.set_name("monarch-agent")
    logging.basicConfig(format="%(asctime)s agent %(levelname)s %(message)s", level=logging.INFO)
    sys.exit(Agent(config, ours, pid, controller).run())


def _serve_forks(config: AgentConfig, sock: socket.socket, controller: int) -> NoReturn:
    forkserver.set_name(leftovers.FORK_SERVER)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.close(config.lock_fd)
    sys.path[:] = config.sys_path
    importlib.import_module(RANK_ENTRY.partition(":")[0])
    forkserver.freeze()

    def orphaned() -> None:
        leftovers.kill_run(config.id, leftovers.AGENT_MARKER)
        # A living controller kills us now and removes the folder in its time; that of a dead one is ours.
        select.select([controller], [], [])
        leftovers.remove_if_stale(config.run_dir)

    job = forkserver.ForkServer(sock, RANK_ENTRY, orphaned).serve()
    if job is None:
        os._exit(0)
    forkserver.run_rank(job, RANK_ENTRY)


def _read_config() -> AgentConfig | None:
    with socket.socket(fileno=os.dup(0)) as sock:
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            piece = sock.recv(65536)
            if not piece:
                return None  # the controller died while it started us
            data += piece
    return msgspec.msgpack.decode(data[4:], type=AgentConfig)


if __name__ == "__main__":
    main()
