"""A mesh debugger whose ranks exist in memory only. It keeps what viewers ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.breakpoints import Countdown
from monarch_kernel.debugger.controller.viewers import Viewer, Viewers
from monarch_kernel.debugger.events import (
    Event,
    Key,
    MeshBreakpoint,
    RankErrorRecord,
    RankResumed,
    RankStop,
    RankStopped,
)
from monarch_kernel.debugger.model.stops import Bound, Breakpoint, ErrorRecord, Evaluation, Stop, StopFrame, Variable

CELL = "/tmp/ipykernel_1/42.py"
_PACKAGES = "/opt/lib/python3.11/site-packages"
FRAMES = (
    StopFrame(0, "work", CELL, 3, True, "y = x + 1"),
    StopFrame(1, "Sequential.forward", f"{_PACKAGES}/torch/nn/container.py", 217, False, ""),
    StopFrame(2, "<module>", CELL, 6, True, "work(rank)"),
    StopFrame(3, "CellRunner.run", f"{_PACKAGES}/monarch_kernel/kernel/rank/cell_runner.py", 90, False, ""),
    StopFrame(4, "Thread.run", "/usr/lib/python3.11/threading.py", 982, False, ""),
)


@dataclass
class Mesh:
    """What viewers want to know of a proc mesh."""

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


@dataclass
class Rank:
    """A rank with a script: the lines of `train.py` that it comes to, one with every step, and its variables.

    Attributes:
        at: how many of the lines are behind it.
        stop: the id of its stop.
        error: what it has failed with: its stop is a post mortem.
        of_peer: another rank has caused that.
    """

    lines: list[int]
    values: dict[str, Any] = field(default_factory=dict)
    mesh: str = "m"
    number: int = 0
    thread: int = 100
    at: int = 0
    stop: int = 1
    error: str = ""
    of_peer: bool = False

    def stopped(self) -> RankStop:
        """Its stop, as it is now."""
        line = self.lines[self.at]
        frames = (
            StopFrame(0, "step", "/src/train.py", line, True, f"line {line}"),
            StopFrame(1, "call", "/lib/site-packages/lib.py", 7, False, "f()"),
            StopFrame(2, "main", "/src/train.py", 90, True, "step(x)"),
        )
        reason = "post mortem" if self.error else "breakpoint" if self.at == 0 else "step"
        stop = Stop(
            self.stop, reason, self.error, int(not self.error and self.at == 0), 0 if self.error else self.thread,
            "actor", frames, "trainer", "train", "cell", 0.0, not self.error, self.of_peer,
        )  # fmt: skip
        return RankStop(self.mesh, self.number, {"gpus": self.number}, "here", 1000 + self.number, stop)


def stop_of(
    number: int,
    *,
    thread: int = 7,
    reason: Any = "breakpoint",
    text: str = "",
    line: int = 3,
    frames: tuple[StopFrame, ...] | None = None,
) -> Stop:
    """A stop in `work`, or with these frames."""
    frames = frames or (StopFrame(0, "work", CELL, line, True, ""), *FRAMES[1:])
    steppable = reason not in ("exception", "post mortem")
    return Stop(number, reason, text, 1, thread, "MainThread", frames, "cells", "run", "cell-1", 0.0, steppable)


class MemoryDebugger:
    """Stops come from the scripts of ranks, or are told by `stop` and `go`.

    The locals of rank N, if it has no script, are `x = N` and the list `items`, which claims to be long.

    Attributes:
        said: what viewers have asked for, in order.
        left: the countdown of a collective.
        binds: what ranks make of a breakpoint.
    """

    def __init__(self, *ranks: Rank) -> None:
        self.viewers = Viewers()
        self.said: list[tuple[Any, ...]] = []
        self.left: Countdown | None = None
        self.binds: Callable[[Breakpoint], dict[tuple[str, int], Bound]] = lambda spec: {}
        self._ranks = ranks
        self._subscribers: list[Callable[[Event], None]] = []
        self._stops = {at.key: at for at in (rank.stopped() for rank in ranks)}
        self._breakpoints: dict[int, MeshBreakpoint] = {}
        self._numbers = 0

    # -- what a test does -----------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for callback in list(self._subscribers):
            callback(event)

    def stop(self, rank: int, number: int = 1, mesh: str = "m", **how: Any) -> RankStop:
        return self._stopped(RankStop(mesh, rank, {"gpus": rank}, "host", 100 + rank, stop_of(number, **how)))

    def go(self, at: RankStop, how: str = "continue") -> None:
        del self._stops[at.key]
        self.tell(RankResumed(at.key, how))

    def _stopped(self, at: RankStop) -> RankStop:
        self._stops[at.key] = at
        self.tell(RankStopped(at))
        return at

    def _script(self, key: Key) -> Rank | None:
        return next((rank for rank in self._ranks if (rank.mesh, rank.number, rank.stop) == key), None)

    def _values(self, key: Key) -> dict[str, Any]:
        script = self._script(key)
        return script.values if script is not None else {"x": key[1], "items": list(range(key[1]))}

    # -- what viewers do --------------------------------------------------------------------------

    def viewer(self, name: str) -> Viewer:
        return self.viewers.open(name)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def mesh(self, name: str) -> Any:
        return Mesh(name, 8)

    def break_at(
        self,
        file: str,
        line: int,
        *,
        mesh: Any = None,
        ranks: Iterable[int] | None = None,
        condition: str = "",
        hits: int = 0,
        first: bool = False,
        differs: str = "",
        log: str = "",
        owner: str = "",
    ) -> MeshBreakpoint:
        return self._add(Breakpoint(0, file, line, condition, hits, first, differs, log=log), owner, mesh, ranks)

    def break_on_error(
        self, error: str = "*", *, mesh: Any = None, ranks: Iterable[int] | None = None, owner: str = ""
    ) -> MeshBreakpoint:
        return self._add(Breakpoint(0, error=error), owner, mesh, ranks)

    def replace(self, file: str, owner: str, lines: Sequence[Mapping[str, Any]]) -> list[MeshBreakpoint]:
        self.said.append(("replace", file, owner, [dict(each) for each in lines]))
        return [
            self._add(Breakpoint(0, file, each["line"], each.get("condition", ""), each.get("hits", 0)), owner)
            for each in lines
        ]

    def _add(
        self, spec: Breakpoint, owner: str, mesh: Any = None, ranks: Iterable[int] | None = None
    ) -> MeshBreakpoint:
        self._numbers += 1
        chosen = None if ranks is None else tuple(ranks)
        made = MeshBreakpoint(self._numbers, mesh, chosen, spec, owner, self.binds(spec))
        self._breakpoints[made.id] = made
        return made

    def breakpoints(self) -> list[MeshBreakpoint]:
        return list(self._breakpoints.values())

    def clear(self, number: int | None = None, owner: str | None = None) -> int:
        if number is not None and number not in self._breakpoints:
            raise ValueError(f"there is no breakpoint {number}; there are none")
        gone = [b.id for b in self._breakpoints.values() if number in (None, b.id) and owner in (None, b.owner)]
        for each in gone:
            del self._breakpoints[each]
        return len(gone)

    def stops(self, mesh: Any = None) -> list[RankStop]:
        return sorted((at for at in self._stops.values() if mesh in (None, at.mesh)), key=lambda at: at.key)

    def wait(self, predicate: Callable[[list[RankStop]], bool] = bool, timeout: float | None = None) -> list[RankStop]:
        return self.stops()

    def countdown(self, stops: Iterable[RankStop]) -> Countdown | None:
        return self.left

    def pause(self, mesh: Any = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None) -> None:
        self.viewers.check(viewer)
        self.said.append(("pause", mesh, ranks))

    def cancel_pause(self, mesh: Any = None, ranks: Iterable[int] | None = None, viewer: Viewer | None = None) -> None:
        self.viewers.check(viewer)
        self.said.append(("cancel_pause", mesh, ranks))

    def resume(
        self, stops: Iterable[RankStop], how: str = "continue", line: int = 0, viewer: Viewer | None = None
    ) -> None:
        self.viewers.check(viewer)
        stops = list(stops)
        self.said.append(("resume", [at.rank for at in stops], how))
        for at in stops:
            rank = self._script(at.key)
            self.go(at, how)
            if rank is None or how == "continue":
                continue
            rank.at += 1
            while how == "until" and rank.lines[rank.at] < line:
                rank.at += 1
            rank.stop += 1
            if rank.at < len(rank.lines):
                self._stopped(rank.stopped())

    def errors(self, mesh: Any = None, ranks: Iterable[int] | None = None) -> list[RankErrorRecord]:
        wanted = None if ranks is None else set(ranks)
        kept = [at for at in self.stops() if at.stop.reason == "post mortem" and (wanted is None or at.rank in wanted)]
        found = [
            RankErrorRecord(
                at.mesh,
                at.rank,
                ErrorRecord(
                    at.stop.cell, at.stop.text, at.stop.actor, at.stop.endpoint, "", -at.stop.since, at.stop.of_peer
                ),
            )
            for at in kept
        ]
        return sorted(found, key=lambda each: each.error.age)

    def post_mortem(self, mesh: Any = None, ranks: Iterable[int] | None = None, key: str = "") -> list[RankStop]:
        wanted = {each.rank for each in self.errors(mesh, ranks) if each.error.key == key}
        return [at for at in self.stops() if at.stop.reason == "post mortem" and at.rank in wanted]

    def evaluate(
        self, stops: Iterable[RankStop], source: str, frame: int = 0, timeout: float = 5.0, *, raw: bool = False
    ) -> dict[Key, Evaluation]:
        found: dict[Key, Evaluation] = {}
        for at in stops:
            self.said.append(("evaluate", at.rank, source, frame))
            try:
                value = eval(source, {**self._values(at.key), "frame": frame})
            except SyntaxError:
                found[at.key] = Evaluation("")  # a statement
            except Exception as error:
                found[at.key] = Evaluation("", error=f"{type(error).__name__}: {error}")
            else:
                text = value if raw and isinstance(value, str) else "" if value is None else repr(value)
                found[at.key] = Evaluation(text, type(value).__name__)
        return found

    def call(
        self, stops: Iterable[RankStop], function: Callable[[Any], Any], frame: int = 0, timeout: float = 5.0
    ) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for at in stops:
            try:
                found[at.key] = function(SimpleNamespace(f_locals=self._values(at.key), f_globals={}))
            except Exception as error:
                found[at.key] = RuntimeError(f"{type(error).__name__}: {error}")
        return found

    def scopes(self, key: Key, frame: int) -> list[Variable]:
        return [Variable("Locals", "", "", 1, 2), Variable("Globals", "", "", 2, 1)]

    def variables(self, key: Key, ref: int, start: int = 0, count: int = 0) -> list[Variable]:
        self.said.append(("variables", ref, start, count))
        values = self._values(key)
        everything = {
            1: [
                Variable(name, repr(value), type(value).__name__, *((3, 0, 1200) if isinstance(value, list) else ()))
                for name, value in values.items()
            ],
            2: [Variable("__name__", "'__main__'", "str"), Variable("rank", str(key[1]), "int")],
            3: [*(Variable(str(at), str(at), "int") for at in range(1200)), Variable("append", "method", "method")],
        }[ref]
        return everything[start : start + count] if count else everything[start:]

    def set_variable(self, key: Key, ref: int, name: str, expression: str, viewer: Viewer | None = None) -> Variable:
        self.viewers.check(viewer)
        self.said.append(("set", key[1], ref, name, expression))
        return Variable(name, expression, "int")
