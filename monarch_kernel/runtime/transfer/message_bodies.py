"""Send large bodies of messages to other hosts outside the control plane, directly between processes.

The control plane would send them through the gateways of both hosts in turn. Instead, the sender keeps the bytes and
offers them (``SegmentRef.handle``), and the receiver fetches them over the data plane as soon as the message has
arrived. Unpickling the message waits for them, so messages keep their order.

Out-of-band buffers are copied first, because the caller may change them once the message is sent. A body without
such buffers is immutable, and is not copied.

If the data plane cannot fetch a body (a firewall between the two, a missing package), the receiver requests it again
over the control plane. All later bodies from this sender to this receiver also use the control plane.

When the sender dies, its bodies are lost, like segments; unpickling one then raises ``ConnectionError``. Bodies for
dead receivers are dropped. A process that exits normally first waits until its bodies have been fetched (``drain``).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch_kernel import environment
from monarch_kernel.protocol.messages import BodyAgain, BodyFetched, Death, SegmentRef
from monarch_kernel.protocol.serialize import Apart, Body
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.link import allocate
from monarch_kernel.runtime.node.segments import leased, rounded
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.handle import Handle, Op, decode_handle, encode_handle
from monarch_kernel.runtime.transfer.memory import Layout, Memory, address_of, memory_of
from monarch_kernel.runtime.transfer.service import TransferService
from monarch_kernel.runtime.transfer.thread_pool import ThreadPool

log = logging.getLogger(__name__)

#: The maximum size of memory kept for later bodies (bytes): first touches of fresh memory cost more than the copy.
KEPT = 256 << 20
#: The time limit for the first connection to a sender (seconds). After that, the body is sent over the control plane.
CONNECT = 3.0
#: The time limit for a body (seconds). After that, it is requested over the control plane.
FETCH = 60.0
#: The maximum number of bodies that are fetched concurrently.
FETCHING = 8


class _Block:
    """Memory for a body: at the sender, registered with the data plane; at the receiver, referenced by arrays."""

    __slots__ = ("handle", "size", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        self.view = allocate(size)
        self.handle: Handle | None = None

    def memory(self, size: int) -> Memory:
        """Return its first ``size`` bytes, for the data plane."""
        return Memory(Layout(address_of(self.view), (), size), self.view)


class _Blocks:
    """A pool of free blocks. ``give`` may be called by finalizers, so it takes no lock."""

    def __init__(self, discard: Callable[[_Block], None]) -> None:
        self._discard = discard
        self._given: deque[_Block] = deque()
        self._free: dict[int, list[_Block]] = {}
        self._idle = 0
        self._guard = threading.Lock()

    def take(self, size: int) -> _Block:
        """Return a block of at least this size.

        Raises:
            MemoryError: there is not enough memory.
        """
        size = rounded(size)
        with self._guard:
            self._sort()
            free = self._free.get(size)
            if free:
                self._idle -= size
                return free.pop()
        return _Block(size)

    def give(self, block: _Block) -> None:
        """Take back an unused block."""
        self._given.append(block)

    def _sort(self) -> None:
        while self._given:
            block = self._given.popleft()
            if self._idle + block.size <= KEPT:
                self._free.setdefault(block.size, []).append(block)
                self._idle += block.size
            else:
                self._discard(block)


class _Offer:
    """A body that some receivers have not fetched yet."""

    __slots__ = ("block", "handle", "receivers", "size", "view")

    def __init__(self, receivers: set[str], view: memoryview, block: _Block | None, handle: Handle) -> None:
        self.receivers = receivers
        self.view = view
        self.size = view.nbytes
        self.block = block
        self.handle = handle


class MessageBodies:
    """The bodies that this process offers to processes of other hosts, and the bodies that it fetches."""

    def __init__(self, engine: TransferService) -> None:
        self._engine = engine
        self._node = engine.node
        self._numbers = itertools.count(1)
        self._blocks = _Blocks(self._discard)
        self._offers: dict[int, _Offer] = {}
        self._offered = 0
        self._limit = environment.SEGMENT_LIMIT.get()
        self._no_path: set[str] = set()  # receivers that could not fetch a body
        self._drained: Future[None] | None = None
        self._threads = ThreadPool("monarch-transfer-bodies", FETCHING)
        self._fetches: dict[tuple[str, int], _Fetch] = {}
        self._reached: set[str] = set()  # senders with which a connection has existed
        self._guard = threading.Lock()
        #: The number of bodies that this process has fetched over the data plane.
        self.fetched = 0
        self._node.handle(BodyFetched, self._on_fetched)
        self._node.handle(BodyAgain, self._on_again)
        self._node.on_peer_dead.append(self._on_peer_dead)

    # -- the sender's side --------------------------------------------------------------------------

    def offer(self, body: Body, buffers: tuple[int, ...], receivers: list[str]) -> tuple[Body, SegmentRef | None]:
        """Keep the large part of a serialized body until these procs have fetched it.

        Returns:
            The body to send, and the reference for the header; None if the body has everything.
        """
        if not self._no_path.isdisjoint(receivers):
            return body, None
        size = sum(piece.nbytes for piece in map(memoryview, body[:-1])) if buffers else len(body)
        with self._guard:
            if self._offered + size > self._limit:
                return body, None
            self._offered += size
        try:
            offer, rest = self._prepare(body, buffers, size, set(receivers))
        except BaseException:
            with self._guard:
                self._offered -= size
            raise
        number = next(self._numbers)
        with self._guard:
            self._offers[number] = offer
        for receiver in receivers:
            if receiver in self._node.deaths:
                self._end(number, receiver)
        return rest, SegmentRef(self._node.id, os.getpid(), -1, number, size, False, encode_handle(offer.handle))

    def _prepare(self, body: Body, buffers: tuple[int, ...], size: int, receivers: set[str]) -> tuple[_Offer, bytes]:
        if not buffers:
            return _Offer(receivers, memoryview(body), None, self._engine.register(memory_of(body))), b""
        block = self._blocks.take(size)
        at = 0
        for piece in body[:-1]:
            view = memoryview(piece).cast("B")
            block.view[at : at + view.nbytes] = view
            at += view.nbytes
        if block.handle is None:
            block.handle = self._engine.register(block.memory(block.size))
        return _Offer(receivers, block.view[:size], block, block.handle), body[-1]

    def _discard(self, block: _Block) -> None:
        if block.handle is not None:
            self._engine.drop_here(block.handle.key)

    def _end(self, number: int, receiver: str) -> None:
        with self._guard:
            offer = self._offers.get(number)
            if offer is None:
                return
            offer.receivers.discard(receiver)
            if offer.receivers:
                return
            del self._offers[number]
            self._offered -= offer.size
            drained = self._drained if not self._offers else None
        if offer.block is None:
            self._engine.drop_here(offer.handle.key)
        else:
            self._blocks.give(offer.block)
        if drained is not None:
            drained._resolve(None)

    def _on_fetched(self, link: PeerLink, message: BodyFetched, _body: Body) -> None:
        offer = self._offers.get(message.number)
        if offer is None or link.peer not in offer.receivers:
            return
        if not message.fetched:
            self._no_path.add(link.peer)
            self._node.send(link.peer, BodyAgain(message.number), [offer.view])
        self._end(message.number, link.peer)

    def drain(self, timeout: float) -> None:
        """Wait until all bodies have been fetched, or their receivers are dead."""
        with self._guard:
            if not self._offers:
                return
            drained = self._drained = Future(self._node.poller, "fetching the last messages of this process")
        try:
            drained.get(timeout)
        except TimeoutError:
            log.warning("%d large messages were not fetched within %g s", len(self._offers), timeout)

    # -- the receiver's side --------------------------------------------------------------------------

    def receive(self, ref: SegmentRef, pickled: bytes) -> Apart:
        """Start to fetch the bodies that a message offers. Its memory is available when they have arrived."""
        fetch = _Fetch(self, ref)
        with self._guard:
            self._fetches[ref.owner, ref.number] = fetch
        self._threads.run(fetch.run)
        self._node.poller.start_background()
        return Apart(fetch.memory, pickled)

    def fetch(self, ref: SegmentRef) -> _Block:
        """Fetch a body. Blocks.

        Raises:
            RDMAError: the data plane cannot fetch it.
            MemoryError: there is no memory for it.
        """
        handle = decode_handle(ref.handle)
        if ref.owner not in self._reached:
            first = (ctypes.c_char * 1)()
            probe = Op(False, handle, 0, Memory(Layout(ctypes.addressof(first), (), 1), first), 1)
            self._engine.execute(probe, time.monotonic() + CONNECT, warn=False)
            self._reached.add(ref.owner)
        block = self._blocks.take(ref.size)
        self._engine.execute(
            Op(False, handle, 0, block.memory(ref.size), ref.size), time.monotonic() + FETCH, warn=False
        )
        self.fetched += 1
        return block

    def ended(self, ref: SegmentRef, fetched: bool) -> None:
        """Report the outcome of a fetch to the sender."""
        if fetched:
            self.forget(ref)
        self._node.send(ref.owner, BodyFetched(ref.number, fetched))

    def forget(self, ref: SegmentRef) -> None:
        """Stop expecting data for this reference."""
        with self._guard:
            self._fetches.pop((ref.owner, ref.number), None)

    def lease(self, block: _Block, size: int) -> memoryview:
        """Return the block's bytes. The block becomes free when the last array in it is deleted."""
        return leased(block.view, block.size, lambda: self._blocks.give(block))[:size]

    def death_of(self, owner: str) -> Death | None:
        """Return how a sender died; None if it is alive."""
        return self._node.deaths.get(owner)

    def new_future(self, what: str) -> Future[Any]:
        """Create a future on this process's poller."""
        return Future(self._node.poller, what)

    def _on_again(self, link: PeerLink, message: BodyAgain, body: Body) -> None:
        with self._guard:
            fetch = self._fetches.pop((link.peer, message.number), None)
        if fetch is not None:
            fetch.came(body)

    # -- deaths ---------------------------------------------------------------------------------------

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        for number in list(self._offers):
            self._end(number, proc)
        self._no_path.discard(proc)
        self._reached.discard(proc)
        with self._guard:
            lost = [self._fetches.pop(key) for key in list(self._fetches) if key[0] == proc]
        for fetch in lost:
            fetch.lost()


class _Fetch:
    """One body that is being received."""

    __slots__ = ("_bodies", "_done", "_ref")

    def __init__(self, bodies: MessageBodies, ref: SegmentRef) -> None:
        self._bodies = bodies
        self._ref = ref
        #: A block of this process, or the bytes from the control plane.
        self._done: Future[_Block | Body] = bodies.new_future(f"the large part of a message from {ref.owner}")

    def run(self) -> None:
        """Fetch the body, on a separate thread."""
        ref = self._ref
        try:
            block = self._bodies.fetch(ref)
        except MemoryError as e:
            self._bodies.ended(ref, fetched=True)  # over the control plane, the body would not fit either
            self._done._reject(e)
        except Exception as e:
            if self._bodies.death_of(ref.owner) is not None:
                self.lost()
                return
            if not isinstance(e, RDMAError):
                log.exception("a large message of %s could not be fetched; this is a bug in monarch_kernel", ref.owner)
            else:
                log.info("a large message of %s comes by the control plane: %s", ref.owner, e)
            self._bodies.ended(ref, fetched=False)
        else:
            self._bodies.ended(ref, fetched=True)
            self._done._resolve(block)

    def came(self, body: Body) -> None:
        """Accept the bytes from the control plane."""
        self._done._resolve(memoryview(body))

    def lost(self) -> None:
        """Fail: the sender is dead, and the bytes are lost."""
        death = self._bodies.death_of(self._ref.owner)
        why = f": {death.cause}" if death is not None else ""
        self._bodies.forget(self._ref)
        self._done._reject(ConnectionError(f"the large part of a message from {self._ref.owner} is gone with it{why}"))

    def memory(self) -> memoryview:
        """Wait for the bytes.

        Raises:
            ConnectionError: the sender is dead.
            MemoryError: there was no memory for them.
        """
        got = self._done.get()
        return self._bodies.lease(got, self._ref.size) if isinstance(got, _Block) else got
