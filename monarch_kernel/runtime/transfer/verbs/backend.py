"""Access buffers on other hosts by RDMA: the requester's InfiniBand or RoCE card reads and writes their memory.

The owner connects a queue pair once per pair of processes, and registers a buffer once; after that no code runs there
for a transfer. ``card`` has pyverbs and an opened card. ``ports`` determines which ports reach each other. ``route``
has the queue pairs to one owner. ``transfer`` and ``queue_pairs`` split a transfer and run it. ``regions`` has the
local regions.

This backend has no atomics: the owner performs them for all backends. A card's atomics are atomic only with respect to
the same card (``IBV_ATOMIC_HCA``, on nearly all cards), not to a processor, so a word accessed in both ways would lose
updates.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
import zlib
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.backends import BackendContext
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op, await_death
from monarch_kernel.runtime.transfer.memory import Memory
from monarch_kernel.runtime.transfer.verbs.card import (
    Card,
    CardPort,
    ConnectAnswer,
    ConnectRequest,
    Gid,
    QueuePairEnd,
    decode_request,
    encode,
    find_ports,
    pair,
    pyverbs,
)
from monarch_kernel.runtime.transfer.verbs.regions import SMALL, RegionCache, WorkFailure, register
from monarch_kernel.runtime.transfer.verbs.transfer import Route, Transfer

#: How long a failed route is not retried (seconds): devices and networks come and go.
BARRED_FOR = 300.0
#: How long an error waits for the report of the owner's death, and ``close`` for running transfers (seconds).
CAUSE_WAIT = 1.0
END_WAIT = 2.0
#: Looked up for each transfer, so its text is the key of the cards that it names.
_DEVICE = environment.RDMA_DEVICE.name


def why_not() -> str:
    """Return why this process cannot use an RDMA card; "" if it can."""
    ports = find_ports()
    if not ports:
        named = environment.RDMA_DEVICE.get()
        return (
            f"no active port of {named} ({environment.RDMA_DEVICE.name})"
            if named
            else "no InfiniBand or RoCE card with an active port"
        )
    try:
        v = pyverbs()
    except ImportError as e:
        return f"pyverbs cannot be imported ({e})"
    try:
        v.Context(name=ports[0].device).close()
    except v.PyverbsError as e:
        return f"the RDMA device {ports[0].device} cannot be opened ({e})"
    return ""


class Verbs:
    """RDMA READ and WRITE over reliable connections."""

    name = "ibverbs"
    inline = SMALL
    devices = True

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine
        self._guard = threading.Lock()
        self._cards: dict[tuple[str, int], tuple[Card, RegionCache]] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        #: The reason why a buffer (by key) or all buffers of an owner (by name) cannot be reached, and since when.
        self._barred: dict[int | str, tuple[str, float]] = {}
        self._responder = Responder()
        self._closed = False
        #: The cards for transfers that start here, by the value of the setting.
        self._chosen_by: dict[str | None, list[tuple[Card, RegionCache]]] = {}
        self._pid = os.getpid()
        _all.add(self)

    @staticmethod
    def available() -> bool:
        return not why_not()

    def bars(self, handle: Handle) -> str:
        if self._closed:
            return "it has been shut down"
        if self._barred:
            for what in (handle.owner.id, handle.key):
                why, since = self._barred.get(what, ("", 0.0))
                if why and time.monotonic() < since + BARRED_FOR:
                    return why
        return ""

    # -- transfers that begin here -----------------------------------------------------------------

    def move(self, op: Op, deadline: float | None) -> None:
        if op.handle.owner.id in self._engine.node.deaths:
            raise Gone
        if not self._engine.work.runs_here() and not self._ready(op.handle):
            raise Unfit("the owner must be asked first, and the calling thread must not wait for that")
        routes = [self._route(op.handle, card, regions) for card, regions in self._chosen()]
        try:
            Transfer(op, deadline, routes, lambda: self._closed, self._engine.registration_around).run()
        except Unfit as e:
            self._bar(op.handle, str(e), any(route.works for route in routes))
            raise
        except WorkFailure as e:
            why = self._explained(op, e.status, routes, deadline)
            if type(why) is Unfit:
                self._bar(op.handle, str(why), reached=False)
            raise why from None

    def _ready(self, handle: Handle) -> bool:
        known = self._chosen_by.get(os.environ.get(_DEVICE))
        route = self._routes.get((handle.owner.id, known[0][0].name)) if known else None
        return route is not None and route.ready(handle.key)

    def _bar(self, handle: Handle, why: str, reached: bool) -> None:
        if len(self._barred) > 4096:
            self._barred.clear()
        self._barred[handle.key if reached else handle.owner.id] = why, time.monotonic()

    def _route(self, handle: Handle, card: Card, regions: RegionCache) -> Route:
        owner = handle.owner.id
        with self._guard:
            route = self._routes.get((owner, card.name))
            if route is None or route.dead:

                def offer(handle: Handle, request: bytes, deadline: float | None) -> bytes:
                    return self._engine.offer(handle, self.name, request, deadline)

                route = self._routes[owner, card.name] = Route(card, regions, offer, environment.RDMA_QUEUE_PAIRS.get())
            if owner in self._engine.node.deaths:
                route.dead = True
            return route

    def _explained(self, op: Op, status: int, routes: list[Route], deadline: float | None) -> Exception:
        """Return the error that explains the failure of a work request."""
        e, handle, owner = pyverbs().e, op.handle, op.handle.owner.id
        for route in routes:
            route.forget(handle.key)
        if status in (e.IBV_WC_RETRY_EXC_ERR, e.IBV_WC_RNR_RETRY_EXC_ERR):
            if self._is_dead(handle):
                return Gone()
            if not any(route.proven for route in routes):
                names = ", ".join(route.card.name for route in routes)
                return Unfit(
                    f"the owner's card does not answer {names}: RDMA traffic does not get from one to the other"
                )
            return RDMAError(f"{op} failed: the owner's card no longer answers", owner)
        if status in (e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_REM_INV_REQ_ERR, e.IBV_WC_REM_OP_ERR):
            if self._engine.node.poller.in_leader():
                return self._engine.dropped(op)  # nearly always the reason; this thread cannot query the owner
            try:
                routes[0].ask(handle, 0, min(deadline or float("inf"), time.monotonic() + CAUSE_WAIT))
            except RDMATimeoutError:
                pass
            except RDMAError:
                return Gone() if owner in self._engine.node.deaths else self._engine.dropped(op)
            return RDMAError(f"{op} failed: the owner's card refused it (work completion status {status})", owner)
        why = "took no more work requests" if status < 0 else f"could not do it (work completion status {status})"
        return RDMAError(f"{op} failed: the card {why}", owner)

    def _is_dead(self, handle: Handle) -> bool:
        return await_death(self._engine.node, handle.owner, CAUSE_WAIT) is not None

    # -- the owner's part --------------------------------------------------------------------------

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        asked = decode_request(request)
        path = self._facing(asked.port)
        with self._engine.held(key) as registration:
            return encode(self._responder.answer(key, registration.memory, asked, peer, path))

    def dropped(self, key: int) -> None:
        """Deny all cards access to a dropped registration of this process."""
        if os.getpid() != self._pid:
            return
        self._responder.dropped(key)
        for _, regions in self._cards.copy().values():
            regions.dropped(key)

    def peer_dead(self, proc: str) -> None:
        if os.getpid() != self._pid:
            return
        with self._guard:
            routes = [self._routes.pop(key) for key in list(self._routes) if key[0] == proc]
            self._barred.pop(proc, None)
        for route in routes:
            route.dead = True  # running transfers check this

        def tidy() -> None:
            for route in routes:
                route.end()
            self._responder.peer_dead(proc)

        self._engine.serve.run(tidy)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._guard:
            self._closed = True
            routes, self._routes = list(self._routes.values()), {}
        end = time.monotonic() + END_WAIT
        for route in routes:
            route.end()
        for route in routes:
            if not route.wait_ended(max(0.0, end - time.monotonic())):
                return  # a thread still uses a queue pair, so the exit of the process closes it
        for card, _ in self._cards.values():
            card.close()

    # -- cards -------------------------------------------------------------------------------------

    def _card(self, device: str, number: int) -> tuple[Card, RegionCache]:
        with self._guard:
            if self._closed:
                raise Unfit("it has been shut down")
            known = self._cards.get((device, number))
            if known is None:
                port = next((p for p in find_ports() if (p.device, p.number) == (device, number)), None)
                if port is None:
                    raise Unfit(f"port {number} of {device} is no longer active")
                card = Card(port)
                known = self._cards[device, number] = card, RegionCache(card)
            return known

    def _chosen(self) -> list[tuple[Card, RegionCache]]:
        """Return the cards for transfers that start here: the configured ones, or one of the fastest."""
        named = os.environ.get(_DEVICE)
        known = self._chosen_by.get(named)
        if known is not None:
            return known
        ports = find_ports()
        if not ports:
            raise Unfit(why_not())
        if not named:
            best = [p for p in ports if (p.rate, p.ethernet) == (ports[0].rate, ports[0].ethernet)]
            # Distributes the processes of a host over its cards.
            ports = [best[zlib.crc32(self._engine.node.id.encode()) % len(best)]]
        known = self._chosen_by[named] = [self._card(p.device, p.number) for p in ports]
        return known

    def _facing(self, theirs: CardPort) -> tuple[Card, Gid, Gid]:
        """Return the card and the addresses for a peer with this port.

        A card of the same name is preferred, because hosts are alike.
        """
        ports = sorted(find_ports(), key=lambda p: (p.device, p.number) != (theirs.device, theirs.number))
        for port in ports:
            card, _ = self._card(port.device, port.number)
            gids = pair(card.port, theirs)
            if gids is not None:
                return card, *gids
        raise Unfit(f"no RDMA device of {self._engine.node.id} reaches {theirs.device} of the requesting process")


class Responder:
    """The queue pairs and regions that this process has set up for peers."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        #: peer -> (its card's port, number of its queue pair) -> the card and queue pair here
        self._pairs: dict[str, dict[tuple[str, int], tuple[Card, Any]]] = {}
        #: buffer -> card -> its region, and the offset of its addresses there
        self._regions: dict[int, dict[str, tuple[Card, Any, int]]] = {}
        self._dead: set[str] = set()

    def answer(
        self, key: int, memory: Memory, request: ConnectRequest, peer: str, path: tuple[Card, Gid, Gid]
    ) -> ConnectAnswer:
        """Register a buffer and connect a peer's queue pairs.

        Raises:
            Unfit: the card does not support it.
            RDMAError: the peer is dead.
        """
        card, here, there = path
        region, shift = self._region(key, memory, card)
        asker = f"{request.port.device}:{request.port.number}"
        self._end(peer, [(asker, number) for number in request.gone])
        ends: list[QueuePairEnd] = []
        for theirs in request.ends:
            queue_pair, mine = card.queue_pair()
            with self._guard:
                self._pairs.setdefault(peer, {})[asker, theirs.number] = card, queue_pair
            card.connect(queue_pair, mine, here, theirs, there, request.port, asks=False)
            ends.append(mine)
        if peer in self._dead:
            self.peer_dead(peer)
            raise RDMAError(f"{peer} is dead")
        return ConnectAnswer(card.port, here, there, tuple(ends), region.rkey, shift)

    def _region(self, key: int, memory: Memory, card: Card) -> tuple[Any, int]:
        with self._guard:
            known = self._regions.setdefault(key, {})
            if card.name not in known:
                known[card.name] = card, *register(card, memory, remote=True, writable=not memory.why_readonly)
            _, region, shift = known[card.name]
            return region, shift

    def _end(self, peer: str, which: list[tuple[str, int]]) -> None:
        with self._guard:
            pairs = self._pairs.get(peer, {})
            ended = [pairs.pop(number) for number in which if number in pairs]
        for card, queue_pair in ended:
            card.end(queue_pair)

    def dropped(self, key: int) -> None:
        """Deny all peers' cards access to the buffer. Running transfers get an error."""
        with self._guard:
            regions = self._regions.pop(key, {})
        for card, region, _ in regions.values():
            card.end(region)

    def peer_dead(self, peer: str) -> None:
        """Close the queue pairs of a dead peer."""
        with self._guard:
            self._dead.add(peer)
            pairs = self._pairs.pop(peer, {})
        for card, queue_pair in pairs.values():
            card.end(queue_pair)


_all: weakref.WeakSet[Verbs] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """Keep the objects in a forked child for ever: collecting its copies would destroy those of the parent."""
    for verbs in _all:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(verbs))


os.register_at_fork(after_in_child=_keep_for_ever)
