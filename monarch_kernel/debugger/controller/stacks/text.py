"""Render merged stacks as text: one line per frame, branches where ranks diverge, the fewest ranks first. Pure.

The length depends on the number of different stacks, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.labels import rank_label
from monarch_kernel.debugger.controller.stacks.layout import (
    DisplayLine,
    at_once_of,
    continuations_of,
    grouped_values,
    lines_of,
    owner_label,
    path_from,
    shortened,
    where_label,
)
from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch, StackRoot
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.meshes import format_ranks

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.stacks.stacks_report import Stacks

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
            source = _marked(source, line.span)
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


def _marked(source: str, span: tuple[int, int]) -> str:
    start, end = span
    if end <= start or start >= len(source):
        return source
    return f"{source[:start]}{_BOLD}{source[start:end]}{_OFF}{source[end:]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"
