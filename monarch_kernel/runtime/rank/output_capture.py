"""Captures a rank's output and tags it with the cell that caused it.

A rank calls ``install()`` once; its fds 1 and 2 are pipes to its host agent. From then on ``sys.stdout`` and
``sys.stderr`` write records into those pipes (see ``protocol.output_records``), each in one atomic write.

A write belongs to the cell given to ``set_cell`` in the calling context (asyncio tasks inherit their creator's
context). Without one, it belongs to the cell that started the calling thread, and otherwise to the most recently begun
cell. A thread or task started by a cell therefore keeps writing to that cell after the cell has ended.

Lines are kept whole: a thread's text is sent at the end of a line, at ``flush()``, when the thread changes its
stream or cell, at the end of the cell, and after a tenth of a second. Each thread has its own buffer.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import io
import itertools
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from monarch_kernel.protocol import output_records
from monarch_kernel.runtime.actor.context import origin as _origin

#: How long an unfinished line is delayed (seconds).
PARTIAL_DELAY = 0.1
#: The maximum number of characters that a thread collects before it sends them.
MAX_PENDING = 2048
#: The maximum number of characters encoded at once.
_PIECE = 256 * 1024

_begun: list[str] = []
_fds: dict[str, int] = {}
_local = threading.local()
_counter = itertools.count(1)
_installed = False
_registered = False  # set after `os.register_at_fork`, which cannot be undone
_libc: Any = None


# -- cells ------------------------------------------------------------------------------------


def current_cell() -> str:
    """Return the id of the cell for writes of the calling thread or task; "" for none."""
    cell = _origin.get()
    if cell is not None:
        return cell
    inherited: str | None = getattr(threading.current_thread(), "_monarch_cell", None)
    if inherited is not None:
        return inherited
    return _begun[-1] if _begun else ""


def set_cell(cell: str | None) -> None:
    """Assign the calling thread's (or task's) further output to ``cell``; None: see the module docstring."""
    _origin.set(cell)


def begin_cell(cell: str) -> None:
    """Note that ``cell`` starts in the calling thread. Later plain bytes of C code belong to it."""
    flush()
    _begun.append(cell)
    _origin.set(cell)
    _put("stdout", (output_records.encode_begin(cell, "stdout"),))
    _put("stderr", (output_records.encode_begin(cell, "stderr"),))


def end_cell(cell: str) -> None:
    """Note that ``cell`` has ended: send all buffered text, then a mark that tells readers that it is complete."""
    flush()
    if cell in _begun:
        _begun.remove(cell)
    if _origin.get() == cell:
        _origin.set(None)
    _put("stdout", (output_records.encode_end(cell, "stdout"),))
    _put("stderr", (output_records.encode_end(cell, "stderr"),))


# -- rich output ------------------------------------------------------------------------------


def emit_display(
    data: dict[str, object],
    metadata: dict[str, object] | None = None,
    *,
    display_id: str | None = None,
    update: bool = False,
    result: bool = False,
) -> None:
    """Show a MIME bundle in the current cell; ``result``: as the cell's value."""
    message: dict[str, object] = {"data": data, "metadata": metadata or {}}
    if display_id is not None:
        message["display_id"] = display_id
        message["update"] = update
    _emit("result" if result else "display", message)


def clear_output(wait: bool = False) -> None:
    """Clear the current cell's output; ``wait``: only when new output arrives."""
    _emit("clear", {"wait": wait})


def emit_comm(message: dict[str, object]) -> None:
    """Send a message of a widget to the front end; see ``protocol.output_records.OutputEvent``."""
    _emit("comm", message)


def _emit(kind: output_records.Kind, message: dict[str, object]) -> None:
    _pending().flush()
    number = output_records.unique_number(next(_counter))
    _put("stdout", output_records.encode_message(kind, current_cell(), number, message))


def flush() -> None:
    """Send every thread's unfinished line and the buffer of C's stdio."""
    for pending in list(_dirty):
        pending.flush()
    _flush_c()


class AnswerMarks:
    """The numbered marks that end the output before this process's answers; ``OutputMarks`` of its actors.

    Attributes:
        fresh: whether a record was written since the last mark.
        used: whether a record was ever written. Until then only plain bytes need marks.
        reads: whether a process receives this one's output, and therefore the marks.
    """

    __slots__ = ("_last", "_lock", "fresh", "reads", "used")

    def __init__(self) -> None:
        self.used = False
        self.reads: Callable[[str], bool] = lambda _peer: False
        self.fresh = False
        self._last = 0
        self._lock = threading.Lock()

    def mark(self, peer: str, cell: str) -> int:
        """Mark the end of the output before the calling thread's reply, if there was any since the last mark.

        Plain bytes of C code and subprocesses are looked for only in calls from a notebook cell; calls from a script
        save the two system calls.

        Returns:
            The number of the last mark, which the reply carries; 0 if there is none.
        """
        if not self.reads(peer):
            return 0
        if _dirty:
            _pending().flush()
        errors = bool(cell) and _unread(_fds.get("stderr"))
        if not (self.fresh or errors or (cell and _unread(_fds.get("stdout")))):
            return self._last
        with self._lock:  # marks enter the pipe in the order of their numbers
            self._last += 1
            self.fresh = False  # before the mark: another thread's concurrent write may land behind it
            self.used = True
            _write_mark("stdout", output_records.encode_answer(self._last, errors))
            if errors:
                _write_mark("stderr", output_records.encode_flush(str(self._last), "stderr"))
            return self._last


marks = AnswerMarks()


def _write_mark(pipe: output_records.Stream, record: bytes) -> None:
    fd = _fds.get(pipe)
    if fd is not None:
        _write_whole(fd, record)


def _unread(fd: int | None) -> bool:
    """Return whether a pipe has bytes that the host agent has not read yet."""
    return fd is not None and fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"


# -- writing ----------------------------------------------------------------------------------


def _put(pipe: output_records.Stream, records: Iterable[bytes]) -> None:
    fd = _fds.get(pipe)
    if fd is None:  # not installed: a plain process that runs rank code
        return
    for record in records:
        _write(fd, record)


def _write(fd: int, record: bytes) -> None:
    try:
        os.write(fd, record)
    except (BlockingIOError, BrokenPipeError):
        _write_whole(fd, record)
    marks.fresh = marks.used = True  # after it: see `AnswerMarks.mark`


def _write_whole(fd: int, record: bytes) -> None:
    while True:
        try:
            os.write(fd, record)
            return
        except BlockingIOError:  # user code made it non-blocking; a record is written whole or not at all
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(1000)
        except BrokenPipeError:  # the agent is gone, and this process is about to exit
            return


class _Pending:
    """The unfinished line of one thread. Performance matters here: this code runs for every printed line."""

    __slots__ = ("_encoder", "_listed", "_lock", "_parts", "_seen", "_size", "cell", "stream")

    def __init__(self) -> None:
        # Reentrant: a signal handler that prints may interrupt its own thread in the middle of a write.
        self._lock = threading.RLock()
        self._parts: list[str] = []
        self._size = 0
        self._listed = False  # whether the flusher checks it
        self.cell = ""
        self.stream: output_records.Stream = "stdout"
        self._encoder = output_records.text_encoder(self.stream, self.cell)
        self._seen: list[str] | None = None  # the parts at the flusher's last check

    def write(self, stream: output_records.Stream, text: str) -> None:
        cell = _origin.get()
        if cell is None:
            cell = current_cell()
        lock = self._lock
        lock.acquire()  # `with` takes twice the time
        try:
            if stream != self.stream or cell != self.cell:
                if self._parts:
                    self._send()
                self._encoder = output_records.text_encoder(stream, cell)
                self.stream = stream
                self.cell = cell
            self._parts.append(text)
            self._size += len(text)
            if "\n" in text or "\r" in text or self._size > MAX_PENDING:
                self._send()
            elif not self._listed:
                self._list()
        finally:
            lock.release()

    def flush(self) -> None:
        with self._lock:
            if self._parts:
                self._send()

    def look(self) -> None:
        """Send the text if it is as old as the last check; unlist this if there is none. The flusher calls this."""
        with self._lock:
            if not self._parts:
                self._listed = False
                _dirty.discard(self)
            elif self._seen is self._parts:
                self._send()
            else:
                self._seen = self._parts

    def _list(self) -> None:
        self._listed = marks.used = True
        _dirty.add(self)
        _flusher.arm()

    def _send(self) -> None:
        # Take the parts first: a signal handler that prints may reenter this method.
        parts, self._parts = self._parts, []
        text = "".join(parts)
        encoder = self._encoder
        if self._size > encoder.room:
            self._size = 0
            self._send_long(text, encoder)
            return
        self._size = 0
        data = text.encode("utf-8", "backslashreplace")
        head = encoder.heads.get(len(data))  # most lines have a cached head; None if there is none, as for long lines
        if head is None and len(data) > encoder.room:
            self._send_long(text, encoder)
            return
        try:
            _write(_fds["stdout"], encoder.record(data) if head is None else head + data)
        except BaseException:
            self._keep(text)
            raise

    def _send_long(self, text: str, encoder: output_records.TextEncoder) -> None:
        # Piece by piece: memory may not hold three copies of a very long line.
        for start in range(0, len(text), _PIECE):
            records = list(encoder.records(text[start : start + _PIECE].encode("utf-8", "backslashreplace")))
            for done, record in enumerate(records):
                try:
                    _write(_fds["stdout"], record)
                except BaseException:
                    self._keep(b"".join(map(_text_of, records[done:])).decode() + text[start + _PIECE :])
                    raise

    def _keep(self, text: str) -> None:
        """Keep the text that is not written yet, after an interrupt while the pipe was full."""
        self._parts.insert(0, text)
        self._size += len(text)
        if not self._listed:
            self._list()


def _text_of(record: bytes) -> bytes:
    events = output_records.OutputDecoder().feed(record)
    return b"".join(event.data.encode() for event in events if event.kind == "text")


class _Flusher:
    """Sends unfinished lines after a delay. The first line starts its thread, which sleeps while there are none."""

    def __init__(self) -> None:
        self._armed = False
        self._ended = False
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def arm(self) -> None:
        if self._armed:
            return
        self._armed = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-output", daemon=True)
            _original_start(self._thread)
        self._wanted.set()

    def end(self) -> None:
        """End the thread, once there are no unfinished lines."""
        self._ended = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._ended:
                return
            self._wanted.clear()
            while _dirty:
                time.sleep(PARTIAL_DELAY / 2)
                for pending in list(_dirty):
                    pending.look()
            self._armed = False
            if _dirty:  # a line was listed between the two statements, and saw the flusher armed
                self.arm()


_dirty: set[_Pending] = set()
_original_start = threading.Thread.start
_flusher = _Flusher()


def _pending() -> _Pending:
    try:
        return _local.pending
    except AttributeError:
        pending = _local.pending = _Pending()
        return pending


class _RankBuffer(io.BufferedIOBase):
    """``sys.stdout.buffer``: sends bytes at once."""

    def __init__(self, stream: output_records.Stream) -> None:
        self._stream: output_records.Stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        _pending().flush()
        _put("stdout", output_records.encode_text(self._stream, current_cell(), bytes(view)))
        return view.nbytes

    def fileno(self) -> int:
        return 1 if self._stream == "stdout" else 2

    def close(self) -> None:
        """Do nothing: other threads of the rank write here."""


class RankStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a rank."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    write_through = False
    mode = "w"

    def __init__(self, stream: output_records.Stream) -> None:
        self._stream: output_records.Stream = stream
        self.name = f"<{stream}>"
        self.buffer = _RankBuffer(stream)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        """Return the pipe's descriptor, for subprocesses, which write plain bytes."""
        return 1 if self._stream == "stdout" else 2

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            try:
                pending = _local.pending
            except AttributeError:
                pending = _pending()
            pending.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        _pending().flush()

    def close(self) -> None:
        """Send the buffered text, but stay open: other threads of the rank write here."""
        self.flush()

    def reconfigure(self, **_options: object) -> None:
        """Do nothing: the stream is always UTF-8 and line-buffered."""

    def __repr__(self) -> str:
        return f"<RankStream {self._stream}>"


# -- installing -------------------------------------------------------------------------------


def installed() -> bool:
    """Return whether this process's output is captured."""
    return _installed


def install(pipes: Mapping[int, int] | None = None) -> None:
    """Capture this process's output. Fds 1 and 2 must be the pipes. A second call does nothing.

    Args:
        pipes: other descriptors of the pipes, by 1 and 2. Direct writes to 1 and 2 then go to their own targets.
    """
    global _installed, _registered
    if _installed:
        return
    _installed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    # Duplicate the descriptors: user code may redirect 1 and 2, and then expects C output there, not
    # records. The text of both streams goes into one pipe, which keeps its order; the other carries marks.
    own = pipes or {1: 1, 2: 2}
    _open("stdout", own[1])
    _open("stderr", own[2])
    sys.stdout = RankStream("stdout")  # type: ignore[assignment]
    sys.stderr = RankStream("stderr")  # type: ignore[assignment]
    threading.Thread.start = _start  # type: ignore[method-assign]
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
    atexit.register(flush)
    if pipes is not None:
        return
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    # Dump only the failing thread: reading running threads may itself crash and hide the cause.
    faulthandler.enable(2, all_threads=False)
    _line_buffer_c()


def uninstall() -> None:
    """End a capture through other pipes than 1 and 2, and its thread. The caller has restored ``sys.stdout``."""
    global _installed, _flusher
    if not _installed:
        return
    flush()
    _installed = False
    atexit.unregister(flush)
    if threading.Thread.start is _start:  # otherwise another wrapper calls ours, which does nothing without cells
        threading.Thread.start = _original_start  # type: ignore[method-assign]
    flusher, _flusher = _flusher, _Flusher()
    flusher.end()
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for stream in list(_fds):
        # Not closed: a thread may be about to write, and the number could then belong to another file.
        _open(stream, null)
    os.close(null)
    _begun.clear()


def _open(stream: str, fd: int) -> None:
    if stream in _fds:
        os.dup2(fd, _fds[stream], inheritable=False)
    else:
        _fds[stream] = os.dup(fd)


@functools.wraps(_original_start)
def _start(self: threading.Thread) -> None:
    cell = _origin.get()
    if cell is None:
        cell = getattr(threading.current_thread(), "_monarch_cell", None)
    if cell is not None:
        self._monarch_cell = cell  # type: ignore[attr-defined]
    _original_start(self)


def _after_fork() -> None:
    """Reset the state in a fork made by user code: the parent owns the buffers and sends their text itself."""
    global _dirty, _flusher
    _dirty = set()
    _flusher = _Flusher()
    _local.__dict__.clear()


def _line_buffer_c() -> None:
    """Make C's stdout line-buffered, as on a terminal. On a pipe it would delay lines."""
    global _libc
    try:
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
        libc.setvbuf(stdout, None, 1, 0)  # 1: _IOLBF
        libc.fflush.argtypes = [ctypes.c_void_p]
        _libc = (libc, stdout)
    except (OSError, ValueError, AttributeError):
        _libc = None


def _flush_c() -> None:
    if _libc is not None:
        libc, stdout = _libc
        libc.fflush(stdout)
