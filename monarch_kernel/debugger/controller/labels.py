"""Labels for sets of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from monarch_kernel.meshes import format_ranks

_MOST_RUNS = 6


def rank_label(ranks: Iterable[int]) -> str:
    """Format a set of ranks in brackets: `[0-3,7]`; for many ranks, the first runs and a count."""
    return f"[{format_ranks(ranks, limit=_MOST_RUNS)}]"
