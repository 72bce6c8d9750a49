"""Find ranks that arrive late at collectives, how long others wait for them, and at which lines (`stragglers`).

`gather` requests the records of the ranks of a mesh, `records` reads and writes files of them, `analysis` compares the
clocks of hosts and finds the stragglers, and a `report` displays itself.
"""

from monarch_kernel.debugger.controller.stragglers.gather import stragglers
from monarch_kernel.debugger.controller.stragglers.stragglers_report import StragglerReport

__all__ = ["StragglerReport", "stragglers"]
