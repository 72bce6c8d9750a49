"""A comparison of values as text."""

from __future__ import annotations

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.layout import (
    MOST_SHOWN,
    caption,
    heading,
    left_out,
    lines_of,
    table_of,
)
from monarch_kernel.debugger.controller.values.report import Diff
from monarch_kernel.display.tables import TableView, table_text


def text_of(diff: Diff) -> str:
    """The caption, the values, the table of differences, and the notes."""
    values = TableView([], [(rank_label(ranks), text) for ranks, text in lines_of(diff)])
    lines = [caption(diff), *([table_text(values)] if values.rows else [])]
    table = table_of(diff, diff.differences[:MOST_SHOWN])
    if table is not None:
        lines += ["", heading(diff), table_text(table), *left_out(diff)]
    return "\n".join([*lines, *diff.notes])
