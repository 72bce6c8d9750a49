"""Values across ranks: `diff` says which ranks have which value and where they differ, `pull` moves one here.

Ranks reduce a value to digests and figures (`debugger.rank.values`); `query` asks them for these, `compare` compares
them, `report` is the result. The renderers are `text`, `html` and `data`; the first two share a `layout`.
"""

from monarch_kernel.debugger.controller.values.query import diff, pull
from monarch_kernel.debugger.controller.values.report import Diff

__all__ = ["Diff", "diff", "pull"]
