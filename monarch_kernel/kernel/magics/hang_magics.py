"""`%mesh hang`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.kernel.magics.arguments import Arguments, mesh_argument, ranks_option
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict

#: How long to wait for ranks that do not answer (seconds).
TIMEOUT = 5.0


class HangMagics(Subcommands):
    """Explaining hangs."""

    @magic_arguments("mesh hang")
    @mesh_argument()
    @ranks_option()
    @argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for ranks that do not answer (5)")
    def hang(self, found: Arguments) -> Verdict:
        """Explain a hang: which ranks wait in which collective, which ranks are missing, and where those are."""
        timeout = TIMEOUT if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        mesh, ranks = self.addressed(found)
        return hang(mesh, ranks=None if found.ranks is None else ranks, timeout=timeout)
