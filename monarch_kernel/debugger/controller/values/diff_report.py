"""The result of `diff`: the distinct values of an expression, as data, text and HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.compare import Difference, ValueGroup
from monarch_kernel.debugger.model.readings import Leaf, figure, short, shown_pair
from monarch_kernel.display import styles
from monarch_kernel.display.reports import AsReport
from monarch_kernel.display.tables import TableView, table_text
from monarch_kernel.meshes import format_points

#: How many distinct values and differing parts are shown. The object contains all of them.
MOST_SHOWN = 20
# The columns of the table, and which of them are aligned to the right.
_HEADINGS = ("differs", "type", "ranks", "first at", "there", "others", "elements", "max |Δ|", "relative", "not finite")
_RIGHT = frozenset((4, 5, 6, 7, 8))

FailureKind = Literal["error", "dead", "late"]
"""Why a rank has no value: evaluating it failed, the rank is dead, or it did not answer in time."""


@dataclass(frozen=True, slots=True)
class ValueFailure:
    """Ranks without a value.

    Attributes:
        kind: the kind of reason, as a word.
        why: the reason, in a sentence.
        ranks: the ranks.
    """

    kind: FailureKind
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Diff(AsReport):
    """The distinct values of an expression over ranks. Displays itself as text, and as HTML in a notebook.

    Attributes:
        expression: the expression.
        mesh: the name of the proc mesh; ranks are numbered as in this mesh as spawned.
        extent: its shape.
        asked: the queried ranks.
        where: the frame or namespace in which the expression was evaluated, in words.
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
        """Return the ranks that have the same value as this rank. Raises LookupError if it has none."""
        for group in self.groups:
            if rank in group.ranks:
                return group.ranks
        raise LookupError(f"rank {rank} of mesh {self.mesh} has no value of {self.expression}")

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible dictionaries, lists, strings and numbers."""
        return {
            "expression": self.expression,
            "mesh": self.mesh,
            "where": self.where,
            "same": self.same,
            "seconds": self.seconds,
            "groups": [
                {
                    "ranks": list(each.ranks),
                    "text": each.reading.text,
                    "digest": each.reading.digest.hex(),
                    "number": each.reading.number,
                }
                for each in self.groups
            ],
            "differences": [_difference(each) for each in self.differences],
            "failed": [{"kind": each.kind, "why": each.why, "ranks": list(each.ranks)} for each in self.failed],
            "running": list(self.running),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Render the caption, the values, the table of differences, and the notes."""
        values = TableView([], [(rank_label(ranks), text) for ranks, text in _lines_of(self)])
        lines = [_caption(self), *([table_text(values)] if values.rows else [])]
        table = _table_of(self, self.differences[:MOST_SHOWN])
        if table is not None:
            lines += ["", _heading(self), table_text(table)]
            left = len(self.differences) - MOST_SHOWN
            lines += [f"… {left} more differ; they are in .differences"] if left > 0 else []
        return "\n".join([*lines, *self.notes])

    def html(self) -> str:
        """Render the caption, the values, the table of differences (all rows, most of them folded), and the notes."""
        rows: list[str] = []
        bad = {failed.ranks for failed in self.failed}
        for ranks, text in _lines_of(self):
            title = escape(format_points(ranks, self.extent, limit=8))
            style = f"{styles.LEFT};{styles.BAD}" if ranks in bad else styles.LEFT
            name = escape(rank_label(ranks))
            rows.append(
                f'<tr><td style="{styles.NAME}" title="{title}"><b>{name}</b></td>'
                f'<td style="{style}">{escape(text)}</td></tr>'
            )
        parts = [f'<div style="{styles.DIM}">{escape(_caption(self))}</div>', f"<table>{''.join(rows)}</table>"]
        shown, rest = self.differences[:MOST_SHOWN], self.differences[MOST_SHOWN:]
        table = _table_of(self, self.differences)
        if table is not None:
            parts.append(f'<div style="{styles.DIM}">{escape(_heading(self))}</div>')
            parts.append(_rows(self, table, 0, shown))
            if rest:
                parts.append(
                    f'<details><summary style="{styles.OPENS}">{len(rest)} more</summary>'
                    f"{_rows(self, table, len(shown), rest)}</details>"
                )
        parts += [f'<div style="{styles.DIM}">{escape(note)}</div>' for note in self.notes]
        return f'<div style="{styles.BOX}">{"".join(parts)}</div>'


def _difference(row: Difference) -> dict[str, Any]:
    contrast = row.contrast
    return {
        "path": row.path,
        "ranks": list(row.ranks),
        "against": list(row.against),
        "ours": row.ours.text if row.ours is not None else None,
        "theirs": row.theirs.text if row.theirs is not None else None,
        "complete": row.is_complete,
        "contrast": None
        if contrast is None
        else {
            "index": list(contrast.index) if contrast.index is not None else None,
            "ours": contrast.ours,
            "theirs": contrast.theirs,
            "count": contrast.count,
            "most": contrast.most,
            "relative": contrast.relative,
        },
    }


def _table_of(diff: Diff, shown: Sequence[Difference]) -> TableView | None:
    """Return some of the differences as a table; None if it would only repeat the list of values."""
    if not any(each.path or each.has_elements for each in diff.differences):
        return None
    rows = [_cells_of(each, diff.expression) for each in shown]
    return TableView(_HEADINGS, rows, right=_RIGHT).without_empty_columns()


def _caption(diff: Diff) -> str:
    """Describe the expression, the number of distinct values, and their ranks."""
    count = len(diff.groups)
    asked = len(diff.asked) - len(diff.running)
    if diff.same:
        said = f"the same on all {asked} ranks" if asked > 1 else "on one rank"
    elif not count:
        said = "no rank has a value"
    else:
        said = f"{count} distinct value{'s' * (count != 1)} on {sum(len(each.ranks) for each in diff.groups)} ranks"
    where = f", {diff.where}" if diff.where else ""
    return f"{short(diff.expression, 80)}: {said} of mesh {diff.mesh}{where} ({diff.seconds:.2f} s)"


def _lines_of(diff: Diff) -> list[tuple[tuple[int, ...], str]]:
    """List the values that are shown, each with its ranks, and then the ranks without a value."""
    shown = diff.groups if len(diff.groups) <= MOST_SHOWN else (*diff.groups[: MOST_SHOWN - 1], diff.groups[-1])
    tell_apart = len({each.reading.text for each in shown}) < len(shown)
    lines: list[tuple[tuple[int, ...], str]] = []
    for each in shown:
        text = short(each.reading.text, 180)
        lines.append((each.ranks, f"{text}  #{each.reading.digest.hex()[:6]}" if tell_apart else text))
    if len(shown) < len(diff.groups):
        left = diff.groups[MOST_SHOWN - 1 : -1]
        ranks = tuple(sorted(rank for each in left for rank in each.ranks))
        lines.insert(-1, (ranks, f"… {len(left)} more distinct values{_range(left)}"))
    for failed in diff.failed:
        said = {"error": "cannot evaluate it: ", "dead": "dead: ", "late": ""}[failed.kind]
        lines.append((failed.ranks, short(f"{said}{failed.why}", 300)))
    if diff.running:
        lines.append((diff.running, "not stopped, left out"))
    return lines


def _heading(diff: Diff) -> str:
    """Describe what is compared with what."""
    count = len({each.path for each in diff.differences})
    arrays = all(each.ours is not None and each.ours.is_array for each in diff.differences)
    parts = max(each.reading.arrays if arrays else each.reading.leaves for each in diff.groups)
    against = {each.against for each in diff.differences}
    what = f"{count:,} of {parts:,} {'arrays' if arrays else 'parts'} differ{'s' * (count == 1)}"
    what = what if parts > 1 else "where they differ"
    return f"{what}, compared with {rank_label(next(iter(against)))}" if len(against) == 1 else what


def _range(groups: Sequence[ValueGroup]) -> str:
    numbers = [each.reading.number for each in groups]
    if any(number is None for number in numbers):
        return ""
    known = [number for number in numbers if number is not None]
    return f", from {figure(min(known))} to {figure(max(known))}"


def _cells_of(row: Difference, expression: str) -> list[str]:
    """Format a difference as a row of the table."""
    ours, theirs, found = row.ours, row.theirs, row.contrast
    name = short(row.path or expression, 60)
    ranks = rank_label(row.ranks)
    if ours is None or theirs is None:
        there = "missing" if ours is None else short(ours.text, 40)
        others = "missing" if theirs is None else short(theirs.text, 40)
        return [name, "", ranks, "", there, others, "", "", "", ""]
    if not row.has_elements:
        if ours.is_array and theirs.is_array:
            texts = (ours.facts, theirs.facts)
            same = ours.content == theirs.content and ours.shape == theirs.shape
            return [name, "same elements" if same else "", ranks, "", *(short(text, 40) for text in texts), *([""] * 4)]
        if ours.number is not None and theirs.number is not None:
            texts = shown_pair(ours.number, theirs.number)
            return [name, ours.facts, ranks, "", *texts, "", *_gap(ours.number, theirs.number), ""]
        return [name, "", ranks, "", short(ours.text, 40), short(theirs.text, 40), *([""] * 4)]
    facts = _type(ours, theirs)
    bad = _bad(ours, theirs)
    if found is None:
        figures = [_figures(ours), _figures(theirs)]
        return [name, facts, ranks, "", *figures, "not compared", "", "", bad]
    least = "" if row.is_complete else "≥ "
    index = str(list(found.index)) if found.index is not None else ""
    most = f"{least}{figure(found.most)}" if found.most is not None else ""
    relative = f"{least}{figure(found.relative)}" if found.relative is not None else ""
    count = f"{least}{found.count:,} of {ours.size:,}"
    return [name, facts, ranks, index, found.ours, found.theirs, count, most, relative, bad]


def _gap(one: float, other: float) -> tuple[str, str]:
    gap, scale = abs(one - other), max(abs(one), abs(other))
    return figure(gap), figure(gap / scale) if scale else ""


def _figures(leaf: Leaf) -> str:
    return short(leaf.stats.text(), 40) if leaf.stats is not None else ""


def _type(ours: Leaf, theirs: Leaf) -> str:
    """Format the type of two arrays, without redundant details."""
    if ours.facts == theirs.facts:
        return short(ours.facts.removesuffix(", needs grad"), 40)
    return f"{short(ours.facts, 40)}; others {short(theirs.facts, 40)}"


def _bad(ours: Leaf, theirs: Leaf) -> str:
    """Format how many elements are NaN and infinite, if any: `3 NaN (others 1)`."""
    counts = [(leaf.stats.nans, leaf.stats.infs) if leaf.stats is not None else (0, 0) for leaf in (ours, theirs)]
    said: list[str] = []
    for what, here, others in zip(("NaN", "Inf"), *counts, strict=True):
        if here or others:
            said.append(f"{here:,} {what}" + (f" (others {others:,})" if others else ""))
    return ", ".join(said)


def _rows(diff: Diff, table: TableView, first: int, rows: Sequence[Difference]) -> str:
    """Render some rows of the table of differences, the first of them at that index."""
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
    """Describe a differing part: its location, its content on both sides, and how its elements differ."""
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
