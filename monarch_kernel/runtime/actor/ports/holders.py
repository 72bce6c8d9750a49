"""Track the holders of ports: reports of senders, and the record of receivers.

Pickling a port into a message gives the port to the destination. The sender of the message knows the destination, and
reports it to the port's receiver first, so that the receiver knows the new holder before the previous one can die. If a
port is pickled in any other way, the sender reports that any process may hold it. A process also reports an actor that
drops its copy, or that ends while it holds one; the ends of processes are known anyway.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from monarch_kernel.protocol.messages import (
    DEAD,
    Death,
    DeathKind,
    PortGiven,
    PortLeft,
    ProcRef,
    death_of,
    encode_death,
)
from monarch_kernel.protocol.serialize import PLAIN, dumps_any, dumps_arrays, is_plain
from monarch_kernel.runtime.actor.context import current, shared
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.wire_types import Body, Buffers, MessageLink, Pickled
from monarch_kernel.runtime.supervision import Sender, Senders

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.calls.target import Target
    from monarch_kernel.runtime.actor.ports.port import Port
    from monarch_kernel.runtime.actor.process import System


T = TypeVar("T")


class _Met(threading.local):
    ports: list[Port[Any]] | None = None  # None: ports pickled here have an unknown destination
    arrived: list[Port[Any]] | None = None  # None: ports unpickled here belong to the running actor


_met = _Met()


def pickled(value: Any) -> tuple[Pickled, Buffers, Sequence[Port[Any]]]:
    """Pickle a value for a message. Return also its ports, which ``give`` must report before the message is sent."""
    if type(value) in PLAIN:  # the usual case
        return pickle.dumps(value, 5), (), ()
    arrays = dumps_arrays(value)
    if arrays is not None:
        return *arrays, ()
    if is_plain(value):
        return pickle.dumps(value, 5), (), ()
    outer = _met.ports
    _met.ports = ports = []
    try:
        body, buffers = dumps_any(value)
    finally:
        _met.ports = outer
    return body, buffers, ports


def met(port: Port[Any]) -> None:
    """Record a port that is being pickled."""
    if _met.ports is not None:
        _met.ports.append(port)
    else:
        give_to_unknown([port])


def give(ports: Iterable[Port[object]], to: Target | ProcRef, ranks: Iterable[int] | None = None) -> None:
    """Report to the receivers of these ports which actors of a mesh, or which process, get them."""
    if isinstance(to, ProcRef):
        _tell(ports, PortGiven(0, 0, "", to.id, (), (), (to,), (0,)))
        return
    chosen = tuple(range(len(to.procs)) if ranks is None else ranks)
    procs = tuple(to.procs[rank] for rank in chosen)
    extent = to.extent
    _tell(ports, PortGiven(0, 0, to.actor, to.mesh_name, extent.names, extent.shape, procs, chosen))


def give_to_unknown(ports: Iterable[Port[object]]) -> None:
    """Report to the receivers of these ports that any process may hold them from now on."""
    _tell(ports, PortGiven(0, 0, "", "", (), (), (), ()))


def _tell(ports: Iterable[Port[object]], news: PortGiven) -> None:
    system = get_system()
    for port in {id(port): port for port in ports}.values():  # a port pickled twice in one message arrives once
        ref = port._ref
        message = msgspec.structs.replace(news, call=port._number, rank=port._rank)
        if ref.id == system.node.id:
            system.ports.on_given(None, message, None)
        else:
            system.node.learn(ref)
            system.node.send(ref.id, message)


def arrived(value: Callable[[], T]) -> tuple[T, list[Port[Any]]]:
    """Return an unpickled value and its ports, which do not belong to the running actor."""
    outer = _met.arrived
    _met.arrived = ports = []
    try:
        return value(), ports
    finally:
        _met.arrived = outer


def came(port: Port[object]) -> None:
    """Record a port that arrived in a message."""
    if _met.arrived is not None:
        _met.arrived.append(port)
        return
    here = current.get()
    if here is not None:
        here.actor_instance.hold(port)


def let_go(system: System, port: Port[Any], actor: str) -> None:
    """Report that an actor here dropped its copy of a port. Safe in finalizers, which may run on any thread."""
    if port._ref.id not in system.node.deaths:
        system.node.learn(port._ref)
        system.node.poller.say_late(port._ref.id, PortLeft(port._number, port._rank, actor))


def leave(system: System, actor: str, ports: Iterable[Port[object]], death: Death) -> None:
    """Report that an actor of this process ended while it held these ports."""
    told = b""
    for port in ports:
        port._holder = None
        receiver = port._ref
        system.node.learn(receiver)
        if receiver.id != system.node.id and not told:
            told = encode_death(death)
        body = death if receiver.id == system.node.id else told
        system.node.send(receiver.id, PortLeft(port._number, port._rank, actor), body)


class PortHolding(Protocol):
    """A wait that fails when all senders are gone: a port's receiver, or an answer that a rank delegated to others."""

    def senders(self) -> Senders | None:
        """Return the holders of the port; None if the wait is over."""
        ...

    def nobody_left(self) -> None:
        """Handle that all holders are gone."""


class NobodyLeft(Exception):
    """All holders of a port are gone."""

    def __init__(self, lost: list[tuple[Sender, Death]]) -> None:
        super().__init__(lost)
        self.lost = lost


class _Answer:
    """The answer of one rank to one call, which the rank delegated to other actors."""

    def __init__(self, book: PortHolders, number: int, rank: int) -> None:
        self._book = book
        self._number = number
        self._rank = rank
        self._senders = Senders()

    def senders(self) -> Senders | None:
        """Return the actors that may answer; None if the call has ended."""
        return self._senders if self._number in self._book.node.calls else None

    def nobody_left(self) -> None:
        """Handle that all actors that could answer are gone."""
        sink = self._book.node.calls.get(self._number)
        if sink is None:
            return
        sender, death = self._senders.lost[-1]
        of = f"rank {sender.rank} of mesh {sender.mesh!r}" if sender.actor else f"process {sender.proc.id}"
        cause = f"its answer was left to {of} (host {sender.proc.host}), which is gone: {death.cause}"
        gone = Death.of(DeathKind.ACTOR_FAILED, cause, death.proc, death.host, death.pid, death.detail)
        sink.on_reply(self._rank, DEAD, gone, ())


class PortHolders:
    """The receivers of this process, by call number, and the holders of their ports."""

    def __init__(self, system: System) -> None:
        self.node = system.node
        self._given: dict[tuple[int, int], PortHolding] = {}  # by call and rank
        self._prune_at = 64
        self._lock = threading.Lock()  # shared by the polling thread and the threads that send to this process itself
        self.node.handlers[PortGiven] = self.on_given
        self.node.handlers[PortLeft] = self._on_left
        self.node.on_peer_dead.append(self._on_peer_dead)

    def used_here(self, number: int) -> None:
        """Record that this process sent through a port of its own receiver, and may do so again."""
        sink = self.node.calls.get(number)
        senders = getattr(sink, "senders", None)
        if senders is not None and (known := senders()) is not None:
            known.given_to_unknown()

    def on_given(self, _link: MessageLink | None, message: PortGiven, _body: Body | None) -> None:
        """Record the new holders of a port whose receiver is in this process."""
        sink: Any = self.node.calls.get(message.call)
        if sink is None:
            return
        key = (message.call, message.rank)
        with self._lock:
            entry = self._given.get(key)
            if entry is None:
                self._prune()
                entry = sink if hasattr(sink, "senders") else _Answer(self, *key)
                self._given[key] = entry
        senders = entry.senders()
        if senders is None:
            return
        if not message.procs:
            senders.given_to_unknown()
            return
        extent = shared(message.labels, message.sizes)
        with self._lock:
            senders.given(
                Sender(ref, message.actor, message.mesh, rank, extent)
                for ref, rank in zip(message.procs, message.ranks, strict=True)
            )
        self._watch(message.procs)
        for ref in message.procs:
            death = self.node.deaths.get(ref.id) or self.node.deaths.get(ref.agent)
            if death is not None:
                self._ended(entry, ref.id, death)

    def _watch(self, procs: Iterable[ProcRef]) -> None:
        """Ensure that this process is notified when these procs end."""
        node = self.node
        unheard = [ref for ref in procs if ref.id not in node.links and ref.id not in node.deaths]
        for ref in unheard:
            node.learn(ref)
            if ref.agent == ref.id:  # a controller: only the loss of its connection shows its end
                node.link_to(ref.id)
        node.watch([ref.id for ref in unheard])

    def _prune(self) -> None:
        """Drop ended entries once the table has doubled."""
        if len(self._given) >= self._prune_at:
            for key, entry in list(self._given.items()):
                if key[0] not in self.node.calls or entry.senders() is None:
                    del self._given[key]
            self._prune_at = max(64, 2 * len(self._given))

    def _on_left(self, link: MessageLink, message: PortLeft, body: Body) -> None:
        entry = self._given.get((message.call, message.rank))
        if entry is None:
            return
        if body:
            self._ended(entry, link.peer, death_of(body), message.actor)
            return
        senders = entry.senders()
        if senders is None:
            return
        with self._lock:
            is_lost = senders.let_go(link.peer, message.actor)
        if is_lost:
            entry.nobody_left()

    def _on_peer_dead(self, proc: str, death: Death) -> None:
        with self._lock:
            entries = list(self._given.values())
        for entry in entries:
            self._ended(entry, proc, death)

    def _ended(self, entry: PortHolding, proc: str, death: Death, actor: str | None = None) -> None:
        senders = entry.senders()
        if senders is None:
            return
        far = self.node.routes.far

        def gone(sender: Sender) -> bool:
            ref = sender.proc
            if ref.id == proc:
                return actor is None or sender.actor == actor
            return ref.agent == proc or (ref.gateway == proc and far(ref))

        with self._lock:
            is_lost = senders.ended(gone, death)
        if is_lost:
            entry.nobody_left()
