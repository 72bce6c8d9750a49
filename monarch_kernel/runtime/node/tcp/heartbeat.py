"""Detect lost hosts and hanging processes by their silence.

Each process sends a beat over each of its links four times in ``MONARCH_KERNEL_HEARTBEAT_TIMEOUT``, from a dedicated
thread, so that neither a handler nor user code can delay it. Silence is interpreted as follows:

* **The other host acknowledges nothing** for that time although data was sent: the host or the network is gone. The
  kernel knows this (``TCP_INFO``) for hosts, not for processes. (Its own timer, ``TCP_USER_TIMEOUT``, would also end
  connections whose receiver is busy computing and does not read.)
* **No data comes from a process that runs no user code** (a host agent) for that time: the process hangs.
* **No data comes from a controller**: it may be in a C call that holds the GIL, so that none of its threads can send a
  beat, or stopped with Ctrl-Z. Its limit is therefore ``MONARCH_KERNEL_SILENCE_TIMEOUT``. This limit also covers
  proxies and tunnels, where another kernel acknowledges data for a host that is gone.

The polling thread decides, because it has read all data that has arrived, however late the thread runs.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

from monarch_kernel import environment
from monarch_kernel.runtime.node.poller import Poller

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.tcp.link import TcpLink

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
