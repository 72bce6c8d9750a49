"""Render merged stacks as HTML. Branches fold, and a line expands to the code around it, or to its library frames.

The HTML needs no scripts or style sheets. It inherits its colours, so it fits light and dark pages, all front ends, and
saved notebooks.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.stacks.layout import (
    DisplayLine,
    at_once_of,
    continuations_of,
    grouped_values,
    lines_of,
    owner_label,
    path_from,
    short_path,
    shortened,
    times_of,
    where_label,
)
from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch, StackRoot
from monarch_kernel.debugger.source_locations import Label, is_readable_source
from monarch_kernel.display import styles
from monarch_kernel.display.locations import source_line
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks

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
            line = f"{self._ranks(idle)} {_span(styles.DIM, escape(stacks.idle_note))}{self._where(idle)}"
            blocks.insert(at, (len(idle), _div(f"{styles.TREE_LINE};margin-top:6px", line)))
        notes = "".join(
            _div(
                styles.TREE_NOTE,
                f"{self._ranks(note.ranks)} {_span(styles.BAD, escape(note.text))}{self._where(note.ranks)}",
            )
            for note in stacks.notes
        )
        body = "".join(html for _, html in blocks)
        return _div(styles.SCROLLED, f"{_div(styles.BOLD, escape(stacks.headline))}{notes}{body}")

    def _root(self, root: StackRoot) -> str:
        head = f"{self._ranks(root.ranks)} <b>{escape(owner_label(root, self._label))}</b>{self._where(root.ranks)}"
        head += _divergence(root)
        return _details(head, self._below(root), open_=True, inside=styles.TREE_INSIDE, style="margin-top:6px")

    def _below(self, branch: StackBranch) -> str:
        found = continuations_of(branch)
        if len(found) == 1 and found[0].node is not None:
            return self._path(found[0].node)
        rows: list[str] = []
        shown, left = shortened(found)
        for each in shown:
            body = self._path(each.node) if each.node is not None else self._end(branch)
            head = f"{self._ranks(each.ranks)} {escape(each.note)}".rstrip() + self._where(each.ranks)
            inside = styles.TREE_INSIDE if each.concurrent else styles.TREE_FORK
            rows.append(_details(head, body, open_=True, inside=inside) if body else _div(styles.TREE_LINE, head))
        if left:
            rows.append(_div(f"{styles.TREE_LINE};{styles.DIM}", escape(left)))
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
            head = f"{_span(styles.DIM, escape(line.place))}{chip}"
            inside = "\n".join(
                f"{node.frame.place.name} {times_of(node)}".rstrip().ljust(32) + f"  {short_path(node.frame)}"
                for node in line.nodes
            )
            frames = f'<pre style="{styles.UNWRAPPED};{styles.DIM}">{escape(inside)}</pre>'
            return _details(head, frames, inside=styles.TREE_INSIDE)
        frame = line.nodes[0].frame
        title = escape(f"{frame.place.file}:{frame.place.line}", quote=True)
        place = escape(line.place.ljust(width))
        head = f'<span title="{title}">{place}</span>  {_marked(line.source, line.span)}{chip}'
        context = self._context(line)
        if not context:
            return _div(styles.TREE_LINE, head)
        return _details(head, context, inside=styles.TREE_INSIDE)

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
                rows.append(_span(styles.RUNS_NOW, row) if at == line else row)
        path = _div(styles.DIM, escape(file)) if not (self._label and self._label(file)) else ""
        return f'{path}<pre style="{styles.UNWRAPPED}">{chr(10).join(rows)}</pre>'

    def _end(self, branch: StackBranch) -> str:
        if not isinstance(branch, FrameNode):
            return ""
        at_once = at_once_of(branch)
        rows = [_div(f"{styles.TREE_LINE};{styles.DIM}", at_once)] if at_once else []
        rows += [
            _div(styles.BAD, f"■ {'' if ranks == branch.here else rank_label(ranks) + ' '}{escape(state)}")
            for state, ranks in sorted(branch.states.items())
        ]
        for name, groups in grouped_values(branch):
            texts = [
                escape(text)
                + ("" if len(groups) == 1 else f" {_span(styles.RANKS, f'[{format_ranks(ranks, limit=6)}]')}")
                for text, ranks in groups[:20]
            ]
            rows.append(_div(styles.TREE_LINE, f"{_span(styles.DIM, f'{escape(name)} =')} {' · '.join(texts)}"))
        return "".join(rows)

    def _ranks(self, ranks: Sequence[int]) -> str:
        lines = [f"{len(ranks)} ranks: {format_ranks(ranks, limit=_MOST_RUNS)}"] if len(ranks) > 1 else []
        if len(ranks) <= _MOST_PROCESSES:
            processes = {rank: self._stacks.process_of(rank) for rank in ranks}
            lines += [f"{rank}: {process}" for rank, process in processes.items() if process]
        title = escape("\n".join(lines), quote=True)
        return f'<span style="{styles.RANKS}" title="{title}">{escape(rank_label(ranks))}</span>'

    def _where(self, ranks: Sequence[int]) -> str:
        where = where_label(ranks, self._stacks.extent)
        return f"  {_span(styles.DIM, escape(where))}" if where else ""


def _divergence(branch: StackBranch) -> str:
    """Mark a point where ranks diverge."""
    ways = sum(not each.concurrent for each in continuations_of(branch))
    return f" {_span(styles.FORK_CHIP, f'ranks diverge here: {ways} ways')}" if ways > 1 else ""


def _details(head: str, body: str, *, open_: bool = False, inside: str = "", style: str = "") -> str:
    return (
        f'<details style="{style}"{" open" if open_ else ""}><summary style="{styles.TREE_OPENS}">{head}</summary>'
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
    return f"{escape(source[:start])}{_span(styles.RUNS_NOW, escape(source[start:end]))}{escape(source[end:])}"
