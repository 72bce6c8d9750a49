"""Read the stacks of this process: its threads and its asyncio tasks."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import types
from collections.abc import Container, Hashable, Iterable, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from monarch_kernel.debugger.model.stops import (
    CODE,
    ENDPOINT,
    INNER_FRAMES,
    NATIVE,
    OPERATION,
    OUTER_FRAMES,
    PROGRAM,
    TASK,
    THREAD,
    Stack,
    StackFrame,
    StackSnapshot,
)
from monarch_kernel.debugger.rank.task_stacks import TaskStack, task_stacks
from monarch_kernel.debugger.source_locations import (
    CELL_RUNNER,
    ENDPOINT_RUNNERS,
    RUNTIME,
    USER,
    SourceLocation,
    is_debugger,
    is_user_frame,
    kind_of_code,
)
from monarch_kernel.display.quantities import source_line
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import Running, RunningOperation, operation_on
from monarch_kernel.thread_frames import current_frames

# Trim stacks: remove the frames that lead to user code, and those of a debugger. Pure.
#
# The same rules apply to reports of ranks and to dumps of py-spy.

_NUMBERED = re.compile(r"(?:[-_]\d+)+$")
_THREAD = re.compile(r"Thread-\d+ \((?P<target>.*)\)$")


def thread_name(name: str) -> str:
    """Return a thread's name without the part that differs between ranks: `Thread-3 (load)` is `load`."""
    match = _THREAD.match(name)
    if match:
        return match["target"] or "Thread"
    if name.startswith("Dummy-"):
        return "a thread of native code"
    return _NUMBERED.sub("", name) or name or "a thread without a name"


def is_ours(name: str) -> bool:
    """Whether a thread belongs to the runtime."""
    return name.startswith("monarch-")


def kind_by_frames(frames: Sequence[StackFrame]) -> str:
    """Return whether a stack (the outermost frame first) runs a cell, an endpoint, or neither (``""``)."""
    ours = [frame.place.file for frame in frames if frame.place.kind == RUNTIME]
    if any(file.endswith(CELL_RUNNER) for file in ours):
        return CODE
    return ENDPOINT if any(file.endswith(ENDPOINT_RUNNERS) for file in ours) else ""


def has_user_code(frames: Sequence[StackFrame]) -> bool:
    """Return whether a stack contains user code."""
    return any(frame.user for frame in frames)


def is_stopped(frames: Sequence[StackFrame]) -> bool:
    """Return whether the debugger of this package has stopped this stack."""
    return _cut_stop(frames) != len(frames)


def trimmed(frames: Sequence[StackFrame], kind: str) -> tuple[StackFrame, ...]:
    """Return the part of a stack (outermost frame first) that its owner runs; the whole stack if there is none."""
    shown = list(frames[: _cut_stop(frames)])
    first = next((at for at, frame in enumerate(shown) if frame.user), len(shown))
    if kind == OPERATION:  # perhaps none of it is Python
        inside = [at for at, frame in enumerate(shown) if frame.place.kind == RUNTIME]
        return tuple(shown[min(first, inside[-1] + 1 if inside else 0) :])
    if kind == ENDPOINT:
        begin = _after_callers(shown[:first]) or first  # frames of another runtime are below user code
    elif kind == TASK:
        begin = next((at for at, frame in enumerate(shown) if frame.place.kind not in (RUNTIME, NATIVE)), 0)
    else:
        begin = first
    return tuple(shown[begin:]) or tuple(shown)


def folded(frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """Merge equal neighbours of a stack into one frame, and remove the middle of a very deep stack."""
    kept: list[StackFrame] = []
    for frame in frames:
        last = kept[-1] if kept else None
        if last is not None and last.place == frame.place:
            kept[-1] = frame._replace(times=last.times + frame.times)
        else:
            kept.append(frame)
    left_out = len(kept) - OUTER_FRAMES - INNER_FRAMES
    if left_out > 0:
        inner = kept[-INNER_FRAMES:]
        kept = [*kept[:OUTER_FRAMES], inner[0]._replace(left_out=left_out), *inner[1:]]
    return tuple(kept)


def _after_callers(frames: Sequence[StackFrame]) -> int:
    """Return the index where the endpoint begins: after the innermost frame of the runtime that calls endpoints."""
    begin = 0
    for at, frame in enumerate(frames):
        if frame.place.kind == RUNTIME and frame.place.file.endswith(ENDPOINT_RUNNERS):
            begin = at + 1
    return begin


def _cut_stop(frames: Sequence[StackFrame]) -> int:
    """Return the index where the debugger has taken over from user code; the length if it has not."""
    user = False
    for at, frame in enumerate(frames):
        place = frame.place
        if place.kind == USER:
            user = True
        elif user and is_debugger(place.file):
            while frames[at - 1].place.kind == RUNTIME:  # the function that `breakpoint()` calls
                at -= 1
            return at
    return len(frames)


# Take a snapshot of this process: its threads and its asyncio tasks as stacks.
#
# Runs in a rank, on the debugger's thread. The other threads keep running. It takes well below a millisecond for a few
# threads. Source lines are read once.

#: The maximum number of frames of one thread that are read, from the innermost one outwards.
DEEPEST = 20_000
_ORDER = (CODE, ENDPOINT, PROGRAM, OPERATION, TASK, THREAD)
_STOPPED = "stopped by the debugger"
_LOOPS = "asyncio.base_events"
#: The maximum number of variables of a frame that are reported, and the maximum length of a value (characters).
MOST_VALUES, VALUE_LENGTH = 12, 60
_MOST_ITEMS = 4
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_SELF = ("self", "cls")  # not reported: the function's name includes the class
_DULL = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)

_Raw = tuple[CodeType, int, int]
"""A frame: its code, the line, and the last instruction. Frames themselves would keep their variables alive."""


def snapshot(all_threads: bool = False, values: bool = False) -> StackSnapshot:
    """Return the stacks of this process, except that of the calling thread.

    Args:
        all_threads: include threads that run no user code.
        values: include the local variables of the innermost frame of user code, as text.
    """
    return _Reader(all_threads, values).read()


class _Thread:
    """A thread with its frames.

    Attributes:
        raw: its frames, the outermost first.
        step: the task whose step it runs; `step_at` is the index in `raw` where that begins.
        main: the identity of the task that its event loop runs for; `main_at` is the frame that waits for that task.
        values: local variables, if requested.
        operation: the tensor operation that it runs for a controller.
    """

    __slots__ = ("ident", "main", "main_at", "name", "operation", "raw", "step", "step_at", "values")

    def __init__(self, ident: int, name: str) -> None:
        self.ident = ident
        self.name = name
        self.raw: list[_Raw] = []
        self.step: TaskStack | None = None
        self.main = self.step_at = self.main_at = 0
        self.values: tuple[tuple[str, str], ...] = ()
        self.operation: RunningOperation | None = None


class _Reader:
    """One snapshot."""

    def __init__(self, all_threads: bool, values: bool) -> None:
        self._all = all_threads
        self._values = values
        self._frames: dict[tuple[CodeType, int], StackFrame] = {}
        self._by_thread: dict[int, Running] = {}
        self._by_task: dict[int, Running] = {}
        self._stops: dict[int, str] = {}

    def read(self) -> StackSnapshot:
        self._stops = _stops()
        for each in tool_runtime().endpoints_here():
            if each.task is None:
                self._by_thread[each.thread] = each
            else:
                self._by_task[id(each.task)] = each
        tasks = task_stacks()
        threads = self._threads(tasks)
        stacks: list[Stack] = []
        told: set[int] = set()
        loops = {thread.main: thread for thread in threads if thread.main}
        for task in tasks:
            if task.running is None:
                loop = loops.get(id(task.tasks[0]))
                found = self._of_task(task, loop)
                if found is not None:
                    stacks.append(found)
                    if loop is not None:
                        told.add(loop.ident)
        hidden = 0
        for thread in threads:
            if thread.ident in told and not self._all:
                continue
            found = self._of_thread(thread)
            if found is None:
                hidden += 1
            else:
                stacks.append(found)
        stacks.sort(key=lambda stack: (_ORDER.index(stack.kind), stack.name))
        return StackSnapshot(os.getpid(), tuple(stacks), hidden)

    # -- threads -------------------------------------------------------------------------------

    def _threads(self, tasks: Iterable[TaskStack]) -> list[_Thread]:
        me = threading.get_ident()
        steps = {id(task.running): task for task in tasks if task.running is not None}
        current = current_frames()
        known: dict[int, threading.Thread] = dict(getattr(threading, "_active", {}))  # enumerate() would take a lock
        found: list[_Thread] = []
        for ident, frame in current.items():
            if ident != me:
                thread = known.get(ident)
                found.append(self._walked(_Thread(ident, thread.name if thread is not None else ""), frame, steps))
        return found

    def _walked(self, thread: _Thread, frame: FrameType, steps: dict[int, TaskStack]) -> _Thread:
        """Read the frames of a thread, and the data needed with them."""
        raw = thread.raw
        at: FrameType | None = frame
        inner: FrameType | None = None
        while at is not None and len(raw) < DEEPEST:
            code = at.f_code
            if steps and id(at) in steps:
                thread.step, thread.step_at = steps[id(at)], len(raw)
            if code.co_name == "run_until_complete" and not thread.main and at.f_globals.get("__name__") == _LOOPS:
                thread.main, thread.main_at = id(at.f_locals.get("future")), len(raw)
            if self._values and inner is None and is_user_frame(at):
                inner = at
            if thread.operation is None:
                thread.operation = operation_on((at,))
            raw.append((code, at.f_lineno or 0, at.f_lasti))
            at = at.f_back
        raw.reverse()
        thread.step_at = len(raw) - 1 - thread.step_at
        thread.main_at = len(raw) - 1 - thread.main_at
        thread.values = local_values(inner)
        return thread

    def _of_thread(self, thread: _Thread) -> Stack | None:
        step = thread.step
        if step is not None and not has_user_code(self._made(_without_start(thread.raw[: thread.step_at]))):
            # The event loop of an actor or a thread: only the task that it runs matters.
            whole = [*self._of_links(step), *self._made(thread.raw[thread.step_at :])]
            return self._stack(whole, self._running(step), TASK, _task_name(step), thread.ident, thread.values)
        frames = self._made(_without_start(thread.raw))
        if thread.operation is not None:
            return self._of_operation(frames, thread, thread.operation)
        name = thread.name if is_ours(thread.name) and not has_user_code(frames) else thread_name(thread.name)
        return self._stack(frames, self._by_thread.get(thread.ident), THREAD, name, thread.ident, thread.values)

    def _of_operation(self, frames: list[StackFrame], thread: _Thread, operation: RunningOperation) -> Stack:
        state = self._stops.get(thread.ident, _STOPPED) if is_stopped(frames) else ""
        name = f"{operation.label}, stream {operation.stream}"
        issued = (operation.engine, operation.record)
        shown = folded(trimmed(frames, OPERATION))
        return Stack(OPERATION, name, shown, thread.ident, state, "", thread.values, issued)

    # -- tasks ---------------------------------------------------------------------------------

    def _of_task(self, task: TaskStack, loop: _Thread | None) -> Stack | None:
        """Return the stack of a waiting task.

        The task of a loop continues from the position where the loop was started.
        """
        frames = self._of_links(task)
        running = self._running(task)
        kind, name = TASK, _task_name(task)
        if loop is not None:
            before = self._made(_without_start(loop.raw[: loop.main_at + 1]))
            running = running or self._by_thread.get(loop.ident)
            if has_user_code(before):
                kind, name = THREAD, thread_name(loop.name)
            if kind == THREAD or running is not None:
                frames = [*before, *frames]
        inner = next((frame for frame in reversed(task.links) if is_user_frame(frame)), None) if self._values else None
        return self._stack(frames, running, kind, name, 0, local_values(inner))

    def _running(self, task: TaskStack) -> Running | None:
        """Return the endpoint that a task is part of."""
        return next((self._by_task[id(each)] for each in reversed(task.tasks) if id(each) in self._by_task), None)

    def _of_links(self, task: TaskStack) -> list[StackFrame]:
        return self._made([(frame.f_code, frame.f_lineno or 0, frame.f_lasti) for frame in task.links])

    # -- stacks --------------------------------------------------------------------------------

    def _stack(
        self,
        frames: list[StackFrame],
        running: Running | None,
        kind: str,
        name: str,
        ident: int,
        values: tuple[tuple[str, str], ...],
    ) -> Stack | None:
        """Build the stack of these frames; None if they are of no interest to the user."""
        user = has_user_code(frames)
        if running is not None and (user or not running.tool):
            kind, name = _owner_of(running)
        elif not user and not self._all:
            return None
        state = self._stops.get(ident, _STOPPED) if is_stopped(frames) else ""
        cell = running.cell if kind == ENDPOINT and running is not None else ""
        return Stack(kind, name, folded(trimmed(frames, kind)), ident, state, cell, values)

    # -- frames --------------------------------------------------------------------------------

    def _made(self, raw: Iterable[_Raw]) -> list[StackFrame]:
        return [self._frame(*each) for each in raw]

    def _frame(self, code: CodeType, line: int, instruction: int) -> StackFrame:
        made = self._frames.get((code, instruction))
        if made is None:
            file = code.co_filename
            kind = kind_of_code(code)
            place = SourceLocation(file, line, code.co_qualname, kind)
            if kind == USER:
                source, span = _source(code, line, instruction)
                made = StackFrame(place, source, span)
            else:
                made = StackFrame(place)
            self._frames[(code, instruction)] = made
        return made


def _owner_of(running: Running) -> tuple[str, str]:
    """Return the kind and the name of a stack, from what it runs."""
    if running.tool:
        return CODE, ""
    return (ENDPOINT if running.actor else PROGRAM), running.label


def _stops() -> dict[int, str]:
    """Return why threads are stopped, from the tracer of this process."""
    debugger = sys.modules.get("monarch_kernel.debugger.rank.rank_debugger")
    engine = debugger.existing_tracer() if debugger is not None else None
    if engine is None:
        return {}
    return {stop.thread: f"stopped: {_why(stop)}" for stop in engine.stops()}


def _why(stop: Any) -> str:
    told = f"breakpoint {stop.breakpoint}" if stop.reason == "breakpoint" else stop.reason
    return f"{told}, {stop.text}" if stop.text else told


def _without_start(raw: list[_Raw]) -> list[_Raw]:
    """Remove the start of the process from a thread's frames."""
    code = raw[0][0]
    return raw[1:] if (code.co_filename, code.co_name) == ("<string>", "<module>") else raw


def _source(code: CodeType, line: int, instruction: int) -> tuple[str, tuple[int, int]]:
    """Return the source line of an instruction, and its columns that are executing."""
    import linecache

    text = linecache.getline(code.co_filename, line)
    source = source_line(code.co_filename, line)
    position = next(islice(code.co_positions(), max(0, instruction) // 2, None), None)
    if not source or position is None:
        return source, (0, 0)
    first, last, start, end = position
    if first != line or start is None or end is None:
        return source, (0, 0)
    raw = text.encode()
    indent = len(text) - len(text.lstrip())
    begin = len(raw[:start].decode(errors="replace")) - indent
    stop = len(raw[:end].decode(errors="replace")) - indent if last == line else len(source)
    if begin < 0 or stop <= begin or (begin == 0 and stop >= len(source)):
        return source, (0, 0)
    return source, (begin, min(stop, len(source)))


def _task_name(stack: TaskStack) -> str:
    task: Any = stack.tasks[0]
    name = str(task.get_name())
    if name.startswith("Task-") and name[5:].isdigit():
        return str(getattr(task.get_coro(), "__qualname__", name))
    return name


def local_values(frame: FrameType | None) -> tuple[tuple[str, str], ...]:
    """Return the variables of a frame as names and texts; for a module or a cell, those that its code mentions.

    No user code runs: the text never contains the `repr` of an instance of a user's class.
    """
    if frame is None:
        return ()
    code = frame.f_code
    values: dict[str, object] = frame.f_locals
    names = [*code.co_varnames, *code.co_cellvars, *code.co_freevars] if code.co_flags & 1 else [*code.co_names]
    told: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        if name in values and not name.startswith("__") and name not in _SELF and not isinstance(values[name], _DULL):
            told.append((name, value_text(values[name])))
    return tuple(told[:MOST_VALUES])


def value_text(value: object, depth: int = 2) -> str:
    """Format a value as text of at most `VALUE_LENGTH` characters."""
    return _cut_value(_value_text(value, depth))


def _value_text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return repr(value if len(value) <= VALUE_LENGTH else value[:VALUE_LENGTH])
    if kind is int and value.bit_length() > 4 * VALUE_LENGTH:
        return f"an int of {value.bit_length()} bits"
    if kind in _ATOMS:
        return repr(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _container_text(value, depth)
    shape = _array_text(value)
    return shape or f"<{kind.__qualname__}>"


def _container_text(value: Any, depth: int) -> str:
    kind, size = type(value), len(value)
    if not size:
        return repr(value)
    if not depth:
        return f"<{kind.__name__} of {size}>"
    try:
        items = list(value.items() if kind is dict else value)[:_MOST_ITEMS]
    except RuntimeError:  # its thread has changed it during the copy
        return f"<{kind.__name__} of {size}>"
    more = ", …" if size > len(items) else ""
    if kind is dict:
        return "{" + ", ".join(f"{_value_text(k, 0)}: {_value_text(v, depth - 1)}" for k, v in items) + more + "}"
    inside = ", ".join(_value_text(item, depth - 1) for item in items) + more
    if kind is tuple:
        return f"({inside}{',' if size == 1 else ''})"
    return f"[{inside}]" if kind is list else f"{{{inside}}}"


def _array_text(value: Any) -> str:
    """Format an array or a tensor: `Tensor float32 [3, 4] cuda:0`; '' for anything else."""
    described = getattr(type(value), "_short_form_", None)
    if callable(described):  # a handle of a tensor on a mesh
        return str(described(value))
    module = type(value).__module__.partition(".")[0]
    if module not in ("torch", "numpy", "jax", "jaxlib"):
        return ""
    try:
        shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
        device = str(getattr(value, "device", ""))
        where = "" if device in ("", "cpu") else f" {device}"
        return f"<{type(value).__name__} {dtype} [{', '.join(map(str, shape))}]{where}>"
    except Exception:  # not an array, or one whose shape cannot be read
        return ""


def _cut_value(text: str) -> str:
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 1]}…"


# Merge several snapshots of a process; stacks end at the first frame that changed.
#
# Ranks that compute are at another line in each sample. The part that their stacks share over some seconds is the same
# for all of them, so they fold into one branch. A rank that hangs stands out, because its whole stack stays the same.
# A thread that uses the processor is never reported to hang: a loop may be sampled at the same line each time, because
# it releases the GIL there.

#: The time between samples (seconds), and the maximum number of samples.
PERIOD, MOST = 0.05, 100
#: A thread that uses the processor for more than this share of the time computes.
BUSY = 0.05
MOVES = "moves"


def sample(seconds: float, all_threads: bool = False, values: bool = False) -> StackSnapshot:
    """Take a snapshot of this process over this many seconds."""
    period = max(PERIOD, seconds / MOST)
    end = time.monotonic() + seconds
    before = _processor_seconds()
    samples = [snapshot(all_threads, values)]
    while time.monotonic() < end:
        time.sleep(min(period, max(0.0, end - time.monotonic())))
        samples.append(snapshot(all_threads, values))
    used = {thread: now - before.get(thread, 0.0) for thread, now in _processor_seconds().items()}
    return combined(samples, seconds, {thread for thread, time_used in used.items() if time_used > BUSY * seconds})


def combined(samples: Sequence[StackSnapshot], seconds: float, busy: Container[int] = ()) -> StackSnapshot:
    """Combine several samples of a process, the latest last. Pure.

    Args:
        samples: the snapshots.
        seconds: the time over which they were taken.
        busy: the threads that have used the processor during that time.
    """
    known = [_by_owner(one) for one in samples]
    stacks: list[Stack] = []
    for owner, stack in known[-1].items():
        seen = [each[owner] for each in known if owner in each]
        frames, moved = _common([each.frames for each in seen])
        if moved or len(seen) < len(known):
            stacks.append(stack._replace(frames=frames, state=stack.state or MOVES, values=()))
        else:
            still = "computes at the same place" if stack.thread in busy else f"has not moved for {seconds:g} s"
            stacks.append(stack._replace(state=stack.state or still))
    return samples[-1]._replace(stacks=tuple(stacks))


def _by_owner(taken: StackSnapshot) -> dict[Hashable, Stack]:
    """Index the stacks of a snapshot by a key that is stable over time: the thread, or the task's name and number."""
    found: dict[Hashable, Stack] = {}
    counts: dict[Hashable, int] = {}
    for stack in taken.stacks:
        # An endpoint that has begun since then is another one, even if it runs on the same thread.
        kind: Hashable = (stack.kind, stack.name, stack.thread)
        counts[kind] = counts.get(kind, 0) + 1
        found[(kind, counts[kind])] = stack
    return found


def _common(all_frames: Sequence[tuple[StackFrame, ...]]) -> tuple[tuple[StackFrame, ...], bool]:
    """Return the outer frames that all samples have in common, and whether the samples differ further in.

    If the innermost common function went from line to line, its frame has no line.
    """
    last = all_frames[-1]
    shortest = min(map(len, all_frames))
    for at in range(shortest):
        places = {frames[at].place for frames in all_frames}
        if len(places) > 1:
            place = last[at].place
            functions = {(each.file, each.name) for each in places}
            end = (StackFrame(place._replace(line=0)),) if len(functions) == 1 else ()
            return (*last[:at], *end), True
    return last[:shortest], len({len(frames) for frames in all_frames}) > 1


def _processor_seconds() -> dict[int, float]:
    """Return the processor time of each thread so far, by its identifier."""
    tick = os.sysconf("SC_CLK_TCK")
    main = threading.main_thread()
    found: dict[int, float] = {}
    known: dict[int, threading.Thread] = dict(getattr(threading, "_active", {}))  # enumerate() would take a lock
    for ident, thread in known.items():
        # After a fork, Python still reports the id that the main thread had in the parent.
        number = os.getpid() if thread is main else thread.native_id
        try:
            with open(f"/proc/self/task/{number}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # the thread has ended
            continue
        found[ident] = (int(fields[11]) + int(fields[12])) / tick
    return found
