"""Track the stopped ranks as a front end sees them: their ids, and the one that is shown."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger.dap.messages import Arguments, Body, Event, RequestError, stopped_body
from monarch_kernel.debugger.events import Key, RankStop, frames_of_an_ide

# Select the stopped thread that a front end shows. The others wait in a queue.
#
# JupyterLab shows one thread, the one in the last `stopped` event. It has no list of threads, and treats a `continued`
# event of any thread as the end of the stop that it shows. It is therefore notified of one stop at a time, and the
# others wait here. A front end with a list of threads (VS Code) is notified of every stop immediately, and keeps its
# focus unless an event changes it.
#
# The kernel's own threads and those of ranks share one queue. Pure: events in, events out.


class StopQueue:
    """The stopped threads by their ids: the one that is shown, and those that wait.

    Args:
        lists_threads: whether the front end has a list of threads.
    """

    def __init__(self, lists_threads: bool = False) -> None:
        self.lists_threads = lists_threads
        self.shown: int | None = None
        """The thread shown, which is stopped."""
        self.moving: int | None = None
        """The thread that was shown and is now stepping; it will be shown again."""
        self._stopped: dict[int, Body] = {}

    def __contains__(self, thread: int) -> bool:
        return thread in self._stopped

    @property
    def threads(self) -> list[int]:
        """Return the stopped threads: the shown one first, then the waiting ones in the order of their stops."""
        return sorted(self._stopped, key=lambda thread: thread != self.shown)

    def stopped(self, thread: int, body: Body) -> list[Event]:
        """Handle that a thread has stopped; `body` is the body of its `stopped` event."""
        self._stopped[thread] = {**body, "threadId": thread, "allThreadsStopped": False}
        returns = self.moving == thread
        if returns or (self.shown in (None, thread) and self.moving is None):
            self.moving = None
            return self._show(thread)
        if self.lists_threads:
            return [{"event": "stopped", "body": {**self._stopped[thread], "preserveFocusHint": True}}]
        return []

    def resumed(self, thread: int) -> list[Event]:
        """Handle that a thread runs again."""
        if self._stopped.pop(thread, None) is None:
            return []
        if self.shown != thread:
            return [_continued(thread)] if self.lists_threads else []
        self.shown = None
        if self.moving == thread:
            # What it showed stays on display until it stops again, so that stepping does not flicker.
            return [_continued(thread)] if self.lists_threads else []
        return [_continued(thread), *self._next()]

    def withdraw(self, threads: Iterable[int]) -> None:
        """Remove threads that are about to run together with the shown one, so that none of them is shown."""
        for thread in threads:
            if thread != self.shown:
                self._stopped.pop(thread, None)

    def gone(self, thread: int) -> list[Event]:
        """Handle that a thread has ended, stopped or not."""
        events = self.resumed(thread)
        if self.moving == thread:
            events += self.overdue()
        if self.lists_threads:
            events.append({"event": "thread", "body": {"reason": "exited", "threadId": thread}})
        return events

    def step(self, thread: int) -> None:
        """Record that the thread is about to step; it keeps the focus if it has it."""
        if self.shown == thread:
            self.moving = thread

    def hold(self) -> None:
        """Record that the step was rejected."""
        self.moving = None

    def overdue(self) -> list[Event]:
        """Show another thread, because the step takes long (for example in a collective that waits for other ranks)."""
        thread, self.moving = self.moving, None
        if thread is None or thread in self._stopped:
            return []
        return [*([] if self.lists_threads else [_continued(thread)]), *self._next()]

    def focus(self, thread: int) -> list[Event]:
        """Show this thread, which must be stopped."""
        self.moving = None
        return self._show(thread)

    def show_again(self) -> list[Event]:
        """Report all stops to a front end that has just connected."""
        events: list[Event] = []
        if self.shown is not None:
            events += self._show(self.shown)
        if self.lists_threads:
            others = [thread for thread in self._stopped if thread != self.shown]
            events += [
                {"event": "stopped", "body": {**self._stopped[each], "preserveFocusHint": True}} for each in others
            ]
        return events

    def _show(self, thread: int) -> list[Event]:
        self.shown = thread
        return [{"event": "stopped", "body": dict(self._stopped[thread])}]

    def _next(self) -> list[Event]:
        waiting = next(iter(self._stopped), None)
        if waiting is None:
            return []
        if self.lists_threads:  # the front end chooses
            self.shown = waiting
            return []
        return self._show(waiting)


def _continued(thread: int) -> Event:
    return {"event": "continued", "body": {"threadId": thread, "allThreadsContinued": False}}


# Assign the ids by which a front end refers to objects of ranks: threads, frames, and values that have children.
#
# All kinds share one counter that begins at `BASE`, so no id collides with one of the kernel's own debugger, which
# begins at 1 and counts slowly. No id is reused: a front end may request an object that no longer exists, and must not
# receive another one.

BASE = 1_000_000


@dataclass(frozen=True, slots=True)
class RankThread:
    """A thread of a rank. `seat` 0 is the first that ever stopped; it represents a rank without stopped threads."""

    mesh: str
    rank: int
    seat: int


@dataclass(frozen=True, slots=True)
class FrameOf:
    """A frame of a stop; index 0 is the innermost."""

    key: Key
    index: int


@dataclass(frozen=True, slots=True)
class ValueOf:
    """A value of a stop that has children.

    Attributes:
        key: the stop.
        ref: the rank's own number for it (`Variable.ref`).
        indexed: how many of its children have an index; they come first.
        scope: whether it is a scope, whose children are variables.
    """

    key: Key
    ref: int
    indexed: int = 0
    scope: bool = False


Named = RankThread | FrameOf | ValueOf
"""The objects that an id may refer to."""


class IdTable:
    """All ids. Not thread-safe: `StopTable` holds its lock."""

    def __init__(self) -> None:
        self._count = itertools.count(BASE)
        self._threads: dict[RankThread, int] = {}
        self._seats: dict[tuple[str, int], dict[int, int]] = {}
        self._frame_ids: dict[FrameOf, int] = {}
        self._value_ids: dict[ValueOf, int] = {}
        self._named: dict[int, Named] = {}

    def thread(self, mesh: str, rank: int, ident: int | None = None) -> int:
        """Return the id of a thread. It stays the same from stop to stop.

        Args:
            mesh: the mesh of the thread.
            rank: the rank of the thread.
            ident: distinguishes it from other threads of the rank; None for the rank as a whole.
        """
        seat = 0
        if ident is not None:
            seats = self._seats.setdefault((mesh, rank), {})
            seat = seats.setdefault(ident, len(seats))
        thread = RankThread(mesh, rank, seat)
        return self._threads.get(thread) or self._threads.setdefault(thread, self._new(thread))

    def frame(self, key: Key, index: int) -> int:
        """Return the id of a frame."""
        frame = FrameOf(key, index)
        return self._frame_ids.get(frame) or self._frame_ids.setdefault(frame, self._new(frame))

    def value(self, key: Key, ref: int, indexed: int = 0, scope: bool = False) -> int:
        """Return the id of a value's children; 0 if it has none."""
        if not ref:
            return 0
        value = ValueOf(key, ref, indexed, scope)
        return self._value_ids.get(value) or self._value_ids.setdefault(value, self._new(value))

    def named(self, number: object) -> Named | None:
        """Return the object of an id; None if it is gone, or the id was never assigned."""
        return self._named.get(number) if isinstance(number, int) else None

    def renew_frames(self, key: Key) -> None:
        """Assign new ids to the frames of a stop when they are next requested; the old ids stay valid."""
        self._frame_ids = {frame: number for frame, number in self._frame_ids.items() if frame.key != key}

    def forget_stop(self, key: Key) -> None:
        """Forget the frames and values of a stop that is over."""
        self.renew_frames(key)
        self._value_ids = {value: number for value, number in self._value_ids.items() if value.key != key}
        self._named = {
            number: named for number, named in self._named.items() if isinstance(named, RankThread) or named.key != key
        }

    def forget_rank(self, mesh: str, rank: int) -> list[int]:
        """Forget the threads of a rank that has ended. Return their ids."""
        gone = [number for thread, number in self._threads.items() if (thread.mesh, thread.rank) == (mesh, rank)]
        self._threads = {thread: number for thread, number in self._threads.items() if number not in gone}
        self._seats.pop((mesh, rank), None)
        for number in gone:
            del self._named[number]
        return gone

    def _new(self, named: Named) -> int:
        number = next(self._count)
        self._named[number] = named
        return number


#: Meshes with more ranks than this are listed with their stopped ranks only.
MOST_THREADS = 64
#: How long a step may take before another stopped thread is shown (seconds).
STEP_PATIENCE = 1.0

_OVER = "that rank is not stopped there any more"


class StopState(TypedDict):
    """A stop in `DebugState`."""

    thread: int
    reason: str
    text: str
    since: float
    shown: bool
    file: str
    line: int
    name: str


class RankStops(TypedDict):
    """A rank in `DebugState`; `state` is "stopped", "running" or "dead"."""

    rank: int
    point: dict[str, int]
    state: str
    cause: NotRequired[str]
    stops: NotRequired[list[StopState]]


class MeshState(TypedDict):
    """A mesh in `DebugState`."""

    name: str
    ranks: list[RankStops]


class DebugState(TypedDict):
    """What all ranks are doing: the answer to the request `mesh/state`."""

    meshes: list[MeshState]


class StopTable:
    """The stops of all ranks, and the stopped threads of the kernel itself. Thread-safe.

    Args:
        publish: sends an event; called on any thread, one at a time, and must not block.
        later: calls a function after a delay in seconds.
        meshes: returns the existing proc meshes.
    """

    def __init__(
        self,
        publish: Callable[[Event], None],
        later: Callable[[float, Callable[[], None]], object],
        meshes: Callable[[], Iterable[ProcMesh]],
    ) -> None:
        self._publish = publish
        self._later = later
        self._meshes = meshes
        self._lock = threading.RLock()
        self._ids = IdTable()
        self._queue = StopQueue()
        self._at: dict[Key, RankStop] = {}
        self._thread_of: dict[Key, int] = {}
        self._kernel_threads: set[int] = set()
        self._steps = 0
        self._step_from: Key | None = None  # the rank's stop at which the last step began

    def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            self._publish({"type": "event", "seq": 0, **event})

    @property
    def lists_threads(self) -> bool:
        """Whether the front end shows more than one thread."""
        return self._queue.lists_threads

    @lists_threads.setter
    def lists_threads(self, lists: bool) -> None:
        with self._lock:
            self._queue.lists_threads = lists

    # -- events ------------------------------------------------------------------------------------

    def stopped(self, at: RankStop) -> None:
        """Handle that a rank has stopped."""
        with self._lock:
            if at.key in self._at:
                return
            ident = at.stop.thread or -at.stop.id  # a post mortem has no thread; its id distinguishes it from others
            thread = self._ids.thread(at.mesh, at.rank, ident)
            self._at[at.key] = at
            self._thread_of[at.key] = thread
            self._send(self._queue.stopped(thread, stopped_body(at)))

    def resumed(self, key: Key) -> None:
        """Handle that a stop is over."""
        with self._lock:
            thread = self._thread_of.pop(key, None)
            if thread is None:
                return
            del self._at[key]
            self._ids.forget_stop(key)
            if thread not in self._thread_of.values():  # otherwise it has stopped again already
                self._send(self._queue.resumed(thread))

    def ran_off(self, key: Key) -> None:
        """Handle that a step from this stop has ended without another stop: another thread may be shown."""
        with self._lock:
            if key == self._step_from:
                self._send(self._queue.overdue())

    def rank_gone(self, mesh: str, rank: int) -> None:
        """Handle that a rank has died."""
        with self._lock:
            for key in [key for key in self._at if key[:2] == (mesh, rank)]:
                self.resumed(key)
            for thread in self._ids.forget_rank(mesh, rank):
                self._send(self._queue.gone(thread))

    def kernel_event(self, event: Event) -> None:
        """Handle an event for the front end from the kernel's own debugger."""
        body: Body = event.get("body") or {}
        with self._lock:
            if event.get("event") == "stopped" and "threadId" in body:
                self._kernel_threads.add(body["threadId"])
                self._send(self._queue.stopped(body["threadId"], body))
            elif event.get("event") == "continued":
                everyone = body.get("allThreadsContinued", True)
                over = self._kernel_threads if everyone else self._kernel_threads & {body.get("threadId")}
                self._kernel_threads = self._kernel_threads - over
                for thread in sorted(over):
                    self._send(self._queue.resumed(thread))
            else:
                self._publish(event)

    def kernel_steps(self) -> None:
        """Record that the kernel's own debugger is about to step."""
        with self._lock:
            if self._queue.shown in self._kernel_threads:
                self._begin_step(self._queue.shown)

    def show_again(self) -> bool:
        """Report the current stops to the front end again. Return whether one of them is shown."""
        with self._lock:
            self._send(self._queue.show_again())
            return self._queue.shown is not None

    # -- the subject of a request ------------------------------------------------------------------

    def names_stop(self, arguments: Arguments) -> bool:
        """Return whether the `threadId` of a request names a stopped rank."""
        with self._lock:
            return self._key_of(arguments) is not None

    def names_frame(self, arguments: Arguments) -> bool:
        """Return whether the `frameId` of a request names a frame of a rank."""
        with self._lock:
            return self._frame_of(arguments) is not None

    def stop_at(self, arguments: Arguments) -> RankStop:
        """Return the stop that a request with a `threadId` refers to. Raises RequestError if it is over."""
        with self._lock:
            at = self._at.get(key) if (key := self._key_of(arguments)) is not None else None
        if at is None:
            raise RequestError(_OVER)
        return at

    def stop_of(self, key: Key) -> RankStop:
        """Return the stop of that key. Raises RequestError if it is over."""
        with self._lock:
            at = self._at.get(key)
        if at is None:
            raise RequestError(_OVER)
        return at

    def thread_named(self, number: object) -> RankThread | None:
        """Return the thread of a rank with this id, stopped or not; None if there is none."""
        with self._lock:
            named = self._ids.named(number)
        return named if isinstance(named, RankThread) else None

    def frame_at(self, arguments: Arguments) -> FrameOf:
        """Return the frame that a request with a `frameId` refers to. Raises RequestError if its stop is over."""
        with self._lock:
            frame = self._frame_of(arguments)
        if frame is None:
            raise RequestError(_OVER)
        return frame

    def value_at(self, arguments: Arguments) -> ValueOf:
        """Return the value that a request's `variablesReference` names. Raises RequestError if its stop is over."""
        with self._lock:
            value = self._ids.named(arguments.get("variablesReference"))
        if not isinstance(value, ValueOf):
            raise RequestError("that value is gone: its rank runs again")
        return value

    def stop_with_file(self, path: str) -> RankStop | None:
        """Return a stop that has a frame in this file; None if there is none."""
        with self._lock:
            return next((at for at in self._at.values() if any(frame.file == path for frame in at.stop.frames)), None)

    @property
    def shows_stop(self) -> bool:
        """Whether the front end shows a stopped thread."""
        return self._queue.shown is not None

    def _key_of(self, arguments: Arguments) -> Key | None:
        asked = arguments.get("threadId")
        if isinstance(self._ids.named(asked), RankThread):
            known = self._queue.lists_threads or int(asked or 0) in self._queue
            thread = asked if known else self._queue.shown
        elif self._queue.lists_threads:
            return None
        else:
            # JupyterLab sends 1 for the thread that it shows: up to 4.4.4 always, from 4.6.1 on to continue.
            thread = self._queue.shown
        return next((key for key, number in self._thread_of.items() if number == thread), None)

    def _frame_of(self, arguments: Arguments) -> FrameOf | None:
        number = arguments.get("frameId")
        frame = self._ids.named(number)
        if isinstance(frame, FrameOf):
            return frame
        shown = self._shown_key() if number is None else None
        return FrameOf(shown, 0) if shown is not None else None

    def _shown_key(self) -> Key | None:
        return next((key for key, number in self._thread_of.items() if number == self._queue.shown), None)

    # -- ids ---------------------------------------------------------------------------------------

    def frame_ids(self, at: RankStop, indices: Sequence[int]) -> list[int]:
        """Return the ids of frames of a stop."""
        with self._lock:
            return [self._ids.frame(at.key, index) for index in indices]

    def value_id(self, key: Key, ref: int, indexed: int = 0, scope: bool = False) -> int:
        """Return the id of a value of a stop; 0 if it has no children."""
        with self._lock:
            return self._ids.value(key, ref, indexed, scope)

    def renew_frames(self, key: Key) -> None:
        """Assign new ids to the frames of a stop: JupyterLab only inspects frames that it has not seen before."""
        with self._lock:
            self._ids.renew_frames(key)

    # -- resuming ----------------------------------------------------------------------------------

    def begin_move(self, arguments: Arguments, how: str) -> list[RankStop]:
        """Return the stops that a request resumes. The request decides whether the shown one is shown again.

        Args:
            arguments: the arguments of the request.
            how: as in `MeshDebugger.resume`.

        Raises:
            RequestError: the stop is over, or cannot be stepped.
        """
        with self._lock:
            at = self.stop_at(arguments)
            if how == "continue":
                stops = self._together(at)
            elif at.stop.steppable:
                stops = [at]
                self._step_from = at.key
                self._begin_step(self._thread_of[at.key])
            else:
                raise RequestError("these frames have ended with an error: they can be looked at, or continued")
            self._queue.withdraw(self._thread_of[each.key] for each in stops if each is not at)
        return stops

    def move_refused(self, stops: Iterable[RankStop]) -> None:
        """Handle that the debugger has rejected the move. Queue the stops again that are not over."""
        with self._lock:
            self._queue.hold()
            for at in stops:
                if at.key in self._at and self._thread_of[at.key] not in self._queue:
                    self._send(self._queue.stopped(self._thread_of[at.key], stopped_body(at)))

    def keep_turn(self, stops: Iterable[RankStop]) -> None:
        """Record that these stops are about to step: the shown one, if it is among them, keeps the focus."""
        with self._lock:
            shown = self._shown_key()
            if self._queue.shown is not None and any(at.key == shown for at in stops):
                self._begin_step(self._queue.shown)

    def _together(self, at: RankStop) -> list[RankStop]:
        """Return the stops that Continue resumes: if the front end shows one thread, those of all ranks of its mesh."""
        if self._queue.lists_threads or not at.stop.thread:
            return [at]
        return [each for each in self._at.values() if each.mesh == at.mesh and each.stop.thread]

    def _begin_step(self, thread: int | None) -> None:
        if thread is None:
            return
        self._queue.step(thread)
        self._steps += 1
        number = self._steps

        def overdue() -> None:
            with self._lock:
                if number == self._steps:
                    self._send(self._queue.overdue())

        self._later(STEP_PATIENCE, overdue)

    # -- the shown rank ----------------------------------------------------------------------------

    def focus(self, rank: int, mesh: str | None = None) -> str:
        """Make the front end show a stopped rank. Return the name of the rank.

        Args:
            rank: the rank; if several of its threads are stopped, the one after the shown thread.
            mesh: the name of its mesh; may be None if the rank is stopped in one mesh only.

        Raises:
            RequestError: the rank is not stopped, or is ambiguous.
        """
        with self._lock:
            stopped = [at for at in self._at.values() if mesh in (None, at.mesh)]
            found = [at for at in stopped if at.rank == rank]
            if not found:
                ranks = ", ".join(str(at.rank) for at in sorted(stopped, key=lambda at: at.rank)) or "none"
                raise RequestError(f"rank {rank} is not stopped, so it cannot be shown; stopped ranks: {ranks}")
            if len({at.mesh for at in found}) > 1:
                meshes = " and ".join(sorted({at.mesh for at in found}))
                raise RequestError(f"rank {rank} is stopped on {meshes}; say which mesh")
            threads = [self._thread_of[at.key] for at in found]
            shown = self._queue.shown
            at = threads.index(shown) + 1 if shown is not None and shown in threads else 0
            self._ids.renew_frames(found[at % len(found)].key)
            self._send(self._queue.focus(threads[at % len(found)]))
            return self._rank_name(found[0].mesh, rank)

    # -- all ranks ---------------------------------------------------------------------------------

    def state(self) -> DebugState:
        """Return what all ranks of all meshes are doing."""
        with self._lock:
            shown = self._shown_key()
            by_rank: dict[tuple[str, int], list[RankStop]] = {}
            for at in self._at.values():
                by_rank.setdefault((at.mesh, at.rank), []).append(at)
            meshes: list[MeshState] = []
            for mesh in self._meshes():
                dead = mesh.dead()
                ranks = [
                    self._rank_state(mesh, rank, by_rank.get((mesh.name, rank), []), shown, dead.get(rank))
                    for rank in range(len(mesh))
                ]
                meshes.append({"name": mesh.name, "ranks": ranks})
            return {"meshes": meshes}

    def _rank_state(
        self, mesh: ProcMesh, rank: int, stops: Sequence[RankStop], shown: Key | None, cause: str | None
    ) -> RankStops:
        state: RankStops = {"rank": rank, "point": dict(mesh.extent.point(rank).items()), "state": "running"}
        if cause is not None:
            state["state"], state["cause"] = "dead", cause
        elif stops:
            state["state"] = "stopped"
            state["stops"] = [self._stop_state(at, shown) for at in stops if at.stop.frames]
        return state

    def _stop_state(self, at: RankStop, shown: Key | None) -> StopState:
        frame = frames_of_an_ide(at.stop.frames)[0]
        return {
            "thread": self._thread_of[at.key],
            "reason": at.stop.reason,
            "text": at.stop.text,
            "since": at.stop.since,
            "shown": at.key == shown,
            "file": frame.file,
            "line": frame.line,
            "name": frame.name,
        }

    def threads(self) -> list[Body]:
        """Return the ranks as threads: the stopped ones, by location, and the others."""
        with self._lock:
            found: dict[int, str] = {}
            for mesh in self._meshes():
                if len(mesh) <= MOST_THREADS:
                    dead = mesh.dead()
                    for rank in range(len(mesh)):
                        if rank not in dead:
                            point = dict(mesh.extent.point(rank).items())
                            found[self._ids.thread(mesh.name, rank)] = self._thread_name(mesh.name, rank, point)
            for at in sorted(self._at.values(), key=lambda at: at.key):
                name = self._thread_name(at.mesh, at.rank, at.point)
                where = frames_of_an_ide(at.stop.frames)[0].name if at.stop.frames else at.stop.reason
                found[self._thread_of[at.key]] = f"{name}: {where}"
            return [{"id": number, "name": name} for number, name in found.items()]

    @property
    def stopped_threads(self) -> list[int]:
        """Return the threads that a newly connected front end shows, for `debugInfo`."""
        with self._lock:
            threads = self._queue.threads
            return threads if self._queue.lists_threads else threads[:1]

    def frame_prefix(self, at: RankStop) -> str:
        """Return the prefix of the names of a stop's frames: its rank, if the front end has no list of threads."""
        return "" if self._queue.lists_threads else f"[{self._rank_name(at.mesh, at.rank)}] "

    def _thread_name(self, mesh: str, rank: int, point: Mapping[str, int]) -> str:
        at = ", ".join(f"{label}={place}" for label, place in point.items())
        return self._rank_name(mesh, rank) + (f" ({at})" if at else "")

    def _rank_name(self, mesh: str, rank: int) -> str:
        with self._lock:
            several = len({each.name for each in self._meshes()} | {key[0] for key in self._at}) > 1
        return f"{mesh} rank {rank}" if several else f"rank {rank}"
