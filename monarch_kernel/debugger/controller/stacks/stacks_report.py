"""The result of `stacks`: the merged stacks of all ranks, which `text` and `html` render."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.stacks.merge import (
    DisplayLine,
    FrameNode,
    StackBranch,
    StackClass,
    StackRoot,
    at_once_of,
    continuations_of,
    grouped_values,
    lines_of,
    merge,
    owner_label,
    path_from,
    rank_label,
    short_path,
    shortened,
    times_of,
    where_label,
)
from monarch_kernel.debugger.model.stops import Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.source_locations import Label, is_readable_source
from monarch_kernel.display import tables
from monarch_kernel.display.quantities import source_line
from monarch_kernel.display.tables import AsReport
from monarch_kernel.meshes import format_ranks

# Render merged stacks as HTML. Branches fold, and a line expands to the code around it, or to its library frames.
#
# The HTML needs no scripts or style sheets. It inherits its colours, so it fits light and dark pages, all front ends,
# and saved notebooks.

#: How many lines before and after the line of a frame are shown when the frame is expanded.
CONTEXT = 3
#: How many frames can be expanded. In a very large tree, the others show only their line.
_MOST_CONTEXTS = 400
#: Runs of ranks, and processes, that a tooltip lists.
_MOST_RUNS, _MOST_PROCESSES = 60, 8


def html_of(stacks: Stacks, label: Label | None = None) -> str:
    """Render the headline, the notes, and the tree. Tooltips show the processes of ranks."""
    return _Page(stacks, label or stacks.label).whole()


class _Page:
    def __init__(self, stacks: Stacks, label: Label | None) -> None:
        self._stacks = stacks
        self._label = label
        self._contexts = 0

    def whole(self) -> str:
        """Render the page."""
        stacks = self._stacks
        idle = stacks.idle
        blocks = [(len(root.ranks), self._root(root)) for root in stacks.tree]
        if idle:
            at = next((k for k, (count, _) in enumerate(blocks) if len(idle) <= count), len(blocks))
            line = f"{self._ranks(idle)} {_span(tables.DIM, escape(stacks.idle_note))}{self._where(idle)}"
            blocks.insert(at, (len(idle), _div(f"{tables.TREE_LINE};margin-top:6px", line)))
        notes = "".join(
            _div(
                tables.TREE_NOTE,
                f"{self._ranks(note.ranks)} {_span(tables.BAD, escape(note.text))}{self._where(note.ranks)}",
            )
            for note in stacks.notes
        )
        body = "".join(html for _, html in blocks)
        return _div(tables.SCROLLED, f"{_div(tables.BOLD, escape(stacks.headline))}{notes}{body}")

    def _root(self, root: StackRoot) -> str:
        head = f"{self._ranks(root.ranks)} <b>{escape(owner_label(root, self._label))}</b>{self._where(root.ranks)}"
        head += _divergence(root)
        return _details(head, self._below(root), open_=True, inside=tables.TREE_INSIDE, style="margin-top:6px")

    def _below(self, branch: StackBranch) -> str:
        found = continuations_of(branch)
        if len(found) == 1 and found[0].node is not None:
            return self._path(found[0].node)
        rows: list[str] = []
        shown, left = shortened(found)
        for each in shown:
            body = self._path(each.node) if each.node is not None else self._end(branch)
            head = f"{self._ranks(each.ranks)} {escape(each.note)}".rstrip() + self._where(each.ranks)
            inside = tables.TREE_INSIDE if each.concurrent else tables.TREE_FORK
            rows.append(_details(head, body, open_=True, inside=inside) if body else _div(tables.TREE_LINE, head))
        if left:
            rows.append(_div(f"{tables.TREE_LINE};{tables.DIM}", escape(left)))
        return "".join(rows)

    def _path(self, node: FrameNode) -> str:
        path = path_from(node)
        lines = lines_of(path, self._label)
        width = min(max((len(line.place) for line in lines if line.source), default=0), 60)
        end = path[-1]
        rows = [self._line(line, width, _divergence(end) if line is lines[-1] else "") for line in lines]
        return "".join(rows) + (self._below(end) if end.children else self._end(end))

    def _line(self, line: DisplayLine, width: int, chip: str) -> str:
        if not line.user:
            head = f"{_span(tables.DIM, escape(line.place))}{chip}"
            inside = "\n".join(
                f"{node.frame.place.name} {times_of(node)}".rstrip().ljust(32) + f"  {short_path(node.frame)}"
                for node in line.nodes
            )
            frames = f'<pre style="{tables.UNWRAPPED};{tables.DIM}">{escape(inside)}</pre>'
            return _details(head, frames, inside=tables.TREE_INSIDE)
        frame = line.nodes[0].frame
        title = escape(f"{frame.place.file}:{frame.place.line}", quote=True)
        place = escape(line.place.ljust(width))
        head = f'<span title="{title}">{place}</span>  {_marked(line.source, line.span)}{chip}'
        context = self._context(line)
        if not context:
            return _div(tables.TREE_LINE, head)
        return _details(head, context, inside=tables.TREE_INSIDE)

    def _context(self, shown: DisplayLine) -> str:
        frame = shown.nodes[0].frame
        file, line = frame.place.file, frame.place.line
        if not frame.source or self._contexts >= _MOST_CONTEXTS:
            return ""
        if not is_readable_source(file) or source_line(file, line) != frame.source:
            return ""  # the file is from another user's report, or the ranks have another version of it
        self._contexts += 1
        rows: list[str] = []
        for at in range(max(1, line - CONTEXT), line + CONTEXT + 1):
            text = linecache.getline(file, at).rstrip("\n")
            if text or at <= line:
                row = escape(f"{'→' if at == line else ' '} {at:>4}  {text}")
                rows.append(_span(tables.RUNS_NOW, row) if at == line else row)
        path = _div(tables.DIM, escape(file)) if not (self._label and self._label(file)) else ""
        return f'{path}<pre style="{tables.UNWRAPPED}">{chr(10).join(rows)}</pre>'

    def _end(self, branch: StackBranch) -> str:
        if not isinstance(branch, FrameNode):
            return ""
        at_once = at_once_of(branch)
        rows = [_div(f"{tables.TREE_LINE};{tables.DIM}", at_once)] if at_once else []
        rows += [
            _div(tables.BAD, f"■ {'' if ranks == branch.here else rank_label(ranks) + ' '}{escape(state)}")
            for state, ranks in sorted(branch.states.items())
        ]
        for name, groups in grouped_values(branch):
            texts = [
                escape(text)
                + ("" if len(groups) == 1 else f" {_span(tables.RANKS, f'[{format_ranks(ranks, limit=6)}]')}")
                for text, ranks in groups[:20]
            ]
            rows.append(_div(tables.TREE_LINE, f"{_span(tables.DIM, f'{escape(name)} =')} {' · '.join(texts)}"))
        return "".join(rows)

    def _ranks(self, ranks: Sequence[int]) -> str:
        lines = [f"{len(ranks)} ranks: {format_ranks(ranks, limit=_MOST_RUNS)}"] if len(ranks) > 1 else []
        if len(ranks) <= _MOST_PROCESSES:
            processes = {rank: self._stacks.process_of(rank) for rank in ranks}
            lines += [f"{rank}: {process}" for rank, process in processes.items() if process]
        title = escape("\n".join(lines), quote=True)
        return f'<span style="{tables.RANKS}" title="{title}">{escape(rank_label(ranks))}</span>'

    def _where(self, ranks: Sequence[int]) -> str:
        where = where_label(ranks, self._stacks.extent)
        return f"  {_span(tables.DIM, escape(where))}" if where else ""


def _divergence(branch: StackBranch) -> str:
    """Mark a point where ranks diverge."""
    ways = sum(not each.concurrent for each in continuations_of(branch))
    return f" {_span(tables.FORK_CHIP, f'ranks diverge here: {ways} ways')}" if ways > 1 else ""


def _details(head: str, body: str, *, open_: bool = False, inside: str = "", style: str = "") -> str:
    return (
        f'<details style="{style}"{" open" if open_ else ""}><summary style="{tables.TREE_OPENS}">{head}</summary>'
        f"{_div(inside, body)}</details>"
    )


def _div(style: str, inner: str) -> str:
    return f'<div style="{style}">{inner}</div>'


def _span(style: str, inner: str) -> str:
    return f'<span style="{style}">{inner}</span>'


def _marked(source: str, span: tuple[int, int]) -> str:
    start, end = span
    if end <= start or start >= len(source):
        return escape(source)
    return f"{escape(source[:start])}{_span(tables.RUNS_NOW, escape(source[start:end]))}{escape(source[end:])}"


# Render merged stacks as text: one line per frame, branches where ranks diverge, the fewest ranks first. Pure.
#
# The length depends on the number of different stacks, not on the number of ranks.

#: Lines are cut at about this width.
WIDTH = 118
#: The last column at which the source begins.
_SOURCE_AT = 52
_MOST_VALUES = 4

_BOLD, _DIM, _CYAN, _YELLOW, _RED, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def text_of(stacks: Stacks, label: Label | None = None, *, colours: bool = False) -> str:
    """Render the headline, the notes, and the tree."""
    writer = _Writer(stacks.extent, label or stacks.label, colours, stacks.idle_note)
    writer.line("", stacks.headline, _BOLD)
    for note in stacks.notes:
        writer.ranks("", note.ranks, note.text, _RED)
    idle = stacks.idle
    written = not idle
    for root in stacks.tree:
        if not written and len(idle) <= len(root.ranks):
            writer.idle(idle)
            written = True
        writer.root(root)
    if not written:
        writer.idle(idle)
    return "\n".join(writer.lines)


class _Writer:
    def __init__(self, extent: Extent, label: Label | None, colours: bool, idle_note: str) -> None:
        self._extent = extent
        self._idle_note = idle_note
        self._label = label
        self._colours = colours
        self.lines: list[str] = []

    def line(self, indent: str, text: str, colour: str = "") -> None:
        """Write one line."""
        text = _cut(text, WIDTH - len(indent))
        if colour and self._colours:
            text = f"{colour}{text}{_OFF}"
        self.lines.append(f"{indent}{text}".rstrip())

    def ranks(self, indent: str, ranks: Sequence[int], text: str, colour: str) -> None:
        """Write a line about some ranks: their numbers, what they do, and their coordinates in the mesh."""
        where = where_label(ranks, self._extent)
        subject = f"{rank_label(ranks)} {text}".rstrip()
        self.line(indent, subject + (f"  ({where})" if where else ""), colour)

    def idle(self, ranks: Sequence[int]) -> None:
        """Write the idle ranks."""
        self.lines.append("")
        self.ranks("", ranks, self._idle_note, _DIM)

    def root(self, root: StackRoot) -> None:
        """Write what one endpoint, cell, task or thread is doing."""
        self.lines.append("")
        self.ranks("", root.ranks, owner_label(root, self._label), _CYAN)
        self._below(root, "  ")

    def _below(self, branch: StackBranch, indent: str) -> None:
        # The recursion depth is bounded by the number of different stacks.
        found = continuations_of(branch)
        if len(found) == 1 and found[0].node is not None:
            self._path(found[0].node, indent)
            return
        shown, left = shortened(found)
        for at, each in enumerate(shown):
            last = at == len(shown) - 1 and not left
            below = indent + ("     " if last else "│    ")
            self.ranks(f"{indent}{'└' if last else '├'}─ ", each.ranks, each.note, _YELLOW)
            if each.node is None:
                self._end(branch, below)
            else:
                self._path(each.node, below)
        if left:
            self.line(indent, f"└─ {left}", _DIM)

    def _path(self, node: FrameNode, indent: str) -> None:
        path = path_from(node)
        lines = lines_of(path, self._label)
        places = [len(line.place) for line in lines if line.source]
        width = min(max(places, default=0), _SOURCE_AT)
        for line in lines:
            if line.source:
                self._user(line, indent, width)
            else:
                self.line(indent, line.place, "" if line.user else _DIM)
        end = path[-1]
        if not end.children:
            self._end(end, indent)
        else:
            self._below(end, indent)

    def _user(self, line: DisplayLine, indent: str, width: int) -> None:
        room = WIDTH - len(indent) - max(width, len(line.place)) - 2
        source = _cut(line.source, max(20, room))
        if self._colours:
            source = _in_bold(source, line.span)
        self.lines.append(f"{indent}{line.place.ljust(width)}  {source}")

    def _end(self, branch: StackBranch, indent: str) -> None:
        if not isinstance(branch, FrameNode):
            return
        at_once = at_once_of(branch)
        if at_once:
            self.line(indent, f"  {at_once}")
        for state, ranks in sorted(branch.states.items()):
            whose = "" if ranks == branch.here else f"{rank_label(ranks)} "
            self.line(indent, f"■ {whose}{state}", _RED)
        for name, groups in grouped_values(branch):
            texts = [
                text if len(groups) == 1 else f"{text} [{format_ranks(ranks, limit=3)}]"
                for text, ranks in groups[:_MOST_VALUES]
            ]
            left = len(groups) - _MOST_VALUES
            more = f" · {left} other values" if left > 0 else ""
            self.line(indent, f"  {name} = {' · '.join(texts)}{more}")


def _in_bold(source: str, span: tuple[int, int]) -> str:
    start, end = span
    if end <= start or start >= len(source):
        return source
    return f"{source[:start]}{_BOLD}{source[start:end]}{_OFF}{source[end:]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"


class RankNote(NamedTuple):
    """A note about some ranks, in addition to their stacks."""

    text: str
    ranks: tuple[int, ...]


class Stacks(AsReport):
    """What the ranks of a mesh are doing: one tree of all their stacks.

    Displays itself as text, and as HTML in a notebook. Ranks are numbered as in the queried mesh.

    Attributes:
        mesh: the name of the mesh.
        extent: its shape.
        ranks: the queried ranks.
        snapshots: what each rank is doing, by rank.
        tree: the merged stacks, the fewest ranks first at each branch.
        classes: sets of ranks that do the same, the smallest first.
        idle: the ranks that wait for a message.
        late: the ranks that did not answer in time, and why.
        dead: the ranks that are dead, and why they died.
        unread: the ranks whose stacks could not be read, and why.
        hosts: the host of each rank.
        label: labels files, such as `Cell In[3]`.
        seconds: how long the query took.
        noun: the kind of thing that `mesh` names; "" if the name itself includes it.
        idle_note: the note about ranks without stacks.
    """

    def __init__(
        self,
        mesh: str,
        extent: Extent,
        ranks: Sequence[int],
        snapshots: Mapping[int, StackSnapshot],
        *,
        late: Mapping[int, str] | None = None,
        dead: Mapping[int, str] | None = None,
        unread: Mapping[int, str] | None = None,
        hosts: Mapping[int, str] | None = None,
        label: Label | None = None,
        seconds: float = 0.0,
        noun: str = "mesh",
        idle_note: str = "idle: waiting for a message",
    ) -> None:
        self.mesh = mesh
        self.extent = extent
        self.ranks = tuple(ranks)
        self.snapshots = dict(snapshots)
        self.late = dict(late or {})
        self.dead = dict(dead or {})
        self.unread = dict(unread or {})
        self.hosts = dict(hosts or {})
        self.label = label
        self.seconds = seconds
        self.noun = noun
        self.idle_note = idle_note
        merged = merge(self.snapshots)
        self.tree: tuple[StackRoot, ...] = merged.roots
        self.classes: tuple[StackClass, ...] = merged.classes
        self.idle = merged.idle

    @property
    def headline(self) -> str:
        """Describe how many ranks there are, and how many different stacks."""
        asked, count = len(self.ranks), len(self.classes)
        subject = f"{asked} {'rank' if asked == 1 else 'ranks'} of {f'{self.noun} {self.mesh}'.lstrip()}"
        if asked > 1 and count == 1 and len(self.snapshots) == asked:
            return f"{subject}, all at the same place"
        counts = [f"{count} different stacks" if count != 1 else "1 stack"] if count else []
        for noun, members in (("late", self.late), ("dead", self.dead), ("unknown", self.unread)):
            if members:
                counts.append(f"{len(members)} {noun}")
        return f"{subject}: {', '.join(counts)}" if counts else subject

    @property
    def notes(self) -> tuple[RankNote, ...]:
        """Return notes about ranks in addition to their stacks, the most serious first."""
        notes: list[RankNote] = []
        for noun, members in (("dead: ", self.dead), ("unknown: ", self.unread), ("", self.late)):
            reasons: dict[str, list[int]] = {}
            for rank, why in sorted(members.items()):
                reasons.setdefault(why, []).append(rank)
            notes += [
                RankNote(f"{noun}{why}", tuple(ranks))
                for why, ranks in sorted(reasons.items(), key=lambda each: len(each[1]))
            ]
        return tuple(notes)

    def process_of(self, rank: int) -> str:
        """Return the host and the process of a rank: `node3 pid 4711`; "" if unknown."""
        snapshot = self.snapshots.get(rank)
        return f"{self.hosts.get(rank, '')} pid {snapshot.pid}".lstrip() if snapshot is not None else ""

    def text(self, *, colours: bool = False, label: Label | None = None) -> str:
        """Render the tree as text. Its length depends on the number of different stacks, not on the number of ranks."""
        return text_of(self, label, colours=colours)

    def html(self, *, label: Label | None = None) -> str:
        """Render the tree as HTML with branches that fold. It needs no scripts or style sheets."""
        return html_of(self, label)

    def asdict(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible dictionaries, lists, strings and numbers.

        `tree` has nested frames with their ranks, and `classes` the sets of ranks that do the same. Further items list
        the ranks that are in neither.
        """
        return {
            "mesh": self.mesh,
            "dimensions": dict(self.extent),
            "ranks": list(self.ranks),
            "seconds": self.seconds,
            "tree": [
                {"kind": root.kind, "name": root.name, "cells": root.cells, **_branch(root)} for root in self.tree
            ],
            "classes": [
                {"ranks": list(each.ranks), "idle": each.idle, "stacks": [_stack(stack) for stack in each.stacks]}
                for each in self.classes
            ],
            "idle": list(self.idle),
            "late": self.late,
            "dead": self.dead,
            "unread": self.unread,
            "pids": {rank: snapshot.pid for rank, snapshot in self.snapshots.items()},
        }


def _branch(branch: StackBranch) -> dict[str, object]:
    """Convert a branch and everything below it. Not recursive, as stacks may be deep."""
    whole: dict[str, object] = {}
    todo: list[tuple[StackBranch, dict[str, object]]] = [(branch, whole)]
    while todo:
        at, told = todo.pop()
        told["ranks"] = list(at.ranks)
        told["children"] = [_node(child) for child in at.children]
        todo += zip(at.children, told["children"], strict=True)
    return whole


def _node(node: FrameNode) -> dict[str, object]:
    return {
        **_frame(node.frame),
        "times": list(node.times),
        "here": list(node.here),
        "counts": dict(node.counts),
        "states": {state: list(ranks) for state, ranks in node.states.items()},
        "values": {rank: dict(values) for rank, values in node.values.items()},
    }


def _stack(stack: Stack) -> dict[str, object]:
    return {
        "kind": stack.kind,
        "name": stack.name,
        "state": stack.state,
        "values": dict(stack.values),
        "frames": [{**_frame(frame), "times": frame.times, "left_out": frame.left_out} for frame in stack.frames],
    }


def _frame(frame: StackFrame) -> dict[str, object]:
    place = frame.place
    return {
        "file": place.file,
        "line": place.line,
        "name": place.name,
        "code": place.kind,
        "source": frame.source,
        "span": list(frame.span),
    }
