"""`%mesh stacks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, mesh_argument, ranks_option
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stacks import Stacks


class StackMagics(Subcommands):
    """Showing stacks."""

    @magic_arguments("mesh stacks")
    @mesh_argument()
    @ranks_option()
    @argument("--native", action="store_true", help="with the frames of native code (py-spy holds each rank for 0.1 s)")
    @argument("--all-threads", action="store_true", help="also threads without user code")
    @argument("--values", action="store_true", help="with the local variables of user code")
    @argument("--over", type=float, metavar="SECONDS", help="watch for so long, and show what moves and what does not")
    @argument("--timeout", type=float, metavar="SECONDS", help="read ranks from outside that take longer (1)")
    def stacks(self, found: Arguments) -> Stacks:
        """Show the stacks of all ranks as one tree, with equal ones merged."""
        timeout = 1.0 if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        over = 0.0 if found.over is None else found.over
        if not over >= 0:
            raise usage_error(found.magic, f"--over takes a number of seconds of at least 0, not {over:g}")
        mesh, ranks = self.addressed(found)
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
