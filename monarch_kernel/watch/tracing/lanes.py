"""Lays spans out in lanes, so that two spans of a lane are nested or apart: what trace viewers can show. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class LaneSpan(NamedTuple):
    """A span to be placed.

    Attributes:
        start, end: when; ``end`` is not before ``start``.
        group: spans of one group nest in each other where they can; those of group 0 come first.
    """

    start: int
    end: int
    group: int


def lanes_of(spans: Sequence[LaneSpan]) -> list[int]:
    """The lane of each span, counted from 0."""
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].start, -spans[at].end)):
        groups.setdefault(spans[index].group, []).append(index)
    placed = [0] * len(spans)
    units: list[tuple[int, int, list[int]]] = []  # start, end and members of what stays in one lane
    first = 0
    for group, members in groups.items():
        nested, apart = _nest(spans, members)
        if not group:
            first = 1  # the first lane is theirs
        else:
            units.append((spans[nested[0]].start, max(spans[at].end for at in nested), nested))
        units += [(spans[at].start, spans[at].end, [at]) for at in apart]
    units.sort(key=lambda unit: unit[:2])
    busy: list[tuple[int, int]] = []  # when each lane is free again, and the lane
    free: list[int] = []
    used = first
    for start, end, members in units:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, used = used, used + 1
        for at in members:
            placed[at] = lane
        heapq.heappush(busy, (end, lane))
    return placed


def _nest(spans: Sequence[LaneSpan], members: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of a group that nest, and those that overlap others only partly; they come in order of their starts."""
    nested: list[int] = []
    apart: list[int] = []
    around: list[int] = []  # the ends of the spans around the next one
    for at in members:
        while around and around[-1] <= spans[at].start:
            around.pop()
        if around and spans[at].end > around[-1]:
            apart.append(at)
        else:
            around.append(spans[at].end)
            nested.append(at)
    return nested, apart
