"""Which calls a thread of this process waits for, read from its frames by tools that ask why it does not go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import FrameType

from monarch_kernel.runtime.actor.calls import ManyCall, OneCall, StreamCall
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


def awaited_here(without: Collection[str] = ()) -> list[Awaited]:
    """The calls of endpoints that this process has made and that have not been answered.

    Args:
        without: actors (by the unique names of their meshes) whose calls are left out.
    """
    from monarch_kernel.runtime.actor import system

    found: list[Awaited] = []
    for call in list(system.get_system().node.calls.values()) if system.started() else []:
        if isinstance(call, OneCall):
            ranks, target = [call._rank], call._target
        elif isinstance(call, ManyCall | StreamCall) and call.asked is not None:
            ranks, target = call.unanswered(), call._target
        else:
            continue
        if target.actor not in without:
            procs = tuple(dict.fromkeys(target.procs[rank].id for rank in ranks))
            found.append(Awaited(call.what, procs, call._number))
    return found


def proc_here() -> str:
    """The id of this process among the procs; "" before the runtime has started."""
    from monarch_kernel.runtime.actor import system

    return system.get_system().node.id if system.started() else ""
