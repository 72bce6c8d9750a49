"""A link over TCP as its user sees it: messages, their order, and how much of them is on the way.

On the wire: a message is ``<u32 header length><u64 body length>``, header and body, as in ``Link``, cut into ZeroMQ
messages of ``CHUNK`` bytes, so that heartbeats and others' messages pass between them. What is as long as ``CONTROL``
is said by the link itself: HELLO (the first of a connection), BYE (the last), CREDIT.

Flow control: at most about ``WINDOW`` bytes are with ZeroMQ or on the way; the receiver says by CREDIT what it has
handled. The rest waits here and counts as ``queued``.

An end is final. A connection that breaks is never made again, as nobody knows what was lost with it. ``close`` is
orderly: what was queued goes to ZeroMQ with a BYE after it, and is sent unless that takes longer than ``LINGER``; the
other side handles all of it before it closes. Whoever loses the connection without a BYE handles what had arrived.
"""

from __future__ import annotations

import logging
import mmap
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from monarch_kernel.protocol.messages import PREFIX, decode
from monarch_kernel.runtime.node.poller import Poller

log = logging.getLogger(__name__)

#: The largest piece of a message. On a slow network it is what a heartbeat waits for.
CHUNK = 512 * 1024
#: How much may be on the way without the receiver having handled it: bandwidth times delay, generously.
WINDOW = 16 * 1024 * 1024
#: Messages up to this size are joined into one piece without further ado.
_JOIN = 32 * 1024
#: What is at least this large gets huge pages.
_HUGE = 4 * 1024 * 1024
#: What is handed over at once, until another thread may use the socket.
_TURN = 1024 * 1024

CONTROL = struct.Struct("<BQ")
HELLO, BYE, CREDIT = 1, 2, 3
_HEAD = PREFIX.size

CLOSED_HERE = "it was closed here"
CLOSED_THERE = "the other side closed it"
BROKEN = "the other side broke the protocol"


class Carrier(Protocol):
    """The connection that a link sends through."""

    def transmit(self, ident: bytes, frames: list[Any]) -> None:
        """Hand these over to ZeroMQ, for this peer."""

    def drain(self, ident: bytes) -> None:
        """Handle what has come from this peer."""

    def leave(self, link: CurveLink, orderly: bool) -> None:
        """The link has ended; ``orderly``: after a BYE of its own."""


class CurveLink:
    """Sends and receives whole messages over an encrypted TCP connection; may exist before the connection does.

    ``send`` may be called from any thread. ``on_message(link, header, body)`` and ``on_close(link)`` are called by the
    thread that polls (``on_close`` also by whoever calls ``close``).
    """

    def __init__(
        self,
        poller: Poller,
        carrier: Carrier,
        ident: bytes,
        where: str,
        on_message: Callable[[CurveLink, Any, Any], None],
        on_close: Callable[[CurveLink], None],
    ) -> None:
        self.peer = ""
        self.pid = 0
        #: The other end's address, for people.
        self.where = where
        #: Why it was closed, in one clause; while a dial goes on: what stands in its way.
        self.ended = ""
        self.closed = False
        self.attached = False
        self.queued = 0  # bytes not yet handed over to ZeroMQ
        self.on_message = on_message
        self.on_close = on_close
        self.ident = ident
        self._poller = poller
        self._carrier = carrier
        self._lock = threading.RLock()  # held while sending, so that messages keep their order
        self._out: deque[Any] = deque()
        self._on_the_way = 0
        self._handled = 0  # since the last CREDIT
        self._big: memoryview | None = None
        self._big_at = 0
        self._big_header = 0

    # -- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, body: Any = b"") -> None:
        """Queue or send one message. ``body`` is bytes-like, or a list of bytes-like pieces.

        The pieces are not kept after this returns: what ZeroMQ did not get is copied, unless it cannot change.
        """
        if type(body) is bytes and len(body) <= _JOIN:
            frames: list[Any] = [PREFIX.pack(len(header), len(body)) + header + body]
            size = len(frames[0])
        else:
            pieces = body if type(body) is list else [body]
            views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
            size = sum(map(len, views))
            head = PREFIX.pack(len(header), size) + header
            frames = _cut([memoryview(head), *views])
            size += len(head)
        # An interrupt in between would cut the message in two, or leave it to nobody to look for the answer.
        with self._poller.shielded(), self._lock:
            if self.closed:
                return
            if len(frames) == 1 and not self._out and self.attached and self._on_the_way < WINDOW:
                self._on_the_way += size
                self._carrier.transmit(self.ident, frames)
                return
            self._out.extend(frames)
            self.queued += size
            self._flush()
            for at in range(-min(len(frames), len(self._out)), 0):
                frame = self._out[at]
                if type(frame) is memoryview and type(frame.obj) is not bytes:
                    self._out[at] = bytes(frame)

    def _flush(self) -> None:
        """Hand over what the window allows; the lock is held."""
        while self._out and self.attached and self._on_the_way < WINDOW:
            turn: list[Any] = []
            size = 0
            while self._out and size < _TURN and self._on_the_way + size < WINDOW:
                turn.append(self._out.popleft())
                size += len(turn[-1])
            self._on_the_way += size
            self.queued -= size
            self._carrier.transmit(self.ident, turn)

    def _say(self, code: int, value: int = 0) -> None:
        self._carrier.transmit(self.ident, [CONTROL.pack(code, value)])

    def come_up(self, greet: bool) -> None:
        """The connection is there: send what has waited for it."""
        with self._lock:
            if self.closed:
                return
            self.attached = True
            self.ended = ""
            if greet:
                self._say(HELLO)
            self._flush()

    # -- receiving ------------------------------------------------------------------------------

    @property
    def in_body(self) -> bool:
        """Whether a large message is on its way in."""
        return self._big is not None

    def take(self, data: Any) -> None:
        """Handle one ZeroMQ message: bytes, or a ``zmq.Frame``."""
        if self.closed:
            return
        view = memoryview(data) if type(data) is bytes else data.buffer
        size = len(view)
        if size == CONTROL.size:
            self._on_control(*CONTROL.unpack(view))
            return
        if self._big is not None:
            self._fill(self._big, view)
        elif size < _HEAD:
            self.end(BROKEN, orderly=True)
            return
        else:
            header_size, body_size = PREFIX.unpack_from(view)
            body_at = _HEAD + header_size
            if size == body_at + body_size:
                self._tell(view[_HEAD:body_at], view[body_at:])
            else:
                # The body begins where any array in it is aligned.
                gap = -header_size % 64
                self._big = memoryview(_memory(gap + header_size + body_size))[gap:]
                self._big_at, self._big_header = 0, header_size
                self._fill(self._big, view[_HEAD:])
        self._handled += size
        if self._handled >= WINDOW // 4 and not self.closed:
            handled, self._handled = self._handled, 0
            with self._poller.shielded():
                self._say(CREDIT, handled)

    def _fill(self, big: memoryview, view: memoryview) -> None:
        end = self._big_at + len(view)
        if end > len(big):
            self.end(BROKEN, orderly=True)
            return
        big[self._big_at : end] = view
        self._big_at = end
        if end == len(big):
            self._big = None
            self._tell(big[: self._big_header], big[self._big_header :])

    def _tell(self, header: memoryview, body: memoryview) -> None:
        try:
            self.on_message(self, decode(header), body)
        except Exception:
            log.exception("a message handler failed; this is a bug in monarch_kernel")

    def _on_control(self, code: int, value: int) -> None:
        if code == CREDIT:
            with self._poller.shielded(), self._lock:
                self._on_the_way -= value
                self._flush()
        elif code == BYE:
            self.end(CLOSED_THERE)

    def drain(self) -> None:
        """Handle everything that has already arrived; for a peer known to be dead."""
        if not self.closed and self.attached and self._poller.in_leader():
            self._carrier.drain(self.ident)

    # -- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the link; what was sent before still goes out, if that is possible at once. Later sends go nowhere."""
        self.end(CLOSED_HERE, orderly=True)

    def end(self, why: str, orderly: bool = False) -> None:
        """End the link for this reason, and tell ``on_close``; only the first time."""
        with self._poller.shielded():
            with self._lock:
                if self.closed:
                    return
                self.closed = True
                self.ended = why
                orderly = orderly and self.attached
                if orderly:
                    self._carrier.transmit(self.ident, [*self._out, CONTROL.pack(BYE, 0)])
                self._out.clear()
                self.queued = 0
                self._big = None
            self._carrier.leave(self, orderly)
        try:
            self.on_close(self)
        except Exception:
            log.exception("a handler of a link's end failed; this is a bug in monarch_kernel")

    def abandon(self) -> None:
        """In a fork of this process: say and hear nothing. (Its descriptors are closed by the fork itself.)"""
        self.closed = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.attached else "waiting"
        return f"<CurveLink to {self.peer or '?'} at {self.where} {state}>"


def _memory(size: int) -> Any:
    """Writable memory; from huge pages where that is possible, as touching that much anew costs more than a copy."""
    if size < _HUGE:
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    return memory


def _cut(views: list[memoryview]) -> list[Any]:
    """The bytes of all views in pieces of ``CHUNK``, none shorter than a message's head; copied only across views."""
    frames: list[Any] = []
    held: list[memoryview] = []
    room = CHUNK
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + room]
            at += len(part)
            room -= len(part)
            held.append(part)
            if not room:
                frames.append(held[0] if len(held) == 1 else b"".join(held))
                held, room = [], CHUNK
    if held:
        # What is short could be taken for a word of the link itself.
        if frames and CHUNK - room < _HEAD:
            held.insert(0, frames.pop())
        frames.append(held[0] if len(held) == 1 else b"".join(held))
    return frames
