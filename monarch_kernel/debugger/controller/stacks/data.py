"""Merged stacks as JSON-compatible dictionaries, lists, strings and numbers."""

from __future__ import annotations

from typing import Any

from monarch_kernel.debugger.controller.stacks.merge import FrameNode, StackBranch
from monarch_kernel.debugger.controller.stacks.report import Stacks
from monarch_kernel.debugger.model.stacks import Stack, StackFrame


def data_of(stacks: Stacks) -> dict[str, Any]:
    """The result of `Stacks.asdict`: `tree` (nested frames with their ranks), `classes`, and the ranks in neither."""
    return {
        "mesh": stacks.mesh,
        "dimensions": dict(stacks.extent),
        "ranks": list(stacks.ranks),
        "seconds": stacks.seconds,
        "tree": [{"kind": root.kind, "name": root.name, "cells": root.cells, **_branch(root)} for root in stacks.tree],
        "classes": [
            {"ranks": list(each.ranks), "idle": each.idle, "stacks": [_stack(stack) for stack in each.stacks]}
            for each in stacks.classes
        ],
        "idle": list(stacks.idle),
        "late": stacks.late,
        "dead": stacks.dead,
        "unread": stacks.unread,
        "pids": {rank: snapshot.pid for rank, snapshot in stacks.snapshots.items()},
    }


def _branch(branch: StackBranch) -> dict[str, Any]:
    """A branch and everything below it. Not recursive, as stacks may be deep."""
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
