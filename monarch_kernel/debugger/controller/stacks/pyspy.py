"""Convert py-spy's JSON dump of a rank to a snapshot, like a rank's own. Pure, except that it reads source lines."""

from __future__ import annotations

import json
import os
from typing import TypedDict, cast

from monarch_kernel.debugger.model.stops import CODE, ENDPOINT, NATIVE, TASK, THREAD, Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.rank.hang import C10D
from monarch_kernel.debugger.rank.stacks import (
    folded,
    has_user_code,
    is_ours,
    is_stopped,
    kind_by_frames,
    thread_name,
    trimmed,
)
from monarch_kernel.debugger.source_locations import USER, SourceLocation, is_user, kind_of
from monarch_kernel.display.quantities import source_line

#: The state of a stack whose thread blocks all others.
HOLDS_LOCK = "holds the interpreter lock"


class SpiedLocal(TypedDict, total=False):
    """A local variable of a frame. A dump contains variables only on request."""

    name: str
    repr: str | None


class SpiedFrame(TypedDict, total=False):
    """A frame of a dump. Native frames have a module instead of a line."""

    name: str
    filename: str
    line: int
    module: str | None
    locals: list[SpiedLocal] | None


class SpiedThread(TypedDict, total=False):
    """A thread of a dump. The innermost frame comes first."""

    thread_id: int
    os_thread_id: int | None
    thread_name: str | None
    owns_gil: bool
    frames: list[SpiedFrame]


def read_snapshot(dump: str, pid: int, note: str, all_threads: bool = False) -> StackSnapshot:
    """Convert a dump of `py-spy --json --full-filenames` to a snapshot.

    Raises:
        ValueError: `dump` is not such a dump.
    """
    stacks: list[Stack] = []
    hidden = 0
    for thread in threads_of(dump):
        frames = _frames(thread)
        # Thread names are unknown if the process has not imported `threading`.
        name = str(thread.get("thread_name") or ("MainThread" if thread.get("os_thread_id") == pid else ""))
        user = has_user_code(frames)
        if not user and not all_threads:
            hidden += 1
            continue
        kind = kind_by_frames(frames) if user else ""
        shown = trimmed(frames, kind or THREAD)
        label = "" if kind == CODE else _first_name(shown) if kind == ENDPOINT else thread_name(name)
        if is_ours(name) and not user:
            label = name
        state = "stopped by the debugger" if is_stopped(frames) else HOLDS_LOCK if thread.get("owns_gil") else ""
        stacks.append(Stack(kind or THREAD, label, folded(shown), int(thread.get("thread_id") or 0), state))
    return StackSnapshot(pid, tuple(stacks), hidden, True, note)


def with_native(snapshot: StackSnapshot, dump: str) -> StackSnapshot:
    """Add the frames of native code that py-spy has read with `--native` to a rank's own snapshot.

    Raises:
        ValueError: `dump` is not such a dump.
    """
    threads = {int(thread.get("thread_id") or 0): thread for thread in threads_of(dump)}
    stacks: list[Stack] = []
    for stack in snapshot.stacks:
        thread = threads.get(stack.thread)
        if stack.thread and thread is not None:
            known = {_key(frame): frame._replace(times=1, left_out=0) for frame in stack.frames}
            frames = trimmed(_frames(thread), stack.kind if stack.kind != TASK else THREAD)
            frames = tuple(known.get(_key(frame), frame) for frame in frames)
            stack = stack._replace(frames=folded(frames))
        stacks.append(stack)
    return snapshot._replace(stacks=tuple(stacks))


def threads_of(dump: str) -> list[SpiedThread]:
    """Parse the threads of a dump.

    Raises:
        ValueError: `dump` is not such a dump.
    """
    try:
        threads = json.loads(dump)
    except ValueError as error:
        raise ValueError(f"py-spy's dump cannot be read: {error}") from None
    if not isinstance(threads, list):
        raise ValueError("py-spy's dump cannot be read: it is no list of threads")
    return cast("list[SpiedThread]", threads)


def _frames(thread: SpiedThread) -> list[StackFrame]:
    """Return the frames of a thread, outermost first."""
    frames = [_frame(frame) for frame in reversed(thread.get("frames") or ())]
    start = next((at for at, frame in enumerate(frames) if frame.place.kind != NATIVE), 0)
    while frames[start:] and (frames[start].place.file, frames[start].place.name) == ("<string>", "<module>"):
        start += 1  # the start of the process, which py-spy sometimes reports twice
    return frames[start:]


def _frame(frame: SpiedFrame) -> StackFrame:
    file, name, line = str(frame.get("filename") or ""), str(frame.get("name") or "?"), int(frame.get("line") or 0)
    module = frame.get("module")
    if module is not None:
        # Addresses differ from process to process, and mean nothing to the reader.
        return StackFrame(SourceLocation(str(module), 0, "?" if name.startswith("0x") else name, NATIVE))
    kind = kind_of(file)
    source = source_line(file, line) if kind == USER and (os.path.exists(file) or not os.path.isabs(file)) else ""
    return StackFrame(SourceLocation(file, line, name, kind), source or _cell_source(file, line, kind))


def _cell_source(file: str, line: int, kind: str) -> str:
    """Return a line of a cell of this notebook, whose source is only in `linecache`."""
    import linecache

    return source_line(file, line) if kind == USER and file in linecache.cache else ""


def _first_name(frames: tuple[StackFrame, ...]) -> str:
    return frames[0].place.name if frames else ""


def _key(frame: StackFrame) -> tuple[str, int, str]:
    return (frame.place.file, frame.place.line, frame.place.name)


# Determine what the threads of a process are doing from frames that were read from outside. Pure.


def user_location(thread: SpiedThread) -> SourceLocation | None:
    """The innermost line of user code of a thread."""
    return next((location_of_spied(frame) for frame in thread.get("frames", ()) if is_user_spied(frame)), None)


def in_collective(thread: SpiedThread) -> bool:
    """Whether a thread is in a call of `torch.distributed`."""
    return any(file_of(frame).endswith(C10D) for frame in thread.get("frames", ()))


def is_native(frame: SpiedFrame) -> bool:
    """Whether a frame is of native code."""
    return frame.get("module") is not None


def is_user_spied(frame: SpiedFrame) -> bool:
    """Whether a frame runs user code."""
    file = file_of(frame)
    return (
        bool(file) and not is_native(frame) and is_user(file) and (file, frame.get("name")) != ("<string>", "<module>")
    )


def location_of_spied(frame: SpiedFrame) -> SourceLocation:
    """Where a frame is."""
    file = file_of(frame)
    return SourceLocation(file, int(frame.get("line") or 0), frame.get("name", ""), kind_of(file))


def file_of(frame: SpiedFrame) -> str:
    """The file of a frame; "" if unknown."""
    return frame.get("filename") or ""
