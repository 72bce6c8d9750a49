"""Merge many stacks into one tree. Ranks with the same outer frames share a branch until they diverge. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from monarch_kernel.debugger.model.stacks import CODE, ENDPOINT, Stack, StackFrame, StackSnapshot

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
