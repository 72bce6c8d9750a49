"""Records for traces, for tools: what they add of their own, and how they turn records on and collect them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from monarch_kernel.runtime.actor.tracing.call_records import observe_calls
from monarch_kernel.runtime.actor.tracing.remote import (
    TracedRank,
    living_ranks,
    start_recording,
    stop_recording,
    take_records,
)
from monarch_kernel.runtime.node import recorder


def trace_clock() -> int:
    """The time on the clock of records (nanoseconds)."""
    return recorder.clock()


def is_recording() -> bool:
    """Whether a trace is on in this process."""
    return recorder.recording is not None


def begin_record(kind: str, name: str, *, group: int = 0, call: str = "", size: int = 0) -> Callable[[int], None]:
    """Record that something begins now on this thread.

    Args:
        kind, name, group, size: see ``TraceRecord``.
        call: its ``id``.

    Returns:
        A function that records its end, with the ``mark`` of the record. It does nothing if no trace is on.
    """
    ring = recorder.recording
    if ring is None:
        return lambda _mark: None
    number = ring.begin(kind, name, group, call, size)
    return lambda mark: ring.end(number, mark)


@contextmanager
def recorded(kind: str, name: str, *, call: str = "") -> Generator[None]:
    """Record the block; see ``begin_record``."""
    end = begin_record(kind, name, group=recorder.group.get(), call=call)
    failed = 1
    try:
        yield
        failed = 0
    finally:
        end(failed)


__all__ = [
    "TracedRank",
    "begin_record",
    "is_recording",
    "living_ranks",
    "observe_calls",
    "recorded",
    "start_recording",
    "stop_recording",
    "take_records",
    "trace_clock",
]
