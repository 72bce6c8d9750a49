"""A comparison of values as text."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.layout import (
    HEADINGS,
    MOST_SHOWN,
    RIGHT,
    caption,
    cells_of,
    has_table,
    heading,
    kept_columns,
    left_out,
    lines_of,
)
from monarch_kernel.debugger.controller.values.report import Diff


def text_of(diff: Diff) -> str:
    """The caption, the values, the table of what differs, and the notes."""
    lines = [caption(diff), *_aligned([(rank_label(ranks), text) for ranks, text in lines_of(diff)])]
    if has_table(diff):
        lines += ["", heading(diff)]
        lines += _table([cells_of(each, diff.expression) for each in diff.differences[:MOST_SHOWN]])
        lines += left_out(diff)
    return "\n".join([*lines, *diff.notes])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    kept = kept_columns(rows)
    widths = {at: max(len(row[at]) for row in (HEADINGS, *rows)) for at in kept}
    return [
        "  ".join(row[at].rjust(widths[at]) if at in RIGHT else row[at].ljust(widths[at]) for at in kept).rstrip()
        for row in (HEADINGS, *rows)
    ]


def _aligned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(label) for label, _ in pairs), default=0)
    return [f"{label.ljust(width)}  {text}".rstrip() for label, text in pairs]
