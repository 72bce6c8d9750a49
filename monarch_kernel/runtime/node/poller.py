"""The poller of a process: waiting threads take turns to poll.

A process has one epoll set and no dedicated I/O thread. A thread that waits for something (a reply, a
message in its mailbox) takes the *lead*: it sleeps in ``epoll_wait`` and handles all arriving messages,
so a call costs no hand-off between threads. Other waiting threads are *followers*: they park until the
leader resolves what they wait for, or leaves and promotes one of them. When no thread has led for a few
milliseconds (because user code computes), one background thread takes the lead, and gives it back to the
first thread that wants it.

A *waitable* is any object with a boolean ``_done`` and a list ``_parked``; code that sets ``_done`` calls
``Poller.notify(waitable)`` afterwards.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # no stub; see _getsignal
import heapq
import itertools
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from monarch_kernel import logs
from monarch_kernel.protocol.messages import Message
from monarch_kernel.runtime.node import descriptors

if TYPE_CHECKING:
    from monarch_kernel.runtime.node.event_loop import LeadingSelector

log = logs.logger(__name__)

#: The time without a leader after which the background thread takes over (seconds).
TICK = 0.005
#: The maximum sleep of the main thread (seconds). A signal that arrives between the interpreter's check for signals and
#: the system call does not interrupt that call, so this is also the maximum delay of a Ctrl-C.
LOOK_UP = 0.2
#: How long an event loop waits for the background thread to give the lead back (seconds).
STEAL = 0.05
#: The number of ready descriptors per poll. For more than 42, the interpreter would allocate a buffer each time.
_READY = 42
#: The maximum sleep (seconds): the kernel counts milliseconds in 32 bits.
_LONGEST = 1e6
#: After this many ticks with a leader, the background thread sleeps until it is needed.
QUIET_TICKS = 20

# The plain C functions: those of `signal` convert every argument to an enum, which costs more than the call itself.
_SIGINT = int(signal.SIGINT)
_getsignal = _signal.getsignal

SignalHandler = Callable[[int, FrameType | None], object]

EPOLLIN = select.EPOLLIN
EPOLLOUT = select.EPOLLOUT


class Waitable(Protocol):
    """An object that ``Poller.wait`` can wait for."""

    _done: bool
    _parked: list[threading.Lock]


class Timer:
    """A callback due at a time; ``cancel()`` drops it."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Poller:
    """One process's epoll set, and the protocol by which its threads share the work of polling it.

    Args:
        background: whether a background thread leads when no thread waits. False in the host agent, whose main
            thread only calls ``run``.
    """

    def __init__(self, background: bool = True) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, EPOLLIN)
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._lead = threading.Lock()
        self._leader = 0  # thread ident, valid while _lead is held
        self._target: Waitable | None = None  # what the leader waits for
        self._followers: deque[threading.Lock] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._counter = itertools.count()
        self._epoch = 0  # incremented each time a lead ends
        self._background_wanted = background
        self._background: threading.Thread | None = None
        self._background_leads = False
        self._background_parked = False
        self._background_signal = threading.Lock()
        self._background_signal.acquire()
        self._steal = False
        self._start_lock = threading.Lock()
        self._interrupted = False  # the main thread must leave its wait
        self._pressed = False  # a SIGINT was deferred
        self._deferring: SignalHandler = self._defer
        #: A handler of SIGINT that raises in user code only; see ``wait``.
        self.calm: SignalHandler | None = None
        self._errand: Callable[[], None] | None = None
        self._main_parker: threading.Lock | None = None
        self._closed = False
        self._main = threading.main_thread().ident
        self._asleep = False  # the leader sleeps, or will without checking ``late`` again
        #: Deferrable messages with their receivers: sent along with the next message to that receiver, or when the
        #: leader is idle.
        self.late: deque[tuple[str, Message]] = deque()
        #: Called last when the poller closes, after the last handler.
        self.at_close: list[Callable[[], None]] = []
        self.on_late: Callable[[str, Message], object] = lambda _peer, _message: None

    # -- registration -----------------------------------------------------------------------

    def register(self, fd: int, handler: Callable[[int], object], events: int = EPOLLIN) -> None:
        """Call ``handler(events)`` on the leading thread when ``fd`` is ready."""
        if fd >= descriptors.near:
            descriptors.raise_limit()
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Change the events that ``fd`` is watched for."""
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Stop watching ``fd``; call before closing it. Unknown descriptors are ignored."""
        if self._handlers.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run ``callback`` on the leading thread in ``delay`` seconds."""
        timer = Timer(monotonic() + delay, callback)
        heapq.heappush(self._timers, (timer.due, next(self._counter), timer))
        if self._leader != get_ident():
            self.wake()
            self.start_background()
        return timer

    def say_late(self, peer: str, message: Message) -> None:
        """Send a message when that costs nothing. Finalizers may call this: they run anywhere, even inside a send."""
        self.late.append((peer, message))
        if self._asleep and not self._closed:
            self.wake()

    def late_for(self, peer: str) -> list[Message]:
        """Take the deferred messages to a peer."""
        taken: list[Message] = []
        late = self.late
        for _ in range(len(late)):
            try:
                entry = late.popleft()
            except IndexError:  # another thread has taken it
                break
            if entry[0] == peer:
                taken.append(entry[1])
            else:
                self.say_late(*entry)  # the leader may have gone to sleep without seeing it
        return taken

    def _say(self) -> None:
        while self.late:
            try:
                peer, message = self.late.popleft()
            except IndexError:
                return
            try:
                self.on_late(peer, message)
            except Exception:
                log.exception("a late message could not be sent; this is a bug in monarch_kernel")

    def wake(self) -> None:
        """Interrupt the leader's sleep."""
        try:
            os.eventfd_write(self._wake, 1)
        except (OSError, ValueError):
            if not self._closed:
                raise

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, waitable: Waitable, timeout: float | None = None, idle: bool = False) -> bool:
        """Block until ``waitable._done``, and poll meanwhile if no other thread does.

        In the main thread, a SIGINT is deferred to the end of the current step and then passed to the previously
        installed handler, so Ctrl-C never loses a message that is being handled. A callback of ``call_in_wait`` also
        runs in the main thread's wait; its time does not count.

        Args:
            waitable: what to wait for.
            timeout: how long (seconds); None: until it is done.
            idle: whether no user code is on this thread's stack, so that ``calm`` needs no deferral.

        Returns:
            Whether it is done; False after ``timeout`` seconds.
        """
        __tracebackhide__ = True  # Ctrl-C in a notebook shows the user's line, not this one
        if waitable._done:
            return True
        thread = get_ident()
        if self._leader == thread:
            raise RuntimeError(
                "waiting here would never end: this code runs inside the delivery of a message "
                "(a callback of a Future, an output subscriber, a fault hook); hand the work to a thread, or await it"
            )
        deadline = None if timeout is None else monotonic() + timeout
        if thread != self._main:
            return self._wait(waitable, deadline, False)
        if idle and self.calm is not None and _getsignal(_SIGINT) is self.calm:
            handler, interrupted = self.calm, False
            done = self._errand is None and self._wait(waitable, deadline, True)
            self._interrupted = False
        else:
            handler = self._shield()
            if handler is None:
                return self._wait(waitable, deadline, False)
            try:
                done = self._errand is None and self._wait(waitable, deadline, True)
            finally:
                interrupted = self._unshield(handler)
        if self._errand is not None:
            began = monotonic()
            errand, self._errand = self._errand, None
            errand()
            if deadline is not None:
                deadline += monotonic() - began
            if not interrupted and not waitable._done:
                return self.wait(waitable, None if deadline is None else max(0.0, deadline - monotonic()), idle)
        if interrupted:
            handler(_SIGINT, None)
            # If the handler does not raise, the wait continues.
            if not waitable._done:
                rest = None if deadline is None else max(0.0, deadline - monotonic())
                return self.wait(waitable, rest)
        return done or waitable._done

    def _shield(self) -> SignalHandler | None:
        """Defer SIGINT. Return the handler to restore, or None if there is nothing to defer. Main thread only."""
        handler = _getsignal(_SIGINT)
        if handler is self._deferring or not callable(handler):
            return None
        _signal.signal(_SIGINT, self._deferring)
        return handler

    def _unshield(self, handler: SignalHandler) -> bool:
        """Restore the handler. Return whether a SIGINT arrived meanwhile."""
        _signal.signal(_SIGINT, handler)
        self._interrupted = False
        pressed, self._pressed = self._pressed, False
        return pressed

    def call_in_wait(self, errand: Callable[[], None]) -> None:
        """Make the main thread call ``errand()`` inside its wait: at once if it is waiting, else in its next wait.

        ``errand`` may itself wait. An exception from it ends the wait. Of several pending calls, only the last runs.
        """
        self._errand = errand
        self._look_up()

    def shielded(self) -> Shielded:
        """Return a context that defers SIGINT, for short steps such as sending a message."""
        return Shielded(self)

    def _defer(self, _signum: int, _frame: FrameType | None) -> None:
        self._pressed = True
        self._look_up()

    def _look_up(self) -> None:
        """Make the main thread leave its wait, if it is in one."""
        self._interrupted = True
        self.wake()
        parker = self._main_parker
        if parker is not None:
            _release(parker)

    def _wait(self, waitable: Waitable, deadline: float | None, main: bool) -> bool:
        lead = self._lead
        while not lead.acquire(False):
            if not self._follow(waitable, deadline, main):
                return waitable._done
        self._leader = get_ident()
        self._target = waitable
        try:
            longest = LOOK_UP if main else -1
            while not (waitable._done or (main and self._interrupted)):
                if deadline is not None:
                    left = deadline - monotonic()
                    if left <= 0:
                        break
                    longest = min(left, LOOK_UP) if main else left
                self._step(longest)
        finally:
            self._target = None
            self._leader = 0
            self._epoch += 1
            lead.release()
            if self._followers or self._background_parked or self._background is None:
                self._pass_on()
        return waitable._done

    def _follow(self, waitable: Waitable, deadline: float | None, main: bool) -> bool:
        """Park while another thread leads. Return whether to continue waiting."""
        parker = threading.Lock()
        parker.acquire()
        self._followers.append(parker)
        waitable._parked.append(parker)
        if main:
            self._main_parker = parker
        try:
            if waitable._done or (main and self._interrupted):
                return False
            if not self._lead.locked():  # the leader left before it saw this parker
                return True
            if self._background_leads:
                self._steal = True
                self.wake()
            if deadline is None:
                parker.acquire(timeout=LOOK_UP if main else -1)
            else:
                left = deadline - monotonic()
                if left <= 0:
                    return False
                parker.acquire(timeout=min(left, LOOK_UP) if main else left)
            return not (waitable._done or (main and self._interrupted))
        finally:
            if main:
                self._main_parker = None
            try:
                self._followers.remove(parker)
            except ValueError:
                # This thread was promoted; if it leaves without leading, promote another.
                if not self._lead.locked():
                    self._pass_on()
            try:
                waitable._parked.remove(parker)
            except ValueError:
                pass

    def _step(self, timeout: float) -> None:
        timers = self._timers
        if timers:
            left = timers[0][0] - monotonic()
            if timeout < 0 or left < timeout:
                timeout = left if left > 0 else 0.0
        if timeout != 0:
            if timeout > _LONGEST:
                timeout = _LONGEST
            # In this order: `say_late` then wakes the leader if it runs between the two lines.
            self._asleep = True
            if self.late:
                self._say()
        handlers = self._handlers
        found = self._epoll.poll(timeout, _READY)
        self._asleep = False
        for fd, events in found:
            handler = handlers.get(fd)
            if handler is not None:
                try:
                    handler(events)
                except Exception:
                    log.exception("a message handler failed; this is a bug in monarch_kernel")
            elif fd == self._wake:
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
        if timers and timers[0][0] <= monotonic():
            self._run_timers()

    def _run_timers(self) -> None:
        now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                try:
                    timer.callback()
                except Exception:
                    log.exception("a timer failed; this is a bug in monarch_kernel")

    def notify(self, waitable: Waitable) -> None:
        """Wake the threads that wait for ``waitable``, which is done now."""
        if waitable._parked:
            for parker in tuple(waitable._parked):
                _release(parker)
        if self._target is waitable and self._leader != get_ident():
            self.wake()

    def _pass_on(self) -> None:
        """Pass the free lead to a follower, or make sure that the background thread takes it."""
        while self._followers:
            try:
                parker = self._followers.popleft()
            except IndexError:
                break
            _release(parker)
            return
        if self._background_parked:
            self._background_parked = False
            _release(self._background_signal)
        elif self._background is None:
            self.start_background()

    # -- the background thread ---------------------------------------------------------------

    def start_background(self) -> None:
        """From now on, handle messages even when no thread waits."""
        if self._background is not None or not self._background_wanted or self._closed:
            return
        with self._start_lock:
            if self._background is None and not self._closed:
                thread = threading.Thread(target=self._run_background, name="monarch-poller", daemon=True)
                self._background = thread
                thread.start()

    def _run_background(self) -> None:
        quiet = 0
        epoch = -1
        while not self._closed:
            self._background_signal.acquire(timeout=TICK)
            if self._lead.locked():
                quiet += 1
                if quiet >= QUIET_TICKS:
                    self._background_parked = True
                    if self._lead.locked():
                        self._background_signal.acquire()
                    self._background_parked = False
                    quiet = 0
                continue
            quiet = 0
            if self._epoch != epoch:  # a thread has led since the last check: leave the lead to it
                epoch = self._epoch
                continue
            if not self._lead.acquire(False):
                continue
            self._leader = get_ident()
            self._background_leads = True
            try:
                while not (self._steal or self._followers or self._closed):
                    self._step(-1)
            finally:
                self._steal = False
                self._background_leads = False
                self._leader = 0
                self._epoch += 1
                self._lead.release()
                if self._followers:
                    self._pass_on()

    # -- other ways to lead ------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Lead in this thread until ``until()`` is true; for processes whose main thread only polls."""
        with self._lead:
            self._leader = get_ident()
            try:
                while not until():
                    self._step(-1)
            finally:
                self._leader = 0

    def lead_once(self, timeout: float, sleeper: LeadingSelector) -> bool:
        """Poll once, for an idle event loop; timeout -1: until something arrives.

        Args:
            sleeper: does not sleep if it became ready before this thread had the lead, because that event is not
                repeated.

        Returns:
            False if another thread leads; the background thread gives the lead back.
        """
        lead = self._lead
        if not lead.acquire(False) and not self._steal_lead():
            return False
        self._leader = get_ident()
        try:
            if not sleeper.ready:
                self._step(timeout)
        finally:
            self._leader = 0
            self._epoch += 1
            lead.release()
            if self._followers or self._background_parked or self._background is None:
                self._pass_on()
        return True

    def _steal_lead(self) -> bool:
        """Take the lead from the background thread.

        Return False if another thread leads, or a handler runs for long.
        """
        if not self._background_leads:
            return False
        self._steal = True
        self.wake()
        if self._lead.acquire(timeout=STEAL):
            return True
        self._steal = False
        return False

    def in_leader(self) -> bool:
        """Return whether the calling thread is the leader, which handles messages."""
        return self._leader == get_ident()

    def abandon(self) -> list[Callable[[int], object]]:
        """Release shared resources in a forked child, and reject every further wait. Return the handlers."""
        handlers = list(self._handlers.values())
        self._closed = True
        self._handlers.clear()
        self._epoll.close()
        os.close(self._wake)
        self._wake = -1
        self.wait = self.start_background = self.call_later = _refuse
        return handlers

    def close(self) -> None:
        """End the background thread and release the descriptors."""
        if self._closed:
            return
        self._closed = True
        self.wake()
        _release(self._background_signal)
        thread = self._background
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        for callback in self.at_close:
            callback()
        self._handlers.clear()
        self._epoll.close()
        os.close(self._wake)


class Shielded:
    """A context that defers SIGINT; see ``Poller.shielded``."""

    __slots__ = ("_handler", "_poller")

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._handler: SignalHandler | None = None

    def __enter__(self) -> None:
        if get_ident() == self._poller._main:
            self._handler = self._poller._shield()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        handler = self._handler
        if handler is not None and self._poller._unshield(handler) and error is None:
            handler(_SIGINT, None)


#: The error raised by every use in a forked child.
FORKED = (
    "this process was forked from one that runs monarch_kernel, and cannot use its meshes: "
    "make meshes after the fork, or start the process with spawn"
)


def _refuse(*_args: object, **_options: object) -> NoReturn:
    raise RuntimeError(FORKED)


def _release(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # another thread has released it
        pass
