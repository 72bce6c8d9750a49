"""Sees to it that one process of this machine calls the meeting point of its ranks. Ranks load it, if they have one.

All ranks look now and then; the one that gets the lock starts the process (``meeting_caller``), which holds it as long
as it lives. So it is started again by another rank if it, or the rank, has died.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from monarch_kernel import environment
from monarch_kernel.engines.join.announcements import join_folder, meet_file
from monarch_kernel.engines.join.helper_process import say, start_helper

if TYPE_CHECKING:
    import subprocess

#: The module that calls.
CALLER = "monarch_kernel.engines.join.meeting_caller"
#: How often ranks look (seconds).
PERIOD = 2.0
#: How much of what the caller says is read (bytes).
_MOST = 2000


class MeetingCall:
    """Whether this rank's machine calls a meeting point.

    Args:
        url: of the meeting point, ``tcp://host:port``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._caller: subprocess.Popen[bytes] | None = None
        self._said = ""

    def look(self) -> None:
        """Start the process if there is none, and say in the job's log what it has to say."""
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
                self._caller = start_helper(["-m", CALLER, self._url, str(lock)], lock)
        finally:
            os.close(lock)
