"""A merged tree as HTML: branches fold, and a frame opens the code around it, or the libraries' frames it stands for.

It needs no script and no style sheet, and takes its colours from what surrounds it, so that it looks right on light and
dark pages, in any front end, and in a saved notebook.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from html import escape

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch, StackRoot
from monarch_kernel.debugger.controller.stacks.text import (
    DisplayLine,
    Notes,
    at_once_of,
    branches_of,
    grouped_values,
    owner_label,
    parts_of,
    path_from,
    rank_label,
    short_path,
    shortened,
    times_of,
    where_label,
)
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


def html_of(
    headline: str,
    notes: Notes,
    roots: Sequence[StackRoot],
    idle: Sequence[int],
    extent: Extent,
    label: Label | None = None,
    processes: Mapping[int, str] | None = None,
) -> str:
    """All of it; `processes` says where a rank's process is, for tooltips."""
    return _Page(extent, label, processes or {}).whole(headline, notes, roots, idle)


class _Page:
    def __init__(self, extent: Extent, label: Label | None, processes: Mapping[int, str]) -> None:
        self._extent = extent
        self._label = label
        self._processes = processes
        self._contexts = 0

    def whole(self, headline: str, notes: Notes, roots: Sequence[StackRoot], idle: Sequence[int]) -> str:
        """The page."""
        blocks = [(len(root.ranks), self._root(root)) for root in roots]
        if idle:
            at = next((k for k, (count, _) in enumerate(blocks) if len(idle) <= count), len(blocks))
            line = f"{self._ranks(idle)} idle: waiting for a message{self._where(idle)}"
            blocks.insert(at, (len(idle), f'<div style="{_ROW};{_DIM};margin-top:6px">{line}</div>'))
        said = "".join(
            f'<div style="{_NOTE}">{self._ranks(ranks)} <span style="{_BAD}">{escape(text)}</span>'
            f"{self._where(ranks)}</div>"
            for text, ranks in notes.lines
        )
        body = "".join(html for _, html in blocks)
        return f'<div style="{_BOX}"><div style="font-weight:600">{escape(headline)}</div>{said}{body}</div>'

    def _root(self, root: StackRoot) -> str:
        head = f"{self._ranks(root.ranks)} <b>{escape(owner_label(root, self._label))}</b>{self._where(root.ranks)}"
        head += _parting(root)
        return _details(head, self._below(root), open_=True, inside=_INSIDE, style="margin-top:6px")

    def _below(self, branch: StackBranch) -> str:
        branches = branches_of(branch)
        if len(branches) == 1 and branches[0][1] is not None:
            return self._path(branches[0][1])
        rows: list[str] = []
        shown, left = shortened(branches)
        for said, child in shown:
            ranks = child.ranks if child is not None else branch.here if isinstance(branch, FrameNode) else []
            body = self._path(child) if child is not None else self._end(branch)
            head = f"{self._ranks(ranks)} {escape(said)}".rstrip() + self._where(ranks)
            inside = _INSIDE if said.endswith("at once") else _PARTED
            rows.append(
                _details(head, body, open_=True, inside=inside) if body else f'<div style="{_ROW}">{head}</div>'
            )
        if left:
            rows.append(f'<div style="{_ROW};{_DIM}">{escape(left)}</div>')
        return "".join(rows)

    def _path(self, node: FrameNode) -> str:
        path = path_from(node)
        parts = parts_of(path, self._label)
        width = min(max((len(part.place) for part in parts if part.source), default=0), 60)
        end = path[-1]
        rows = [self._part(part, width, _parting(end) if part is parts[-1] else "") for part in parts]
        return "".join(rows) + (self._below(end) if end.children else self._end(end))

    def _part(self, part: DisplayLine, width: int, chip: str) -> str:
        if not part.user:
            head = f'<span style="{_DIM}">{escape(part.place)}</span>{chip}'
            inside = "\n".join(
                f"{node.frame.place.name} {times_of(node)}".rstrip().ljust(32) + f"  {short_path(node.frame)}"
                for node in part.nodes
            )
            return _details(head, f'<pre style="{_PRE};{_DIM}">{escape(inside)}</pre>', inside=_INSIDE)
        frame = part.nodes[0].frame
        title = escape(f"{frame.place.file}:{frame.place.line}", quote=True)
        place = escape(part.place.ljust(width))
        head = f'<span title="{title}">{place}</span>  {_marked(part.source, part.span)}{chip}'
        context = self._context(part)
        if not context:
            return f'<div style="{_ROW}">{head}</div>'
        return _details(head, context, inside=_INSIDE)

    def _context(self, part: DisplayLine) -> str:
        frame = part.nodes[0].frame
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
            told = [
                escape(text)
                + ("" if len(groups) == 1 else f' <span style="{_RANKS}">[{format_ranks(ranks, limit=6)}]</span>')
                for text, ranks in groups[:20]
            ]
            rows.append(f'<div style="{_ROW}"><span style="{_DIM}">{escape(name)} =</span> {" · ".join(told)}</div>')
        return "".join(rows)

    def _ranks(self, ranks: Sequence[int]) -> str:
        lines = [f"{len(ranks)} ranks: {format_ranks(ranks, limit=_MOST_RUNS)}"] if len(ranks) > 1 else []
        if len(ranks) <= _MOST_PROCESSES:
            lines += [f"{rank}: {self._processes[rank]}" for rank in ranks if rank in self._processes]
        title = escape("\n".join(lines), quote=True)
        return f'<span style="{_RANKS}" title="{title}">{escape(rank_label(ranks))}</span>'

    def _where(self, ranks: Sequence[int]) -> str:
        where = where_label(ranks, self._extent)
        return f'  <span style="{_DIM}">{escape(where)}</span>' if where else ""


def _parting(branch: StackBranch) -> str:
    """A mark where ranks go different ways."""
    ways = sum(not said.endswith("at once") for said, _ in branches_of(branch))
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
