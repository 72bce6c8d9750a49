"""The calls that this process waits for; tools use them to explain why it makes no progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.process import get_system, started
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.thread_frames import current_frames

_GET = Future.get.__code__


@dataclass(frozen=True, slots=True)
class Awaited:
    """A call that a thread waits for.

    Attributes:
        what: the called endpoint, such as `workers.step`.
        procs: the ids of the procs that have not answered.
        number: the number of the call in this process.
        asked: the ids of all procs that were called.
        waiters: the number of threads in its `get()`, plus its callbacks and waiting tasks.
        tool: whether the called actor belongs to a tool, such as the kernel itself.
    """

    what: str
    procs: tuple[str, ...]
    number: int
    asked: tuple[str, ...] = ()
    waiters: int = 0
    tool: bool = False


def awaited_by(frames: Iterable[FrameType]) -> Awaited | None:
    """The call that a thread with these frames waits for; None if it does not wait for a call."""
    for frame in frames:
        if frame.f_code is _GET:
            call = frame.f_locals.get("self")
            if isinstance(call, ManyCall):
                ranks = call.unanswered()
            elif isinstance(call, OneCall):
                ranks = [call._rank]
            else:
                return None
            return Awaited(call.what, _procs(call._target, ranks), call._number)
    return None


def awaited_here(without: Collection[str] = ()) -> list[Awaited]:
    """The unanswered endpoint calls of this process.

    Args:
        without: actors, by the unique names of their meshes, whose calls are omitted.
    """
    found: list[Awaited] = []
    getting: Counter[int] | None = None
    for call in list(get_system().node.calls.values()) if started() else []:
        futures: Sequence[Future[Any]]
        if isinstance(call, OneCall):
            asked, ranks, futures = [call._rank], [call._rank], [call]
        elif isinstance(call, ManyCall | StreamCall) and call.asked is not None:
            asked, ranks = range(len(call._target.procs)), call.unanswered()
            futures = [call] if isinstance(call, ManyCall) else call._slots
        else:
            continue
        target = call._target
        if target.actor in without:
            continue
        if getting is None:
            getting = Counter(_futures_in_get())
        waiters = sum(len(future._callbacks or ()) + getting[id(future)] for future in futures)
        found.append(
            Awaited(call.what, _procs(target, ranks), call._number, _procs(target, asked), waiters, target.of_tool)
        )
    return found


def _procs(target: Target, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(target.procs[rank].id for rank in ranks))


def _futures_in_get() -> Iterator[int]:
    """The identities of the futures whose `get()` is running on a thread of this process."""
    for frame in current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            if here.f_code is _GET:
                yield id(here.f_locals.get("self"))
            here = here.f_back


def proc_here() -> str:
    """The id of this process among the procs; "" before the runtime has started."""

    return get_system().node.id if started() else ""
