"""The kernel's SIGINT handler: forward the press to ranks, and stop the running cell."""

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

from monarch_kernel import programs
from monarch_kernel.kernel.interrupts.interrupt_relay import InterruptRelay

#: Packages whose tasks are not user code: Ctrl-C must not raise in them.
_MACHINERY = frozenset({"ipykernel", "tornado", "zmq", "jupyter_client"})

#: The code that sends and receives messages.
_MESSAGES = os.path.join(programs.PACKAGE, "runtime", "node", "")
#: The debugger's prompt, which runs inside a wait and may be ended by an exception.
_PROMPT = tuple(os.path.join(programs.PACKAGE, "kernel", "debug", name) for name in ("stop_prompt.py", "prompt.py"))


class SigintHandler:
    """Forwards a press, and stops the kernel's code in a way that its state allows.

    * A cell that computes gets KeyboardInterrupt.
    * A cell that awaits is cancelled through its event loop, which must be woken.
    * Between the end of a cell and its reply, the press is only recorded. An exception would lose the reply and leave
      the front end waiting.
    * An idle kernel is not interrupted.
    * While a message is being sent, an exception could truncate it, so the handler runs again later.
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
        # Shared by the handler and the watch. Lock-free, because a handler may interrupt itself.
        self.handled: queue.SimpleQueue[float] = queue.SimpleQueue()
        """The time at which the handler forwarded each press."""
        self.forwarded: deque[None] = deque()
        """An entry for each press that the watch forwarded before the handler could run."""
        self.retry: Callable[[], None] | None = None
        """Makes the handler run again very soon, for the same press."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True  # so that IPython shows user code instead of this
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
        """Forward a press to the targets that run now."""
        self.relay.press(self._cell, idle=not self._busy)

    def _stop_awaiting(self, future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        running = asyncio.current_task(loop)
        if running is future and not self._protected:
            raise KeyboardInterrupt  # the cell computes between two awaits
        self._cancelled = True
        # Plain call_soon does not wake a loop that sleeps.
        loop.call_soon_threadsafe(future.cancel)
        if running is not None and running is not future and not _is_machinery(running):
            # One of the cell's tasks computes or blocks. KeyboardInterrupt in it would end the event loop.
            raise asyncio.CancelledError("KeyboardInterrupt")

    # -- state of the main thread, set by the kernel -----------------------------------------------

    # Subshells run cells on other threads, which signals never reach, so they do not change this state.

    @contextmanager
    def request(self, cell: object) -> Generator[None]:
        """Return a context for handling a cell's request: protected, except inside ``interruptible``."""
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
        """Return a context for running user code. A press since the beginning of the request takes effect here."""
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
        """Return a context in which the cell is this task of the running event loop."""
        self._awaiting = (future, asyncio.get_running_loop())
        try:
            yield
        finally:
            self._awaiting = None

    @property
    def busy(self) -> bool:
        """Return whether the main thread is handling a request."""
        return self._busy

    @property
    def awaiting_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that the cell awaits in; None if it does not await."""
        awaiting = self._awaiting
        return None if awaiting is None else awaiting[1]

    @property
    def cancelled(self) -> bool:
        """Return whether an interrupt has cancelled the cell, so that CancelledError means KeyboardInterrupt."""
        return self._cancelled

    def begin(self) -> None:
        """Record that the main thread begins to handle a request."""
        self.forwarded.clear()
        self.relay.retrying = False  # it belonged to the previous request
        self._busy = True

    def end(self) -> None:
        """Record that the main thread has handled the request."""
        self._busy = False
        self._awaiting = None


def _sends_or_receives(frame: FrameType | None) -> bool:
    """Return whether the runtime's message handling called this code. (Its waits call the handler without a frame.)"""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_MESSAGES):
            return True
        if frame.f_code.co_filename.startswith(_PROMPT):
            return False  # called by a wait, which is between two messages
        frame = frame.f_back
    return False


def in_main_thread() -> bool:
    """Return whether this is the thread that handles signals."""
    return threading.current_thread() is threading.main_thread()


def _is_machinery(task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY
