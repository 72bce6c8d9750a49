"""Draw small charts as SVG inside HTML: numbers over ranks, numbers over time, and distributions.

They need no scripts, so they work in saved notebooks. Lines and text take the colour of the page. Outliers are marked
by shape (a ring, a thick line) as well as by colour.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from monarch_kernel.display import tables

#: The size of a chart, in pixels.
WIDTH, HEIGHT = 420, 96
#: The maximum number of ranks with separate marks. With more ranks, the range of neighbours is drawn.
_MOST_MARKS = 210
#: The maximum number of ranks with separate lines. With more ranks, their range and the outliers are drawn.
_MOST_LINES = 8
#: The maximum number of outliers whose numbers are shown beside their marks.
_MOST_NAMED = 3
_LINE, _STANDS_OUT = tables.CHART_LINE, tables.CHART_OUTLIER
_TOP, _BOTTOM, _LEFT, _RIGHT = 8, 14, 58, 8


def figure(number: float) -> str:
    """Format a number with as many digits as a reader can take in at a glance: `0.0123`, `1,234`, `1.2e+09`, `nan`."""
    if not math.isfinite(number):
        return str(number)
    if number == int(number) and abs(number) < 1e7:
        return f"{int(number):,}"
    return f"{number:.4g}"


def over_ranks(numbers: Mapping[int, float], marked: Collection[int] = ()) -> str:
    """Draw numbers over ranks, as marks in a row. The median is a line.

    Args:
        numbers: the numbers by rank; those that are not finite are drawn as crosses at the bottom.
        marked: the outliers.
    """
    finite = {rank: number for rank, number in numbers.items() if math.isfinite(number)}
    if not finite:
        return ""
    # Outliers are drawn at the edge, with their numbers, so that they do not flatten all others.
    usual = [number for rank, number in finite.items() if rank not in marked] or list(finite.values())
    frame = _Frame(min(numbers), max(numbers), min(usual), max(usual))
    parts = [frame.axes(f"rank {min(numbers)}", f"rank {max(numbers)}")]
    middle = frame.y(statistics.median(finite.values()))
    parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{middle}" y2="{middle}" {_faint("3 3")}/>')
    if len(finite) <= _MOST_MARKS:
        parts += [_dot(frame.x(rank), frame.y(number), rank, number) for rank, number in finite.items()]
    else:
        parts.append(_ranges(frame, finite))
    named = sorted(marked)[:_MOST_NAMED]
    for rank in sorted(marked):
        if rank in finite:
            parts.append(_ring(frame.x(rank), frame.y(finite[rank]), rank, finite[rank]))
            if rank in named:
                parts.append(_beside(frame, rank, finite[rank]))
        elif rank in numbers:
            parts.append(_cross(frame.x(rank), rank, numbers[rank]))
    return _svg(parts, f"{len(numbers)} ranks, from {figure(min(finite.values()))} to {figure(max(finite.values()))}")


def over_time(
    series: Mapping[int, Sequence[tuple[float, float]]], marked: Collection[int] = (), height: int = 160
) -> str:
    """Draw numbers of ranks over time, as lines; for many ranks, their range with the median and the outliers.

    Args:
        series: for each rank, times (seconds) and numbers, ordered by time. A number that is not finite is a gap.
        marked: the outliers.
    """
    stretches = {rank: _stretches(each) for rank, each in series.items()}
    points = [point for each in stretches.values() for stretch in each for point in stretch]
    if not points:
        return ""
    times, numbers = [time for time, _ in points], [number for _, number in points]
    frame = _Frame(min(times), max(times), min(numbers), max(numbers), height)
    parts = [frame.axes("0 s", f"{max(times) - min(times):.3g} s")]
    many = len(series) > _MOST_LINES
    if many:
        usual = [point for rank, each in stretches.items() if rank not in marked for part in each for point in part]
        parts += _band(frame, usual)
    for rank, each in stretches.items():
        out = rank in marked
        if many and not out:
            continue
        colour = _STANDS_OUT if out else _LINE
        stroke = f'fill="none" stroke="{colour}" stroke-width="{2.2 if out else 1.2}" stroke-linecap="round"'
        for stretch in each:
            # A single point between gaps is a dot: a line to its own position.
            path = " ".join(f"{frame.x(time)},{frame.y(number)}" for time, number in [stretch[0], *stretch])
            parts.append(f'<polyline points="{path}" {stroke}><title>rank {rank}</title></polyline>')
        if out and math.isfinite(series[rank][-1][1]):
            parts.append(_ring(frame.x(each[-1][-1][0]), frame.y(each[-1][-1][1]), rank, each[-1][-1][1]))
    return _svg(parts, f"{len(series)} ranks, {len(points)} numbers", height)


def histogram(counts: Sequence[int], low: float, high: float) -> str:
    """Draw a distribution, as bars.

    Args:
        counts: how many elements are in each of these equal parts of the range.
        low, high: the ends of the range.
    """
    most = max(counts, default=0)
    if not most:
        return ""
    width, height, base = 132, 34, 22
    step = width / len(counts)
    bars = "".join(
        f'<rect x="{at * step:.1f}" y="{base - max(1.0, base * count / most):.1f}" width="{max(1.0, step - 1):.1f}" '
        f'height="{max(1.0, base * count / most):.1f}" fill="{_LINE}"><title>{count:,}</title></rect>'
        for at, count in enumerate(counts)
        if count
    )
    ends = (
        f'<text x="0" y="{height - 2}" {_text()}>{figure(low)}</text>'
        f'<text x="{width}" y="{height - 2}" text-anchor="end" {_text()}>{figure(high)}</text>'
    )
    label = f"a histogram from {figure(low)} to {figure(high)}"
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{bars}{ends}</svg>"
    )


class _Frame:
    """The mapping of numbers to positions in a chart."""

    def __init__(self, first: float, last: float, low: float, high: float, height: int = HEIGHT) -> None:
        self._first, self._last = first, last if last > first else first + 1
        self._low, self._high = low, high
        if high <= low:  # draw a flat line in the middle
            room = abs(low) * 0.01 or 1.0
            self._low, self._high = low - room, high + room
        self._flat = high <= low
        self._height = height

    def x(self, at: float) -> float:
        """Return the position of a rank or time from the left."""
        return round(_LEFT + (at - self._first) / (self._last - self._first) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, number: float) -> float:
        """Return the position of a number from the top."""
        room = self._height - _TOP - _BOTTOM
        share = (self._high - number) / (self._high - self._low)
        return round(_TOP + min(1.0, max(0.0, share)) * room, 1)

    def axes(self, first: str, last: str) -> str:
        """Draw the lines around the chart, with the ends of both ranges."""
        bottom = self._height - _BOTTOM
        ends = [(_TOP + 7, self._high), (bottom, self._low)]
        if self._flat:
            ends = [(self.y((self._high + self._low) / 2) + 3, (self._high + self._low) / 2)]
        values = "".join(
            f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end" {_text()}>{figure(number)}</text>' for y, number in ends
        )
        return (
            f'<path d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}" fill="none" {_faint()}/>{values}'
            f'<text x="{_LEFT}" y="{self._height - 3}" {_text()}>{escape(first)}</text>'
            f'<text x="{WIDTH - _RIGHT}" y="{self._height - 3}" text-anchor="end" {_text()}>{escape(last)}</text>'
        )


def _ranges(frame: _Frame, numbers: Mapping[int, float]) -> str:
    """Draw the ranges of neighbouring ranks, one for each two pixels."""
    columns: dict[int, tuple[float, float]] = {}
    for rank, number in numbers.items():
        at = int(frame.x(rank) // 2 * 2)
        low, high = columns.get(at, (number, number))
        columns[at] = min(low, number), max(high, number)
    path = "".join(f"M{at} {frame.y(low) + 1:g}V{frame.y(high) - 1:g}" for at, (low, high) in columns.items())
    return f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="2"/>'


def _stretches(points: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split the finite numbers into runs without a gap."""
    found = groupby(points, lambda point: math.isfinite(point[1]))
    return [list(run) for finite, run in found if finite]


def _band(frame: _Frame, points: Iterable[tuple[float, float]]) -> list[str]:
    """Draw the range of all ranks at each time, and their median."""
    at_time: dict[float, list[float]] = {}
    for time, number in points:
        at_time.setdefault(time, []).append(number)
    times = sorted(at_time)
    upper = [f"{frame.x(time)},{frame.y(max(at_time[time]))}" for time in times]
    lower = [f"{frame.x(time)},{frame.y(min(at_time[time]))}" for time in reversed(times)]
    middle = [f"{frame.x(time)},{frame.y(statistics.median(at_time[time]))}" for time in times]
    return [
        f'<polygon points="{" ".join([*upper, *lower])}" fill="{_LINE}" fill-opacity=".25"/>',
        f'<polyline points="{" ".join(middle)}" fill="none" stroke="{_LINE}" stroke-width="1.6"><title>median</title>'
        "</polyline>",
    ]


def _dot(x: float, y: float, rank: int, number: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="2.2" fill="{_LINE}"><title>rank {rank}: {figure(number)}</title></circle>'


def _ring(x: float, y: float, rank: int, number: float) -> str:
    title = f"<title>rank {rank}: {figure(number)}</title>"
    return f'<circle cx="{x}" cy="{y}" r="4.5" fill="none" stroke="{_STANDS_OUT}" stroke-width="2">{title}</circle>'


def _beside(frame: _Frame, rank: int, number: float) -> str:
    """Draw the number of a rank, beside its mark."""
    x, y = frame.x(rank), frame.y(number)
    left = x > WIDTH / 2
    return (
        f'<text x="{x - 8 if left else x + 8:g}" y="{min(y + 4, HEIGHT - _BOTTOM - 2):g}" '
        f'text-anchor="{"end" if left else "start"}" {_text()}>{figure(number)}</text>'
    )


def _cross(x: float, rank: int, number: float) -> str:
    y = HEIGHT - _BOTTOM - 5
    path = f"M{x - 3} {y - 3}L{x + 3} {y + 3}M{x - 3} {y + 3}L{x + 3} {y - 3}"
    return f'<path d="{path}" stroke="{_STANDS_OUT}" stroke-width="2"><title>rank {rank}: {number}</title></path>'


def _faint(dashes: str = "") -> str:
    return f'stroke="currentColor" stroke-opacity=".35"{f" stroke-dasharray={chr(34)}{dashes}{chr(34)}" * bool(dashes)}'


def _text() -> str:
    return 'font-size="10" fill="currentColor" fill-opacity=".75"'


def _svg(parts: Sequence[str], label: str, height: int = HEIGHT) -> str:
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label, quote=True)}" style="max-width:100%;display:block;{tables.FONT}">'
        f"{''.join(parts)}</svg>"
    )
