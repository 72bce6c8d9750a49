"""The result of `diff`: the distinct values of an expression as data, which `text`, `html` and `data` render."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.values.compare import Difference, ValueGroup

FailureKind = Literal["error", "dead", "late"]
"""Why a rank has no value: evaluating it failed, the rank is dead, or it did not answer in time."""


@dataclass(frozen=True, slots=True)
class ValueFailure:
    """Ranks without a value.

    Attributes:
        kind: why, as a word.
        why: the reason, in a sentence.
        ranks: which ranks.
    """

    kind: FailureKind
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Diff:
    """The distinct values of an expression over ranks. Displays itself as text, and as HTML in a notebook.

    Attributes:
        expression: the expression.
        mesh: the name of the proc mesh; ranks are numbered as in this mesh as spawned.
        extent: its shape.
        asked: the queried ranks.
        where: where the expression was evaluated, in words.
        groups: the distinct values with their ranks; the smallest group first.
        differences: the parts that differ, in the order of the value's parts.
        failed: ranks without a value, by reason.
        running: ranks that were left out because they are not stopped, if it was evaluated in stopped frames.
        notes: further information: parts that were left out, values that changed during the comparison.
        seconds: how long the comparison took.
    """

    expression: str
    mesh: str
    extent: Extent
    asked: tuple[int, ...]
    where: str
    groups: tuple[ValueGroup, ...]
    differences: tuple[Difference, ...] = ()
    failed: tuple[ValueFailure, ...] = ()
    running: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether all queried ranks have a value, and the same one."""
        return len(self.groups) == 1 and not self.failed

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same value as this rank. Raises LookupError if it has none."""
        for group in self.groups:
            if rank in group.ranks:
                return group.ranks
        raise LookupError(f"rank {rank} of mesh {self.mesh} has no value of {self.expression}")

    def to_dict(self) -> dict[str, Any]:
        """The whole report as JSON-compatible dictionaries, lists, strings and numbers."""
        from monarch_kernel.debugger.controller.values.data import data_of

        return data_of(self)

    def __repr__(self) -> str:
        from monarch_kernel.debugger.controller.values.text import text_of

        return text_of(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _repr_html_(self) -> str:
        from monarch_kernel.debugger.controller.values.html import html_of

        return html_of(self)
