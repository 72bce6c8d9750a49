"""Which ranks come late to collectives, how much the others wait for them, and at which lines (`stragglers`).

`gather` asks the ranks of a mesh for their records, `records` reads and writes files of them, `clocks` makes the clocks
of hosts comparable, `analysis` finds the stragglers, and a `report` displays itself.
"""

from monarch_kernel.debugger.controller.stragglers.gather import stragglers
from monarch_kernel.debugger.controller.stragglers.report import StragglerReport

__all__ = ["StragglerReport", "stragglers"]
