"""The tracer of one process. It stops threads, answers queries about them, and resumes them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from monarch_kernel.debugger.model.stops import (
    Bound,
    Breakpoint,
    Evaluation,
    How,
    NotSteppable,
    Reason,
    Resumed,
    Stop,
    StopFrame,
    Stopped,
    Variable,
)
from monarch_kernel.debugger.rank.stopping.armed import ArmedBreakpoint, ArmedBreakpoints, Ask, ClientPath, not_synced
from monarch_kernel.debugger.rank.stopping.expressions import (
    PAGE,
    Names,
    assign,
    children,
    counts,
    long,
    put,
    run,
    short,
    summary,
    type_name,
    value_of,
)
from monarch_kernel.debugger.rank.stopping.lines import own_lines, running_frames
from monarch_kernel.debugger.rank.stopping.step_plan import StepPlan
from monarch_kernel.debugger.source_locations import is_debugger, is_user_frame, outwards
from monarch_kernel.display.quantities import source_line
from monarch_kernel.thread_frames import current_frames, raise_in_thread

# A stopped thread: it waits, runs jobs for viewers, and continues on request.
#
# It waits without the GIL, and wakes often enough to receive an exception that is raised into it.


#: The maximum length of a string that an evaluation returns unchanged (characters).
RAW = 2_000_000


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
        self._held: dict[int, tuple[FrameType, object]] = {}

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

    def evaluation(self, frame: FrameType, value: object, raw: bool = False) -> Evaluation:
        """Build the answer to an evaluation that returned this value; with `raw`, the answer to a string is itself."""
        if raw and isinstance(value, str):
            if len(value) > RAW:
                return Evaluation("", "str", error=f"the string has {len(value):,} characters, more than {RAW:,}")
            return Evaluation(value, type_name(value))
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Evaluation(long(value), type_name(value), ref, named, indexed)

    def _variable(self, frame: FrameType, name: str, value: object) -> Variable:
        named, indexed = counts(value)
        ref = self._hold(frame, value) if named or indexed else 0
        return Variable(name, short(value), type_name(value), ref, named, indexed)

    def _names(self, scope: _Scope) -> Names:
        if not scope.local:
            return {name: value for name, value in list(scope.frame.f_globals.items()) if not name.startswith("__")}
        # `.0` is the iterator of a generator expression.
        names = {name: value for name, value in list(scope.frame.f_locals.items()) if not name.startswith(".")}
        return {**self.extra, **names}

    def _key(self, held: object, name: str) -> object:
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

    def _hold(self, frame: FrameType, value: object) -> int:
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

    job: _Job | None = None


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    job = _Main.job
    if job is not None and job.running and job.abandoned:
        raise _Abandoned


@dataclass(frozen=True, slots=True)
class Onward:
    """The way in which the thread continues."""

    how: How
    line: int = 0


class _Job:
    """A function to run in the stopped thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Any = None
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
        self._jobs: SimpleQueue[_Job | Onward] = SimpleQueue()
        self._present: _Job | None = None

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

    def _run(self, job: _Job) -> None:
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

    def run(self, function: Callable[[], object], timeout: float) -> Any:
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

    def _abandon(self, job: _Job) -> None:
        self._interrupt(job)
        job.done.wait(_GRACE)

    def _interrupt(self, job: _Job) -> None:
        with job.lock:
            if job.abandoned:  # a second exception might hit other code
                return
            job.abandoned = True
            if job.running:
                if _Main.job is job:
                    signal.pthread_kill(self.stop.thread, _SIGNAL)
                else:
                    raise_in_thread(self.stop.thread, _Abandoned)


T = TypeVar("T")

log = logging.getLogger(__name__)

#: The maximum number of frames of a stop that are shown, from the innermost one.
MAX_FRAMES = 256
#: The time limit for reading variables (seconds).
LOOK_TIMEOUT = 5.0

_HOWS = ("continue", "next", "step", "out", "until")
# A member of the set of threads to pause: the next thread that runs user code.
_ANY = 0

_CLOSED = "the debugger of this process is closed"

Stack = list[tuple[FrameType, int]]
Label = Callable[[], tuple[str, str, str]]


class StopTracer:
    """Breakpoints, stops and steps of this process. All methods may be called from any thread.

    A stopped thread blocks inside the event that stopped it, without the GIL, so other threads run. Threads of the
    debugger and code of the runtime never stop. When a step leaves user code, the thread continues. In a child process
    created by `os.fork`, nothing is armed.

    Args:
        on_event: called with each stop, and with its end, on the thread that it concerns; must not block.
        ask: (breakpoint, number of the hit, value of `differs`) -> whether to stop. Called for breakpoints with
            `first` or `differs`, in the thread that has hit one; may block.
        label: (actor, endpoint, cell) of the calling thread.
        client_path: the controller's path of a file that was synced to this host; None for other files.
    """

    def __init__(
        self,
        on_event: Callable[[Stopped | Resumed], None],
        ask: Ask,
        label: Label,
        client_path: ClientPath = not_synced,
    ) -> None:
        self.alert = False
        self._client_path = client_path
        self._on_event = on_event
        self._ask = ask
        self._label = label
        self._ids = itertools.count(1)
        self._busy: set[int] = set()  # threads that are inside the debugger
        self._book = ArmedBreakpoints(())
        self._calls: dict[str, tuple[Breakpoint, Callable[[], None]]] = {}
        self._plans: dict[int, StepPlan] = {}
        self._pausing: set[int] = set()
        self._parked: dict[int, Parked] = {}
        # stops that have been told to continue, but whose threads have not continued yet
        self._leaving: set[int] = set()
        self._raised: dict[int, BaseException] = {}  # by thread: the exception that was raised into its stop
        self._closed = False
        self._lock = threading.Lock()
        if sys.version_info >= (3, 12):
            from monarch_kernel.debugger.rank.stopping.monitoring import Monitoring as Source
        else:
            from monarch_kernel.debugger.rank.stopping.tracing import Tracing as Source
        self._source = Source(self, self._lock)
        # These callbacks cannot be unregistered, so they must not keep the tracer alive.
        before, after, child = map(weakref.WeakMethod, (self._before_fork, self._after_fork, self._in_child))
        os.register_at_fork(
            before=lambda: (before() or _nothing)(),
            after_in_parent=lambda: (after() or _nothing)(),
            after_in_child=lambda: (child() or _nothing)(),
        )

    # -- breakpoints -------------------------------------------------------------------------------

    def arm(self, breakpoints: Iterable[Breakpoint]) -> list[Bound]:
        """Arm these breakpoints in place of all others, including in code that is already running.

        Returns:
            The state of each, in their order.

        Raises:
            RuntimeError: no id of `sys.monitoring` is free.
        """
        with self._lock:
            return self._arm(breakpoints).bounds(self._source.note)

    def _arm(self, breakpoints: Iterable[Breakpoint]) -> ArmedBreakpoints:
        self._closed = False
        book = ArmedBreakpoints(breakpoints, self._book, self._client_path, self._calls.values())
        self._source.arm(book)
        self._book = book
        return book

    def call_at(self, point: str, code: CodeType, call: Callable[[], None]) -> None:
        """Call a function on threads that reach the first line of a function, beginning at a common point of all ranks.

        The call stays until `drop_call`, independently of the armed breakpoints. `call` must not raise.

        Args:
            point: see `common_point`; also identifies the call.
        """
        place = Breakpoint(0, code.co_filename, own_lines(code)[0], together=point)
        with self._lock:
            self._calls[point] = place, call
            self._arm([armed.spec for armed in self._book.armed])

    def drop_call(self, point: str) -> None:
        """Remove a call."""
        with self._lock:
            if self._calls.pop(point, None) is not None and not self._closed:
                self._arm([armed.spec for armed in self._book.armed])

    def pause(self, thread: int | None = None) -> None:
        """Stop a thread at its next line of user code.

        Args:
            thread: its `threading.get_ident()`; None: all other threads that run user code now or, if there are none,
                the first that does. A thread that waits in C stops when it returns.
        """
        with self._lock:
            if thread is None:
                running = {ident for ident, frame in running_frames() if is_user_frame(frame) and _may_stop(frame)}
                stopped = {parked.stop.thread for parked in self._parked.values()}  # without those about to continue
                self._pausing |= running - stopped - {threading.get_ident()} or {_ANY}
            else:
                self._pausing.add(thread)
            self._attend()

    def cancel_pause(self) -> None:
        """Let those threads run that `pause` has not stopped yet."""
        with self._lock:
            self._pausing.clear()
            self._attend()

    def stop_here(self, frame: FrameType, reason: Reason, text: str = "") -> None:
        """Stop the calling thread in `frame`, which is on its stack, until `resume` (`breakpoint()`)."""

        def stop() -> None:
            if threading.get_ident() not in self._busy and _may_stop(frame):
                self._stop(_stack(frame), reason, text)

        self._harmless(stop)

    def failed_here(self, error: BaseException) -> None:
        """Stop the calling thread with the frames of a failed endpoint or cell, if a breakpoint requests it."""
        self._harmless(self._failed_here, error)

    def _failed_here(self, error: BaseException) -> None:
        book = self._book
        frames = _frames_of(error.__traceback__)
        users = [frame for frame, _ in frames if is_user_frame(frame)]
        if not book.has_errors or not users or threading.get_ident() in self._busy:
            return
        decision = book.failed(users[0], error, self._ask)
        if decision is not None:
            text = "; ".join(part for part in (summary(error), decision.text) if part)
            self._stop(frames, "exception", text, decision.breakpoint.id, steppable=False)

    def post_mortem(self, error: BaseException, label: tuple[str, str, str], of_peer: bool = False) -> Stop:
        """Open the frames of a kept error, as a stop without a thread that lasts until `resume`.

        Args:
            error: the error with its traceback.
            label: the actor, endpoint and cell in which it was raised.
            of_peer: see `Stop`.

        Raises:
            ValueError: the error has no traceback.
            RuntimeError: the tracer is closed.
        """
        frames = _frames_of(error.__traceback__)
        if not frames:
            raise ValueError(f"{summary(error)} has no traceback to look at")
        parked = self._open(frames, "post mortem", summary(error), 0, False, label, 0, of_peer)
        if parked is None:
            raise RuntimeError(_CLOSED)
        self._tell(Stopped(parked.stop))
        return parked.stop

    # -- stops -------------------------------------------------------------------------------------

    def stops(self) -> list[Stop]:
        """Return the current stops, in the order in which they began."""
        with self._lock:
            return [parked.stop for parked in self._parked.values()]

    def resume(self, stop_id: int, how: How = "continue", line: int = 0) -> None:
        """Let a stopped thread continue.

        Args:
            stop_id: the id of its stop.
            how: see `How`. A step that leaves user code ends, and the thread continues.
            line: for "until": the line to reach; 0 is any line below the current one.

        Raises:
            KeyError: the stop does not exist, or is over. A stop that is about to continue follows the first request.
            NotSteppable: the frames of an error cannot step; only "continue" ends such a stop.
            ValueError: `how` is not one of these.
        """
        if how not in _HOWS:
            raise ValueError(f"a stop continues by one of {', '.join(_HOWS)}, not by {how!r}")
        with self._lock:
            if stop_id in self._leaving:
                return
            parked = self._find(stop_id)
            if how != "continue" and not parked.stop.steppable:
                raise NotSteppable(f"stop {stop_id} cannot step: its frames have ended ({parked.stop.text})")
            del self._parked[stop_id]
            if parked.stop.thread:
                self._leaving.add(stop_id)
        parked.go(Onward(how, line))
        if not parked.stop.thread:
            self._tell(Resumed(stop_id, how))

    def close(self) -> None:
        """Let all threads continue, and remove every trace and callback. Nothing stops until the next `arm`."""
        with self._lock:
            self._closed = True
            self._book = ArmedBreakpoints(())
            self._calls.clear()
            self._plans.clear()
            self._pausing.clear()
            self.alert = False
            self._source.close()
            standing = list(self._parked.values())
        for parked in standing:
            try:
                self.resume(parked.stop.id)
            except KeyError:  # the stop has already ended
                continue
            parked.abandon_job()

    # -- inspecting a stop -------------------------------------------------------------------------

    def scopes(self, stop_id: int, frame: int) -> list[Variable]:
        """Return the scopes of a frame, innermost first. Their variables are their children.

        Raises:
            KeyError: the stop does not exist, or is over.
            IndexError: it has no such frame.
            TimeoutError: the stopped thread is busy.
        """
        parked, there = self._frame(stop_id, frame)
        return parked.run(lambda: parked.handles.scopes(there), LOOK_TIMEOUT)

    def variables(self, stop_id: int, ref: int, start: int = 0, count: int = 0) -> list[Variable]:
        """Return the children of the value `ref`, beginning at `start`; those with an index come first.

        Raises:
            KeyError: there is no such stop or value.
            TimeoutError: the stopped thread is busy, or a `__repr__` takes too long.
        """
        with self._lock:
            parked = self._find(stop_id)
        return parked.run(lambda: parked.handles.variables(ref, start, count), LOOK_TIMEOUT)

    def set_variable(self, stop_id: int, ref: int, name: str, expression: str) -> Variable:
        """Set a child of the value `ref` to the value of an expression, in the frame from which it was reached.

        Raises:
            KeyError: there is no such stop, value or child.
            TimeoutError: as for `variables`.
            Exception: raised by the expression or the assignment.
        """
        with self._lock:
            parked = self._find(stop_id)
        return parked.run(lambda: parked.handles.set(ref, name, expression), LOOK_TIMEOUT)

    def evaluate(self, stop_id: int, frame: int, source: str, timeout: float = 5.0, *, raw: bool = False) -> Evaluation:
        """Run an expression or statements in a frame, in the stopped thread.

        Args:
            stop_id, frame: the stop, and the frame in it.
            source: Python code; assignments change the function's variables, and new names last as long as the stop.
            timeout: the time limit (seconds), after which the evaluation is interrupted, unless it is in C outside the
                main thread.
            raw: return a string unchanged, rather than its `repr` of limited length.

        Raises:
            KeyError: the stop does not exist, or is over.
            IndexError: it has no such frame.
        """
        parked, there = self._frame(stop_id, frame)

        def work() -> Evaluation:
            try:
                has_value, value = run(there, source, parked.handles.extra)
            except (Exception, SystemExit) as error:
                return Evaluation("", type(error).__qualname__, error=summary(error))
            return parked.handles.evaluation(there, value, raw) if has_value else Evaluation("")

        try:
            return parked.run(work, timeout)
        except TimeoutError as error:
            return Evaluation("", error=str(error))

    def call(self, stop_id: int, frame: int, function: Callable[[FrameType], T], timeout: float = 5.0) -> T:
        """Call `function(frame)` in the stopped thread.

        Raises:
            KeyError, IndexError: as `evaluate`.
            TimeoutError: it took too long.
            Exception: raised by the function.
        """
        parked, there = self._frame(stop_id, frame)
        return parked.run(lambda: function(there), timeout)

    def _frame(self, stop_id: int, frame: int) -> tuple[Parked, FrameType]:
        with self._lock:
            parked = self._find(stop_id)
        if not 0 <= frame < len(parked.frames):
            raise IndexError(f"stop {stop_id} has no frame {frame}, only 0 to {len(parked.frames) - 1}")
        return parked, parked.frames[frame]

    def _find(self, stop_id: int) -> Parked:
        if stop_id not in self._parked:
            raise KeyError(f"there is no stop {stop_id} in this process (any more)")
        return self._parked[stop_id]

    # -- events, on the thread where they happen ---------------------------------------------------

    def _harmless(self, work: Callable[..., None], *args: object) -> None:
        """Do work of the debugger in a thread of the program, without letting errors of the work reach the program.

        An exception that others raise into the thread meanwhile (an interrupt, a signal handler) belongs to the
        program, and is passed on.
        """
        try:
            work(*args)
        except Exception as error:
            if self._raised.pop(threading.get_ident(), None) is error or _by_signal(error):
                raise
            log.exception("a fault of the debugger; the thread goes on")

    def at_line(self, frame: FrameType, line: int, here: tuple[ArmedBreakpoint, ...]) -> None:
        """Handle that a line is about to run; `here` are its breakpoints. May block, and may raise into the thread."""
        self._harmless(self._at_line, frame, line, here)

    def _at_line(self, frame: FrameType, line: int, here: tuple[ArmedBreakpoint, ...]) -> None:
        thread = threading.get_ident()
        if thread in self._busy:
            return
        plan = self._plans.get(thread)
        stepped = plan is not None and plan.at_line(frame, line)
        paused = (thread in self._pausing or _ANY in self._pausing) and is_user_frame(frame)
        if not (here or stepped or paused) or not _may_stop(frame):
            if self._pausing and not self._pausing <= {_ANY, *current_frames()}:
                self._forget_ended_threads()
            return
        decision = self._book.reached(frame, here, self._ask) if here else None
        if decision is not None:
            self._stop(_stack(frame), "breakpoint", decision.text, decision.breakpoint.id)
        elif stepped or paused:
            self._stop(_stack(frame), "step" if stepped else "pause", "")

    def at_return(self, frame: FrameType, value: object) -> None:
        """Handle that a frame is about to return a value. May block, and may raise into the thread."""
        self._harmless(self._at_return, frame, value)

    def _at_return(self, frame: FrameType, value: object) -> None:
        plan = self._plans.get(threading.get_ident())
        if plan is None or threading.get_ident() in self._busy:
            return
        caller = plan.at_return(frame)
        if caller is not None:
            self._stop(_stack(caller), "step", f"{frame.f_code.co_qualname} returned {short(value)}")
        elif plan.over:
            self._forget(plan)
        elif plan.moved:
            plan.moved = False
            with self._lock:
                self._attend()

    def at_unwind(self, frame: FrameType) -> None:
        """Handle that an exception leaves a frame. May block, and may raise into the thread."""
        self._harmless(self._at_unwind, frame)

    def _at_unwind(self, frame: FrameType) -> None:
        plan = self._plans.get(threading.get_ident())
        if plan is not None:
            plan.at_unwind(frame)
            if plan.over:
                self._forget(plan)

    def _forget(self, plan: StepPlan) -> None:
        with self._lock:
            if self._plans.get(plan.thread) is not plan:
                return
            del self._plans[plan.thread]
            self._attend()
        self._tell(Resumed(plan.stop, "ran off"))

    def _forget_ended_threads(self) -> None:
        with self._lock:
            self._pausing &= {_ANY, *current_frames()}
            self._attend()

    def _attend(self) -> None:
        """Request the events that steps and pauses currently need."""
        if self._closed:
            return
        self.alert = bool(self._plans or self._pausing)
        self._source.attend(list(self._plans.values()), bool(self._pausing))

    # -- stopping ----------------------------------------------------------------------------------

    def _stop(self, frames: Stack, reason: Reason, text: str, breakpoint_id: int = 0, steppable: bool = True) -> None:
        """Block the calling thread until `resume`."""
        thread = threading.get_ident()
        how: How | str = "interrupt"
        parked: Parked | None = None
        self._busy.add(thread)
        try:
            parked = self._open(frames, reason, text, breakpoint_id, steppable, self._labels(), thread)
            if parked is None:
                return
            self._tell(Stopped(parked.stop))
            try:
                onward = parked.wait()
            except Exception as error:
                self._raised[thread] = error
                raise
            how = onward.how
            if onward.how != "continue":
                self._follow(StepPlan(thread, parked.frames[0], onward.how, onward.line, parked.stop.id))
        except BaseException as error:
            if isinstance(error, Exception) and _by_signal(error):
                self._raised[thread] = error
            raise error.with_traceback(None) from None
        finally:
            if parked is not None:
                with self._lock:
                    self._parked.pop(parked.stop.id, None)
                    self._leaving.discard(parked.stop.id)
                self._tell(Resumed(parked.stop.id, how))
            if sys.version_info < (3, 12):
                # After a trace function, the interpreter writes this dictionary back to the variables.
                _ = frames[0][0].f_locals
            self._busy.discard(thread)

    def _open(
        self,
        frames: Stack,
        reason: Reason,
        text: str,
        breakpoint_id: int,
        steppable: bool,
        label: tuple[str, str, str],
        thread: int,
        of_peer: bool = False,
    ) -> Parked | None:
        """Register a stop; None if the tracer is closed."""
        shown = tuple(
            StopFrame(index, frame.f_code.co_qualname, file, line, is_user_frame(frame), source_line(file, line))
            for index, (frame, line) in enumerate(frames)
            for file in (frame.f_code.co_filename,)
        )
        stop = Stop(
            next(self._ids),
            reason,
            text,
            breakpoint_id,
            thread,
            _name_of(thread),
            shown,
            *label,
            time.time(),
            steppable,
            of_peer,
        )
        parked = Parked(stop, tuple(frame for frame, _ in frames))
        with self._lock:
            if self._closed:
                return None
            self._parked[stop.id] = parked
            if thread:
                self._plans.pop(thread, None)
                self._pausing -= {thread, _ANY}
                self._attend()
        return parked

    def _follow(self, plan: StepPlan) -> None:
        with self._lock:
            if not self._closed:
                self._plans[plan.thread] = plan
                self._attend()

    def _labels(self) -> tuple[str, str, str]:
        try:
            return self._label()
        except Exception:
            log.exception("cannot determine which actor or cell a stopped thread works for")
            return "", "", ""

    def _tell(self, event: Stopped | Resumed) -> None:
        try:
            self._on_event(event)
        except Exception:
            log.exception("the event could not be sent: %s", event)

    # -- forks -------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        self._lock.acquire()

    def _after_fork(self) -> None:
        self._lock.release()

    def _in_child(self) -> None:
        """Close the tracer in a forked child, where no viewer could resume a stop."""
        self._closed = True
        self._plans.clear()
        self._pausing.clear()
        self.alert = False
        self._source.close()
        for parked in self._parked.values():
            parked.go(Onward("continue"))
        self._parked.clear()
        self._lock.release()


def _nothing() -> None:
    """Replaces a method whose tracer is gone."""


def _stack(frame: FrameType) -> Stack:
    """Return a frame and its callers, with their lines."""
    return [(outer, outer.f_lineno) for outer in itertools.islice(outwards(frame), MAX_FRAMES)]


def _frames_of(traceback: TracebackType | None) -> Stack:
    """Return the frames of a traceback, innermost first, with the lines where they failed."""
    frames: Stack = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1][:MAX_FRAMES]


def _by_signal(error: BaseException) -> bool:
    """Return whether a signal handler has raised this."""
    handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _may_stop(frame: FrameType) -> bool:
    """Return whether a frame runs on behalf of the user, rather than of the debugger or the runtime."""
    user = False
    for outer in outwards(frame):
        if is_debugger(outer.f_code.co_filename):
            return False
        user = user or is_user_frame(outer)
    return user


def _name_of(thread: int) -> str:
    # `threading.current_thread()` would create an object for a thread that Python has not started.
    active: dict[int, threading.Thread] = getattr(threading, "_active", {})
    return active[thread].name if thread in active else ""
