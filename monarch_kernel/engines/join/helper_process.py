"""Start helper processes of a prepared rank, which write reports or connect to a meeting point.

Ranks load this module if they need helpers, so it imports only the standard library.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from monarch_kernel import environment, programs
from monarch_kernel.engines.join.announcements import join_folder, meet_file

#: The module that connects to a meeting point.
_CALLER = "monarch_kernel.engines.join.gateway_caller"
#: The interval at which ranks check that the process exists (seconds).
CALL_PERIOD = 2.0
#: How much of the process's output is read (bytes).
_MOST = 2000
#: Variables that would make such a process look like a rank.
_OF_RANKS = (
    *(environment.JOIN.name, environment.JOIN_ON_HANG.name, environment.JOIN_RANK),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


def start_helper(words: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
    """Start this interpreter with these arguments.

    The process runs in a new session, so that signals that end or interrupt the job do not reach it. It has no standard
    streams, because launchers wait until all copies of their ranks' streams are closed.

    Args:
        lock: a locked descriptor that the process inherits; it holds the lock as long as it lives.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [programs.ROOT, environ.get("PYTHONPATH", "")]))
    return programs.start(
        [sys.executable, "-P", *words],
        cwd="/",
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,
    )


def say(text: str) -> None:
    """Write a line to the job's log. ``sys.stderr`` is not used, because a program may have replaced it."""
    if sys.__stderr__ is not None:
        print(text, file=sys.__stderr__, flush=True)


class GatewayCall:
    """Ensures that one process of this machine is connected to the meeting point of its ranks.

    All ranks check periodically. The rank that gets the lock starts the process (``gateway_caller``), which holds the
    lock as long as it lives. If the process or the rank dies, another rank starts it again.

    Args:
        url: the URL of the meeting point, ``tcp://host:port``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._caller: subprocess.Popen[bytes] | None = None
        self._said = ""

    def look(self) -> None:
        """Start the process if there is none, and write its output to the job's log."""
        if self._caller is not None and self._caller.poll() is not None:
            self._caller = None
        with join_folder() as folder:
            lock = folder.open_file(meet_file(self._url), os.O_RDWR | os.O_CREAT)
        try:
            if self._caller is not None:
                said = os.pread(lock, _MOST, 0).decode(errors="replace").rstrip("\n")
                if said not in ("", self._said):
                    say(f"{environment.JOIN_MEET.name}: {said}")
                self._said = said
                return
            with suppress(BlockingIOError):  # another rank has started it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                self._caller = start_helper(["-m", _CALLER, self._url, str(lock)], lock)
        finally:
            os.close(lock)
