"""Find out how long other ranks will wait for stopped ranks: the timeouts of their process groups.

Other ranks wait for a stopped rank in their collectives. These time out eventually (gloo: after 30 minutes by default,
NCCL: 10) and end the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.events import RankStop
from monarch_kernel.debugger.rank.collective_wait import extend_timeouts, waiting_here
from monarch_kernel.display.quantities import duration
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.controller.registry import MeshOrName

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


def countdown(debugger: MeshDebugger, stops: Sequence[RankStop]) -> Countdown | None:
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


def stops_alone(size: int, ranks: Sequence[int], first: bool, partners: Mapping[int, Any]) -> str:
    """Explain why ranks of a mesh cannot all stop at a breakpoint, if ranks that continue will wait for stopped ones.

    Args:
        size: the number of ranks of the mesh.
        ranks: the ranks that the breakpoint applies to.
        first: whether only the first of them stops.
        partners: the answers of these ranks to ``partners_here``.

    Returns:
        The explanation in words; "" if no rank will wait.
    """
    known = [each for each in partners.values() if each is not None]
    shared = {rank for found, _ in known for rank in found if rank < size}
    others = shared if first else shared - set(ranks)
    if not others:
        return ""
    limit = duration(min(limit for _, limit in known)).removesuffix(" 0 s")
    if first:
        return f"the other ranks wait for it in their next collective, for up to {limit}, and do not come to this line"
    who = f"ranks {format_ranks(sorted(others), limit=6)} do" if len(others) > 1 else f"rank {min(others)} does"
    wait = "wait" if len(others) > 1 else "waits"
    return f"{who} not stop there, and {wait} for the stopped ones in the next collective, for up to {limit}"


def extend(debugger: MeshDebugger, mesh: MeshOrName, seconds: float) -> str:
    """Ask the process groups of a mesh to wait longer in later collectives. Stopped ranks answer this, too.

    Returns:
        One line for the user: how many groups on which ranks were changed, and which groups refused.
    """
    from monarch_kernel.debugger.controller.query import ask

    answers = ask(debugger.mesh(mesh) if isinstance(mesh, str) else mesh, extend_timeouts, seconds, timeout=2.0)
    done = {rank: count for rank, (count, _) in answers.values.items() if count}
    refused = sorted({why for _, reasons in answers.values.values() for why in reasons})
    refused += [f"ranks {format_ranks(answers.late)} do not answer"] if answers.late else []
    if not done and not refused:
        return "No rank has a process group, so no collective times out."
    groups = max(done.values(), default=0)
    said = f"{groups} process group{'s' * (groups != 1)} on ranks {format_ranks(sorted(done))}: " if done else ""
    limit = f"collectives that begin from now on wait for up to {duration(seconds)}" if done else "none was extended"
    return said + limit + (f"; refused: {'; '.join(refused)}" if refused else "")
