"""Accept links from other sites."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node import descriptors
from monarch_kernel.runtime.node.acceptor import Acceptor
from monarch_kernel.runtime.node.audit import Audit
from monarch_kernel.runtime.node.link import OnClose, OnMessage
from monarch_kernel.runtime.node.poller import EPOLLIN, Poller
from monarch_kernel.runtime.node.tcp import channel as greeting
from monarch_kernel.runtime.node.tcp.channel import (
    HandshakeFailure,
    TlsChannel,
    handshake_failure,
    hold,
    let_go,
    speaks,
)
from monarch_kernel.runtime.node.tcp.dial import host_and_port, origin, resolve, split
from monarch_kernel.runtime.node.tcp.link import TcpLink, silence_timeout

log = logging.getLogger(__name__)

#: The time for a client to prove its key (seconds).
HANDSHAKE_TIME = 5.0
#: The interval at which the listener checks for late clients (seconds).
_SWEEP = 0.5
#: The number of handshakes advanced before other work gets its turn: each costs as much as many messages.
_HANDSHAKES = 8
#: The time for a refused client to read the reason and hang up (seconds), and the data that it may send meanwhile
#: (bytes).
_LEAVE_TIME = 1.0
_LEAVE_BYTES = 256 * 1024
#: The maximum number of pending connections; also at most a quarter of this process's limit of descriptors.
MOST = 1024
_LEAST = 32

_ONCE = EPOLLIN | select.EPOLLONESHOT

HUNG_UP = "it hung up"
NO_TLS = "it does not speak TLS"
OLDER = "it speaks ZeroMQ, as older versions of monarch_kernel do: install the same version on all hosts"
OTHER_TLS = "it does not speak TLS 1.3"
NO_KEY = "it has shown no key"
THEIR_KEY = "its key is not one that this worker trusts"
OUR_KEY = "it does not trust this worker's key"
BROKEN = "it broke the protocol"
CROWDED = "it made room for others"


class Listener:
    """Accepts links from peers that prove a trusted key.

    Args:
        url: ``tcp://host:port``; the host may be ``*`` for all IPv4 addresses or ``[::]`` for all of IPv4 and IPv6,
            the port 0 for any.
        on_link: called with each new link, by the polling thread.
        audit: records each link and its end, and each refusal.
        steady: this process runs no user code.

    Raises:
        ValueError: the URL does not have that form.
        OSError: the process cannot listen there.
    """

    def __init__(
        self,
        poller: Poller,
        url: str,
        keys: Keys,
        on_message: OnMessage,
        on_close: OnClose,
        on_link: Callable[[TcpLink], None],
        audit: Audit,
        steady: bool = False,
    ) -> None:
        silence_timeout()  # an invalid setting is reported here
        host, port = split(url)
        self.poller = poller
        self.keys = keys
        self.audit = audit
        self.steady = steady
        self._on_message = on_message
        self._on_close = on_close
        self._on_link = on_link
        self._strangers = PendingConnections(room())
        self._ready: list[_Stranger] = []
        self._sweeping = False
        self._links: set[TcpLink] = set()
        self._closed = False
        try:
            sock = _listen(host, port)
        except OSError as e:
            raise OSError(e.errno, f"cannot listen at {url}: {e.strerror}") from None
        hold(sock)
        self._sock = sock
        self._acceptor = Acceptor(poller, sock, url, self._on_socket, self._make_room)
        #: The URL that it listens on, with the actual port.
        self.url = f"tcp://{host_and_port('0.0.0.0' if host == '*' else host, sock.getsockname()[1])}"
        poller.start_background()

    # -- strangers ----------------------------------------------------------------------------------

    def _on_socket(self, sock: socket.socket, address: Any) -> None:
        host = str(address[0]).removeprefix("::ffff:")
        stranger = _Stranger(self, sock, host, host_and_port(host, address[1]))
        goes = self._strangers.add(stranger)
        if goes is not None:
            goes.refused(CROWDED)
            if goes is stranger:
                return
        self.poller.register(sock.fileno(), stranger.on_event, _ONCE)
        if not self._sweeping:
            self._sweeping = True
            self.poller.call_later(_SWEEP, self._sweep)

    def _make_room(self) -> bool:
        goes = self._strangers.oldest()
        if goes is not None:
            goes.refused(CROWDED)
        return goes is not None

    def _sweep(self) -> None:
        now = time.monotonic()
        for stranger in self._strangers:
            if now < stranger.until:
                break
            stranger.late()
        self._sweeping = len(self._strangers) > 0
        if self._sweeping:
            self.poller.call_later(_SWEEP, self._sweep)

    def is_ready(self, stranger: _Stranger) -> None:
        """Queue a stranger whose data has arrived. Other work gets its turn first.

        The latest is served first: if more arrive than can be served, the oldest are closed to make room, and serving
        them would be wasted.
        """
        self._ready.append(stranger)
        if len(self._ready) == 1:
            self.poller.call_later(0, self._serve)

    def _serve(self) -> None:
        for _ in range(min(_HANDSHAKES, len(self._ready))):
            self._ready.pop().go_on()
        if self._ready:
            self.poller.call_later(0, self._serve)

    def gone(self, stranger: _Stranger) -> None:
        """Remove a stranger that is closed or has become a link."""
        self._strangers.remove(stranger)

    def welcome(self, channel: TlsChannel, where: str, certificate: bytes, name: str, steady: bool) -> None:
        """Create a link to a stranger that has proved its key."""
        link = TcpLink(self.poller, self, self.keys, where, self._on_message, self._on_close)
        self._links.add(link)
        link.come_up(channel, certificate, name, steady)
        self.audit.connected(name, link.fingerprint, where)
        try:
            self._on_link(link)
        except Exception:
            log.exception("a handler of new links failed; this is a bug in monarch_kernel")
        if self._closed:  # another thread has closed the listener meanwhile
            link.close()

    # -- links ----------------------------------------------------------------------------------------

    def ended(self, link: TcpLink) -> None:
        """Record the end of one of its links."""
        self._links.discard(link)
        self.audit.ended(link.name, link.fingerprint, link.where, link.ended)

    def close(self) -> None:
        """End all links, and accept no more connections."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        let_go(self._sock)
        for stranger in self._strangers:
            stranger.stop()
        self._ready.clear()
        for link in tuple(self._links):
            link.close()

    def abandon(self) -> None:
        """Leave all connections to the parent, in a forked child."""
        self._closed = True
        self._acceptor.abandon()


def room() -> int:
    """Return the maximum number of pending connections of this process."""
    return max(_LEAST, min(MOST, descriptors.limit() // 4))


class PendingConnections:
    """The connections that have not proved a key yet, oldest first. It enforces their limit.

    Every connection is accepted, because a rejected one could be a controller. When the limit is reached, the oldest is
    closed, whatever it has sent: a peer with a key sends as little at first as an attacker. A connection that has
    proved its key has only its greeting to send, and is never closed. One address may have at most half of all
    connections, so that it cannot displace the others, however fast it connects.

    Args:
        most: their limit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_of_one = max(1, most // 2)
        self._there: dict[_Stranger, None] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._there)

    def __iter__(self) -> Iterator[_Stranger]:
        return iter(tuple(self._there))

    def add(self, stranger: _Stranger) -> _Stranger | None:
        """Add a connection. Return the connection to close for it, if any: itself, if all others have proved a key."""
        goes = None
        if self._counts.get(stranger.origin, 0) >= self.most_of_one:
            goes = self._oldest(stranger.origin) or stranger
        elif len(self._there) >= self.most:
            goes = self._oldest("") or stranger
        self._there[stranger] = None
        self._counts[stranger.origin] = self._counts.get(stranger.origin, 0) + 1
        return goes

    def remove(self, stranger: _Stranger) -> None:
        """Remove a connection that has ended or has proved its key."""
        if stranger in self._there:
            del self._there[stranger]
            self._counts[stranger.origin] -= 1
            if not self._counts[stranger.origin]:
                del self._counts[stranger.origin]

    def oldest(self) -> _Stranger | None:
        """Return the connection to close if room is needed for another reason; None if there is none."""
        return self._oldest("")

    def _oldest(self, origin: str) -> _Stranger | None:
        """Return the oldest connection (of an origin) that has not proved a key."""
        return next(
            (stranger for stranger in self._there if origin in ("", stranger.origin) and not stranger.proved), None
        )


class _Stranger:
    """A connection whose other end has not proved a key yet.

    TLS state is allocated for it only after its first bytes arrive.
    """

    __slots__ = ("_channel", "_left", "_listener", "_reader", "_sock", "host", "origin", "silent", "until", "where")

    def __init__(self, listener: Listener, sock: socket.socket, host: str, where: str) -> None:
        sock.setblocking(False)
        hold(sock)
        self._listener = listener
        self._sock: socket.socket | None = sock
        self._channel: TlsChannel | None = None
        self._reader: greeting.Reader | None = None
        self._left = 0  # after a refusal: the bytes that it may still send
        self.host = host
        self.where = where
        self.origin = origin(host)
        self.silent = True
        self.until = time.monotonic() + HANDSHAKE_TIME

    def on_event(self, _events: int) -> None:
        """Queue this connection: data has arrived, or the client has hung up."""
        self._listener.is_ready(self)

    @property
    def proved(self) -> bool:
        """Whether it has proved a key, and only needs to send its greeting."""
        return self._reader is not None and not self._left

    def go_on(self) -> None:
        """Process the data that has arrived."""
        try:
            if self._left:
                self._discard()
            elif self._reader is not None:
                self._read_greeting()
            elif self._channel is not None:
                self._shake_hands()
            elif self._sock is not None:
                self._begin()
        except BlockingIOError:
            pass
        except greeting.NoGreeting:
            self.refused(BROKEN)
        except (greeting.KeyRefused, EOFError):
            self.refused(HUNG_UP)
        except OSError as e:
            self._explain(e)
        descriptor = self._channel if self._channel is not None else self._sock
        if descriptor is not None:
            self._listener.poller.modify(descriptor.fileno(), _ONCE)

    def _begin(self) -> None:
        """Check whether the first bytes are TLS, and start the handshake."""
        sock = self._sock
        assert sock is not None
        first = sock.recv(3, socket.MSG_PEEK)
        if not first:
            raise EOFError
        self.silent = False
        language = speaks(first)
        if language != "TLS":
            self.refused(OLDER if language == "ZeroMQ" else NO_TLS)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._listener.keys.server_context()
        poller = self._listener.poller
        poller.unregister(sock.fileno())
        self._sock = None
        self._channel = TlsChannel(sock, context, server=True)
        poller.register(self._channel.fileno(), self.on_event, _ONCE)
        self._shake_hands()

    def _shake_hands(self) -> None:
        channel, listener = self._channel, self._listener
        assert channel is not None
        if not channel.handshake():
            return
        name = listener.keys.admitted(channel.certificate())
        if name is None:
            channel.send(greeting.refuse("it is not allowed any more"))
            self.refused(THEIR_KEY)
            return
        channel.send(greeting.accept(listener.steady))
        self._reader = greeting.Reader()
        self._read_greeting()

    def _read_greeting(self) -> None:
        channel, reader, listener = self._channel, self._reader, self._listener
        assert channel is not None and reader is not None
        if not reader.read(channel):
            return
        certificate = channel.certificate()
        name = listener.keys.admitted(certificate)
        if name is None:  # revoked meanwhile
            self.refused(THEIR_KEY)
            return
        listener.poller.unregister(channel.fileno())
        self._channel = None
        listener.gone(self)
        listener.welcome(channel, self.where, certificate, name, reader.steady)

    # -- refusing -------------------------------------------------------------------------------------

    def late(self) -> None:
        """Refuse or close the connection at its time limit."""
        if self._left:
            self.stop()
        elif self.silent:
            self.refused(f"it said nothing for {HANDSHAKE_TIME:g} s")
        else:
            self.refused(f"it did not prove its key within {HANDSHAKE_TIME:g} s")

    def _explain(self, error: OSError) -> None:
        reasons = {
            HandshakeFailure.THEIR_KEY: THEIR_KEY,
            HandshakeFailure.NO_KEY: NO_KEY,
            HandshakeFailure.OUR_KEY: OUR_KEY,
            HandshakeFailure.VERSION: OTHER_TLS,
            HandshakeFailure.HUNG_UP: HUNG_UP,
            HandshakeFailure.BROKEN: BROKEN,
        }
        self.refused(reasons[handshake_failure(error)])

    def refused(self, why: str) -> None:
        """Refuse the connection. Over TLS, send the reason and give the client time to read it."""
        if self._left:
            self.stop()
            return
        self._listener.audit.refused(self.where, why)
        self._left = _LEAVE_BYTES
        self.until = time.monotonic() + _LEAVE_TIME
        channel = self._channel
        if channel is None or why in (HUNG_UP, CROWDED):
            self.stop()
            return
        with contextlib.suppress(OSError):
            channel.say_goodbye()

    def _discard(self) -> None:
        channel = self._channel
        if channel is None or not channel.discard():
            self.stop()
            return
        self._left -= 65536
        if self._left <= 0:
            self.stop()

    def stop(self) -> None:
        """Close the connection."""
        poller = self._listener.poller
        channel, sock = self._channel, self._sock
        self._channel = self._sock = None
        if channel is not None:
            poller.unregister(channel.fileno())
            channel.close()
        elif sock is not None:
            poller.unregister(sock.fileno())
            let_go(sock)
        self._listener.gone(self)


def _listen(host: str, port: int) -> socket.socket:
    family, address = (socket.AF_INET, ("0.0.0.0", port)) if host == "*" else resolve(host, port)[0]
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(4096)
    except BaseException:
        sock.close()
        raise
    return sock
