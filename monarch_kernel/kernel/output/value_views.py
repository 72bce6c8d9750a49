"""Show the values of ranks as HTML: a chart of numbers next to a table, and summaries of arrays with distributions."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from monarch_kernel.actor import Extent, ValueMesh
from monarch_kernel.display import styles
from monarch_kernel.display.charts import figure, histogram, over_ranks
from monarch_kernel.display.outliers import outliers
from monarch_kernel.display.tables import TableView, table_html
from monarch_kernel.meshes import format_points, format_ranks

#: The minimum count of numbers for a chart. Fewer are easier to read in the table.
FEWEST = 4
#: The maximum number of rows in a table of arrays.
MOST_ROWS = 32
#: The maximum number of rows of a table next to a chart. A longer table is placed below the chart, collapsed.
MOST_BESIDE = 12
_NAMED = 6
#: The maximum number of different tables.
MOST_TABLES = 8


#: The maximum number of elements read from an array.
MOST_ELEMENTS = 1_000_000


BINS = 24


def value_mesh_html(values: ValueMesh[Any], table: TableView) -> str:
    """Return a value mesh as HTML.

    Args:
        values: the values.
        table: the same values as a table.
    """
    held = list(values.values())
    numbers = {rank: number for rank, value in enumerate(held) if (number := number_of(value)) is not None}
    if len(numbers) == len(held) >= FEWEST and len(set(map(repr, held))) > 1:
        return _with_chart(table, _chart(numbers, values.extent))
    if held and all(is_table(value) for value in held):
        return _tables(held, values.extent, table.caption)
    summaries = [summary_of(value) for value in held]
    if summaries and all(each is not None for each in summaries):
        return _arrays([each for each in summaries if each is not None], values.extent, table.caption)
    return table_html(table)


def is_table(value: Any) -> bool:
    """Return whether a value is a data frame, or another object with rows and its own HTML form."""
    return hasattr(type(value), "_repr_html_") and hasattr(type(value), "columns") and hasattr(type(value), "__len__")


def _tables(values: Sequence[Any], extent: Extent, caption: str) -> str:
    """Show tables: each distinct one once, with its ranks, in rank order."""
    alike: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        alike.setdefault(value._repr_html_() or escape(repr(value)), []).append(rank)
    parts: list[str] = []
    for html, ranks in list(alike.items())[:MOST_TABLES]:
        where = format_points(ranks, extent, limit=6)
        label = f"[{format_ranks(ranks, limit=6)}] {where}".rstrip()
        parts.append(f'<div><div style="{styles.RANKS}">{escape(label)}</div>{html}</div>')
    more = len(alike) - MOST_TABLES
    note = f'<div style="{styles.DIM}">… and {more:,} more different tables</div>' if more > 0 else ""
    beside = "display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start"
    return (
        f'<div style="{styles.VIEW}"><div style="{styles.CAPTION}">{escape(caption)}</div>'
        f'<div style="{beside}">{"".join(parts)}</div>{note}</div>'
    )


def number_of(value: Any) -> float | None:
    """Return a number, or the element of a zero-dimensional array, as a number; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond the range of floats
            return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        if str(getattr(value, "device", "cpu")) != "cpu":
            return None
        item = value.item()
        return float(item) if isinstance(item, int | float) and not isinstance(item, bool) else None
    return None


def _chart(numbers: dict[int, float], extent: Extent) -> str:
    out = outliers(numbers)
    lines: list[str] = []
    for rank in out[:_NAMED]:
        where = format_points([rank], extent)
        lines.append(
            f'<div style="{styles.BAD}">rank {rank}{f" ({escape(where)})" if where else ""}: '
            f"{escape(figure(numbers[rank]))} stands out</div>"
        )
    if len(out) > _NAMED:
        lines.append(f'<div style="{styles.BAD}">and ranks {format_ranks(out[_NAMED:], limit=8)}</div>')
    return f"<div>{over_ranks(numbers, out)}{''.join(lines)}</div>"


def _with_chart(table: TableView, chart: str) -> str:
    """Return a chart with a short table next to it, or with a long one below that can be expanded."""
    if len(table.rows) <= MOST_BESIDE:
        style = "display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start"
        return f'<div style="{styles.VIEW};{style}"><div>{table_html(table)}</div>{chart}</div>'
    caption = f'<div style="{styles.CAPTION}">{escape(table.caption)}</div>'
    rows = table_html(replace(table, caption=""))
    summary = f'<summary style="{styles.OPENS}">{len(table.rows)} rows</summary>'
    return f'<div style="{styles.VIEW}">{caption}{chart}<details>{summary}{rows}</details></div>'


def _arrays(summaries: Sequence[ArraySummary], extent: Extent, caption: str) -> str:
    """Return one row per rank: first those with elements that are not finite, then outliers, then the others."""
    out = {
        rank
        for of in ("low", "mean", "high")
        for rank in outliers({rank: getattr(each, of) for rank, each in enumerate(summaries)})
    }
    ranks = sorted(range(len(summaries)), key=lambda rank: (-summaries[rank].bad, rank not in out, rank))
    shown = sorted(ranks[:MOST_ROWS])
    heads = ("rank", "at", "type", "min", "mean", "max", "not finite", "")
    head = "".join(f'<th style="{styles.LEFT}">{name}</th>' for name in heads)
    rows = "".join(_array_row(rank, summaries[rank], extent, rank in out) for rank in shown)
    notes = [f"… and {len(ranks) - len(shown):,} more ranks"] if len(ranks) > len(shown) else []
    notes += ["of a sample of the elements"] if any(each.sampled for each in summaries) else []
    notes += [f"{format_ranks(sorted(out), limit=8)}: figures that stand out"] if out else []
    told = "".join(f'<div style="{styles.DIM}">{escape(note)}</div>' for note in notes)
    return (
        f'<div style="{styles.VIEW}"><div style="{styles.CAPTION}">{escape(caption)}</div>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{told}</div>"
    )


def _array_row(rank: int, found: ArraySummary, extent: Extent, out: bool) -> str:
    figures = ["" if math.isnan(each) else figure(each) for each in (found.low, found.mean, found.high)]
    bad = f"{found.bad:.2%}" if found.bad else ""
    mark = f";{styles.BAD}" if out else ""
    cells = [
        (styles.NAME, f"<b>{rank}</b>"),
        (styles.LEFT, escape(format_points([rank], extent))),
        (styles.LEFT, escape(found.kind)),
        *((f"{styles.RIGHT}{mark}", text) for text in figures),
        (f"{styles.RIGHT};{styles.BAD}", bad),
        (styles.LEFT, histogram(found.counts, found.low, found.high) if found.counts else ""),
    ]
    return f"<tr>{''.join(f'<td style={chr(34)}{style}{chr(34)}>{text}</td>' for style, text in cells)}</tr>"


@dataclass(frozen=True, slots=True)
class ArraySummary:
    """Summary statistics of an array or tensor, for comparing arrays at a glance.

    Elements that are not finite are counted, and left out of the other statistics.

    Attributes:
        kind: type and shape: `float32 [128, 64]`.
        low, mean, high: of the finite elements; NaN if there is none.
        bad: the fraction of elements that are not finite.
        counts: a histogram: the number of elements in each equal part of the range.
        sampled: whether only some elements were read.
    """

    kind: str
    low: float = math.nan
    mean: float = math.nan
    high: float = math.nan
    bad: float = 0.0
    counts: tuple[int, ...] = ()
    sampled: bool = False


def summary_of(value: Any) -> ArraySummary | None:
    """Return the summary of a numpy array, or of a tensor in this process's memory; None for anything else."""
    kind = f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')} {list(getattr(value, 'shape', ()))}"
    try:
        elements = _elements(value)
    except Exception:  # a tensor without data, or of a type that numpy does not support
        return ArraySummary(kind)
    if elements is None:
        return None
    import numpy

    size = elements.size
    sampled = size > MOST_ELEMENTS
    if sampled:
        elements = elements[:: size // MOST_ELEMENTS]
    if not elements.size or elements.dtype.kind not in "biuf":
        return ArraySummary(kind, sampled=sampled)
    numbers = elements.astype(numpy.float64)
    finite = numbers[numpy.isfinite(numbers)]
    bad = 1 - finite.size / numbers.size
    if not finite.size:
        return ArraySummary(kind, bad=bad, sampled=sampled)
    low, high = float(finite.min()), float(finite.max())
    counts, _edges = numpy.histogram(finite, BINS, (low, high) if high > low else (low - 0.5, high + 0.5))
    return ArraySummary(kind, low, float(finite.mean()), high, bad, tuple(map(int, counts)), sampled)


def _elements(value: Any) -> Any:
    """Return the elements as a flat numpy array; None unless the value is an array with at least one dimension."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if not value.dim():
            return None
        plain = value.detach()
        if plain.device.type != "cpu":  # reading it would wait for a GPU
            raise ValueError("not in this process's memory")
        if plain.is_floating_point() and plain.dtype not in (torch.float16, torch.float32, torch.float64):
            plain = plain.float()
        return plain.reshape(-1).numpy()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim:
        return value.reshape(-1)
    return None
