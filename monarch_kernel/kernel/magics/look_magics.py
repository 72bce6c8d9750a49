"""`%mesh look`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.outside.report import Look


class LookMagics(Subcommands):
    """Reading processes that others have started."""

    @magic_arguments("mesh look")
    @argument("--pids", metavar="123,456", help="processes of this machine")
    @argument(
        "--torchrun", nargs="?", type=int, const=0, metavar="PID", help="the workers of torchrun (its only job here)"
    )
    @argument("--slurm", metavar="JOB", help="the ranks of a Slurm job, on all its nodes")
    @argument("--native", action="store_true", help="with the frames of native code (py-spy holds each rank for 0.1 s)")
    @argument("--all-threads", action="store_true", help="also threads without user code")
    @argument("--apart", type=float, default=1.0, metavar="SECONDS", help="the time between the two readings (1)")
    def look(self, found: Arguments) -> Look:
        """Read processes from outside that others have started: their stacks, and for whom they seem to wait."""
        from monarch_kernel.debugger.outside.look import LookRequest, look
        from monarch_kernel.debugger.outside.processes import OutsideError

        request = LookRequest(
            found.pids, found.torchrun, found.slurm, found.native, found.all_threads, apart=found.apart
        )
        try:
            return look(request, self._notebook.file_label)
        except OutsideError as error:
            raise usage_error(found.magic, str(error.args[0])) from None
