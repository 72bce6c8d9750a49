"""The read-only commands of a console: stacks, frames, values, source, reports on meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.commands.grammar import CommandError, read_count
from monarch_kernel.debugger.commands.stop_text import (
    RankNames,
    answers,
    columns,
    frame_source,
    location_text,
    source_text,
    stack_text,
    why,
)
from monarch_kernel.debugger.events import frame_key, grouped, shown_frame, user_frames
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.debugger.rank.frame_tools import local_values
from monarch_kernel.meshes import parse_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.debugger.model.stops import Stop, StopFrame


# The stopped ranks that a console's commands act on, and the frame that it shows for them.

Thread = tuple[str, int, int | None]
"""A mesh, a rank, and one of its threads (None: all). Unlike a stop's key, it stays the same after a step."""


def thread_of(at: RankStop) -> Thread:
    """Return the thread of a stop. Each post mortem counts as a separate thread."""
    return (at.mesh, at.rank, at.stop.thread or -at.stop.id)


class StopSelection:
    """A *scope* (all stops, or those that the user has selected), and optionally one group of it.

    Attributes:
        attached: whether the scope is one rank that `attach` selected.
        level: the frame that is shown, as the number of frames of user code outwards from the innermost one.
    """

    def __init__(self, debugger: MeshDebugger, frontend: Frontend) -> None:
        self._debugger = debugger
        self._frontend = frontend
        self._scope: set[Thread] | None = None
        self._group: set[Thread] | None = None
        self.attached = False
        self.level = 0

    # -- changing the selection --------------------------------------------------------------------

    def choose(self, threads: Iterable[Thread] | None, attached: bool = False) -> None:
        """Make these threads the scope; None means all stops."""
        self._scope = None if threads is None else set(threads)
        self._group, self.attached, self.level = None, attached, 0

    def narrow(self, stops: Iterable[RankStop] | None) -> None:
        """Select one group of the scope; None means the whole scope."""
        self._group = None if stops is None else {thread_of(at) for at in stops}
        self.level = 0

    @property
    def is_narrowed(self) -> bool:
        """Whether one group is selected."""
        return self._group is not None

    # -- the selection -------------------------------------------------------------------------------

    def all(self) -> list[RankStop]:
        """Return all current stops."""
        return self._debugger.stops()

    def of(self, threads: set[Thread] | None) -> list[RankStop]:
        """Return the stops of these threads."""
        stops = self.all()
        if threads is None:  # post mortems are shown only if no live thread is stopped
            return [at for at in stops if at.stop.thread] or stops
        return [at for at in stops if (at.mesh, at.rank, None) in threads or thread_of(at) in threads]

    def scope(self) -> list[RankStop]:
        """Return the stops of the scope."""
        return self.of(self._scope)

    def chosen(self) -> list[RankStop]:
        """Return the stops that commands act on."""
        stops = self.scope()
        if self._group is None:
            return stops
        # A group of which no rank is left has continued: fall back to the rest of the scope.
        return [at for at in stops if thread_of(at) in self._group] or stops

    def need(self) -> list[RankStop]:
        """Return the stops that commands act on; at least one.

        Raises:
            CommandError: none of the selected ranks is stopped.
        """
        stops = self.chosen()
        if stops:
            return stops
        others = self.all()
        if not others:
            raise CommandError("No rank is stopped; break sets a breakpoint, pause stops ranks where they are.")
        who = RankNames(others).stops(others)
        raise CommandError(f"None of the chosen ranks is stopped; {who} are, and all chooses them.")

    def groups(self) -> list[list[RankStop]]:
        """Group the scope by location, the largest group first."""
        return grouped(self.scope())

    def named(self, name: str, ranks: Iterable[int] | None = None) -> list[RankStop]:
        """Return the stops of a mesh, or of an actor mesh, with this name."""
        stops = self.all()
        found = [at for at in stops if at.mesh == name] or [at for at in stops if at.stop.actor == name]
        return [at for at in found if ranks is None or at.rank in ranks]

    def frame(self, stop: Stop) -> StopFrame | None:
        """Return the frame that is shown for a stop; None if it has none."""
        return shown_frame(stop.frames, self.level)

    def index(self, stop: Stop) -> int:
        """Return the index of the frame that is shown for a stop."""
        frame = self.frame(stop)
        return 0 if frame is None else frame.index

    def by_index(self, stops: Sequence[RankStop]) -> dict[int, list[RankStop]]:
        """Group these stops by the index of the frame that is shown."""
        found: dict[int, list[RankStop]] = {}
        for at in stops:
            found.setdefault(self.index(at.stop), []).append(at)
        return found

    def highest(self) -> int:
        """Return the level of the outermost frame."""
        return max((len(user_frames(at.stop.frames)) for at in self.chosen()), default=1) - 1

    # -- names of meshes -----------------------------------------------------------------------------

    def mesh(self) -> str:
        """Return the mesh that rank numbers without a mesh name refer to.

        Raises:
            CommandError: there is none, or it is ambiguous.
        """
        names = {at.mesh for at in self.chosen() or self.all()}
        if len(names) == 1:
            return names.pop()
        name = self._frontend.mesh()
        if name is not None and (not names or name in names):
            return name
        if names:
            raise CommandError(f"Ranks of {' and '.join(sorted(names))} are stopped; mesh NAME chooses one.")
        raise CommandError("Say which mesh: there are none or several.")

    def ranks(self, mesh: str, text: str) -> tuple[int, ...]:
        """Parse the ranks of a mesh that `text` names.

        Raises:
            CommandError: `text` is invalid, or the mesh has no such ranks.
        """
        try:
            return parse_ranks(text, self._frontend.extent(mesh))
        except (ValueError, TypeError, IndexError) as error:
            raise CommandError(str(error.args[0] if error.args else error)) from None


#: How long ranks may take to evaluate an expression (seconds).
TIMEOUT = 5.0
#: How many lines of source are shown above and below the current one.
AROUND = 5


class InspectionCommands:
    """The read-only commands; a base class of `Console`."""

    debugger: MeshDebugger
    _frontend: Frontend
    _set: StopSelection
    _write: Callable[[str], object]

    def _say(self, text: str) -> None:
        self._write(f"{text}\n")

    def _label(self, file: str) -> str | None:
        return self._frontend.label(file)

    def _do_where(self, rest: str) -> None:
        if rest not in ("", "all"):
            raise CommandError(f"where: there is nothing called {rest!r}; where all shows every frame.")
        stops = self._set.need()
        groups = grouped(stops, lambda at: (at.mesh, why(at.stop), *map(frame_key, at.stop.frames)))
        names = RankNames(stops)
        rows: list[tuple[str, str]] = []
        for group in groups:
            stop = group[0].stop
            text = stack_text(stop, self._set.index(stop), self._label, everything=rest == "all")
            rows.append((names.stops(group), f"{text}\n{why(stop)}".rstrip() if why(stop) else text))
        self._show(rows, stops)

    def _show(self, rows: list[tuple[str, str]], stops: Sequence[Any]) -> None:
        """Write texts, each prefixed with its ranks; without ranks if there is only one stop."""
        self._say(rows[0][1] if len(stops) == 1 and rows else columns(rows))

    def _do_up(self, rest: str) -> None:
        self._move(read_count(rest, "up"), "That is the outermost frame.")

    def _do_down(self, rest: str) -> None:
        self._move(-read_count(rest, "down"), "That is the innermost frame.")

    def _move(self, by: int, end: str) -> None:
        stops = self._set.need()
        level = min(max(0, self._set.level + by), self._set.highest())
        if level == self._set.level:
            self._say(end)
            return
        self._set.level = level
        self._show_frame(stops)

    def _show_frame(self, stops: Sequence[Any]) -> None:
        names = RankNames(stops)
        rows: list[tuple[str, str]] = []
        for group in grouped(stops, lambda at: (at.mesh, frame_key(self._set.frame(at.stop)))):
            frame = self._set.frame(group[0].stop)
            text = location_text(frame, self._label) if frame is not None else "no frame"
            line = frame_source(frame) if frame is not None else ""
            rows.append((names.stops(group), f"{text}\n    {line}" if line else text))
        self._show(rows, stops)

    def _do_source(self, rest: str) -> None:
        around = read_count(rest, "source", AROUND)
        stops = self._set.need()
        names = RankNames(stops)
        rows: list[tuple[str, str]] = []
        for group in grouped(stops, lambda at: (at.mesh, frame_key(self._set.frame(at.stop)))):
            frame = self._set.frame(group[0].stop)
            if frame is None:
                continue
            lines = self._frontend.lines(frame.file)
            text = source_text(frame, lines, around) if len(lines) >= frame.line else frame.source or "no source"
            rows.append((names.stops(group), f"{location_text(frame, self._label)}\n{text}"))
        self._show(rows, stops)

    def _do_print(self, rest: str) -> None:
        if not rest:
            raise CommandError("print: write an expression after it.")
        self._evaluate(rest, f"{rest} = ")

    def _python(self, source: str) -> None:
        self._evaluate(source, "")

    def _evaluate(self, source: str, front: str) -> None:
        stops = self._set.need()
        found: dict[Any, Any] = {}
        for index, some in self._set.by_index(stops).items():
            found.update(self.debugger.evaluate(some, source, frame=index, timeout=TIMEOUT))
        texts: dict[Any, str] = {}
        for at in stops:
            answer = found.get(at.key)
            if answer is None:
                texts[at.key] = f"no answer in {TIMEOUT:g} s"
            elif answer.error:
                texts[at.key] = answer.error
            elif answer.text or front:
                texts[at.key] = f"{front}{answer.text}"
        if not texts:
            return
        self._say(next(iter(texts.values())) if len(stops) == 1 else answers(texts, RankNames(stops)))

    def _do_locals(self, rest: str) -> None:
        stops = self._set.need()
        names = RankNames(stops)
        found: dict[Any, dict[str, str]] = {}
        wanted = tuple(rest.replace(",", " ").split())
        for index, some in self._set.by_index(stops).items():
            answered = self.debugger.call(some, partial(local_values, wanted), frame=index, timeout=TIMEOUT)
            found.update({key: value for key, value in answered.items() if isinstance(value, dict)})
        variables = list(dict.fromkeys(name for values in found.values() for name in values))
        if not variables:
            self._say("There are no such variables." if wanted else "There are no local variables.")
        for name in variables:
            values = {key: f"{name} = {local[name]}" for key, local in found.items() if name in local}
            self._say(answers(values, names) if len(stops) > 1 else next(iter(values.values())))

    # -- reports ----------------------------------------------------------------------------------

    def _do_diff(self, rest: str) -> None:
        if not rest:
            raise CommandError("diff: write an expression after it.")
        from monarch_kernel.debugger.controller.values import diff

        stops = self._set.need()
        for mesh in dict.fromkeys(at.mesh for at in stops):
            ranks = sorted({at.rank for at in stops if at.mesh == mesh})
            try:
                self._say(str(diff(self.debugger.mesh(mesh), rest, ranks=ranks, in_frame=True, up=self._set.level)))
            except ValueError as error:
                raise CommandError(f"diff: {error}") from None

    def _do_stacks(self, rest: str) -> None:
        from monarch_kernel.debugger.controller.stacks import stacks

        mesh = self._set.mesh()
        ranks = self._set.ranks(mesh, rest) if rest else None
        self._say(stacks(self.debugger.mesh(mesh), ranks, label=self._label).text(label=self._label))

    def _do_hang(self, rest: str) -> None:
        if rest:
            raise CommandError(f"hang: it takes no arguments (not {rest!r}); it is about the whole mesh.")
        from monarch_kernel.debugger.controller.hang import hang

        self._say(str(hang(self.debugger.mesh(self._set.mesh()))))
