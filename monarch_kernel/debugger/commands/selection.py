"""The stopped ranks that a console's commands act on, and the frame that it shows for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.commands.stop_text import RankNames
from monarch_kernel.debugger.frames import grouped, shown_frame, user_frames
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.meshes import parse_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hub import MeshDebugger
    from monarch_kernel.debugger.events import RankStop
    from monarch_kernel.debugger.model.stops import Stop, StopFrame

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
