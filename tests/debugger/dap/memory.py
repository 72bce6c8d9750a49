"""A mesh debugger in memory: stops are told to it, and what viewers ask of it is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.viewers import Viewer, Viewers
from monarch_kernel.debugger.events import Event, Key, MeshBreakpoint, RankResumed, RankStop, RankStopped
from monarch_kernel.debugger.model.stops import Bound, Breakpoint, Evaluation, Frame, Stop, Variable

CELL = "/tmp/ipykernel_1/42.py"
FRAMES = (
    Frame(0, "work", CELL, 3, True, "y = x + 1"),
    Frame(1, "Sequential.forward", "/opt/lib/python3.11/site-packages/torch/nn/container.py", 217, False, ""),
    Frame(2, "<module>", CELL, 6, True, "work(rank)"),
    Frame(
        3,
        "CellRunner.run",
        "/opt/lib/python3.11/site-packages/monarch_kernel/kernel/rank/cell_runner.py",
        90,
        False,
        "",
    ),
    Frame(4, "Thread.run", "/usr/lib/python3.11/threading.py", 982, False, ""),
)


@dataclass
class Mesh:
    """What a session wants to know of a proc mesh."""

    name: str
    size: int
    gone: dict[int, str] = field(default_factory=dict[int, str])

    def __len__(self) -> int:
        return self.size

    @property
    def extent(self) -> Extent:
        return Extent(["gpus"], [self.size])

    def dead(self) -> dict[int, str]:
        return dict(self.gone)


def stop_of(number: int, *, thread: int = 7, reason: Any = "breakpoint", text: str = "", line: int = 3) -> Stop:
    """A stop in `work`."""
    frames = (Frame(0, "work", CELL, line, True, ""), *FRAMES[1:])
    return Stop(number, reason, text, 1, thread, "MainThread", frames, "cells", "run", "cell-1", 0.0, True)


class Debugger:
    """As `MeshDebugger`; the locals of rank N are `x = N` and a list."""

    def __init__(self) -> None:
        self.viewers = Viewers()
        self.said: list[tuple[Any, ...]] = []
        self.binds: Callable[[Breakpoint], dict[tuple[str, int], Bound]] = lambda spec: {}
        self._subscribers: list[Callable[[Event], None]] = []
        self._stops: dict[Key, RankStop] = {}
        self._breakpoints: dict[int, MeshBreakpoint] = {}
        self._numbers = 0

    # -- what a test does -----------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for callback in list(self._subscribers):
            callback(event)

    def stop(self, rank: int, number: int = 1, mesh: str = "m", **how: Any) -> RankStop:
        at = RankStop(mesh, rank, {"gpus": rank}, "host", 100 + rank, stop_of(number, **how))
        self._stops[at.key] = at
        self.tell(RankStopped(at))
        return at

    def go(self, at: RankStop, how: str = "continue") -> None:
        del self._stops[at.key]
        self.tell(RankResumed(at.key, how))

    # -- what a session does ----------------------------------------------------------------------

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def viewer(self, name: str) -> Viewer:
        return self.viewers.open(name)

    def stops(self, mesh: Any = None) -> list[RankStop]:
        return sorted((at for at in self._stops.values() if mesh in (None, at.mesh)), key=lambda at: at.key)

    def _add(self, spec: Breakpoint, owner: str) -> MeshBreakpoint:
        self._numbers += 1
        made = MeshBreakpoint(self._numbers, None, None, spec, owner, self.binds(spec))
        self._breakpoints[made.id] = made
        return made

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, Any]]) -> list[MeshBreakpoint]:
        self.said.append(("replace", file, owner, [dict(each) for each in lines]))
        return [
            self._add(Breakpoint(0, file, each["line"], each.get("condition", ""), each.get("hits", 0)), owner)
            for each in lines
        ]

    def break_on_error(self, error: str = "*", *, owner: str = "") -> MeshBreakpoint:
        return self._add(Breakpoint(0, error=error), owner)

    def breakpoints(self) -> list[MeshBreakpoint]:
        return list(self._breakpoints.values())

    def clear(self, number: int | None = None, owner: str | None = None) -> int:
        gone = [b.id for b in self._breakpoints.values() if number in (None, b.id) and owner in (None, b.owner)]
        for each in gone:
            del self._breakpoints[each]
        return len(gone)

    def resume(self, stops: Iterable[RankStop], how: str = "continue", viewer: Viewer | None = None) -> None:
        self.viewers.check(viewer)
        stops = list(stops)
        self.said.append(("resume", [at.rank for at in stops], how))
        for at in stops:
            self.go(at, how)

    def pause(self, mesh: Any = None, ranks: Any = None, viewer: Viewer | None = None) -> None:
        self.said.append(("pause", mesh, ranks))

    def evaluate(self, stops: Iterable[RankStop], source: str, frame: int = 0) -> dict[Key, Evaluation]:
        found: dict[Key, Evaluation] = {}
        for at in stops:
            self.said.append(("evaluate", at.rank, source, frame))
            try:
                value = eval(source, {"x": at.rank, "items": list(range(at.rank))})
            except SyntaxError:
                found[at.key] = Evaluation("")  # a statement
            except Exception as error:
                found[at.key] = Evaluation("", error=f"{type(error).__name__}: {error}")
            else:
                found[at.key] = Evaluation(repr(value), type(value).__name__)
        return found

    def call(self, stops: Iterable[RankStop], function: Callable[[Any], Any], frame: int = 0) -> dict[Key, Any]:
        names = {at.key: {"x": at.rank, "items": list(range(at.rank))} for at in stops}
        found: dict[Key, Any] = {}
        for key, variables in names.items():
            try:
                found[key] = function(SimpleNamespace(f_locals=variables, f_globals={}))
            except Exception as error:
                found[key] = RuntimeError(f"{type(error).__name__}: {error}")
        return found

    def scopes(self, key: Key, frame: int) -> list[Variable]:
        return [Variable("Locals", "", "", 1, 2), Variable("Globals", "", "", 2, 1)]

    def variables(self, key: Key, ref: int, start: int = 0, count: int = 0) -> list[Variable]:
        self.said.append(("variables", ref, start, count))
        everything = {
            1: [Variable("x", str(key[1]), "int"), Variable("items", "[0, 1]", "list", 3, 0, 1200)],
            2: [Variable("__name__", "'__main__'", "str"), Variable("rank", str(key[1]), "int")],
            3: [*(Variable(str(at), str(at), "int") for at in range(1200)), Variable("append", "method", "method")],
        }[ref]
        return everything[start : start + count] if count else everything[start:]

    def set_variable(self, key: Key, ref: int, name: str, expression: str, viewer: Viewer | None = None) -> Variable:
        self.viewers.check(viewer)
        self.said.append(("set", key[1], ref, name, expression))
        return Variable(name, expression, "int")
