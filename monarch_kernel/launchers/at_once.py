"""Run a blocking function for several hosts at once."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def each_at_once(most: int, work: Callable[[S], T], items: Iterable[S], name: str) -> list[T]:
    """Call a function for each item, several in parallel, and return the results in order.

    Waits for all calls, even if one fails.

    Args:
        name: the name of the threads.
    """
    found = list(items)
    if len(found) < 2:
        return [work(item) for item in found]
    with concurrent.futures.ThreadPoolExecutor(min(most, len(found)), name) as pool:
        return list(pool.map(work, found))
