"""Word verdicts: every phrase and sentence of them. This module decides nothing. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from monarch_kernel.debugger.controller.hang.verdict import SHAPE, VerdictRow, listed
from monarch_kernel.debugger.model.evidence import (
    DEAD,
    IDLE,
    LATE,
    LOADS,
    PAUSED,
    RUNS,
    SILENT,
    STANDS,
    UNASKED,
    UNREAD,
    UNSEEN_GROUP,
    WAITS,
    Evidence,
    Operation,
    ProcessGroup,
    Wait,
)
from monarch_kernel.debugger.rank.hang import SECOND
from monarch_kernel.debugger.source_locations import SourceLocation

# Determine which ranks wait for which, from the known facts about a mesh and its pending operations. Pure.

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


#: Names of the group of all ranks.
_DEFAULT = ("0", "default_pg")

_PLURAL = {"is": "are", "has": "have", "does": "do", "was": "were", "waits": "wait", "makes": "make"}
_VERB = re.compile(rf"(?:^|(?<= and )|(?<=, or ))(?:{'|'.join(_PLURAL)})\b")
_IT = re.compile(rf"(?<=: |; )it ({'|'.join(_PLURAL)})\b")


# -- parts of sentences ----------------------------------------------------------------------------


def ranks(chosen: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    known = sorted(chosen)
    return f"rank{'s' * (len(known) != 1)} {listed(known)}"


def doing(chosen: Iterable[int], what: str) -> str:
    """`rank 3 is dead`, `ranks 0-2 are dead`; `what` is a verb phrase about one rank."""
    known = sorted(chosen)
    if len(known) != 1:
        what = _VERB.sub(lambda found: _PLURAL[found[0]], what)
        what = _IT.sub(lambda found: f"they {_PLURAL[found[1]]}", what)
    return f"{ranks(known)} {what}"


def states(evidence: Mapping[int, Evidence], chosen: Iterable[int]) -> str:
    """Describe what these ranks are doing. Ranks that do the same are merged."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(chosen):
        alike.setdefault(state(evidence[rank]), []).append(rank)
    return series([doing(some, what) for what, some in alike.items()])


def capital(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


def series(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def at(place: SourceLocation | None) -> str:
    """` at train.py:12`, or "" if the place is unknown."""
    return f" at {place.where()}" if place is not None else ""


def group(which: ProcessGroup) -> str:
    """The name of a process group in a sentence."""
    if not which.name:
        return "a process group that is being made"
    if which.name == UNSEEN_GROUP:
        return "a group that is unknown"
    if which.desc:
        return f"group {which.desc}"
    name, over, backend = which.name.partition(SECOND)
    return ("the default group" if name in _DEFAULT else f"group {name}") + over + backend


def size(which: Operation) -> str:
    """`5 elements of Float`."""
    kinds = "/".join(dict.fromkeys(which.dtypes))
    return f"{which.elements} element{'s' * (which.elements != 1)}{f' of {kinds}' if kinds else ''}"


def called(which: Operation, kind: str = "", root: int = -1) -> str:
    """`called all_reduce with 7 elements of Float at train.py:12`; the sizes only for a verdict about them."""
    more = f" with {size(which)}" if kind == SHAPE else f" for rank {root}" if root >= 0 else ""
    return f"called {which.name or which.op}{more}{at(which.place)}"


def skipped(calls: Sequence[Operation]) -> str:
    """`skipped all_reduce #7 at train.py:12`."""
    first = calls[0]
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"skipped {first.name or first.op} #{first.number}{at(first.place)}{more}"


def diverged(found: Divergence) -> str:
    """Describe how a rank's history differs from that of the others."""
    if found.kind == SKIPPED:
        return skipped(found.calls)
    first = found.calls[0]
    return f"called {first.name or first.op} #{first.number}{at(first.place)}, which no other rank called"


def skipped_and_is(calls: Sequence[Operation], each: Evidence) -> str:
    """Describe a rank that skipped calls, and its current activity."""
    return f"{skipped(calls)} and {state(each)}"


def not_entered(each: Evidence) -> str:
    """Describe a rank that may still arrive."""
    return f"has not entered it: it {state(each)}"


def never_entered(each: Evidence) -> str:
    """Describe a rank that will no longer arrive."""
    return f"never entered it and {state(each)}"


def called_alone(which: Operation) -> str:
    """Describe a call that only these ranks made."""
    return f"{called(which)}, which no other rank called"


def instead_of(found: Divergence, what: str) -> str:
    """Describe an earlier action of a rank, and the call that followed from it."""
    return f"{diverged(found)}, so that it {what}"


def waits_in(pending: PendingOperation) -> str:
    """`ranks 0-2 wait in all_reduce #7 of the default group at train.py:12`."""
    which = pending.operation
    number = f" #{which.number}" if which.number else ""
    of = "" if pending.group.name == UNSEEN_GROUP else f" of {group(pending.group)}"
    what = f"waits in {which.name or which.op}{number}{of}{at(which.place)}"
    return doing(pending.waiting, what)


def which_wait(now: Situation, missing: Sequence[int]) -> str:
    """Describe which ranks wait for the missing ones, and where."""
    for pending in now.pending:
        if pending.waiting:
            return waits_in(pending)
    if now.waiting:
        return states(now.evidence, now.waiting)
    return "no other rank waits for it" if len(missing) == 1 else "no other rank waits for them"


def _wait(each: Evidence, wait: Wait) -> str:
    which = wait.operation
    if wait.kind in ("recv", "send"):
        word = "from" if wait.kind == "recv" else "to"
        peer = f" {word} rank {wait.peer}" if wait.peer >= 0 else ""
        return f"waits in {which.name}{peer}{at(wait.place)}"
    if wait.kind == "work":
        return f"waits{at(wait.place)} for a send or receive that it started"
    if wait.kind == "call":
        return f"waits for an answer from {which.name}{at(wait.place)}"
    if wait.kind == "group":
        return f"waits in {which.name}{at(wait.place)}"
    number = f" #{which.number}" if which.number else ""
    of = each.groups.get(which.group)
    where = f" of {group(of)}" if of is not None and (of.desc or of.name not in (*_DEFAULT, UNSEEN_GROUP)) else ""
    started = at(which.place)
    later = f", waited for{at(wait.place)}" if at(wait.place) != started else ""
    inputs = f" ({size(which)})" if which.shapes else ""
    doing = f" in the operation {each.doing}" if each.doing else ""
    return f"waits in {which.name or which.op}{number}{where}{inputs}{doing}{started}{later}"


def state(each: Evidence) -> str:
    """Describe what a rank is doing, as a verb phrase."""
    if each.state == WAITS and each.waits:
        return _wait(each, each.waits[0])
    if each.state == IDLE:
        if each.failure is not None:
            return f"failed with {each.failure.text}{at(each.failure.place)}"
        return "is finished or idle"
    if each.state == DEAD:
        return f"is dead ({each.why})" if each.why else "is dead"
    if each.state == SILENT:
        was = f"; it was{at(each.place)}" if each.place is not None else ""
        return f"is not running ({each.why}){was}" if each.why else f"is not running{was}"
    if each.state == LATE:
        return f"does not answer ({each.why or 'cause unknown; it may hold the interpreter lock'})"
    if each.state == UNREAD:
        return f"could not be read ({each.why})"
    if each.state == UNASKED:
        return "was not asked"
    where = f"{at(each.place)}{_function(each.place)}{_doing(each)}"
    if each.state == LOADS:
        return f"is in a data loader{where}"
    if each.state == PAUSED:
        return f"is stopped in the debugger{where}"
    if each.state == STANDS:
        return f"makes no progress{where}{f' ({each.why})' if each.why else ''}"
    return f"is running{where}" if each.state in (RUNS, WAITS) else each.state


def _doing(each: Evidence) -> str:
    return f", running the operation {each.doing}" if each.doing else ""


def _function(place: SourceLocation | None) -> str:
    return f" in {place.name}" if place is not None and place.name not in ("", "<module>") else ""


# -- beside the sentence ---------------------------------------------------------------------------


def rows(evidence: Mapping[int, Evidence], blamed: set[int]) -> tuple[VerdictRow, ...]:
    """List what all ranks are doing, equal ones merged; ranks to blame come first, then the smallest set.

    A row may describe one rank or many, so its text omits "is".
    """
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, each in evidence.items():
        alike.setdefault((rank not in blamed, state(each).removeprefix("is ")), []).append(rank)
    ordered = sorted(alike.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return tuple(VerdictRow(tuple(chosen), what, evidence[chosen[0]].place) for (_, what), chosen in ordered)


def timeouts(evidence: Mapping[int, Evidence]) -> tuple[str, ...]:
    """Describe when the first process group in which ranks wait times out."""
    limits = {
        of.timeout: of
        for each in evidence.values()
        if each.state == WAITS
        for wait in each.waits
        if (of := each.groups.get(wait.operation.group)) is not None and of.timeout > 0
    }
    return tuple(f"{capital(group(of))} times out after {_minutes(limit)}." for limit, of in sorted(limits.items())[:1])


def _minutes(limit: float) -> str:
    return f"{limit / 60:g} min" if limit >= 120 else f"{limit:g} s"


# -- sentences -------------------------------------------------------------------------------------


def no_rank_waits(now: Situation) -> str:
    """No rank waits for another."""
    sentence = "No rank waits for another"
    busy = now.in_state(RUNS, STANDS, LOADS)
    late = now.in_state(LATE, UNREAD)
    if busy:
        sentence += f": {states(now.evidence, busy)}"
    if late:
        sentence += f"; {states(now.evidence, late)}"
    return f"{sentence}."


def all_entered(pending: PendingOperation) -> str:
    """All ranks wait in one operation that all of them have entered."""
    more = f", and {pending.outside} of its ranks are not in this mesh" if pending.outside else ""
    return f"Undecided: {waits_in(pending)}, which all ranks that were asked have entered alike{more}."


def waits_for_unknown(now: Situation) -> str:
    """Ranks wait, and it is unknown for which ranks."""
    return f"Undecided: {states(now.evidence, now.waiting)}, but it is not known for which ranks."


def will_not_come(now: Situation, missing: Sequence[int], of_peer: Sequence[int]) -> str:
    """Ranks that will certainly not arrive, and other ranks that failed as a result."""
    after = f"; {ranks(of_peer)} failed because of that" if of_peer else ""
    return f"{capital(states(now.evidence, missing))}; {which_wait(now, missing)}{after}."


def crashed_by_gloo(now: Situation, crashed: Sequence[int], others: Sequence[int]) -> str:
    """Processes that gloo may have aborted."""
    parts = [states(now.evidence, crashed)] + ([states(now.evidence, others)] if others else [])
    return (
        f"Undecided: {series(parts)}; gloo aborts a process that receives more than it expects, and its peers may then "
        "crash too, so one of these may have called another operation than the rest, or with other sizes."
    )


def not_known(now: Situation, unknown: Sequence[int]) -> str:
    """Ranks about which nothing is known."""
    return f"Undecided: {states(now.evidence, unknown)}; {which_wait(now, unknown)}."


def failed_of_peers(now: Situation, failed: Sequence[int]) -> str:
    """Ranks that failed only because another rank was gone."""
    return (
        f"Undecided: {states(now.evidence, failed)}, which says that another rank was gone or did not arrive, but not "
        f"which one; {which_wait(now, failed)}."
    )


def absent(pending: PendingOperation, whys: Sequence[tuple[str, Sequence[int]]]) -> str:
    """A few ranks are missing from an operation; `whys` are verb phrases with their ranks."""
    return f"{capital(waits_in(pending))}; {series([doing(chosen, why) for why, chosen in whys])}."


def called_too_much(
    now: Situation, pending: PendingOperation, absent: Sequence[int], present: Sequence[int], why: str
) -> str:
    """A few ranks are in an operation, and all others have finished without it."""
    others = f"{states(now.evidence, absent)} without it"
    return f"{capital(waits_in(pending))}, and {others}: {ranks(present)} {why}."


def one_or_other(
    now: Situation,
    pending: PendingOperation,
    absent: Sequence[int],
    present: Sequence[int],
    place: SourceLocation | None,
) -> str:
    """Neither side is a majority: one has skipped a call, or the other has made an extra one."""
    return (
        f"Undecided: {waits_in(pending)}, while {states(now.evidence, absent)}; either {ranks(absent)} skipped it or "
        f"will still come, or {ranks(present)} called one too many{at(place)}."
    )


def peers_elsewhere(now: Situation, waiting: Sequence[int], missing: Sequence[int], certain: bool) -> str:
    """Ranks that others receive from or send to are elsewhere."""
    here, there = states(now.evidence, waiting), states(now.evidence, missing)
    return f"{capital(here)}; {there}." if certain else f"Undecided: {here}, but {there}."


def no_majority(pending: PendingOperation, sides: Sequence[str]) -> str:
    """Ranks made different calls, and neither side is a clear majority."""
    where = f"for #{pending.number} of {group(pending.group)}, " if pending.number else ""
    return f"Undecided: {where}{series(sides)}; which is right cannot be told, as neither side is a clear majority."


def outvoted(pending: PendingOperation, odd: Sequence[str], majority: str, *, likely: bool, order: bool) -> str:
    """A few ranks made a different call from the majority."""
    of = group(pending.group)
    number = f" (#{pending.number} of {of})" if pending.number else f" (in {of})"
    sentence = f"{series(odd)} where {majority}{number}"
    sentence = f"Most likely {sentence}" if likely else capital(sentence)
    return f"{sentence}; the order differs, or one call is missing or extra." if order else f"{sentence}."


def in_a_cycle(now: Situation, cycle: Sequence[int]) -> str:
    """Ranks that wait for each other."""
    parts = [doing([rank], state(now.evidence[rank])) for rank in cycle]
    return f"These ranks wait for each other in a cycle: {series(parts)}."


def two_orders(few: str, many: str, decided: bool) -> str:
    """The same ranks are in two groups, and call their operations in different orders."""
    if decided:
        return f"{capital(few)} where {many}: the order of the two differs."
    return f"Undecided: {few}, and {many}; which of the two orders is right cannot be told."
