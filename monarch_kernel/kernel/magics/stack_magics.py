"""`%mesh stacks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics import arguments as args_of
from monarch_kernel.kernel.magics.arguments import parse, usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stacks import Stacks

#: Subcommands of `%mesh` that are here.
SUBCOMMANDS = ("stacks",)


class StackMagics:
    """Mixed into `MeshMagics`."""

    _notebook: Any
    _session: Any

    @magic_arguments("mesh stacks")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @argument("-r", "--ranks", metavar="RANKS", help="only these, such as 0-3,7 or hosts=1,gpus=0-3")
    @argument("--native", action="store_true", help="with the frames of native code (py-spy holds each rank for 0.1 s)")
    @argument("--all-threads", action="store_true", help="those too that run none of your code")
    @argument("--values", action="store_true", help="with the local variables where your code is")
    @argument("--over", type=float, metavar="SECONDS", help="look for so long, and show what moves and what does not")
    @argument("--timeout", type=float, metavar="SECONDS", help="read ranks from outside that take longer (1)")
    def stacks(self, line: str) -> Stacks | None:
        """Show where the code of all ranks is: one tree of their stacks, equal ones folded."""
        command = "%mesh stacks"
        found = parse(StackMagics.stacks, line)
        if found is None:
            return None
        timeout = 1.0 if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(command, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        over = 0.0 if found.over is None else found.over
        if not over >= 0:
            raise usage_error(command, f"--over takes a number of seconds of at least 0, not {over:g}")
        mesh = self._session.find(found.name, command)
        ranks = args_of.select(command, found.ranks, [], mesh.extent, mesh.name)
        from monarch_kernel.debugger.controller.stacks import stacks

        return stacks(
            mesh,
            ranks=ranks,
            native=found.native,
            all_threads=found.all_threads,
            timeout=timeout,
            over=over,
            values=found.values,
            label=self._notebook.file_label,
        )
