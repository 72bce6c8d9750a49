"""Links over TCP, for gateways of different sites: encrypted and authenticated by CURVE, over ZeroMQ.

``dial`` makes a ``CurveLink``, which is used like a ``Link``, to a ``CurveListener``, which makes its counterpart. Both
sides use the team's key pair; nobody else gets as far as sending a message. ``curvelink`` has the links themselves,
``curvewire`` what they stand on.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node.curvelink import CLOSED_HERE, CONTROL, HELLO, CurveLink
from monarch_kernel.runtime.node.curvewire import HANDSHAKE_TIME, LINGER, Wire, take_engine
from monarch_kernel.runtime.node.poller import Poller, Timer

__all__ = ["CurveLink", "CurveListener", "dial"]

log = logging.getLogger(__name__)

#: How often a dial tries again while nobody listens (seconds).
RETRY = 0.1
#: How long one address is tried, when a name has several or the host does not answer (milliseconds).
_CONNECT_TIME = 2000
#: A client that fails again and again is logged this often (seconds).
_LOG_AGAIN = 5.0
#: How long what a lost peer had sent is looked for, while others send without a break (seconds).
_LAST_WORDS = 0.5

#: ZeroMQ's numbers of what can be wrong with a peer.
_WRONG_KEY, _NO_CURVE = 0x11000001, 0x11000002
_URL = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:]+):(\d{1,5}|\*)")

LOST = "the connection was lost"
WRONG_KEY = "refused: the key of this process is not the worker's"
HUNG_UP = f"{WRONG_KEY}, or what listens there is no worker"
NOT_OURS = "refused: what listens there does not use CURVE, so it is no worker of monarch_kernel"
NOBODY = "nobody listens there"
SILENT = "no answer"
GONE = "a client that has gone already"


# -- connecting -----------------------------------------------------------------------------------


def dial(
    poller: Poller,
    url: str,
    keys: Keys,
    on_message: Callable[[CurveLink, Any, Any], None],
    on_close: Callable[[CurveLink], None],
    timeout: float,
) -> CurveLink:
    """Connect to a listener. Returns at once; what is sent before there is a connection waits for it.

    While nobody listens there, it is tried again until ``timeout`` seconds have passed. If there will be no connection,
    ``on_close(link)`` is called, and ``link.ended`` says why.

    Raises:
        ValueError: the URL is not ``tcp://host:port``.
    """
    host, port = _split(url)
    if not port:
        raise ValueError(f"{url} cannot be connected to: it needs a port")
    return _Dial(poller, host, port, keys, on_message, on_close, timeout).link


class _Dial:
    """Makes a connection, with as many attempts as it takes, and carries a link over it."""

    def __init__(
        self,
        poller: Poller,
        host: str,
        port: int,
        keys: Keys,
        on_message: Callable[[CurveLink, Any, Any], None],
        on_close: Callable[[CurveLink], None],
        timeout: float,
    ) -> None:
        self._poller = poller
        self._host = host
        self._port = port
        self._keys = keys
        self._timeout = timeout
        self._engine = take_engine(poller)
        self._wire: Wire | None = None
        self._addresses: list[tuple[str, bool]] = []  # and whether it is one of IPv6
        self._tried = 0
        self._began = 0.0  # the current attempt
        self._hung_up = 0
        self._failure: tuple[int, int] | None = None  # what the monitor said of the current attempt
        self._lost = False
        self._left = False
        self._lock = threading.Lock()  # an attempt must not begin while the link is given up
        self.link = CurveLink(poller, self, b"", _join(host, port), on_message, on_close)
        self.link.ended = SILENT
        self._timer: Timer | None = poller.call_later(timeout, self._too_late)
        poller.start_background()
        try:
            self._addresses = _resolve(host, port, numeric=True)
        except OSError:
            self._look_up()
        else:
            poller.call_later(0, self._try)

    def _look_up(self) -> None:
        """Ask for the addresses of a name, which may take long, so not on a thread that handles messages."""
        threading.Thread(target=self._resolve, name="name-lookup", daemon=True).start()

    def _resolve(self) -> None:
        try:
            self._addresses = _resolve(self._host, self._port)
        except OSError as e:
            # It may become known: names of containers appear when they start.
            self.link.ended = f"the name {self._host} is not known ({e.strerror})"
            self._poller.call_later(10 * RETRY, self._try)
        else:
            self._poller.call_later(0, self._try)

    def _try(self) -> None:
        with self._lock:
            if self._left:
                return
            if not self._addresses:
                self._look_up()
                return
            address, is_v6 = self._addresses[self._tried % len(self._addresses)]
            self._tried += 1
            self._began = time.monotonic()
            self._failure = None
            try:
                wire = self._wire = Wire(self._engine, zmq.DEALER, self)
                wire.secure(self._keys)
                wire.socket.setsockopt(zmq.IPV6, is_v6)
                wire.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIME)
                wire.socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, round(self._timeout * 1000)))
                wire.start(f"tcp://{_join(address, self._port)}")
                return
            except zmq.ZMQError as e:
                why = f"this process cannot connect: {e.strerror}"
        self.link.end(why)

    def _again(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.close()
                self._wire = None
        self._poller.call_later(0 if self._tried % len(self._addresses) else RETRY, self._try)

    def _too_late(self) -> None:
        self._timer = None
        if not self.link.attached:
            self.link.end(f"{self.link.ended or SILENT} within {self._timeout:g} s")

    # -- what the socket tells --------------------------------------------------------------------

    def wants_frame(self, ident: bytes) -> bool:
        return self.link.in_body

    def on_frame(self, ident: bytes, data: Any) -> None:
        self.link.take(data)

    def on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._timer is not None:
                self._timer.cancel()
            with self._poller.shielded():
                self.link.come_up(greet=True)
        elif event == zmq.EVENT_CONNECTED:
            self.link.ended = SILENT
        elif event == zmq.EVENT_CLOSED:  # before it was connected
            answered = (time.monotonic() - self._began) * 1000 < _CONNECT_TIME / 2
            self.link.ended = NOBODY if answered else SILENT
            self._again()
        elif event == zmq.EVENT_DISCONNECTED:
            if self.link.attached:
                self._lost = True
            else:
                self._refused(self._failure)
        else:
            self._failure = event, value

    def _refused(self, failure: tuple[int, int] | None) -> None:
        """The handshake has failed."""
        event, value = failure or (0, 0)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            self.link.end(f"{SILENT} within {self._timeout:g} s")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # It hung up. So does a listener with another key; but also one that is just ending, or a proxy of one that
            # does not listen yet: these are told apart by trying once more.
            self._hung_up += 1
            if self._hung_up > 1:
                self.link.end(HUNG_UP)
            else:
                self._again()
        elif event == 0 or (event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _NO_CURVE):
            self.link.end(NOT_OURS)
        else:
            self.link.end(WRONG_KEY)

    def on_idle(self) -> None:
        if self._lost:
            self.link.end(LOST)

    # -- what the link tells ------------------------------------------------------------------------

    def transmit(self, ident: bytes, frames: list[Any]) -> None:
        if self._wire is not None:
            self._wire.transmit(ident, frames)

    def drain(self, ident: bytes) -> None:
        if self._wire is not None:
            self._wire.drain(ident)

    def leave(self, link: CurveLink, orderly: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._left = True
            if self._wire is not None:
                self._wire.close(LINGER if orderly and not self._lost else 0)
        self._engine.release()


# -- listening ------------------------------------------------------------------------------------


class _Client:
    """A TCP connection to a listener."""

    __slots__ = ("link", "where")

    def __init__(self, where: str) -> None:
        self.where = where
        self.link: CurveLink | None = None


class CurveListener:
    """Accepts links from whoever has the same keys.

    Args:
        url: ``tcp://host:port``; the host may be ``*`` for all addresses (of IPv4; ``[::]`` is for both), the port 0
            for any.
        on_link: called with each new link, by the thread that polls.

    Raises:
        ValueError: the URL is not of that form.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        poller: Poller,
        url: str,
        keys: Keys,
        on_message: Callable[[CurveLink, Any, Any], None],
        on_close: Callable[[CurveLink], None],
        on_link: Callable[[CurveLink], None],
    ) -> None:
        host, port = _split(url)
        self._poller = poller
        self._on_message = on_message
        self._on_close = on_close
        self._on_link = on_link
        self._clients: dict[int, _Client] = {}  # by descriptor
        self._links: dict[bytes, CurveLink] = {}
        self._lost: set[CurveLink] = set()  # their last words may still be there
        self._failures: deque[str] = deque()
        self._silent = 0  # clients with the right key that have not said HELLO
        self._logged: dict[tuple[str, str], float] = {}
        self._closed = False
        self._engine = take_engine(poller)
        try:
            address, is_v6 = ("*", False) if host == "*" else _resolve(host, port)[0]
            self._wire = Wire(self._engine, zmq.ROUTER, self)
        except OSError as e:
            self._engine.release()
            raise OSError(e.errno, f"cannot listen at {url}: {e.strerror}") from None
        except BaseException:
            self._engine.release()
            raise
        try:
            self._domain = self._engine.admit(keys.public)
            self._wire.secure(keys, self._domain)
            set_option = self._wire.socket.setsockopt
            set_option(zmq.ROUTER_MANDATORY, 1)
            set_option(zmq.BACKLOG, 4096)
            set_option(zmq.HANDSHAKE_IVL, HANDSHAKE_TIME)
            set_option(zmq.IPV6, is_v6)
            self._wire.start(f"tcp://{_join(address, port)}", bind=True)
        except BaseException as e:
            self._wire.close()
            self._engine.release()
            if isinstance(e, zmq.ZMQError):
                raise OSError(e.errno, f"cannot listen at {url}: {e.strerror}") from None
            raise
        bound = self._wire.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        #: Where it listens, with the real port.
        self.url = f"tcp://{_join('0.0.0.0' if host == '*' else host, int(bound.rsplit(':', 1)[1]))}"
        poller.start_background()

    # -- what the socket tells --------------------------------------------------------------------

    def wants_frame(self, ident: bytes) -> bool:
        link = self._links.get(ident)
        return link is None or link.in_body  # only a frame says which connection it came over

    def on_frame(self, ident: bytes, data: Any) -> None:
        link = self._links.get(ident)
        if link is not None:
            link.take(data)
        elif type(data) is zmq.Frame and len(data) == CONTROL.size and data.bytes[0] == HELLO:
            self._welcome(ident, data)

    def _welcome(self, ident: bytes, hello: zmq.Frame) -> None:
        # A descriptor is used again. What has been told by now includes the end of all who had it before.
        self._wire.read_events()
        client = self._clients.get(int(hello.get(zmq.SRCFD)))
        where = client.where if client is not None else ""
        link = CurveLink(self._poller, self, ident, where or GONE, self._on_message, self._on_close)
        self._links[ident] = link
        if client is None:
            self._lose(link)  # gone already
        else:
            self._silent -= 1
            if client.link is not None:
                self._lose(client.link)
            client.link = link
        link.come_up(greet=False)
        try:
            self._on_link(link)
        except Exception:
            log.exception("a handler of new links failed; this is a bug in monarch_kernel")
        if self._closed:  # in the meantime, by another thread
            link.end(CLOSED_HERE)

    def on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._clients[value] = _Client(_name_of(value))
        elif event == zmq.EVENT_DISCONNECTED:
            client = self._clients.pop(value, None)
            if client is None:
                return
            if client.link is not None:
                self._lose(client.link)
            elif self._silent > 0 and not self._failures:
                self._silent -= 1
            else:
                self._refused(client.where)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._silent += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failures.append("it has not the key of this worker's team")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            reason = {_WRONG_KEY: "its key is not this worker's", _NO_CURVE: "it does not use CURVE"}
            self._failures.append(reason.get(value, "it broke the protocol"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            late = value == errno.EAGAIN
            self._failures.append(f"it said nothing for {HANDSHAKE_TIME // 1000} s" if late else "it hung up")
        elif event == zmq.EVENT_ACCEPT_FAILED:
            log.warning("a connection to %s could not be accepted: %s", self.url, os.strerror(value))

    def _refused(self, where: str) -> None:
        reason = self._failures.popleft() if self._failures else "it does not speak this protocol"
        if where:
            self._log_refused(where, reason)
        else:  # most try again
            self._poller.call_later(_LOG_AGAIN / 4, lambda: self._log_refused(where, reason))

    def _log_refused(self, where: str, reason: str) -> None:
        now = time.monotonic()
        self._logged = {key: at for key, at in self._logged.items() if now - at < _LOG_AGAIN}
        host = where.rpartition(":")[0]
        if (host, reason) in self._logged or (not host and any(logged[1] == reason for logged in self._logged)):
            return
        self._logged[host, reason] = now
        log.warning("refused a connection from %s to %s: %s", where or GONE, self.url, reason)

    def _lose(self, link: CurveLink) -> None:
        """Its connection is gone, but not all that came over it may have been handled."""
        self._lost.add(link)
        self._poller.call_later(_LAST_WORDS, lambda: self._forget(link))

    def on_idle(self) -> None:
        for link in list(self._lost):
            self._forget(link)

    def _forget(self, link: CurveLink) -> None:
        self._lost.discard(link)
        self._links.pop(link.ident, None)
        link.end(LOST)

    # -- what the links tell ------------------------------------------------------------------------

    def transmit(self, ident: bytes, frames: list[Any]) -> None:
        self._wire.transmit(ident, frames)

    def drain(self, ident: bytes) -> None:
        self._wire.drain(ident)

    def leave(self, link: CurveLink, orderly: bool) -> None:
        # The peer has been told to hang up. Until it does, what it sends is for a link that is closed.
        pass

    # -- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End all links, and accept no more."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        self._engine.dismiss(self._domain)
        self._wire.close(LINGER)
        self._engine.release()

    def abandon(self) -> None:
        """In a fork of this process: leave all to the other one."""
        self._closed = True


# -- addresses ------------------------------------------------------------------------------------


def _split(url: str) -> tuple[str, int]:
    match = _URL.fullmatch(url)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ValueError(f"{url!r} is no address of a worker: it must look like tcp://host:26600 or tcp://[::1]:26600")
    return match[1].strip("[]"), 0 if match[2] == "*" else int(match[2])


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str, port: int, numeric: bool = False) -> list[tuple[str, bool]]:
    """The addresses of a host, and whether each is one of IPv6."""
    flags = socket.AI_NUMERICHOST if numeric else 0
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((str(address[0]), family == socket.AF_INET6) for family, _, _, _, address in found))


def _name_of(fd: int) -> str:
    """The address of the other end of a TCP connection; "" if ZeroMQ has closed it already."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            host, port = sock.getpeername()[:2]
    except (OSError, ValueError, TypeError):
        return ""
    return _join(host.removeprefix("::ffff:"), port)
