"""`%mesh hang`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.debugger.controller.hang import hang
from monarch_kernel.kernel.magics import arguments as args_of
from monarch_kernel.kernel.magics.arguments import parse, usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict

#: Subcommands of `%mesh` that are here.
SUBCOMMANDS = ("hang",)

#: How long ranks that do not answer are waited for (seconds).
TIMEOUT = 5.0


class HangMagics:
    """Mixed into `MeshMagics`."""

    _session: Any

    @magic_arguments("mesh hang")
    @argument("name", nargs="?", metavar="NAME", help="the mesh (default: the one in use)")
    @argument("-r", "--ranks", metavar="RANKS", help="ask only these, such as 0-3,7 or hosts=1,gpus=0-3")
    @argument("--timeout", type=float, metavar="SECONDS", help="wait so long for ranks that do not answer (5)")
    def hang(self, line: str) -> Verdict | None:
        """Say why a mesh does not go on: who waits in which collective, who is not there, and where that rank is."""
        command = "%mesh hang"
        found = parse(HangMagics.hang, line)
        if found is None:
            return None
        timeout = TIMEOUT if found.timeout is None else found.timeout
        if not timeout > 0:
            raise usage_error(command, f"--timeout takes a number of seconds above 0, not {timeout:g}")
        mesh = self._session.find(found.name, command)
        ranks = None
        if found.ranks is not None:
            ranks = args_of.select(command, found.ranks, [], mesh.extent, mesh.name)
        return hang(mesh, ranks=ranks, timeout=timeout)
