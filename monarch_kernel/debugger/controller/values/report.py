"""What `diff` returns: as text, as HTML, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.values.compare import Difference, ValueGroup
from monarch_kernel.debugger.model.readings import Leaf, figure, short, shown_pair
from monarch_kernel.meshes import format_points, format_ranks

#: Distinct values, and parts that differ, that are shown; the object has all.
MOST_SHOWN = 20

_FONT = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
_DIM = "opacity:.65"
_BAD = "color:#c0392b"
_HEADINGS = ("differs", "type", "ranks", "first at", "there", "others", "elements", "max |Δ|", "relative", "not finite")
_RIGHT = frozenset((4, 5, 6, 7, 8))


@dataclass(frozen=True, slots=True)
class ValueFailure:
    """Ranks without a value.

    Attributes:
        kind: "error" (evaluating it failed), "dead" or "late".
        why: the reason, in a sentence.
        ranks: who.
    """

    kind: str
    why: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Diff:
    """The distinct values of an expression over ranks. Shows itself as text, and as HTML in a notebook.

    Attributes:
        expression: what was evaluated.
        mesh: the name of the proc mesh; ranks are those of this mesh as spawned.
        extent: its shape.
        asked: the ranks that were asked, but for those that run while others are stopped.
        where: where the expression was evaluated, in words.
        groups: the ranks with one value each; the smallest group first.
        differences: the parts that differ, in the order of the value's parts.
        failed: ranks without a value, by reason.
        running: ranks that were left out as they are not stopped, where stopped frames were looked into.
        notes: what else one has to know: parts that were left out, values that changed meanwhile.
        seconds: how long it took.
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
        """Whether all ranks that were asked have a value, and the same one."""
        return len(self.groups) == 1 and not self.failed

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same value as this one. Raises LookupError if it has none."""
        for group in self.groups:
            if rank in group.ranks:
                return group.ranks
        raise LookupError(f"rank {rank} of mesh {self.mesh} has no value of {self.expression}")

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        lines = [self._caption(), *_aligned([(_set(ranks), text) for ranks, text in self._lines()])]
        if self._has_table:
            lines += ["", self._heading()]
            rows = [_cells(each, self.expression) for each in self.differences[:MOST_SHOWN]]
            lines += _table(rows)
            lines += self._left_out()
        return "\n".join([*lines, *self.notes])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def _has_table(self) -> bool:
        """Whether a table says more than the list of values does: not of single numbers and texts."""
        return any(each.path or each.has_elements for each in self.differences)

    def _caption(self) -> str:
        count = len(self.groups)
        asked = len(self.asked) - len(self.running)
        if self.same:
            said = f"the same on all {asked} ranks" if asked > 1 else "on one rank"
        elif not count:
            said = "no rank has a value"
        else:
            said = f"{count} distinct value{'s' * (count != 1)} on {sum(len(each.ranks) for each in self.groups)} ranks"
        where = f", {self.where}" if self.where else ""
        return f"{short(self.expression, 80)}: {said} of mesh {self.mesh}{where} ({self.seconds:.2f} s)"

    def _lines(self) -> list[tuple[tuple[int, ...], str]]:
        """Ranks and what there is to say about them; as many as are shown."""
        shown = self.groups if len(self.groups) <= MOST_SHOWN else (*self.groups[: MOST_SHOWN - 1], self.groups[-1])
        tell_apart = len({each.reading.text for each in shown}) < len(shown)
        lines: list[tuple[tuple[int, ...], str]] = []
        for each in shown:
            text = short(each.reading.text, 180)
            lines.append((each.ranks, f"{text}  #{each.reading.digest.hex()[:6]}" if tell_apart else text))
        if len(shown) < len(self.groups):
            left = self.groups[MOST_SHOWN - 1 : -1]
            ranks = tuple(sorted(rank for each in left for rank in each.ranks))
            lines.insert(-1, (ranks, f"… {len(left)} more distinct values{_range(left)}"))
        for failed in self.failed:
            said = {"error": "cannot evaluate it: ", "dead": "dead: ", "late": ""}[failed.kind]
            lines.append((failed.ranks, short(f"{said}{failed.why}", 300)))
        if self.running:
            lines.append((self.running, "not stopped, left out"))
        return lines

    def _heading(self) -> str:
        """What is compared with what."""
        count = len({each.path for each in self.differences})
        arrays = all(each.ours is not None and each.ours.is_array for each in self.differences)
        parts = max(each.reading.arrays if arrays else each.reading.leaves for each in self.groups)
        against = {each.against for each in self.differences}
        what = f"{count:,} of {parts:,} {'arrays' if arrays else 'parts'} differ{'s' * (count == 1)}"
        what = what if parts > 1 else "where they differ"
        return f"{what}, compared with {_set(next(iter(against)))}" if len(against) == 1 else f"{what}"

    def _left_out(self) -> list[str]:
        left = len(self.differences) - MOST_SHOWN
        return [f"… {left} more differ; they are in .differences"] if left > 0 else []

    # -- HTML ------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        rows: list[str] = []
        bad = {failed.ranks for failed in self.failed}
        for ranks, text in self._lines():
            title = escape(format_points(ranks, self.extent, limit=8))
            style = _BAD if ranks in bad else ""
            rows.append(
                f'<tr><td style="text-align:left;white-space:nowrap" title="{title}"><b>{escape(_set(ranks))}</b></td>'
                f'<td style="text-align:left;{style}">{escape(text)}</td></tr>'
            )
        parts = [
            f'<div style="{_DIM}">{escape(self._caption())}</div>',
            f'<table style="margin:2px 0">{"".join(rows)}</table>',
        ]
        if self._has_table:
            parts.append(f'<div style="{_DIM}">{escape(self._heading())}</div>')
            parts.append(self._table_html(self.differences[:MOST_SHOWN]))
            if len(self.differences) > MOST_SHOWN:
                rest = self._table_html(self.differences[MOST_SHOWN:])
                parts.append(f"<details><summary>{len(self.differences) - MOST_SHOWN} more</summary>{rest}</details>")
        parts += [f'<div style="{_DIM}">{escape(note)}</div>' for note in self.notes]
        return f'<div style="{_FONT}">{"".join(parts)}</div>'

    def _table_html(self, shown: Sequence[Difference]) -> str:
        rows = [_cells(each, self.expression) for each in shown]
        kept = _kept_columns(rows)

        def line(tag: str, cells: Sequence[str]) -> str:
            return "".join(
                f'<{tag} style="text-align:{"right" if at in _RIGHT else "left"}">{escape(cells[at])}</{tag}>'
                for at in kept
            )

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        head = line("th", _HEADINGS)
        return f'<table style="margin:2px 0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    # -- data ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dictionaries and lists, as JSON can carry them."""
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
            "differences": [_as_dict(each) for each in self.differences],
            "failed": [{"kind": each.kind, "why": each.why, "ranks": list(each.ranks)} for each in self.failed],
            "running": list(self.running),
            "notes": list(self.notes),
        }


def _as_dict(row: Difference) -> dict[str, Any]:
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


def _set(ranks: Sequence[int]) -> str:
    return f"[{format_ranks(ranks, limit=6)}]"


def _range(groups: Sequence[ValueGroup]) -> str:
    numbers = [each.reading.number for each in groups]
    if any(number is None for number in numbers):
        return ""
    known = [number for number in numbers if number is not None]
    return f", from {figure(min(known))} to {figure(max(known))}"


def _cells(row: Difference, expression: str) -> list[str]:
    """A difference as a row of the table."""
    ours, theirs, found = row.ours, row.theirs, row.contrast
    name = short(row.path or expression, 60)
    ranks = _set(row.ranks)
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
    """The type of two arrays; what both need not say is left out."""
    if ours.facts == theirs.facts:
        return short(ours.facts.removesuffix(", needs grad"), 40)
    return f"{short(ours.facts, 40)}; others {short(theirs.facts, 40)}"


def _bad(ours: Leaf, theirs: Leaf) -> str:
    """How many elements are NaN and infinite, where there are any: `3 NaN (others 1)`."""
    counts = [(leaf.stats.nans, leaf.stats.infs) if leaf.stats is not None else (0, 0) for leaf in (ours, theirs)]
    said: list[str] = []
    for what, here, others in zip(("NaN", "Inf"), *counts, strict=True):
        if here or others:
            said.append(f"{here:,} {what}" + (f" (others {others:,})" if others else ""))
    return ", ".join(said)


def _kept_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns in which there is anything."""
    return [at for at in range(len(_HEADINGS)) if any(row[at] for row in rows)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    kept = _kept_columns(rows)
    widths = {at: max(len(row[at]) for row in (_HEADINGS, *rows)) for at in kept}
    return [
        "  ".join(row[at].rjust(widths[at]) if at in _RIGHT else row[at].ljust(widths[at]) for at in kept).rstrip()
        for row in (_HEADINGS, *rows)
    ]


def _aligned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(label) for label, _ in pairs), default=0)
    return [f"{label.ljust(width)}  {text}".rstrip() for label, text in pairs]
