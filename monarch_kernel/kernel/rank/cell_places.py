"""Cells that run elsewhere in a program than on their own thread: in a stopped frame, or between two training steps."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.process import existing_engine
from monarch_kernel.debugger.rank.stopping.expressions import names_of
from monarch_kernel.engines.interface import ActorHere
from monarch_kernel.kernel.cell import CellPlace

T = TypeVar("T")
Names = dict[str, Any]

#: How often a cell that waits for a step looks whether it was interrupted (seconds).
LOOK = 0.1
#: A cell in a stopped frame may take as long as it likes (seconds).
_ENDLESS = 1e6


class PlaceError(LookupError):
    """There is no such place in this process now; the message says why."""


def run_at(place: CellPlace, me: ActorHere, work: Callable[[Names | None], T]) -> T:
    """Call ``work(names)`` at a place: ``names`` are the globals there, or None for those of cells.

    Raises:
        PlaceError: there is no such place.
        KeyboardInterrupt: the cell was interrupted while it waited for its place.
    """
    if place.step:
        return _at_step(place.step, me, lambda: work(_names_of(place)))
    if place.frame >= 0:
        return _in_frame(place.frame, me, work)
    return work(_names_of(place))


def _names_of(place: CellPlace) -> Names | None:
    if not place.module:
        return None
    module = sys.modules.get(place.module)
    if module is None:
        raise PlaceError(f"module {place.module!r} is not imported in this process")
    return vars(module)


def _in_frame(number: int, me: ActorHere, work: Callable[[Names | None], T]) -> T:
    engine = existing_engine()
    stops = [stop for stop in engine.stops() if stop.thread] if engine is not None else []
    if engine is None or not stops:
        raise PlaceError("this rank is not stopped, so it has no frame to run a cell in: %mesh debug list shows stops")
    stop = stops[-1]
    extra: Names = {}

    def there(frame: Any) -> T:
        with me.borrowing(), names_of(frame, extra) as names:
            return contextvars.copy_context().run(work, names)

    try:
        return engine.call(stop.id, number, there, _ENDLESS)
    except IndexError as error:
        raise PlaceError(str(error)) from None


class _Waiting:
    """A cell that waits for a step."""

    def __init__(self, me: ActorHere, work: Callable[[], Any]) -> None:
        self.me = me
        self.work = work
        self.begun = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it on the calling thread, which is the program's: nothing that it raises gets there."""
        self.begun = True
        try:
            with self.me.borrowing():
                # In a context of its own: what the program writes later is not the cell's.
                self.result = contextvars.copy_context().run(self.work)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class StepGate:
    """Runs cells right after an optimizer step of the program.

    Its hook stays once a cell has needed it: removing one while a step calls hooks would fail that step.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._hooked = False
        self._lock = threading.Lock()

    def add(self, key: str, waiting: _Waiting) -> None:
        """Let a cell wait for the point ``key``.

        Raises:
            PlaceError: the program has no optimizers yet.
        """
        optimizers: Any = sys.modules.get("torch.optim.optimizer")
        if optimizers is None:
            raise PlaceError("the program has not imported torch.optim, so there is no step to wait for")
        with self._lock:
            self._waiting[key] = waiting
            if not self._hooked:
                self._hooked = True
                optimizers.register_optimizer_step_post_hook(self._after_step)

    def drop(self, key: str) -> bool:
        """Let a cell wait no longer; returns whether it has not begun."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
        return waiting is not None and not waiting.begun

    def _after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        try:
            for key, waiting in list(self._waiting.items()):
                if not waiting.begun and common_point.is_reached(key) and self.drop(key):
                    waiting.run()
        except BaseException:  # nothing of a tool gets into the program
            pass


_gate = StepGate()


def _at_step(key: str, me: ActorHere, work: Callable[[], T]) -> T:
    waiting = _Waiting(me, work)
    _gate.add(key, waiting)
    try:
        while not waiting.done.wait(LOOK):
            if me.stopping and _gate.drop(key):
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if _gate.drop(key):
            raise
        waiting.done.wait()  # it has begun: its own interrupt ends it
    if waiting.error is not None:
        raise waiting.error
    return waiting.result
