"""A merged tree as text: one line per frame, branches where ranks part, the fewest ranks first. Pure.

What follows without a branch is written below each other and not indented further, so that deep stacks stay readable;
neighbouring frames of libraries take one line. The length follows the number of different stacks, not that of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch, StackRoot
from monarch_kernel.debugger.model.stacks import CODE, ENDPOINT, NATIVE, TASK, StackFrame
from monarch_kernel.debugger.source_locations import LIBRARY, RUNTIME, Label, shown_cell, shown_file
from monarch_kernel.meshes import format_points, format_ranks

#: Lines are cut at about this width.
WIDTH = 118
#: Ways that ranks go from one place; further ones are only counted.
MOST_BRANCHES = 40
#: Where the source begins, at most.
_SOURCE_AT = 52
_LABEL_RUNS = 6
_MOST_NAMES, _MOST_NATIVE = 3, 6
# Names in one line take about this width.
_NAMES_WIDTH = 84
_MOST_VALUES = 4
_MOST_CELLS = 4

_BOLD, _DIM, _CYAN, _YELLOW, _RED, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class DisplayLine:
    """Neighbouring frames that are shown as one line: one of the user's, or some of libraries.

    Attributes:
        nodes: which, the outermost first.
        place: what the line says of where it is.
        source: and what of its code.
        span: the columns of `source` that run now.
    """

    nodes: tuple[FrameNode, ...]
    place: str
    source: str = ""
    span: tuple[int, int] = (0, 0)

    @property
    def user(self) -> bool:
        """Whether it is the user's code."""
        return self.nodes[0].frame.user


@dataclass(slots=True)
class Notes:
    """What is said of ranks beside their stacks: a phrase, and whose it is."""

    lines: list[tuple[str, Sequence[int]]] = field(default_factory=list[tuple[str, Sequence[int]]])


def path_from(node: FrameNode) -> list[FrameNode]:
    """A node and those that follow it without a branch."""
    path = [node]
    while len(node.children) == 1 and not node.here:
        node = node.children[0]
        path.append(node)
    return path


def parts_of(path: Sequence[FrameNode], label: Label | None) -> list[DisplayLine]:
    """A path as lines."""
    parts: list[DisplayLine] = []
    group: list[FrameNode] = []
    for node in path:
        frame = node.frame
        if frame.user:
            if group:
                parts.append(_library(group))
                group = []
            parts.append(DisplayLine((node,), _user_place(node, label), frame.source, frame.span))
        else:
            if group and (_mixes(group[-1].frame, frame) or frame.left_out):
                parts.append(_library(group))
                group = []
            group.append(node)
    if group:
        parts.append(_library(group))
    return parts


def rank_label(ranks: Iterable[int]) -> str:
    """A set of ranks in brackets: `[0-3,7]`."""
    return f"[{format_ranks(ranks, limit=_LABEL_RUNS)}]"


def where_label(ranks: Sequence[int], extent: Extent) -> str:
    """Where ranks lie in a mesh of several dimensions: `hosts=0,gpus=3`; '' for all of them."""
    if len(extent.names) < 2 or len(ranks) == extent.nelements:
        return ""
    return format_points(ranks, extent, limit=3)


def branches_of(branch: StackBranch) -> list[tuple[str, FrameNode | None]]:
    """What follows where a path ends, each with what is to be said of it; None: the stacks of some end here.

    Ranks that all do several things at once (tasks, threads) have not parted: that is said instead of who they are.
    """
    children = branch.children
    told: list[tuple[str, FrameNode | None]] = []
    together = [child for child in children if child.ranks == branch.ranks]
    for child in children:
        at_once = len(together) > 1 and child in together
        told.append((f"{together.index(child) + 1} of {len(together)} at once" if at_once else "", child))
    if isinstance(branch, FrameNode) and branch.here and children:
        told.append(("here", None))
    return told


def shortened(branches: list[tuple[str, FrameNode | None]]) -> tuple[list[tuple[str, FrameNode | None]], str]:
    """The branches to show, and what is said of those that are left out: nobody reads hundreds of them."""
    if len(branches) <= MOST_BRANCHES:
        return branches, ""
    left = branches[MOST_BRANCHES - 1 :]
    ranks = sorted({rank for _said, child in left if child is not None for rank in child.ranks})
    return branches[: MOST_BRANCHES - 1], f"… {len(left)} more ways: {rank_label(ranks)}"


def owner_label(root: StackRoot, label: Label | None) -> str:
    """Who does what is in a root: the cell, the endpoint and the cell that has called it, the task or the thread."""
    if root.kind == CODE:
        return shown_file(root.name, label)
    if root.kind == ENDPOINT:
        cells: dict[str, list[int]] = {}
        for cell, ranks in root.cells.items():
            name = shown_cell(cell, label)
            if name:
                cells.setdefault(name, []).extend(ranks)
        told = [name if ranks == root.ranks else f"{name} {rank_label(ranks)}" for name, ranks in cells.items()]
        called = f", called by {', '.join(told[:_MOST_CELLS])}" if told else ""
        return f"{root.name}(){called}"
    return f"{'task' if root.kind == TASK else 'thread'} {root.name}"


def text_of(
    headline: str,
    notes: Notes,
    roots: Sequence[StackRoot],
    idle: Sequence[int],
    extent: Extent,
    label: Label | None = None,
    *,
    colours: bool = False,
) -> str:
    """All of it."""
    writer = _Writer(extent, label, colours)
    writer.line("", headline, _BOLD)
    for said, ranks in notes.lines:
        writer.ranks("", ranks, said, _RED)
    written = not idle
    for root in roots:
        if not written and len(idle) <= len(root.ranks):
            writer.idle(idle)
            written = True
        writer.root(root)
    if not written:
        writer.idle(idle)
    return "\n".join(writer.lines)


class _Writer:
    def __init__(self, extent: Extent, label: Label | None, colours: bool) -> None:
        self._extent = extent
        self._label = label
        self._colours = colours
        self.lines: list[str] = []

    def line(self, indent: str, text: str, colour: str = "") -> None:
        """One line."""
        text = _cut(text, WIDTH - len(indent))
        if colour and self._colours:
            text = f"{colour}{text}{_OFF}"
        self.lines.append(f"{indent}{text}".rstrip())

    def ranks(self, indent: str, ranks: Sequence[int], text: str, colour: str) -> None:
        """A line about some ranks: who, what, and where they are."""
        where = where_label(ranks, self._extent)
        said = f"{rank_label(ranks)} {text}".rstrip()
        self.line(indent, said + (f"  ({where})" if where else ""), colour)

    def idle(self, ranks: Sequence[int]) -> None:
        """Those who do nothing."""
        self.lines.append("")
        self.ranks("", ranks, "idle: waiting for a message", _DIM)

    def root(self, root: StackRoot) -> None:
        """What one endpoint, cell, task or thread does."""
        self.lines.append("")
        self.ranks("", root.ranks, owner_label(root, self._label), _CYAN)
        self._below(root, "  ")

    def _below(self, branch: StackBranch, indent: str) -> None:
        # Depth of this recursion is that of branches, of which there are at most as many as different stacks.
        branches = branches_of(branch)
        if len(branches) == 1 and branches[0][1] is not None:
            self._path(branches[0][1], indent)
            return
        shown, left = shortened(branches)
        for at, (said, child) in enumerate(shown):
            last = at == len(shown) - 1 and not left
            ranks = branch.here if child is None and isinstance(branch, FrameNode) else child.ranks if child else []
            below = indent + ("     " if last else "│    ")
            self.ranks(f"{indent}{'└' if last else '├'}─ ", ranks, said, _YELLOW)
            if child is None:
                self._end(branch, below)
            else:
                self._path(child, below)
        if left:
            self.line(indent, f"└─ {left}", _DIM)

    def _path(self, node: FrameNode, indent: str) -> None:
        path = path_from(node)
        parts = parts_of(path, self._label)
        places = [len(part.place) for part in parts if part.source]
        width = min(max(places, default=0), _SOURCE_AT)
        for part in parts:
            if part.source:
                self._user(part, indent, width)
            else:
                self.line(indent, part.place, "" if part.user else _DIM)
        end = path[-1]
        if not end.children:
            self._end(end, indent)
        else:
            self._below(end, indent)

    def _user(self, part: DisplayLine, indent: str, width: int) -> None:
        room = WIDTH - len(indent) - max(width, len(part.place)) - 2
        source = _cut(part.source, max(20, room))
        if self._colours:
            source = _marked(source, part.span)
        self.lines.append(f"{indent}{part.place.ljust(width)}  {source}")

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
            told = [
                text if len(groups) == 1 else f"{text} [{format_ranks(ranks, limit=3)}]"
                for text, ranks in groups[:_MOST_VALUES]
            ]
            left = len(groups) - _MOST_VALUES
            more = f" · {left} other values" if left > 0 else ""
            self.line(indent, f"  {name} = {' · '.join(told)}{more}")


def grouped_values(node: FrameNode) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """The local variables at the end of some stacks: name, and each distinct value with its ranks, the fewest first."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, values in sorted(node.values.items()):
        for name, text in values:
            found.setdefault(name, {}).setdefault(text, []).append(rank)
    return [(name, sorted(texts.items(), key=lambda each: len(each[1]))) for name, texts in found.items()]


def at_once_of(node: FrameNode) -> str:
    """How many threads or tasks of a rank are at the same place, if there are several: `2–5 of these at once`."""
    if not node.counts:
        return ""
    most = max(node.counts.values())
    least = min(node.counts.values()) if len(node.counts) == len(node.here) else 1
    return f"{most if least == most else f'{least}–{most}'} of these at once"


def times_of(node: FrameNode) -> str:
    """How often a frame follows itself: `×12`, or `×3–40` where ranks differ; '' for once."""
    least, most = node.times
    if most == 1:
        return ""
    return f"×{most}" if least == most else f"×{least}–{most}"


def short_path(frame: StackFrame) -> str:
    """A library's file from its package on: `torch/nn/modules/module.py:1751`."""
    file, line = frame.place.file, frame.place.line
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            file = file.rpartition(mark)[2]
            break
    else:
        file = "/".join(file.rsplit("/", 1)[-1:])
    return f"{file}:{line}" if line else file


def _user_place(node: FrameNode, label: Label | None) -> str:
    frame = node.frame
    gap = f"… {frame.left_out} frames … " if frame.left_out else ""
    times = times_of(node)
    return f"{gap}{frame.place.text(label)}" + (f" {times}" if times else "")


def _mixes(one: StackFrame, other: StackFrame) -> bool:
    """Whether two neighbours belong to different lines: native code is one line, whatever libraries it is in."""
    native = one.place.kind == NATIVE
    return native != (other.place.kind == NATIVE) or (not native and _package(one) != _package(other))


def _library(group: Sequence[FrameNode]) -> DisplayLine:
    # Functions whose names py-spy does not find say nothing.
    named = [node for node in group if node.frame.place.name != "?"] or list(group[-1:])
    frame = named[-1].frame
    native = frame.place.kind == NATIVE
    names = [_called(node, node is named[-1]) for node in named]
    shown = _shortened_names(names, _MOST_NATIVE if native else _MOST_NAMES)
    gap = next((f"… {node.frame.left_out} frames … " for node in group if node.frame.left_out), "")
    head = "» native" if native else f"· {_package(frame)}"
    return DisplayLine(tuple(group), f"{head}: {gap}{' › '.join(shown)}  ({short_path(frame)})")


def _shortened_names(names: list[str], most: int) -> list[str]:
    """Some of a chain of calls: how it begins, and where it is, which is what matters most."""
    while True:
        left = len(names) - most
        shown = names if left <= 0 else [*names[: most - 2], f"… {left + 1} …", names[-1]]
        if most <= 3 or sum(map(len, shown)) + 3 * len(shown) <= _NAMES_WIDTH:
            return shown
        most -= 1


def _called(node: FrameNode, whole: bool) -> str:
    place = node.frame.place
    times = times_of(node)
    name = place.name
    if place.kind == NATIVE:
        name = _native_name(name)
    elif not whole:
        name = name.rpartition(".")[2]
    return name + (f" {times}" if times else "")


def _native_name(name: str) -> str:
    """A function of C++ without parameters, template arguments and outer namespaces: `Engine::execute`."""
    depth = 0
    plain: list[str] = []
    for letter in name.replace("(anonymous namespace)", "anonymous"):
        if letter == "(" and not depth and plain:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            plain.append(letter)
    return "::".join("".join(plain).strip().split("::")[-2:]) or name


def _package(frame: StackFrame) -> str:
    place = frame.place
    if place.kind == RUNTIME:
        return "monarch_kernel"
    if place.kind == NATIVE:
        return place.file.rsplit("/", 1)[-1]
    if place.kind == LIBRARY:
        for mark in ("/site-packages/", "/dist-packages/"):
            if mark in place.file:
                return place.file.rpartition(mark)[2].partition("/")[0].removesuffix(".py")
    parts = place.file.removesuffix(".py").split("/")
    inside = next((at for at, part in enumerate(parts) if part.startswith("python3")), len(parts) - 2)
    return parts[inside + 1] if inside + 1 < len(parts) else parts[-1]


def _marked(source: str, span: tuple[int, int]) -> str:
    start, end = span
    if end <= start or start >= len(source):
        return source
    return f"{source[:start]}{_BOLD}{source[start:end]}{_OFF}{source[end:]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"
