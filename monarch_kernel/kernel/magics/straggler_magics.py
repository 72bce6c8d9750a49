"""`%mesh stragglers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.usage_errors import usage_error

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stragglers import StragglerReport


class StragglerMagics(Subcommands):
    """Collectives over time."""

    @magic_arguments("mesh stragglers")
    @argument(
        "files", nargs="*", metavar="FILE", help="records in files (of --save, or of torch.profiler) and not of a mesh"
    )
    @argument("--of", metavar="NAME", help="the mesh (default: the one in use)")
    @argument("--last", type=int, default=100, metavar="N", help="the latest N collectives of each line (100)")
    @argument("--each", action="store_true", help="also who came when to each of the latest collectives")
    @argument("--save", metavar="FILE", help="write the records to a file, for monarch-kernel stragglers")
    def stragglers(self, found: Arguments) -> StragglerReport:
        """Show which ranks come late to collectives, how long others wait for them, and at which lines."""
        from monarch_kernel.debugger.controller.stragglers import stragglers
        from monarch_kernel.debugger.controller.stragglers.records import RecordsError, report_of, save

        if found.last < 1:
            raise usage_error(found.magic, f"--last takes a number of at least 1, not {found.last}")
        if found.files and found.of:
            raise usage_error(found.magic, "give either files or --of, not both")
        label = self._notebook.file_label
        try:
            if found.files:
                report = report_of(found.files, found.last, label=label, each=found.each)
            else:
                mesh = self._session.find(found.of, found.magic)
                report = stragglers(mesh, last=found.last, label=label, each=found.each)
            if found.save:
                save(report, found.save)
        except (RecordsError, OSError) as error:
            raise usage_error(found.magic, str(error)) from None
        return report
