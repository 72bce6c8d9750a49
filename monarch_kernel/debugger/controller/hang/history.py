"""Find where the histories of two ranks diverge: which rank skipped a collective, added a call, or changed the order.

Pure. Two calls are equal if their operations, sizes and lines of user code are equal. Ranks may correctly call the same
collective from different lines. A difference therefore counts only if leaving out some calls makes the rest equal
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from monarch_kernel.debugger.model.evidence import Operation

SAME, SKIPPED, EXTRA, REORDERED, UNCLEAR = "same", "skipped", "extra", "reordered", "unclear"

#: At most this many consecutive calls are considered skipped or added.
_MOST = 8
#: A pattern that was repeated this many times is a habit.
_HABIT = 2


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a rank's history differs from another rank's, and from which call on.

    Attributes:
        kind: `SKIPPED`: it skipped `calls` (of the other rank); `EXTRA`: it made `calls` in addition; `REORDERED`: it
            made `calls` in another order; `SAME`: there is no difference in the common part; `UNCLEAR`: anything else.
        calls: the calls in question.
    """

    kind: str
    calls: tuple[Operation, ...] = ()


def divergence(mine: Sequence[Operation], reference: Sequence[Operation]) -> Divergence:
    """Compare `mine` with `reference` by number; calls that only one of them still records are ignored."""
    if not mine or not reference:
        return Divergence(SAME)
    start = max(mine[0].number, reference[0].number)
    our_calls = [call for call in mine if call.number >= start]
    their_calls = [call for call in reference if call.number >= start]
    ours = [_key(call) for call in our_calls]
    theirs = [_key(call) for call in their_calls]
    common = min(len(ours), len(theirs))
    first = next((k for k in range(common) if ours[k] != theirs[k]), common)
    if first == common:
        return Divergence(SAME)
    for count in range(1, _MOST + 1):
        if _same(ours[first:], theirs[first + count :]):
            return Divergence(SKIPPED, tuple(their_calls[first : first + count]))
        if _same(ours[first + count :], theirs[first:]):
            return Divergence(EXTRA, tuple(our_calls[first : first + count]))
        window = slice(first, first + count + 1)
        swapped = Counter(ours[window]) == Counter(theirs[window])
        if swapped and ours[first + count + 1 : common] == theirs[first + count + 1 : common]:
            return Divergence(REORDERED, tuple(our_calls[window]))
    return Divergence(UNCLEAR)


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two histories are equal in their common part, and this part is not empty."""
    common = min(len(one), len(other))
    return common > 0 and list(one[:common]) == list(other[:common])


def _key(call: Operation) -> tuple[object, ...]:
    place = None if call.place is None else (call.place.file, call.place.line)
    return call.op, call.shapes, call.dtypes, place


def breaks_habit(earlier: Sequence[Operation], mine: Operation, other: Operation) -> bool:
    """Whether `mine`, called where another rank called `other`, breaks the pattern of earlier calls of both.

    It does if their last call was always followed by `other`, at least twice, and `other` by `mine`: then `mine` comes
    too early, in a loop. A line that was never reached before proves nothing: this rank may have left the loop
    correctly, and the other rank may not have.

    Args:
        earlier: the calls that both have made before, oldest first.
        mine: the call of this rank.
        other: the call of the other rank.
    """
    keys = [_key(call) for call in earlier]
    if not keys or _key(mine) == _key(other):
        return False
    after_last = [after for before, after in pairwise(keys) if before == keys[-1]]
    after_other = [after for before, after in pairwise(keys) if before == _key(other)]
    return len(after_last) >= _HABIT and set(after_last) == {_key(other)} and set(after_other) == {_key(mine)}


def starts_apart(mine: Sequence[Operation], reference: Sequence[Operation]) -> bool:
    """Whether two histories already differ at the first call that both still record: they diverged earlier."""
    if not mine or not reference:
        return False
    start = max(mine[0].number, reference[0].number)
    ours = next((call for call in mine if call.number == start), None)
    theirs = next((call for call in reference if call.number == start), None)
    return start > 1 and ours is not None and theirs is not None and _key(ours) != _key(theirs)
