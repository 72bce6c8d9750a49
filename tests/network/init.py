"""Process 1 of a test host: makes the host's own name and folders, reaps orphans, and ends with whoever made the host.

Run as ``python init.py NAME FOLDER...``, in namespaces of its own. It holds them all: when it goes, the kernel kills
what is left on the host, and drops its mounts and its network. It goes when its stdin ends, so a killed test run
leaves nothing behind either.
"""

import os
import signal
import socket
import subprocess
import sys


def reap(*_: object) -> None:
    """Wait for every child that has ended; on a host, that is every process whose parent ended first."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(name: str, *folders: str) -> None:
    socket.sethostname(name)
    for folder in folders:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder], check=True)
    # The outer machine's orders to its terminal are none of the host's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    print("up", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
