"""Detect that a prepared job makes no progress, and start a report on it. Ranks load it: standard library only.

Nothing is patched. A rank makes progress if its process groups issue collectives, or its main thread reaches another
instruction. The thread of the listener checks this. The report is written by a separate process, which joins the job
like any viewer. Ranks do no work for it, so a rank that is stuck in native code does not prevent it. All ranks of a
machine check. The first rank that detects a hang and gets the lock starts the process.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from monarch_kernel.engines.join.announcements import HANG, join_folder
from monarch_kernel.engines.join.helper_process import say, start_helper
from monarch_kernel.thread_frames import current_frames

if TYPE_CHECKING:
    import subprocess


# Count the collectives that this process has issued.
#
# Ranks load this module, so it imports only the standard library.


def issued() -> int | None:
    """Return how many collectives the default group of torch.distributed has issued here; None if unknown."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        return int(distributed.group.WORLD._get_sequence_number_for_group())
    except Exception:  # some builds and backends do not count
        return None


def issued_by_all() -> int | None:
    """Return how many collectives all process groups together have issued here; None if unknown."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return None
        return sum(int(group._get_sequence_number_for_group()) for group in list(c10d._world.pg_map))
    except Exception:  # as above; also, groups come and go
        return issued()


#: The minimum and maximum interval of checks (seconds), and the number of checks within the time that counts as a hang.
_SHORTEST, _LONGEST, _LOOKS = 0.2, 5.0, 15
#: The delay between the reactions of ranks, so that only one starts the report, and the maximum delay (seconds).
_STAGGER, _LATEST = 0.5, 10.0
#: A program without process groups is idle if it uses less processor time than this in a second.
_BUSY = 0.05
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


@dataclass(frozen=True)
class HangPlan:
    """The reaction to a job that makes no progress.

    Attributes:
        how: `dump`: write a report, while the job continues to wait; `hold`: in addition, hold ranks that fail later.
        after: the time without progress that counts as a hang (seconds).
        folder: the folder of the report.
    """

    how: str
    after: float
    folder: str


class ProgressMonitor:
    """Detects whether this rank makes progress.

    Args:
        name: the name of the job.
        plan: what to do about a hang.
        turn: its number among the ranks of its machine.
        hold: holds this rank if it fails from now on.
        excused: returns whether it waits for a user now, which is no hang.
    """

    def __init__(
        self, name: str, plan: HangPlan, turn: int, hold: Callable[[], None], excused: Callable[[], bool]
    ) -> None:
        self.name = name
        self.plan = plan
        self.period = min(max(plan.after / _LOOKS, _SHORTEST), _LONGEST)
        #: When it last reached another instruction, and when it last issued a collective (`time.time()`).
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
        """Check once. The thread of the listener calls this every ``period``."""
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
        """Return a number that identifies the current instruction of the main thread and its calls."""
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
        """Start a report, unless one was made after this rank's last progress."""
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
            self._next = now + self.plan.after  # the report shows whether other ranks make progress
            self._start(lock)
        finally:
            os.close(lock)

    def _start(self, lock: int) -> None:
        """Start the process that writes the report. It holds the lock as long as it lives."""
        folder = self.plan.folder
        words = ["-m", "monarch_kernel", "report", self.name, "--out", folder]
        words += ["--hang-after", str(self.plan.after), "--lock", str(lock)]
        if self._waits:
            words.append("--waits")
        self._maker = start_helper(words, lock)
        say(f"no progress for {self.plan.after:g} s: a report on job {self.name} is written to {folder}")
