"""Deliver events through `sys.settrace`, for Python 3.11.

While breakpoints are armed, every thread is traced, which slows down Python code (`note` states by how much). Lines are
traced only in functions with breakpoints, and in code that a step passes through. Without breakpoints, no thread is
traced.

If a thread already has a trace function, such as debugpy's, that is called as well, and restored in the end. A trace
function that is set later replaces the tracer's in that thread until the next `arm`. debugpy sets its own on all
threads whenever its breakpoints change, so the tracer puts its function back over it a moment later.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import opcode
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat, starmap, takewhile, tee
from operator import attrgetter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.rank.stopping.armed import ArmedBreakpoints, Lines
from monarch_kernel.debugger.rank.stopping.lines import loaded_codes, running_frames, tree
from monarch_kernel.debugger.rank.stopping.step_plan import StepPlan
from monarch_kernel.debugger.source_locations import is_user_code, outwards
from monarch_kernel.thread_frames import current_frames

if TYPE_CHECKING:
    from monarch_kernel.debugger.rank.stopping.tracer import StopTracer


# Read and set the trace functions of running threads on Python 3.11.
#
# (`sys.settrace` sets only that of the calling thread.) CPython exports the necessary functions, except for two
# offsets in `PyThreadState`. These are searched for, not assumed.
#
# A thread's state is freed when the thread ends. That can happen whenever this thread releases the GIL: between two
# calls of Python code. The list of states is therefore traversed, read and written by iterators and functions that are
# implemented in C and chained. A single call exhausts each chain, and the GIL is held during this call.

Tracer = Callable[..., Any]

_WORDS = 36  # the part of a thread state that is searched; the whole state is larger
_WORD = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets in a thread state (bytes), and the C function that calls Python trace functions."""

    thread: int
    tracer: int
    trampoline: int


@dataclass(frozen=True, slots=True)
class _Api:
    """Functions of the interpreter that keep the GIL. Addresses are integers, and NULL is None."""

    interpreter: Callable[[], int]
    head: Callable[[int], int]
    following: Callable[..., int]
    copy: Callable[[int, int], bytes]
    new_reference: Callable[[int], Tracer]
    set_trace: Callable[[int, int | None, int | None], int]


def thread_tracers() -> dict[int, Tracer | None]:
    """Return the trace function of each thread, by `threading.get_ident()`.

    If the interpreter is built differently, only that of the calling thread is returned. A thread that is just changing
    its trace function is left out.
    """
    layout = _find_layout()
    if layout is None:
        return {threading.get_ident(): sys.gettrace()}
    with _no_collection():
        fields = map(ctypes.c_void_p.from_address, map(layout.tracer.__add__, _states()))
        # They are referenced in the same call that finds them. From here on they stay alive, even if their threads end.
        tracers = list(map(_api().new_reference, filter(None, map(attrgetter("value"), fields))))
        held = {id(tracer): tracer for tracer in tracers}
        return {thread: held.get(tracer) for _, thread, tracer in _read(layout) if not tracer or tracer in held}


def set_tracers(tracers: Mapping[int, Tracer | None]) -> None:
    """Set trace functions as `sys.settrace` does, for each of these threads that still runs.

    Raises:
        RuntimeError: the interpreter refused (an audit hook).
    """
    layout = _find_layout()
    if layout is None:
        if threading.get_ident() in tracers:
            sys.settrace(tracers[threading.get_ident()])
        return
    present = (
        thread_tracers()
    )  # held until the end: code that runs when a trace function is freed must not run in the chain
    calls: dict[int, tuple[int, int | None, int | None]] = {}
    with _no_collection():
        for address, thread, _ in _read(layout):
            if thread in tracers:
                tracer = tracers[thread]
                calls[address] = (address, None, None) if tracer is None else (address, layout.trampoline, id(tracer))
        alive = filter(calls.__contains__, _states())
        failed = any(starmap(_api().set_trace, map(calls.__getitem__, alive)))
    del present
    if failed:
        raise RuntimeError("the trace function of a thread could not be set")


def _states() -> Iterator[int]:
    """Yield the addresses of all thread states. They are valid only during the one call that exhausts this iterator."""
    api = _api()
    # PyThreadState_Next is called with a second argument, which a C function ignores.
    return takewhile(bool, accumulate(chain(map(api.head, (api.interpreter(),)), repeat(None)), api.following))


def _read(layout: _Layout) -> list[tuple[int, int, int]]:
    """Return (address, thread, address of the trace function or 0) of each thread."""
    addresses, same = tee(_states())
    size = max(layout.thread, layout.tracer) + _WORD
    copies = list(zip(addresses, map(_api().copy, same, repeat(size))))

    def word(state: bytes, offset: int) -> int:
        return int.from_bytes(state[offset : offset + _WORD], sys.byteorder)

    return [(address, word(state, layout.thread), word(state, layout.tracer)) for address, state in copies]


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Disable garbage collection, which could run finalizers (Python code) in the middle of a chain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1)
def _api() -> _Api:
    library = ctypes.PyDLL(None)  # not `ctypes.pythonapi`, for whose functions other code may have declared other types
    pointer = ctypes.c_void_p

    def declared(name: str, result: object, *arguments: object) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function

    return _Api(
        declared("PyInterpreterState_Get", pointer),
        declared("PyInterpreterState_ThreadHead", pointer, pointer),
        declared("PyThreadState_Next", pointer, pointer),
        declared("PyBytes_FromStringAndSize", ctypes.py_object, pointer, ctypes.c_ssize_t),
        declared("Py_NewRef", ctypes.py_object, pointer),
        declared("_PyEval_SetTrace", ctypes.c_int, pointer, pointer, pointer),
    )


@lru_cache(maxsize=1)
def _find_layout() -> _Layout | None:
    if sys.implementation.name != "cpython" or not hasattr(ctypes.pythonapi, "_PyEval_SetTrace"):
        return None
    current = ctypes.pythonapi.PyThreadState_Get
    current.restype = ctypes.c_void_p
    words = (ctypes.c_size_t * _WORDS).from_address(current())

    def probe(*_event: object) -> None: ...

    present = sys.gettrace()
    if present is None:
        sys.settrace(probe)
    traced = list(words)
    if present is None:
        sys.settrace(None)
    tracers = [i for i in range(2, _WORDS) if traced[i] == id(present or probe) and traced[i - 2]]
    threads = [i for i in range(_WORDS) if traced[i] == threading.get_ident()]
    if len(tracers) != 1 or len(threads) != 1:
        return None
    tracer = tracers[0]
    # c_profilefunc, c_tracefunc, c_profileobj, c_traceobj
    return _Layout(threads[0] * _WORD, tracer * _WORD, traced[tracer - 2])


#: The interval for checking a thread that an exception from a trace function has left untraced (seconds).
_LOST_TICK = 0.001
#: The interval for checking threads that debugpy may have taken, or an interrupt left untraced (seconds).
_GUARD_TICK = 0.2
_DEBUGPY = "_pydevd_bundle"
_sleep = time.sleep  # debugpy replaces the function in the module

_YIELD: int = opcode.opmap["YIELD_VALUE"]
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


class _Files(dict[str, bool]):
    """Whether files have breakpoints, determined when code of a file is first called."""

    def __init__(self) -> None:
        super().__init__()
        self._wants: Callable[[str], bool] = ArmedBreakpoints(()).wants

    def begin(self, wants: Callable[[str], bool]) -> None:
        """Reset the results for all files."""
        self._wants = wants
        self.clear()

    def __missing__(self, name: str) -> bool:
        self[name] = wanted = self._wants(name)
        return wanted


class Tracing:
    """Arms lines and follows steps through trace functions."""

    #: A message for a user who sets a breakpoint; "" for none.
    note = "Python 3.11 has to trace this process while breakpoints are set: its Python code runs 2 to 13 times slower"

    def __init__(self, sink: StopTracer, lock: threading.Lock) -> None:
        self._sink = sink
        self._lock = lock
        self._book = ArmedBreakpoints(())
        self._files = _Files()
        self._local: dict[int, tuple[CodeType, _Local]] = {}  # by identity: equal code may belong to another file
        self._raising: dict[int, FrameType] = {}
        self._plain = _Local(sink, {}, self._raising, self._lost)
        self._plans: list[StepPlan] = []
        self._pausing = self._libraries = self._guarding = False
        self._everywhere: set[int] = set()
        self._before: dict[int, Tracer | None] = {}  # the previous trace functions of other threads
        self._new_threads: Any = None
        self._call = self._make_tracer(None)
        self._tracers: weakref.WeakSet[object] = weakref.WeakSet([self._call])

    def arm(self, book: ArmedBreakpoints) -> None:
        """Arm these breakpoints in place of all others, including in code that is already running."""
        # Finding code takes long if much is loaded. Meanwhile, breakpoints that stay armed keep working.
        codes = loaded_codes(book.wants) if book.has_lines else []
        locals_ = {id(code): (code, self._make_local(book, code)) for code in codes}
        former, self._book, self._local = self._local, book, locals_
        self._files.begin(book.wants)
        for _, frame in running_frames():
            if book.has_lines and self._files[frame.f_code.co_filename]:
                self._know(frame.f_code)
        self._apply()
        for _, local in former.values():
            local.lines.clear()

    def attend(self, plans: list[StepPlan], pausing: bool) -> None:
        """Deliver the events of these steps, and all lines of user code while a pause is requested."""
        self._plans = plans
        self._pausing = pausing
        self._everywhere = {plan.thread for plan in plans if plan.everywhere}
        self._libraries = any(plan.everywhere and plan.libraries for plan in plans)
        self._raising.clear()
        self._apply()

    def close(self) -> None:
        """Remove all trace functions. All code runs at full speed again."""
        self._book = ArmedBreakpoints(())
        self.attend([], False)
        self.arm(self._book)

    # -- trace functions -------------------------------------------------------------------------------

    def _make_tracer(self, other: Tracer | None) -> Tracer:
        """Create a thread's trace function, which calls `other` as well."""
        sink, files, local_of = self._sink, self._files, self._local_of

        def on_call(frame: FrameType, _event: str, _arg: object) -> Any:
            # Runs at every call of every function.
            try:
                if files[frame.f_code.co_filename] or sink.alert:
                    return local_of(frame.f_code)
            except BaseException:  # a KeyboardInterrupt arrives here
                self._lost(sys._getframe())
                raise
            return None

        def on_call_with_other(frame: FrameType, event: str, arg: Any) -> object:
            ours = on_call(frame, event, arg)
            theirs = other(frame, event, arg) if other is not None else None
            if sys.gettrace() is not on_call_with_other:
                self._go_over(threading.get_ident())  # debugpy's first trace function replaces itself
            return _Both(ours.__self__, theirs) if ours is not None and theirs is not None else ours or theirs

        return on_call if other is None else on_call_with_other

    def _local_of(self, code: CodeType) -> Tracer | None:
        known = self._local.get(id(code))
        if known is None and self._files[code.co_filename]:
            for part in tree(code):
                self._know(part)
            known = self._local[id(code)]
        if known is not None and known[1].lines:
            return known[1].function
        if self._pausing or threading.get_ident() in self._everywhere:
            return self._plain.function if self._libraries or is_user_code(code) else None
        return None

    def _know(self, code: CodeType) -> None:
        if id(code) not in self._local:
            self._local[id(code)] = (code, self._make_local(self._book, code))

    def _make_local(self, book: ArmedBreakpoints, code: CodeType) -> _Local:
        return _Local(self._sink, book.lines_of(code), self._raising, self._lost)

    # -- traced threads and frames ---------------------------------------------------------------------

    def _apply(self) -> None:
        """Trace exactly the threads and frames that matter now."""
        stepping = {plan.thread for plan in self._plans}
        always = self._book.has_lines or self._pausing
        self._trace_threads(lambda thread: always or thread in stepping)
        self._trace_new_threads(always)
        stepped = {id(frame) for plan in self._plans for frame in plan.frames}
        for plan in self._plans:
            for frame in plan.frames:
                self._trace_frame(frame, stepped)
        for _, frame in running_frames():
            self._trace_frame(frame, stepped)
        if (always or stepping) and not self._guarding:
            self._guarding = True
            guard = threading.Thread(target=self._guard, name="debugger-guard", daemon=True)
            guard.pydev_do_not_trace = guard.is_pydev_daemon_thread = True  # type: ignore[attr-defined]  # of debugpy's
            guard.start()

    def _guard(self) -> None:
        """While anything is armed, trace again threads that debugpy has taken, or that an interrupt has left untraced.

        `_lost` handles most interrupts. If the signal handler raises before the first line of a trace function, no code
        of this module runs, and Python stops tracing the thread.
        """
        while True:
            _sleep(_GUARD_TICK)
            with self._lock:
                if not (self._book.has_lines or self._pausing or self._plans):
                    self._guarding = False
                    return
                if _DEBUGPY in sys.modules or None in thread_tracers().values():
                    self._apply()

    def _trace_frame(self, frame: FrameType, stepped: set[int]) -> None:
        known = self._local.get(id(frame.f_code))
        local: _Local | None = known[1] if known is not None and known[1].lines else None
        if local is None and (id(frame) in stepped or (self._pausing and is_user_code(frame.f_code))):
            local = self._plain
        present: Any = frame.f_trace
        if isinstance(present, _Both):
            if present.ours is not local:
                frame.f_trace = present.theirs if local is None else _Both(local, present.theirs)
        elif present is None or _is_ours(present):
            function = None if local is None else local.function
            if present is not function:
                frame.f_trace = function
        elif local is not None:
            frame.f_trace = _Both(local, present)

    def _trace_threads(self, wanted: Callable[[int], bool]) -> None:
        changed: dict[int, Tracer | None] = {}
        for thread, tracer in thread_tracers().items():
            ours = tracer in self._tracers
            if wanted(thread) and not ours:
                changed[thread] = self._tracer_over(thread, tracer)
            elif ours and not wanted(thread):
                changed[thread] = self._before.pop(thread, None)
        if changed:
            set_tracers(changed)

    def _go_over(self, thread: int) -> None:
        """Restore the tracer's function in the calling thread if another has replaced it. It then calls the other."""
        self._before.pop(thread, None)
        tracer = sys.gettrace()
        if tracer not in self._tracers:
            sys.settrace(self._tracer_over(thread, tracer))

    def _tracer_over(self, thread: int, other: Tracer | None) -> Tracer:
        other = other or self._before.get(thread)
        if other is None:
            return self._call
        self._before[thread] = other
        tracer = self._make_tracer(other)
        self._tracers.add(tracer)
        return tracer

    def _trace_new_threads(self, wanted: bool) -> None:
        present = threading.gettrace()
        ours = present in self._tracers
        if wanted and not ours:
            self._new_threads = present
            threading.settrace(self._tracer_over(0, present))
        elif ours and not wanted:
            threading.settrace(self._new_threads)

    def _lost(self, inside: FrameType) -> None:
        """Trace this thread again: an exception left the trace function `inside`, and Python stopped tracing it."""
        thread = threading.get_ident()
        threading.Thread(target=self._regain, args=(thread, inside), name="debugger-regain", daemon=True).start()

    def _regain(self, thread: int, inside: FrameType) -> None:
        innermost = current_frames()
        while thread in innermost and any(frame is inside for frame in outwards(innermost[thread])):
            _sleep(_LOST_TICK)
            innermost = current_frames()
        with self._lock:
            self._apply()


class _Local:
    """The trace function of frames. `lines` are the breakpoints of their code."""

    def __init__(
        self, sink: StopTracer, lines: Lines, raising: dict[int, FrameType], lost: Callable[[FrameType], None]
    ) -> None:
        self.lines = lines
        self._lost = lost
        self._sink = sink
        self._raising = raising  # by thread: the frame in which an exception has just been raised
        self.function: Tracer = self.trace

    def trace(self, frame: FrameType, event: str, arg: object) -> None:
        """Handle an event of such a frame. Never returns a trace function: `arm` may set another one meanwhile."""
        try:
            self._trace(frame, event, arg)
        except BaseException:  # a KeyboardInterrupt for user code
            self._lost(sys._getframe())
            raise

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        sink = self._sink
        if event == "line":
            here = self.lines.get(frame.f_lineno)
            if here is not None or sink.alert:
                self._raising.pop(threading.get_ident(), None)
                sink.at_line(frame, frame.f_lineno, here or ())
        elif sink.alert:
            thread = threading.get_ident()
            if event == "exception":
                self._raising[thread] = frame
            elif self._raising.pop(thread, None) is frame and arg is None:
                sink.at_unwind(frame)
            elif not _yields(frame):
                sink.at_return(frame, arg)
        if not self.lines and not sink.alert and frame.f_trace is self.function:
            frame.f_trace = None


def _yields(frame: FrameType) -> bool:
    """Return whether a return event is a `yield` or an `await`."""
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDS) and code.co_code[frame.f_lasti] == _YIELD


class _Both:
    """The trace function of a frame that another tracer also traces."""

    def __init__(self, ours: _Local, theirs: Any) -> None:
        self.ours = ours
        self.theirs = theirs

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Both:
        theirs = self.theirs(frame, event, arg)
        if theirs is not None:
            self.theirs = theirs
        self.ours.trace(frame, event, arg)
        return self


def _is_ours(function: object) -> bool:
    return isinstance(getattr(function, "__self__", None), _Local)
