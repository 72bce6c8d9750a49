"""A comparison of values as HTML."""

from __future__ import annotations

from html import escape

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.layout import MOST_SHOWN, caption, heading, lines_of, table_of
from monarch_kernel.debugger.controller.values.report import Diff
from monarch_kernel.display import styles
from monarch_kernel.display.tables import table_html
from monarch_kernel.meshes import format_points


def html_of(diff: Diff) -> str:
    """The caption, the values, the table of differences (all rows, most of them folded), and the notes."""
    rows: list[str] = []
    bad = {failed.ranks for failed in diff.failed}
    for ranks, text in lines_of(diff):
        title = escape(format_points(ranks, diff.extent, limit=8))
        style = f"{styles.LEFT};{styles.BAD}" if ranks in bad else styles.LEFT
        name = escape(rank_label(ranks))
        rows.append(
            f'<tr><td style="{styles.NAME}" title="{title}"><b>{name}</b></td>'
            f'<td style="{style}">{escape(text)}</td></tr>'
        )
    parts = [f'<div style="{styles.DIM}">{escape(caption(diff))}</div>', f"<table>{''.join(rows)}</table>"]
    table = table_of(diff, diff.differences[:MOST_SHOWN])
    if table is not None:
        parts.append(f'<div style="{styles.DIM}">{escape(heading(diff))}</div>')
        parts.append(table_html(table))
        rest = table_of(diff, diff.differences[MOST_SHOWN:])
        if rest is not None and rest.rows:
            parts.append(f"<details><summary>{len(rest.rows)} more</summary>{table_html(rest)}</details>")
    parts += [f'<div style="{styles.DIM}">{escape(note)}</div>' for note in diff.notes]
    return f'<div style="{styles.BOX}">{"".join(parts)}</div>'
