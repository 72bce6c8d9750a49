"""Show the costs of a program's lines beyond their operations, as a table: `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_kernel.display.quantities import shown_location, source_line, text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import DeviceMeshError
from monarch_kernel.runtime.tensor.controller.signature import LineCost
from monarch_kernel.runtime.tensor.inspection.running import all_engines

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine


Line = tuple[str, int, str]

#: The maximum length of a displayed source line (characters).
_WIDTH = 60


@dataclass(frozen=True, slots=True)
class ExplainedLine:
    """The costs of one line of the program.

    Attributes:
        file, line, function: the location of the line.
        operations: how many operations it issued.
        synchronisations: how often the controller waited there, by cause.
        redistributions: how often the layout of a sharded tensor changed there, by old and new layout.
        fallbacks: operations without a rule for their layout, which ran on whole tensors, by name.
        sent, fetched, moved: bytes sent to the ranks, fetched from them, and moved between them.
    """

    file: str
    line: int
    function: str
    operations: int
    synchronisations: Mapping[str, int]
    redistributions: Mapping[str, int]
    fallbacks: Mapping[str, int]
    sent: int
    fetched: int
    moved: int


class Explanation(AsTable):
    """The costs of lines of the program, created by `explain`. As a context manager, it counts only its block.

    Attributes:
        lines: the lines that had costs or issued operations, ordered by file and line.
    """

    __slots__ = ("_before", "_marks", "lines")

    def __init__(self) -> None:
        self._before: dict[int, dict[Line, LineCost]] = {}
        self._marks: dict[int, int] = {}
        self.lines: tuple[ExplainedLine, ...] = ()

    def __enter__(self) -> Explanation:
        for engine in all_engines():
            collect(engine)
            self._before[id(engine)] = {place: _copy(cost) for place, cost in engine.plan.lines.items()}
            self._marks[id(engine)] = engine.record
        return self

    def __exit__(self, *exc: object) -> None:
        self.update()

    def update(self) -> Explanation:
        """Include all costs until now. This costs one round trip for each sharded mesh."""
        found: dict[Line, LineCost] = {}
        operations: dict[Line, int] = {}
        for engine in all_engines():
            collect(engine)
            before = self._before.get(id(engine), {})
            for place, cost in list(engine.plan.lines.items()):
                _add(found.setdefault(place, LineCost()), _since(cost, before.get(place)))
            first = self._marks.get(id(engine), engine.plan.since)
            for record, taken in list(engine.places.items()):
                if record >= first:
                    place = frames.innermost(taken)
                    operations[place] = operations.get(place, 0) + 1
        places = sorted({place for place, cost in found.items() if _counts(cost)} | set(operations))
        self.lines = tuple(
            _explained(place, found.get(place, LineCost()), operations.get(place, 0)) for place in places
        )
        return self

    @property
    def synchronisations(self) -> int:
        """How often the controller waited, over all lines."""
        return sum(sum(each.synchronisations.values()) for each in self.lines)

    @property
    def redistributions(self) -> int:
        """How often layouts changed, over all lines."""
        return sum(sum(each.redistributions.values()) for each in self.lines)

    @property
    def fallbacks(self) -> int:
        """How often operations without a rule ran on whole tensors, over all lines."""
        return sum(sum(each.fallbacks.values()) for each in self.lines)

    def table(self) -> TableView:
        """Return a table with one row for each line of the program."""
        rows = [
            (
                shown_location(each.file, each.line),
                source_line(each.file, each.line, _WIDTH),
                str(each.operations or ""),
                _listed(each.synchronisations),
                _listed(each.redistributions),
                _listed(each.fallbacks),
                *(text_size(size) if size else "" for size in (each.sent, each.fetched, each.moved)),
            )
            for each in self.lines
        ]
        headings = ("line", "", "operations", "waits for", "layouts changed", "on whole tensors")
        view = TableView((*headings, "sent", "fetched", "moved"), rows, self._caption(), frozenset({2, 6, 7, 8}))
        return view.without_empty_columns() if rows else TableView((), (), self._caption())

    def __repr__(self) -> str:
        return super().__repr__() if self.lines else self._caption()

    def _caption(self) -> str:
        if not self.lines:
            return "No operation on a mesh has cost anything yet."
        counted = (
            (sum(each.operations for each in self.lines), "operation", ""),
            (self.synchronisations, "wait", " for values"),
            (self.redistributions, "layout", " changed"),
            (self.fallbacks, "operation", " on whole tensors"),
        )
        parts = [f"{count:,} {what}{'s' * (count != 1)}{more}" for count, what, more in counted if count or not more]
        sizes = {name: sum(getattr(each, name) for each in self.lines) for name in ("sent", "fetched", "moved")}
        parts += [f"{text_size(size)} {name}" for name, size in sizes.items() if size]
        return ", ".join(parts)


def explain() -> Explanation:
    """Count the costs of this program's lines on meshes so far, or of a block: ``with explain() as plan:``.

    The result counts operations (at least the newest 20,000 of each mesh), waits of the controller for values, changes
    of layout, operations that ran on whole tensors because they have no rule for the layout, and bytes sent to ranks,
    fetched from them and moved between them. The call costs one round trip for each sharded mesh.
    """
    return Explanation().update()


def clear_plans() -> None:
    """Reset the counts."""
    for engine in all_engines():
        collect(engine)
        engine.plan.clear()
        engine.plan.since = engine.record


def collect(engine: TensorEngine) -> None:
    """Collect the counts of the ranks into the plan of an engine. Meshes that have lost a rank are skipped."""
    for mesh in list(engine.meshes.values()):
        if mesh.error is None:
            with suppress(DeviceMeshError):  # the counts of its ranks are lost; the next fetch reports the death
                mesh.collect_costs()


def _copy(cost: LineCost) -> LineCost:
    copied = LineCost()
    _add(copied, cost)
    return copied


def _add(to: LineCost, cost: LineCost) -> None:
    for name in ("synchronisations", "redistributions", "fallbacks"):
        counts = getattr(to, name)
        for what, count in getattr(cost, name).items():
            counts[what] = counts.get(what, 0) + count
    to.sent += cost.sent
    to.fetched += cost.fetched
    to.moved += cost.moved


def _since(cost: LineCost, before: LineCost | None) -> LineCost:
    if before is None:
        return cost
    left = LineCost(
        sent=cost.sent - before.sent, fetched=cost.fetched - before.fetched, moved=cost.moved - before.moved
    )
    for name in ("synchronisations", "redistributions", "fallbacks"):
        old = getattr(before, name)
        counts = {what: count - old.get(what, 0) for what, count in getattr(cost, name).items()}
        getattr(left, name).update({what: count for what, count in counts.items() if count})
    return left


def _counts(cost: LineCost) -> bool:
    return bool(
        cost.synchronisations or cost.redistributions or cost.fallbacks or cost.sent or cost.fetched or cost.moved
    )


def _explained(place: Line, cost: LineCost, operations: int) -> ExplainedLine:
    return ExplainedLine(
        *place,
        operations,
        dict(cost.synchronisations),
        dict(cost.redistributions),
        dict(cost.fallbacks),
        cost.sent,
        cost.fetched,
        cost.moved,
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(what if count == 1 else f"{count} × {what}" for what, count in counts.items())
