"""Agreement of all ranks on a point of their program; see ``rank.common_point``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monarch_kernel.debugger.rank import common_point

#: How often a later point is proposed because a rank had reached one already.
TRIES = 6

AskRanks = Callable[..., Mapping[int, Any]]
"""Calls a function with arguments in all ranks that agree, and returns the answers of those that give one."""


#: What became of ranks that have found no point in ``TRIES`` proposals.
NO_POINT = (
    f"the ranks issue collectives faster than they agree on one that none has reached (tried {TRIES} times), so each "
    "is on its own, maybe at another step than the others"
)


def agree(ask_ranks: AskRanks, key: str, alone: Callable[[], object]) -> int | None:
    """Let ranks agree on the next point that all of them come to.

    Args:
        ask_ranks: reaches the ranks.
        key: names the point.
        alone: is called if they find none, though they exchange collectives: it is at once then, too.

    Returns:
        The number of collectives that are issued there; None if the ranks exchange none now, and it is at once.
    """
    ahead = 1
    for _ in range(TRIES):
        progress = ask_ranks(common_point.progress)
        issued = [number for number, _ in progress.values() if number is not None]
        runs = any(running for _, running in progress.values())
        if len(progress) < 2 or not issued or not runs:
            break
        at = max(issued) + ahead
        agreed = all(ask_ranks(common_point.propose, key, at).values())
        ask_ranks(common_point.decide, key, agreed)
        if agreed:
            return at
        ahead *= 4
    else:
        alone()
    ask_ranks(common_point.decide, key, True)
    return None
