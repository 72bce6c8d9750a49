"""A console: the selection of stopped ranks, and the effect of each command on them.

A `Console` is independent of terminals and notebooks: lines go in, text comes out. Commands act on a *set* of stops:
all of them, those of selected ranks, or one of the groups into which a step has split them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.commands import breakpoint_commands
from monarch_kernel.debugger.commands.grammar import (
    Command,
    CommandError,
    complete,
    help_of,
    read_cast,
    read_command,
    read_count,
)
from monarch_kernel.debugger.commands.stop_text import (
    RankNames,
    answers,
    clock,
    columns,
    frame_source,
    location_text,
    source_text,
    stack_text,
    stopped_text,
    why,
    with_clock,
)
from monarch_kernel.debugger.controller.sets import Moved, StopSet
from monarch_kernel.debugger.events import frame_key, frames_of_a_stack, grouped, shown_frame, user_frames
from monarch_kernel.debugger.frontend import Frontend, current_frontend
from monarch_kernel.debugger.rank.frame_tools import local_values
from monarch_kernel.display.quantities import duration
from monarch_kernel.display.tables import TableView, table_text
from monarch_kernel.meshes import format_ranks, name_ranks, parse_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.breakpoints import Countdown
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.controller.viewers import Viewer
    from monarch_kernel.debugger.events import RankErrorRecord, RankStop
    from monarch_kernel.debugger.model.stops import Stop, StopFrame

# The read-only commands of a console: stacks, frames, values, source, reports on meshes.

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

    def _show(self, rows: list[tuple[str, str]], stops: Sequence[object]) -> None:
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

    def _show_frame(self, stops: list[RankStop]) -> None:
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


#: How long ranks may take to stop, or to continue, on request (seconds).
PAUSE_TIMEOUT = 2.0
#: The interval at which the controller queries ranks for the timeout of their wait for stopped ranks (seconds).
ASK_AGAIN = 5.0


class Console(InspectionCommands):
    """Executes commands, one at a time.

    Args:
        debugger: the `MeshDebugger` of this process.
        write: called with text to show, in whole lines.
        name: the name that other viewers see while this console has control.
        frontend: resolves cells and the mesh in use; defaults to the front end of this process.
    """

    def __init__(
        self,
        debugger: MeshDebugger,
        write: Callable[[str], object],
        *,
        name: str = "a console",
        frontend: Frontend | None = None,
    ) -> None:
        self.debugger = debugger
        self._frontend = frontend or current_frontend()
        self.name = name
        self._write = write
        self._opened: Viewer | None = None
        self._set = StopSelection(debugger, self._frontend)
        self._clock: tuple[float, frozenset[object], Countdown | None] = (0.0, frozenset(), None)
        #: Whether the last command was a step that some ranks have not finished yet.
        self.is_stepping = False
        self._told: set[object] = set()
        self._mortem: set[object] = set()
        self._last = ""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Release control. Stopped ranks stay stopped; the next command makes this console a viewer again."""
        viewer, self._opened = self._opened, None
        if viewer is not None:
            viewer.close()

    def release(self) -> None:
        """Close the post mortems that this console has opened."""
        mine, self._mortem = self._mortem, set()
        self.debugger.resume([at for at in self.debugger.stops() if at.key in mine])

    def take_over(self, other: Console) -> None:
        """Continue another console's session, with the ranks that it selected and the post mortems that it opened."""
        self.release()
        self._set = other._set
        self._mortem, other._mortem = other._mortem, set()

    @property
    def _viewer(self) -> Viewer:
        if self._opened is None:
            self._opened = self.debugger.viewer(self.name)
        return self._opened

    # -- lines -----------------------------------------------------------------------------------

    def run(self, line: str) -> bool:
        """Execute one line. Return True if it leaves the prompt. Errors are written, not raised."""
        with self._lock:
            command, rest = read_command(line)
            if not line.strip():
                if not self._last:
                    return False
                command, rest = read_command(self._last)
            if line.strip():
                self._last = line if command is not None and command.steps else ""
            self.is_stepping = False
            try:
                return self._execute(command, rest)
            # RuntimeError: another viewer has control, or the rank cannot step
            except (CommandError, RuntimeError) as error:
                self._say(_sentence(error))
            except KeyError:
                self._say("That stop is over: the rank has continued or died.")
            return False

    def _execute(self, command: Command | None, rest: str) -> bool:
        if command is None:
            if rest:
                self._python(rest)
            return False
        if command.name in ("quit", "detach"):
            return self._leave(command.name)
        handler: Callable[[str], None] = getattr(self, f"_do_{command.name}")
        handler(rest)
        return False

    def _leave(self, name: str) -> bool:
        if name == "detach" and self._set.attached:
            self._do_all("")
            return False
        return True

    def complete(self, before: str) -> list[str]:
        """Return the words that may complete a line: commands, options, variables of the frame."""
        word = before.rpartition(" ")[2]
        if " " not in before and complete(before):
            return complete(before)
        stops = self._set.chosen()
        return complete(before, self._variables(stops[0]) if stops and not word.startswith("-") else ())

    def _variables(self, at: RankStop) -> list[str]:
        """Return the names in the current frame; none if the rank does not answer."""
        try:
            scopes = self.debugger.scopes(at.key, self._set.index(at.stop))
            return [one.name for one in self.debugger.variables(at.key, scopes[0].ref)] if scopes else []
        except (LookupError, RuntimeError):  # it continued, died or is stuck: there are no completions
            return []

    # -- the prompt ------------------------------------------------------------------------------

    def prompt(self) -> str:
        """Return the prompt: the selected ranks, and the time until a collective that waits for them times out."""
        return with_clock(*self.prompt_parts())

    def prompt_parts(self) -> tuple[str, float | None]:
        """Return the prompt without that time, and the time, for callers that keep it up to date; see `with_clock`."""
        stops = self._set.chosen()
        if not stops:
            return "(mesh) ", None
        meshes = list(dict.fromkeys(at.mesh for at in stops))
        text = "; ".join(f"{mesh} {_ranks(at.rank for at in stops if at.mesh == mesh)}" for mesh in meshes)
        scope = self._set.groups()
        if self._set.is_narrowed and len(scope) > 1:
            mine = {at.key for at in stops}
            numbers = [number for number, group in enumerate(scope, 1) if any(at.key in mine for at in group)]
            text += f", group {numbers[0]}/{len(scope)}" if len(numbers) == 1 else ""
        left = self.countdown()
        return f"({text}) ", None if left is None else left.left

    def countdown(self) -> Countdown | None:
        """Find the timeout that expires first among the collectives that wait for the selected ranks."""
        stops = self._set.chosen()
        keys = frozenset(at.key for at in stops)
        now = time.monotonic()
        at, of, known = self._clock
        if of != keys or now - at > ASK_AGAIN:
            known = self.debugger.countdown(stops) if stops else None
            at = time.monotonic()
            self._clock = at, keys, known
        return None if known is None else replace(known, left=max(0.0, known.left - (time.monotonic() - at)))

    def announce(self) -> None:
        """Write which ranks are stopped, and where."""
        groups = self._set.groups()
        if groups:
            self._say(self._stopped(groups, numbered=True))
        self._say_waiting(self.countdown())

    def _say_waiting(self, left: Countdown | None) -> None:
        """Write which ranks wait for stopped ones, if any do."""
        if left is not None:
            who = f"{_ranks(left.ranks)} of {left.mesh}"
            self._say(f"{who} wait in {left.what} for stopped ranks, and give up in {clock(left.left)}.")

    def has_news(self) -> bool:
        """Whether there are stops that this console has not announced."""
        return bool(self._untold())

    def news(self) -> str:
        """Return the announcement of new stops; "" if there are none."""
        new = self._untold()
        return self._stopped(grouped(new)) if new else ""

    def _untold(self) -> list[RankStop]:
        return [at for at in self.debugger.stops() if at.stop.thread and at.key not in self._told]

    def _stopped(self, groups: list[list[RankStop]], *, numbered: bool = False) -> str:
        """Describe which ranks are stopped, and where. Mark them as announced."""
        self._told = {at.key for at in self.debugger.stops() if at.key in self._told}
        self._told |= {at.key for group in groups for at in group}
        return stopped_text(groups, self._label, numbered=numbered)

    # -- the set ---------------------------------------------------------------------------------

    def run_on(self, mesh: str | None, ranks: Sequence[int] | None, line: str) -> None:
        """Execute one line for these ranks only (None: any). The selection does not change."""
        threads = {
            (at.mesh, at.rank, None)
            for at in self._set.all()
            if mesh in (None, at.mesh) and (ranks is None or at.rank in ranks)
        }
        if not threads:
            who = f"{format_ranks(ranks, limit=6)} of " if ranks is not None else ""
            self._say(f"None of {who}{mesh or 'all meshes'} is stopped; groups shows which ranks are.")
            return
        with self._only(threads):
            self.run(line)

    @contextmanager
    def _only(self, threads: Iterable[Thread]) -> Generator[None]:
        with self._lock:
            kept, self._set = self._set, StopSelection(self.debugger, self._frontend)
            self._set.choose(threads)
            try:
                yield
            finally:
                self._set = kept

    def _do_ranks(self, rest: str) -> None:
        mesh = self._set.mesh()
        rank, dot, stop = rest.partition(".")
        if dot and rank.isdigit() and stop.isdigit():
            found = [at for at in self._set.all() if at.key == (mesh, int(rank), int(stop))]
            if not found:
                raise CommandError(f"Rank {rank} of {mesh} has no stop {stop}; groups shows them.")
            self._set.choose({thread_of(found[0])})
        else:
            self._set.choose({(mesh, number, None) for number in self._set.ranks(mesh, rest)})
        self._show_choice()

    def _do_mesh(self, rest: str) -> None:
        self._frontend.extent(rest)
        self._set.choose({(rest, at.rank, None) for at in self._set.all() if at.mesh == rest})
        self._show_choice()

    def _do_all(self, rest: str) -> None:
        self._set.choose(None)
        self._show_choice()

    def _show_choice(self) -> None:
        self._set.need()
        self.announce()

    def _do_groups(self, rest: str) -> None:
        if not self._set.groups():
            self._set.need()
        self.announce()

    def _do_group(self, rest: str) -> None:
        if not rest:
            self._do_groups("")
            return
        groups = self._set.groups()
        number = read_count(rest, "group")
        if number > len(groups):
            raise CommandError(f"There {'is one group' if len(groups) == 1 else f'are {len(groups)} groups'} only.")
        self._set.narrow(groups[number - 1])
        self._say(self._stopped([groups[number - 1]]))

    # -- Monarch's names --------------------------------------------------------------------------

    def _do_list(self, rest: str) -> None:
        if self._set.attached:
            self._do_source(rest)
            return

        def where(stop: Stop) -> str:
            frame = shown_frame(stop.frames)
            return location_text(frame, self._label) if frame is not None else ""

        def alike(at: RankStop) -> Hashable:
            return at.mesh, at.stop.actor, at.stop.endpoint, where(at.stop), why(at.stop)

        groups = grouped(self._set.all(), alike)
        if not groups:
            self._say("No rank is stopped.")
            return
        self._stopped(groups)
        rows: list[tuple[str, ...]] = []
        for group in groups:
            stop = group[0].stop
            names = RankNames(self._set.all()).stops(group).rpartition(f"{group[0].mesh} ")[2]
            rows.append((group[0].mesh, stop.actor, stop.endpoint, names, where(stop), why(stop)))
        self._say(table_text(TableView(("mesh", "actor", "endpoint", "ranks", "where", "why"), rows)))

    def _do_attach(self, rest: str) -> None:
        name, _, number = rest.rpartition(" ")
        if not name or not number.isdigit():
            raise CommandError("attach: write attach NAME RANK, with the name of a mesh or of an actor mesh.")
        found = self._set.named(name.strip(), {int(number)})
        if not found:
            raise CommandError(f"Rank {number} of {name.strip()} is not stopped; list shows which ranks are.")
        self._set.choose((thread_of(at) for at in found), attached=True)
        self.announce()

    def _do_cast(self, rest: str) -> None:
        name, text, line = read_cast(rest)
        stops = self._set.named(name)
        if not stops:
            raise CommandError(f"No rank of {name} is stopped; list shows which ranks are.")
        ranks = set(self._set.ranks(stops[0].mesh, text or "*"))
        chosen = [at for at in stops if at.rank in ranks]
        if not chosen:
            raise CommandError(f"None of these ranks of {name} is stopped; list shows which ranks are.")
        command, argument = read_command(line)
        if command is not None and command.name in ("cast", "attach", "detach", "quit"):
            raise CommandError(f"cast: {command.name} is no command for ranks.")
        with self._only({thread_of(at) for at in chosen}):
            self._execute(command, argument)

    # -- moving -----------------------------------------------------------------------------------

    def _do_next(self, rest: str) -> None:
        self._advance("next")

    def _do_step(self, rest: str) -> None:
        self._advance("step")

    def _do_out(self, rest: str) -> None:
        self._advance("out")

    def _do_until(self, rest: str) -> None:
        stops = self._set.need()
        frame = shown_frame(stops[0].stop.frames)
        line = read_count(rest, "until", (frame.line if frame is not None else 0) + 1)
        self._advance("until", line)

    def _do_continue(self, rest: str) -> None:
        stops = self._set.need()
        names = RankNames(stops)
        who = names.stops(stops)
        self.debugger.resume(stops, "continue", viewer=self._viewer)
        keys = {at.key for at in stops}
        # Ranks confirm a moment after they receive the request.
        self.debugger.wait(lambda now: not any(at.key in keys for at in now), timeout=PAUSE_TIMEOUT)
        busy = [at for at in self.debugger.stops() if at.key in keys]
        self._set.narrow(None)
        if busy:
            self._say(f"{names.stops(busy)}: still busy with what was evaluated there; will continue when that ends.")
            stops = [at for at in stops if at.key not in {each.key for each in busy}]
            who = names.stops(stops) if stops else ""
        if any(at.stop.thread for at in stops):
            self._say(f"{_named(who)} {_continues(stops)}.")
        elif busy:
            return
        else:
            self._set.choose(None)  # a later stop of a rank is not the failure that was open
            self._say(f"{who}: closed.")

    def _advance(self, how: str, line: int = 0) -> None:
        stops = self._set.need()
        rigid = [at for at in stops if not at.stop.steppable]
        if rigid:
            who = RankNames(stops).stops(rigid)
            raise CommandError(f"{who}: the frames of an error have ended and cannot be stepped; continue closes them.")
        before = len(grouped(stops))
        threads = {thread_of(at) for at in stops}
        chosen = StopSet(self.debugger, stops, self._viewer)
        moved = chosen.until(line) if how == "until" else getattr(chosen, how)()
        self._set.level = 0
        self.is_stepping = bool(moved.running)
        self._tell(threads, moved, split=before == 1)

    def _tell(self, threads: set[Thread], moved: Moved, split: bool) -> None:
        """Show the result of a step, and select the first group if the step has split the set."""
        groups = grouped(self._set.of(threads))
        meshes = {mesh for mesh, _rank, _thread in threads}
        if moved.ended:
            self._say(f"{_among(moved.ended, meshes)} died.")
        if moved.running:
            self._say(f"{_named(_among(moved.running, meshes))} {_continues(moved.running)}.")
            # A step over a collective does not end while another rank is stopped that must call the collective, too.
            others = [at for at in self.debugger.stops() if at.mesh in meshes and at.stop.thread]
            self._say_waiting(self.debugger.countdown(others) if others else None)
        if len(groups) > 1 and split:
            self._set.narrow(groups[0])
            self._say("The set has split; group 1 is chosen (group N, ranks and all choose others).")
        if groups:
            self._say(self._stopped(groups, numbered=True))

    def _do_pause(self, rest: str) -> None:
        mesh = self._set.mesh()
        self.pause(mesh, self._set.ranks(mesh, rest) if rest else None)

    def pause(self, mesh: str, ranks: Sequence[int] | None) -> None:
        """Stop these ranks of a mesh (None: all) at their next line of user code, and select them."""
        before = {at.key for at in self.debugger.stops(mesh)}
        self.debugger.pause(mesh, ranks, viewer=self._viewer)
        wanted = set(ranks if ranks is not None else range(self._frontend.extent(mesh).nelements))

        def all_stopped(stops: list[Any]) -> bool:
            return wanted <= {at.rank for at in stops if at.mesh == mesh}

        stops = [at for at in self.debugger.wait(all_stopped, timeout=PAUSE_TIMEOUT) if at.mesh == mesh]
        self._set.choose({(mesh, rank, None) for rank in wanted} if ranks is not None else None)
        new = [at for at in stops if at.key not in before]
        if new:
            self._say(self._stopped(grouped(new)))
        missing = wanted - {at.rank for at in stops}
        if missing:
            self._say(f"{_named(_ranks(missing))} will stop at the next line of user code; unpause cancels that.")

    def _do_unpause(self, rest: str) -> None:
        mesh = self._set.mesh()
        self.unpause(mesh, self._set.ranks(mesh, rest) if rest else None)

    def unpause(self, mesh: str, ranks: Sequence[int] | None) -> None:
        """Let those of these ranks (None: all ranks of the mesh) continue that `pause` has not stopped yet."""
        self.debugger.cancel_pause(mesh, ranks, viewer=self._viewer)
        wanted = set(ranks if ranks is not None else range(self._frontend.extent(mesh).nelements))
        stopped = wanted & {at.rank for at in self.debugger.stops(mesh) if at.stop.thread}
        if stopped:
            self._say(f"{_named(_ranks(stopped))} stopped before that; continue ends it.")
        if left := wanted - stopped:
            self._say(f"{_named(_ranks(left))} will not stop.")

    def _do_pm(self, rest: str) -> None:
        mesh = self._set.mesh()
        if rest in self._failures(mesh, None):
            self.post_mortem(mesh, None, rest)
        else:
            self.post_mortem(mesh, self._set.ranks(mesh, rest) if rest else None)

    def _failures(self, mesh: str, ranks: Sequence[int] | None) -> dict[str, list[RankErrorRecord]]:
        """Return the failures whose frames ranks keep, by the names of their cells or endpoints, the last one first."""
        found: dict[str, list[RankErrorRecord]] = {}
        for each in self.debugger.errors(mesh, ranks):
            error = each.error
            label = self._label(error.cell) if error.cell else None
            name = label.removeprefix("Cell ") if label else f"{error.actor}.{error.endpoint}"
            found.setdefault(name, []).append(each)
        return found

    def post_mortem(self, mesh: str, ranks: Sequence[int] | None, failure: str = "", command: str = "pm") -> bool:
        """Open the frames of the last failure, and select them. Return False if there were none.

        Args:
            mesh: the name of the mesh.
            ranks: the ranks; None for all.
            failure: the name of an earlier failure, to open that one.
            command: the command that opens a post mortem, for the text that lists the others.
        """
        self.release()
        failures = self._failures(mesh, ranks)
        of = f"{'these ranks of ' * (ranks is not None)}mesh {mesh}"
        if not failures:
            self._say(f"There is no exception to look at on {of}.")
            return False
        if failure and failure not in failures:
            self._say(f"No exception of {failure} is kept on {of}, but of {', '.join(failures)}.")
            return False
        name = failure or next(iter(failures))
        newest = failures.pop(name)[0].error
        stops = self.debugger.post_mortem(mesh, ranks, newest.key)
        self._mortem = {at.key for at in stops}
        if not stops:
            self._say(f"The frames of {name} are no longer kept.")
            return False
        names = RankNames(stops)
        rows: list[tuple[str, str]] = []
        # Ranks whose collective failed only because a peer had gone are left out if other ranks show the cause.
        peers = [at for at in stops if at.stop.of_peer]
        stops = [at for at in stops if not at.stop.of_peer] or stops
        self._set.choose({thread_of(at) for at in stops})

        def alike(at: RankStop) -> Hashable:
            return at.mesh, at.stop.text, *map(frame_key, frames_of_a_stack(at.stop.frames))

        for group in grouped(stops, alike):
            stop = group[0].stop
            rows.append((names.stops(group), f"{stack_text(stop, self._set.index(stop), self._label)}\n{stop.text}"))
        if peers and peers != stops:
            frame = shown_frame(peers[0].stop.frames)
            where = "" if frame is None else f", at {location_text(frame, self._label)}"
            text = f"failed in a collective because the ranks above had left it{where}"
            rows.append((names.stops(peers), text))
        self._say(f"{name} failed {duration(newest.age)} ago:\n{columns(rows)}")
        if failures:
            self._say("Earlier failures:")
            self._say(columns([self._offer(each, errors, command) for each, errors in failures.items()]))
        return True

    @staticmethod
    def _offer(name: str, errors: Sequence[RankErrorRecord], command: str) -> tuple[str, str]:
        own = [each for each in errors if not each.error.of_peer] or list(errors)
        on = name_ranks([each.rank for each in own], limit=6)
        return f"{command} {name}", f"{own[0].error.text}, on {on}, {duration(own[0].error.age)} ago"

    # -- breakpoints ------------------------------------------------------------------------------

    def _do_break(self, rest: str) -> None:
        if not rest:
            self._say(breakpoint_commands.listing(self.debugger, self._label))
            return
        stops = self._set.chosen()
        frame = self._set.frame(stops[0].stop) if stops else None
        shown = frame.file if frame is not None else ""
        made = breakpoint_commands.arm(self.debugger, rest, "break", self._frontend, shown)
        self._say(breakpoint_commands.armed_text(made, self._label))

    def _do_clear(self, rest: str) -> None:
        self._say(breakpoint_commands.clear(self.debugger, rest, "clear"))

    # -- control -----------------------------------------------------------------------------------

    def _do_drive(self, rest: str) -> None:
        if rest not in ("", "--force", "-f"):
            raise CommandError("drive: only --force may follow.")
        self._viewer.drive(force=bool(rest))
        self._say("This console controls the debugger.")

    def _do_help(self, rest: str) -> None:
        self._say(help_of(rest))


def _among(ranks: Sequence[tuple[str, int]], meshes: Iterable[str]) -> str:
    """List ranks, with their meshes if there are several."""
    several = len(set(meshes)) > 1
    found = dict.fromkeys(mesh for mesh, _ in ranks)
    return "; ".join(
        (f"{mesh} " if several else "") + _ranks(rank for of, rank in ranks if of == mesh) for mesh in found
    )


def _continues(stops: Sequence[object]) -> str:
    return "continues" if len(stops) == 1 else "continue"


def _named(ranks: str) -> str:
    """Begin a sentence about ranks that are given as a short text, such as `0-1` or `m 0-1; n 3`."""
    return ranks if ranks[:1].isalpha() else f"Rank{'' if ranks.isdigit() else 's'} {ranks}"


def _ranks(ranks: Iterable[int]) -> str:
    return format_ranks(ranks, limit=6)


def _sentence(error: BaseException) -> str:
    text = str(error.args[0] if error.args else error).strip()
    return text if text.endswith((".", "?", ":")) else f"{text}."
