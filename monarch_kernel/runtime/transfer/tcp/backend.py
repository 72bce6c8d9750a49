"""Access buffers of processes on other hosts over TCP: the owner's data plane serves its memory on separate threads.

Transfers are effectively one-sided: no endpoint or message loop of the owner takes part, but its interpreter must run.
Each piece of a transfer is a request with the buffer's key, and the bytes, which move directly between the memory of
the two processes (except for encryption). Large transfers are split into pieces for several connections. Connections
are kept for later transfers. ``rendezvous`` sets them up and documents access control.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import struct
import threading
import time

import msgspec

from monarch_kernel import environment
from monarch_kernel.runtime.transfer import backend_settings
from monarch_kernel.runtime.transfer.backends.interface import BackendContext
from monarch_kernel.runtime.transfer.errors import Gone, RDMAError, RDMATimeoutError, Unfit
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.tcp.connection import (
    CONNECT,
    LOOPBACK,
    Connection,
    DataPort,
    EncryptedConnection,
    can_encrypt,
    dial,
    host_of,
    new_secret,
    recv_memory,
    send_memory,
    skip,
)
from monarch_kernel.runtime.transfer.thread_pool import SharedCopy, ThreadPool

log = logging.getLogger(__name__)

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
