"""A comparison of values as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.compare import Difference
from monarch_kernel.debugger.controller.values.layout import (
    HEADINGS,
    MOST_SHOWN,
    RIGHT,
    caption,
    cells_of,
    has_table,
    heading,
    kept_columns,
    lines_of,
)
from monarch_kernel.debugger.controller.values.report import Diff
from monarch_kernel.meshes import format_points

_FONT = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
_DIM = "opacity:.65"
_BAD = "color:#c0392b"


def html_of(diff: Diff) -> str:
    """The caption, the values, the table of what differs (all rows, most of them folded), and the notes."""
    rows: list[str] = []
    bad = {failed.ranks for failed in diff.failed}
    for ranks, text in lines_of(diff):
        title = escape(format_points(ranks, diff.extent, limit=8))
        style = _BAD if ranks in bad else ""
        name = escape(rank_label(ranks))
        rows.append(
            f'<tr><td style="text-align:left;white-space:nowrap" title="{title}"><b>{name}</b></td>'
            f'<td style="text-align:left;{style}">{escape(text)}</td></tr>'
        )
    parts = [
        f'<div style="{_DIM}">{escape(caption(diff))}</div>',
        f'<table style="margin:2px 0">{"".join(rows)}</table>',
    ]
    if has_table(diff):
        parts.append(f'<div style="{_DIM}">{escape(heading(diff))}</div>')
        parts.append(_table(diff, diff.differences[:MOST_SHOWN]))
        if len(diff.differences) > MOST_SHOWN:
            rest = _table(diff, diff.differences[MOST_SHOWN:])
            parts.append(f"<details><summary>{len(diff.differences) - MOST_SHOWN} more</summary>{rest}</details>")
    parts += [f'<div style="{_DIM}">{escape(note)}</div>' for note in diff.notes]
    return f'<div style="{_FONT}">{"".join(parts)}</div>'


def _table(diff: Diff, shown: Sequence[Difference]) -> str:
    rows = [cells_of(each, diff.expression) for each in shown]
    kept = kept_columns(rows)

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{"right" if at in RIGHT else "left"}">{escape(cells[at])}</{tag}>' for at in kept
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = line("th", HEADINGS)
    return f'<table style="margin:2px 0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
