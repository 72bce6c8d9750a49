"""Values across ranks: `diff` reports which ranks have which value and where they differ, `pull` fetches one value.

Ranks reduce a value to digests and figures (`debugger.rank.values`); `query` requests these, `compare` compares them,
and `report` is the result, which displays itself.
"""

from monarch_kernel.debugger.controller.values.query import diff, pull
from monarch_kernel.debugger.controller.values.report import Diff

__all__ = ["Diff", "diff", "pull"]
