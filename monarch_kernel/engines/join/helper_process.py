"""Processes that a prepared rank starts beside its job: they make reports, or call a meeting point.

Standard library only: ranks load it, if they have one of these.
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

#: The module that calls a meeting point.
_CALLER = "monarch_kernel.engines.join.meeting_caller"
#: How often ranks check that a process calls it (seconds).
CALL_PERIOD = 2.0
#: How much of what the caller says is read (bytes).
_MOST = 2000
#: What would make such a process look like a rank.
_OF_RANKS = (
    *(environment.JOIN.name, environment.JOIN_ON_HANG.name, environment.JOIN_RANK),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


def start_helper(words: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
    """Start this interpreter with these words.

    It has a session of its own, so what ends the job, or interrupts it, lets it finish; and no standard streams, as
    launchers wait until nobody has those of their ranks.

    Args:
        lock: a descriptor that it inherits; a lock of it is held as long as it lives.
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
    """Write a line to the job's log; not to ``sys.stderr``, which a program may have replaced."""
    if sys.__stderr__ is not None:
        print(text, file=sys.__stderr__, flush=True)


class MeetingCall:
    """Ensure that one process of this machine calls the meeting point of its ranks.

    All ranks look now and then; the one that gets the lock starts the process (``meeting_caller``), which holds it as
    long as it lives. So another rank starts it again if it, or the rank, has died.

    Args:
        url: of the meeting point, ``tcp://host:port``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._caller: subprocess.Popen[bytes] | None = None
        self._said = ""

    def look(self) -> None:
        """Start the process if there is none, and write what it reports to the job's log."""
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
            with suppress(BlockingIOError):  # another rank's is there
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                self._caller = start_helper(["-m", _CALLER, self._url, str(lock)], lock)
        finally:
            os.close(lock)
