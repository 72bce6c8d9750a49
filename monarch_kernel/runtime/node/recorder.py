"""Record the activity of this process for traces: a ring of records, and the clock for their times.

Nothing is recorded until a trace is turned on: ``recording`` is None until then. Code that could record something only
tests this name, so recording costs nothing else while it is off.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from contextvars import ContextVar

from monarch_kernel.protocol.trace_records import TRANSFER, RecordedTrace

#: The default number of records that a process keeps; each takes about 300 bytes.
CAPACITY = 32_768

#: The time in nanoseconds, equal in all processes of a host.
clock = time.monotonic_ns

#: The group of the records that the running task creates; see ``TraceRecord``.
group: ContextVar[int] = ContextVar("monarch_kernel_trace_group", default=0)

#: Numbers for groups.
next_group = itertools.count(1).__next__

_get_ident = threading.get_ident


class Recorder:
    """The records of this process; new ones replace the oldest. It is thread-safe.

    Args:
        capacity: the maximum number of records.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[tuple[object, ...]] = deque(maxlen=capacity)
        self._taken = 0
        self._reads = 0  # numbers that were taken only to count the records
        self._lock = threading.Lock()
        # record() is called so frequently that callers use these attributes directly.
        self.next = itertools.count(1).__next__  # the number of the next record
        self.append = self._ring.append  # appends a finished record: the fields of a TraceRecord
        self.clock = clock
        self.open: dict[int, tuple[object, ...]] = {}  # unfinished records, by number: their first fields
        self.prefix = f"{os.urandom(4).hex()}-"  # of the ids of calls

    def begin(self, kind: str, name: str, group: int = 0, call: str = "", size: int = 0) -> int:
        """Record that an activity begins now on this thread. Return its number, for ``end``."""
        number = self.next()
        self.open[number] = (number, kind, name, _get_ident(), group, self.clock(), call, size)
        return number

    def end(self, number: int, mark: int = 0) -> None:
        """Record that it ends now, with ``TraceRecord.mark``. Ending it again has no effect."""
        begun = self.open.pop(number, None)
        if begun is not None:
            self.append((*begun, self.clock(), mark))

    def transfer(self, name: str, size: int) -> TransferEnd:
        """Record that a transfer begins now; the returned callback of its future ends it."""
        return TransferEnd(self, self.begin(TRANSFER, name, 0, "", size))

    def take(self) -> RecordedTrace:
        """Remove and return all finished records, with copies of the unfinished ones."""
        with self._lock:
            records: list[object] = []
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
    """Start recording, with an empty ring."""
    global recording
    recording = Recorder(capacity)
    return recording


def stop() -> None:
    """Stop recording, and drop the records."""
    global recording
    recording = None
