"""`CellPlans`: below each cell, what its lines cost on meshes, while `%mesh plan on` says so."""

from __future__ import annotations

from typing import Any

from IPython.display import display


class CellPlans:
    """Shows the plan of each cell that issues operations on a mesh.

    Attributes:
        is_on: whether it does.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._plan: Any = None

    def before_cell(self) -> None:
        """A cell begins."""
        self._plan = None
        if self.is_on:
            from monarch_kernel.tensor import Explanation

            self._plan = Explanation().__enter__()

    def after_cell(self) -> None:
        """It has ended."""
        plan, self._plan = self._plan, None
        if plan is not None and self.is_on:
            plan.__exit__(None, None, None)
            if plan.lines:
                display(plan)
