"""A stopped thread: it waits, runs jobs for viewers, and continues on request.

It waits without the GIL, and wakes often enough to receive an exception that is raised into it.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

from monarch_kernel.debugger.model.stops import Evaluation, How, Stop, Variable
from monarch_kernel.debugger.rank.stopping.expressions import (
    PAGE,
    Names,
    assign,
    children,
    counts,
    long,
    put,
    short,
    type_name,
    value_of,
)
from monarch_kernel.thread_frames import raise_in_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Scope:
    """The variables of a frame: its locals or its globals."""

    frame: FrameType
    local: bool


class Handles:
    """The values of one stop that viewers have seen, by the numbers that viewers use for them.

    Attributes:
        extra: names that evaluations have bound and that are not variables of the frames.
    """

    def __init__(self) -> None:
        self.extra: Names = {}
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[FrameType, Any]] = {}

    def scopes(self, frame: FrameType) -> list[Variable]:
        """Return the scopes `Locals` and `Globals` of a frame; only `Globals` at the top level of a module or cell."""
        found = [Variable("Globals", "", "", self._hold(frame, _Scope(frame, False)), len(frame.f_globals), 0)]
        if frame.f_locals is not frame.f_globals:
            scope = _Scope(frame, True)
            found.insert(0, Variable("Locals", "", "", self._hold(frame, scope), len(self._names(scope)), 0))
        return found

    def variables(self, ref: int, start: int, count: int) -> list[Variable]:
        """Return the children of the value with that number.

        Raises:
            KeyError: there is no such number.
        """
        frame, held = self._of(ref)
        if isinstance(held, _Scope):
            names = list(self._names(held).items())[start : start + (count or PAGE)]
            return [self._variable(frame, name, value) for name, value in names]
        return [self._variable(frame, name, value) for name, _, value in children(held, start, count)]

    def set(self, ref: int, name: str, expression: str) -> Variable:
        """Replace a child by the value of an expression, in the frame from which it was reached.

        Raises:
            KeyError: there is no such number or child.
            BaseException: raised by the expression or the assignment.
        """
        frame, held = self._of(ref)
        value = value_of(frame, expression, self.extra)
        if not isinstance(held, _Scope):
            put(held, self._key(held, name), value)
        elif not held.local:
            frame.f_globals[name] = value
        elif name in self.extra:
            self.extra[name] = value
        else:
            assign(frame, name, value)
        return self._variable(frame, name, value)

    def evaluation(self, frame: FrameType, value: Any) -> Evaluation:
        """Build the answer to an evaluation that returned this value."""
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Evaluation(long(value), type_name(value), ref, named, indexed)

    def _variable(self, frame: FrameType, name: str, value: Any) -> Variable:
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Variable(name, short(value), type_name(value), ref, named, indexed)

    def _names(self, scope: _Scope) -> Names:
        if not scope.local:
            return {name: value for name, value in list(scope.frame.f_globals.items()) if not name.startswith("__")}
        # `.0` is the iterator of a generator expression.
        names = {name: value for name, value in list(scope.frame.f_locals.items()) if not name.startswith(".")}
        return {**self.extra, **names}

    def _key(self, held: Any, name: str) -> Any:
        if name.startswith("[") and name.endswith("]") and name[1:-1].isdigit():
            for found, key, _ in children(held, int(name[1:-1]), 1):
                if found == name:
                    return key
        start = 0
        while page := children(held, start, PAGE):
            for found, key, _ in page:
                if found == name:
                    return key
            start += len(page)
        raise KeyError(f"no child is named {name}")

    def _hold(self, frame: FrameType, value: Any) -> int:
        number = next(self._numbers)
        self._held[number] = (frame, value)
        return number

    def _of(self, ref: int) -> tuple[FrameType, Any]:
        if ref not in self._held:
            raise KeyError(f"nothing of this stop has the number {ref}")
        return self._held[ref]


#: The interval at which a stopped thread wakes for exceptions that were raised into it (seconds).
_TICK = 0.1
#: The time limit for an evaluation to end after an interrupt (seconds).
_GRACE = 0.5


#: Ends an evaluation in the main thread: a signal also interrupts a wait in C.
_SIGNAL = signal.SIGRTMAX - 3


class _Abandoned(BaseException):
    """Raised into an evaluation whose timeout has expired."""


class _Main:
    """Holds the job that the main thread runs."""

    job: _Job[Any] | None = None


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    job = _Main.job
    if job is not None and job.running and job.abandoned:
        raise _Abandoned


@dataclass(frozen=True, slots=True)
class Onward:
    """The way in which the thread continues."""

    how: How
    line: int = 0


class _Job(Generic[T]):
    """A function to run in the stopped thread."""

    result: T  # once it is done without an error

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.lock = threading.Lock()  # held while the job begins, ends or is abandoned
        self.running = self.abandoned = False

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


class Parked:
    """One stop, and the thread that waits in it (none for a post mortem).

    Attributes:
        stop: the stop as viewers see it.
        frames: the frames of `stop.frames`.
        handles: the values that viewers have seen.
    """

    def __init__(self, stop: Stop, frames: tuple[FrameType, ...]) -> None:
        self.stop = stop
        self.frames = frames
        self.handles = Handles()
        self._lock = threading.Lock()
        self._over = False
        self._jobs: SimpleQueue[_Job[Any] | Onward] = SimpleQueue()
        self._present: _Job[Any] | None = None

    # -- in the stopped thread ---------------------------------------------------------------------

    def wait(self) -> Onward:
        """Run jobs until `go`. Return how to continue.

        Raises:
            BaseException: KeyboardInterrupt, or another exception that was raised into the thread.
        """
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=_TICK)
                except Empty:
                    continue
                if isinstance(job, Onward):
                    return job
                self._present = job
                self._run(job)
                self._present = None
        finally:
            self._present = None
            self._end()

    def _run(self, job: _Job[Any]) -> None:
        with job.lock:
            if job.abandoned:
                return
            job.running = True
        interrupt: KeyboardInterrupt | None = None
        if self.stop.thread == threading.main_thread().ident:
            signal.signal(_SIGNAL, _on_signal)  # the handler stays, because a signal may arrive late
            _Main.job = job
        try:
            try:
                job.result = job.function()
            except KeyboardInterrupt as error:  # meant for the code that is stopped here
                interrupt = error
                job.error = KeyError(f"stop {self.stop.id} is over: its thread was interrupted")
            except BaseException as error:
                job.error = error
            with job.lock:
                job.running = False
            if job.abandoned and not isinstance(job.error, _Abandoned):
                # The exception has not arrived yet (or was swallowed), and must not hit other code.
                threading.Event().wait(_TICK)
        except _Abandoned as error:
            job.running = False
            job.error = error
        job.done.set()
        if interrupt is not None:
            raise interrupt.with_traceback(None)

    def _end(self) -> None:
        with self._lock:
            self._over = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if isinstance(job, _Job):
                job.fail(KeyError(f"stop {self.stop.id} is over"))

    # -- from other threads ------------------------------------------------------------------------

    def go(self, onward: Onward) -> None:
        """Let the thread continue after the current job."""
        with self._lock:
            if not self._over:
                self._jobs.put(onward)

    def abandon_job(self) -> None:
        """End a job in the stopped thread whose viewer is gone or has timed out."""
        job = self._present
        if job is not None:
            self._interrupt(job)

    def run(self, function: Callable[[], T], timeout: float) -> T:
        """Run `function` in the stopped thread.

        Args:
            function: the function to run; events of this tracer are off while it runs.
            timeout: the time limit (seconds), after which an exception is raised into the function, as by Ctrl-C. A
                call into C is not interrupted outside the main thread; later jobs and `go` wait for it.

        Raises:
            KeyError: the stop is over.
            TimeoutError: it took too long.
            BaseException: raised by the function.
        """
        if self.stop.thread in (0, threading.get_ident()):
            return function()
        job = _Job(function)
        with self._lock:
            if self._over:
                raise KeyError(f"stop {self.stop.id} is over")
            self._jobs.put(job)
        if not job.done.wait(timeout):
            self._abandon(job)
            raise TimeoutError(f"no answer from the stopped thread {self.stop.thread_name} within {timeout:g} s")
        if job.error is not None:
            raise job.error
        return job.result

    def _abandon(self, job: _Job[Any]) -> None:
        self._interrupt(job)
        job.done.wait(_GRACE)

    def _interrupt(self, job: _Job[Any]) -> None:
        with job.lock:
            if job.abandoned:  # a second exception might hit other code
                return
            job.abandoned = True
            if job.running:
                if _Main.job is job:
                    signal.pthread_kill(self.stop.thread, _SIGNAL)
                else:
                    raise_in_thread(self.stop.thread, _Abandoned)


__all__ = ["Onward", "Parked"]
