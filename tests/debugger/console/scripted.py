"""A debugger over ranks that exist in memory only: each is a list of places that it comes to, one with every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.commands.frontend import Surroundings
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.controller.collective_timeouts import Countdown
from monarch_kernel.debugger.controller.viewers import Viewer, Viewers
from monarch_kernel.debugger.events import MeshBreakpoint, RankStop, RankStopped
from monarch_kernel.debugger.model.stops import Breakpoint, Evaluation, Frame, Stop, Variable


@dataclass
class Rank:
    """One rank: the lines of `train.py` that it comes to in `step`, and its variables."""

    lines: list[int]
    values: dict[str, Any] = field(default_factory=dict)
    mesh: str = "m"
    number: int = 0
    thread: int = 100
    at: int = 0
    stop: int = 0
    error: str = ""


class Scripted:
    """What a console uses of a `MeshDebugger`."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = list(ranks)
        self.viewers = Viewers()
        self.left: Countdown | None = None
        self.made: list[MeshBreakpoint] = []
        self.paused: list[tuple[Any, Any]] = []
        self._hearers: list[Callable[[Any], None]] = []
        self._resumed: set[tuple[str, int, int]] = set()
        for rank in self.ranks:
            rank.stop = 1

    def _stop(self, rank: Rank) -> RankStop:
        line = rank.lines[rank.at]
        frames = (
            Frame(0, "step", "/src/train.py", line, True, f"line {line}"),
            Frame(1, "call", "/lib/site-packages/lib.py", 7, False, "f()"),
            Frame(2, "main", "/src/train.py", 90, True, "step(x)"),
        )
        reason = "post mortem" if rank.error else "breakpoint" if rank.at == 0 else "step"
        stop = Stop(
            rank.stop, reason, rank.error, int(not rank.error and rank.at == 0), 0 if rank.error else rank.thread,
            "actor", frames, "trainer", "train", "cell", 0.0, not rank.error,
        )  # fmt: skip
        return RankStop(rank.mesh, rank.number, {"gpus": rank.number}, "here", 1000 + rank.number, stop)

    # -- as a MeshDebugger ------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self._hearers.append(callback)
        return lambda: self._hearers.remove(callback)

    def stops(self, mesh: Any = None) -> list[RankStop]:
        found = [self._stop(rank) for rank in self.ranks if rank.at < len(rank.lines)]
        return sorted((at for at in found if at.key not in self._resumed), key=lambda at: at.key)

    def countdown(self, stops: Sequence[RankStop]) -> Countdown | None:
        return self.left

    def wait(self, predicate: Callable[[Any], bool] = bool, timeout: float | None = None) -> list[RankStop]:
        return self.stops()

    def resume(self, stops: Iterable[RankStop], how: str = "continue", line: int = 0, viewer: Any = None) -> None:
        self.viewers.check(viewer)
        keys = {at.key for at in stops}
        for rank in self.ranks:
            if (rank.mesh, rank.number, rank.stop) not in keys:
                continue
            if how == "continue":
                self._resumed.add((rank.mesh, rank.number, rank.stop))
                continue
            rank.at += 1
            while how == "until" and rank.lines[rank.at] < line:
                rank.at += 1
            rank.stop += 1
            if rank.at < len(rank.lines):
                for hear in list(self._hearers):
                    hear(RankStopped(self._stop(rank)))

    def pause(self, mesh: Any = None, ranks: Any = None, viewer: Any = None) -> None:
        self.viewers.check(viewer)
        self.paused.append((mesh, ranks))

    def evaluate(
        self, stops: Sequence[RankStop], source: str, frame: int = 0, timeout: float = 5.0
    ) -> dict[Any, Evaluation]:
        found: dict[Any, Evaluation] = {}
        for at in stops:
            rank = self._of(at)
            try:
                value = eval(source, {}, {**rank.values, "frame": frame})
                found[at.key] = Evaluation("" if value is None else repr(value), type(value).__name__)
            except Exception as error:
                found[at.key] = Evaluation("", error=f"{type(error).__name__}: {error}")
        return found

    def call(self, stops: Sequence[RankStop], function: Any, frame: int = 0, timeout: float = 5.0) -> dict[Any, Any]:
        class Fake:
            f_locals: dict[str, Any]

        found: dict[Any, Any] = {}
        for at in stops:
            fake = Fake()
            fake.f_locals = self._of(at).values
            found[at.key] = function(fake)
        return found

    def scopes(self, key: Any, frame: int) -> list[Variable]:
        return [Variable("Locals", "", "", 1)]

    def variables(self, key: Any, ref: int, start: int = 0, count: int = 0) -> list[Variable]:
        rank = next(rank for rank in self.ranks if (rank.mesh, rank.number) == key[:2])
        return [Variable(name, repr(value), "") for name, value in rank.values.items()]

    def post_mortem(self, mesh: Any = None, ranks: Any = None) -> list[RankStop]:
        return [at for at in self.stops() if at.stop.reason == "post mortem" and (ranks is None or at.rank in ranks)]

    def break_at(self, file: str, line: int, *, mesh: Any = None, ranks: Any = None, **options: Any) -> MeshBreakpoint:
        names = {"condition": "condition", "hits": "hits", "first": "first", "differs": "differs", "log": "log"}
        spec = Breakpoint(len(self.made) + 1, file, line, **{names[name]: value for name, value in options.items()})
        self.made.append(MeshBreakpoint(spec.id, mesh, ranks, spec))
        return self.made[-1]

    def break_on_error(self, error: str = "*", *, mesh: Any = None, ranks: Any = None) -> MeshBreakpoint:
        self.made.append(MeshBreakpoint(len(self.made) + 1, mesh, ranks, Breakpoint(len(self.made) + 1, error=error)))
        return self.made[-1]

    def breakpoints(self) -> list[MeshBreakpoint]:
        return list(self.made)

    def clear(self, number: int) -> None:
        found = [each for each in self.made if each.id == number]
        if not found:
            raise ValueError(f"there is no breakpoint {number}; there are none")
        self.made.remove(found[0])

    def viewer(self, name: str) -> Viewer:
        return self.viewers.open(name)

    def _of(self, at: RankStop) -> Rank:
        return next(rank for rank in self.ranks if (rank.mesh, rank.number, rank.stop) == at.key)


class Notebook(Surroundings):
    """A mesh `m` of eight ranks in use, and one cell, In[5], of four lines."""

    def label(self, file: str) -> str | None:
        return "Cell In[5]" if file == "/cells/5.py" else None

    def mesh(self) -> str | None:
        return "m"

    def cell(self, number: int) -> tuple[str, str]:
        if number not in (0, 5):
            raise CommandError(f"there is no cell In[{number}]")
        return "/cells/5.py", "%%mesh\na = 1\nb = 2\nc = 3\n"

    def extent(self, mesh: str) -> Extent:
        if mesh not in ("m", "other"):
            raise CommandError(f"no mesh is called {mesh!r}")
        return Extent(("gpus",), (8,))
