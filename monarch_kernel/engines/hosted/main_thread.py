"""The main thread of a rank, for cells: signals, and much of what user code does, work only there."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import FrameType
from typing import Any

from monarch_kernel.engines.hosted.tool_actor import ToolActor
from monarch_kernel.thread_frames import current_frames

#: An interrupt is repeated after this long until it is heard: it may come just before a system call (seconds).
REPEAT = 0.1
ATTEMPTS = 20
#: How often an event loop of cells takes a turn between cells (seconds).
TURN = 0.02


class MainThread:
    """Runs actors on the main thread, inside the event loop that the other runtime runs there.

    The loop stands still while an actor has a message; that runtime's own actors and messages use other threads.

    Args:
        loop: that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._interruptible = False
        self._heard = 0
        self._sent = 0
        self._before: Any = None  # the other runtime's handler of SIGINT, once ours stands before it
        self._turning = False

    def drive(self, actor: ToolActor) -> None:
        """Have the main thread handle one message of the actor."""
        self._loop.call_soon_threadsafe(self._step, actor)

    def _step(self, actor: ToolActor) -> None:
        if self._before is None:
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        asyncio.events._set_running_loop(None)
        self._interruptible = True
        try:
            actor.step()
        except BaseException:  # an interrupt that came after the endpoint
            pass
        finally:
            self._interruptible = False
            asyncio.events._set_running_loop(self._loop)
        if actor.background is not None and not self._turning:
            self._turning = True
            self._loop.call_later(TURN, self._turn, actor)

    def _turn(self, actor: ToolActor) -> None:
        """Let the tasks of earlier cells run for a moment."""
        loop: asyncio.AbstractEventLoop | None = actor.background
        if loop is None or loop.is_closed():
            self._turning = False
            return
        asyncio.events._set_running_loop(None)
        try:
            loop.call_soon(loop.stop)
            loop.run_forever()
        finally:
            asyncio.events._set_running_loop(self._loop)
        self._loop.call_later(TURN, self._turn, actor)

    # -- interrupts --------------------------------------------------------------------------------

    def interrupt(self, attempts: int = ATTEMPTS) -> None:
        """Raise KeyboardInterrupt in the endpoint that runs on the main thread, if one does. Any thread may call it."""
        if not self._interruptible:
            return
        heard = self._heard
        self._sent += 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        def insist() -> None:
            if self._heard == heard and attempts > 1:
                self.interrupt(attempts - 1)

        timer = threading.Timer(REPEAT, insist)
        timer.daemon = True
        timer.start()

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self._heard += 1
        if self._interruptible:
            self._interruptible = False  # once for each endpoint
            raise KeyboardInterrupt
        if self._heard > self._sent and callable(self._before):
            self._before(signum, frame)  # not one of ours, which came too late


def main_thread() -> MainThread | None:
    """The main thread of this process, if an event loop runs there that can take turns with actors."""
    frame: FrameType | None = current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if isinstance(runner, asyncio.AbstractEventLoop) and runner.is_running():
            return MainThread(runner)
        frame = frame.f_back
    return None
