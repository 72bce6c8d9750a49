"""A merged tree as HTML: branches fold, and a frame opens the code around it, or the libraries' frames it stands for.

It needs no script and no style sheet, and takes its colours from what surrounds it, so that it looks right on light and
dark pages, in any front end, and in a saved notebook.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from html import escape

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
from monarch_kernel.debugger.controller.stacks.report import Stacks
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.meshes import format_ranks

#: Lines around a frame's that are shown when it is opened.
CONTEXT = 3
#: Frames that can be opened; further ones of a very large tree show their line only.
_MOST_CONTEXTS = 400
#: Runs of ranks, and processes, that a tooltip lists.
_MOST_RUNS, _MOST_PROCESSES = 60, 8

_FONT = "font-family:var(--jp-code-font-family,ui-monospace,monospace)"
_BOX = f"{_FONT};font-size:var(--jp-code-font-size,13px);line-height:1.45;overflow-x:auto"
_PRE = f"all:unset;display:block;white-space:pre;{_FONT}"
# What opens has a triangle before it, what does not is as far from the edge.
_ROW = "white-space:pre;cursor:default;padding-left:1.05em"
_NOTE = "white-space:pre-wrap;padding-left:1.05em"
_OPENS = "white-space:pre;cursor:pointer"
_INSIDE = "margin:0 0 2px 0.6ch;padding-left:1.4ch;border-left:1px solid rgba(128,128,128,.45)"
_PARTED = "margin:2px 0 2px 0.6ch;padding-left:1.4ch;border-left:3px solid #d9912b"
_DIM = "opacity:.6"
_RANKS = "color:#2b7fd9;font-weight:600"
_BAD = "color:#d9362b"
_NOW = "background:rgba(255,176,32,.30);border-radius:2px"
_CHIP = "background:#d9912b;color:#fff;border-radius:8px;padding:0 6px;font-size:85%"


def html_of(stacks: Stacks, label: Label | None = None) -> str:
    """The headline, the notes, and the tree; tooltips say where a rank's process is."""
    return _Page(stacks, label or stacks.label).whole()


class _Page:
    def __init__(self, stacks: Stacks, label: Label | None) -> None:
        self._stacks = stacks
        self._label = label
        self._contexts = 0

    def whole(self) -> str:
        """The page."""
        stacks = self._stacks
        idle = stacks.idle
        blocks = [(len(root.ranks), self._root(root)) for root in stacks.tree]
        if idle:
            at = next((k for k, (count, _) in enumerate(blocks) if len(idle) <= count), len(blocks))
            line = f"{self._ranks(idle)} idle: waiting for a message{self._where(idle)}"
            blocks.insert(at, (len(idle), f'<div style="{_ROW};{_DIM};margin-top:6px">{line}</div>'))
        notes = "".join(
            f'<div style="{_NOTE}">{self._ranks(note.ranks)} <span style="{_BAD}">{escape(note.text)}</span>'
            f"{self._where(note.ranks)}</div>"
            for note in stacks.notes
        )
        body = "".join(html for _, html in blocks)
        headline = escape(stacks.headline)
        return f'<div style="{_BOX}"><div style="font-weight:600">{headline}</div>{notes}{body}</div>'

    def _root(self, root: StackRoot) -> str:
        head = f"{self._ranks(root.ranks)} <b>{escape(owner_label(root, self._label))}</b>{self._where(root.ranks)}"
        head += _parting(root)
        return _details(head, self._below(root), open_=True, inside=_INSIDE, style="margin-top:6px")

    def _below(self, branch: StackBranch) -> str:
        found = continuations_of(branch)
        if len(found) == 1 and found[0].node is not None:
            return self._path(found[0].node)
        rows: list[str] = []
        shown, left = shortened(found)
        for each in shown:
            body = self._path(each.node) if each.node is not None else self._end(branch)
            head = f"{self._ranks(each.ranks)} {escape(each.note)}".rstrip() + self._where(each.ranks)
            inside = _INSIDE if each.concurrent else _PARTED
            rows.append(
                _details(head, body, open_=True, inside=inside) if body else f'<div style="{_ROW}">{head}</div>'
            )
        if left:
            rows.append(f'<div style="{_ROW};{_DIM}">{escape(left)}</div>')
        return "".join(rows)

    def _path(self, node: FrameNode) -> str:
        path = path_from(node)
        lines = lines_of(path, self._label)
        width = min(max((len(line.place) for line in lines if line.source), default=0), 60)
        end = path[-1]
        rows = [self._line(line, width, _parting(end) if line is lines[-1] else "") for line in lines]
        return "".join(rows) + (self._below(end) if end.children else self._end(end))

    def _line(self, line: DisplayLine, width: int, chip: str) -> str:
        if not line.user:
            head = f'<span style="{_DIM}">{escape(line.place)}</span>{chip}'
            inside = "\n".join(
                f"{node.frame.place.name} {times_of(node)}".rstrip().ljust(32) + f"  {short_path(node.frame)}"
                for node in line.nodes
            )
            return _details(head, f'<pre style="{_PRE};{_DIM}">{escape(inside)}</pre>', inside=_INSIDE)
        frame = line.nodes[0].frame
        title = escape(f"{frame.place.file}:{frame.place.line}", quote=True)
        place = escape(line.place.ljust(width))
        head = f'<span title="{title}">{place}</span>  {_marked(line.source, line.span)}{chip}'
        context = self._context(line)
        if not context:
            return f'<div style="{_ROW}">{head}</div>'
        return _details(head, context, inside=_INSIDE)

    def _context(self, shown: DisplayLine) -> str:
        frame = shown.nodes[0].frame
        file, line = frame.place.file, frame.place.line
        if not frame.source or self._contexts >= _MOST_CONTEXTS:
            return ""
        if linecache.getline(file, line).strip() != frame.source:  # the file here is not the ranks'
            return ""
        self._contexts += 1
        rows: list[str] = []
        for at in range(max(1, line - CONTEXT), line + CONTEXT + 1):
            text = linecache.getline(file, at).rstrip("\n")
            if text or at <= line:
                row = escape(f"{'→' if at == line else ' '} {at:>4}  {text}")
                rows.append(f'<span style="{_NOW}">{row}</span>' if at == line else row)
        path = f'<div style="{_DIM}">{escape(file)}</div>' if not (self._label and self._label(file)) else ""
        return f'{path}<pre style="{_PRE}">{chr(10).join(rows)}</pre>'

    def _end(self, branch: StackBranch) -> str:
        if not isinstance(branch, FrameNode):
            return ""
        at_once = at_once_of(branch)
        rows = [f'<div style="{_ROW};{_DIM}">{at_once}</div>'] if at_once else []
        rows += [
            f'<div style="{_BAD}">■ {"" if ranks == branch.here else rank_label(ranks) + " "}{escape(state)}</div>'
            for state, ranks in sorted(branch.states.items())
        ]
        for name, groups in grouped_values(branch):
            texts = [
                escape(text)
                + ("" if len(groups) == 1 else f' <span style="{_RANKS}">[{format_ranks(ranks, limit=6)}]</span>')
                for text, ranks in groups[:20]
            ]
            rows.append(f'<div style="{_ROW}"><span style="{_DIM}">{escape(name)} =</span> {" · ".join(texts)}</div>')
        return "".join(rows)

    def _ranks(self, ranks: Sequence[int]) -> str:
        lines = [f"{len(ranks)} ranks: {format_ranks(ranks, limit=_MOST_RUNS)}"] if len(ranks) > 1 else []
        if len(ranks) <= _MOST_PROCESSES:
            processes = {rank: self._stacks.process_of(rank) for rank in ranks}
            lines += [f"{rank}: {process}" for rank, process in processes.items() if process]
        title = escape("\n".join(lines), quote=True)
        return f'<span style="{_RANKS}" title="{title}">{escape(rank_label(ranks))}</span>'

    def _where(self, ranks: Sequence[int]) -> str:
        where = where_label(ranks, self._stacks.extent)
        return f'  <span style="{_DIM}">{escape(where)}</span>' if where else ""


def _parting(branch: StackBranch) -> str:
    """A mark where ranks go different ways."""
    ways = sum(not each.concurrent for each in continuations_of(branch))
    return f' <span style="{_CHIP}">ranks part here: {ways} ways</span>' if ways > 1 else ""


def _details(head: str, body: str, *, open_: bool = False, inside: str = "", style: str = "") -> str:
    return (
        f'<details style="{style}"{" open" if open_ else ""}><summary style="{_OPENS}">{head}</summary>'
        f'<div style="{inside}">{body}</div></details>'
    )


def _marked(source: str, span: tuple[int, int]) -> str:
    start, end = span
    if end <= start or start >= len(source):
        return escape(source)
    return f'{escape(source[:start])}<span style="{_NOW}">{escape(source[start:end])}</span>{escape(source[end:])}'
