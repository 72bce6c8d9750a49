"""Run the pool's part in each rank: one actor runs functions, and another interrupts them."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.protocol.faults import Fault, capture
from monarch_kernel.thread_frames import raise_in_thread


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """Replaces the value of an item whose function raised, so that the rest of its chunk continues."""

    fault: Fault


class TaskInterrupted(Exception):
    """A task was interrupted by `cancel` of its map, by its future, or by Ctrl-C."""


class _Running:
    """The task that `PoolExecutor` is running in this process, for `Control`."""

    lock = threading.Lock()
    thread: ClassVar[int] = 0  # the thread that runs user code
    task: ClassVar[int] = 0
    cancelled: ClassVar[set[int]] = set()
    withdrawn: ClassVar[Counter[int]] = Counter()  # calls that are to be dropped, by task: it may have come again
    begun: ClassVar[deque[int]] = deque(maxlen=64)  # the last tasks that began


class PoolExecutor(Actor):
    """Runs functions, one at a time."""

    __tool__ = True
    #: The endpoints that return values of the program. The others return data.
    __values__ = frozenset({"run", "run_items", "take"})

    def __init__(self) -> None:
        self._functions: dict[int, Callable[..., object]] = {}

    @endpoint
    def define(self, key: int, function: Callable[..., object]) -> None:
        """Keep a function for many calls, so that the pool sends it only once."""
        self._functions[key] = function

    @endpoint
    def forget(self, key: int) -> None:
        """Drop a function."""
        self._functions.pop(key, None)

    @endpoint
    def run(
        self, task: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        """Run a function that arrives with the call."""
        return _run(task, function, args, kwargs)

    @endpoint
    def run_items(self, task: int, key: int, first: int, items: Sequence[tuple[object, ...]], keep: bool) -> list[Any]:
        """Run a defined function on each item; `first` is the number of the first item.

        Args:
            keep: if the function raises for an item, return an `ItemFailure` for it and continue; otherwise raise.
        """
        function = self._functions[key]
        values: list[object] = []
        for number, args in enumerate(items, first):
            try:
                values.append(_run(task, function, args, {}))
            except BaseException as error:
                error.add_note(f"item {number} of the map: {_short(args)}")
                if not keep or isinstance(error, TaskInterrupted) or not isinstance(error, Exception):
                    raise
                values.append(ItemFailure(capture(error)))
        return values

    # -- data ------------------------------------------------------------------------------------

    @endpoint
    def put(self, name: str, value: Any) -> int:
        """Set a variable of this rank's `__main__`. Return the length of the value."""
        setattr(sys.modules["__main__"], name, value)
        return len(value)

    @endpoint
    def take(self, name: str) -> object:
        """Return the value of a variable of this rank's `__main__`."""
        try:
            return getattr(sys.modules["__main__"], name)
        except AttributeError:
            raise NameError(f"there is no variable {name!r} on this rank") from None


class Control(Actor):
    """Interrupts tasks, on a separate thread."""

    __tool__ = True

    @endpoint
    def cancel(self, tasks: list[int]) -> None:
        """Raise KeyboardInterrupt in these tasks now, or as soon as they start."""
        with _Running.lock:
            _Running.cancelled.update(tasks)
            if _Running.thread and _Running.task in _Running.cancelled:
                raise_in_thread(_Running.thread, KeyboardInterrupt)

    @endpoint
    def withdraw(self, task: int) -> bool:
        """Drop a task that has not begun; return whether that is so."""
        with _Running.lock:
            if task in _Running.begun:
                return False
            _Running.withdrawn[task] += 1
            return True


def _run(task: int, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    me = threading.get_ident()
    try:
        try:
            with _Running.lock:
                if _Running.withdrawn[task]:
                    _Running.withdrawn[task] -= 1
                    raise KeyboardInterrupt
                del _Running.withdrawn[task]
                if task in _Running.cancelled:
                    raise KeyboardInterrupt
                if _Running.task != task:
                    _Running.begun.append(task)
                _Running.thread, _Running.task = me, task
            return function(*args, **kwargs)
        finally:
            _leave(me)
    except KeyboardInterrupt as error:  # this would end the actor
        raise TaskInterrupted("the task was interrupted").with_traceback(error.__traceback__) from None


def _leave(thread: int) -> None:
    """Drop a pending interrupt, which must not hit the code after user code."""
    while True:
        try:
            with _Running.lock:
                _Running.thread = 0
                raise_in_thread(thread, None)
            return
        except KeyboardInterrupt:
            continue


def _short(args: tuple[object, ...]) -> str:
    try:
        text = ", ".join(map(repr, args))
    except Exception:  # user code
        return "(it has no repr)"
    return text if len(text) <= 120 else f"{text[:119]}…"
