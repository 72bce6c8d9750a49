"""A controller to be killed: starts a whole family of processes, prints their pids, and waits.

Run as ``python -m tests.host.tree``; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading

import psutil

from monarch_kernel.protocol.messages import Launch

from .conftest import Host


def family() -> None:
    """In a rank: a child in its process group, one in a session of its own, and a daemon that was let go."""
    import os
    import subprocess

    pids = [
        subprocess.Popen(["sleep", "600"]).pid,
        subprocess.Popen(["sleep", "600"], start_new_session=True).pid,
        int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])),
    ]
    print(*pids, os.getpid(), flush=True)


def main() -> None:
    host = Host()
    forked = host.spawn(2)
    warm = host.spawn(1, preload=["decimal"])
    own = host.spawn(1, per_proc=[Launch([sys.executable], {})])
    users: list[int] = []
    for name in (*forked, *warm, *own):
        host.call(name, family)
        host.wait(lambda name=name: host.text(name).endswith("\n"))
        users += map(int, host.text(name).split()[:3])
    agent = psutil.Process(host.agent.pid)
    server = psutil.Process(host.started[forked[0]]).parent()
    template = psutil.Process(host.started[warm[0]]).parent()
    assert server is not None
    assert template is not None
    shown = {
        "agent": agent.pid,
        "server": server.pid,
        "template": template.pid,
        "ranks": [host.started[name] for name in (*forked, *warm, *own)],
        "users": users,
        "run_dir": host.run_dir,
    }
    print(json.dumps(shown), flush=True)
    if sys.stdin.readline():
        host.shutdown()
    threading.Event().wait()


if __name__ == "__main__":
    main()
