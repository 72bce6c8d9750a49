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
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from monarch_kernel import environment
from monarch_kernel.runtime.transfer.backends import BackendContext
from monarch_kernel.runtime.transfer.device import gather, scatter
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op, await_death
from monarch_kernel.runtime.transfer.memory import Layout, Memory, common_runs, copy, steps
from monarch_kernel.runtime.transfer.verbs.card import (
    Card,
    CardPort,
    ConnectAnswer,
    ConnectRequest,
    Gid,
    QueuePairEnd,
    decode_answer,
    decode_request,
    encode,
    find_ports,
    pair,
    pyverbs,
)
from monarch_kernel.runtime.transfer.verbs.regions import (
    SMALL,
    STAGE,
    MemoryKeys,
    QueuePair,
    RegionCache,
    StagingBuffer,
    WorkFailure,
    drive,
    register,
)

# Run one transfer through RDMA cards: directly between the two memories, or staged.

# The route from a card of this process to one owner: queue pairs, created on demand, and the keys of its buffers.

#: The maximum number of an owner's buffers that are remembered.
REMOTES = 1 << 16

#: (buffer, request, deadline) -> the owner's answer
Offer = Callable[[Handle, bytes, float | None], bytes]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """The owner's card's address and key of a buffer."""

    rkey: int
    shift: int


class Route:
    """The queue pairs to one owner. Each is lent to one transfer at a time, so that a failure affects no other."""

    def __init__(self, card: Card, regions: RegionCache, offer: Offer, most: int) -> None:
        self.card = card
        self.regions = regions
        self.dead = False
        #: Whether the owner has ever connected a queue pair of this route, and whether a transfer over one succeeded.
        self.works = self.proven = False
        self._offer = offer
        self._most = most
        self._queue_pairs = 0  # all of them: lent, free or in creation
        self._free: list[QueuePair] = []
        self._gone: list[int] = []  # numbers of connected ones that were closed
        self._remotes: dict[int, RemoteRegion] = {}
        self._changed = threading.Condition()

    @contextmanager
    def lent(
        self, op: Op, wanted: int, deadline: float | None
    ) -> Generator[tuple[list[QueuePair], RemoteRegion], None, None]:
        """Lend between 1 and ``wanted`` queue pairs that reach the owner, with the buffer's region on the owner's card.

        Raises:
            Unfit, Gone, RDMAError, RDMATimeoutError: as for ``Backend.move``.
        """
        queue_pairs, remote = self._take(op, wanted, deadline)
        try:
            yield queue_pairs, remote
        finally:
            self._give(queue_pairs)

    def _take(self, op: Op, wanted: int, deadline: float | None) -> tuple[list[QueuePair], RemoteRegion]:
        while True:
            with self._changed:
                if self.dead:
                    raise Gone
                remote = self._remotes.get(op.handle.key)
                missing = max(0, min(wanted - len(self._free), self._most - self._queue_pairs))
                if remote is not None and not missing and self._free:
                    queue_pairs, self._free = self._free[:wanted], self._free[wanted:]
                    return queue_pairs, remote
                if remote is not None and not missing:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise RDMATimeoutError(f"{op} did not begin in time", op.handle.owner.id)
                    self._changed.wait(left)
                    continue
                self._queue_pairs += missing
            try:
                self.ask(op.handle, missing, deadline)
            except Unfit:
                with self._changed:
                    if remote is None or not self._queue_pairs:
                        raise
                    self._most = self._queue_pairs  # the limit is reached

    def ask(self, handle: Handle, count: int, deadline: float | None) -> None:
        """Request the owner to register a buffer and connect ``count`` new queue pairs, which are already counted."""
        made: list[QueuePair] = []
        kept = 0
        with self._changed:
            gone, self._gone = self._gone, []
        try:
            for _ in range(count):
                made.append(QueuePair(self.card))
            request = ConnectRequest(self.card.port, tuple(queue_pair.end for queue_pair in made), tuple(gone))
            answer = decode_answer(self._offer(handle, encode(request), deadline))
            gone = []
            for queue_pair, end in zip(made, answer.ends):
                self.card.connect(
                    queue_pair.pair, queue_pair.end, answer.there, end, answer.here, answer.port, asks=True
                )
                kept += 1
        finally:
            with self._changed:
                kept = 0 if self.dead else kept
                self._queue_pairs -= count - kept
                self._gone += gone
                self._free += made[:kept]
                self._gone += [queue_pair.end.number for queue_pair in made[kept:]]
                self._changed.notify_all()
            for queue_pair in made[kept:]:
                queue_pair.close()
        with self._changed:
            self.works = self.works or bool(kept)
            if len(self._remotes) >= REMOTES:
                self._remotes.clear()
            self._remotes[handle.key] = RemoteRegion(answer.rkey, answer.shift)

    def _give(self, queue_pairs: list[QueuePair]) -> None:
        broken = [queue_pair for queue_pair in queue_pairs if self.dead or not queue_pair.idle]
        for queue_pair in broken:
            queue_pair.close()
        with self._changed:
            self._queue_pairs -= len(broken)
            self._gone += [queue_pair.end.number for queue_pair in broken]
            self._free += [queue_pair for queue_pair in queue_pairs if queue_pair not in broken]
            self._changed.notify_all()
            dead = self.dead
        if dead:
            self.end()

    def ready(self, key: int) -> bool:
        """Return whether a transfer can start without a query to the owner."""
        return key in self._remotes and bool(self._free) and not self.dead

    def forget(self, key: int) -> None:
        """Forget a buffer, because the owner may have another key for it, or none."""
        with self._changed:
            self._remotes.pop(key, None)

    def end(self) -> None:
        """Close the queue pairs that are not lent. Lent ones are closed on return."""
        with self._changed:
            self.dead = True
            free, self._free = self._free, []
            self._queue_pairs -= len(free)
            self._changed.notify_all()
        for queue_pair in free:
            queue_pair.close()

    def wait_ended(self, seconds: float) -> bool:
        """Wait until all queue pairs are closed. Return False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue_pairs, seconds)


#: The size of a transfer per queue pair (bytes). One work request moves between this and PIECE_MAX.
PIECE = 1 << 20
PIECE_MAX = 8 << 20
#: Shorter pieces of scattered local memory are gathered by a copy, longer ones by the card (bytes).
SHORT = 16 << 10
#: A work request costs about as much as this many bytes on the wire, so shorter gaps of scattered remote memory are
#: read as well; SPAN_MAX limits such a read.
GAP = 16 << 10
SPAN_MAX = 256 << 20


class Transfer:
    """One operation.

    Args:
        routes: the routes to its owner, one for each participating card.
        closing: whether the backend is shutting down.
        buffer: returns the registration of this process that memory lies in; 0 for none.
    """

    def __init__(
        self,
        op: Op,
        deadline: float | None,
        routes: list[Route],
        closing: Callable[[], bool],
        buffer: Callable[[Layout], int],
    ) -> None:
        self._op = op
        self._deadline = deadline
        self._routes = routes
        self._closing = closing
        self._buffer = buffer
        self._theirs = op.handle.layout

    def run(self) -> None:
        """Run the transfer.

        Raises:
            Failed, Unfit, Gone, RDMAError, RDMATimeoutError: see ``Backend.move`` and ``WorkFailure``.
        """
        op, mine = self._op, self._op.memory.layout
        if op.memory.ready is not None:
            op.memory.ready.synchronize()  # work that the GPU had queued when the transfer was requested
        whole = self._theirs.part(op.offset, op.offset + op.size)
        if not op.write and not op.memory.device and whole is not None and _worth_spanning(whole):
            self._read_span(whole)
        elif op.size <= SMALL or (not mine.contiguous and mine.run < SHORT) or not self._directly():
            self._in_between()

    def _directly(self) -> bool:
        """Transfer directly between the two memories.

        Return False without a transfer if the local one cannot be registered.
        """
        op = self._op
        most = -(-op.size // PIECE)
        routes = self._routes[:most]
        each = max(1, min(environment.RDMA_QUEUE_PAIRS.get(), most) // len(routes)) if most > 1 else 1
        buffer = self._buffer(op.memory.layout)
        with ExitStack() as stack:
            try:
                # Entered first, so released last: no queue pair may be in use while its memory is not registered.
                regions = [stack.enter_context(r.regions.lent(op.memory, not op.write, buffer)) for r in routes]
            except Unfit:
                return False
            queue_pairs: list[tuple[QueuePair, MemoryKeys]] = []
            for route, region in zip(routes, regions):
                taken, remote = stack.enter_context(route.lent(op, each, self._deadline))
                keys = MemoryKeys(region.lkey, remote.rkey, region.shift, remote.shift)
                queue_pairs += [(queue_pair, keys) for queue_pair in taken]
            self._drive(queue_pairs, op.memory.layout, 0, op.offset, op.size)
        return True

    def _in_between(self) -> None:
        """Transfer piece by piece through contiguous memory that is already registered."""
        op, mine = self._op, self._op.memory
        cuts = [(0, op.size)] if op.size <= STAGE else _cuts(mine.layout, op.size)
        route = self._routes[0]
        with ExitStack() as stack:
            staging = stack.enter_context(route.regions.staging(max(hi - lo for lo, hi in cuts)))
            queue_pairs = self._queue_pairs(stack, route, staging, op.size)
            for lo, hi in cuts:
                between = staging.layout(hi - lo)
                if op.write:
                    gather(mine, lo, hi - lo, staging.address)
                self._drive(queue_pairs, between, 0, op.offset + lo, hi - lo)
                if not op.write:
                    scatter(mine, lo, hi - lo, staging.address)

    def _read_span(self, whole: Layout) -> None:
        """Read everything between the first and the last byte, then copy the runs from there."""
        low, high = whole.span()
        self._theirs = Layout(low, (), high - low)
        route = self._routes[0]
        with ExitStack() as stack:
            staging = stack.enter_context(route.regions.staging(high - low))
            queue_pairs = self._queue_pairs(stack, route, staging, high - low)
            self._drive(queue_pairs, staging.layout(high - low), 0, 0, high - low)
            picked = Layout(whole.address - low + staging.address, whole.dims, whole.run)
            copy(self._op.memory.layout, 0, picked, 0, self._op.size)

    def _queue_pairs(
        self, stack: ExitStack, route: Route, staging: StagingBuffer, size: int
    ) -> list[tuple[QueuePair, MemoryKeys]]:
        wanted = min(environment.RDMA_QUEUE_PAIRS.get(), size // PIECE) if size >= 2 * PIECE else 1
        taken, remote = stack.enter_context(route.lent(self._op, wanted, self._deadline))
        keys = MemoryKeys(staging.lkey, remote.rkey, 0, remote.shift)
        return [(queue_pair, keys) for queue_pair in taken]

    def _drive(
        self, queue_pairs: list[tuple[QueuePair, MemoryKeys]], mine: Layout, at: int, there: int, size: int
    ) -> None:
        piece = min(max(size // (4 * len(queue_pairs)), PIECE), PIECE_MAX)
        piece = min(piece, *(queue_pair.card.largest for queue_pair, _ in queue_pairs))
        drive(queue_pairs, common_runs(mine, at, self._theirs, there, size, piece), self._op.write, self._check)
        for route in self._routes:
            route.proven = True

    def _check(self) -> None:
        owner = self._op.handle.owner.id
        if any(route.dead for route in self._routes):
            raise Gone
        if self._closing():
            raise RDMAError(f"{self._op} failed: this process is shutting its runtime down", owner)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise RDMATimeoutError(f"{self._op} did not end in time", owner)


def _cuts(layout: Layout, size: int) -> list[tuple[int, int]]:
    """Return pieces that a copy gathers fast; for contiguous memory, any pieces."""
    if layout.contiguous:
        return [(lo, min(lo + STAGE, size)) for lo in range(0, size, STAGE)]
    return steps(layout, 0, size)


def _worth_spanning(layout: Layout) -> bool:
    if layout.contiguous:
        return False
    low, high = layout.span()
    return high - low <= SPAN_MAX and high - low - layout.nbytes <= GAP * (layout.nbytes // layout.run)


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
        self._pairs: dict[str, dict[tuple[str, int], tuple[Card, object]]] = {}
        #: buffer -> card -> its region, and the offset of its addresses there
        self._regions: dict[int, dict[str, tuple[Card, object, int]]] = {}
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
