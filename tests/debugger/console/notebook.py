"""What a console knows of the program around it, for tests: a notebook."""

from __future__ import annotations

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.commands.grammar import CommandError
from monarch_kernel.debugger.frontend import Frontend


class Notebook(Frontend):
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
