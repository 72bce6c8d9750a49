"""How a lost host, or a process that hangs, is noticed: it falls silent.

Each process sends a beat over each of its links four times in ``MONARCH_KERNEL_HEARTBEAT_TIMEOUT``, from a thread that
does nothing else, so that neither a handler nor user code can delay it. What silence means depends:

* **The other host acknowledges nothing** for that time, though something was sent: it is gone, or the network is.
  The kernel knows this (``TCP_INFO``), of hosts and not of processes. (Its own timer, ``TCP_USER_TIMEOUT``, would
  also end connections whose receiver only does not read, as one that computes does.)
* **Nothing comes from a process that runs no user code** (a host agent) for that time: it hangs.
* **Nothing comes from a controller**: that may be a call into C that holds the interpreter's lock, in which no thread
  of it can send a beat, or Ctrl-Z; so it has ``MONARCH_KERNEL_SILENCE_TIMEOUT``. That is for proxies and tunnels,
  behind which a kernel acknowledges in the name of a host that has gone.

The thread that polls judges: it has read what came in the meantime, however late it got to that.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from typing import Protocol

from monarch_kernel import environment
from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node.poller import Poller

log = logging.getLogger(__name__)

#: How often links are looked at, at least (seconds); revoked keys are noticed then.
_LOOK = 0.5

#: How long a kernel may leave a question unanswered that comes while its window is closed (seconds): it answers two in
#: a second, at most.
_SHUT = 2.0

#: A window that more than one packet fits into.
_OPEN = 128 * 1024

#: What is used of ``struct tcp_info``: probes of a closed window without an answer; packets that are not acknowledged;
#: how long ago something was sent last, and the last acknowledgement came (milliseconds); the window of the other side.
_INFO = struct.Struct("=3xB20xI16xI8xI168xI")


def heartbeat_timeout() -> float:
    """How long a host may be silent, in seconds.

    Raises:
        InvalidSettingError: the environment says something else than a time.
    """
    return environment.HEARTBEAT_TIMEOUT.get()


def silence_timeout() -> float:
    """How long a process that runs user code may be silent while its host answers, in seconds.

    Raises:
        InvalidSettingError: the environment says something else than a time.
    """
    return max(heartbeat_timeout(), environment.SILENCE_TIMEOUT.get())


class PeerHealth:
    """What is known of the other end of one link."""

    __slots__ = ("_heard_at", "_limit", "_suspected", "_timeout", "heard")

    def __init__(self, steady: bool) -> None:
        self._timeout = heartbeat_timeout()
        self._limit = self._timeout if steady else silence_timeout()
        self._heard_at = time.monotonic()
        self._suspected = False
        #: Set whenever something has come.
        self.heard = False

    def is_silent(self) -> bool:
        """Whether nothing has come for too long."""
        now = time.monotonic()
        if self.heard:
            self.heard = False
            self._heard_at = now
        return now - self._heard_at >= self._limit

    def is_unreachable(self, info: bytes) -> bool:
        """Whether the other host acknowledges nothing any more, as the kernel sees it."""
        info = info.ljust(_INFO.size, b"\0")  # an older kernel says less
        probes, unacknowledged, sent, acknowledged, window = _INFO.unpack_from(info)
        # A receiver that does not read is asked again and again by its sender's kernel, less and less often, and
        # answers: only what was not answered counts, and not if it was sent just now.
        asked = probes > 0 or (unacknowledged > 0 and acknowledged > sent)
        patience = self._timeout if window >= _OPEN else max(self._timeout, _SHUT)
        suspected, self._suspected = self._suspected, asked and acknowledged >= patience * 1000
        return suspected and self._suspected


class BeatingLink(Protocol):
    """A link that is kept alive, and looked after."""

    keys: Keys

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        ...

    def beat(self) -> None:
        """Tell the other side that this process lives."""

    def look(self) -> None:
        """End the link if the other side is gone."""


class Heartbeat:
    """The beats of all links of a poller, and the checks of their other ends."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._interval = heartbeat_timeout() / 4
        self._links: set[BeatingLink] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, link: BeatingLink) -> None:
        """A link is up."""
        with self._lock:
            self._links.add(link)
            if self._thread is None:
                self._ended = ended = threading.Event()
                self._thread = threading.Thread(target=self._beat, args=(ended,), name="monarch-heartbeat", daemon=True)
                self._thread.start()
                self._poller.call_later(self._look_interval, lambda: self._look(ended))

    def leave(self, link: BeatingLink) -> None:
        """A link has ended."""
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
                except Exception:  # as the interpreter ends
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
            if link.closed:  # before it was here
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
    """The heartbeat of a poller's links."""
    with _registry.lock:
        heartbeat = _registry.heartbeats.get(poller)
        if heartbeat is None:
            heartbeat = _registry.heartbeats[poller] = Heartbeat(poller)
            poller.at_close.append(lambda: _registry.forget(poller))
        return heartbeat
