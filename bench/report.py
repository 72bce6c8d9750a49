"""Medians over rounds, and the tables."""

from __future__ import annotations

import io
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.metrics import LIMITS, REFERENCE, ROWS, Row

Result = dict[str, object]
Medians = dict[tuple[str, str], float]


def printed(table: Table, results: Sequence[Result], about: dict[str, Any], target: Path) -> None:
    """Print a table with the text below it: versions, notes, how it was measured, and where the figures are."""
    console = Console(width=None if Console().is_terminal else 200, highlight=False, emoji=False, markup=False)
    console.print(table)
    for peer, text in versions(results).items():
        console.print(f"{peer}: {text}")
    for line in notes(results):
        console.print(f"note: {line}", soft_wrap=True)
    console.print(
        f"medians of {about['rounds']} rounds in turns, load {about['load_before']} before and {about['load_after']} "
        f"after; figures: {os.path.relpath(target)}",
        soft_wrap=True,
    )


def medians(results: Iterable[Result]) -> Medians:
    """Compute (peer, metric) -> the median over the rounds."""
    values: dict[tuple[str, str], list[float]] = {}
    for r in results:
        value = r["value"]
        if isinstance(value, int | float):
            values.setdefault((str(r["peer"]), str(r["metric"])), []).append(value)
    return {key: statistics.median(v) for key, v in values.items()}


def notes(results: Iterable[Result]) -> list[str]:
    """Return what could not be measured and why, each entry once."""
    said: dict[str, None] = {}
    for r in results:
        if r["value"] is None and r["metric"] != "version":
            said[f"{r['peer']} {str(r['metric']).removeprefix('group:')}: {r.get('note', '')}"] = None
    return list(said)


def versions(results: Iterable[Result]) -> dict[str, str]:
    """Return peer -> the measured versions."""
    return {str(r["peer"]): str(r["note"]) for r in results if r["metric"] == "version"}


def number(value: float | None) -> str:
    """Format three significant digits, thousands with commas."""
    if value is None:
        return "–"
    if value and abs(value) < 0.001:
        return f"{value:.6f}".rstrip("0")
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def verdict(row: Row, ours: float | None, reference: float | None, limit: float | None = None) -> str:
    """Render the bars of a row, if any, and whether they are met: "<= 0.25 ok", "<= 0.25 MISS", "?" if not measured."""
    ratio, of_limit = over(ours, reference), over(ours, limit)
    said: list[str] = []
    if row.bar is not None:
        sign = ">=" if row.more_is_better else "<="
        met = ratio is not None and (ratio >= row.bar if row.more_is_better else ratio <= row.bar)
        said.append(f"{sign} {row.bar:g} {_mark(met, ratio)}")
    if row.most is not None:
        said.append(f"own < {row.most:g} {_mark(ours is not None and ours < row.most, ours)}")
    if row.of_limit is not None:
        met = of_limit is not None and of_limit >= row.of_limit
        said.append(f"limit >= {row.of_limit:g} {_mark(met, of_limit)}")
    return ", ".join(said)


def _mark(met: bool, value: float | None) -> str:
    return "?" if value is None else "ok" if met else "MISS"


def over(value: float | None, by: float | None) -> float | None:
    """Return value / by, if both are known."""
    return None if value is None or not by else value / by


def table(found: Medians, peers: Sequence[str], show_all: bool) -> Table:
    """Build one row for each metric: each peer, the limit, and ours relative to torchmonarch and the limit."""
    shown = Table(box=box.MARKDOWN)
    shown.add_column("metric", no_wrap=True)
    names = [p for p in peers if p != "limit"]
    against_reference, against_limit = {"ours", REFERENCE} <= {*peers}, {"ours", "limit"} <= {*peers}
    extra = ["limit"] if "limit" in peers else []
    extra += [f"ours / {REFERENCE}", "bar"] if against_reference else []
    extra += ["ours / limit"] if against_limit else []
    for name in [*names, *extra]:
        shown.add_column(name, justify="right")
    for row in ROWS:
        values = {name: found.get((name, row.metric)) for name in names}
        if (row.detail and not show_all) or not any(v is not None for v in values.values()):
            continue
        ours, limit = values.get("ours"), found.get(("limit", row.limit or ""))
        ratio = over(ours, values.get(REFERENCE))
        known = {
            "limit": number(limit),
            f"ours / {REFERENCE}": number(ratio),
            "bar": verdict(row, ours, values.get(REFERENCE), limit),
            "ours / limit": number(over(ours, limit)),
        }
        shown.add_row(row.label, *(number(values[name]) for name in names), *(known[name] for name in extra))
    return shown


def limits(found: Medians) -> Table | None:
    """Return the table of the machine's own limits, or None if they were not measured."""
    shown = Table("limit", box=box.MARKDOWN)
    shown.add_column("value", justify="right")
    for metric, label in LIMITS.items():
        value = found.get(("limit", metric))
        if value is not None:
            shown.add_row(label, number(value))
    return shown if shown.row_count else None


def missed(found: Medians) -> list[str]:
    """Return the rows in which ours missed a bar."""
    return [row.label.strip() for row in ROWS if "MISS" in verdict(row, *(found.get(at) for at in _compared(row)))]


def _compared(row: Row) -> list[tuple[str, str]]:
    return [("ours", row.metric), (REFERENCE, row.metric), ("limit", row.limit or "")]


#: The markers around the figures in a page.
BEGIN, END = "<!-- figures: written by python -m bench --doc -->", "<!-- end of figures -->"


def write_into(page: Path, about: dict[str, object], results: Sequence[Result], peers: Sequence[str]) -> None:
    """Replace the figures of a page.

    Raises:
        ValueError: the page does not have the markers around the figures.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for figures: put the lines {BEGIN} and {END} into it")
    counts = Counter((r["peer"], r["metric"]) for r in results if isinstance(r["value"], int | float))
    most = max(counts.values(), default=0)
    intro = (
        "{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}, Python {python}; {when}. "
        "Load before: {load_before}; medians of up to {most} rounds. ".format(most=most, **about)
        + "; ".join(f"{peer}: {said}" for peer, said in versions(results).items())
        + "."
    )
    console = Console(width=400, file=io.StringIO(), record=True, highlight=False, emoji=False, markup=False)
    console.print(table(medians(results), peers, False))
    lines = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    said = [f"* {line}" for line in notes(results)]
    page.write_text(
        f"{before}{begin}\n\n{textwrap.fill(intro, 118, break_on_hyphens=False)}\n\n"
        + "\n".join([*lines, *([""] if said else []), *said])
        + f"\n\n{end}{after}"
    )


def show(results: Sequence[Result], peers: Sequence[str], show_all: bool) -> None:
    """Print everything to standard output."""
    # A table in a file must not be wrapped at 80 columns.
    console = Console(width=None if Console().is_terminal else 200, highlight=False, emoji=False, markup=False)
    found = medians(results)
    console.print(table(found, peers, show_all))
    if (bare := limits(found)) is not None:
        console.print(bare)
    for line in notes(results):
        console.print(f"note: {line}", soft_wrap=True)
