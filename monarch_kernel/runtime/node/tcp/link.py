"""A link over TCP."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from typing import Protocol

from monarch_kernel import environment
from monarch_kernel.protocol.keys import Keys
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.link import Buffer, Link, OnClose, OnMessage
from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller
from monarch_kernel.runtime.node.tcp.channel import TlsChannel, is_cut

# Detect lost hosts and hanging processes by their silence.
#
# Each process sends a beat over each of its links four times in ``MONARCH_KERNEL_HEARTBEAT_TIMEOUT``, from a dedicated
# thread, so that neither a handler nor user code can delay it. Silence is interpreted as follows:
#
# * The other host acknowledges nothing for that time although data was sent: the host or the network is gone. The
#   kernel knows this (``TCP_INFO``) for hosts, not for processes. (Its own timer, ``TCP_USER_TIMEOUT``, would also end
#   connections whose receiver is busy computing and does not read.)
# * No data comes from a process that runs no user code (a host agent) for that time: the process hangs.
# * No data comes from a controller: it may be in a C call that holds the GIL, so that none of its threads can send a
#   beat, or stopped with Ctrl-Z. Its limit is therefore ``MONARCH_KERNEL_SILENCE_TIMEOUT``. This limit also covers
#   proxies and tunnels, where another kernel acknowledges data for a host that is gone.
#
# The polling thread decides, because it has read all data that has arrived, however late the thread runs.

log = logging.getLogger(__name__)

#: The maximum interval of checks of links (seconds). A check also detects revoked keys.
_LOOK = 0.5

#: How long a kernel may leave probes of its closed window unanswered (seconds): it answers at most two per second.
_SHUT = 2.0

#: A window with room for more than one packet.
_OPEN = 128 * 1024

#: The used part of ``struct tcp_info``: unanswered probes of a closed window; unacknowledged packets; the time since
#: the last send and since the last acknowledgement (milliseconds); the window of the other side.
_INFO = struct.Struct("=3xB20xI16xI8xI168xI")


def heartbeat_timeout() -> float:
    """Read the setting for how long a host may be silent (seconds).

    Raises:
        InvalidSettingError: the environment variable is not a time.
    """
    return environment.HEARTBEAT_TIMEOUT.get()


def silence_timeout() -> float:
    """Read the setting for how long a process that runs user code may be silent while its host responds (seconds).

    Raises:
        InvalidSettingError: the environment variable is not a time.
    """
    return max(heartbeat_timeout(), environment.SILENCE_TIMEOUT.get())


class PeerHealth:
    """The health of the other end of one link."""

    __slots__ = ("_heard_at", "_limit", "_suspected", "_timeout", "heard")

    def __init__(self, steady: bool) -> None:
        self._timeout = heartbeat_timeout()
        self._limit = self._timeout if steady else silence_timeout()
        self._heard_at = time.monotonic()
        self._suspected = False
        #: Set when data is received.
        self.heard = False

    def is_silent(self) -> bool:
        """Return whether no data has arrived for too long."""
        now = time.monotonic()
        if self.heard:
            self.heard = False
            self._heard_at = now
        return now - self._heard_at >= self._limit

    def is_unreachable(self, info: bytes) -> bool:
        """Return whether the other host no longer acknowledges data, according to the kernel."""
        info = info.ljust(_INFO.size, b"\0")  # an older kernel reports less
        probes, unacknowledged, sent, acknowledged, window = _INFO.unpack_from(info)
        # A sender's kernel keeps probing a receiver that does not read, at growing intervals, and the receiver's kernel
        # answers. Therefore only unanswered probes or packets count, except those sent just now.
        asked = probes > 0 or (unacknowledged > 0 and acknowledged > sent)
        patience = self._timeout if window >= _OPEN else max(self._timeout, _SHUT)
        suspected, self._suspected = self._suspected, asked and acknowledged >= patience * 1000
        return suspected and self._suspected


class Heartbeat:
    """Sends the beats of all links of a poller, and checks their other ends."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._interval = heartbeat_timeout() / 4
        self._links: set[TcpLink] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, link: TcpLink) -> None:
        """Add a link that is up."""
        with self._lock:
            self._links.add(link)
            if self._thread is None:
                self._ended = ended = threading.Event()
                self._thread = threading.Thread(target=self._beat, args=(ended,), name="monarch-heartbeat", daemon=True)
                self._thread.start()
                self._poller.call_later(self._look_interval, lambda: self._look(ended))

    def leave(self, link: TcpLink) -> None:
        """Remove a link that has ended."""
        with self._lock:
            self._links.discard(link)
            if not self._links and self._thread is not None:
                self._ended.set()
                self._thread = None

    @property
    def _look_interval(self) -> float:
        return min(self._interval, _LOOK)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(self._interval):
            with self._lock:
                links = tuple(self._links)
            for link in links:
                try:
                    link.beat()
                except Exception:  # at interpreter shutdown
                    log.debug("a beat could not be sent", exc_info=True)

    def _look(self, ended: threading.Event) -> None:
        if ended.is_set():
            return
        self._poller.call_later(self._look_interval, lambda: self._look(ended))
        with self._lock:
            links = tuple(self._links)
        for keys in {link.keys for link in links}:
            keys.refresh()
        for link in links:
            if link.closed:  # it was closed before it was added
                self.leave(link)
            else:
                link.look()


class _Registry:
    def __init__(self) -> None:
        self.heartbeats: dict[Poller, Heartbeat] = {}
        self.lock = threading.Lock()

    def forget(self, poller: Poller) -> None:
        with self.lock:
            self.heartbeats.pop(poller, None)


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.__init__)


def heartbeat_of(poller: Poller) -> Heartbeat:
    """Return the heartbeat of a poller's links. It is created on first use."""
    with _registry.lock:
        heartbeat = _registry.heartbeats.get(poller)
        if heartbeat is None:
            heartbeat = _registry.heartbeats[poller] = Heartbeat(poller)
            poller.at_close.append(lambda: _registry.forget(poller))
        return heartbeat


CLOSED_HERE = "it was closed here"
CLOSED_THERE = "the other side closed it"
LOST = "the connection was lost"
CHANGED = f"{LOST}: something was changed, left out or repeated on the way"
REVOKED = "its key is no longer allowed"

#: A message of the link itself: the sender is alive.
_BEAT = 2
#: When a link closes, the time for the other side to read the sent data and to hang up in turn (seconds).
LINGER = 1.0


class Maker(Protocol):
    """The dial or listener that created a link."""

    def ended(self, link: TcpLink) -> None:
        """Handle the end of the link."""


class TcpLink(Link):
    """A ``Link`` over an encrypted connection. Messages sent before it is connected are queued.

    ``ended`` is the reason why the link was closed, in one clause, or, during a dial, the last failure so far. The
    thread that calls ``close`` also calls ``on_close``.

    Args:
        where: the other end's address, for messages.
    """

    __slots__ = ("__weakref__", "_channel", "_health", "_maker", "certificate", "fingerprint", "keys", "name", "where")

    local = False

    def __init__(
        self,
        poller: Poller,
        maker: Maker,
        keys: Keys,
        where: str,
        on_message: OnMessage,
        on_close: OnClose,
    ) -> None:
        super().__init__(poller, "", on_message, on_close)
        self._maker = maker
        self._health: PeerHealth | None = None
        self._channel: TlsChannel  # set by `come_up`
        self.keys = keys
        self.where = where
        #: The other end's certificate, its fingerprint, and the key's name in this process.
        self.certificate = b""
        self.fingerprint = ""
        self.name = ""

    def come_up(self, channel: TlsChannel, certificate: bytes, name: str, steady: bool) -> None:
        """Send the queued messages and start to receive. Called when both sides have sent their greetings.

        Args:
            steady: whether silence of the other side means that it has failed.
        """
        with self._lock:
            if self.closed:
                channel.close()
                return
            self.certificate, self.name, self.ended = certificate, name, ""
            self.fingerprint = hashlib.sha256(certificate).hexdigest()
            self._health = PeerHealth(steady)
            self._channel = channel
            self.attach(channel)
        heartbeat_of(self._poller).join(self)
        if channel.pending():
            self._poller.call_later(0, self._on_event)

    def send(self, header: bytes, body: Body = b"") -> None:
        """Implement ``Link.send``."""
        with self._poller.shielded():  # an interrupt would truncate a message
            super().send(header, body)

    # -- receiving ------------------------------------------------------------------------------

    def _on_event(self, events: int = EPOLLIN) -> bool:
        came = self.receive(events)
        while came and not self.closed and self._channel.pending():
            came = self.receive()
        return came

    def receive(self, events: int = EPOLLIN) -> bool:
        """Implement ``Link.receive``."""
        came = super().receive(events)
        if came and self._health is not None:
            self._health.heard = True
        return came

    def _on_word(self, word: Buffer) -> None:
        if not (len(word) and word[0] == _BEAT):
            super()._on_word(word)

    def _at_end(self, error: OSError | None) -> None:
        if error is None:
            self.end(CLOSED_THERE)
        elif not is_cut(error):
            log.warning("the link to %s (%s) ends: the data was changed on the way (%s)", self.peer, self.where, error)
            self.end(CHANGED)
        else:
            self.end(LOST)

    def drain(self) -> None:
        """Handle all data that has already arrived, for a peer known to be dead. Only on the polling thread."""
        if self._poller.in_leader():
            super().drain()

    # -- the other end ----------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a beat, unless queued messages already show that this process is alive."""
        if not self._out:
            self._say(_BEAT)

    def look(self) -> None:
        """End the link if the other side is gone or hangs, or if its key is revoked."""
        health = self._health
        if self.closed or health is None:
            return
        if self.keys.name_of(self.certificate) is None:
            self.give_up(REVOKED)
        elif health.is_unreachable(self._channel.info()) or (health.is_silent() and not self.receive()):
            self.end(LOST)

    # -- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the link after sending the queued messages, if that is possible soon. Later sends are dropped."""
        self.end(CLOSED_HERE, orderly=True)

    def give_up(self, why: str) -> None:
        """Implement ``Link.give_up``."""
        self._say_failed(why)
        self.end(why, orderly=True)

    def end(self, why: str, orderly: bool = False) -> None:
        """End the link for this reason, and call ``on_close``. Only the first call counts."""
        with self._poller.shielded():
            with self._lock:
                if self.closed:
                    return
                self.closed = True
                self.ended = why
                attached, out = self.attached, self._out
                self._out = deque()
                self.queued = 0
                self._big = None
                if attached:
                    self._poller.unregister(self._channel.fileno())
                    if orderly:
                        GracefulClose(self._poller, self._channel, out)
                    else:
                        self._channel.close()
            if self._health is not None:
                heartbeat_of(self._poller).leave(self)
            self._maker.ended(self)
        try:
            self.on_close(self)
        except Exception:
            log.exception("a handler of a link's end failed; this is a bug in monarch_kernel")

    def abandon(self) -> None:
        """Stop using the link in a forked child. (A fork hook closes the descriptor.)"""
        self.closed = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.attached else "waiting"
        return f"<TcpLink to {self.peer or '?'} at {self.where} {state}>"


#: Closes in progress, by the poller that runs them.
_leaving: dict[Poller, set[GracefulClose]] = {}
os.register_at_fork(after_in_child=_leaving.clear)


class GracefulClose:
    """Sends the queued data and TLS's goodbye, and closes the channel once the other side has also hung up.

    It must not close earlier: a kernel that closes a connection with unread data discards sent data that is not
    delivered yet.

    Args:
        channel: the channel, which this takes over.
        rest: the data to send first.
    """

    def __init__(self, poller: Poller, channel: TlsChannel, rest: deque[memoryview[int]]) -> None:
        self._poller = poller
        self.channel = channel
        self._rest = rest
        self.said = False
        self.done = False
        self._lock = threading.Lock()  # any thread may start a close
        with self._lock:
            if poller not in _leaving:
                _leaving[poller] = set()
                poller.at_close.append(lambda: _finish_closes(poller))
            _leaving[poller].add(self)
            self._timer = poller.call_later(LINGER, self.end)
            poller.register(channel.fileno(), self.go_on, EPOLLIN | EPOLLOUT)
        self.go_on(EPOLLOUT)

    def go_on(self, events: int) -> None:
        """Send and read as much as possible without blocking."""
        with self._lock:
            if self.done:
                return
            try:
                if not self.said:
                    self._send()
                over = bool(events & ~EPOLLOUT) and not self.channel.discard()
            except BlockingIOError:
                return
            except OSError:
                over = True
        if over:
            self.end()

    def _send(self) -> None:
        rest = self._rest
        while rest:
            try:
                sent = self.channel.sendmsg([rest[i] for i in range(min(len(rest), 64))])
            except BlockingIOError:
                return
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]
        if self.channel.say_goodbye():
            self.said = True
            self._poller.modify(self.channel.fileno(), EPOLLIN)

    def end(self) -> None:
        """Close the channel, even if not everything was sent."""
        with self._lock:
            if self.done:
                return
            self.done = True
            self._timer.cancel()
            _leaving.get(self._poller, set()).discard(self)
            self._poller.unregister(self.channel.fileno())
            self.channel.close()


def _finish_closes(poller: Poller) -> None:
    """Finish the closes of a poller that has ended, within ``LINGER``."""
    deadline = time.monotonic() + LINGER
    leaving = _leaving.pop(poller, set())
    while (waiting := {each.channel.fileno(): each for each in leaving if not each.done}) and (
        left := deadline - time.monotonic()
    ) > 0:
        polled = select.poll()
        for fd, each in waiting.items():
            polled.register(fd, select.POLLIN if each.said else select.POLLIN | select.POLLOUT)
        for fd, events in polled.poll(left * 1000):
            waiting[fd].go_on(events)
    for each in leaving:
        each.end()
