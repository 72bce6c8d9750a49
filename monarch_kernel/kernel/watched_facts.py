"""What watches (`monarch_kernel.watch`) learn from a notebook: which mesh is in use, and what cells are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monarch_kernel.engines import engine
from monarch_kernel.kernel.session import MeshSession
from monarch_kernel.watch.facts import CellName, CurrentMesh
from monarch_kernel.watch.sources import Give


class WatchedFacts:
    """A source of facts for ``monarch_kernel.watch.provide``. Without a watch, each method only returns.

    Args:
        session: the meshes.
        cells: the number of each cell by its key, as the notebook keeps them.
    """

    def __init__(self, session: MeshSession, cells: Mapping[str, int]) -> None:
        self._session = session
        self._cells = cells
        self._give: Give | None = None
        self._current = ""

    def source(self, give: Give) -> Callable[[], None]:
        """Begin; see ``monarch_kernel.watch.sources.Source``."""
        self._give = give
        self._current = ""
        changes = (engine().on_change(self._update), self._session.changed.subscribe(self._update))
        give(*(CellName(key, _name(number)) for key, number in dict(self._cells).items()))
        self._update()

        def end() -> None:
            self._give = None
            for each in changes:
                each.close()

        return end

    def cell(self, key: str, number: int) -> None:
        """A cell begins; ``key`` is the beginning of the ids under which ranks run it, or its file."""
        if self._give is not None:
            self._give(CellName(key, _name(number)))

    def _update(self) -> None:
        """Tell which mesh is in use, if that has changed."""
        give = self._give
        if give is None:
            return
        name = self._session.current
        mesh = self._session.proc_meshes().get(name) if name is not None else None
        current = engine().whole_of(mesh).uid if mesh is not None else ""
        if current != self._current:
            self._current = current
            give(CurrentMesh(current))


def _name(number: int) -> str:
    return f"cell [{number}]"
