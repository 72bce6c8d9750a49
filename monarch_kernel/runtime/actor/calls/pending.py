"""Pending calls: sinks that gather the replies of one or many ranks into a Future; requests to host agents and ranks.

The thread that reads the result decodes it, not the polling thread. A call ends when all ranks have replied. If a rank
dies, it ends after a moment for other ranks that die at the same time. If a rank fails, it ends after a short grace
period for the other answers. A failed rank therefore never blocks a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from monarch_kernel import environment
from monarch_kernel.protocol.casts import GONE
from monarch_kernel.protocol.faults import decode_fault
from monarch_kernel.protocol.messages import (
    DEAD,
    OK,
    Death,
    DeathKind,
    PeersFailed,
    ProcRef,
    Reply,
    death_of,
    decode_death,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths, Target, failure_of, unresponsive_text
from monarch_kernel.runtime.actor.errors import RankFailure, build_actor_error, build_supervision_error
from monarch_kernel.runtime.actor.wire_types import Body, Buffers, ReplyBody
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Timer

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.process import System
    from monarch_kernel.runtime.actor.wire_types import MessageLink, RankedMessage

#: How long a call waits, after a rank died, for others that died with it (seconds).
DEATH_GRACE = 0.003
#: The same if combined answers arrive from other hosts.
FAR_DEATH_GRACE = 0.02


#: Identifies a call at the ranks that run it: the actor, the endpoint and the sender.
CallKey = tuple[str, str, str]
_NOBODY: frozenset[str] = frozenset()
#: Types of values that ranks with equal replies may share.
_PLAIN = (int, float, str, bytes, bool, type(None))


class OneCall(Future[Any]):
    """A call of exactly one actor."""

    __slots__ = ("_body", "_buffers", "_decoded", "_node", "_number", "_rank", "_status", "_target")

    def __init__(self, node: Node, what: str, target: Target, rank: int) -> None:
        self._poller = node.poller
        self._done = False
        self._parked = []
        self._callbacks = None
        self._value = None
        self._error = None
        self.what = what
        self._node = node
        self._target = target
        self._rank = rank
        self._status = -1
        self._body: ReplyBody | None = None
        self._buffers: Buffers = ()
        self._decoded = False
        self._number = node.new_call(self)

    def retarget(self, target: Target) -> None:
        """Switch to another target: the rank was replaced before anything was sent to it."""
        self._target = target

    def on_reply(self, rank: int, status: int, body: ReplyBody, buffers: Buffers) -> None:
        if self._done:
            return
        self._node.calls.pop(self._number, None)
        self._status = status
        self._body = body
        self._buffers = buffers
        if status == DEAD:
            self._target.reported.met.add((self._target.actor, self._target.procs[self._rank].id))
        self._done = True  # the following as in `_finish`
        self._poller.notify(self)
        if self._callbacks is not None:
            self._call_back()

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self._target.procs[self._rank].id and not self._done:
            self._node.calls.pop(self._number, None)
            self._target.reported.met.add(proc)
            self._status = DEAD
            self._body = death
            self._finish()

    def _waiting(self) -> str:
        return unresponsive_text(self._node, self._target, [self._rank])

    def _result(self) -> object:
        __tracebackhide__ = True
        if not self._decoded:
            try:
                if self._status == OK:
                    self._value = loads(self._body, self._buffers)
                elif self._error is None:
                    self._error = self._failure()
            except Exception as e:  # a result that cannot be unpickled here fails the call
                self._error = e
            self._decoded = True
            self._body = None
        if self._error is not None:
            raise self._error
        return self._value

    def _failure(self) -> Exception:
        """Return the error that the reply reports."""
        target = self._target
        fault = death = None
        if self._status == DEAD:
            death = death_of(self._body)
        else:
            fault = decode_fault(cast("bytes", self._body))
        failure = failure_of(self._node, target, self._rank, fault, death)
        target.note_raised(failure)
        if death is None:
            return build_actor_error(self.what, target.extent, [failure], {}, [], target.called)
        return build_supervision_error(
            self.what, target.mesh_name, target.extent, [failure], {}, [], target.actor_class, target.called
        )


class ManyCall(Future[Any]):
    """A call of all actors of a slice; it resolves to a ValueMesh.

    With ``starts``, the call starts ranks or actors, and its `ActorError` has no other type.
    """

    __slots__ = (
        "_bodies",
        "_buffers",
        "_decoded",
        "_left",
        "_node",
        "_number",
        "_starts",
        "_statuses",
        "_target",
        "_timer",
        "asked",
        "relayed",
    )

    def __init__(self, node: Node, what: str, target: Target, starts: bool = False) -> None:
        super().__init__(node.poller, what)
        self._starts = starts
        n = len(target.procs)
        self._node = node
        self._target = target
        self._left = n
        self._bodies: list[ReplyBody] = [b""] * n
        self._statuses: list[int] = [-1] * n
        self._buffers: list[Buffers] = [()] * n
        self._timer: Timer | None = None
        self._decoded = False
        self.asked: CallKey | None = None
        self.relayed = _NOBODY  # procs whose answers come through their agents
        self._number = node.new_call(self)

    def retarget(self, target: Target) -> None:
        """Switch to another target: some ranks were replaced before anything was sent to them."""
        self._target = target

    def on_replies(
        self, ranks: Sequence[int], statuses: bytes, bodies: Sequence[Body], buffers: dict[int, Buffers]
    ) -> None:
        """Handle combined answers; without ``statuses``, all are OK."""
        if self._done:
            return
        if statuses:
            for rank, status, body in zip(ranks, statuses, bodies, strict=True):
                if status == GONE:
                    self.on_gone(rank, decode_death(cast("bytes", body)))
                else:
                    self.on_reply(rank, status, body, buffers.get(rank, ()))
            return
        known, kept = self._statuses, self._bodies
        fresh = 0
        for rank, body in zip(ranks, bodies, strict=True):
            if known[rank] < 0:
                known[rank] = OK
                kept[rank] = body
                fresh += 1
        for rank, lengths in buffers.items():
            self._buffers[rank] = lengths
        self._left -= fresh
        if not self._left:
            self._end()

    def on_gone(self, rank: int, death: Death) -> None:
        """Handle the death of a rank's proc: the rank will not answer, unless it already has."""
        if not self._done and self._statuses[rank] < 0:
            self._target.reported.met.add(self._target.procs[rank].id)
            self.on_reply(rank, DEAD, death, ())

    def on_reply(self, rank: int, status: int, body: ReplyBody, buffers: Buffers) -> None:
        if self._done or self._statuses[rank] >= 0:
            return
        self._statuses[rank] = status
        self._bodies[rank] = body
        self._buffers[rank] = buffers
        self._left -= 1
        if not self._left:
            self._end()
        elif status != OK:
            if status == DEAD:
                self._target.reported.met.add((self._target.actor, self._target.procs[rank].id))
            death_grace = FAR_DEATH_GRACE if self.relayed else DEATH_GRACE
            self._end_within(death_grace if status == DEAD else environment.ERROR_GRACE.get())

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc in self.relayed or self._done:
            return
        for rank in self._target.by_proc.get(proc, ()):
            self.on_gone(rank, death)

    def _end_within(self, grace: float) -> None:
        if self._timer is None:
            self._timer = self._node.poller.call_later(grace, self._end)
            failed = {rank: self._bodies[rank] for rank, status in enumerate(self._statuses) if status > OK}
            release_others(self._node, self._target, self.asked, failed, self.unanswered())
        elif grace < environment.ERROR_GRACE.get():
            self._timer.cancel()
            self._timer = self._node.poller.call_later(grace, self._end)

    def _end(self) -> None:
        if self._done:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._node.calls.pop(self._number, None)
        self._finish()

    def _waiting(self) -> str:
        waiting = [rank for rank, status in enumerate(self._statuses) if status < 0]
        if not waiting:
            return ""
        silent = unresponsive_text(self._node, self._target, waiting)
        return f"; waiting for {self._target.called.points(waiting)}{silent}"

    def unanswered(self) -> list[int]:
        """Return the ranks of the slice that have not answered yet."""
        return [rank for rank, status in enumerate(self._statuses) if status < 0]

    def _result(self) -> object:
        __tracebackhide__ = True
        if not self._decoded:
            try:
                self._decode()
            except Exception as e:
                self._error = e
            self._decoded = True
            self._bodies = []
        return super()._result()

    def _decode(self) -> None:
        target = self._target
        if not any(self._statuses):
            self._value = ValueMesh(target.extent, _load_all(self._bodies, self._buffers))
            return
        values: dict[int, object] = {}
        failures: list[RankFailure] = []
        unanswered: list[int] = []
        dead = False
        for rank, status in enumerate(self._statuses):
            body = self._bodies[rank]
            if status == OK:
                values[rank] = loads(body, self._buffers[rank])
            elif status < 0:
                unanswered.append(rank)
            elif status == DEAD:
                dead = True
                failures.append(failure_of(self._node, target, rank, None, death_of(body)))
                target.note_raised(failures[-1])
            else:
                failures.append(failure_of(self._node, target, rank, decode_fault(cast("bytes", body)), None))
        if dead:
            self._error = build_supervision_error(
                self.what,
                target.mesh_name,
                target.extent,
                failures,
                values,
                unanswered,
                target.actor_class,
                target.called,
            )
        else:
            self._error = build_actor_error(
                self.what, target.extent, failures, values, unanswered, target.called, self._starts
            )


def _load_all(bodies: Sequence[ReplyBody], buffers: Sequence[Buffers]) -> list[object]:
    """Return the values of many ranks. Successive replies are often equal; those are unpickled only once."""
    values: list[object] = []
    last: ReplyBody | None = None
    value: object = None
    for body, lengths in zip(bodies, buffers, strict=True):
        if last is None or body != last:
            value = loads(body, lengths)
            last = body if type(value) in _PLAIN else None
        values.append(value)
    return values


class StreamCall(Iterator[Future[Any]]):
    """A call of all actors of a slice; iterating yields one future per actor, in order of completion."""

    def __init__(self, node: Node, what: str, target: Target) -> None:
        self.what = what
        self._node = node
        self._target = target
        self._ranks = [_StreamElement(node, what, target, rank) for rank in range(len(target.procs))]
        self._handed_out = 0
        self._slots: list[Future[object]] = [_Slot(node.poller, what) for _ in self._ranks]
        self._completed = 0
        self._has_failed = False
        self.asked: CallKey | None = None
        self.relayed = _NOBODY
        self._number = node.new_call(self)

    def retarget(self, target: Target) -> None:
        """Switch to another target: some ranks were replaced before anything was sent to them."""
        self._target = target
        for element in self._ranks:
            element._target = target

    def on_replies(
        self, ranks: Sequence[int], statuses: bytes, bodies: Sequence[Body], buffers: dict[int, Buffers]
    ) -> None:
        """Handle combined answers; without ``statuses``, all are OK."""
        for rank, status, body in zip(ranks, statuses or bytes(len(ranks)), bodies, strict=True):
            if status == GONE:
                self.on_gone(rank, decode_death(cast("bytes", body)))
            else:
                self.on_reply(rank, status, body, buffers.get(rank, ()))

    def on_gone(self, rank: int, death: Death) -> None:
        """Handle the death of a rank's proc: the rank will not answer, unless it already has."""
        self._target.reported.met.add(self._target.procs[rank].id)
        self.on_reply(rank, DEAD, death, ())

    def on_reply(self, rank: int, status: int, body: ReplyBody, buffers: Buffers) -> None:
        element = self._ranks[rank]
        if element.done():
            return
        element.settle(status, body, buffers)
        slot = self._slots[self._completed]
        self._completed += 1
        if self._completed == len(self._slots):
            self._node.calls.pop(self._number, None)
        elif status != OK and not self._has_failed:
            self._has_failed = True
            release_others(self._node, self._target, self.asked, {rank: body}, self.unanswered())
        slot._resolve(element)

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc not in self.relayed:
            for rank in self._target.by_proc.get(proc, ()):
                self.on_gone(rank, death)

    def unanswered(self) -> list[int]:
        """Return the ranks of the slice that have not answered yet."""
        return [rank for rank, element in enumerate(self._ranks) if not element.done()]

    def __iter__(self) -> Iterator[Future[Any]]:
        return self

    def __next__(self) -> Future[Any]:
        if self._handed_out == len(self._slots):
            raise StopIteration
        self._handed_out += 1
        return self._slots[self._handed_out - 1]

    def __len__(self) -> int:
        return len(self._slots)


class _StreamElement(OneCall):
    """One rank of a stream; its result is decoded like that of a separate call."""

    __slots__ = ()

    def __init__(self, node: Node, what: str, target: Target, rank: int) -> None:
        super().__init__(node, what, target, rank)
        node.calls.pop(self._number, None)  # the stream forwards replies to it

    def settle(self, status: int, body: ReplyBody, buffers: Buffers) -> None:
        OneCall.on_reply(self, self._rank, status, body, buffers)


class _Slot(Future[Any]):
    """The n-th completion: resolves to an element, and returns its result."""

    __slots__ = ()

    def _result(self) -> object:
        return super()._result()._result()


def release_others(
    node: Node, target: Target, asked: CallKey | None, failed: dict[int, ReplyBody], waiting: Sequence[int]
) -> None:
    """Notify ranks that have not answered that others failed: they may wait for these in a collective.

    Ranks that this process no longer holds continue, and so do ranks that wait for them.
    """
    if asked is None or any(isinstance(why, Death) and why.kind is DeathKind.LEFT for why in failed.values()):
        return
    message = PeersFailed(asked, list(failed))
    for rank in waiting:
        node.learn(target.procs[rank])
        node.send(target.procs[rank].id, message)


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
