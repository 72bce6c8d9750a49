"""Move bytes between ranks over TCP: the backend, its connections, and the port at which peers meet."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from monarch_kernel import environment
from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.runtime.node.acceptor import Acceptor
from monarch_kernel.runtime.node.audit import Tally
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.transfer import backend_settings, device
from monarch_kernel.runtime.transfer.backends import BackendContext
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Memory, scratch, steps
from monarch_kernel.runtime.transfer.thread_pool import SharedCopy, ThreadPool

# One TCP connection of the data plane, which transfers ranges of memory in plain text or encrypted.
#
# An encrypted connection carries frames of at most 1 MiB, each encrypted and authenticated with AES-256-GCM. Its two
# keys, one per direction, are sent over the control plane and used for this connection only. The nonce can therefore
# be a counter, and a frame that was changed, omitted, repeated or reordered does not decrypt.

# Set up a TCP connection between two processes: which side listens, which connects, and which peers are admitted.
#
# Processes listen only on demand. A connection begins with a token of 32 bytes, which the control plane distributes
# for this connection only. Connections without a valid token are closed. The side that can be reached listens. This is
# the owner of the buffer, on the interface by which its host's gateway is known, or, if the owner belongs to a
# controller without an address, the requesting process.

log = logging.getLogger(__name__)

TOKEN = 32
#: The validity of a token, and the time limit for a connection attempt and for a new connection to send its token
#: (seconds).
EXPIRY = 60.0
CONNECT = 5.0
GREETING = 5.0
#: The maximum number of connections that have not sent a token yet. Beyond that, the oldest is closed.
UNIDENTIFIED = 64
#: How long refusals are counted before the log reports them again (seconds).
REFUSALS = 60.0
LOOPBACK = "127.0.0.1"


def host_of(ref: ProcRef, seen_from: ProcRef) -> str:
    """Return where processes of a site can listen so that another process reaches them; "" if nowhere."""
    if ref.site == seen_from.site:
        return LOOPBACK
    scheme, _, place = ref.gateway_address.partition("://")
    return place.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


@dataclass(slots=True)
class _Expected:
    until: float
    welcome: Callable[[socket.socket], None]


def dial(address: tuple[str, int], token: bytes, deadline: float | None) -> socket.socket:
    """Connect, and send the token.

    Raises:
        OSError: nothing listens there in time.
    """
    limit = CONNECT if deadline is None else min(CONNECT, max(deadline - time.monotonic(), 0.001))
    sock = socket.create_connection(address, limit)
    _ours.add(sock)
    try:
        sock.sendall(token)
    except BaseException:
        sock.close()
        raise
    return sock


class DataPort:
    """A listening socket for expected connections, served by the polling thread."""

    def __init__(self, poller: Poller, host: str) -> None:
        self._poller = poller
        sock = _listen(host)
        self.address: tuple[str, int] = (host, sock.getsockname()[1])
        self._expected: dict[bytes, _Expected] = {}
        self._unidentified: dict[int, _Unidentified] = {}
        self._guard = threading.Lock()
        self._refusals = Tally(poller, REFUSALS, self._log_refused)
        _ours.add(sock)
        self._acceptor = Acceptor(poller, sock, "the data port", self._on_connection, self._make_room)
        poller.start_background()

    def expect(self, welcome: Callable[[socket.socket], None]) -> bytes:
        """Create a token. If a connection sends it in time, the poller calls ``welcome(socket)`` once."""
        now = time.monotonic()
        token = secrets.token_bytes(TOKEN)
        with self._guard:
            for old in [old for old, expected in self._expected.items() if expected.until < now]:
                del self._expected[old]
            self._expected[token] = _Expected(now + EXPIRY, welcome)
        return token

    def forget(self, token: bytes) -> None:
        """Stop admitting connections with this token."""
        with self._guard:
            self._expected.pop(token, None)

    def _on_connection(self, sock: socket.socket, where: tuple[str, int]) -> None:
        if len(self._unidentified) >= UNIDENTIFIED:
            self._make_room()
        _ours.add(sock)
        self._unidentified[sock.fileno()] = _Unidentified(self, sock, where[0])

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without a token. Return whether there was one."""
        oldest = next(iter(self._unidentified.values()), None)
        if oldest is not None:
            oldest.leave("too many others are waiting")
        return oldest is not None

    def admit(self, token: bytes, sock: socket.socket) -> bool:
        """Admit a connection with this token. Return False if the token is unknown or has expired."""
        with self._guard:
            expected = self._expected.pop(token, None)
        if expected is None or expected.until < time.monotonic():
            return False
        expected.welcome(sock)
        return True

    def close(self) -> None:
        """Stop listening, and discard all tokens."""
        self._acceptor.close()
        for unidentified in list(self._unidentified.values()):
            unidentified.leave("")
        with self._guard:
            self._expected.clear()
        self._refusals.close()

    def _log_refused(self, where: str, why: str, again: int) -> None:
        more = f" ({again} more since)" if again else ""
        log.warning("refused a data connection from %s: %s%s", where, why, more)


class _Unidentified:
    """A connection that has not sent its token yet."""

    def __init__(self, data_port: DataPort, sock: socket.socket, where: str) -> None:
        self._data_port = data_port
        self._sock = sock
        self._where = where
        self._fd = sock.fileno()
        self._shown = b""
        sock.setblocking(False)
        poller = data_port._poller
        self._timer = poller.call_later(GREETING, lambda: self.leave("it showed no token"))
        poller.register(self._fd, self._on_data)

    def _on_data(self, _events: int) -> None:
        try:
            data = self._sock.recv(TOKEN - len(self._shown))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._shown += data
        if not data:
            self.leave("it showed no token")
        elif len(self._shown) == TOKEN:
            self._forget()
            if not self._data_port.admit(self._shown, self._sock):
                self._refuse("its token is unknown")

    def leave(self, why: str) -> None:
        """Close the connection and log the reason."""
        if self._fd in self._data_port._unidentified:
            self._forget()
            self._refuse(why)

    def _forget(self) -> None:
        del self._data_port._unidentified[self._fd]
        self._timer.cancel()
        self._data_port._poller.unregister(self._fd)

    def _refuse(self, why: str) -> None:
        if why:
            self._data_port._refusals.add(self._where, why)
        self._sock.close()


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)
    if str(address[0]).startswith(("127.", "::1")) and host not in (address[0], "localhost"):
        address = everywhere  # the name resolves to the loopback interface only on the host itself
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        try:
            sock.bind(address)
        except OSError:  # other hosts know this host by an address that none of its interfaces has
            sock.bind(everywhere)
        sock.listen(256)
    except BaseException:
        sock.close()
        raise
    return sock


_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forked() -> None:
    """Close the connections in a forked child: they belong to the parent, and must end when it closes them."""
    for sock in list(_ours):
        sock.close()


os.register_at_fork(after_in_child=_forked)


FRAME = 1 << 20
_TAG = 16
_KEY = 32
#: The size of the secret of both sides (bytes): one key per direction.
SECRET = 2 * _KEY
#: Shorter runs of scattered memory are gathered first (bytes): one system call per run would take longer than the copy.
DIRECT = 16 << 10
#: The approximate time to detect a vanished host, if the control plane has not reported it before (seconds).
_SILENCE = 10
_UNACKNOWLEDGED = 60


def tune(sock: socket.socket) -> None:
    """Send short messages at once, and limit the wait for a vanished host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE // 2)
    # A stalled peer acknowledges but reads nothing. This limit is longer than a permitted stall.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED * 1000)


class Connection:
    """A connection in plain text.

    Attributes:
        deadline: on the clock of ``time.monotonic()``; after it, sending and receiving raise ``TimeoutError``.
        stall_timeout: without a deadline, how long it may stall (seconds; None for no limit).
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.deadline: float | None = None
        self.stall_timeout: float | None = None
        tune(sock)

    def send(self, data: memoryview | bytes, more: bool = False) -> None:
        """Send all of the data. ``more``: other data follows at once."""
        self._send(memoryview(data), more)

    def recv_into(self, view: memoryview) -> None:
        """Fill the view.

        Raises:
            ConnectionError: the connection ended.
            TimeoutError: no data arrived in time.
        """
        self._fill(view)

    def _send(self, view: memoryview, more: bool) -> None:
        flags = socket.MSG_MORE if more else 0
        while view:
            self._limit()
            view = view[self.sock.send(view, flags) :]

    def _fill(self, view: memoryview) -> None:
        while view:
            self._limit()
            got = self.sock.recv_into(view)
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            view = view[got:]

    def _limit(self) -> None:
        limit = self.stall_timeout
        if self.deadline is not None:
            limit = self.deadline - time.monotonic()
            if limit <= 0:
                raise TimeoutError
        if limit != self.sock.gettimeout():
            self.sock.settimeout(limit)

    def cut(self) -> None:
        """Shut down the connection, from any thread. A thread that sends or receives gets an error at once."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has already ended
            pass

    def close(self) -> None:
        """Close the socket. Called only by the thread that uses it."""
        self.sock.close()


class EncryptedConnection(Connection):
    """An encrypted connection.

    Args:
        secret: both keys.
        opener: whether this side opened the connection; it then sends with the first key.
    """

    def __init__(self, sock: socket.socket, peer: str, secret: bytes, opener: bool) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(sock, peer)
        first, second = AESGCM(secret[:_KEY]), AESGCM(secret[_KEY:])
        self._seal, self._open = (first, second) if opener else (second, first)
        self._sent = self._received = 0
        self._out = memoryview(bytearray())
        self._in = memoryview(bytearray())
        self._rest = memoryview(b"")

    def send(self, data: memoryview | bytes, more: bool = False) -> None:
        view = memoryview(data)
        while view:
            piece, view = view[:FRAME], view[FRAME:]
            size = piece.nbytes + _TAG
            if len(self._out) < 4 + size:
                self._out = memoryview(bytearray(4 + size))
            self._out[:4] = size.to_bytes(4, "little")
            self._seal.encrypt_into(self._sent.to_bytes(12, "little"), piece, None, self._out[4 : 4 + size])
            self._sent += 1
            self._send(self._out[: 4 + size], more or bool(view))

    def recv_into(self, view: memoryview) -> None:
        head = bytearray(4)
        while view:
            if not self._rest:
                self._fill(memoryview(head))
                size = int.from_bytes(head, "little")
                if not _TAG < size <= FRAME + _TAG:
                    raise ConnectionAbortedError("the peer sent an invalid frame")
                if len(self._in) < size:
                    self._in = memoryview(bytearray(size))
                frame = self._in[:size]
                self._fill(frame)
                plain = size - _TAG
                if plain <= view.nbytes:
                    self._unseal(frame, view[:plain])
                    view = view[plain:]
                    continue
                self._rest = memoryview(bytearray(plain))
                self._unseal(frame, self._rest)
            some = min(len(self._rest), view.nbytes)
            view[:some] = self._rest[:some]
            view, self._rest = view[some:], self._rest[some:]

    def _unseal(self, frame: memoryview, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._open.decrypt_into(self._received.to_bytes(12, "little"), frame, None, into)
        except InvalidTag:
            raise ConnectionAbortedError("a frame was not encrypted with this connection's key") from None
        self._received += 1


@functools.cache
def can_encrypt() -> bool:
    """Return whether encrypted connections are possible here."""
    return find_spec("cryptography") is not None


def new_secret() -> bytes:
    """Create a secret for one connection. Also imports the encryption, so that the poller need not wait for it."""
    import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return secrets.token_bytes(SECRET)


def send_memory(connection: Connection, memory: Memory, at: int, size: int) -> None:
    """Send bytes of an object, directly from its memory if the runs are long enough."""
    for view in _pieces(memory, at, size):
        if view is None:
            for lo, hi in steps(memory.layout, at, at + size):
                between = scratch(hi - lo)
                device.gather(memory, lo, hi - lo, ctypes.addressof(between))
                connection.send(_bytes(between)[: hi - lo], hi < at + size)
        else:
            connection.send(view)


def recv_memory(connection: Connection, memory: Memory, at: int, size: int) -> None:
    """Receive bytes of an object, directly into its memory if the runs are long enough."""
    for view in _pieces(memory, at, size):
        if view is None:
            for lo, hi in steps(memory.layout, at, at + size):
                between = scratch(hi - lo)
                connection.recv_into(_bytes(between)[: hi - lo])
                device.scatter(memory, lo, hi - lo, ctypes.addressof(between))
        else:
            connection.recv_into(view)


def skip(connection: Connection, size: int) -> None:
    """Receive bytes and discard them."""
    between = memoryview(bytearray(min(size, FRAME)))
    while size:
        some = min(size, len(between))
        connection.recv_into(between[:some])
        size -= some


def _pieces(memory: Memory, at: int, size: int) -> Iterator[memoryview | None]:
    """Yield views of the memory, in order; a single None instead for GPU memory or short runs."""
    layout = memory.layout
    part = None if memory.device else layout.part(at, at + size)
    if memory.device or (layout.run < DIRECT and (part is None or not part.contiguous)):
        yield None
        return
    runs = [(part.address, size)] if part is not None and part.contiguous else layout.runs(at, at + size)
    for address, length in runs:
        yield _bytes((ctypes.c_char * length).from_address(address))


def _bytes(memory: ctypes.Array[ctypes.c_char] | bytearray | memoryview) -> memoryview:
    return memoryview(memory).cast("B")


# Access buffers of processes on other hosts over TCP: the owner's data plane serves its memory on separate threads.
#
# Transfers are effectively one-sided: no endpoint or message loop of the owner takes part, but its interpreter must
# run. Each piece of a transfer is a request with the buffer's key, and the bytes, which move directly between the
# memory of the two processes (except for encryption). Large transfers are split into pieces for several connections.
# Connections are kept for later transfers. ``rendezvous`` sets them up and documents access control.

#: Transfers of at least twice this size are split into pieces between this and PIECE_MAX.
PIECE = 2 << 20
PIECE_MAX = 16 << 20
#: The number of attempts for a piece, each over a new connection: the peer may have closed an idle one.
ATTEMPTS = 3
#: How long a thread waits for the next request on a connection, before it hands it to the poller (seconds).
LINGER = 0.2
LINGERERS = 8  # the maximum number of threads that wait in this way
#: How long the owner's side waits for a peer that stalls during a transfer (seconds).
STALL = 60.0
#: Connections unused for this time are closed (seconds).
IDLE = 30.0

_REQUEST = struct.Struct("<B7xQQQ")  # what, key, offset, size
_REPLY = struct.Struct("<B3xI")  # status, length of the error's text
_READ, _WRITE = 1, 2
_DONE, _FAILED = 0, 1
_TEXT_MAX = 4096


class ConnectionRequest(msgspec.Struct, array_like=True):
    """Requests a connection from the owner of a buffer."""

    trusted: bool  # encryption is not required
    host: str  # where the owner is to listen; with a port, where the requesting process listens
    port: int = 0
    token: bytes = b""


class ConnectionOffer(msgspec.Struct, array_like=True):
    """The owner's answer to a ``ConnectionRequest``."""

    secret: bytes  # for an encrypted connection; empty for one in plain text
    port: int = 0  # the port at which it listens; 0 if it has connected itself
    token: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ConnectionRequest).decode
_decode_answer = msgspec.msgpack.Decoder(ConnectionOffer).decode


class Tcp:
    """TCP connections, encrypted unless both sides trust the network."""

    name = "tcp"
    inline = -1  # it waits for the owner
    devices = True

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine
        self._pool = ThreadPool("monarch-transfer-tcp", 64)
        self._guard = threading.Lock()
        self._data_ports: dict[str, DataPort] = {}
        self._connections: set[Connection] = set()  # all open connections
        self._idle: dict[str, list[tuple[float, Connection]]] = {}  # to owners, by owner
        self._parked: set[Connection] = set()  # from peers, while no request is pending
        self._arrivals: dict[queue.SimpleQueue[socket.socket | None], str] = {}
        self._lingering = 0
        self._sweeping = False
        self._closed = False

    @staticmethod
    def available() -> bool:
        return True  # bars() reports what is missing

    def bars(self, handle: Handle) -> str:
        if not backend_settings.trusted() and not can_encrypt():
            return (
                f"encryption needs the package cryptography (on a trusted network, {environment.RDMA_TCP.name}="
                f"{environment.TRUSTED_NETWORK} or configure(tcp=...) does without)"
            )
        here, there = self._engine.node.ref, handle.owner
        if here.site != there.site:
            if backend_settings.tcp_fallback() is False and backend_settings.forced() != self.name:
                return f"turned off by {environment.RDMA_TCP_FALLBACK.name}=0 or configure(allow_tcp_fallback=False)"
            if not host_of(there, here) and not host_of(here, there):
                return "neither the owner's host nor this one has an address that the other can connect to"
        return ""

    # -- transferring -----------------------------------------------------------------------------

    def move(self, op: Op, deadline: float | None) -> None:
        size = op.size
        streams = min(environment.RDMA_STREAMS.get(), size // PIECE) if size >= 2 * PIECE else 1
        if streams < 2:
            self._piece(op, 0, size, deadline)
            return
        piece = min(max(-(-size // (2 * streams)), PIECE), PIECE_MAX)
        piece = -(-piece // 4096) * 4096
        cuts = [(lo, min(lo + piece, size)) for lo in range(0, size, piece)]
        share = SharedCopy(cuts, lambda lo, hi: self._piece(op, lo, hi, deadline))
        for _ in range(streams - 1):
            self._engine.work.run(share.help)
        share.finish()

    def _piece(self, op: Op, lo: int, hi: int, deadline: float | None) -> None:
        owner, lost = op.handle.owner.id, ""
        for _ in range(ATTEMPTS):
            connection: Connection | None = None
            try:
                connection = self._take(owner) or self._connect(op.handle, deadline)
                connection.deadline = deadline
                error = self._exchange(connection, op, lo, hi)
            except BaseException as e:
                if connection is not None:
                    self._end(connection)
                if owner in self._engine.node.deaths:
                    raise Gone from None
                if isinstance(e, TimeoutError) and deadline is not None and time.monotonic() >= deadline:
                    raise RDMATimeoutError(f"{op} did not end in time", owner) from None
                if isinstance(e, RDMAError) or not isinstance(e, OSError):
                    raise
                lost = str(e)
                self._end_idle(owner)
                continue
            self._give_back(owner, connection)
            if error:
                raise RDMAError(f"{op} failed: {error}", owner)
            return
        raise RDMAError(
            f"{op} failed: there is no TCP connection to its owner, or it broke each time ({lost}); check for a "
            "firewall between the two hosts: these connections use any free port",
            owner,
        )

    def _exchange(self, connection: Connection, op: Op, lo: int, hi: int) -> str:
        """Exchange one request and its answer. Return the owner's error, or ""."""
        kind = _WRITE if op.write else _READ
        connection.send(_REQUEST.pack(kind, op.handle.key, op.offset + lo, hi - lo), more=op.write)
        if op.write:
            send_memory(connection, op.memory, lo, hi - lo)
        head = bytearray(_REPLY.size)
        connection.recv_into(memoryview(head))
        status, length = _REPLY.unpack(head)
        if status != _DONE:
            text = bytearray(min(length, _TEXT_MAX))
            connection.recv_into(memoryview(text))
            return text.decode("utf-8", "replace")
        if not op.write:
            recv_memory(connection, op.memory, lo, hi - lo)
        return ""

    # -- connections to owners ----------------------------------------------------------------------

    def _take(self, owner: str) -> Connection | None:
        with self._guard:
            idle = self._idle.get(owner)
            return idle.pop()[1] if idle else None

    def _give_back(self, owner: str, connection: Connection) -> None:
        with self._guard:
            if connection in self._connections and not self._closed:
                self._idle.setdefault(owner, []).append((time.monotonic(), connection))
                if not self._sweeping:
                    self._sweeping = True
                    self._engine.node.poller.call_later(IDLE, self._sweep)
                return
        self._end(connection)

    def _sweep(self) -> None:
        """Close connections that have been idle too long."""
        old: list[Connection] = []
        with self._guard:
            before = time.monotonic() - IDLE
            for owner, idle in list(self._idle.items()):
                old += [connection for since, connection in idle if since <= before]
                self._idle[owner] = [entry for entry in idle if entry[0] > before]
                if not self._idle[owner]:
                    del self._idle[owner]
            self._sweeping = bool(self._idle) and not self._closed
            again = self._sweeping
        for connection in old:
            self._end(connection)
        if again:
            self._engine.node.poller.call_later(IDLE / 2, self._sweep)

    def _end_idle(self, owner: str) -> None:
        with self._guard:
            idle = self._idle.pop(owner, [])
        for _, connection in idle:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Close a connection. Called by the thread that uses it."""
        with self._guard:
            self._connections.discard(connection)
        connection.close()

    def _connection(self, sock: socket.socket, peer: str, secret: bytes, opener: bool) -> Connection:
        try:
            connection = EncryptedConnection(sock, peer, secret, opener) if secret else Connection(sock, peer)
        except BaseException:
            sock.close()
            raise
        with self._guard:
            if not self._closed and peer not in self._engine.node.deaths:
                self._connections.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the other process is gone, or this one is ending")

    def _connect(self, handle: Handle, deadline: float | None) -> Connection:
        node, owner = self._engine.node, handle.owner
        trusted = backend_settings.trusted()
        host = host_of(owner, node.ref)
        if not host:
            return self._await_connection(handle, deadline)
        request = ConnectionRequest(trusted, host)
        answer = _decode_answer(self._engine.offer(handle, self.name, _encode(request), deadline))
        self._check_encryption(answer, handle)
        try:
            sock = dial((host, answer.port), answer.token, deadline)
        except OSError as e:
            raise type(e)(f"connecting to {host}, port {answer.port}: {e}") from None
        return self._connection(sock, owner.id, answer.secret, opener=True)

    def _await_connection(self, handle: Handle, deadline: float | None) -> Connection:
        """Listen, and request the owner to connect."""
        node, owner = self._engine.node, handle.owner
        arrival: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        data_port = self._data_port(host_of(node.ref, owner))
        token = data_port.expect(arrival.put)
        with self._guard:
            self._arrivals[arrival] = owner.id
        try:
            request = ConnectionRequest(backend_settings.trusted(), *data_port.address, token)
            answer = _decode_answer(self._engine.offer(handle, self.name, _encode(request), deadline))
            self._check_encryption(answer, handle)
            sock = arrival.get(timeout=CONNECT)
        except queue.Empty:
            raise TimeoutError(f"the owner connected, but nothing arrived within {CONNECT:g} s") from None
        finally:
            data_port.forget(token)
            with self._guard:
                del self._arrivals[arrival]
        if sock is None:
            raise ConnectionAbortedError("its owner died")
        return self._connection(sock, owner.id, answer.secret, opener=False)

    def _check_encryption(self, answer: ConnectionOffer, handle: Handle) -> None:
        if not answer.secret and not backend_settings.trusted():
            raise Unfit(f"{handle.who} does not encrypt")

    def _data_port(self, host: str) -> DataPort:
        with self._guard:
            data_port = self._data_ports.get(host)
            if data_port is None:
                if self._closed:
                    raise Unfit("this process is ending")
                data_port = self._data_ports[host] = DataPort(self._engine.node.poller, host)
            return data_port

    # -- at the owner ------------------------------------------------------------------------------

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        wanted = _decode_request(request)
        sealed = not (wanted.trusted and backend_settings.trusted())
        if sealed and not can_encrypt():
            raise Unfit("its owner cannot encrypt: it lacks the package cryptography")
        secret = new_secret() if sealed else b""
        try:
            if wanted.port:
                sock = dial((wanted.host, wanted.port), wanted.token, None)
                self._welcome(sock, peer, secret, opener=True)
                return _encode(ConnectionOffer(secret))
            ref = self._engine.node.ref
            if wanted.host not in (LOOPBACK, host_of(ref, msgspec.structs.replace(ref, site="\0"))):
                raise Unfit(f"{wanted.host} is not where its owner can be reached")
            data_port = self._data_port(wanted.host)
        except OSError as e:
            where = f"{wanted.host}, port {wanted.port}" if wanted.port else wanted.host
            verb = "connect to" if wanted.port else "listen at"
            raise RDMAError(f"its owner cannot {verb} {where}: {e}") from None
        token = data_port.expect(lambda sock: self._welcome(sock, peer, secret, opener=False))
        return _encode(ConnectionOffer(secret, data_port.address[1], token))

    def _welcome(self, sock: socket.socket, peer: str, secret: bytes, opener: bool) -> None:
        try:
            connection = self._connection(sock, peer, secret, opener)
        except ConnectionAbortedError:
            return
        self._pool.run(lambda: self._serve(connection))

    def _serve(self, connection: Connection) -> None:
        """Answer requests while they arrive, then hand the connection to the poller."""
        readable = select.poll()
        readable.register(connection.sock.fileno(), select.POLLIN)
        connection.stall_timeout = STALL
        try:
            while self._linger(readable):
                self._answer(connection)
        except OSError:
            self._end(connection)
        except Exception:
            log.exception("serving a buffer to %s failed", connection.peer)
            self._end(connection)
        else:
            self._park(connection)

    def _linger(self, readable: select.poll) -> bool:
        """Wait briefly for a request, unless many threads already do."""
        with self._guard:
            few = self._lingering < LINGERERS
            self._lingering += few
        try:
            return bool(readable.poll(LINGER * 1000 if few else 0))
        finally:
            with self._guard:
                self._lingering -= few

    def _park(self, connection: Connection) -> None:
        poller, fd = self._engine.node.poller, connection.sock.fileno()

        def wake(_events: int) -> None:
            with self._guard:
                if connection not in self._parked:
                    return
                self._parked.discard(connection)
            poller.unregister(fd)
            self._pool.run(lambda: self._serve(connection))

        with self._guard:
            if connection in self._connections:
                self._parked.add(connection)
                poller.register(fd, wake)
                return
        connection.close()

    def _answer(self, connection: Connection) -> None:
        head = bytearray(_REQUEST.size)
        connection.recv_into(memoryview(head))
        kind, key, offset, size = _REQUEST.unpack(head)
        if kind not in (_READ, _WRITE):
            raise ConnectionAbortedError("the peer sent an invalid request")
        begun = False
        try:
            with self._engine.held(key) as registration:
                registration.within(offset, size, write=kind == _WRITE)
                begun = True
                if kind == _READ:
                    connection.send(_REPLY.pack(_DONE, 0), more=True)
                    send_memory(connection, registration.memory, offset, size)
                else:
                    recv_memory(connection, registration.memory, offset, size)
        except RDMAError as e:
            if begun:
                raise
            if kind == _WRITE:
                skip(connection, size)
            text = str(e).encode()[:_TEXT_MAX]
            connection.send(_REPLY.pack(_FAILED, len(text)) + text)
        else:
            if kind == _WRITE:
                connection.send(_REPLY.pack(_DONE, 0))

    # -- ending -----------------------------------------------------------------------------------------

    def dropped(self, key: int) -> None:
        """Do nothing: each request looks up the key."""

    def peer_dead(self, proc: str) -> None:
        with self._guard:
            gone = [connection for connection in self._connections if connection.peer == proc]
            for arrival, owner in self._arrivals.items():
                if owner == proc:
                    arrival.put(None)
        self._cut(gone)
        self._end_idle(proc)

    def _cut(self, connections: list[Connection]) -> None:
        for connection in connections:
            with self._guard:
                parked = connection in self._parked
                self._parked.discard(connection)
            if parked:
                self._engine.node.poller.unregister(connection.sock.fileno())
                self._end(connection)
            else:
                connection.cut()  # the thread that uses it then closes it

    def close(self) -> None:
        with self._guard:
            self._closed = True
            data_ports, self._data_ports = list(self._data_ports.values()), {}
            connections, self._connections = list(self._connections), set()
            for arrival in self._arrivals:
                arrival.put(None)
            owners = list(self._idle)
        for data_port in data_ports:
            data_port.close()
        self._cut(connections)
        for owner in owners:
            self._end_idle(owner)
