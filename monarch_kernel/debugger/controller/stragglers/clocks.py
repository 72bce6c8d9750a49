"""How far the clocks of hosts are apart, by the collectives of their ranks alone. Pure.

In a collective that synchronises, such as `all_reduce`, no rank goes on before each has come. So a rank's next call is
later than every rank's call of this one; each such pair bounds how far one host's clock can be ahead of another's, from
both sides. The bounds are narrow where ranks make calls in close succession.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from monarch_kernel.debugger.model.collective_times import CollectiveTimes, TimedCollective

#: What the names of operations contain in which each rank waits for all.
_SYNCHRONISING = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier", "all_to_all", "alltoall"),
)
#: How exact the time of a call is, between processes of one host (seconds).
EXACT = 1e-3


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of hosts, compared.

    Attributes:
        ahead: how far each clock is ahead of the first one (seconds).
        within: how exactly that is known (seconds); infinite for clocks that could not be compared.
        sentence: the same in words; "" if there is only one clock.
    """

    ahead: Mapping[str, float] = field(default_factory=dict[str, float])
    within: float = 0.0
    sentence: str = ""

    def common(self, clock: str, moment: float) -> float:
        """A moment of this clock, by the first clock."""
        return moment - self.ahead.get(clock, 0.0)


def compare_clocks(records: Iterable[CollectiveTimes]) -> Clocks:
    """How far the clocks of these ranks' hosts are apart."""
    known = [record for record in records if record.calls]
    clocks = list(dict.fromkeys(record.clock for record in known))
    if len(clocks) < 2:
        return Clocks()
    if _overtakes(known):
        return Clocks(
            within=math.inf,
            sentence="The clocks of hosts could not be compared, as the program does not wait for its collectives; "
            "moments are as these clocks tell.",
        )
    by_clock = {clock: [record for record in known if record.clock == clock] for clock in clocks}
    ahead: dict[str, float] = {clocks[0]: 0.0}
    within = 0.0
    for clock in clocks[1:]:
        low, high = -_least(by_clock[clocks[0]], by_clock[clock]), _least(by_clock[clock], by_clock[clocks[0]])
        if not (math.isfinite(low) and math.isfinite(high)) or low > high + 2 * EXACT:
            ahead[clock], within = 0.0, math.inf
        elif low <= 0 <= high:
            ahead[clock], within = 0.0, max(within, min(-low, high))
        else:
            ahead[clock], within = (low + high) / 2, max(within, abs(high - low) / 2)
    if not math.isfinite(within):
        sentence = "The clocks of hosts could not be compared by their collectives; moments are as these clocks tell."
    elif any(ahead.values()):
        apart = max(ahead.values()) - min(ahead.values())
        sentence = (
            f"The clocks of hosts are up to {apart:.3g} s apart, which is allowed for (within {within * 1e3:.3g} ms)."
        )
    else:
        sentence = f"The clocks of hosts agree, as far as their collectives tell (within {within * 1e3:.3g} ms)."
    return Clocks(ahead, within, sentence)


def _least(mine: Sequence[CollectiveTimes], others: Sequence[CollectiveTimes]) -> float:
    """The least time from a call of the others to the next call of mine after it, by clocks as they are."""
    latest: dict[tuple[str, str, int], float] = {}
    for record in others:
        for call in record.calls:
            if _synchronises(call):
                key = (record.world, call.group, call.number)
                latest[key] = max(call.entered, latest.get(key, -math.inf))
    found = math.inf
    for record in mine:
        for call, after in pairwise(record.calls):
            theirs = latest.get((record.world, call.group, call.number)) if _synchronises(call) else None
            if theirs is not None:
                found = min(found, after.entered - theirs)
    return found


def _overtakes(records: Sequence[CollectiveTimes]) -> bool:
    """Whether ranks of one clock make a call before all have come to the last one: then it was not waited for."""
    by_clock: dict[str, list[CollectiveTimes]] = {}
    for record in records:
        by_clock.setdefault(record.clock, []).append(record)
    return any(_least(same, same) < -EXACT for same in by_clock.values() if len(same) > 1)


def _synchronises(call: TimedCollective) -> bool:
    return any(word in call.op for word in _SYNCHRONISING)
