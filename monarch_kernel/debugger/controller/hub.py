"""The debugger of a controller: every breakpoint, every stopped rank, and which viewer controls them.

There is one `MeshDebugger` in the controller process, which any thread may use. Ranks report their stops to the actor
`DebugHub`, which forwards them to the debugger's registry on the actor's thread. The debugger sends its own requests to
the agents of ranks, with a deadline. It keeps a stop until the rank continues or dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ProcMesh
from monarch_kernel.debugger import on_made
from monarch_kernel.debugger.controller.breakpoints import Breakpoints, Countdown, check, countdown
from monarch_kernel.debugger.controller.query import Answers, ask_agents
from monarch_kernel.debugger.controller.registry import DebuggedMesh, MeshOrName, StopRegistry
from monarch_kernel.debugger.controller.sets import StopSet
from monarch_kernel.debugger.controller.viewers import DriverError, Viewer, Viewers
from monarch_kernel.debugger.events import Event, Key, MeshBreakpoint, RankErrorRecord, RankStop
from monarch_kernel.debugger.model.stops import Breakpoint, Evaluation, StopFrame, Variable
from monarch_kernel.debugger.rank import rank_debugger
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import on_sources_changed
from monarch_kernel.subscriptions import Subscription

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh


HOWS = ("continue", "next", "step", "out", "until")
#: How long ranks may take for requests that are immediate (seconds). The debugger does not wait for slower ranks.
QUICK = 2.0
#: The same for requests that are often the first: ranks of joined jobs load the tools for them.
FIRST = 5.0


class MeshDebugger:
    """The interface for viewers; `get_debugger` returns the instance of this process.

    Attributes:
        registry: the watched meshes, and their stops.
        breakpoint_table: the breakpoints.
        viewers: the viewers, including the one that has control.
    """

    def __init__(self) -> None:
        self.registry = StopRegistry()
        self.viewers = Viewers()
        self.breakpoint_table = Breakpoints(self.registry)
        self._sources = on_sources_changed(self.breakpoint_table.on_sources_changed)

    def close(self) -> None:
        """Close the debugger, when the runtime ends."""
        self._sources.close()
        self.registry.close()

    def subscribe(self, callback: Callable[[Event], None]) -> Subscription:
        """Call ``callback(event)`` for every event, on a thread of the debugger. The callback must not block.

        Returns:
            The subscription; closing (or calling) it unsubscribes.
        """
        return self.registry.subscribe(callback)

    # -- meshes ----------------------------------------------------------------------------------

    def watch(self, mesh: ProcMesh | ActorMesh[object]) -> str:
        """Spawn agents on a mesh if it has none, without waiting for them. Return the mesh's name for viewers."""
        return self.registry.watch(mesh).name

    def mesh(self, name: str) -> ProcMesh:
        """Return the proc mesh of that name. Raises ValueError if there is none."""
        return self.registry.named(name).whole.procs

    def joined(self, mesh: ProcMesh) -> None:
        """Arm the breakpoints for all meshes on a new mesh, before any code runs on it."""
        self.breakpoint_table.on_new_mesh(mesh)

    # -- breakpoints -----------------------------------------------------------------------------

    def break_at(
        self,
        file: str,
        line: int,
        *,
        mesh: MeshOrName | None = None,
        ranks: Iterable[int] | None = None,
        condition: str = "",
        hits: int = 0,
        first: bool = False,
        differs: str = "",
        log: str = "",
        owner: str = "",
    ) -> MeshBreakpoint:
        """Stop ranks at a line; see `model.stops.Breakpoint` for the conditions.

        Args:
            mesh: a proc mesh or its name; None for all meshes of this controller, including later ones.
            ranks: the ranks, as numbered in the mesh as spawned; None for all.
            owner: the viewer that sets it; "" for the user.

        Returns:
            The breakpoint, with its state in the ranks that answered in time.

        Raises:
            ValueError: the line or an expression is invalid, or there is no such mesh or rank.
            DriverError: another viewer has control of that job.
        """
        spec = Breakpoint(0, file, line, condition, hits, first, differs, log=log)
        check(spec)
        self._control(mesh)
        return self.breakpoint_table.add(spec, mesh, ranks, owner)

    def break_on_error(
        self, error: str = "*", *, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None, owner: str = ""
    ) -> MeshBreakpoint:
        """Stop ranks where an endpoint or a cell ends with an exception.

        Args:
            error: the name of the exception's class, or of one of its base classes; "*" for any.
        """
        self._control(mesh)
        return self.breakpoint_table.add(Breakpoint(0, error=error), mesh, ranks, owner)

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, object]]) -> list[MeshBreakpoint]:
        """Make these the only breakpoints of an owner in a file, as the Debug Adapter Protocol's `setBreakpoints` does.

        Args:
            lines: for each breakpoint, ``line``, and optionally ``condition``, ``hits`` and ``log``.
        """
        self._control(None)
        return self.breakpoint_table.replace(file, owner, lines)

    def breakpoints(self) -> list[MeshBreakpoint]:
        """Return all breakpoints, oldest first."""
        return self.breakpoint_table.all()

    def clear(self, number: int | None = None, owner: str | None = None) -> int:
        """Remove a breakpoint, or all of an owner (None: of all owners). Return how many were removed.

        Raises:
            ValueError: there is no breakpoint with that number.
        """
        return self.breakpoint_table.clear(number, owner)

    # -- stops -----------------------------------------------------------------------------------

    def stops(self, mesh: MeshOrName | None = None) -> list[RankStop]:
        """Return all stops, of one mesh or of all, sorted by mesh and rank."""
        return self.registry.stops(mesh)

    def wait(self, predicate: Callable[[list[RankStop]], bool] = bool, timeout: float | None = None) -> list[RankStop]:
        """Wait until ``predicate(stops())`` holds or the timeout expires. Return the stops."""
        stops: list[RankStop] = []

        def holds() -> bool:
            nonlocal stops
            stops = self.registry.stops()
            return predicate(stops)

        self.registry.wait(holds, timeout)
        return stops

    def countdown(self, stops: Iterable[RankStop]) -> Countdown | None:
        """Return the first timeout of the collectives in which other ranks wait for these stops. Takes up to 0.5 s."""
        return countdown(self, list(stops))

    def pause(
        self, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None
    ) -> None:
        """Stop ranks at their next line of user code."""
        self.viewers.check(viewer)
        self._control(mesh)
        self._quickly(mesh, ranks, rank_debugger.pause)

    def cancel_pause(
        self, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None
    ) -> None:
        """Let those of these ranks continue that `pause` has not stopped yet."""
        self.viewers.check(viewer)
        self._quickly(mesh, ranks, rank_debugger.cancel_pause)

    def resume(
        self, stops: Iterable[RankStop], how: str = "continue", line: int = 0, viewer: Viewer | None = None
    ) -> None:
        """Let stopped ranks continue, all at the same time.

        Args:
            how: "continue", "next", "step" (into calls), "out", or "until" a ``line``.

        Raises:
            DriverError: another viewer has control.
            ValueError: ``how`` is not one of these.
        """
        if how not in HOWS:
            raise ValueError(f"{how!r} is not a way to continue: use one of {', '.join(HOWS)}")
        self.viewers.check(viewer)
        for watched, ids, ranks in self._addressed(stops):
            answers = self._ask(watched, ranks, QUICK, rank_debugger.resume, ids, how, line)
            for rank, done in answers.values.items():
                for stop in self._ids_of(ids, rank) - set(done):
                    self.registry.on_resumed(watched.whole.uid, rank, stop, how)  # it was over, and its event was lost

    def evaluate(
        self, stops: Iterable[RankStop], source: str, frame: int = 0, timeout: float = 5.0, *, raw: bool = False
    ) -> dict[Key, Evaluation]:
        """Evaluate an expression (or run a statement) in a frame of each stop, on the stopped thread.

        Args:
            raw: return strings unchanged, rather than their `repr` of limited length.
        """
        found: dict[Key, Evaluation] = {}
        function = rank_debugger.evaluate_raw if raw else rank_debugger.evaluate
        for key, value in self._each(stops, timeout, function, frame, source).items():
            found[key] = value if isinstance(value, Evaluation) else Evaluation("", error=str(value))
        return found

    def call(
        self, stops: Iterable[RankStop], function: Callable[[Any], Any], frame: int = 0, timeout: float = 5.0
    ) -> dict[Key, Any]:
        """Call ``function(frame)`` in each stop, on the stopped thread; an exception it raises replaces the value."""
        return self._each(stops, timeout, rank_debugger.call, frame, function)

    def _each(
        self, stops: Iterable[RankStop], timeout: float, function: Callable[..., object], *args: object
    ) -> dict[Key, object]:
        found: dict[Key, object] = {}
        for watched, ids, ranks in self._addressed(stops):
            answers = self._ask(watched, ranks, timeout + QUICK / 2, function, ids, *args, timeout)
            for rank in ranks:
                for stop in self._ids_of(ids, rank):
                    key = (watched.name, rank, stop)
                    if rank in answers.values:
                        found[key] = answers.values[rank].get(stop, RuntimeError("this stop is over"))
                    elif rank in answers.errors:
                        found[key] = RuntimeError(answers.error_of(rank))
                    else:
                        why = answers.dead.get(rank) or f"no answer within {timeout:g} s"
                        found[key] = RuntimeError(f"rank {rank} of mesh {watched.name}: {why}")
        return found

    def scopes(self, key: Key, frame: int) -> list[Variable]:
        """Return the scopes of a frame of a stop. Raises LookupError if the stop is over."""
        return self._one(key, rank_debugger.scopes, frame)

    def variables(self, key: Key, ref: int, start: int = 0, count: int = 0) -> list[Variable]:
        """Return the children of a value of a stop (all if ``count`` is 0). Raises LookupError if the stop is over."""
        return self._one(key, rank_debugger.variables, ref, start, count)

    def set_variable(self, key: Key, ref: int, name: str, expression: str, viewer: Viewer | None = None) -> Variable:
        """Set a child of a value of a stop."""
        self.viewers.check(viewer)
        return self._one(key, rank_debugger.set_variable, ref, name, expression)

    def frames(self, key: Key) -> tuple[StopFrame, ...]:
        """Return the frames of a stop, innermost first. Raises LookupError if the stop is over."""
        return self.stop_of(key).stop.frames

    def stop_of(self, key: Key) -> RankStop:
        """Return the stop of that key. Raises LookupError if it is over."""
        return self.registry.stop_of(key)

    def _one(self, key: Key, function: Callable[..., object], *args: object) -> Any:
        at = self.stop_of(key)
        watched = self.registry.named(key[0])
        answers = self._ask(watched, [at.rank], QUICK, function, at.stop.id, *args)
        if at.rank in answers.values:
            return answers.values[at.rank]
        if at.rank in answers.errors:
            raise RuntimeError(answers.error_of(at.rank))
        why = answers.dead.get(at.rank) or f"no answer within {QUICK:g} s"
        raise LookupError(f"rank {at.rank} of mesh {watched.name}: {why}")

    def errors(self, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None) -> list[RankErrorRecord]:
        """Return the errors of cells and endpoints whose frames ranks keep, the last one first."""
        found = [
            RankErrorRecord(watched.name, rank, error)
            for watched, answers in self._quickly(mesh, ranks, rank_debugger.kept_errors, FIRST)
            for rank, errors in answers.values.items()
            for error in errors
        ]
        return sorted(found, key=lambda each: each.error.age)

    def post_mortem(
        self, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None, key: str = ""
    ) -> list[RankStop]:
        """Open the frames that ranks keep of one failed cell or endpoint; each is a stop, which "continue" closes.

        Such a stop has no thread, and blocks nothing.

        Args:
            mesh: the mesh; None for all.
            ranks: the ranks; None for all.
            key: which failure, as in `ErrorRecord`; by default the last one of these ranks.
        """
        chosen = None if ranks is None else sorted(set(ranks))
        if not key:
            errors = self.errors(mesh, chosen)
            if not errors:
                return []
            key = errors[0].error.key
        found: list[RankStop] = []
        for watched, answers in self._quickly(mesh, chosen, partial(rank_debugger.post_mortem, key), FIRST):
            for rank, (pid, stop) in answers.values.items():
                if stop is not None:
                    self.registry.on_stopped(watched.whole.uid, rank, pid, stop)
                    found.append(self.stop_of((watched.name, rank, stop.id)))
        return sorted(found, key=lambda at: at.key)

    def _control(self, mesh: MeshOrName | None) -> None:
        """Raise DriverError if another viewer controls a mesh that is a joined job; None: all meshes."""
        meshes = tool_runtime().list_proc_meshes() if mesh is None else [self.registry.find(mesh).whole.procs]
        others = [tool_runtime().driver_of(each) for each in meshes]
        if others and all(others):
            raise DriverError(
                f"{others[0]} controls job {meshes[0].name}: watch, ask it to leave, or take over with %mesh join "
                f"{meshes[0].name} --drive"
            )

    # -- requests ----------------------------------------------------------------------------------

    def _quickly(
        self,
        mesh: MeshOrName | None,
        ranks: Iterable[int] | None,
        function: Callable[[], object],
        timeout: float = QUICK,
    ) -> list[tuple[DebuggedMesh, Answers]]:
        if mesh is None:
            self.registry.watch_all()
        chosen = None if ranks is None else sorted(set(ranks))
        meshes = self.registry.all() if mesh is None else [self.registry.find(mesh)]
        found = [(watched, self._ask(watched, chosen, timeout, function)) for watched in meshes]
        for watched, answers in found:
            for rank in answers.errors:
                raise RuntimeError(f"rank {rank} of mesh {watched.name} could not do this: {answers.error_of(rank)}")
        return found

    def _ask(
        self,
        watched: DebuggedMesh,
        ranks: Sequence[int] | None,
        timeout: float,
        function: Callable[..., object],
        *args: object,
    ) -> Answers:
        return ask_agents(watched.agents, watched.whole, function, *args, ranks=ranks, timeout=timeout)

    def _addressed(self, stops: Iterable[RankStop]) -> list[tuple[DebuggedMesh, rank_debugger.Ids, list[int]]]:
        """Return the meshes of these stops, each with its stops' ids (one number if all are equal) and ranks."""
        by_mesh: dict[str, dict[int, list[int]]] = {}
        for at in stops:
            by_mesh.setdefault(at.mesh, {}).setdefault(at.rank, []).append(at.stop.id)
        found: list[tuple[DebuggedMesh, rank_debugger.Ids, list[int]]] = []
        for name, ids in by_mesh.items():
            watched = self.registry.named(name)
            distinct = {tuple(each) for each in ids.values()}
            alike = len(distinct) == 1 and len(next(iter(distinct))) == 1
            found.append((watched, next(iter(distinct))[0] if alike else ids, sorted(ids)))
        return found

    @staticmethod
    def _ids_of(ids: rank_debugger.Ids, rank: int) -> set[int]:
        return {ids} if isinstance(ids, int) else set(ids.get(rank, ()))

    # -- viewers -------------------------------------------------------------------------------------

    def viewer(self, name: str) -> Viewer:
        """Create a viewer. The first one to act takes control."""
        return self.viewers.open(name)

    def select(
        self, mesh: MeshOrName | None = None, ranks: Iterable[int] | None = None, keys: Iterable[Key] | None = None
    ) -> StopSet:
        """Return stopped ranks as a set whose ranks step together (`sets.StopSet`)."""
        wanted = None if keys is None else set(keys)
        of = None if ranks is None else set(ranks)
        stops = [
            at for at in self.stops(mesh) if (of is None or at.rank in of) and (wanted is None or at.key in wanted)
        ]
        return StopSet(self, stops)


_debugger: MeshDebugger | None = None
_lock = threading.Lock()


def get_debugger() -> MeshDebugger:
    """Return the debugger of this controller. The first call creates it."""
    global _debugger
    with _lock:
        if _debugger is not None:
            return _debugger
        made = _debugger = MeshDebugger()
    on_made.notify(made)
    return made


def existing_debugger() -> MeshDebugger | None:
    """Return the debugger of this controller; None if there is none yet."""
    return _debugger


def forget_debugger() -> None:
    """Close the debugger, when the runtime ends."""
    global _debugger
    with _lock:
        debugger, _debugger = _debugger, None
    if debugger is not None:
        debugger.close()
