"""Lays out a comparison, for every renderer: a caption, a line for each value, a table of differences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.values.compare import Difference, ValueGroup
from monarch_kernel.debugger.controller.values.report import Diff
from monarch_kernel.debugger.model.readings import Leaf, figure, short, shown_pair
from monarch_kernel.display.tables import TableView

#: How many distinct values, and differing parts, are shown; the object has all of them.
MOST_SHOWN = 20
# The columns of the table, and which of them are aligned to the right.
_HEADINGS = ("differs", "type", "ranks", "first at", "there", "others", "elements", "max |Δ|", "relative", "not finite")
_RIGHT = frozenset((4, 5, 6, 7, 8))


def table_of(diff: Diff, shown: Sequence[Difference]) -> TableView | None:
    """Some of the differences as a table; None if it would only repeat the list of values."""
    if not any(each.path or each.has_elements for each in diff.differences):
        return None
    rows = [_cells_of(each, diff.expression) for each in shown]
    return TableView(_HEADINGS, rows, right=_RIGHT).without_empty_columns()


def caption(diff: Diff) -> str:
    """The expression, the number of distinct values, and where they are."""
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


def lines_of(diff: Diff) -> list[tuple[tuple[int, ...], str]]:
    """The values that are shown, each with its ranks; then the ranks without a value."""
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


def heading(diff: Diff) -> str:
    """What is compared with what."""
    count = len({each.path for each in diff.differences})
    arrays = all(each.ours is not None and each.ours.is_array for each in diff.differences)
    parts = max(each.reading.arrays if arrays else each.reading.leaves for each in diff.groups)
    against = {each.against for each in diff.differences}
    what = f"{count:,} of {parts:,} {'arrays' if arrays else 'parts'} differ{'s' * (count == 1)}"
    what = what if parts > 1 else "where they differ"
    return f"{what}, compared with {rank_label(next(iter(against)))}" if len(against) == 1 else what


def left_out(diff: Diff) -> list[str]:
    """A line about the differences that are not shown, if there are any."""
    left = len(diff.differences) - MOST_SHOWN
    return [f"… {left} more differ; they are in .differences"] if left > 0 else []


def _range(groups: Sequence[ValueGroup]) -> str:
    numbers = [each.reading.number for each in groups]
    if any(number is None for number in numbers):
        return ""
    known = [number for number in numbers if number is not None]
    return f", from {figure(min(known))} to {figure(max(known))}"


def _cells_of(row: Difference, expression: str) -> list[str]:
    """A difference as a row of the table."""
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
    """The type of two arrays, without redundant details."""
    if ours.facts == theirs.facts:
        return short(ours.facts.removesuffix(", needs grad"), 40)
    return f"{short(ours.facts, 40)}; others {short(theirs.facts, 40)}"


def _bad(ours: Leaf, theirs: Leaf) -> str:
    """How many elements are NaN and infinite, if any: `3 NaN (others 1)`."""
    counts = [(leaf.stats.nans, leaf.stats.infs) if leaf.stats is not None else (0, 0) for leaf in (ours, theirs)]
    said: list[str] = []
    for what, here, others in zip(("NaN", "Inf"), *counts, strict=True):
        if here or others:
            said.append(f"{here:,} {what}" + (f" (others {others:,})" if others else ""))
    return ", ".join(said)
