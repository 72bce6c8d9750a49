"""What links over TCP stand on: a ZeroMQ context, its gatekeeper, and sockets that several threads may use.

A ZeroMQ socket belongs to one thread at a time, so each has a lock. Its descriptor becomes readable only when something
new has happened since anybody last looked: a thread that sends may be the one that takes note of an arrival. So every
use ends with a look at ``EVENTS``, and what has come is left to the thread that leads the poller.

Messages are never bounded by ZeroMQ's own limits (high-water marks): a socket that reads nothing because its limit is
reached does not hear heartbeats, either, and would take its peer for dead. The links bound them instead.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import zmq
from zmq.utils import z85

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node.poller import Poller

log = logging.getLogger(__name__)

HEARTBEAT_VARIABLE = "MONARCH_KERNEL_HEARTBEAT_TIMEOUT"
#: How long a host may be silent until its connection is given up (seconds).
HEARTBEAT_TIMEOUT = 3.0
#: How long a client of a listener may take for the handshake (milliseconds).
HANDSHAKE_TIME = 5000
#: How long what was sent before an orderly close is still tried to be sent (milliseconds).
LINGER = 1000
#: ZeroMQ connects again after this time, which nothing here waits for: a connection that was lost stays lost.
_NEVER = 86_400_000
#: The largest frame that is accepted: whatever the links send is smaller.
_LARGEST_FRAME = 2 * 1024 * 1024
#: How many messages are handled until others get their turn.
_BATCH = 100
_MAX_SOCKETS = 16_384

_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_DONTWAIT = int(zmq.DONTWAIT)
_SNDMORE = int(zmq.SNDMORE) | _DONTWAIT
_EVENT = struct.Struct("=Hi")

#: What a monitor tells of.
_WATCHED = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def heartbeat_timeout() -> float:
    """How long a host may be silent, in seconds.

    Raises:
        ValueError: the environment says something else than a time.
    """
    text = os.environ.get(HEARTBEAT_VARIABLE, "")
    try:
        seconds = float(text) if text else HEARTBEAT_TIMEOUT
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"{HEARTBEAT_VARIABLE} is {text!r}: it must be a number of seconds from 0.1 to 3600")
    return seconds


def _readable(sock: Any) -> bool:
    return bool(sock.getsockopt(_EVENTS) & _POLLIN)


def _descriptor(sock: Any) -> int:
    return sock.getsockopt(zmq.FD)


# -- contexts -------------------------------------------------------------------------------------


class Engine:
    """The ZeroMQ context of a poller, and the gatekeeper that admits the owners of a key.

    Made by the first link or listener, ended by the last. ``take_engine`` and ``release`` go in pairs.
    """

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.heartbeat = round(heartbeat_timeout() * 1000)
        self.wires: set[Wire] = set()
        self.users = 0
        self._context = zmq.Context(io_threads=max(1, min(4, (os.cpu_count() or 1) // 2)))
        self._context.set(zmq.MAX_SOCKETS, min(_MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        self._context.set(zmq.BLOCKY, 0)
        self._gate: zmq.Socket[bytes] | None = None
        self._gate_lock = threading.Lock()
        self._admitted: dict[bytes, bytes] = {}
        self._numbers = 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A new socket."""
        return self._context.socket(kind)

    def number(self) -> int:
        """A number that no other call gets."""
        with self._gate_lock:
            self._numbers += 1
            return self._numbers

    def admit(self, public: bytes) -> bytes:
        """Open the gate to the owners of a key; gives the name (ZAP domain) that a listener asks under."""
        domain = f"team-{self.number()}".encode()
        with self._gate_lock:
            self._admitted[domain] = z85.decode(public)
            if self._gate is None:
                self._gate = self.socket(zmq.REP)
                self._gate.bind("inproc://zeromq.zap.01")
                self.poller.register(_descriptor(self._gate), self._on_request)
        return domain

    def dismiss(self, domain: bytes) -> None:
        """Close the gate that ``admit`` opened."""
        with self._gate_lock:
            self._admitted.pop(domain, None)

    def _on_request(self, _events: int) -> None:
        for wire in tuple(self.wires):  # until the verdict the client is there, and its address can be asked for
            wire.look()
        with self._gate_lock:
            gate = self._gate
            while gate is not None and _readable(gate):
                gate.send_multipart(self._answer(gate.recv_multipart()))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The verdict on one client, by the ZAP protocol (RFC 27)."""
        version, number, domain, _address, _identity, mechanism = request[:6]
        key = request[6] if len(request) == 7 else b""
        if mechanism == b"CURVE" and key and self._admitted.get(domain) == key:
            return [version, number, b"200", b"", b"team", b""]
        return [version, number, b"400", b"no key of this team", b"", b""]

    def release(self) -> None:
        """One user less; the last one ends the context, once what was sent before has gone out (or ``LINGER``)."""
        with _registry.lock:
            self.users -= 1
            if self.users or _registry.engines.get(self.poller) is not self:  # or it is another process's
                return
            del _registry.engines[self.poller]
        with self._gate_lock:
            if self._gate is not None:
                self.poller.unregister(_descriptor(self._gate))
                self._gate.close(linger=0)
                self._gate = None
        with self.poller.shielded():
            self._context.destroy()


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines: dict[Poller, Engine] = {}
        #: In a fork: what belongs to the other process. Kept, as freeing it would touch what is shared.
        self.foreign: list[Engine] = []

    def after_fork(self) -> None:
        foreign = [*self.foreign, *self.engines.values()]
        self.__init__()
        self.foreign = foreign
        # A copy of a connection would keep it alive when the other process ends.
        for engine in foreign:
            for wire in tuple(engine.wires):
                wire.abandon()


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.after_fork)


def take_engine(poller: Poller) -> Engine:
    """The context of a poller, made now if there is none; pair with ``release``."""
    with _registry.lock:
        engine = _registry.engines.get(poller)
        if engine is None:
            engine = _registry.engines[poller] = Engine(poller)
        engine.users += 1
        return engine


# -- sockets --------------------------------------------------------------------------------------


class Owner(Protocol):
    """Who uses a ``Wire``. All of these are called by the thread that polls."""

    def wants_frame(self, ident: bytes) -> bool:
        """Whether the next message of this peer should come without a copy, as a ``zmq.Frame``. Must be quick."""
        ...

    def on_frame(self, ident: bytes, data: Any) -> None:
        """A message has come, from this peer of a listener (``b""``: this is no listener)."""

    def on_event(self, event: int, value: int) -> None:
        """The monitor tells something; ``value`` is a descriptor, an error number or a protocol error."""

    def on_idle(self) -> None:
        """Everything that had come was handled."""


class Wire:
    """A ZeroMQ socket with its monitor, for any thread to send on and the leading thread to receive from.

    Args:
        kind: ``zmq.DEALER`` to connect, ``zmq.ROUTER`` to listen.
    """

    def __init__(self, engine: Engine, kind: int, owner: Owner) -> None:
        self.closed = False
        self._engine = engine
        self._poller = engine.poller
        self._owner = owner
        self._routed = kind == zmq.ROUTER
        self._lock = threading.Lock()
        self._inbox: deque[tuple[bytes, Any]] = deque()
        self._pumping = False
        self._scheduled = False
        self._fds: set[int] = set()  # of TCP
        self.socket = engine.socket(kind)
        self._monitor = engine.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's thread would wait for us to read
        self._set_options(engine.heartbeat)

    def _set_options(self, timeout: int) -> None:
        set_option = self.socket.setsockopt
        set_option(zmq.LINGER, 0)
        set_option(zmq.SNDHWM, 0)
        set_option(zmq.RCVHWM, 0)
        set_option(zmq.MAXMSGSIZE, _LARGEST_FRAME)
        set_option(zmq.RECONNECT_IVL, _NEVER)
        # Silence is noticed after an interval and the time to answer: together the timeout.
        set_option(zmq.HEARTBEAT_IVL, timeout // 4)
        set_option(zmq.HEARTBEAT_TIMEOUT, timeout - timeout // 4)
        set_option(zmq.HEARTBEAT_TTL, timeout)
        # A heartbeat that waits behind bytes that nobody acknowledges is never sent: the kernel notices these.
        set_option(zmq.TCP_MAXRT, timeout)
        set_option(zmq.TCP_KEEPALIVE, 1)
        set_option(zmq.TCP_KEEPALIVE_IDLE, max(1, timeout // 1000))
        set_option(zmq.TCP_KEEPALIVE_INTVL, 1)
        set_option(zmq.TCP_KEEPALIVE_CNT, 3)

    def secure(self, keys: Keys, domain: bytes | None = None) -> None:
        """Use CURVE, as a listener (with the name from ``Engine.admit``) or as a client of one with the same keys."""
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        if domain is None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        else:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.ZAP_DOMAIN, domain)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper nobody is admitted

    def start(self, address: str, bind: bool = False) -> None:
        """Connect or bind, and begin to receive.

        Raises:
            zmq.ZMQError: it is not possible.
        """
        monitored = f"inproc://monitor-{self._engine.number()}"
        self.socket.monitor(monitored, _WATCHED)
        self._monitor.connect(monitored)
        self._engine.wires.add(self)
        if bind:
            self.socket.bind(address)
            self.read_events()  # a fork must know the descriptor
        else:
            self.socket.connect(address)
        self._poller.register(_descriptor(self._monitor), self.look)
        self._poller.register(_descriptor(self.socket), self.pump)
        # A descriptor tells of nothing until one has looked and found nothing.
        self._poller.call_later(0, self.look)

    # -- sending --------------------------------------------------------------------------------

    def transmit(self, ident: bytes, frames: Sequence[Any]) -> None:
        """Hand messages over to ZeroMQ, which copies them. A peer that is gone gets none; the monitor tells of that."""
        if self.closed:  # in a fork, the lock may be held for ever
            return
        with self._lock:
            if self.closed:
                return
            sock = self.socket
            try:
                for frame in frames:
                    if ident:
                        sock.send(ident, _SNDMORE)
                    sock.send(frame, _DONTWAIT)
            except zmq.ZMQError as e:
                log.debug("not sent: %s", e)
            # Sending may have taken note of what has come, and the descriptor is silent then.
            if self._pumping or self._scheduled or not _readable(sock):
                return
            self._scheduled = True
        self._poller.call_later(0, self.pump)

    # -- receiving ------------------------------------------------------------------------------

    def pump(self, _events: int = 0) -> None:
        """Handle what has come. Only by the thread that leads."""
        with self._lock:
            self._scheduled = False
            if self.closed or self._pumping:
                return
            self._pumping = True
        for _ in range(_BATCH):
            message = self._next()
            if message is None:
                self._owner.on_idle()
                return
            self._owner.on_frame(*message)
        with self._lock:
            self._pumping = False
            self._scheduled = True
        self._poller.call_later(0, self.pump)  # others first

    def _next(self) -> tuple[bytes, Any] | None:
        if self._inbox:
            return self._inbox.popleft()
        with self._lock:
            if self.closed or not _readable(self.socket):
                self._pumping = False
                return None
            return self._receive()

    def _receive(self) -> tuple[bytes, Any]:
        sock = self.socket
        ident = sock.recv(_DONTWAIT) if self._routed else b""
        if self._owner.wants_frame(ident):
            return ident, sock.recv(_DONTWAIT, copy=False)
        return ident, sock.recv(_DONTWAIT)

    def drain(self, ident: bytes) -> None:
        """Handle what has come from one peer, now and whatever else is being handled; the rest keeps its order."""
        with self._lock:
            while not self.closed and _readable(self.socket):
                self._inbox.append(self._receive())
        messages = list(self._inbox)
        self._inbox.clear()
        self._inbox.extend(message for message in messages if message[0] != ident)
        if self._inbox and not self._pumping:
            self._poller.call_later(0, self.pump)
        for message in messages:
            if message[0] == ident:
                self._owner.on_frame(*message)

    def look(self, _events: int = 0) -> None:
        """Handle what the monitor has told, and what has come. Only by the thread that leads."""
        self.read_events()
        self.pump()

    def read_events(self) -> None:
        """Handle what the monitor has told until now."""
        while True:
            with self._lock:
                if self.closed or not _readable(self._monitor):
                    return
                event, value = self._next_event()
            self._owner.on_event(event, value)

    def _next_event(self) -> tuple[int, int]:
        event, value = _EVENT.unpack(self._monitor.recv_multipart(_DONTWAIT)[0])
        if event in (zmq.EVENT_LISTENING, zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            self._fds.add(value)
        elif event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED):
            self._fds.discard(value)
        return event, value

    # -- ending -----------------------------------------------------------------------------------

    def close(self, linger: int = 0) -> None:
        """Close the socket; what was sent before still goes out for ``linger`` milliseconds."""
        if self.closed:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._engine.wires.discard(self)
            while linger and not self._routed and _readable(self._monitor):
                if self._next_event()[0] == zmq.EVENT_DISCONNECTED:
                    linger = 0  # nothing can go out any more
            for sock in (self.socket, self._monitor):
                self._poller.unregister(_descriptor(sock))
            self.socket.monitor(None, 0)  # first: ZeroMQ would wait for a reader of its events
            self._monitor.close(linger=0)
            self.socket.close(linger=linger)
            self._inbox.clear()

    def abandon(self) -> None:
        """In a fork of this process: let go of the connections, which stay the other process's."""
        self.closed = True
        for fd in self._fds:
            try:
                os.close(fd)
            except OSError:
                pass
        self._fds.clear()
