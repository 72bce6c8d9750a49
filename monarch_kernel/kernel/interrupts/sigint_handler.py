"""The Python handler of SIGINT in the kernel: what Ctrl-C does to the kernel's own code."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import monarch_kernel
from monarch_kernel.kernel.interrupts.interrupt_relay import InterruptRelay

#: Whose tasks are never the user's: Ctrl-C must not raise in them.
_MACHINERY = frozenset({"ipykernel", "tornado", "zmq", "jupyter_client"})

_PACKAGE = os.path.dirname(monarch_kernel.__file__)
#: Where messages are sent and received.
_MESSAGES = os.path.join(_PACKAGE, "runtime", "node", "")
#: What runs inside of a wait, and may be left by an exception: the debugger's prompt.
_PROMPT = tuple(os.path.join(_PACKAGE, "kernel", "debug", name) for name in ("stop_prompt", "prompt_"))


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
        if not in_main_thread():
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
        if not in_main_thread():
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


def _sends_or_receives(frame: FrameType | None) -> bool:
    """Whether this code was called by the runtime's message handling. (Its waits call the handler without a frame.)"""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_MESSAGES):
            return True
        if frame.f_code.co_filename.startswith(_PROMPT):
            return False  # a wait has called it, and is between two messages
        frame = frame.f_back
    return False


def in_main_thread() -> bool:
    """Whether this is the thread on which signals are handled."""
    return threading.current_thread() is threading.main_thread()


def _is_machinery(task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY
