"""Requests to the runtime of other processes (host agents and all ranks), as opposed to calls of endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.messages import OK, ProcRef, Reply
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps
from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths, Target
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.node.node import Node

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.process import System
    from monarch_kernel.runtime.actor.wire_types import Body, MessageLink, RankedMessage


def acknowledge(link: MessageLink, call: int, rank: int, value: object = None) -> None:
    """Answer a completed request to the runtime with this small value."""
    link.send(encode_header(Reply(call, rank, OK)), dumps(value)[0])


def ask_agent(node: Node, agent: ProcRef, what: str, message: Callable[..., Any], *fields: Any) -> OneCall:
    """Send ``message(call number, *fields)`` to a host agent. The returned call fails at once if the agent is dead."""
    target = Target(f"host agent of {agent.host}", agent.id, SINGLE, (agent,), ReportedDeaths())
    call = OneCall(node, what, target, 0)
    node.learn(agent)
    if not node.send(agent.id, message(call._number, *fields)):
        call.on_peer_dead(agent.id, node.deaths[agent.id])
    return call


def send_to_all(
    system: System, target: Target, message: RankedMessage, body: Body = b"", sink: ManyCall | None = None
) -> None:
    """Send a message to all ranks of a target; its ``rank`` differs for each.

    Args:
        system: the system of this process.
        target: the ranks to send to.
        message: the header; its ``call``, if any, is the number of ``sink``.
        body: the same for all ranks; large buffers travel inside the message.
        sink: the call that gets the answers.
    """
    node = system.node
    plan = target.plan_for(system.caster)
    if plan is not None:
        system.caster.cast(plan.group, message, body, sink)
    for rank, ref in enumerate(target.procs) if plan is None else plan.near:
        link = node.links.get(ref.id)
        if link is None:
            node.learn(ref)
            link = node.link_to(ref.id)
        if link is None:
            if sink is not None:
                sink.on_peer_dead(ref.id, node.deaths[ref.id])
            continue
        message.rank = rank
        link.send(encode_header(message), body)
