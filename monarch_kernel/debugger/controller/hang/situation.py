"""Determine which ranks wait for which, from the known facts about a mesh and its pending operations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from monarch_kernel.debugger.model.evidence import WAITS, Evidence, Operation, ProcessGroup, Wait

# Find where the histories of two ranks diverge: which rank skipped a collective, added a call, or changed the order.
#
# Pure. Two calls are equal if their operations, sizes and lines of user code are equal. Ranks may correctly call the
# same collective from different lines. A difference therefore counts only if leaving out some calls makes the rest
# equal again.

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


@dataclass(slots=True)
class PendingOperation:
    """An operation of a process group in which some ranks wait.

    Attributes:
        group: the process group.
        number: the number of the operation; 0 if unknown.
        waiting: the ranks that wait in it, and how.
        entered: the ranks that have entered it, including those that wait.
        absent: the members of the group that have not entered it.
        outside: the number of members that are unknown or not ranks of this mesh.
    """

    group: ProcessGroup
    number: int
    waiting: dict[int, Wait]
    entered: set[int]
    absent: set[int]
    outside: int

    @property
    def operation(self) -> Operation:
        """The operation as one of the waiting ranks called it."""
        return next(iter(self.waiting.values())).operation


class Situation:
    """The ranks of a mesh at one moment.

    Args:
        evidence: the settled evidence of each rank of the mesh.
        mesh: the name of the mesh.

    Attributes:
        known: the ranks of the mesh, by their world and their rank in `torch.distributed`.
        pending: the operations in which ranks wait.
    """

    def __init__(self, evidence: Mapping[int, Evidence], mesh: str) -> None:
        self.evidence = dict(sorted(evidence.items()))
        self.mesh = mesh
        self.known = {(each.world, each.dist_rank): rank for rank, each in self.evidence.items() if each.dist_rank >= 0}
        self._guess_unknown()
        self.pending = self._find_pending()

    def in_state(self, *states: str) -> list[int]:
        """The ranks in any of these states, sorted."""
        return [rank for rank, each in self.evidence.items() if each.state in states]

    @property
    def waiting(self) -> list[int]:
        """The ranks that wait for other ranks, sorted."""
        return self.in_state(WAITS)

    def _guess_unknown(self) -> None:
        """Infer the `torch.distributed` rank of ranks that never answered, or have left it, from the other ranks."""
        by_world: dict[str, set[int]] = {}
        for (world, at), rank in self.known.items():
            by_world.setdefault(world, set()).add(rank - at)
        if len(by_world) != 1:
            return
        world, offsets = next(iter(by_world.items()))
        if len(offsets) != 1:
            return
        offset = offsets.pop()
        for rank, each in self.evidence.items():
            if each.dist_rank < 0:
                self.known.setdefault((world, rank - offset), rank)

    # -- operations --------------------------------------------------------------------------------

    def _find_pending(self) -> list[PendingOperation]:
        waits: dict[tuple[str, str, object], dict[int, Wait]] = {}
        for rank in self.waiting:
            each = self.evidence[rank]
            for wait in each.waits:
                if wait.kind == "collective":
                    # Without a number, ranks are known to belong together only if they are in the same operation.
                    which = "" if wait.operation.number else wait.operation.name
                    waits.setdefault((each.world, wait.operation.group, which), {}).setdefault(rank, wait)
                elif wait.kind == "group":
                    waits.setdefault((each.world, "", wait.members), {}).setdefault(rank, wait)
        return [self._pending(world, name, which, found) for (world, name, which), found in waits.items()]

    def _pending(self, world: str, name: str, which: object, found: dict[int, Wait]) -> PendingOperation:
        number = min(wait.operation.number for wait in found.values())
        any_rank = next(iter(found))
        group = self.evidence[any_rank].groups.get(name) or ProcessGroup(name)
        if not name:  # a group that is being created
            members = which if isinstance(which, tuple) and which else self._all_members(world)
            group = ProcessGroup("", "", tuple(members))
        ranks = {self.known.get((world, at)) for at in group.ranks}
        known = {rank for rank in ranks if rank is not None}
        outside = len(group.ranks) - len(known)
        unplaced = {rank for rank, each in self.evidence.items() if not each.answered} - set(self.known.values())
        if 0 < len(unplaced) == outside:  # these must be the members without a rank
            known |= unplaced
            outside = 0
        recorded = any(self.evidence[rank].at(name, wait.operation.number) is not None for rank, wait in found.items())
        entered = set(found)
        if number:
            entered |= {rank for rank in known if self._reached(rank, name, recorded) >= number}
        waiting = {rank: wait for rank, wait in found.items() if wait.operation.number == number}
        return PendingOperation(group, number, waiting, entered & known | set(found), known - entered, outside)

    def _reached(self, rank: int, group: str, recorded: bool) -> int:
        each = self.evidence[rank]
        return each.last(group) if recorded else each.counts.get(group, 0)

    def _all_members(self, world: str) -> Iterable[int]:
        return sorted(at for where, at in self.known if where == world)

    # -- which rank waits for which ----------------------------------------------------------------

    def edges(self) -> dict[int, set[int]]:
        """For each rank that waits, the ranks that it waits for."""
        edges: dict[int, set[int]] = {}
        for pending in self.pending:
            for rank in pending.waiting:
                edges.setdefault(rank, set()).update(pending.absent)
        for rank in self.waiting:
            each = self.evidence[rank]
            for wait in each.waits:
                if wait.kind in ("recv", "send") and wait.peer >= 0:
                    peer = self.known.get((each.world, wait.peer))
                    if peer is not None:
                        edges.setdefault(rank, set()).add(peer)
                elif wait.kind == "call":
                    called = {other for other, one in self.evidence.items() if one.proc and one.proc in wait.procs}
                    edges.setdefault(rank, set()).update(called - {rank})
                elif wait.kind in ("recv", "send", "work"):
                    everyone = {other for (world, _), other in self.known.items() if world == each.world}
                    edges.setdefault(rank, set()).update(everyone - {rank})
        return edges

    def ends(self, waiting: Iterable[int], edges: Mapping[int, set[int]]) -> set[int]:
        """The ranks that these wait for, directly or indirectly, and that wait for no rank themselves."""
        return {rank for rank in _reachable(waiting, edges) if self.evidence[rank].state != WAITS}

    def divergence(self, rank: int, reference: int, group: str) -> Divergence:
        """How a rank's history in a group differs from another rank's."""
        return divergence(self.evidence[rank].history.get(group, ()), self.evidence[reference].history.get(group, ()))


def _reachable(start: Iterable[int], edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(start)
    while todo:
        for rank in edges.get(todo.pop(), ()):
            if rank not in found:
                found.add(rank)
                todo.append(rank)
    return found
