"""Format durations, sizes and lists of names."""

from __future__ import annotations

import linecache
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

# Find the outliers among many numbers.

#: A number stands out if its distance from the median is this many times the median distance.
OUTLIER = 6.0
#: Among fewer numbers than this, none stands out.
_FEWEST = 4


def outliers(numbers: Mapping[int, float]) -> list[int]:
    """Return the keys of outliers, sorted: numbers far from the median, or not finite while most others are.

    At most a quarter of the numbers are outliers. A larger share is another group, and not an exception.
    """
    if len(numbers) < _FEWEST:
        return []
    finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
    found = [key for key in numbers if key not in finite]
    if finite:
        middle = statistics.median(finite.values())
        gaps = {key: abs(number - middle) for key, number in finite.items()}
        spread = statistics.median(gaps.values())
        # If most numbers are equal, rounding must not make the others outliers.
        least = max(OUTLIER * spread, 1e-9 * abs(middle))
        found += [key for key, gap in gaps.items() if gap > least]
    return sorted(found) if len(found) * 4 <= len(numbers) else []


# Name files in views of a controller, with the front end's labels: `Cell In[3]` for the file of a cell.

_label: Callable[[str], str | None] = lambda _file: None  # noqa: E731  # until there is a front end


def use_label(label: Callable[[str], str | None] | None) -> None:
    """Set the function that labels files, for a front end. None: files keep their own names."""
    global _label
    _label = label or (lambda _file: None)


def label_of(file: str) -> str | None:
    """Return `Cell In[3]` for the file of a cell; None for another file."""
    return _label(file)


def shown_location(file: str, line: int) -> str:
    """Format a location: `Cell In[3]:2`, `train.py:12`."""
    return f"{_label(file) or os.path.basename(file) or file}:{line}"


def source_line(file: str, line: int, width: int | None = None) -> str:
    """Return a line of source without its indentation, cut to `width` characters; "" if it is unknown.

    Cells are found through `linecache`, like in tracebacks.
    """
    text = linecache.getline(file, line).strip() if line > 0 else ""
    return text if width is None or len(text) <= width else f"{text[: width - 1]}…"


def duration(seconds: float) -> str:
    """Format a duration: `8 ms`, `0.2 s`, `14 s`, `3 min 5 s`, `2 h 10 min`."""
    if 0 < seconds < 0.1:
        return f"{max(1, round(seconds * 1e3))} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def memory(size: int) -> str:
    """Format the size of a process: `12 MB`, `1.4 GB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def text_size(size: int) -> str:
    """Format the size of a text: `120 bytes`, `14 kB`, `1.4 MB`, `2.5 GB`."""
    if size < 1_000:
        return f"{size} byte{'s' * (size != 1)}"
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def few(names: Sequence[str], limit: int = 4) -> str:
    """List some of these names, and how many more there are: ``node1, node2 and 14 more``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")
