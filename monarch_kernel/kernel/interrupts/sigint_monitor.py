"""Ensure that no SIGINT is lost while the Python handler cannot run.

Python runs a signal handler in the main thread, between two bytecodes. The handler does not run while that thread is
inside native code, when it entered a blocking system call just after the last check, or when the system delivered the
signal to another thread. Python also prints and drops an exception from a destructor or a fork hook.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_kernel.kernel.interrupts.sigint_handler import SigintHandler, in_main_thread

#: The main thread is woken if the handler has not run after this time (seconds).
NUDGE_AFTER = 0.05
#: After this much longer, the press is forwarded without the handler: the main thread is inside native code (seconds).
STUCK_AFTER = 0.2
#: The delay before the handler runs again for a press (seconds).
RETRY_AFTER = 0.005
#: Presses handled longer ago arrived while other code owned the wakeup pipe, and are ignored (seconds).
STALE_AFTER = 1.0
#: Wakes the main thread from a system call. Any signal does; this one has no other meaning.
NUDGE = signal.SIGRTMAX - 4


class SigintMonitor:
    """Ensures that each SIGINT is handled, and forwarded to ranks even if the kernel cannot handle it.

    The interpreter's C handler immediately writes each signal's number to a pipe, in whichever thread it runs. A thread
    reads the pipe, and wakes the main thread if the Python handler does not run soon.
    """

    def __init__(self, handler: SigintHandler) -> None:
        self._handler = handler
        handler.retry = self.again
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._thread: threading.Thread | None = None
        self._unraisable: Callable[[Any], object] = sys.unraisablehook

    def install(self) -> None:
        """Start the monitor, in the main thread. Call it again when other code may have taken the wakeup pipe."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-sigint", daemon=True)
            self._thread.start()
            os.register_at_fork(after_in_child=self._leave_in_child)
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
            signal.signal(NUDGE, self._on_nudge)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):  # an event loop of user code; leave the pipe to it
            signal.set_wakeup_fd(before)

    def _leave_in_child(self) -> None:
        # Without this, the signals of a child would arrive in our pipe.
        signal.set_wakeup_fd(-1)

    def _run(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == signal.SIGINT:
                    self._follow()
                elif number == 0 and self._handler.relay.retrying:
                    time.sleep(RETRY_AFTER)
                    self._nudge()

    def _follow(self) -> None:
        """Wait for the handler after a SIGINT, and forward the press if the handler does not run."""
        came = time.monotonic()
        if self._was_handled(came, NUDGE_AFTER):
            return
        self._nudge()
        if self._was_handled(came, STUCK_AFTER) or not self._is_ours():
            return
        handler = self._handler
        handler.forwarded.append(None)
        if self._was_handled(came, 0):  # the handler ran before it could see the entry
            handler.forwarded.clear()
        else:
            handler.press()

    def _was_handled(self, came: float, seconds: float) -> bool:
        """Return whether the handler runs within this time, or ran just before the signal was read from the pipe."""
        end = time.monotonic() + seconds
        while True:
            try:
                handled = self._handler.handled.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return False
            if handled > came - STALE_AFTER:
                return True

    def _is_ours(self) -> bool:
        # While the runtime waits, it installs a handler in front of this one. A handler of user code decides for
        # itself.
        current = signal.getsignal(signal.SIGINT)
        return current is self._handler or getattr(current, "__module__", "").startswith("monarch_kernel.")

    @staticmethod
    def _nudge() -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, NUDGE)

    def _on_nudge(self, signum: int, frame: FrameType | None) -> None:
        if not self._handler.relay.retrying:
            return  # waking the system call was enough
        self._handler.relay.retrying = False
        self._handler.forwarded.append(None)  # the press is already forwarded
        current = signal.getsignal(signal.SIGINT)
        if callable(current):
            current(signal.SIGINT, frame)

    def _on_unraisable(self, unraisable: Any) -> None:
        """Retry a KeyboardInterrupt that Python drops because no code can catch it."""
        dropped = unraisable.exc_type is KeyboardInterrupt and in_main_thread()
        if not dropped or not self._handler.busy:
            self._unraisable(unraisable)
            return
        self.again()

    def again(self) -> None:
        """Run the handler again for a press that is already forwarded. Safe in a signal handler."""
        self._handler.relay.retrying = True
        os.write(self._write, b"\0")
