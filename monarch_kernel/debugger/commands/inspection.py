"""The read-only commands of a console: stacks, frames, values, source, reports on meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.commands.grammar import CommandError, read_count
from monarch_kernel.debugger.commands.selection import StopSelection
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
from monarch_kernel.debugger.frames import frame_key, grouped
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.debugger.rank.frame_tools import local_values

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger

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
