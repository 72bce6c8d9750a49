"""Stacks of ranks, which their host agents read from outside the process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from monarch_kernel.protocol.messages import AskStacks, StackRead
from monarch_kernel.runtime.actor.calls.requests import ask_agent

#: Extra time for the answer of a host agent, beyond the time limit of its reads (seconds).
_GRACE = 0.5


def stacks_from_outside(
    mesh: Any, ranks: Iterable[int], *, native: bool = False, timeout: float = 2.0
) -> dict[int, StackRead]:
    """Read the stacks of ranks of a proc mesh with py-spy, which their host agents run.

    Args:
        mesh: the proc mesh.
        ranks: ranks of the mesh.
        native: include frames of native code, which pauses each rank for about 100 ms.
        timeout: limit for all ranks together (seconds).

    Returns:
        The stack of each rank, or why it could not be read; a failed read never raises.
    """
    target = mesh._target()
    node = mesh._system.node
    chosen = sorted(set(ranks))
    by_agent: dict[str, list[int]] = {}
    for rank in chosen:
        by_agent.setdefault(target.procs[rank].agent, []).append(rank)
    found: dict[int, StackRead] = {}
    calls: list[tuple[list[int], Any]] = []
    for members in by_agent.values():
        first = target.procs[members[0]]
        if first.id == node.id:  # no agent watches this process
            found[members[0]] = StackRead(first.id, mesh._system.pid, first.host, "", "", "it is the calling process")
            continue
        names = [target.procs[rank].id for rank in members]
        call = ask_agent(node, first.agent_ref(), f"{mesh.name}.stacks", AskStacks, names, native, timeout)
        calls.append((members, call))
    deadline = time.monotonic() + timeout + _GRACE
    for members, call in calls:
        reads: dict[str, StackRead] = {}
        trouble = "its host agent did not report it"
        try:
            reply = call.get(max(0.0, deadline - time.monotonic()))
            reads = {read.proc: read for read in msgspec.msgpack.decode(reply, type=list[StackRead])}
        except TimeoutError:
            trouble = f"its host agent did not answer within {timeout + _GRACE:g} s"
        except Exception as error:  # the agent is dead; the error says why
            trouble = str(error)
        for rank in members:
            ref = target.procs[rank]
            found[rank] = reads.get(ref.id) or StackRead(ref.id, node.pids.get(ref.id, 0), ref.host, "", "", trouble)
    return found
