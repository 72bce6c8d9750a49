"""Describe the program that controls the meshes: the names of its cells, the mesh in use.

A process has one front end: that of a script, or the one that a notebook kernel sets with `use_frontend`. Tracebacks,
stacks and consoles, including those of a terminal that is connected to a kernel, label files with it.
"""

from __future__ import annotations

import linecache
import os
from typing import TYPE_CHECKING

from monarch_kernel.debugger.commands.grammar import CommandError, Spot

if TYPE_CHECKING:
    from monarch_kernel.actor import Extent


class Frontend:
    """The front end of a script. Subclasses override methods for which they have better information."""

    def label(self, file: str) -> str | None:
        """Return the label of a file, or of a cell by its key, such as `Cell In[3]`; None: the file's base name."""
        return None

    def mesh(self) -> str | None:
        """Return the name of the mesh in use, for commands that name none; None if there are none or several."""
        from monarch_kernel.engines import tool_runtime

        names = {mesh.name for mesh in tool_runtime().list_proc_meshes()}
        return names.pop() if len(names) == 1 else None

    def cell(self, number: int) -> tuple[str, str]:
        """Return the file name and the text of the cell with that execution number; 0 means the last `%%mesh` cell.

        Raises:
            CommandError: there is no such cell.
        """
        raise CommandError("this program has no cells; give the path of a file")

    def lines(self, file: str) -> list[str]:
        """Return the source of a file; empty if this process has no access to it."""
        return [line.rstrip("\n") for line in linecache.getlines(file)]

    def extent(self, mesh: str) -> Extent:
        """Return the extent of a mesh of this controller.

        Raises:
            CommandError: there is no such mesh.
        """
        from monarch_kernel.engines import tool_runtime

        try:
            return tool_runtime().get_mesh(mesh).extent
        except LookupError as error:
            raise CommandError(str(error)) from None

    def file(self, spot: Spot, shown: str, command: str) -> tuple[str, int]:
        """Return the file and line of a location.

        Args:
            spot: the location as the user wrote it.
            shown: the file for a line without a file.
            command: the name of the command in error messages.

        Raises:
            CommandError: there is no such cell or line.
        """
        if spot.cell is not None:
            name, text = self.cell(spot.cell)
            count = len(text.rstrip("\n").split("\n"))
            if spot.line > count:
                which = f"In[{spot.cell}]" if spot.cell else "the last %%mesh cell"
                raise CommandError(f"{command}: {which} has {count} line{'s' * (count != 1)}, so no line {spot.line}")
            return name, spot.line
        if not spot.file:
            if not shown:
                raise CommandError(f"{command}: say in which file or cell line {spot.line} is")
            return shown, spot.line
        path = os.path.abspath(os.path.expanduser(spot.file))
        if not os.path.exists(path):
            return spot.file, spot.line  # it may exist on the ranks' hosts, which compare the last parts of paths
        lines = linecache.getlines(path)
        if spot.line > len(lines):
            count = f"{len(lines)} line{'s' * (len(lines) != 1)}"
            raise CommandError(f"{command}: {spot.file} has {count}, so no line {spot.line}")
        return path, spot.line


_current = Frontend()


def use_frontend(frontend: Frontend | None) -> None:
    """Set the front end of this process; None means the front end of a script."""
    global _current
    from monarch_kernel.protocol.faults import label_files  # not at the top: ranks import this module too

    _current = frontend or Frontend()
    label_files(None if frontend is None else frontend.label)


def current_frontend() -> Frontend:
    """Return the front end of this process."""
    return _current
