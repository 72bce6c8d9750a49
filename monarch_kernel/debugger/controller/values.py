"""Compare values across ranks. `diff` reports which ranks have which value and where they differ; `pull` fetches one.

Ranks reduce a value to digests and figures (`debugger.rank.values`). A `Diff` is the comparison of these, and displays
itself.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, TypeVar

from monarch_kernel.actor import ActorMesh, Extent, ProcMesh
from monarch_kernel.debugger import existing_debugger
from monarch_kernel.debugger.controller.query import Answers, ask, chosen_ranks
from monarch_kernel.debugger.controller.stacks.merge import rank_label
from monarch_kernel.debugger.events import RankStop, user_frames
from monarch_kernel.debugger.model.readings import Contrast, Leaf, Reading, figure, short, shown_pair
from monarch_kernel.debugger.rank.values import probe
from monarch_kernel.debugger.rank.values.blocks import BLOCK_BYTES, blocks_of
from monarch_kernel.debugger.rank.values.probe import FILE, Question
from monarch_kernel.display import tables
from monarch_kernel.display.tables import AsReport, TableView, table_text
from monarch_kernel.introspection import Whole, whole_of
from monarch_kernel.meshes import format_points, format_ranks
from monarch_kernel.protocol.faults import Fault

# Compare the readings of many ranks: the distinct values, the ranks that have them, and where they differ. Pure.

#: How many groups of ranks are compared part by part. If there are more, the smallest ones are compared.
MOST_COMPARED = 8
#: A number is suspicious if its distance from the median is this many times the median distance.
OUTLIER = 6.0
#: How many bytes of arrays may be transferred to compare elements.
BUDGET = 8 << 20


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The ranks that have one value.

    Attributes:
        ranks: the ranks, sorted.
        reading: the reading of the first of them.
    """

    ranks: tuple[int, ...]
    reading: Reading


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a value that differs between ranks.

    Attributes:
        path: the part.
        ranks: the ranks that differ.
        against: the ranks that they differ from: the largest group.
        ours: the part on `ranks`; None if these ranks have no such part.
        theirs: the part on `against`; None likewise.
        contrast: how their elements differ; None if they have none, have different types, or exceed the budget.
        blocks: how many blocks of elements differ.
        compared: how many of these were compared; if not all, the figures of `contrast` are lower bounds.
    """

    path: str
    ranks: tuple[int, ...]
    against: tuple[int, ...]
    ours: Leaf | None
    theirs: Leaf | None
    contrast: Contrast | None = None
    blocks: int = 0
    compared: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether all differing elements were compared."""
        return self.compared == self.blocks

    @property
    def has_elements(self) -> bool:
        """Whether both sides have arrays of the same type and shape."""
        ours, theirs = self.ours, self.theirs
        if ours is None or theirs is None or not ours.is_array or ours.content == theirs.content:
            return False
        return (ours.kind, ours.shape, _element(ours), ours.part) == (
            theirs.kind,
            theirs.shape,
            _element(theirs),
            theirs.part,
        )


def group(readings: Mapping[int, Reading]) -> list[ValueGroup]:
    """Group ranks by their values, the smallest group first; among groups of equal size, the most suspicious first.

    NaN and infinite elements are the most suspicious, then values far from the median.
    """
    ranks: dict[tuple[str, bytes], list[int]] = {}
    for rank in sorted(readings):
        ranks.setdefault((readings[rank].part, readings[rank].digest), []).append(rank)
    groups = [ValueGroup(tuple(each), readings[each[0]]) for each in ranks.values()]
    middle, spread = _middle([_size_of(readings[rank]) for rank in sorted(readings)])

    def order(each: ValueGroup) -> tuple[int, bool, float, int]:
        good = not _bad_elements(each.reading)
        size = _size_of(each.reading)
        away = abs(size - middle) / spread if size is not None and middle is not None else 0.0
        return len(each.ranks), good, -away if away > OUTLIER else 0.0, each.ranks[0]

    return sorted(groups, key=order)


def _bad_elements(reading: Reading) -> bool:
    stats = reading.stats
    number = reading.number
    return (stats is not None and bool(stats.nans or stats.infs)) or (number is not None and not math.isfinite(number))


def _size_of(reading: Reading) -> float | None:
    """Return the number that best distinguishes values of the same kind at a glance."""
    if reading.number is not None:
        return reading.number if math.isfinite(reading.number) else None
    stats = reading.stats
    norm = stats.norm if stats is not None else None
    return norm if norm is not None and math.isfinite(norm) else None


def _middle(numbers: Sequence[float | None]) -> tuple[float | None, float]:
    known = [number for number in numbers if number is not None]
    if not known:
        return None, 1.0
    middle = statistics.median(known)
    return middle, statistics.median(abs(number - middle) for number in known) or 1.0


def families(groups: Sequence[ValueGroup]) -> list[list[ValueGroup]]:
    """Return the groups that can be compared with each other: those that hold the same part of a sharded value.

    The other groups of a family are compared with its last one. This is the largest group; if there are several, a
    group without NaN and infinite elements and with the lowest rank. Families of one group are left out.
    """
    found: dict[str, list[ValueGroup]] = {}
    for each in groups:
        found.setdefault(each.reading.part, []).append(each)
    return [_with_reference(family) for family in found.values() if len(family) > 1]


def _with_reference(family: list[ValueGroup]) -> list[ValueGroup]:
    reference = max(family, key=lambda each: (len(each.ranks), not _bad_elements(each.reading), -each.ranks[0]))
    others = [each for each in family if each is not reference]
    return [*others[: MOST_COMPARED - 1], reference]


def differences(family: Sequence[ValueGroup], leaves: Mapping[int, Sequence[Leaf]]) -> list[Difference]:
    """Return the parts in which a family's groups differ from its last one.

    Args:
        leaves: the parts on the first rank of each group; groups without an entry are not compared.
    """
    reference = family[-1]
    theirs = _by_path(leaves.get(reference.ranks[0], ()))
    others = [(each, _by_path(leaves[each.ranks[0]])) for each in family[:-1] if each.ranks[0] in leaves]
    if not theirs or not others:
        return []
    paths = dict.fromkeys(theirs)
    for _, ours in others:
        paths.update(dict.fromkeys(ours))
    found: list[Difference] = []
    for path in paths:
        expected = theirs.get(path)
        alike: dict[bytes | None, tuple[list[int], Leaf | None]] = {}
        agree = list(reference.ranks)
        for each, ours in others:
            leaf = ours.get(path)
            digest = leaf.digest if leaf is not None else None
            if digest == (expected.digest if expected is not None else None):
                agree += each.ranks
            else:
                # The first group comes first, because the elements are requested from its first rank.
                alike.setdefault(digest, ([], leaf))[0].extend(each.ranks)
        found += [
            Difference(path, tuple(ranks), tuple(sorted(agree)), leaf, expected) for ranks, leaf in alike.values()
        ]
    return found


def _by_path(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in leaves}


def _element(leaf: Leaf) -> str:
    """Return the element type in an array's facts."""
    return leaf.facts.split(" [", 1)[0] if " [" in leaf.facts else leaf.facts


def differing_blocks(ours: bytes, theirs: bytes) -> list[int]:
    """Return the numbers of the blocks whose digests differ, for two arrays of the same shape."""
    pairs = zip(blocks_of(ours), blocks_of(theirs), strict=True)
    return [at for at, (one, other) in enumerate(pairs) if one != other]


def chosen_blocks(differing: Sequence[Sequence[int]], sizes: Sequence[int], budget: int = BUDGET) -> list[list[int]]:
    """Choose the blocks to compare within a budget: the first that differs of every array, then others, evenly spread.

    Args:
        differing: the differing blocks of each array, in order.
        sizes: the bytes of a block of each array.
        budget: the total number of bytes.
    """
    counts = [0] * len(differing)
    left = budget
    while True:
        # Add one to each array in turn, so that no array takes another's share.
        more = [at for at, blocks in enumerate(differing) if counts[at] < len(blocks)]
        given = 0
        for at in more:
            if sizes[at] <= left:
                counts[at] += 1
                left -= sizes[at]
                given += 1
        if not given:
            break
    return [_spread(blocks, count) for blocks, count in zip(differing, counts, strict=True)]


def _spread(blocks: Sequence[int], count: int) -> list[int]:
    if count <= 1 or count >= len(blocks):
        return list(blocks[:count])
    step = (len(blocks) - 1) / (count - 1)
    return [blocks[round(at * step)] for at in range(count)]


def block_bytes(leaf: Leaf) -> int:
    """Return the maximum number of bytes in a block of an array."""
    return min(BLOCK_BYTES, max(1, leaf.size) * 16)


# The result of `diff`: the distinct values of an expression, as data, text and HTML. Pure.

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
            style = f"{tables.LEFT};{tables.BAD}" if ranks in bad else tables.LEFT
            name = escape(rank_label(ranks))
            rows.append(
                f'<tr><td style="{tables.NAME}" title="{title}"><b>{name}</b></td>'
                f'<td style="{style}">{escape(text)}</td></tr>'
            )
        parts = [f'<div style="{tables.DIM}">{escape(_caption(self))}</div>', f"<table>{''.join(rows)}</table>"]
        shown, rest = self.differences[:MOST_SHOWN], self.differences[MOST_SHOWN:]
        table = _table_of(self, self.differences)
        if table is not None:
            parts.append(f'<div style="{tables.DIM}">{escape(_heading(self))}</div>')
            parts.append(_rows(self, table, 0, shown))
            if rest:
                parts.append(
                    f'<details><summary style="{tables.OPENS}">{len(rest)} more</summary>'
                    f"{_rows(self, table, len(shown), rest)}</details>"
                )
        parts += [f'<div style="{tables.DIM}">{escape(note)}</div>' for note in self.notes]
        return f'<div style="{tables.BOX}">{"".join(parts)}</div>'


def _difference(row: Difference) -> dict[str, object]:
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
            f'<div style="{tables.TREE_INSIDE};white-space:pre-wrap">{opened}</div></details>'
        )
        texts = [name, *map(escape, cells[1:])]
        body.append(f"<tr>{''.join(_cell('td', at, text, table) for at, text in enumerate(texts))}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(tag: str, at: int, inner: str, table: TableView) -> str:
    return f'<{tag} style="{tables.RIGHT if at in table.right else tables.LEFT}">{inner}</{tag}>'


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


# Run `diff` and `pull`: the sequence of queries to the ranks, and their result.

#: How long ranks may take to evaluate the expression and to read its value, by default (seconds).
TIMEOUT = 30.0
#: How long they may take for each further query (seconds).
QUICK = 5.0
#: How long a rank may take to answer at all (seconds); the first time, it has to load the code for the query.
PING = 3.0
#: The reason of a stop that holds the frames of an exception.
POST_MORTEM = "post mortem"
#: The maximum number of differing arrays whose elements are compared.
MOST_ARRAYS = 50

_T = TypeVar("_T")


def diff(
    mesh: ProcMesh | ActorMesh[object] | object,
    expression: str = "tensor",
    *,
    ranks: Iterable[int] | None = None,
    timeout: float = TIMEOUT,
    in_frame: bool | None = None,
    up: int = 0,
    grads: bool = False,
) -> Diff:
    """Evaluate an expression on every rank, and report which ranks have which value and where values differ.

    The value stays on the rank: ranks reduce it to figures and digests, and exchange only the differing blocks of
    arrays, up to a few megabytes. It is evaluated once, on a separate thread (or, in a stopped frame, on the stopped
    thread). Its side effects on the rank are the caller's responsibility.

    Args:
        mesh: on a proc mesh, the expression sees the names of `%%mesh` cells, or of the stopped frame; on an actor
            mesh, those of the actors' methods, including `self`. For a handle of a tensor on a mesh, the tensors that
            the ranks hold are compared (of a sharded tensor, equal parts), and `expression` is their name in the
            result.
        expression: a Python expression. On a proc mesh, `self` is the actor of the rank if there is only one.
        ranks: the ranks of ``mesh``; all by default.
        timeout: the time for evaluating and reading the value (seconds).
        in_frame: whether to evaluate in stopped frames; None: if ranks of a proc mesh are stopped.
        up: the frame of user code to evaluate in, counted outwards from the innermost one.
        grads: compare the gradients of a module's parameters instead of the parameters.

    Raises:
        ValueError: it is not an expression, there is no such rank, or no rank is stopped.
        TypeError: ``mesh`` is not a mesh.
        DeviceMeshError: a rank of the tensor's mesh has died.
    """
    started = time.perf_counter()
    remote = RemoteExpression(mesh, expression, ranks, timeout, grads, in_frame, up)
    try:
        readings = remote.read()
        groups = group(readings)
        rows, steady = remote.compare(groups)
    finally:
        remote.release()
    return Diff(
        expression=remote.expression,
        mesh=remote.whole.procs.name,
        extent=remote.whole.procs.extent,
        asked=tuple(remote.ranks),
        where=remote.where(readings),
        groups=tuple(groups),
        differences=tuple(rows),
        failed=remote.failed(),
        running=remote.running,
        notes=_notes(groups, rows, steady),
        seconds=time.perf_counter() - started,
    )


def pull(
    mesh: ProcMesh | ActorMesh[object],
    expression: str,
    *,
    rank: int = 0,
    timeout: float = TIMEOUT,
    in_frame: bool | None = None,
    up: int = 0,
) -> Any:
    """Fetch the value of an expression on one rank. Tensors arrive on the CPU, without their graph.

    Args:
        mesh: as for `diff`.
        expression: a Python expression.
        rank: the rank of ``mesh``.
        timeout: the time for evaluating and transferring the value (seconds).
        in_frame: whether to evaluate in the stopped frame; None: if that rank of a proc mesh is stopped.
        up: the frame of user code to evaluate in, counted outwards from the innermost one.

    Raises:
        ValueError: it is not an expression, there is no such rank, or it is not stopped.
        RuntimeError: the rank could not evaluate or send it; the message says why.
    """
    remote = RemoteExpression(mesh, expression, (rank,), timeout, False, in_frame, up)
    try:
        return remote.fetch()
    finally:
        remote.release()


@dataclass(frozen=True, slots=True)
class _StoppedFrame:
    """A frame of a stop, by its index."""

    stop: RankStop
    frame: int


class RemoteExpression:
    """One expression, evaluated on ranks of a mesh; records which of them could not answer, and why."""

    def __init__(
        self,
        mesh: ProcMesh | ActorMesh[Any] | Any,
        expression: str,
        ranks: Iterable[int] | None,
        timeout: float,
        grads: bool,
        in_frame: bool | None,
        up: int,
    ) -> None:
        self.expression = checked(expression)
        address: tuple[str, int] | None = None
        if hasattr(type(mesh), "_short_form_"):  # a handle of a tensor, so torch is loaded
            from monarch_kernel.tensor import address_of

            handle: Any = mesh
            address, mesh = address_of(handle, timeout), handle.mesh
        self.whole: Whole = whole_of(mesh)
        self.ranks = sorted(self.whole.ranks[rank] for rank in chosen_ranks(ranks, len(self.whole.ranks)))
        self.running: tuple[int, ...] = ()
        self._timeout = timeout
        self._why: dict[int, tuple[FailureKind, str]] = {}  # by rank without an answer: the kind, and a sentence
        self._actor = mesh._name if isinstance(mesh, ActorMesh) else ""
        uid = mesh._actor if isinstance(mesh, ActorMesh) else ""
        self._question = Question(self.expression, f"diff-{os.urandom(8).hex()}", uid, grads, timeout, address)
        self._stopped = {} if address is not None else self._stops(in_frame, bool(uid), up)
        self._evaluated = False

    def _stops(self, in_frame: bool | None, on_actors: bool, up: int) -> dict[int, _StoppedFrame]:
        """Return the frames to evaluate in, by rank; none if namespaces are used."""
        if in_frame is False or (in_frame is None and on_actors):
            return {}
        debugger = existing_debugger()
        stops = debugger.stops(self.whole.procs) if debugger is not None else []
        stops = [at for at in stops if at.rank in self.ranks]
        # Frames of an exception count only if nothing else is stopped and frames are requested.
        stops = [at for at in stops if at.stop.reason != POST_MORTEM] or (stops if in_frame else [])
        found: dict[int, _StoppedFrame] = {}
        for at in stops:  # ids grow, so the newest stop of a rank is used
            frames = user_frames(at.stop.frames)
            if not 0 <= up < len(frames):
                raise ValueError(f"rank {at.rank} has {len(frames)} frames of user code, so none that is {up} up")
            found[at.rank] = _StoppedFrame(at, frames[up].index)
        if in_frame and not found:
            raise ValueError(
                f"there is no stopped frame to evaluate in: of mesh {self.whole.procs.name}, rank "
                f"{format_ranks(self.ranks, limit=6)} is not stopped"
            )
        if found:
            self.running = tuple(rank for rank in self.ranks if rank not in found)
        return found

    # -- evaluating ------------------------------------------------------------------------------

    def read(self) -> dict[int, Reading]:
        """Read the value on each rank that has one."""
        there = self._there()
        self._evaluated = True
        if not self._stopped:
            return self._ask(probe.read, self._question, ranks=there, timeout=self._timeout)
        reached = self._in_frames(there)
        return self._ask(probe.read_kept, self._question, ranks=reached, timeout=self._timeout)

    def fetch(self) -> object:
        """Fetch the value on the only queried rank; see `pull`."""
        (rank,) = self.ranks
        there = self._there()
        self._evaluated = bool(self._stopped)
        if self._stopped:
            found = self._ask(
                probe.fetch_kept, self._question.token, ranks=self._in_frames(there), timeout=self._timeout
            )
        else:
            found = self._ask(probe.fetch, self._question, ranks=there, timeout=self._timeout)
        if rank in found:
            return found[rank]
        _kind, why = self._why[rank]
        raise RuntimeError(f"rank {rank} of mesh {self.whole.procs.name} cannot send {self.expression}: {why}")

    def _there(self) -> list[int]:
        """Return the ranks that answer at all: faster than waiting for the others to evaluate the value."""
        wanted = self._stopped or self.ranks
        there = sorted(self._ask(probe.ping, ranks=wanted, timeout=min(PING, self._timeout)))
        for rank, (kind, why) in self._why.items():
            if kind == "late":
                hint = "it is suspended, or native code holds its interpreter lock; the mesh's stacks() shows which"
                self._why[rank] = (kind, f"{why}: {hint}")
        return there

    def _in_frames(self, there: Sequence[int]) -> list[int]:
        """Evaluate in the stopped frames of these ranks. Return the ranks where that succeeded."""
        debugger = existing_debugger()
        assert debugger is not None
        by_frame: dict[int, list[RankStop]] = {}
        for place in (self._stopped[rank] for rank in there):
            by_frame.setdefault(place.frame, []).append(place.stop)
        reached: list[int] = []
        for frame, stops in by_frame.items():
            answers = debugger.call(stops, probe.InFrame(self._question), frame=frame, timeout=self._timeout)
            for (_mesh, rank, _stop), answer in answers.items():
                if isinstance(answer, Exception):
                    self._why[rank] = ("error", str(answer))
                else:
                    reached.append(rank)
        return sorted(reached)

    def release(self) -> None:
        """Make the ranks release the value."""
        reached = [rank for rank in self.ranks if rank not in self._why]
        if self._evaluated and reached:
            ask(self.whole.procs, probe.release, self._question.token, ranks=reached, timeout=QUICK)

    # -- comparing -------------------------------------------------------------------------------

    def compare(self, groups: Sequence[ValueGroup]) -> tuple[list[Difference], bool]:
        """Return the parts that differ, and whether the values stayed the same during the comparison."""
        rows: list[Difference] = []
        steady = True
        for family in families(groups):
            found, stayed = self._compare(family)
            rows += found
            steady = steady and stayed
        return rows, steady

    def _compare(self, family: Sequence[ValueGroup]) -> tuple[list[Difference], bool]:
        token = self._question.token
        first = [each.ranks[0] for each in family]
        leaves = self._ask(probe.leaves, token, ranks=first, timeout=QUICK, quietly=True)
        rows = differences(family, leaves)
        arrays = [at for at, row in enumerate(rows) if row.has_elements][:MOST_ARRAYS]
        if not arrays:
            return rows, True
        reference = first[-1]
        wanted: dict[int, list[str]] = {rank: [] for rank in first}
        for at in arrays:
            wanted[rows[at].ranks[0]].append(rows[at].path)
        wanted[reference] = list(dict.fromkeys(rows[at].path for at in arrays))
        known = self._ask(probe.digests, token, wanted, ranks=first, timeout=QUICK, quietly=True)
        arrays = [at for at in arrays if rows[at].ranks[0] in known and reference in known]
        paths = [(rows[at].ranks[0], rows[at].path) for at in arrays]
        differing = [differing_blocks(known[rank][path], known[reference][path]) for rank, path in paths]
        chosen = chosen_blocks(differing, [_bytes_of(rows[at]) for at in arrays])
        return self._contrast(rows, arrays, differing, chosen, reference)

    def _contrast(
        self,
        rows: list[Difference],
        arrays: Sequence[int],
        differing: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        reference: int,
    ) -> tuple[list[Difference], bool]:
        """Fetch the chosen blocks from the reference, and let the other ranks compare them with their own."""
        token = self._question.token
        blocks: dict[str, list[int]] = {}
        spans: dict[int, dict[str, Sequence[int]]] = {}
        for at, numbers in zip(arrays, chosen, strict=True):
            row = rows[at]
            blocks[row.path] = sorted({*blocks.get(row.path, ()), *numbers})
            spans.setdefault(row.ranks[0], {})[row.path] = numbers
        sent = self._ask(probe.pieces, token, blocks, ranks=[reference], timeout=QUICK, quietly=True)
        if reference not in sent or not spans:
            return rows, True
        contents, steady = sent[reference]
        found = self._ask(probe.contrasts, token, spans, contents, ranks=sorted(spans), timeout=QUICK, quietly=True)
        for at, all_blocks, numbers in zip(arrays, differing, chosen, strict=True):
            row = rows[at]
            contrast = found[row.ranks[0]][0].get(row.path) if row.ranks[0] in found else None
            compared = len(numbers) if contrast is not None else 0
            rows[at] = replace(row, contrast=contrast, blocks=len(all_blocks), compared=compared)
        return rows, steady and all(stayed for _, stayed in found.values())

    # -- queries ---------------------------------------------------------------------------------

    def _ask(
        self, function: Callable[..., _T], *args: object, ranks: Iterable[int], timeout: float, quietly: bool = False
    ) -> dict[int, _T]:
        """Return the answers of the ranks. Record why others have not answered, unless `quietly`."""
        # The rank itself stops when the timeout expires, and gets a moment longer to report that.
        asked = list(ranks)
        answers = ask(self.whole.procs, function, *args, ranks=asked, timeout=timeout + 0.5) if asked else Answers()
        if not quietly:
            for rank, fault in answers.errors.items():
                self._why[rank] = ("error", _sentence(fault))
            for rank, why in answers.dead.items():
                self._why[rank] = ("dead", why)
            for rank in answers.late:
                self._why[rank] = ("late", f"no answer within {timeout:g} s")
        return answers.values

    # -- results ---------------------------------------------------------------------------------

    def failed(self) -> tuple[ValueFailure, ...]:
        """Return the ranks without a value, by reason."""
        reasons: dict[tuple[FailureKind, str], list[int]] = {}
        for rank in sorted(self._why):
            reasons.setdefault(self._why[rank], []).append(rank)
        return tuple(ValueFailure(kind, why, tuple(ranks)) for (kind, why), ranks in reasons.items())

    def where(self, readings: dict[int, Reading]) -> str:
        """Describe where the expression was evaluated."""
        if self._question.tensor is not None:
            return "as the ranks hold it"
        if self._actor:
            return f"on the actors {self._actor}"
        if not self._stopped:
            actors = sorted({reading.where for reading in readings.values() if reading.where})
            namespaces = "in the ranks' namespaces" if readings else ""
            return f"on {', '.join(actors)}" if actors else namespaces
        places: dict[str, list[int]] = {}
        for rank, reading in sorted(readings.items()):
            places.setdefault(reading.where, []).append(rank)
        if len(places) == 1:
            return f"in the stopped frame {next(iter(places))}"
        said = "; ".join(f"[{format_ranks(ranks, limit=4)}] {place}" for place, ranks in list(places.items())[:4])
        return f"in the stopped frames {said}" if said else "in the stopped frames"


def checked(expression: str) -> str:
    """Return `expression` without surrounding space. Raises ValueError if it is not an expression."""
    source = expression.strip()
    try:
        compile(source, FILE, "eval")
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{source!r} is no expression ({why}); give one that can be evaluated on each rank") from None
    return source


def _bytes_of(row: Difference) -> int:
    assert row.ours is not None
    return block_bytes(row.ours)


def _sentence(fault: Fault | str) -> str:
    return fault if isinstance(fault, str) else fault.summary.split("\n", 1)[0]


def _notes(groups: Sequence[ValueGroup], rows: Sequence[Difference], steady: bool) -> tuple[str, ...]:
    notes: dict[str, list[int]] = {}
    for each in groups:
        if each.reading.sampled:
            notes.setdefault(each.reading.sampled, []).extend(each.ranks)
        for unread in each.reading.unread[:3]:
            notes.setdefault(f"not read: {unread}", []).extend(each.ranks)
    said = [f"[{format_ranks(ranks, limit=6)}] {note}" for note, ranks in notes.items()]
    if any(not row.is_complete for row in rows if row.contrast is not None):
        said.append(f"≥: at least, as only {BUDGET >> 20} MB of elements are moved to compare them")
    if not steady:
        said.append(
            "the values changed while they were compared, as the ranks are running; stop them for exact figures"
        )
    parts = {each.reading.part for each in groups}
    if len(parts) > 1:
        said.append("ranks that hold different shards are not compared with each other")
    return tuple(said)
