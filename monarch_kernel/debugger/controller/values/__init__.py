"""Compare values across ranks. `diff` reports which ranks have which value and where they differ; `pull` fetches one.

Ranks reduce a value to digests and figures (`debugger.rank.values`); `query` requests these, `compare` compares them,
and `report` is the result, which displays itself.
"""

from monarch_kernel.debugger.controller.values.diff_report import Diff
from monarch_kernel.debugger.controller.values.query import diff, pull

__all__ = ["Diff", "diff", "pull"]
