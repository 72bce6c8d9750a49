"""A link: one stream socket between two processes, with framing in both directions.

On the wire: ``<u32 header length><u64 body length>``, header, body. A message without a header is a *word* of the link
itself, identified by its first byte. On an error (a length beyond the available memory, bytes that are not a message,
a handler that raises) the link sends ``FAILED`` with the cause and ends, because continuing would lose or misread
messages. Other links are not affected.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from monarch_kernel import logs
from monarch_kernel._version import __version__
from monarch_kernel.protocol.messages import PREFIX, Message, Reply, decode, encode, message_name
from monarch_kernel.protocol.private_files import NotPrivateError, user_name
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.protocol.socket_peers import is_ours, peer_of
from monarch_kernel.runtime.node.poller import EPOLLIN, EPOLLOUT, Poller

log = logs.logger(__name__)

_HEAD = PREFIX.size
_pack = PREFIX.pack
_unpack_from = PREFIX.unpack_from
#: The maximum size of one recv; below malloc's mmap threshold, so the buffer is cheap.
_CHUNK = 64 * 1024
#: Messages up to this size are joined into one piece before sending.
_JOIN = 32 * 1024
#: Messages up to this size are copied out of a received piece, which costs less than views of it.
_COPIED = 4 * 1024
#: The longest header. (Only the available memory limits a body.)
MAX_HEADER = 64 * 1024 * 1024
#: Larger messages are checked against the available memory before any is allocated for them.
_CHECKED = 64 * 1024 * 1024
#: Larger messages get huge pages, which take no memory until their bytes arrive.
_HUGE = 4 * 1024 * 1024
#: How many bytes one link sends or receives before other links get their turn.
_TURN = 1024 * 1024

#: Words of a link.
FAILED = 1
#: The maximum length of a cause.
_LONGEST_CAUSE = 2000
#: msgspec's error for a message whose tag is of no message here, and this module's words for it.
_UNKNOWN_TAG = re.compile(r"Invalid value (\d+) - at `\$\[0\]`")
_UNKNOWN = re.compile(r"does not know message (\d+)")

Buffer = bytes | bytearray | memoryview
Pieces = list[Buffer]


class ByteStream(Protocol):
    """The part of a socket that a link uses; ``TlsChannel`` implements it, too."""

    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def send(self, data: Buffer, /) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def recv(self, bufsize: int, /) -> bytes: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


#: Called with a link and a message received on it; called with a link that has ended.
OnMessage = Callable[["Link", Message, Body], None]
OnClose = Callable[["Link"], None]


class LinkError(Exception):
    """Received data is invalid. The message gives the reason."""


class Link:
    """Sends and receives whole messages over a socket. It may exist before its socket does.

    A link created before the peer has connected queues its messages, and sends them when ``attach`` provides the
    socket. Any thread may call ``send``. The polling thread calls ``on_message(link, header, body)`` and
    ``on_close(link)``. ``ended`` is the reason why the link was closed, in one clause, unless the other side just
    closed it.
    """

    __slots__ = (
        "_big",
        "_big_at",
        "_big_header",
        "_lock",
        "_moved",
        "_out",
        "_poller",
        "_receiving",
        "_rest",
        "_sock",
        "closed",
        "ended",
        "on_close",
        "on_message",
        "peer",
        "pid",
        "queued",
    )

    #: Whether the other end is on this machine, and can share memory with this one.
    local = True

    def __init__(
        self,
        poller: Poller,
        peer: str,
        on_message: OnMessage,
        on_close: OnClose,
    ) -> None:
        self._poller = poller
        self.peer = peer
        self.pid = 0
        self.on_message = on_message
        self.on_close = on_close
        self.closed = False
        self.ended = ""
        self.queued = 0  # bytes not yet accepted by the kernel
        self._sock: ByteStream | None = None
        self._out: deque[memoryview] = deque()
        self._lock = threading.RLock()
        self._moved: Link | None = None
        self._rest = b""
        self._receiving = False
        self._big: memoryview | None = None
        self._big_at = 0
        self._big_header = 0

    def attach(self, sock: ByteStream) -> None:
        """Take the socket (or an object used like one), send the queued messages, and begin to receive."""
        sock.setblocking(False)
        with self._lock:
            if self._sock is not None or self.closed:  # another thread has attached one at the same time
                sock.close()
                return
            self._sock = sock
            self._poller.register(sock.fileno(), self._on_event)
            self._flush()

    def take_over(self, waiting: Link) -> None:
        """Take over the queue of ``waiting``, a link to the same peer without a socket, and all its later messages."""
        with waiting._lock, self._lock:
            self._out.extend(waiting._out)
            self.queued += waiting.queued
            waiting._out.clear()
            waiting._moved = self
            self._flush()

    @property
    def attached(self) -> bool:
        """Whether there is a socket."""
        return self._sock is not None

    # -- sending --------------------------------------------------------------------------------

    def send(self, header: bytes, body: Body = b"") -> None:
        """Queue or send one message. ``body`` is bytes-like, or a list of bytes-like pieces.

        The pieces are not kept after this returns: bytes that the kernel did not accept are copied.

        Raises:
            ValueError: the header is longer than receivers accept.
        """
        head = len(header)
        if type(body) is list or head + (size := len(body)) > _JOIN:
            self._send_large(header, body)
            return
        data = _pack(head, size) + header + body
        with self._lock:
            sock = self._sock
            if sock is None or self._out or self.closed or self._moved is not None:
                self._send_later(data, header, body)
                return
            if self._poller.late:
                data = self._late() + data
            try:
                sent = sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the next read reports the end of the link
            if sent != len(data):
                self._queue(data[sent:])
                self._poller.modify(sock.fileno(), EPOLLIN | EPOLLOUT)

    def _send_later(self, data: bytes, header: bytes, body: Body) -> None:
        """Queue a small message behind others, or pass it on; the caller holds the lock."""
        if self.closed:
            return
        if self._moved is not None:
            self._moved.send(header, body)
            return
        if self._poller.late and self._sock is not None:  # else they would precede the Hello
            data = self._late() + data
        self._queue(data)

    def _send_large(self, header: bytes, body: Body) -> None:
        if len(header) > MAX_HEADER:
            raise ValueError(f"a message with a header of {len(header):,} bytes cannot be sent: {MAX_HEADER:,} at most")
        pieces = body if type(body) is list else [body]
        size = sum(memoryview(piece).nbytes for piece in pieces)
        self._send_pieces([_pack(len(header), size) + header, *pieces], size)

    def _late(self) -> bytes:
        """Return the frames of deferred messages to this peer."""
        return b"".join(_pack(len(header), 0) + header for header in map(encode, self._poller.late_for(self.peer)))

    def _queue(self, data: Buffer) -> None:
        self._out.append(memoryview(data))
        self.queued += len(data)

    def _send_pieces(self, pieces: Pieces, size: int) -> None:
        views = [memoryview(p).cast("B") for p in pieces if memoryview(p).nbytes]
        # A large message takes several system calls; an interrupt between them would truncate it.
        with self._poller.shielded(), self._lock:
            if self.closed:
                return
            if self._moved is not None:
                self._moved._send_pieces(pieces, size)
                return
            if self._poller.late and (late := self._late()):
                views.insert(0, memoryview(late))
            if not self._out and self._sock is not None:
                while views:
                    try:
                        sent = self._sock.sendmsg(views[:64])
                    except BlockingIOError:
                        break
                    except OSError:
                        return
                    while views and sent >= views[0].nbytes:
                        sent -= views[0].nbytes
                        views.pop(0)
                    if sent:
                        views[0] = views[0][sent:]
                if not views:
                    return
                self._poller.modify(self._sock.fileno(), EPOLLIN | EPOLLOUT)
            for view in views:
                self._queue(view if type(view.obj) is bytes else bytes(view))

    def _flush(self) -> None:
        """Send queued bytes, at most one turn's worth; the caller holds the lock."""
        sock = self._sock
        if sock is None:
            return
        out = self._out
        before = self.queued
        while out:
            if before - self.queued >= _TURN:
                self._poller.modify(sock.fileno(), EPOLLIN | EPOLLOUT)
                return
            try:
                sent = sock.sendmsg([out[i] for i in range(min(len(out), 64))])
            except BlockingIOError:
                self._poller.modify(sock.fileno(), EPOLLIN | EPOLLOUT)
                return
            except OSError:
                return
            self.queued -= sent
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
        self._poller.modify(sock.fileno(), EPOLLIN)

    # -- receiving ------------------------------------------------------------------------------

    def receive(self, events: int = EPOLLIN) -> bool:
        """Handle the data of one ``recv``, and first send what is queued if that is among the events.

        Returns:
            False at the end of the link or if there was no data.
        """
        if events & EPOLLOUT:
            with self._lock:
                if not self.closed:
                    self._flush()
            if events == EPOLLOUT:
                return False
        sock = self._sock
        if sock is None or self.closed or self._receiving:
            return False
        self._receiving = True
        try:
            if self._big is not None:
                return self._receive_big(sock)
            try:
                data = sock.recv(_CHUNK)
            except BlockingIOError:
                return False
            except OSError as e:
                self._at_end(e)
                return False
            if not data:
                self._at_end(None)
                return False
            if self._rest:
                data = self._rest + data
                self._rest = b""
            at = 0
            end = len(data)
            view = memoryview(data) if end > _COPIED else data
            on_message = self.on_message
            while end - at >= _HEAD:
                header_size, body_size = _unpack_from(data, at)
                head_at = at + _HEAD
                body_at = head_at + header_size
                after = body_at + body_size
                if after > end:
                    if after - at > _CHUNK:
                        self._begin_big(header_size, body_size, view[head_at:])
                        return True
                    break
                at = after
                if header_size:
                    on_message(self, decode(view[head_at:body_at]), view[body_at:after])
                else:
                    self._on_word(view[body_at:after])
                if self.closed:
                    return False
            if at < end:
                self._rest = data[at:]
            return True
        except Exception as e:
            try:
                self._fail(e)
            finally:  # even if there is no memory left to send FAILED
                self.close()
            return False
        finally:
            self._receiving = False

    #: The handler of the socket's events.
    _on_event = receive

    def _begin_big(self, header_size: int, body_size: int, have: Buffer) -> None:
        if header_size > MAX_HEADER:
            raise LinkError(f"a header of {header_size:,} bytes was announced, where {MAX_HEADER:,} is the most")
        gap = -header_size % 64  # aligns the start of the body, and so any array in it
        size = header_size + body_size
        self._big = allocate(gap + size)[gap:]
        self._big[: len(have)] = have
        self._big_at, self._big_header = len(have), header_size

    def _receive_big(self, sock: ByteStream) -> bool:
        big = self._big
        assert big is not None
        began = self._big_at
        stop = min(len(big), began + _TURN)
        while self._big_at < stop:
            try:
                got = sock.recv_into(big[self._big_at :])
            except BlockingIOError:
                return self._big_at > began
            except OSError as e:
                self._at_end(e)
                return False
            if not got:
                self._at_end(None)
                return False
            self._big_at += got
        if self._big_at < len(big):  # the last recv may have read past the end of the turn
            return True
        self._big = None
        body = big[self._big_header :]
        if self._big_header:
            self.on_message(self, decode(big[: self._big_header]), body)
        else:
            self._on_word(body)
        return True

    def _on_word(self, word: Buffer) -> None:
        """Handle a word from the other end of the link."""
        if len(word) and word[0] == FAILED:
            self.end(f"the other side gave it up: {add_message_name(_text(word[1:]))}")
        else:
            raise LinkError("an unknown word of the link was received")

    def _at_end(self, error: OSError | None) -> None:
        """End the link: the other side has closed it, or it has failed."""
        self.close()

    def _fail(self, error: Exception) -> None:
        """End the link because of data that cannot be handled, and tell the other side."""
        why = describe(error)
        _report_failure(self._poller, self.peer or "a process that has not identified itself", error, why)
        self.give_up(why)

    def give_up(self, why: str) -> None:
        """End the link, and tell the other side why."""
        self._say_failed(why)
        self.end(why)

    def _say_failed(self, why: str) -> None:
        self._say(FAILED, why.encode(errors="replace")[:_LONGEST_CAUSE])

    def _say(self, word: int, text: bytes = b"") -> None:
        """Send a word of the link itself, after the queued messages."""
        data = _pack(0, 1 + len(text)) + bytes([word]) + text
        with self._poller.shielded(), self._lock:
            if self.closed or self._sock is None:
                return
            self._queue(data)
            self._flush()

    def drain(self) -> None:
        """Handle all data that has already arrived, for a peer known to be dead."""
        while self.receive():
            pass

    # -- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket and call ``on_close``; later sends are dropped."""
        self.end("")

    def end(self, why: str) -> None:
        """Like ``close``, with a reason."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.ended = why
            self._out.clear()
            self.queued = 0
            self._big = None
            if self._sock is not None:
                self._poller.unregister(self._sock.fileno())
                self._sock.close()
        self.on_close(self)

    def abandon(self) -> None:
        """Close the descriptor in a forked child, which leaves the connection to the parent."""
        self.closed = True
        if self._sock is not None:
            self._sock.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self._sock is not None else "waiting"
        return f"<Link to {self.peer or '?'} {state}>"


def _report_failure(poller: Poller, peer: str, error: Exception, why: str) -> None:
    """Log that a link ends because of a message.

    Repeated failures share one line, because a peer may cause any number.
    """
    from monarch_kernel.runtime.node.audit import is_first_bad_message

    where = _place_of(error)
    if is_first_bad_message(poller, where, type(error).__name__):
        if is_peers_fault(error) or isinstance(error, MemoryError):
            log.warning("the link to %s ends: %s (%s)", _printable(peer), _printable(why), where)
        else:
            bug = "the link to %s ends: %s (%s); this is a bug in monarch_kernel"
            log.error(bug, _printable(peer), _printable(why), where)
    log.debug("the message could not be handled", exc_info=error)


def _place_of(error: Exception) -> str:
    """Return where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace is not None else "?"


def is_peers_fault(error: Exception) -> bool:
    """Return whether every receiver would have failed to handle the data."""
    return isinstance(error, LinkError | msgspec.MsgspecError | UnicodeDecodeError)


def describe(error: Exception) -> str:
    """Describe what went wrong with a message, in one clause."""
    if isinstance(error, MemoryError):
        return f"there is no memory for a message ({error})" if str(error) else "there is no memory for a message"
    if isinstance(error, LinkError):
        return str(error)
    if isinstance(error, msgspec.ValidationError) and (unknown := _UNKNOWN_TAG.fullmatch(str(error))):
        return (
            f"monarch_kernel {__version__} does not know message {unknown[1]}: install the newer version on all hosts"
        )
    if isinstance(error, msgspec.MsgspecError):
        return f"received data is not a message of this version ({error})"
    return f"a message could not be handled ({type(error).__name__}: {error})"


def add_message_name(why: str) -> str:
    """Add the name of a message that the other side does not know: only the side that has sent it knows the name."""
    return _UNKNOWN.sub(
        lambda found: f"{found[0]} ({message_name(int(found[1])) or 'unknown here, too'})", why, count=1
    )


def _text(word: Buffer) -> str:
    """Return text from the other side, made safe for a terminal."""
    return _printable(bytes(word[:_LONGEST_CAUSE]).decode(errors="replace"))


def _printable(text: str) -> str:
    """Return untrusted text on one line, without terminal control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_CAUSE])


def allocate(size: int) -> memoryview:
    """Allocate writable memory, in huge pages if possible, because first touches cost more than the copy.

    Raises:
        MemoryError: not enough is available.
    """
    if size < _HUGE:
        return memoryview(bytearray(size))
    if size >= _CHECKED and size > (left := memory_left()):
        raise MemoryError(f"{size:,} bytes, and {left:,} are left")
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        raise MemoryError(f"{size:,} bytes") from e
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        pass
    return memoryview(memory)


def memory_left() -> int:
    """Return how many bytes of memory are available on this machine and in this process's control group."""
    left = [1 << 62]
    try:
        with open("/proc/meminfo") as file:
            left.append(
                sum(int(line.split()[1]) << 10 for line in file if line.startswith(("MemAvailable:", "SwapFree:")))
            )
    except (OSError, ValueError, IndexError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as used:
            room = int(most.read()) - int(used.read())
        with open("/sys/fs/cgroup/memory.stat") as file:  # the kernel reclaims file cache on demand
            rows = (line.split() for line in file)
            left.append(room + sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file")))
    except (OSError, ValueError, IndexError):  # no control group, or one without a limit
        pass
    return min(left)


def listen_unix(path: str) -> socket.socket:
    """Listen at a Unix socket at ``path``; the folder's mode 0700 keeps other users out."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(4096)
    return sock


def connect_unix(path: str) -> socket.socket:
    """Connect to a Unix socket of a process of this user, or of root, which can access everything anyway.

    Raises:
        OSError: no process listens there (``FileNotFoundError``, ``ConnectionRefusedError``), or a process of another
            user does (``NotPrivateError``).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
        check_peer(sock, path)
    except OSError:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket, path: str) -> None:
    """Check, before a byte is sent or decoded, that this user or root listens at a Unix socket.

    Raises:
        NotPrivateError: another user listens; the message names the user and a remedy.
    """
    pid, uid = peer_of(sock)
    if not is_ours(uid):
        raise NotPrivateError(
            f"process {pid} of {user_name(uid)} listens at {path}, so nothing is sent to it: use a path in a folder "
            "that only you can write to, such as $XDG_RUNTIME_DIR"
        )


def listens(path: str) -> bool:
    """Return whether a process of this user listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
            check_peer(sock, path)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True


# Send one request to a process of this user on this machine, from a program that is not a node.
#
# The other process accepts the request on a link without a Hello (``node._STRANGERS``), and answers with a Reply.


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to a Unix socket of a process of this user, or of root, which has access to everything anyway.

    Raises:
        OSError: no process listens on it, or a process of another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout)
        sock.connect(address)
        check_peer(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def request(address: str, message: Message, timeout: float) -> tuple[Reply, bytes]:
    """Send a message, and wait for the Reply. Return it with its body.

    Args:
        timeout: the time limit for each step (seconds).

    Raises:
        TimeoutError: the process does not answer.
        OSError: it cannot be reached, or has closed the connection.
    """
    with connect(address, timeout) as sock:
        header = encode(message)
        sock.sendall(PREFIX.pack(len(header), 0) + header)
        length, size = PREFIX.unpack(_exactly(sock, PREFIX.size))
        reply = decode(_exactly(sock, length))
        body = _exactly(sock, size)
    if not isinstance(reply, Reply):
        raise ConnectionResetError("it sent something other than an answer")
    return reply, body


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return bytes(data)
