"""How long other ranks will wait for stopped ones: the timeouts of their process groups.

A stopped rank keeps others waiting in their collectives, which time out eventually (gloo: after 30 minutes by default,
NCCL: 10) and end the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel.debugger.events import RankStop
from monarch_kernel.debugger.rank.collective_wait import waiting_here

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.view import DebuggerView

#: How long ranks may take to report what they wait for (seconds).
ASK_TIMEOUT = 0.5


@dataclass(frozen=True, slots=True)
class Countdown:
    """A timeout that runs while ranks are stopped.

    Attributes:
        left: a lower bound for the remaining time (seconds); the wait may have begun after the first stop.
        limit: the timeout (seconds).
        mesh: the name of the mesh.
        ranks: the ranks that wait.
        what: the collective, such as `all_reduce`.
    """

    left: float
    limit: float
    mesh: str
    ranks: tuple[int, ...]
    what: str


def countdown(debugger: DebuggerView, stops: Sequence[RankStop]) -> Countdown | None:
    """The timeout that expires first among collectives that wait for these stops; None if no rank waits or answers."""
    from monarch_kernel.debugger.controller.query import ask

    found: list[Countdown] = []
    for mesh in {at.mesh for at in stops}:
        here = [at for at in debugger.stops(mesh) if at.stop.thread]
        if not here:
            continue
        procs = debugger.mesh(mesh)
        stopped = {at.rank for at in here}
        others = [rank for rank in range(len(procs)) if rank not in stopped]
        answers = ask(procs, waiting_here, ranks=others, timeout=ASK_TIMEOUT) if others else None
        waiting = {rank: said for rank, said in answers.values.items() if said} if answers is not None else {}
        if waiting:
            limit = min(each for _, each in waiting.values())
            began = min(at.stop.since for at in here)
            what = sorted({name for name, _ in waiting.values()})[0]
            left = max(0.0, began + limit - time.time())
            found.append(Countdown(left, limit, mesh, tuple(sorted(waiting)), what))
    return min(found, key=lambda each: each.left, default=None)
