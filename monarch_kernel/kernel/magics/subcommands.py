"""The base class of all groups of `%mesh` subcommands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.actor import ProcMesh
from monarch_kernel.kernel.magics.arguments import Arguments, select
from monarch_kernel.kernel.notebook import Notebook
from monarch_kernel.meshes import format_ranks

_PREFIX = "mesh "


class Subcommands:
    """A group of subcommands. Each method with `magic_arguments("mesh NAME")` is one; it receives the parsed line.

    Args:
        notebook: the notebook of the subcommands.
        say: called with each text for the user; by default, the cell prints it.
        name: the name of the caller, shown to other viewers of the debugger.
    """

    def __init__(
        self, notebook: Notebook, say: Callable[[str], object] = print, name: str = "a cell of the notebook"
    ) -> None:
        self._notebook = notebook
        self._session = notebook.session
        self.say = say
        self.name = name

    @classmethod
    def functions(cls) -> dict[str, Callable[..., object]]:
        """Return the subcommands by name."""
        found = ((getattr(each, "parser", None), each) for each in vars(cls).values())
        return {parser.prog.removeprefix(_PREFIX): each for parser, each in found if parser is not None}

    def addressed(self, found: Arguments) -> tuple[ProcMesh, tuple[int, ...]]:
        """Return the mesh on the line, or the one in use, and its ranks that `-r` selects."""
        mesh = self._session.find(found.name, found.magic)
        return mesh, select(found.magic, found.ranks, [], mesh.extent, mesh.name)


def listed(ranks: Sequence[int]) -> str:
    """Format ranks as a short text."""
    return format_ranks(ranks, limit=6)
