"""SIGINT in the kernel: what Ctrl-C does to the kernel's own code, and how it is never lost.

``SigintHandler`` is the Python signal handler. Python runs it in the main thread, between two bytecodes, so
there are times when it does not run: the main thread is inside native code, or has gone to sleep in a
system call just after it last looked, or the system gave the signal to another thread. And an exception
that it raises inside a destructor or a fork hook is printed and dropped. ``SigintWatch`` notices both.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import monarch_kernel
from monarch_kernel.kernel.interrupts import InterruptRelay

#: Whose tasks are never the user's: Ctrl-C must not raise in them.
_MACHINERY = frozenset({"ipykernel", "tornado", "zmq", "jupyter_client"})

#: Where messages are sent and received.
_MESSAGES = os.path.join(os.path.dirname(monarch_kernel.__file__), "runtime", "node", "")
#: What runs inside of a wait, and may be left by an exception.
_PROMPT = os.path.join(os.path.dirname(monarch_kernel.__file__), "kernel", "debug", "stop_prompt.py")

#: A handler that has not run after this time is helped (seconds).
NUDGE_AFTER = 0.05
#: And after this time more the press is forwarded without it: the main thread is inside native code (seconds).
STUCK_AFTER = 0.2
#: The kernel's own code is stopped this much later when it could not be at once (seconds).
RETRY_AFTER = 0.005
#: Presses handled longer ago came while another had the wakeup pipe; they are not the one we read of (seconds).
STALE_AFTER = 1.0
#: Wakes the main thread from a system call. Any signal does; this one means nothing to anybody else.
NUDGE = signal.SIGRTMAX - 4


class SigintHandler:
    """The kernel's SIGINT handler: forwards the press, and stops the kernel's own code in the right way.

    A request that computes gets KeyboardInterrupt where it stands. A cell that awaits is cancelled through
    its event loop, which must be woken for it. Between a cell's end and its reply the press is
    recorded only, since an exception there would lose the reply and leave the front end waiting. When
    the kernel is idle nothing of it is interrupted. An exception in the middle of sending a message could cut it
    in two, so then the handler is run again when that is done.
    """

    def __init__(self, relay: InterruptRelay) -> None:
        self.relay = relay
        self._pid = os.getpid()
        self._cell: object = None
        self._busy = False
        self._protected = False
        self._pending = False
        self._awaiting: tuple[asyncio.Future[Any], asyncio.AbstractEventLoop] | None = None
        self._cancelled = False
        # Between the handler and the watch: lock-free, as a handler may interrupt itself.
        self.handled: queue.SimpleQueue[float] = queue.SimpleQueue()
        """When the handler has forwarded a press: one entry for each."""
        self.forwarded: deque[None] = deque()
        """One entry for each press that was forwarded for the handler, which has yet to run."""
        self.retry: Callable[[], None] | None = None
        """Has the handler run again very soon, for the same press."""
        self.retrying = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True  # IPython then shows the user's code and not this
        if os.getpid() != self._pid:  # a forked child (multiprocessing) that inherited the handler
            raise KeyboardInterrupt
        if self.forwarded:
            self.forwarded.clear()
        else:
            self.press()
            self.handled.put(time.monotonic())
        if not self._busy:
            return
        if self.retry is not None and _sends_or_receives(frame):
            self.retry()
            return
        if self._awaiting is not None:
            self._stop_awaiting(*self._awaiting)
        elif self._protected:
            self._pending = True
        else:
            raise KeyboardInterrupt

    def press(self) -> None:
        """Forward a press to what runs now."""
        self.relay.press(self._cell, idle=not self._busy)

    def _stop_awaiting(self, future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        running = asyncio.current_task(loop)
        if running is future and not self._protected:
            raise KeyboardInterrupt  # the cell computes between two awaits
        self._cancelled = True
        # Plain call_soon does not wake a loop that sleeps.
        loop.call_soon_threadsafe(future.cancel)
        if running is not None and running is not future and not _is_machinery(running):
            # A task of the cell's computes or blocks. KeyboardInterrupt in it would end the event loop.
            raise asyncio.CancelledError("KeyboardInterrupt")

    # -- told by the kernel what the main thread does -----------------------------------------------

    # Subshells run cells on threads of their own, which signals never reach: they change nothing here.

    @contextmanager
    def request(self, cell: object) -> Generator[None]:
        """A cell's request is being handled: protected, except inside ``interruptible``."""
        if not _in_main_thread():
            yield
            return
        self._cell, self._protected, self._pending, self._cancelled = cell, True, False, False
        try:
            yield
        finally:
            self._protected = False
            self._cell = None

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """The cell's own code runs. A press that came since the request began counts here."""
        if not _in_main_thread():
            yield
            return
        protected, self._protected = self._protected, False
        try:
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._protected = protected

    @contextmanager
    def awaiting(self, future: asyncio.Future[Any]) -> Generator[None]:
        """The cell is this task of the running event loop."""
        self._awaiting = (future, asyncio.get_running_loop())
        try:
            yield
        finally:
            self._awaiting = None

    @property
    def busy(self) -> bool:
        """Whether the main thread handles a request."""
        return self._busy

    @property
    def awaiting_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which the cell awaits something, if it does."""
        awaiting = self._awaiting
        return None if awaiting is None else awaiting[1]

    @property
    def cancelled(self) -> bool:
        """Whether the current cell was cancelled by an interrupt, so its CancelledError is one."""
        return self._cancelled

    def begin(self) -> None:
        """The main thread begins to handle a request."""
        self.forwarded.clear()
        self.retrying = False  # that was for the last request
        self._busy = True

    def end(self) -> None:
        """The main thread has handled it."""
        self._busy = False
        self._awaiting = None


class SigintWatch:
    """Sees to it that each SIGINT is handled, and that the ranks hear of it even if the kernel cannot.

    The interpreter's C handler writes each signal's number to a pipe at once, in whichever thread it runs. A
    thread reads it, and helps the Python handler along if that does not run soon.
    """

    def __init__(self, handler: SigintHandler) -> None:
        self._handler = handler
        handler.retry = self.again
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._thread: threading.Thread | None = None
        self._unraisable: Callable[[Any], object] = sys.unraisablehook

    def install(self) -> None:
        """Start watching; in the main thread. Again is allowed, and needed when others use the same means."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-sigint", daemon=True)
            self._thread.start()
            os.register_at_fork(after_in_child=self._leave_in_child)
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
            signal.signal(NUDGE, self._on_nudge)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):  # an event loop of the user's, which needs it more
            signal.set_wakeup_fd(before)

    def _leave_in_child(self) -> None:
        # A child's signals are not ours: without this they would arrive in our pipe.
        signal.set_wakeup_fd(-1)

    def _run(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == signal.SIGINT:
                    self._follow()
                elif number == 0 and self._handler.retrying:
                    time.sleep(RETRY_AFTER)
                    self._nudge()

    def _follow(self) -> None:
        """One SIGINT has come: wait for the handler, and do its work if it cannot."""
        came = time.monotonic()
        if self._was_handled(came, NUDGE_AFTER):
            return
        self._nudge()
        if self._was_handled(came, STUCK_AFTER) or not self._is_ours():
            return
        handler = self._handler
        handler.forwarded.append(None)
        if self._was_handled(came, 0):  # it ran just before it could see that
            handler.forwarded.clear()
        else:
            handler.press()

    def _was_handled(self, came: float, seconds: float) -> bool:
        """Whether the handler runs within this time, or ran just before we read of the signal."""
        end = time.monotonic() + seconds
        while True:
            try:
                handled = self._handler.handled.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return False
            if handled > came - STALE_AFTER:
                return True

    def _is_ours(self) -> bool:
        # The runtime puts a handler before ours while it waits. One of the user's decides for itself.
        current = signal.getsignal(signal.SIGINT)
        return current is self._handler or getattr(current, "__module__", "").startswith("monarch_kernel.")

    @staticmethod
    def _nudge() -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, NUDGE)

    def _on_nudge(self, signum: int, frame: FrameType | None) -> None:
        if not self._handler.retrying:
            return  # the interrupted system call was all that was wanted
        self._handler.retrying = False
        self._handler.forwarded.append(None)  # this press has been
        current = signal.getsignal(signal.SIGINT)
        if callable(current):
            current(signal.SIGINT, frame)

    def _on_unraisable(self, unraisable: Any) -> None:
        """Python drops an exception that nobody can catch. The user's wish to stop is not such."""
        dropped = unraisable.exc_type is KeyboardInterrupt and _in_main_thread()
        if not dropped or not self._handler.busy:
            self._unraisable(unraisable)
            return
        self.again()

    def again(self) -> None:
        """Run the handler once more for a press that has been forwarded; safe in a signal handler."""
        self._handler.retrying = True
        os.write(self._write, b"\0")


def _sends_or_receives(frame: FrameType | None) -> bool:
    """Whether this code was called by the runtime's message handling. (Its waits call the handler without a frame.)"""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_MESSAGES):
            return True
        if frame.f_code.co_filename == _PROMPT:
            return False  # a wait has called it, and is between two messages
        frame = frame.f_back
    return False


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_machinery(task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY
