"""Convert sets of ranks from and to human-readable notation: `0-3,7`, `0:8:2`, `hosts=1,gpus=[0-3,7]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from monarch_kernel.runtime.mesh.shape import Extent, unknown_dimension

# Shorter strided runs are easier to read as single ranks.
_MIN_STRIDED_RUN = 5

_Box = tuple[tuple[int, ...], ...]
"""Coordinates along each dimension; the set is their product."""


def format_ranks(ranks: Iterable[int], *, limit: int | None = None) -> str:
    """Format `[0, 1, 2, 3, 7]` as `0-3,7`, and long even strides as `0:64:8`. Sorts and removes duplicates.

    With `limit`, only that many runs are written, followed by the number of omitted ranks.
    """
    ordered = sorted(set(ranks))
    shown: list[str] = []
    left = len(ordered)
    for text, count in _runs(ordered):
        if len(shown) == limit:
            shown.append(f"… ({left} more)")
            break
        shown.append(text)
        left -= count
    return ",".join(shown)


def name_ranks(ranks: Sequence[int], *, limit: int | None = None) -> str:
    """Format ranks as `rank 3` or `ranks 0-3,7`; `limit` is as for `format_ranks`."""
    return f"rank{'s' * (len(ranks) != 1)} {format_ranks(ranks, limit=limit)}"


def format_points(ranks: Iterable[int], extent: Extent, *, limit: int | None = None) -> str:
    """Format the coordinates of `ranks` in a mesh, e.g. `hosts=1,gpus=[0-3,7]`. Boxes are separated by `; `.

    The result is empty for a mesh without dimensions. With `limit`, at most that many boxes, and runs in each, are
    written.
    """
    ordered = sorted(set(ranks))
    if not extent.names or not ordered:
        return ""
    boxes = _boxes(ordered, extent.shape)
    single = len(extent.names) == 1
    shown: list[str] = []
    for box in boxes[:limit]:
        parts: list[str] = []
        for label, coords in zip(extent.names, box, strict=True):
            text = format_ranks(coords, limit=limit)
            parts.append(f"{label}={text}" if single or "," not in text else f"{label}=[{text}]")
        shown.append(",".join(parts))
    if len(shown) < len(boxes):
        left = sum(_volume(box) for box in boxes[len(shown) :])
        shown.append(f"… ({left} more)")
    return "; ".join(shown)


def parse_ranks(text: str, extent: Extent) -> tuple[int, ...]:
    """Parse a set of ranks of a mesh. Return the ranks, sorted.

    Accepts ranks and ranges (`0-3,7`), Python slices (`0:8:2`), `*` for all, the same for single dimensions
    (`gpus=0:2`, `hosts=1,gpus=0-3`), and several of these separated by `;`.

    Raises:
        ValueError: the text is invalid, or the mesh does not have these ranks. The message is one sentence.
    """
    if not text.strip():
        raise ValueError("no ranks given; write e.g. 0-3,7 or * for all")
    found: set[int] = set()
    for part in text.split(";"):
        if "=" in part:
            found.update(_parse_points(part, extent))
        else:
            found.update(_parse_set(part, extent.nelements, "rank"))
    return tuple(sorted(found))


def _runs(ordered: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield runs of equally spaced ranks, each with its length."""
    at = 0
    while at < len(ordered):
        end = at + 1
        step = ordered[end] - ordered[at] if end < len(ordered) else 1
        while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
            end += 1
        count = end - at
        if step == 1 and count > 1:
            yield f"{ordered[at]}-{ordered[end - 1]}", count
        elif count >= _MIN_STRIDED_RUN:
            yield f"{ordered[at]}:{ordered[end - 1] + 1}:{step}", count
        else:
            end, count = at + 1, 1
            yield str(ordered[at]), count
        at = end


def _boxes(ordered: Sequence[int], sizes: Sequence[int]) -> list[_Box]:
    """Split sorted ranks into products of coordinates, merging equal rows."""
    if len(sizes) == 1:
        return [(tuple(ordered),)]
    inner = 1
    for size in sizes[1:]:
        inner *= size
    rows: dict[int, list[int]] = {}
    for rank in ordered:
        rows.setdefault(rank // inner, []).append(rank % inner)
    alike: dict[tuple[int, ...], list[int]] = {}
    for coordinate, rest in rows.items():
        alike.setdefault(tuple(rest), []).append(coordinate)
    return [(tuple(coordinates), *box) for rest, coordinates in alike.items() for box in _boxes(rest, sizes[1:])]


def _volume(box: _Box) -> int:
    volume = 1
    for coords in box:
        volume *= len(coords)
    return volume


def _parse_points(text: str, extent: Extent) -> list[int]:
    chosen: dict[str, str] = {}
    label = ""
    for token in text.split(","):
        name, equals, rest = token.partition("=")
        if equals:
            label = name.strip()
            if label not in extent:
                raise ValueError(str(unknown_dimension(label, extent.names)))
            if label in chosen:
                raise ValueError(f"dimension {label!r} is named twice in {text.strip()!r}")
            chosen[label] = rest
        elif label:
            chosen[label] += "," + token  # a comma inside one dimension's set
        else:
            raise ValueError(
                f"{token.strip()!r} in {text.strip()!r} does not belong to a dimension; write dim={token.strip()}"
            )
    ranks = [0]
    for name, size, stride in zip(extent.names, extent.shape, extent.strides, strict=True):
        coords = _parse_set(chosen[name], size, name) if name in chosen else range(size)
        ranks = [rank + at * stride for rank in ranks for at in coords]
    return ranks


_RANGE = r"(\d+)(?:-(\d+))?"
_SLICE = r"(-?\d+)?:(-?\d+)?(?::(\d+)?)?"


def _parse_set(text: str, size: int, what: str) -> list[int]:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    found: set[int] = set()
    for item in (token.strip() for token in text.split(",")):
        if item in ("*", "all"):
            found.update(range(size))
        elif match := re.fullmatch(_RANGE, item):
            first = int(match[1])
            last = int(match[2]) if match[2] else first
            if last < first:
                raise ValueError(f"{what} range {item!r} ends before it begins")
            if last >= size:
                raise ValueError(f"{what} {item!r} is out of range: there are {size} (0 to {size - 1})")
            found.update(range(first, last + 1))
        elif match := re.fullmatch(_SLICE, item):
            start, stop, step = (int(group) if group else None for group in match.groups())
            if step == 0:
                raise ValueError(f"{what} slice {item!r} must have a positive step")
            chosen = range(size)[start:stop:step]
            if not chosen:
                raise ValueError(f"{what} slice {item!r} selects nothing: there are {size} (0 to {size - 1})")
            found.update(chosen)
        else:
            raise ValueError(f"cannot read {item!r} as a {what} set; write e.g. 0-3,7 or 0:8:2 or *")
    return sorted(found)


def shrunk(extent: Extent, ranks: Sequence[int]) -> Extent:
    """Return the shape of these ranks (ascending): their extent's dimensions for a grid, else one dimension."""
    points = [extent.point(rank) for rank in ranks]
    kept = [sorted({point[label] for point in points}) for label in extent.names]
    grid = Extent(extent.names, [len(values) for values in kept])
    return grid if grid.nelements == len(ranks) else Extent(("ranks",), (len(ranks),))
