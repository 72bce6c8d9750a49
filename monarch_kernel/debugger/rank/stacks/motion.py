"""Merge several snapshots of a process; stacks end at the first frame that changed.

Ranks that compute are at another line in each sample. The part that their stacks share over some seconds is the same
for all of them, so they fold into one branch. A rank that hangs stands out, because its whole stack stays the same. A
thread that uses the processor is never reported to hang: a loop may be sampled at the same line each time, because it
releases the GIL there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Container, Hashable, Sequence

from monarch_kernel.debugger.model.stacks import Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.rank.stacks.snapshot import snapshot

#: The time between samples (seconds), and the maximum number of samples.
PERIOD, MOST = 0.05, 100
#: A thread that uses the processor for more than this share of the time computes.
BUSY = 0.05
MOVES = "moves"


def sample(seconds: float, all_threads: bool = False, values: bool = False) -> StackSnapshot:
    """Take a snapshot of this process over this many seconds."""
    period = max(PERIOD, seconds / MOST)
    end = time.monotonic() + seconds
    before = _processor_seconds()
    samples = [snapshot(all_threads, values)]
    while time.monotonic() < end:
        time.sleep(min(period, max(0.0, end - time.monotonic())))
        samples.append(snapshot(all_threads, values))
    used = {thread: now - before.get(thread, 0.0) for thread, now in _processor_seconds().items()}
    return combined(samples, seconds, {thread for thread, time_used in used.items() if time_used > BUSY * seconds})


def combined(samples: Sequence[StackSnapshot], seconds: float, busy: Container[int] = ()) -> StackSnapshot:
    """Combine several samples of a process, the latest last. Pure.

    Args:
        samples: the snapshots.
        seconds: the time over which they were taken.
        busy: the threads that have used the processor during that time.
    """
    known = [_by_owner(one) for one in samples]
    stacks: list[Stack] = []
    for owner, stack in known[-1].items():
        seen = [each[owner] for each in known if owner in each]
        frames, moved = _common([each.frames for each in seen])
        if moved or len(seen) < len(known):
            stacks.append(stack._replace(frames=frames, state=stack.state or MOVES, values=()))
        else:
            still = "computes at the same place" if stack.thread in busy else f"has not moved for {seconds:g} s"
            stacks.append(stack._replace(state=stack.state or still))
    return samples[-1]._replace(stacks=tuple(stacks))


def _by_owner(taken: StackSnapshot) -> dict[Hashable, Stack]:
    """Index the stacks of a snapshot by a key that is stable over time: the thread, or the task's name and number."""
    found: dict[Hashable, Stack] = {}
    counts: dict[Hashable, int] = {}
    for stack in taken.stacks:
        # An endpoint that has begun since then is another one, even if it runs on the same thread.
        kind: Hashable = (stack.kind, stack.name, stack.thread)
        counts[kind] = counts.get(kind, 0) + 1
        found[(kind, counts[kind])] = stack
    return found


def _common(all_frames: Sequence[tuple[StackFrame, ...]]) -> tuple[tuple[StackFrame, ...], bool]:
    """Return the outer frames that all samples have in common, and whether the samples differ further in.

    If the innermost common function went from line to line, its frame has no line.
    """
    last = all_frames[-1]
    shortest = min(map(len, all_frames))
    for at in range(shortest):
        places = {frames[at].place for frames in all_frames}
        if len(places) > 1:
            place = last[at].place
            functions = {(each.file, each.name) for each in places}
            end = (StackFrame(place._replace(line=0)),) if len(functions) == 1 else ()
            return (*last[:at], *end), True
    return last[:shortest], len({len(frames) for frames in all_frames}) > 1


def _processor_seconds() -> dict[int, float]:
    """Return the processor time of each thread so far, by its identifier."""
    tick = os.sysconf("SC_CLK_TCK")
    main = threading.main_thread()
    found: dict[int, float] = {}
    known: dict[int, threading.Thread] = dict(getattr(threading, "_active", {}))  # enumerate() would take a lock
    for ident, thread in known.items():
        # After a fork, Python still reports the id that the main thread had in the parent.
        number = os.getpid() if thread is main else thread.native_id
        try:
            with open(f"/proc/self/task/{number}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # the thread has ended
            continue
        found[ident] = (int(fields[11]) + int(fields[12])) / tick
    return found
