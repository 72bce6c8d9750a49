"""The kernel's SIGINT handler: forward the press to ranks, and stop the running cell."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_kernel import programs
from monarch_kernel.kernel.interrupts.interrupt_relay import InterruptRelay
from monarch_kernel.thread_frames import LockGuard

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh


#: Packages whose tasks are not user code: Ctrl-C must not raise in them.
_MACHINERY = frozenset({"ipykernel", "tornado", "zmq", "jupyter_client"})

#: The code that sends and receives messages.
_MESSAGES = os.path.join(programs.PACKAGE, "runtime", "node", "")
#: The debugger's prompt, which runs inside a wait and may be ended by an exception.
_PROMPT = os.path.join(programs.PACKAGE, "kernel", "debug", "stop_prompt.py")


class SigintHandler:
    """Forwards a press, and stops the kernel's code in a way that its state allows.

    * A cell that computes gets KeyboardInterrupt.
    * A cell that awaits is cancelled through its event loop, which must be woken.
    * Between the end of a cell and its reply, the press is only recorded. An exception would lose the reply and leave
      the front end waiting.
    * An idle kernel is not interrupted.
    * While a message is being sent, an exception could truncate it, so the handler runs again later. It does so,
      too, while a lock is taken or released: the lock could stay held.
    """

    def __init__(self, relay: InterruptRelay) -> None:
        self.relay = relay
        self._pid = os.getpid()
        self._cell: object = None
        self._busy = False
        self._protected = False
        self._pending = False
        self._awaiting: tuple[asyncio.Future[object], asyncio.AbstractEventLoop] | None = None
        self._cancelled = False
        self._locks = LockGuard()
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
        if self.retry is not None and (self._locks.must_wait(frame) or _sends_or_receives(frame)):
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

    def _stop_awaiting(self, future: asyncio.Future[object], loop: asyncio.AbstractEventLoop) -> None:
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
    def awaiting(self, future: asyncio.Future[object]) -> Generator[None]:
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


def _is_machinery(task: asyncio.Task[object]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY


# Ensure that no SIGINT is lost while the Python handler cannot run.
#
# Python runs a signal handler in the main thread, between two bytecodes. The handler does not run while that thread is
# inside native code, when it entered a blocking system call just after the last check, or when the system delivered
# the signal to another thread. Python also prints and drops an exception from a destructor or a fork hook.

#: The main thread is woken if the handler has not run after this time (seconds).
NUDGE_AFTER = 0.05
#: After this much longer, the press is forwarded without the handler: the main thread is inside native code (seconds).
STUCK_AFTER = 0.2
#: The delay before the handler runs again for a press (seconds).
RETRY_AFTER = LockGuard.DELAY
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
        self._unraisable: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook

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

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
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


# Proc meshes as interrupt targets, for ordinary cells that call endpoints.

#: Ranks that do not report what they run within this time count as hung (seconds).
PROBE_TIMEOUT = 0.5
#: The time limit for killed ranks to exit (seconds).
KILL_TIMEOUT = 5.0


class MeshTarget:
    """A proc mesh, or a slice of one, as an interrupt target. Only ranks that run an endpoint react.

    Ranks, including those of a slice, are numbered as in the mesh that was spawned.

    Args:
        mesh: the procs.
        pending: returns the ranks that have not answered, if the caller knows them. Otherwise the ranks are asked.
        cells: the key prefix of the cells whose calls are interrupted; "" for all running code.
    """

    def __init__(self, mesh: ProcMesh, pending: Callable[[], Iterable[int]] | None = None, cells: str = "") -> None:
        self._mesh = mesh
        self._cells = cells
        self._pending = pending
        self._asked: Any = None
        self._positions = {rank: position for position, rank in enumerate(mesh._region.ranks())}

    @property
    def outlives_kernel(self) -> bool:
        """Whether the mesh outlives this kernel."""
        from monarch_kernel.meshes import kept_host_of

        return kept_host_of(self._mesh) is not None

    def describe(self) -> str:
        """See ``InterruptTarget``."""
        return f"mesh '{self._mesh.name}'"

    def interrupt(self) -> object:
        """See ``InterruptTarget``."""
        self._asked = self._mesh.interrupt(self._cells)
        return self._asked

    def unanswered(self) -> Iterable[int]:
        """Return the ranks on which interrupted code still runs, and those that do not reply.

        The query also interrupts code that still runs once more.
        """
        if self._pending is not None:
            return self._pending()
        suspects = self._suspects()
        probes = {rank: self._at(rank).interrupt(self._cells) for rank in suspects}
        deadline = time.monotonic() + PROBE_TIMEOUT
        return [rank for rank, probe in probes.items() if self._still_runs(probe, deadline)]

    def kill(self, ranks: Sequence[int]) -> None:
        """See ``InterruptTarget``."""
        kills = [self._at(rank).kill(reason="it did not answer an interrupt") for rank in ranks]
        deadline = time.monotonic() + KILL_TIMEOUT
        for kill in kills:
            kill.get(timeout=max(0.0, deadline - time.monotonic()))

    def _suspects(self) -> list[int]:
        if self._asked is None:
            return []
        everyone = self._awaited()
        if not self._asked.done():
            return everyone
        try:
            stopped = self._asked.get()
        except Exception:  # some ranks have died; query all ranks again
            return everyone
        return [rank for rank, position in self._positions.items() if stopped.get(position)]

    def _awaited(self) -> list[int]:
        """Return the ranks that may run code for this target; with ``cells``, those that this kernel has called."""
        if not self._cells:
            return list(self._positions)
        from monarch_kernel.introspection import awaited_here
        from monarch_kernel.kernel.session import session

        managed = session().managed(self._mesh.name)
        own = () if managed is None else (managed.executor._actor, managed.monitor._actor)
        called = {proc for call in awaited_here(own) for proc in call.procs}
        procs = self._mesh._target().procs
        return [rank for rank, position in self._positions.items() if procs[position].id in called]

    @staticmethod
    def _still_runs(probe: Any, deadline: float) -> bool:
        try:
            running = probe.get(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return True
        except Exception:  # a dead rank runs nothing
            return False
        return any(running.values())

    def _at(self, rank: int) -> ProcMesh:
        return self._mesh.slice(**self._mesh.extent.point(self._positions[rank]))


def running_meshes() -> list[MeshTarget]:
    """Return a target for each proc mesh of this process, for the calls of this kernel's cells."""
    meshes = sys.modules.get("monarch_kernel.meshes")
    notebook = sys.modules.get("monarch_kernel.kernel.notebook")
    if meshes is None:
        return []
    cells = notebook.RUN if notebook is not None else ""
    return [MeshTarget(mesh, cells=cells) for mesh in meshes.list_proc_meshes()]
