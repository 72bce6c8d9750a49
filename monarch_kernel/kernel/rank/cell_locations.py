"""Run cells outside the usual thread: in a stopped frame, after an optimizer step, or before a collective."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.rank_debugger import existing_tracer, stop_tracer
from monarch_kernel.debugger.rank.stopping.expressions import names_of
from monarch_kernel.engines.interface import ActorHere
from monarch_kernel.kernel.cell import CellLocation

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
Names = dict[str, object]

#: The interval at which a cell that waits for a step checks for an interrupt (seconds).
LOOK = 0.1
#: The time for a cell to begin to wait (seconds), and the number of points for which this is recorded.
BEGIN, _MOST_TOLD = 8.0, 64
#: The time limit of a cell in a stopped frame: practically none (seconds).
_ENDLESS = 1e6


class CellLocationError(LookupError):
    """The requested location does not exist in this process now. The message has the reason."""


def run_at(place: CellLocation, me: ActorHere, work: Callable[[Names | None], T]) -> T:
    """Call ``work(names)`` at a location: ``names`` are the globals there, or None for those of cells.

    Raises:
        CellLocationError: the location does not exist.
        KeyboardInterrupt: the cell was interrupted while it waited for its location.
    """
    if place.step:
        return _at_point(place, me, lambda: work(_names_of(place)))
    if place.frame >= 0:
        return _in_frame(place.frame, me, work)
    return work(_names_of(place))


def _names_of(place: CellLocation) -> Names | None:
    if not place.module:
        return None
    module = sys.modules.get(place.module)
    if module is None:
        raise CellLocationError(f"module {place.module!r} is not imported in this process")
    return vars(module)


def _in_frame(number: int, me: ActorHere, work: Callable[[Names | None], T]) -> T:
    engine = existing_tracer()
    stops = [stop for stop in engine.stops() if stop.thread] if engine is not None else []
    if engine is None or not stops:
        raise CellLocationError(
            "this rank is not stopped, so it has no frame to run a cell in: %mesh debug list shows stops"
        )
    stop = stops[-1]
    extra: Names = {}

    def there(frame: FrameType) -> T:
        with me.borrowing(), names_of(frame, extra) as names:
            return contextvars.copy_context().run(work, names)

    try:
        return engine.call(stop.id, number, there, _ENDLESS)
    except IndexError as error:
        raise CellLocationError(str(error)) from None


class _Waiting:
    """A cell that waits for a step."""

    def __init__(self, me: ActorHere, work: Callable[[], object]) -> None:
        self.me = me
        self.work = work
        self.begun = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the cell on the calling thread of the program. No exception reaches the program."""
        self.begun = True
        try:
            with self.me.borrowing():
                # A separate context: later output of the program does not belong to the cell.
                self.result = contextvars.copy_context().run(self.work)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class _Gate:
    """Cells that wait until the program reaches a point."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._lock = threading.Lock()

    def _add(self, key: str, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting[key] = waiting

    def drop(self, key: str) -> bool:
        """Remove a waiting cell. Return whether it had not begun."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
        return waiting is not None and not waiting.begun

    def _run(self, key: str) -> None:
        """Run a cell on the calling thread of the program."""
        waiting = self._waiting.get(key)
        if waiting is not None and self.drop(key):
            waiting.run()


class StepGate(_Gate):
    """Runs cells right after an optimizer step of the program.

    The hook is never removed once a cell has needed it, because removing it while a step calls hooks would fail that
    step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooked = False

    @contextmanager
    def open(self, key: str, waiting: _Waiting) -> Generator[None]:
        """Register a cell to wait for the point ``key``.

        Raises:
            CellLocationError: the program has no optimizers yet.
        """
        optimizers = sys.modules.get("torch.optim.optimizer")
        if optimizers is None:
            raise CellLocationError(
                "the program has not imported torch.optim, so there is no step to wait for; --at-collective waits for "
                "a collective"
            )
        self._add(key, waiting)
        with self._lock:
            if not self._hooked:
                self._hooked = True
                optimizers.register_optimizer_step_post_hook(self._after_step)
        yield

    def _after_step(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        try:
            for key, waiting in list(self._waiting.items()):
                if not waiting.begun and common_point.is_reached(key):
                    self._run(key)
        except BaseException:  # no exception of a tool reaches the program
            pass


class CollectiveGate(_Gate):
    """Runs cells right before a collective that the program calls, where a breakpoint would stop it.

    It needs no optimizer and also works in the middle of a step. Collectives issued by C++ code (DDP, compiled code)
    cannot be intercepted, but are counted. The cell then runs at the next collective issued by Python code.
    """

    @contextmanager
    def open(self, key: str, waiting: _Waiting) -> Generator[None]:
        """Register a cell to wait for the point ``key``.

        Raises:
            CellLocationError: the program has no process group, or this PyTorch version has no hook for collectives.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            raise CellLocationError("the program has no process group (yet), so there is no collective to wait for")
        code = _code_of_collectives()
        self._add(key, waiting)
        engine = stop_tracer()
        engine.call_at(key, code, lambda: self._run(key))
        try:
            yield
        finally:
            engine.drop_call(key)


def _code_of_collectives() -> CodeType:
    """Return the code of the function that PyTorch wraps around each of its collectives."""
    logger = sys.modules.get("torch.distributed.c10d_logger")
    around = getattr(logger, "_exception_logger", None)
    if around is not None:
        for each in around.__code__.co_consts:
            if isinstance(each, CodeType):
                return each
    raise CellLocationError(
        "this version of PyTorch has no function around its collectives; --at-step waits for a step"
    )


_steps, _collectives = StepGate(), CollectiveGate()
#: By point: set when its cell waits there or never will. Holds the latest points.
_told: OrderedDict[str, threading.Event] = OrderedDict()
_told_lock = threading.Lock()


def _told_of(point: str) -> threading.Event:
    with _told_lock:
        told = _told.setdefault(point, threading.Event())
        while len(_told) > _MOST_TOLD:
            _told.popitem(last=False)
        return told


def waits(point: str) -> bool:
    """Wait until the cell of this point waits there, before the point is chosen. Return whether it will wait."""
    return not _told_of(point).wait(BEGIN) or common_point.report(point) is not None


def _at_point(place: CellLocation, me: ActorHere, work: Callable[[], T]) -> T:
    key, waiting = place.step, _Waiting(me, work)
    gate = _collectives if place.collective else _steps
    told = _told_of(key)
    with ExitStack() as open_gate:
        open_gate.callback(common_point.drop, key)
        try:
            with common_point.opening([key]):
                open_gate.enter_context(gate.open(key, waiting))
        finally:
            told.set()
        try:
            while not waiting.done.wait(LOOK):
                if me.stopping and gate.drop(key):
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if gate.drop(key):
                raise
            waiting.done.wait()  # it has begun, so its own interrupt ends it
    if waiting.error is not None:
        raise waiting.error
    return waiting.result
