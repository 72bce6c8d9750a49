"""Notices that a prepared job makes no progress, and has a report made of it. Standard library only: ranks load it.

Nothing is patched: progress is that process groups have issued collectives, or that the main thread has come to
another instruction. The thread of the door looks. The report is made by a process of its own, which joins the job as
any viewer does: no rank does the work, and one that is wedged in native code keeps nobody from it. All ranks of a
machine look; the first of them that notices, and gets the lock, starts that process.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from monarch_kernel.engines.join.announcements import HANG, join_folder
from monarch_kernel.engines.join.collectives import issued_by_all
from monarch_kernel.engines.join.helper_process import say, start_helper
from monarch_kernel.thread_frames import current_frames

if TYPE_CHECKING:
    import subprocess

#: How often it is looked, at most and at least (seconds), and how often within the time after which a job hangs.
_SHORTEST, _LONGEST, _LOOKS = 0.2, 5.0, 15
#: Ranks notice one after the other, by so much (seconds), so that one starts the report; but not later than this.
_STAGGER, _LATEST = 0.5, 10.0
#: Processor time in a second below which a program without process groups does nothing.
_BUSY = 0.05
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


@dataclass(frozen=True)
class HangPlan:
    """What happens when a job makes no progress.

    Attributes:
        how: `dump`: a report is written, and the job goes on waiting; `hold`: ranks are held, too, if they fail later.
        after: how long it makes none until then (seconds).
        folder: where the report goes.
    """

    how: str
    after: float
    folder: str


class ProgressMonitor:
    """Whether this rank makes progress.

    Args:
        name: of the job.
        plan: what to do.
        turn: its number among the ranks of its machine.
        hold: holds this rank if it fails from now on.
        excused: whether it makes no progress now since it waits for a person, which is no hang.
    """

    def __init__(
        self, name: str, plan: HangPlan, turn: int, hold: Callable[[], None], excused: Callable[[], bool]
    ) -> None:
        self.name = name
        self.plan = plan
        self.period = min(max(plan.after / _LOOKS, _SHORTEST), _LONGEST)
        #: When it has last come to another instruction, and when it has last issued a collective (`time.time()`).
        self.moved = self.issued = time.time()
        self._hold = hold
        self._excused = excused
        self._turn = min(max(turn, 0) * _STAGGER, _LATEST)
        self._count: int | None = None
        self._at = 0
        self._cpu = 0.0
        self._waits = False
        self._next = 0.0  # when a report may be started again
        self._maker: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Look once; the thread of the door calls this every ``period``."""
        if self._maker is not None and self._maker.poll() is not None:
            self._maker = None
        now = time.time()
        count, at, cpu = issued_by_all(), self._position(), self._main_cpu()
        if count != self._count or self._excused():
            self.moved = self.issued = now
        elif at != self._at or (count is None and cpu - self._cpu > _BUSY * self.period):
            self.moved = now
        self._count, self._at, self._cpu = count, at, cpu
        since = self.issued if self._waits and count is not None else self.moved
        still = now - since
        if still >= self.plan.after and self.plan.how == "hold":
            self._hold()
        if still >= self.plan.after + self._turn and now >= self._next and self._maker is None:
            self._report(now, since)

    def _position(self) -> int:
        """Where the main thread is: the same number as long as it is at the same instruction of the same calls."""
        frame: FrameType | None = current_frames().get(threading.main_thread().ident or 0)
        at: list[tuple[int, int]] = []
        self._waits = False
        while frame is not None:
            self._waits = self._waits or _DISTRIBUTED in frame.f_code.co_filename
            at.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return hash(tuple(at))

    @staticmethod
    def _main_cpu() -> float:
        ident = threading.main_thread().ident
        with suppress(OSError):
            return time.clock_gettime(time.pthread_getcpuclockid(ident)) if ident is not None else 0.0
        return 0.0

    def _report(self, now: float, since: float) -> None:
        """Have a report made, unless there is one that was made after this rank's last progress."""
        self._next = now + self.period
        with join_folder() as folder:
            lock = folder.open_file(f"{self.name}{HANG}", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another rank has started one
                return
            made = os.pread(lock, 64, 0).decode(errors="replace")
            if made and float(made) > since:  # of this hang
                self._next = now + self.plan.after
                return
            self._next = now + self.plan.after  # it is seen by the report whether the other ranks make progress
            self._start(lock)
        finally:
            os.close(lock)

    def _start(self, lock: int) -> None:
        """Start the process that makes the report, and holds the lock as long as it lives."""
        folder = self.plan.folder
        words = ["-m", "monarch_kernel", "report", self.name, "--out", folder]
        words += ["--hang-after", str(self.plan.after), "--lock", str(lock)]
        if self._waits:
            words.append("--waits")
        self._maker = start_helper(words, lock)
        say(f"no progress for {self.plan.after:g} s: a report on job {self.name} is written to {folder}")
