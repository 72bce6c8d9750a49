"""Hold the debugger of one process: its tracer, and the hub in the controller that receives its stops.

The debug agent or the first `breakpoint()` loads it; a rank loads none of it before.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import cloudpickle

from monarch_kernel import environment
from monarch_kernel.actor import Actor, Extent, Point, endpoint
from monarch_kernel.debugger.rank import common_point
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import failed_by_peer, failures, on_failure
from monarch_kernel.subscriptions import Subscription
from monarch_kernel.workers import client_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch_kernel.actor import ActorMesh, Port
    from monarch_kernel.debugger.controller.hub_actor import DebugHub
    from monarch_kernel.debugger.model.stops import (
        Bound,
        Breakpoint,
        ErrorRecord,
        Evaluation,
        Resumed,
        Stop,
        Stopped,
        Variable,
    )
    from monarch_kernel.debugger.rank.stopping.tracer import StopTracer
    from monarch_kernel.introspection import Failure


#: How long a voting rank waits for the other ranks, and then for the hub's decision (seconds).
VOTE_PATIENCE = 5.0
VOTE_TIMEOUT = 10.0
#: How many ends of stops are kept for the next hub.
MOST_UNSAID = 1000
#: How many passes over a line between two collectives are distinguished.
MOST_PASSAGES = 1_000_000


class RankDebugger:
    """The debugger's state in a process: its identity, its tracer, and the hub that receives its stops."""

    def __init__(self) -> None:
        self.uid = ""
        self.mesh = ""
        self.point = Point(0, Extent((), ()))
        self.hub: ActorMesh[DebugHub] | None = None
        self._engine: StopTracer | None = None
        self._lock = threading.Lock()
        self._held: Any = None
        self._failures: Subscription | None = None
        self._passages: dict[int, tuple[int, int]] = {}  # by breakpoint: collectives issued, passes since
        #: In a program's own process: the viewers whose agents are here, by mesh; and the lock that prevents any of
        #: them from acting while control passes to another.
        self._viewers: dict[str, tuple[Any, str, Point]] = {}
        self.acting = threading.RLock()
        self.armed: dict[str, int] = {}  # by controller: the number of the latest armed set of breakpoints
        self._unsaid: deque[int] = deque(maxlen=MOST_UNSAID)  # stops that ended while no hub was connected

    @property
    def engine(self) -> StopTracer:
        """The tracer. The first access creates it."""
        with self._lock:
            if self._engine is None:
                tool_runtime().follow_control(self)
                from monarch_kernel.debugger.rank.stopping.tracer import StopTracer

                self._engine = StopTracer(self._on_event, self._vote, tool_runtime().running_here, client_path)
            return self._engine

    @property
    def existing_tracer(self) -> StopTracer | None:
        """The tracer; None if nothing has been stopped or armed here yet."""
        return self._engine

    def watch_failures(self, wanted: bool) -> None:
        """Monitor failures of endpoints and cells while breakpoints at errors need that."""
        if wanted and self._failures is None:
            self._failures = on_failure(self.failed)
        elif not wanted and self._failures is not None:
            self._failures.close()
            self._failures = None

    # -- the hub ---------------------------------------------------------------------------------

    def attach(self, hub: ActorMesh[DebugHub], uid: str, mesh: str, point: Point) -> None:
        """Send stops to that hub from now on, beginning with the existing ones, if its viewer has control."""
        here = tool_runtime()
        if here.OF_PROGRAM:
            here.follow_control(self)
            with self.acting:
                self._viewers[uid] = hub, mesh, point
                if here.drives(uid):
                    self._attach(hub, uid, mesh, point)
                else:  # it only observes
                    hub.joined.broadcast(uid, point.rank, os.getpid(), [])
        else:
            self._attach(hub, uid, mesh, point)

    def _attach(self, hub: ActorMesh[DebugHub], uid: str, mesh: str, point: Point) -> None:
        self.uid, self.mesh, self.point = uid, mesh, point
        self.hub = hub
        engine = self._engine
        # A stop that happens now may be sent twice. The hub ignores the second.
        stops = engine.stops() if engine is not None else []
        if any(stop.thread for stop in stops):
            self._hold()
        hub.joined.broadcast(uid, point.rank, os.getpid(), stops)
        while self._unsaid:
            hub.resumed.broadcast(uid, point.rank, self._unsaid.popleft(), "continue")

    # -- viewers of a program's process ------------------------------------------------------------

    def hand_over(self, uid: str) -> None:
        """Pass control and the stops to another viewer, and remove the breakpoints of the former one."""
        with self.acting:
            former, of = self.hub, self.uid
            self.uid, self.hub = "", None
            self.watch_failures(False)
            common_point.forget(set())
            if self._engine is not None:
                self._engine.arm([])
                if former is not None:
                    for stop in self._engine.stops():
                        former.resumed.broadcast(of, self.point.rank, stop.id, "passed on")
            if uid in self._viewers:  # otherwise, its agent follows
                hub, mesh, point = self._viewers[uid]
                self._attach(hub, uid, mesh, point)

    def stands(self) -> bool:
        """See ``interface.ControlFollower``."""
        return self._engine is not None and any(stop.thread for stop in self._engine.stops())

    def release(self) -> int:
        """Let all threads run, and remove breakpoints: no viewer is in control. Return how many were stopped."""
        with self.acting:
            self.uid, self.hub = "", None
            self.watch_failures(False)
            common_point.forget(set())
            engine = self._engine
            if engine is None:
                return 0
            standing = sum(bool(stop.thread) for stop in engine.stops())
            engine.close()
            return standing

    def forget(self, uid: str) -> None:
        """Remove a viewer that has left for good."""
        with self.acting:
            self._viewers.pop(uid, None)

    def identity(self, uid: str) -> tuple[str, Point]:
        """Return the name of a viewer's mesh, and this rank's coordinates in it."""
        _hub, mesh, point = self._viewers.get(uid, (None, self.mesh, self.point))
        return mesh, point

    def check(self, uid: str) -> None:
        """Raise RuntimeError if the viewer of that mesh may not act here. Called with ``acting`` held."""
        here = tool_runtime()
        if here.OF_PROGRAM and not (self.hub is not None and self.uid == uid and here.drives(uid)):
            raise RuntimeError("another viewer has control of this job, or this one was silent: %mesh join JOB --drive")

    def _on_event(self, event: Stopped | Resumed) -> None:
        hub, uid = self.hub, self.uid
        from monarch_kernel.debugger.model.stops import Stopped

        if hub is None:  # `attach` will send it
            if not isinstance(event, Stopped):
                self._unsaid.append(event.stop)
        elif isinstance(event, Stopped):
            if event.stop.thread:
                self._hold()
            hub.stopped.broadcast(uid, self.point.rank, os.getpid(), event.stop)
        else:
            hub.resumed.broadcast(uid, self.point.rank, event.stop, event.how)

    def _hold(self) -> None:
        """Detect the end of the hub's process: it never answers this call, which fails when the process ends."""
        if tool_runtime().OF_PROGRAM:
            return  # there, the viewer in control must continuously prove that it is alive
        with self._lock:
            if self.hub is not None and (self._held is None or self._held.done()):
                self._held = self.hub.hold.call_one()
                self._held.add_done_callback(lambda _future: self._orphaned())

    def _orphaned(self) -> None:
        engine = self._engine
        if engine is None or not self.stands():
            return
        if environment.ORPHANED_STOPS.get() == "end":
            os._exit(1)
        # Close on a separate thread: this one polls for the whole process.
        threading.Thread(target=engine.close, name="monarch-debugger", daemon=True).start()

    def _vote(self, at: Breakpoint, hit: int, value: object) -> bool:
        """Return whether this rank stops, by the votes of all ranks. Called on the thread at the breakpoint."""
        from monarch_kernel.debugger.rank.values.reduce import digest

        text = digest(value) if at.differs else ""
        if at.differs:
            hit = self._passage(at.id, hit)
        hub, uid = self.hub, self.uid
        if hub is None:
            return False
        try:
            asked = hub.vote.call_one(uid, self.point.rank, at.id, hit, text)
            try:
                return bool(asked.get(VOTE_PATIENCE))
            except TimeoutError:
                hub.decide.broadcast(uid, at.id, hit)
                return bool(asked.get(VOTE_TIMEOUT))
        except Exception:  # there is no hub any more: continue rather than stop without a viewer
            return False

    def _passage(self, number: int, hit: int) -> int:
        """Return a number that is equal on all ranks that pass a breakpoint in the same step of their program.

        The hit count is not equal if the breakpoint was set while the ranks ran: their first hits may be a step apart.
        The number of collectives that the default group has issued is equal.
        """
        issued = common_point.issued()
        if issued is None:
            return hit
        with self._lock:
            last, before = self._passages.get(number, (-1, 0))
            again = before + 1 if issued == last else 0
            self._passages[number] = (issued, again)
        return issued * MOST_PASSAGES + min(again, MOST_PASSAGES - 1)

    def failed(self, error: BaseException) -> None:
        """Handle a failure of an endpoint or a cell: stop there if a breakpoint requests it."""
        if self._engine is not None:
            self._engine.failed_here(error)


_rank = RankDebugger()


def attach(hub: ActorMesh[DebugHub], uid: str, mesh: str, point: Point) -> None:
    """Attach the hub; the agent calls this when it begins."""
    _rank.attach(hub, uid, mesh, point)


def rank_of() -> tuple[str, int, Extent]:
    """Return the name of the mesh, this rank, and the extent, as the requesting viewer knows them."""
    mesh, point = _rank.identity(getattr(_asking, "uid", ""))
    return mesh, point.rank, point.extent


def existing_tracer() -> StopTracer | None:
    """Return this process's tracer, if there is one."""
    return _rank.existing_tracer


def stop_tracer() -> StopTracer:
    """Return this process's tracer. The first call creates it."""
    return _rank.engine


def stop_here(frame: FrameType, text: str = "") -> None:
    """Stop the calling thread until a viewer lets it continue: `breakpoint()`.

    In a joined job, only the viewer in control can do so. If no viewer has control, the thread continues at once.

    Raises:
        RuntimeError: this process is not a rank of a mesh, so it has no debugger.
    """
    if _rank.hub is None:
        if tool_runtime().OF_PROGRAM and not tool_runtime().drives(""):
            return  # all viewers only observe, so none could let the thread continue
        procs = tool_runtime().home()
        if procs is None:
            raise RuntimeError("breakpoint(): there is no actor in this process, so no debugger could find it")
        from monarch_kernel.debugger.controller.hub_actor import hub_actor

        hub = hub_actor()
        hub.hello.broadcast(procs)  # the hub spawns an agent here, which sends this stop
    _rank.engine.stop_here(frame, "breakpoint()", text)


# -- requests of the hub (run by the agent) --------------------------------------------------------

_asking = threading.local()
"""Of the thread that serves a request: ``uid``, the mesh of the viewer that has sent it."""


def serve(uid: str, function: Callable[..., object], args: tuple[Any, ...]) -> object:
    """Run a request of the viewer whose mesh has this uid."""
    _asking.uid = uid
    return function(*args)


@contextmanager
def _acting() -> Generator[None]:
    """Hold the right to act for the viewer whose request the calling thread serves. Fails if it has no control."""
    with _rank.acting:
        _rank.check(_asking.uid)
        yield


def arm(order: tuple[str, int], breakpoints: Sequence[Breakpoint], begun: Sequence[str] = ()) -> list[Bound]:
    """Arm these breakpoints in place of all others, unless newer ones of the same controller are already armed.

    Args:
        order: the controller, and the number of this state of its breakpoints. Requests are served on separate threads
            and may overtake each other.
        begun: the points (`Breakpoint.together`) that count as reached on this rank.
    """
    keys = [each.together for each in breakpoints if each.together]
    controller, number = order
    with _rank.acting:
        if _rank.armed.get(controller, 0) > number:
            return []
        _rank.armed[controller] = number
        if not breakpoints and _rank.existing_tracer is None:
            return []
        _rank.check(_asking.uid)
        common_point.forget(set(keys))
        common_point.agree_now(begun)
        _rank.watch_failures(any(each.error for each in breakpoints))
        with common_point.opening(keys):
            return _rank.engine.arm(breakpoints)


def _check_acting() -> None:
    """Raise RuntimeError if the viewer whose request is being served may not act. For requests that take long."""
    with _acting():
        return


Ids = int | dict[int, list[int]]
"""Stops to act on: one id for all ranks of the query, or the ids of each rank."""


def _ids(ids: Ids) -> list[int]:
    return [ids] if isinstance(ids, int) else ids.get(_rank.point.rank, [])


def resume(ids: Ids, how: str, line: int) -> list[int]:
    """Resume these stops. Return those that existed."""
    done: list[int] = []
    with _acting():
        for stop in _ids(ids):
            try:
                _rank.engine.resume(stop, how, line)  # type: ignore[arg-type]  # the hub has checked it
            except KeyError:
                continue  # it has already continued
            done.append(stop)
    return done


def pause() -> None:
    """Stop threads that run user code at their next line of user code."""
    with _acting():
        _rank.engine.pause()


def cancel_pause() -> None:
    """Let those threads run that `pause` has not stopped yet."""
    with _acting():
        _rank.engine.cancel_pause()


def evaluate(ids: Ids, frame: int, source: str, timeout: float) -> dict[int, Evaluation]:
    """Evaluate in a frame of each of these stops."""
    _check_acting()
    return {stop: _or_error(stop, frame, source, timeout) for stop in _ids(ids)}


def evaluate_raw(ids: Ids, frame: int, source: str, timeout: float) -> dict[int, Evaluation]:
    """Evaluate in a frame of each of these stops, and return strings unchanged."""
    _check_acting()
    return {stop: _or_error(stop, frame, source, timeout, raw=True) for stop in _ids(ids)}


def _or_error(stop: int, frame: int, source: str, timeout: float, raw: bool = False) -> Evaluation:
    try:
        return _rank.engine.evaluate(stop, frame, source, timeout, raw=raw)
    except (KeyError, IndexError, TimeoutError, RuntimeError) as error:
        from monarch_kernel.debugger.model.stops import Evaluation

        return Evaluation("", error=_sentence(error))


def call(ids: Ids, frame: int, function: Callable[..., object], timeout: float) -> dict[int, Any]:
    """Call ``function(frame)`` in each of these stops. An exception that it raises replaces the value."""
    found: dict[int, object] = {}
    _check_acting()
    for stop in _ids(ids):
        try:
            found[stop] = _rank.engine.call(stop, frame, function, timeout)
        except Exception as error:
            found[stop] = RuntimeError(_sentence(error))
    return found


def scopes(stop: int, frame: int) -> list[Variable]:
    """Return the scopes of a frame."""
    return _rank.engine.scopes(stop, frame)


def variables(stop: int, ref: int, start: int, count: int) -> list[Variable]:
    """Return the children of a value."""
    return _rank.engine.variables(stop, ref, start, count)


def set_variable(stop: int, ref: int, name: str, expression: str) -> Variable:
    """Change a child of a value."""
    _check_acting()
    return _rank.engine.set_variable(stop, ref, name, expression)


_opened: dict[int, int] = {}
"""The stop as which each kept failure was opened."""


def _key(failure: Failure) -> str:
    return failure.cell or f"{failure.actor}.{failure.endpoint}"


def kept_errors() -> list[ErrorRecord]:
    """Return the failures that this process keeps, newest first."""
    from monarch_kernel.debugger.model.stops import ErrorRecord
    from monarch_kernel.debugger.rank.stopping.expressions import summary

    now = time.time()
    return [
        ErrorRecord(
            _key(each),
            summary(each.error),
            each.actor,
            each.endpoint,
            each.cell,
            max(0.0, now - each.when),
            failed_by_peer(each.error),
        )
        for each in reversed(failures())
    ]


def post_mortem(key: str) -> tuple[int, Stop | None]:
    """Open the newest kept failure with this `ErrorRecord.key` as a stop without a thread. Return pid and stop."""
    failure = next((each for each in reversed(failures()) if _key(each) == key), None)
    if failure is None:
        return os.getpid(), None
    engine = _rank.engine
    opened = _opened.get(failure.number, 0)
    stop = next((each for each in engine.stops() if each.id == opened), None)
    if stop is None:
        label = failure.actor, failure.endpoint, failure.cell
        stop = engine.post_mortem(failure.error, label, failed_by_peer(failure.error))
        _opened[failure.number] = stop.id
    return os.getpid(), stop


def _sentence(error: BaseException) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The debug agent: the debugger's actor on a rank. Each request runs on a separate thread, so none delays another.


class DebugAgent(Actor):
    """The agent of one rank, spawned by the first query to its mesh.

    Args:
        hub: the actor that receives this rank's stops (`controller.hub_actor.DebugHub`).
        uid: the unique name of the proc mesh.
        mesh: its displayed name.
    """

    __tool__ = True
    __background__ = True

    def __init__(self, hub: ActorMesh[DebugHub], uid: str, mesh: str) -> None:
        self._point = tool_runtime().actor_here().rank
        self._uid = uid
        attach(hub, uid, mesh, self._point)

    @endpoint(explicit_response_port=True)
    def run(self, port: Port[object], request: bytes) -> None:
        """Call the pickled ``(function, args)``; return this rank and the function's result."""
        threading.Thread(target=self._run, args=(port, request), name="monarch-debugger", daemon=True).start()

    def _run(self, port: Port[object], request: bytes) -> None:
        try:
            function, args = cloudpickle.loads(request)
            port.send((self._point.rank, serve(self._uid, function, args)))
        except BaseException as error:
            port.exception(error)
