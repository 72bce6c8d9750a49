"""Read the asyncio tasks of this process as stacks, each from its outermost awaiter to its awaitable.

A task that another one awaits has no separate stack: its frames follow those of its awaiter. A task inside `gather` is
therefore listed below the caller of `gather`. The loops of other threads are read without stopping them, so tasks that
change meanwhile are left out. It imports only the standard library: tests run it with each version of Python.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: Limits for following chains of awaited coroutines, and of tasks that wait for tasks.
_LONGEST_CHAIN, _LONGEST_PATH = 500, 100


class TaskStack:
    """One path of tasks that wait for each other, down to a task that waits for no other.

    Attributes:
        tasks: the tasks on the path, the outermost first.
        links: frames from the outermost to the innermost, of all tasks on the path.
        running: the frame of the innermost task's coroutine, if that task is running; its thread has the rest.
    """

    __slots__ = ("links", "running", "tasks")

    def __init__(self, tasks: list[object], links: list[FrameType], running: FrameType | None = None) -> None:
        self.tasks = tasks
        self.links = links
        self.running = running


def task_stacks() -> list[TaskStack]:
    """Return the stacks of all unfinished tasks of all loops of this process."""
    tasks = list(_all_tasks())
    waits = {id(task): _waits_for(task) for task in tasks}
    known = {id(task): task for task in tasks}
    awaited = {id(other) for others in waits.values() for other in others if id(other) in known}
    found: list[TaskStack] = []
    seen: set[int] = set()
    roots = [task for task in tasks if id(task) not in awaited]
    # Tasks that wait for each other have no root. Each cycle begins at an arbitrary task.
    for task in (*roots, *tasks):
        if id(task) not in seen:
            _follow([task], [], waits, seen, found)
    return found


def _follow(
    path: list[Any], before: list[FrameType], waits: dict[int, list[object]], seen: set[int], found: list[TaskStack]
) -> None:
    task = path[-1]
    seen.add(id(task))
    own, running = _chain(task.get_coro())
    links = before + own
    others = [other for other in waits[id(task)] if id(other) not in seen and id(other) in waits]
    if running is not None or not others or len(links) > _LONGEST_CHAIN or len(path) > _LONGEST_PATH:
        found.append(TaskStack(path, links, running))
        return
    for other in others:
        if id(other) not in seen:
            _follow([*path, other], links, waits, seen, found)


def _all_tasks() -> Iterator[object]:
    module = sys.modules.get("asyncio.tasks")
    if module is None:
        return
    # Python 3.11 has one set; 3.12 keeps eagerly started tasks separately.
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):
        held = getattr(module, name, ())
        for _attempt in range(100):
            try:
                tasks = list(held)
            except RuntimeError:  # another thread has just created a task
                continue
            yield from (task for task in tasks if not task.done())
            break


def _waits_for(task: Any) -> list[object]:
    """Return the tasks that a task waits for."""
    waiter: Any = getattr(task, "_fut_waiter", None)
    for _step in range(_LONGEST_CHAIN):
        if waiter is None or waiter.done():
            return []
        children = getattr(waiter, "_children", None)  # of gather()
        if children is None and hasattr(waiter, "get_coro"):
            children = [waiter]
        if children is not None:
            return [child for child in list(children) if not child.done()]
        inner = _shielded(waiter)
        if inner is None:
            break
        waiter = inner
    frames, _running = _chain(task.get_coro())
    return _group(frames[-1]) if frames else []


def _shielded(future: object) -> object:
    """Return the future that `shield()` protects, if this is the future that it returned."""
    for callback, *_context in getattr(future, "_callbacks", None) or ():
        names = getattr(getattr(callback, "__code__", None), "co_freevars", ())
        if "inner" in names and callback.__module__ == "asyncio.tasks":
            return callback.__closure__[names.index("inner")].cell_contents
    return None


def _group(frame: FrameType) -> list[object]:
    """Return the tasks that `wait()`, `wait_for()` or the end of a task group waits for. Their future omits them."""
    module = frame.f_globals.get("__name__")
    names: dict[str, object] = frame.f_locals
    if module == "asyncio.taskgroups":
        tasks: Any = getattr(names.get("self"), "_tasks", ())
    elif module == "asyncio.tasks":
        tasks = names.get("fs") or [names.get("fut")]
    else:
        return []
    return [task for task in list(tasks) if hasattr(task, "get_coro") and not task.done()]


def _chain(coroutine: object) -> tuple[list[FrameType], FrameType | None]:
    """Return the frames of a coroutine and its awaitables, and the last of these frames if it is running."""
    frames: list[FrameType] = []
    at = coroutine
    for _step in range(_LONGEST_CHAIN):
        frame, following, running = _look(at)
        if frame is None:
            break
        if running:
            return frames, frame
        frames.append(frame)
        if following is None:
            following = _adapted(frame)
        if following is None:
            break
        at = following
    return frames, None


def _look(at: object) -> tuple[FrameType | None, object, bool]:
    """Return the frame of a coroutine or (asynchronous) generator, its awaitable, and whether it is running."""
    for prefix, following in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        frame = getattr(at, f"{prefix}_frame", None)
        if frame is not None:
            # An asynchronous generator counts as running even while it waits. Its awaiter has the correct state.
            running = prefix != "ag" and bool(getattr(at, f"{prefix}_running", False))
            return frame, getattr(at, following, None), running
    if type(at).__name__ in _WRAPPERS:  # they do not expose the object that they step, but refer to it
        for held in gc.get_referents(at):
            if type(held).__name__ in ("coroutine", "async_generator", *_WRAPPERS):
                return _look(held)
    return None, None, False


_WRAPPERS = ("async_generator_asend", "async_generator_athrow", "anext_awaitable", "coroutine_wrapper")


def _adapted(frame: FrameType) -> object:
    """Return the coroutine that a generator of this package steps (see `runtime.actor.execution.interruptible`)."""
    if frame.f_code.co_name != "__await__" or frame.f_globals.get("__name__") != _STEPPING:
        return None
    return frame.f_locals.get("coroutine")


_STEPPING = "monarch_kernel.runtime.actor.execution.async_instance"
