"""Show a comparison: as a sentence and a table of causes, and in notebooks with a grid of modules and steps.

Without scripts, the grid is part of the HTML. `grid_data` is what the live grid shows (labextension/src/views).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_kernel.display import tables
from monarch_kernel.display.charts import figure
from monarch_kernel.display.quantities import few
from monarch_kernel.display.tables import TableView, table_html, table_text
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.numerics.comparison import Comparison, TensorDifference

#: Rows of a table; further causes are counted.
_MOST_CAUSES = 10
#: Folded consequences that are listed.
_MOST_CONSEQUENCES = 200
#: Tensors of a cell, and of all cells together, that a live grid lists when a cell is chosen.
_MOST_TENSORS, _MOST_LISTED = 24, 6_000
#: Modules and steps of a grid with a cell each.
_MOST_MODULES, _MOST_STEPS = 400, 40
#: The least ratio to the tolerance of each colour of a cell, readable on light and dark pages, and its meaning.
_COLOURS = (
    (0.0, "rgba(128,128,128,.22)", "the same bytes"),
    (1e-300, "rgba(43,127,217,.30)", "within tolerance"),
    (1.0, "#d9a62b", "up to 10 times the tolerance"),
    (10.0, "#e0752b", "up to 1,000 times"),
    (1000.0, "#d9362b", "more"),
)


def sentence(comparison: Comparison) -> str:
    """Return the verdict in a sentence."""
    first = comparison.first
    counted = f"{comparison.compared:,} tensors compared"
    if first is None:
        if comparison.identical == comparison.compared and comparison.equal:
            return f"Equal in every bit: {counted}."
        if comparison.equal is None and comparison.compared > comparison.unaligned:
            return (
                f"Unsure: {counted}, and none differs by more than half precision may explain, which is too much to "
                "call them equal. Record the reference with perturb=1 and pass it as noise."
            )
        if comparison.equal is None:
            return f"Unsure: {counted} and equal, but {comparison.unaligned:,} could not be aligned."
        worst = comparison.worst
        most = ""
        if worst is not None:
            most = f", at most {figure(worst.ratio)} of its tolerance ({worst.title}, step {worst.step})"
        return f"Equal within rounding: {counted}{most}."
    where = f"step {first.step}, {first.phase}: {first.title}"
    on = f" on {_ranks(first.ranks)}" if first.ranks else ""
    line = f" at {first.line}" if first.line else ""
    much = _by_how_much(first)
    if comparison.equal is None:
        return (
            f"Unsure: {where}{on}{line} is {much}, which rounding may still explain; {counted}. "
            + ("Record the reference with perturb=1 and pass it as noise." if comparison.is_estimate else "")
        ).rstrip()
    start = first.kind == "parameter" and first.phase == "forward"
    return f"Different from {where}{on}{line}: {much}." + " The runs begin with different parameters." * start


def _by_how_much(difference: TensorDifference) -> str:
    if math.isinf(difference.ratio):
        return "rounding explains no difference"
    return f"{figure(difference.ratio)} times its tolerance"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {format_ranks(ranks, limit=6)}"


def text(comparison: Comparison) -> str:
    """Render the verdict, the causes and the notes as text."""
    lines = [sentence(comparison)]
    if comparison.causes:
        lines += ["", table_text(_causes(comparison))]
    folded = _folded(comparison)
    return "\n".join([*lines, *([folded] if folded else []), *_notes(comparison)])


def _causes(comparison: Comparison) -> TableView:
    shown = comparison.causes[:_MOST_CAUSES]
    more = len(comparison.causes) - len(shown)
    rows = [
        [
            str(each.step),
            each.phase,
            each.title,
            format_ranks(each.ranks, limit=6),
            each.line,
            figure(each.ratio) if math.isfinite(each.ratio) else "",
            f"{each.suggests} (a guess)" if each.suggests and math.isfinite(each.distance) else each.suggests,
        ]
        for each in shown
    ]
    return TableView(
        ["step", "phase", "tensor", "ranks", "line", "× tolerance", "suggests"],
        rows,
        right=(0, 5),
        note=f"and {more:,} more that no earlier difference explains" if more else "",
    ).without_empty_columns()


def _folded(comparison: Comparison) -> str:
    count = len(comparison.differences) - len(comparison.causes)
    compared = f"{comparison.compared:,} tensors compared"
    if not comparison.differences:
        return ""
    if not count:
        return f"{compared}."
    return f"{count:,} more tensor{'s differ' if count != 1 else ' differs'} as a consequence; {compared}."


def _notes(comparison: Comparison) -> list[str]:
    notes = list(comparison.notes)
    if comparison.is_estimate and comparison.identical != comparison.compared:
        notes.append("Tolerances are estimated from the precision; a run with perturbed inputs would measure them.")
    return [*notes, *comparison.left_out]


# -- HTML --------------------------------------------------------------------------------------------


def html(comparison: Comparison) -> str:
    """Render the verdict, the causes, folded consequences and the grid as HTML without scripts."""
    bad = f"{tables.HEADLINE};{tables.BAD}" if comparison.equal is False else tables.HEADLINE
    parts = [f'<div style="{bad}">{escape(sentence(comparison))}</div>']
    if comparison.causes:
        parts.append(table_html(_causes(comparison)))
    later = [each for each in comparison.differences if each.is_consequence]
    if later:
        names = [f"step {each.step}, {each.phase}: {each.title}" for each in later]
        inside = "".join(f"<div>{escape(name)}</div>" for name in names[:_MOST_CONSEQUENCES])
        if len(names) > _MOST_CONSEQUENCES:
            inside += f"<div>and {len(names) - _MOST_CONSEQUENCES:,} more</div>"
        parts.append(
            f'<details><summary style="{tables.OPENS}">{escape(_folded(comparison))}</summary>{inside}</details>'
        )
    elif comparison.causes:
        parts.append(f'<div style="{tables.DIM}">{escape(_folded(comparison))}</div>')
    parts.append(grid(comparison))
    parts += [f'<div style="{tables.DIM}">{escape(note)}</div>' for note in _notes(comparison)]
    return f'<div style="{tables.VIEW}">{"".join(parts)}</div>'


def grid(comparison: Comparison) -> str:
    """Render modules × steps as a grid, coloured by the ratio to the tolerance; the first wrong tensor is outlined."""
    ratios = comparison.ratios
    modules, shown, notes = _extent(comparison, ratios)
    first = comparison.first
    if not modules:
        return ""
    head = "".join(f'<th style="{tables.RIGHT}">{step}</th>' for step in shown)
    rows: list[str] = []
    for module in modules:
        cells = "".join(_cell(ratios.get((module, step)), module, step, first) for step in shown)
        rows.append(f'<tr><td style="{tables.NAME};{tables.FONT}">{escape(module or "(the model)")}</td>{cells}</tr>')
    legend = " ".join(
        f'<span style="background:{colour};padding:0 .7em;margin-right:.3em"></span>{meaning}&ensp;'
        for _, colour, meaning in _COLOURS
    )
    note = "".join(f'<div style="{tables.DIM}">{escape(each)}</div>' for each in notes)
    opened = " open" if comparison.differences else ""
    return (
        f'<details{opened}><summary style="{tables.OPENS}">modules × steps</summary>'
        f'<div style="{tables.DIM}">{legend}</div>'
        f'<div style="max-height:420px;overflow:auto"><table><thead><tr><th style="{tables.LEFT}">module \\ step</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}</details>"
    )


def _extent(comparison: Comparison, ratios: Mapping[tuple[str, int], float]) -> tuple[list[str], list[int], list[str]]:
    """Return the modules and the steps that a grid shows, and which ones it leaves out, each in a sentence."""
    modules = list(dict.fromkeys(module for module, _ in ratios))
    steps = sorted({step for _, step in ratios})
    notes: list[str] = []
    if hidden := max(0, len(modules) - _MOST_MODULES):  # those that differ most are shown, in program order
        worst = {module: max(ratios.get((module, step), 0.0) for step in steps) for module in modules}
        kept = set(sorted(modules, key=lambda each: -worst[each])[:_MOST_MODULES])
        if comparison.first is not None:
            kept.add(comparison.first.module)
        modules = [module for module in modules if module in kept]
        notes.append(f"{hidden:,} modules that differ less are not shown.")
    shown = steps[:_MOST_STEPS]
    if comparison.first is not None and comparison.first.step not in shown:
        shown[-1] = comparison.first.step
    if len(steps) > len(shown):
        notes.append(f"Steps {few([str(step) for step in steps if step not in shown])} are not shown.")
    return modules, shown, notes


def _cell(ratio: float | None, module: str, step: int, first: TensorDifference | None) -> str:
    if ratio is None:
        return "<td></td>"
    colour = next(each for least, each, _ in reversed(_COLOURS) if ratio >= least)
    is_first = first is not None and (first.module, first.step) == (module, step)
    outline = ";outline:3px solid currentColor;outline-offset:-3px" if is_first else ""
    value = f"{figure(ratio)} × tolerance" if math.isfinite(ratio) else "rounding explains no difference"
    title = f"{module or 'the model'}, step {step}: {value}{', the first wrong tensor' * is_first}"
    mark = "✕" if is_first else ""
    style = f"background:{colour};min-width:2.2em;text-align:center{outline}"
    return f'<td title="{escape(title, quote=True)}" style="{style}">{mark}</td>'


# -- the live grid -----------------------------------------------------------------------------------


def grid_data(comparison: Comparison) -> dict[str, Any]:
    """Return the grid as plain data for the live view, with the tensors of each cell.

    Of a cell, those farthest from their tolerance are listed, in program order. If there are very many cells, those
    that differ have their tensors, the others only their ratio. An infinite ratio is None.
    """
    ratios = comparison.ratios
    modules, steps, notes = _extent(comparison, ratios)
    rows = {module: at for at, module in enumerate(modules)}
    columns = {step: at for at, step in enumerate(steps)}
    inside: dict[tuple[str, int], dict[tuple[object, ...], TensorDifference]] = {}
    for each in (*comparison.tensors, *comparison.differences):  # a difference knows whether it is a consequence
        key = each.micro, each.call, each.phase, each.kind, each.tensor
        inside.setdefault((each.module, each.step), {})[key] = each
    first, room = comparison.first, _MOST_LISTED
    cells: list[dict[str, Any]] = []
    for at in sorted(inside, key=lambda each: -ratios[each]):
        if at[0] not in rows or at[1] not in columns:
            continue
        found = list(inside[at].values())
        worst = set(sorted(range(len(found)), key=lambda index: -found[index].ratio)[: min(room, _MOST_TENSORS)])
        room -= len(worst)
        cells.append(
            {
                "row": rows[at[0]],
                "column": columns[at[1]],
                "ratio": _finite(ratios[at]),
                "tensors": [_tensor_data(each) for index, each in enumerate(found) if index in worst],
                "more": len(found) - len(worst),
            }
        )
    return {
        "sentence": sentence(comparison),
        "equal": comparison.equal,
        "modules": modules,
        "steps": steps,
        "cells": cells,
        "first": None if first is None else [rows[first.module], columns[first.step]],
        "notes": [*notes, *_notes(comparison)],
    }


def _tensor_data(each: TensorDifference) -> dict[str, Any]:
    return {
        "phase": each.phase,
        "title": each.title,
        "micro": each.micro,
        "ranks": format_ranks(each.ranks, limit=6),
        "line": each.line,
        "ratio": _finite(each.ratio),
        "suggests": each.suggests,
        "consequence": each.is_consequence,
    }


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None
