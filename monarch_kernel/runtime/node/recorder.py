"""What this process does, for traces: a ring of records, and the clock that stamps them.

Nothing is recorded until a trace is turned on: ``recording`` is None until then. Code that could record something tests
this one name, and that is all that it costs.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import Any

from monarch_kernel.protocol.trace_records import TRANSFER, RecordedTrace

#: How many records a process keeps at most; they take about 300 bytes each.
CAPACITY = 32_768

#: The time in nanoseconds; the same in all processes of a host.
clock = time.monotonic_ns

#: The group of the records that the running task makes; see ``TraceRecord``.
group: ContextVar[int] = ContextVar("monarch_kernel_trace_group", default=0)

#: Numbers for groups.
next_group = itertools.count(1).__next__

_get_ident = threading.get_ident


class Recorder:
    """The records of this process; the newest ones replace the oldest. Any thread may use it.

    Args:
        capacity: how many records it keeps.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self._taken = 0
        self._reads = 0  # numbers that were taken only to see how many there are
        self._lock = threading.Lock()
        # What calls record is so frequent that they use these themselves.
        self.next = itertools.count(1).__next__  # the number of the next record
        self.append = self._ring.append  # a record that has ended: the fields of a TraceRecord
        self.clock = clock
        self.open: dict[int, tuple[Any, ...]] = {}  # by number: the first fields of those that have not
        self.prefix = f"{os.urandom(4).hex()}-"  # of the ids of calls

    def begin(self, kind: str, name: str, group: int = 0, call: str = "", size: int = 0) -> int:
        """Record that something begins now on this thread. Returns its number, for ``end``."""
        number = self.next()
        self.open[number] = (number, kind, name, _get_ident(), group, self.clock(), call, size)
        return number

    def end(self, number: int, mark: int = 0) -> None:
        """Record that it ends now, with ``TraceRecord.mark``; ending it again does nothing."""
        begun = self.open.pop(number, None)
        if begun is not None:
            self.append((*begun, self.clock(), mark))

    def transfer(self, name: str, size: int) -> TransferEnd:
        """Record that a transfer begins now; the returned callback of its future ends it."""
        return TransferEnd(self, self.begin(TRANSFER, name, 0, "", size))

    def take(self) -> RecordedTrace:
        """Remove and return all records that have ended, with copies of those that have not."""
        with self._lock:
            records: list[Any] = []
            for _ in range(len(self._ring)):
                records.append(self._ring.popleft())
            running = list(self.open.copy().values())
            begun = self.next() - 1 - self._reads
            self._reads += 1
            dropped = max(0, begun - self._taken - len(records) - len(running) - len(self._ring))
            self._taken += len(records) + dropped
        threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        return RecordedTrace(os.getpid(), dropped, threads, records, running)  # type: ignore[arg-type]  # tuples are encoded as the structs are


class TransferEnd:
    """Ends the record of a transfer when its future is done."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def __call__(self, _done: object) -> None:
        self._recorder.end(self._number)


#: The recorder of this process while a trace is on.
recording: Recorder | None = None


def start(capacity: int = CAPACITY) -> Recorder:
    """Begin to record, with an empty ring."""
    global recording
    recording = Recorder(capacity)
    return recording


def stop() -> None:
    """Record no more, and drop what was recorded."""
    global recording
    recording = None
