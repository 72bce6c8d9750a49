"""Which calls a thread of this process waits for, read from its frames by tools that ask why it does not go on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

from monarch_kernel.runtime.actor.calls import ManyCall, OneCall
from monarch_kernel.runtime.node.future import Future

_GET = Future.get.__code__


@dataclass(frozen=True, slots=True)
class Awaited:
    """A call that a thread waits for.

    Attributes:
        what: what was called: `workers.step`.
        procs: the ids of the procs that have not answered.
        number: of the call, in this process.
    """

    what: str
    procs: tuple[str, ...]
    number: int


def awaited_by(frames: Iterable[FrameType]) -> Awaited | None:
    """The call whose answer a thread with these frames waits for; None if it waits for none."""
    for frame in frames:
        if frame.f_code is _GET:
            call = frame.f_locals.get("self")
            if isinstance(call, ManyCall):
                ranks = call.unanswered()
            elif isinstance(call, OneCall):
                ranks = [call._rank]
            else:
                return None
            procs = tuple(dict.fromkeys(call._target.procs[rank].id for rank in ranks))
            return Awaited(call.what, procs, call._number)
    return None


def proc_here() -> str:
    """The id of this process among the procs; "" before the runtime has started."""
    from monarch_kernel.runtime.actor import system

    return system.get_system().node.id if system.started() else ""
