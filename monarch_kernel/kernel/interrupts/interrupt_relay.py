"""Forward interrupts from the kernel to ranks, on a separate thread because a signal handler must be short.

jupyter_client signals the process group of the kernel. Ranks and host agents run in other sessions, so they receive
an interrupt only through this relay.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from monarch_kernel.meshes import format_ranks

# Decide the effect of Ctrl-C or the stop button. Pure; time is an argument.

#: A second press within this time after the first kills ranks that have not responded (seconds).
ESCALATION_WINDOW = 2.0
#: The time for ranks to respond (seconds). It prevents a double click from killing healthy ranks, or ranks that wait in
#: a collective and are about to be released.
ANSWER_GRACE = 1.0


class InterruptTarget(Protocol):
    """Work that runs on ranks and can be interrupted. The relay calls all methods on its own thread."""

    def describe(self) -> str:
        """Return the target's name within a sentence, such as ``mesh 'trainers'``."""
        ...

    def interrupt(self) -> object:
        """Interrupt the running work, without waiting."""
        ...

    def unanswered(self) -> Iterable[int]:
        """Return the ranks that have not stopped since ``interrupt()``."""
        ...

    def kill(self, ranks: Sequence[int]) -> object:
        """Kill the processes of these ranks. Raise if that fails."""
        ...


@dataclass(frozen=True)
class Forward:
    """Interrupt these targets, or the default targets if there are none."""

    cell: object
    targets: tuple[InterruptTarget, ...]


@dataclass(frozen=True)
class Escalate:
    """Kill the ranks that have not responded to the first press, but not before ``not_before``."""

    cell: object
    not_before: float


#: The value for a rank that has not answered an interrupt: what it runs is unknown.
SILENT = frozenset({"?"})


@dataclass(frozen=True)
class Interruption:
    """The effect of an interrupt of a mesh by a command.

    Attributes:
        at: the time (`time.monotonic()`).
        running: the endpoints that each rank ran; `SILENT` for a rank that did not answer.
        calls: for each rank, the numbers of this process's calls that it had not answered.
    """

    at: float
    running: Mapping[int, frozenset[str]]
    calls: Mapping[int, frozenset[int]]

    def may_escalate(self, now: float) -> bool:
        """Return whether another interrupt would count as a second one."""
        return now - self.at <= ESCALATION_WINDOW

    def unanswered(self, later: Interruption) -> list[int]:
        """Return the ranks that still run what this interrupt hit, given the result of a later interrupt."""
        return sorted(
            rank
            for rank, names in later.running.items()
            if (before := self.running.get(rank))
            and (names & before or SILENT in (names, before))
            # An endpoint has the same name in each call. A call with another number is different work.
            and (not self.calls.get(rank) or self.calls[rank] & later.calls.get(rank, frozenset()))
        )


class PressLogic:
    """Distinguishes first presses from second ones.

    Args:
        window: a press within this time after the first, for the same cell or for none, is a second press.
        grace: how long a rank may take to respond to the first press.
    """

    def __init__(self, window: float = ESCALATION_WINDOW, grace: float = ANSWER_GRACE) -> None:
        self.window = window
        self.grace = grace
        self._first: tuple[float, object] | None = None

    def press(
        self, now: float, cell: object, targets: tuple[InterruptTarget, ...] = (), idle: bool = False
    ) -> Forward | Escalate | None:
        """Decide what a press does.

        Args:
            now: the time of the press.
            cell: the cell that was running; the same object for all presses during it.
            targets: the active targets.
            idle: no cell was running. The press then applies to the cell that the first press ended, or to background
                work on ranks. Without either, it has no effect.
        """
        first = self._first
        if first is not None and now - first[0] <= self.window and (idle or first[1] is cell):
            self._first = None
            return Escalate(first[1], first[0] + self.grace)
        if idle and not targets:
            return None
        self._first = (now, cell)
        return Forward(cell, targets)


#: The delay of an interrupt for targets that outlive the kernel (seconds). jupyter_client interrupts a kernel before it
#: shuts it down, and that interrupt must not stop such targets. The delay allows the shutdown request to arrive first.
#: It has several steps, because on a busy machine each step, like the request, takes longer. It is long because a
#: kernel restart that ends a training run is worse than a stop button that takes a second.
END_GRACE = 1.0
END_LOOKS = 50


class InterruptRelay:
    """Forwards interrupts from the kernel to ranks.

    Args:
        notify: called with the cell and a sentence when ranks were killed or could not be reached.
        default_targets: returns the targets of a press while none is active, such as the meshes whose endpoints an
            ordinary cell calls.
        clock: a monotonic clock, in seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        notify: Callable[[object, str], None] | None = None,
        default_targets: Callable[[], Iterable[InterruptTarget]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.notify = notify
        self.default_targets = default_targets
        self._clock = clock
        self._sleep = sleep
        self.logic = PressLogic()
        # Replaced, never modified in place: the signal handler only takes a reference.
        self._targets: tuple[InterruptTarget, ...] = ()
        self._background: tuple[InterruptTarget, ...] = ()
        self._concerned: tuple[InterruptTarget, ...] = ()
        self._forwarded = 0.0
        self._lock = threading.Lock()
        # SimpleQueue.put is reentrant: it may be called in a handler that interrupts another put.
        self._presses: queue.SimpleQueue[
            tuple[float, object, tuple[InterruptTarget, ...], bool] | threading.Event | None
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ending = threading.Event()
        """Set when the kernel shuts down; targets that outlive it are then not interrupted."""
        self.retrying = False
        """Whether the SIGINT handler is to run again for a forwarded press; cleared once the targets have answered."""
        self.connected = False
        """Whether the SIGINT handler calls `press`. In a plain ipykernel, code that catches KeyboardInterrupt does."""

    # -- the targets of a press ------------------------------------------------------------------

    def add(self, target: InterruptTarget, background: bool = False) -> None:
        """Apply presses to ``target`` until ``remove``.

        Args:
            target: the target.
            background: its cell has ended, so only a press while the kernel is idle applies to it.
        """
        self.start()
        with self._lock:
            if background:
                self._background = (*self._background, target)
            else:
                self._targets = (*self._targets, target)

    def remove(self, target: InterruptTarget) -> None:
        """Undo ``add``. Unknown targets are ignored."""
        with self._lock:
            self._targets = tuple(t for t in self._targets if t is not target)
            self._background = tuple(t for t in self._background if t is not target)

    @contextmanager
    def active(self, target: InterruptTarget) -> Generator[InterruptTarget]:
        """``add`` for the duration of a ``with`` block."""
        self.add(target)
        try:
            yield target
        finally:
            self.remove(target)

    @property
    def targets(self) -> tuple[InterruptTarget, ...]:
        """Return the added targets that a press applies to now."""
        return self._targets

    @property
    def background(self) -> tuple[InterruptTarget, ...]:
        """Return the targets whose cells have ended."""
        return self._background

    # -- presses -----------------------------------------------------------------------------------

    def press(self, cell: object = None, idle: bool = False) -> None:
        """Handle Ctrl-C or the stop button. Fast and reentrant, so safe in a signal handler.

        Args:
            cell: the running cell, for ``notify``.
            idle: whether no cell is running.
        """
        targets = self._targets
        if idle and not targets:
            targets = self._background
        self._presses.put((self._clock(), cell, targets, idle))

    def start(self) -> None:
        """Start the thread. Earlier presses are not lost."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="monarch-interrupts", daemon=True)
                self._thread.start()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all presses so far are handled.

        Returns:
            Whether they were handled within the timeout.
        """
        self.start()
        done = threading.Event()
        self._presses.put(done)
        return done.wait(timeout)

    def stop(self) -> None:
        """Stop the thread after the presses so far. ``start`` may be called again."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._presses.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._presses.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            action = self.logic.press(*item)
            if isinstance(action, Forward):
                self._forward(action)
            elif isinstance(action, Escalate):
                self._escalate(action)

    def _forward(self, action: Forward) -> None:
        targets = action.targets
        if not targets and self.default_targets is not None:
            try:
                targets = tuple(self.default_targets())
            except Exception as error:
                self._tell(action.cell, f"The interrupt did not reach the ranks: {error}")
        self._concerned = targets
        waited = False
        # Evaluated before `ending` is read: a kernel that ends detaches from its kept hosts, and then no target
        # outlives it.
        for outlives, target in sorted(((_outlives(each), each) for each in targets), key=itemgetter(0)):
            if self.ending.is_set():
                return
            if outlives and not waited:
                waited = True
                if any(self.ending.wait(END_GRACE / END_LOOKS) for _ in range(END_LOOKS)):
                    return
            try:
                target.interrupt()
            except Exception as error:
                self._tell(action.cell, f"The interrupt did not reach {target.describe()}: {error}")
        self._forwarded = self._clock()

    def _escalate(self, action: Escalate) -> None:
        wait = max(action.not_before, self._forwarded + self.logic.grace) - self._clock()
        if wait > 0:
            self._sleep(wait)
        for target in self._concerned:
            try:
                ranks = sorted(target.unanswered())
                if not ranks:
                    continue
                target.kill(ranks)
            except Exception as error:
                self._tell(action.cell, f"Hanging ranks of {target.describe()} could not be killed: {error}")
            else:
                which = f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
                self._tell(action.cell, f"Killed {which} of {target.describe()}: no answer to the interrupt.")
        self._concerned = ()

    def _tell(self, cell: object, text: str) -> None:
        if self.notify is not None:
            self.notify(cell, text)


def _outlives(target: InterruptTarget) -> bool:
    """Return whether a target continues after the kernel has ended."""
    return bool(getattr(target, "outlives_kernel", False))


_relay: InterruptRelay | None = None


def get_relay() -> InterruptRelay:
    """Return the relay of this process, created on first use. ``MonarchKernel`` connects it to SIGINT."""
    global _relay
    if _relay is None:
        _relay = InterruptRelay()
    return _relay
