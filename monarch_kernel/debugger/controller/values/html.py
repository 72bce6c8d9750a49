"""A comparison of values as HTML: each differing part is a row that opens to what is known of it on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.compare import Difference
from monarch_kernel.debugger.controller.values.layout import MOST_SHOWN, caption, heading, lines_of, table_of
from monarch_kernel.debugger.controller.values.report import Diff
from monarch_kernel.debugger.model.readings import Leaf, figure
from monarch_kernel.display import styles
from monarch_kernel.display.tables import TableView
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
    shown, rest = diff.differences[:MOST_SHOWN], diff.differences[MOST_SHOWN:]
    table = table_of(diff, diff.differences)
    if table is not None:
        parts.append(f'<div style="{styles.DIM}">{escape(heading(diff))}</div>')
        parts.append(_rows(diff, table, 0, shown))
        if rest:
            parts.append(
                f'<details><summary style="{styles.OPENS}">{len(rest)} more</summary>'
                f"{_rows(diff, table, len(shown), rest)}</details>"
            )
    parts += [f'<div style="{styles.DIM}">{escape(note)}</div>' for note in diff.notes]
    return f'<div style="{styles.BOX}">{"".join(parts)}</div>'


def _rows(diff: Diff, table: TableView, first: int, rows: Sequence[Difference]) -> str:
    """Some rows of the table of differences, the first of them at that index."""
    head = "".join(_cell("th", at, escape(text), table) for at, text in enumerate(table.headings))
    body: list[str] = []
    for row, cells in zip(rows, table.rows[first:], strict=False):
        opened = "".join(f"<div>{escape(line)}</div>" for line in _details(diff, row))
        name = (
            f'<details><summary style="cursor:pointer">{escape(cells[0])}</summary>'
            f'<div style="{styles.TREE_INSIDE};white-space:pre-wrap">{opened}</div></details>'
        )
        texts = [name, *map(escape, cells[1:])]
        body.append(f"<tr>{''.join(_cell('td', at, text, table) for at, text in enumerate(texts))}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(tag: str, at: int, inner: str, table: TableView) -> str:
    return f'<{tag} style="{styles.RIGHT if at in table.right else styles.LEFT}">{inner}</{tag}>'


def _details(diff: Diff, row: Difference) -> list[str]:
    """What is known of a differing part: where it is, what it is on both sides, and how its elements differ."""
    lines = [
        f"{rank_label(ranks)} {format_points(ranks, diff.extent, limit=8)}: {_told(leaf)}"
        for ranks, leaf in ((row.ranks, row.ours), (row.against, row.theirs))
    ]
    found = row.contrast
    if found is not None:
        at = f", first at {list(found.index)}: {found.ours} and {found.theirs}" if found.index is not None else ""
        lines.append(f"{found.count:,} of {found.compared:,} compared elements differ{at}")
        lines += [f"at most by {figure(found.most)}"] if found.most is not None else []
        lines += [f"relative to the larger one by {figure(found.relative)}"] if found.relative is not None else []
    if row.blocks:
        lines.append(f"{row.compared} of the {row.blocks} blocks that differ were compared")
    return lines


def _told(leaf: Leaf | None) -> str:
    if leaf is None:
        return "missing"
    figures = leaf.stats.text() if leaf.stats is not None else ""
    return ", ".join(filter(None, [leaf.facts, figures or leaf.text, leaf.part]))
