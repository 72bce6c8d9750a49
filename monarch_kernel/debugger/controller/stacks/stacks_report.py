"""The result of `stacks`: the merged stacks of all ranks, which `text` and `html` render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.stacks.html import html_of
from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch, StackClass, StackRoot, merge
from monarch_kernel.debugger.controller.stacks.text import text_of
from monarch_kernel.debugger.model.stacks import Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.source_locations import Label
from monarch_kernel.display.reports import AsReport


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


def _branch(branch: StackBranch) -> dict[str, Any]:
    """Convert a branch and everything below it. Not recursive, as stacks may be deep."""
    whole: dict[str, Any] = {}
    todo: list[tuple[StackBranch, dict[str, Any]]] = [(branch, whole)]
    while todo:
        at, told = todo.pop()
        told["ranks"] = list(at.ranks)
        told["children"] = [_node(child) for child in at.children]
        todo += zip(at.children, told["children"], strict=True)
    return whole


def _node(node: FrameNode) -> dict[str, Any]:
    return {
        **_frame(node.frame),
        "times": list(node.times),
        "here": list(node.here),
        "counts": dict(node.counts),
        "states": {state: list(ranks) for state, ranks in node.states.items()},
        "values": {rank: dict(values) for rank, values in node.values.items()},
    }


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "kind": stack.kind,
        "name": stack.name,
        "state": stack.state,
        "values": dict(stack.values),
        "frames": [{**_frame(frame), "times": frame.times, "left_out": frame.left_out} for frame in stack.frames],
    }


def _frame(frame: StackFrame) -> dict[str, Any]:
    place = frame.place
    return {
        "file": place.file,
        "line": place.line,
        "name": place.name,
        "code": place.kind,
        "source": frame.source,
        "span": list(frame.span),
    }
