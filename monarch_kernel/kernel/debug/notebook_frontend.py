"""What consoles know about a notebook: the names of its cells, and the mesh in use."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.frontend import Frontend
from monarch_kernel.engines import engine

if TYPE_CHECKING:
    from monarch_kernel.kernel.notebook import Notebook


class NotebookFrontend(Frontend):
    """What consoles, including those of other programs, know about this notebook."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def label(self, file: str) -> str | None:
        """The label of a cell's file, such as `Cell In[3]`."""
        return self._notebook.file_label(file)

    def mesh(self) -> str | None:
        """The mesh in use."""
        return self._notebook.session.current or super().mesh()

    def cell(self, number: int) -> tuple[str, str]:
        """A cell by its execution number; 0 means the last `%%mesh` cell."""
        if number == 0:
            if self._notebook.last_cell is None:
                raise CommandError("no %%mesh cell has run yet; give the number of a cell, as in 5:3")
            return self._notebook.last_cell
        return self._notebook.cell_source(number)

    def extent(self, mesh: str) -> Any:
        """The extent of a mesh."""
        try:
            return self._notebook.session.find(mesh, "debug").extent
        except UsageError:
            with suppress(LookupError):
                return engine().get_mesh(mesh).extent
        return super().extent(mesh)
