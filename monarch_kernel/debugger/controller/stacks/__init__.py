"""The stacks of all ranks, merged: `gather` queries the ranks, `merge` and `report` build one tree, renderers show it.

The renderers `text` and `html` share the `layout` of lines. A rank takes its own stacks in
`debugger.rank.stacks`; `pyspy` parses what a host agent has read from a rank that does not answer.
"""

from monarch_kernel.debugger.controller.stacks.gather import stacks
from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks

__all__ = ["Stacks", "stacks"]
