"""Connect to a listener: parse and resolve its address (``tcp://host:port``), and dial it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from typing import Any

from monarch_kernel.protocol.keys import Keys
from monarch_kernel.runtime.node.link import OnClose, OnMessage
from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller, Timer
from monarch_kernel.runtime.node.tcp import channel as greeting
from monarch_kernel.runtime.node.tcp.channel import (
    HandshakeFailure,
    TlsChannel,
    handshake_failure,
    hold,
    let_go,
    speaks,
)
from monarch_kernel.runtime.node.tcp.link import TcpLink, silence_timeout

log = logging.getLogger(__name__)

#: The interval of attempts while no process listens (seconds).
RETRY = 0.1
#: The time limit for an attempt to connect, before the next address or attempt (seconds).
_CONNECT_TIME = 2.0
#: The longest pause after the other side has hung up before its greeting, in units of ``RETRY``. A listener that is
#: ending or full hangs up, and so does a proxy whose target does not listen yet.
_LONGEST_PAUSE = 5

NO_LISTENER = "no process listens there"
SILENT = "no answer"
HUNG_UP = "refused: it has hung up each time, so it is not a monarch_kernel worker, or has too many connections"
NOT_OURS = "refused: what listens there does not speak TLS, so it is not a monarch_kernel worker"
OLDER = (
    "refused: what listens there speaks ZeroMQ, as workers of older versions of monarch_kernel do: "
    "install the same version on all hosts"
)
OTHER_TLS = (
    "refused: what listens there does not speak TLS 1.3, so it is not a worker of this version of monarch_kernel"
)
NO_GREETING = "refused: what listens there is not a worker of this version of monarch_kernel"
OUR_KEY = "refused: the key of this process is not one that the worker trusts"
_NOT_ANY_MORE = "its key is not allowed any more"
THEIR_KEY = "refused: the key of what listens there is not one that this process trusts"


def dial(
    poller: Poller,
    url: str,
    keys: Keys,
    on_message: OnMessage,
    on_close: OnClose,
    timeout: float,
    steady: bool = False,
) -> TcpLink:
    """Connect to a listener. Returns at once. The link queues messages until it is connected.

    While no process listens, or the listener hangs up, the dial retries until ``timeout`` seconds have passed. If it
    fails, it calls ``on_close(link)``, and ``link.ended`` has the reason.

    Args:
        steady: this process runs no user code.

    Raises:
        ValueError: the URL is not ``tcp://host:port``.
    """
    host, port = split(url)
    if not port:
        raise ValueError(f"{url} cannot be connected to: it needs a port")
    return _Dial(poller, host, port, keys, on_message, on_close, timeout, steady).link


class _Dial:
    """Makes the connection of a link, with as many attempts as necessary."""

    def __init__(
        self,
        poller: Poller,
        host: str,
        port: int,
        keys: Keys,
        on_message: OnMessage,
        on_close: OnClose,
        timeout: float,
        steady: bool,
    ) -> None:
        silence_timeout()  # an invalid setting is reported here
        self._poller = poller
        self._host = host
        self._port = port
        self._keys = keys
        self._timeout = timeout
        self._steady = steady
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        self._tried = 0
        self.hung_up = 0
        self._attempt: _Attempt | None = None
        self._left = False
        self._lock = threading.Lock()  # an attempt must not start while the link ends
        self.link = TcpLink(poller, self, keys, host_and_port(host, port), on_message, on_close)
        self.link.ended = SILENT
        self._timer: Timer | None = poller.call_later(timeout, self._too_late)
        poller.start_background()
        try:
            self._addresses = resolve(host, port, numeric=True)
        except OSError:
            self._look_up()
        else:
            poller.call_later(0, self._try)

    def _look_up(self) -> None:
        """Resolve the host name on another thread, because this may take long and must not block the polling thread."""
        threading.Thread(target=self._resolve, name="name-lookup", daemon=True).start()

    def _resolve(self) -> None:
        try:
            self._addresses = resolve(self._host, self._port)
        except OSError as e:
            # Retry: the name of a container appears when the container starts.
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
            family, address = self._addresses[self._tried % len(self._addresses)]
            self._tried += 1
            try:
                self._attempt = _Attempt(self, self._poller, self._keys, family, address, self._steady)
                return
            except OSError as e:
                why = f"this process cannot connect: {e.strerror or e}"
        self.link.end(why)

    def _too_late(self) -> None:
        self._timer = None
        if not self.link.attached:
            self.link.end(f"{self.link.ended or SILENT} within {self._timeout:g} s")

    # -- called by the attempt -----------------------------------------------------------------------

    def reached(self) -> None:
        """Record that an attempt has connected, but has no answer yet."""
        self.link.ended = SILENT

    def failed(self, why: str) -> None:
        """Record that an attempt has failed, and try again."""
        with self._lock:
            if self._left:
                return
            self.link.ended = why
        self._poller.call_later(0 if self._tried % len(self._addresses) else RETRY, self._try)

    def was_hung_up(self) -> None:
        """Record that the other side has hung up, and try again, but not too often."""
        self.hung_up += 1
        with self._lock:
            if self._left:
                return
            self.link.ended = HUNG_UP
        self._poller.call_later(RETRY * min(self.hung_up, _LONGEST_PAUSE), self._try)

    def refused(self, why: str) -> None:
        """End the link, because the dial cannot succeed."""
        self.link.end(why)

    def done(self, channel: TlsChannel, certificate: bytes, name: str, steady: bool) -> None:
        """Finish the dial when both sides have sent their greetings."""
        if self._timer is not None:
            self._timer.cancel()
        with self._poller.shielded():
            self.link.come_up(channel, certificate, name, steady)

    # -- called by the link -------------------------------------------------------------------------

    def ended(self, link: TcpLink) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._left = True
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.stop()


class _Attempt:
    """One connection, until both sides have sent their greetings."""

    def __init__(
        self, dial: _Dial, poller: Poller, keys: Keys, family: int, address: tuple[object, ...], steady: bool
    ) -> None:
        self._dial = dial
        self._poller = poller
        self._keys = keys
        self._steady = steady
        self._channel: TlsChannel | None = None
        self._reader: greeting.Reader | None = None
        self._checked = False
        self._timer: Timer | None = None
        self._sock: socket.socket | None = None
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        hold(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(address)
        except BaseException:
            let_go(sock)
            raise
        if code not in (0, errno.EINPROGRESS):
            poller.call_later(0, lambda: self._unreached(code))
            return
        self._timer = poller.call_later(_CONNECT_TIME, lambda: self._unreached(errno.ETIMEDOUT))
        poller.register(sock.fileno(), self._on_connected, EPOLLOUT)

    def _unreached(self, code: int) -> None:
        if self.stop():
            self._dial.failed(SILENT if code == errno.ETIMEDOUT else _unreachable(code))

    def _on_connected(self, _events: int) -> None:
        sock = self._sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._unreached(code)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._poller.unregister(sock.fileno())
        self._dial.reached()
        try:
            context = self._keys.client_context()
        except (OSError, ValueError) as e:
            self._refused(f"this process cannot connect: {e}")
            return
        try:
            self._channel = TlsChannel(sock, context, server=False)
        except OSError:  # it has already hung up
            self._sock = None
            self._dial.was_hung_up()
            return
        self._poller.register(self._channel.fileno(), self._on_event, EPOLLIN)
        self._on_event(0)

    def _on_event(self, _events: int) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            if self._reader is None:
                if not self._checked:
                    self._check(channel)
                if not channel.handshake():
                    return
                self._begin(channel)
            assert self._reader is not None
            if self._reader.read(channel):
                self._finish(channel, self._reader.steady)
        except greeting.NoGreeting as e:
            self._refused(f"{NO_GREETING} ({e})")
        except greeting.KeyRefused as e:
            self._refused(f"{OUR_KEY}: {e}")
        except EOFError:
            self._hung_up()
        except OSError as e:
            self._explain(e)

    def _check(self, channel: TlsChannel) -> None:
        """Check the first bytes of the answer, because OpenSSL only reports that they are invalid."""
        try:
            first = channel.peek()
        except BlockingIOError:
            return
        if not first:
            raise EOFError
        language = speaks(first)
        if language != "TLS":
            self._refused(OLDER if language == "ZeroMQ" else NOT_OURS)
            raise BlockingIOError
        self._checked = True

    def _begin(self, channel: TlsChannel) -> None:
        """Send the greeting. This side's part of the handshake is done."""
        if self._keys.admitted(channel.certificate()) is None:
            raise greeting.NoGreeting(_NOT_ANY_MORE)
        channel.send(greeting.accept(self._steady))
        self._reader = greeting.Reader()

    def _finish(self, channel: TlsChannel, steady: bool) -> None:
        certificate = channel.certificate()
        name = self._keys.admitted(certificate)
        if name is None:  # revoked meanwhile
            raise greeting.NoGreeting(_NOT_ANY_MORE)
        self._poller.unregister(channel.fileno())
        self._channel = self._sock = None
        self._dial.done(channel, certificate, name, steady)

    def _explain(self, error: OSError) -> None:
        if isinstance(error, BlockingIOError):
            return
        failure = handshake_failure(error)
        hint = f": {self._keys.refusal_hint(self._dial.link.where.rpartition(':')[0])}"
        if failure is HandshakeFailure.THEIR_KEY:
            self._refused(THEIR_KEY + hint)
        elif failure in (HandshakeFailure.OUR_KEY, HandshakeFailure.NO_KEY):
            self._refused(OUR_KEY + hint)
        elif failure is HandshakeFailure.VERSION:
            self._refused(OTHER_TLS)
        elif failure is HandshakeFailure.HUNG_UP:
            self._hung_up()
        else:
            self._refused(f"{NO_GREETING} ({getattr(error, 'reason', '') or error})")

    def _refused(self, why: str) -> None:
        if self.stop():
            self._dial.refused(why)

    def _hung_up(self) -> None:
        if self.stop():
            self._dial.was_hung_up()

    def stop(self) -> bool:
        """Close the connection if this attempt still owns it. Return whether it did."""
        if self._timer is not None:
            self._timer.cancel()
        channel, sock = self._channel, self._sock
        self._channel = self._sock = None
        if channel is not None:
            self._poller.unregister(channel.fileno())
            channel.close()
        elif sock is not None:
            self._poller.unregister(sock.fileno())
            let_go(sock)
        return sock is not None


def _unreachable(code: int) -> str:
    return NO_LISTENER if code == errno.ECONNREFUSED else f"{NO_LISTENER} ({os.strerror(code)})"


# This avoids regular expressions: compiling one takes longer than all address handling of a starting worker.


def split(url: str) -> tuple[str, int]:
    """Split a URL into host and port. Port 0 means any.

    Raises:
        ValueError: the URL is invalid.
    """
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    sound = url.startswith("tcp://") and name and not any(c in name for c in ("[]" if bracketed else "[]:"))
    if not sound or not (port == "*" or (port.isdecimal() and len(port) <= 5 and int(port) <= 65535)):
        raise ValueError(f"{url!r} is not a worker address: it must look like tcp://host:26600 or tcp://[::1]:26600")
    return name, 0 if port == "*" else int(port)


def host_and_port(host: str, port: int) -> str:
    """Format ``host:port`` for messages."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int, numeric: bool = False) -> list[tuple[int, Any]]:
    """Resolve a host to its addresses, each with its family.

    Raises:
        OSError: the name is unknown.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    # A codec for text takes a millisecond to load.
    name = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def origin(address: str) -> str:
    """Return the unit by which connections are counted: an IPv4 address or an IPv6 network.

    A host can use any number of addresses of its IPv6 network.
    """
    if ":" not in address:
        return address
    import ipaddress  # takes half of this module's load time

    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((number, 64), strict=False))
    return address
