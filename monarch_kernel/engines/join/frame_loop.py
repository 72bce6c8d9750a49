"""One thread that sends and receives frames on sockets. Ranks load this module: it imports only the standard library.

A frame is its length (4 bytes, little-endian), then its bytes. Neither side ever waits for the other: unsent data is
queued, and a peer that reads nothing until the queue is full loses its connection.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

_LENGTH = struct.Struct("<I")
#: The maximum length of a frame (bytes). Tools send large values in one message.
LONGEST = 1 << 31
#: The maximum size of the send queue of a peer before the connection is closed (bytes).
MOST_WAITING = 1 << 30
_CHUNK = 1 << 18


class FrameTooLongError(ValueError):
    """A frame exceeds the maximum length."""


def framed(parts: Sequence[bytes]) -> list[bytes]:
    """Return a frame with these parts, ready to send. A short frame is one piece, for a single system call and packet.

    Raises:
        FrameTooLongError: the frame exceeds the maximum length.
    """
    size = sum(len(part) for part in parts)
    if size > LONGEST:
        raise FrameTooLongError(f"a message of {size} bytes is too long to be sent to a rank of a joined job")
    pieces = [_LENGTH.pack(size), *parts]
    return [b"".join(pieces)] if size < _CHUNK else pieces


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes. Return the frames that they complete.

        Raises:
            FrameTooLongError: a frame exceeds the maximum length.
        """
        received = self._received
        received += data
        at = 0
        try:
            while len(received) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(received, at)
                if size > LONGEST:
                    raise FrameTooLongError(f"a message of {size} bytes is too long")
                begin = at + _LENGTH.size
                if len(received) - begin < size:
                    break
                at = begin + size
                yield bytes(memoryview(received)[begin:at])
        finally:
            del received[:at]


class FrameLink:
    """A connection. ``on_frame(link, frame)`` and ``on_closed(link)`` are called on the thread of the loop.

    Args:
        loop: its loop.
        sock: a connected stream socket; the link owns it.
    """

    def __init__(self, loop: FrameLoop, sock: socket.socket) -> None:
        self.on_frame: Callable[[FrameLink, bytes], None] = _ignore
        self.on_closed: Callable[[FrameLink], None] = _ignore_end
        self.closed = False
        self._loop = loop
        self._sock = sock
        self._frames = FrameReader()
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._lock = threading.Lock()  # protects the send queue
        self._wants_to_write = False

    def send(self, *parts: bytes) -> None:
        """Send one frame with these parts, in order with other frames, without waiting. Thread-safe.

        A frame to a peer that is gone is dropped.
        """
        pieces = framed(parts)
        with self._lock:
            if self.closed:
                return
            self._waiting.extend(memoryview(piece) for piece in pieces)
            self._size += sum(len(piece) for piece in pieces)
            if not self._wants_to_write:
                self._write()
            if self._size > MOST_WAITING:
                self._waiting.clear()
                self._size = 0
                self._shut()
            elif self._waiting and not self._wants_to_write:
                self._wants_to_write = True
                self._loop.change(self)

    def _write(self) -> None:
        """Send what the socket accepts now. The caller holds the lock."""
        try:
            while self._waiting:
                sent = self._sock.send(self._waiting[0], socket.MSG_NOSIGNAL)
                self._size -= sent
                if sent < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][sent:]
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._waiting.clear()  # the loop will see the end
            self._size = 0

    @property
    def waiting(self) -> int:
        """The size of the send queue (bytes)."""
        return self._size

    def close(self) -> None:
        """Close the connection. Thread-safe; ``on_closed`` is called once."""
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the loop sees the end, and closes

    # -- on the thread of the loop -------------------------------------------------------------------

    def ready(self, events: int) -> None:
        """Handle the events of the selector."""
        if events & selectors.EVENT_WRITE:
            with self._lock:
                self._write()
                if not self._waiting:
                    self._wants_to_write = False
                    self._loop.change(self)
        if events & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.drop(self)
            return
        try:
            for frame in self._frames.feed(data):
                self._loop.guarded(self.on_frame, self, frame)  # a bad message is not read twice
                if self.closed:
                    return
        except FrameTooLongError:
            self._loop.drop(self)

    def end(self) -> None:
        """Handle the end of the connection; called by the loop."""
        with self._lock:
            self.closed = True
            self._waiting.clear()
            self._sock.close()
        self.on_closed(self)

    def abandon(self) -> None:
        """Forget a descriptor that no longer belongs to this link, without closing it."""
        with self._lock:
            self.closed = True
            self._waiting.clear()
            self._sock.detach()

    def forget(self) -> None:
        """Close the copy of the descriptor in a forked child. Another thread may hold the lock, so do not take it."""
        self._lock = threading.Lock()
        self.closed = True
        self._waiting.clear()
        _close(self._sock.detach())

    def fileno(self) -> int:
        """The descriptor of the socket; -1 when it is closed."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """The events that the selector watches for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wants_to_write else 0)


class _Regular:
    """A periodic callback."""

    def __init__(self, period: float, work: Callable[[], object]) -> None:
        self.period = period
        self.work = work
        self.due = 0.0


class FrameLoop:
    """The thread, and its sockets.

    Args:
        name: the name of the thread.
        on_fault: called with exceptions of callbacks, which never end the thread.
    """

    def __init__(self, name: str, on_fault: Callable[[BaseException], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe = os.fstat(self._wake_write)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._todo: deque[Callable[[], object]] = deque()
        self._links: set[FrameLink] = set()
        self._listeners: list[socket.socket] = []
        self._on_fault = on_fault
        self._closed = False
        self._regular: list[_Regular] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def call_every(self, seconds: float, work: Callable[[], object]) -> None:
        """Also call ``work`` at this interval on the thread of the loop. Call this before `start`."""
        self._regular.append(_Regular(seconds, work))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def listen(self, listener: socket.socket, on_link: Callable[[FrameLink, socket.socket], None]) -> None:
        """Call ``on_link(link, sock)`` for each connection; the callback sets the callbacks of the link, or closes it.

        Args:
            listener: a listening socket that does not block; the loop owns it.
        """
        self._listeners.append(listener)

        def accept(_events: int) -> None:
            with suppress(BlockingIOError, InterruptedError, ConnectionError):
                sock, _ = listener.accept()
                sock.setblocking(False)
                link = FrameLink(self, sock)
                try:
                    on_link(link, sock)
                except BaseException:
                    sock.close()
                    raise
                if sock.fileno() >= 0:
                    self._add(link)

        self.call_soon(lambda: self._selector.register(listener, selectors.EVENT_READ, accept))

    def add(self, sock: socket.socket, on_frame: Callable[[FrameLink, bytes], None]) -> FrameLink:
        """Take ownership of a connected socket. Thread-safe."""
        sock.setblocking(False)
        link = FrameLink(self, sock)
        link.on_frame = on_frame
        self.call_soon(lambda: self._add(link))
        return link

    def _add(self, link: FrameLink) -> None:
        self._links.add(link)
        self._selector.register(link, link.events, link.ready)

    def change(self, link: FrameLink) -> None:
        """Update the watched events of a link. Thread-safe."""

        def apply() -> None:
            if link in self._links:
                self._selector.modify(link, link.events, link.ready)

        self.call_soon(apply)

    def drop(self, link: FrameLink) -> None:
        """Handle the end of a link."""
        if link in self._links:
            self._links.discard(link)
            self._selector.unregister(link)
            link.end()

    def call_soon(self, work: Callable[[], object]) -> None:
        """Call back on the thread of the loop. Thread-safe."""
        self._todo.append(work)
        with suppress(OSError):  # it is closed, or the pipe is full
            # A program that becomes a daemon closes all descriptors. This number may now belong to its log file.
            if os.path.samestat(os.fstat(self._wake_write), self._pipe):
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._closed:
            try:
                ready = self._selector.select(self._call_regular())
            except (OSError, ValueError) as error:  # the program has closed our descriptors, as daemons do
                self._abandon(error)
                return
            for key, events in ready:
                if key.data is None:
                    with suppress(OSError):
                        os.read(self._wake_read, 4096)
                    self._do()
                else:
                    self.guarded(key.data, events)
        for link in list(self._links):
            self.guarded(self.drop, link)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _call_regular(self) -> float | None:
        """Call the due callbacks. Return the time until the next one (seconds); None: there is none."""
        now = time.monotonic()
        for each in self._regular:
            if now >= each.due:
                each.due = now + each.period
                self.guarded(each.work)
        next_due = min((each.due for each in self._regular), default=None)
        return None if next_due is None else max(0.0, next_due - time.monotonic())

    def _abandon(self, error: BaseException) -> None:
        """End without closing descriptors: their numbers may now belong to files of the program."""
        self._closed = True
        self.guarded(self._on_fault, error)
        for link in list(self._links):
            link.abandon()
            self.guarded(link.on_closed, link)
        self._links.clear()
        for listener in self._listeners:
            listener.detach()

    def _do(self) -> None:
        while self._todo:
            self.guarded(self._todo.popleft())

    def guarded(self, work: Callable[..., object], *args: object) -> None:
        """Call back. Exceptions are passed to ``on_fault``."""
        try:
            work(*args)
        except BaseException as error:
            self._on_fault(error)

    def close(self, timeout: float = 2.0) -> None:
        """End the thread, and close its sockets."""
        self._closed = True
        self.call_soon(lambda: None)
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout)

    def forget(self) -> None:
        """Close the copies of descriptors in a forked child, because they keep connections open. Send nothing."""
        if self._closed:  # they are closed, and their numbers may be reused
            return
        self._closed = True
        for link in list(self._links):
            link.forget()
        self._links.clear()
        for listener in self._listeners:
            _close(listener.detach())
        with suppress(OSError):
            self._selector.close()
        _close(self._wake_read)
        _close(self._wake_write)
        self._wake_write = -1


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


def _ignore(_link: FrameLink, _frame: bytes) -> None:
    """Default callback: ignore a frame."""


def _ignore_end(_link: FrameLink) -> None:
    """Default callback: ignore the end."""
