"""Merge many stacks into one tree. Ranks with the same outer frames share a branch until they diverge. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.model.stops import (
    CODE,
    ENDPOINT,
    NATIVE,
    OPERATION,
    PROGRAM,
    TASK,
    Stack,
    StackFrame,
    StackSnapshot,
)
from monarch_kernel.debugger.source_locations import LIBRARY, RUNTIME, Label, shown_cell, shown_file
from monarch_kernel.meshes import format_points, format_ranks

# Labels for sets of ranks.

_MOST_RUNS = 6


def rank_label(ranks: Iterable[int]) -> str:
    """Format a set of ranks in brackets: `[0-3,7]`; for many ranks, the first runs and a count."""
    return f"[{format_ranks(ranks, limit=_MOST_RUNS)}]"


_Key = tuple[str, int, str]
_B = TypeVar("_B", bound="StackBranch")


@dataclass(slots=True, eq=False, kw_only=True)
class StackBranch:
    """A location where stacks begin or continue.

    Attributes:
        ranks: the ranks that are here, sorted.
        children: the frames that follow, the fewest ranks first.
    """

    ranks: list[int] = field(default_factory=list[int])
    children: list[FrameNode] = field(default_factory=list["FrameNode"])
    _below: dict[_Key, FrameNode] = field(default_factory=dict[tuple[str, int, str], "FrameNode"], repr=False)


@dataclass(slots=True, eq=False)
class FrameNode(StackBranch):
    """A frame, with the frames that it has called on some ranks.

    Attributes:
        frame: the frame of one of the ranks; the others' frames differ only in the depth of a recursion.
        here: the ranks whose stacks end here.
        counts: the number of stacks that end here, for ranks with several (threads or tasks that do the same).
        states: the special states of stacks that end here, with their ranks.
        values: local variables of the stacks that end here, if requested.
        times: the smallest and the largest recursion depth of this frame.
    """

    frame: StackFrame
    here: list[int] = field(default_factory=list[int])
    counts: dict[int, int] = field(default_factory=dict[int, int])
    states: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    values: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict[int, tuple[tuple[str, str], ...]])
    times: tuple[int, int] = (1, 1)


@dataclass(slots=True, eq=False)
class StackRoot(StackBranch):
    """The stacks of some ranks that belong to the same cell, endpoint, task or thread.

    Attributes:
        kind: as in `Stack`.
        name: as in `Stack`; for a cell, the file of its code.
        cells: the cells that called the endpoint, with their ranks.
    """

    kind: str
    name: str
    cells: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


@dataclass(frozen=True, slots=True)
class StackClass:
    """Ranks that do the same.

    Attributes:
        ranks: the ranks, sorted.
        stacks: the stacks of one of them; none if they are idle.
    """

    ranks: tuple[int, ...]
    stacks: tuple[Stack, ...]

    @property
    def idle(self) -> bool:
        """Whether they wait for a message."""
        return not self.stacks


@dataclass(frozen=True, slots=True)
class MergedStacks:
    """All snapshots, merged.

    Attributes:
        roots: the tree; the fewest ranks first, here and at each branch.
        classes: sets of ranks that do the same, the smallest first.
        idle: the ranks that wait for a message.
    """

    roots: tuple[StackRoot, ...]
    classes: tuple[StackClass, ...]
    idle: tuple[int, ...]


def merge(snapshots: Mapping[int, StackSnapshot]) -> MergedStacks:
    """Build the tree and the classes of all ranks' stacks."""
    names = _names(snapshots)
    roots: dict[tuple[str, str], StackRoot] = {}
    classes: dict[tuple[object, ...], list[int]] = {}
    idle: list[int] = []
    for rank in sorted(snapshots):
        ends: list[object] = []
        for stack in snapshots[rank].stacks:
            kind, name = _owner(stack, names if snapshots[rank].outside else {})
            root = roots.get((kind, name))
            if root is None:
                root = roots[(kind, name)] = StackRoot(kind, name)
            ends.append((id(_add(root, rank, stack)), stack.state))
        if not ends:
            idle.append(rank)
        # The number of threads that do the same does not count, because it may vary by chance.
        classes.setdefault(tuple(sorted(set(ends), key=repr)), []).append(rank)
    made = [StackClass(tuple(ranks), snapshots[ranks[0]].stacks) for ranks in classes.values()]
    made.sort(key=lambda each: (len(each.ranks), each.ranks))
    return MergedStacks(_finished(roots.values()), tuple(made), tuple(idle))


def _add(root: StackRoot, rank: int, stack: Stack) -> StackBranch:
    """Add a stack of a rank. Return the branch where it ends."""
    _join(root.ranks, rank)
    if stack.cell:
        _join(root.cells.setdefault(stack.cell, []), rank)
    at: StackBranch = root
    node: FrameNode | None = None
    for frame in stack.frames:
        place = frame.place
        key = (place.file, place.line, place.name)
        node = at._below.get(key)
        if node is None:
            node = at._below[key] = FrameNode(frame, times=(frame.times, frame.times))
        _join(node.ranks, rank)
        if frame.times != node.times[0]:
            node.times = (min(node.times[0], frame.times), max(node.times[1], frame.times))
        if frame.source and not node.frame.source:
            node.frame = node.frame._replace(source=frame.source)
        at = node
    if node is not None:
        if node.here and node.here[-1] == rank:
            node.counts[rank] = node.counts.get(rank, 1) + 1
        _join(node.here, rank)
        if stack.state:
            _join(node.states.setdefault(stack.state, []), rank)
        if stack.values:
            node.values[rank] = stack.values
    return at


def _join(ranks: list[int], rank: int) -> None:
    if not ranks or ranks[-1] != rank:  # ranks are added in order; several threads of one rank count once
        ranks.append(rank)


def _owner(stack: Stack, names: dict[tuple[str, str], str]) -> tuple[str, str]:
    if not stack.frames:
        return stack.kind, stack.name
    first = stack.frames[0].place
    if stack.kind == CODE:
        return CODE, first.file
    if stack.kind == ENDPOINT:
        return ENDPOINT, names.get((first.file, first.name), stack.name)
    return stack.kind, stack.name


def _names(snapshots: Mapping[int, StackSnapshot]) -> dict[tuple[str, str], str]:
    """Return the names of endpoints, from ranks that answered. From outside, only their functions are visible."""
    found: dict[tuple[str, str], str] = {}
    if any(snapshot.outside for snapshot in snapshots.values()):
        for snapshot in snapshots.values():
            for stack in () if snapshot.outside else snapshot.stacks:
                if stack.kind == ENDPOINT and stack.frames:
                    first = stack.frames[0].place
                    found.setdefault((first.file, first.name), stack.name)
    return found


def _sorted(branches: Iterable[_B]) -> list[_B]:
    return sorted(branches, key=lambda branch: (len(branch.ranks), branch.ranks[:1]))


def _finished(roots: Iterable[StackRoot]) -> tuple[StackRoot, ...]:
    """Sort the roots and everything below them. Not recursive, as stacks may be deep."""
    ordered = _sorted(roots)
    todo: list[StackBranch] = [*ordered]
    while todo:
        at = todo.pop()
        at.children = _sorted(at._below.values())
        todo += at.children
    return tuple(ordered)


# Lay out a merged tree in lines, for every renderer: frames that share a line, and the names of ranks and frames.
#
# Frames that follow each other without a branch are listed with the same indentation, so that deep stacks stay
# readable. Neighbouring library frames share a line. Pure.

#: How many continuations of stacks from one location are shown. Further ones are only counted.
MOST_BRANCHES = 40
_MOST_NAMES, _MOST_NATIVE = 3, 6
# Names in one line take about this width.
_NAMES_WIDTH = 84
_MOST_CELLS = 4


@dataclass(frozen=True, slots=True)
class DisplayLine:
    """Neighbouring frames that share a line: one frame of user code, or several library frames.

    Attributes:
        nodes: the frames, the outermost first.
        place: the location, as the line shows it.
        source: the source that it shows; "" for none.
        span: the columns of `source` that are executing now.
    """

    nodes: tuple[FrameNode, ...]
    place: str
    source: str = ""
    span: tuple[int, int] = (0, 0)

    @property
    def user(self) -> bool:
        """Whether it is user code."""
        return self.nodes[0].frame.user


class Continuation(NamedTuple):
    """One of the ways in which stacks continue from a location.

    Attributes:
        ranks: the ranks that continue this way.
        node: the next frame; None if the stacks of these ranks end here.
        note: the text beside the ranks.
        concurrent: whether the same ranks also continue in other ways, in other tasks or threads, without diverging.
    """

    ranks: Sequence[int]
    node: FrameNode | None
    note: str = ""
    concurrent: bool = False


def path_from(node: FrameNode) -> list[FrameNode]:
    """Return a node and its successors up to the next branch."""
    path = [node]
    while len(node.children) == 1 and not node.here:
        node = node.children[0]
        path.append(node)
    return path


def lines_of(path: Sequence[FrameNode], label: Label | None) -> list[DisplayLine]:
    """Lay out a path in lines."""
    lines: list[DisplayLine] = []
    group: list[FrameNode] = []
    for node in path:
        frame = node.frame
        if frame.user:
            if group:
                lines.append(_library(group))
                group = []
            lines.append(DisplayLine((node,), _user_place(node, label), frame.source, frame.span))
        else:
            if group and (_mixes(group[-1].frame, frame) or frame.left_out):
                lines.append(_library(group))
                group = []
            group.append(node)
    if group:
        lines.append(_library(group))
    return lines


def where_label(ranks: Sequence[int], extent: Extent) -> str:
    """Format the coordinates of ranks in a mesh of several dimensions: `hosts=0,gpus=3`; '' for all ranks."""
    if len(extent.names) < 2 or len(ranks) == extent.nelements:
        return ""
    return format_points(ranks, extent, limit=3)


def continuations_of(branch: StackBranch) -> list[Continuation]:
    """Return how stacks continue at the end of a path. Ranks that do several things at once do not diverge."""
    together = [child for child in branch.children if child.ranks == branch.ranks]
    found: list[Continuation] = []
    for child in branch.children:
        if len(together) > 1 and child in together:
            note = f"{together.index(child) + 1} of {len(together)} at once"
            found.append(Continuation(child.ranks, child, note, concurrent=True))
        else:
            found.append(Continuation(child.ranks, child))
    if isinstance(branch, FrameNode) and branch.here and branch.children:
        found.append(Continuation(branch.here, None, "here"))
    return found


def shortened(found: list[Continuation]) -> tuple[list[Continuation], str]:
    """Return the continuations to show, and a text that counts the rest."""
    if len(found) <= MOST_BRANCHES:
        return found, ""
    left = found[MOST_BRANCHES - 1 :]
    ranks = sorted({rank for each in left if each.node is not None for rank in each.ranks})
    return found[: MOST_BRANCHES - 1], f"… {len(left)} more ways: {rank_label(ranks)}"


def owner_label(root: StackRoot, label: Label | None) -> str:
    """Describe what runs in a root: the cell, the endpoint and the cells that called it, the task or the thread."""
    if root.kind == CODE:
        return shown_file(root.name, label)
    if root.kind == ENDPOINT:
        cells: dict[str, list[int]] = {}
        for cell, ranks in root.cells.items():
            name = shown_cell(cell, label)
            if name:
                cells.setdefault(name, []).extend(ranks)
        callers = [name if ranks == root.ranks else f"{name} {rank_label(ranks)}" for name, ranks in cells.items()]
        called = f", called by {', '.join(callers[:_MOST_CELLS])}" if callers else ""
        return f"{root.name}(){called}"
    if root.kind == PROGRAM:
        return root.name
    if root.kind == OPERATION:
        return f"operation {root.name}"
    return f"{'task' if root.kind == TASK else 'thread'} {root.name}"


def grouped_values(node: FrameNode) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Return local variables where stacks end: name, and distinct values with their ranks, the fewest ranks first."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, values in sorted(node.values.items()):
        for name, text in values:
            found.setdefault(name, {}).setdefault(text, []).append(rank)
    return [(name, sorted(texts.items(), key=lambda each: len(each[1]))) for name, texts in found.items()]


def at_once_of(node: FrameNode) -> str:
    """Format how many threads or tasks of a rank are at the same location, if several: `2–5 of these at once`."""
    if not node.counts:
        return ""
    most = max(node.counts.values())
    least = min(node.counts.values()) if len(node.counts) == len(node.here) else 1
    return f"{most if least == most else f'{least}–{most}'} of these at once"


def times_of(node: FrameNode) -> str:
    """Format the depth of a recursion: `×12`, or `×3–40` if ranks differ; '' if there is none."""
    least, most = node.times
    if most == 1:
        return ""
    return f"×{most}" if least == most else f"×{least}–{most}"


def short_path(frame: StackFrame) -> str:
    """Return the path of a library file, starting at its package: `torch/nn/modules/module.py:1751`."""
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
    """Return whether two neighbours need separate lines. Native code takes one line, whatever libraries it is in."""
    native = one.place.kind == NATIVE
    return native != (other.place.kind == NATIVE) or (not native and _package(one) != _package(other))


def _library(group: Sequence[FrameNode]) -> DisplayLine:
    # Function names that py-spy could not find are not informative.
    named = [node for node in group if node.frame.place.name != "?"] or list(group[-1:])
    frame = named[-1].frame
    native = frame.place.kind == NATIVE
    names = [_called(node, node is named[-1]) for node in named]
    shown = _shortened_names(names, _MOST_NATIVE if native else _MOST_NAMES)
    gap = next((f"… {node.frame.left_out} frames … " for node in group if node.frame.left_out), "")
    head = "» native" if native else f"· {_package(frame)}"
    return DisplayLine(tuple(group), f"{head}: {gap}{' › '.join(shown)}  ({short_path(frame)})")


def _shortened_names(names: list[str], most: int) -> list[str]:
    """Shorten a chain of calls to its beginning and its end. The end matters most."""
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
    """Format a C++ function without parameters, template arguments and outer namespaces: `Engine::execute`."""
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
