"""Format durations, sizes and lists of names."""

from __future__ import annotations

from collections.abc import Sequence


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
