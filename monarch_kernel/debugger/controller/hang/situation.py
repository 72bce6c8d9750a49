"""Who waits for whom: ranks of a mesh, what is known of them, and in which operations they meet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.debugger.controller.hang import history, phrases
from monarch_kernel.debugger.controller.hang.verdict import Culprit, Verdict
from monarch_kernel.debugger.model.evidence import WAITS, Evidence, Operation, ProcessGroup, Wait


@dataclass(slots=True)
class PendingOperation:
    """Some ranks that wait in one operation of a group.

    Attributes:
        group: the process group.
        number: of the operation, where that is known.
        waiting: who waits there, and how.
        entered: who has entered it, those included.
        absent: the members that have not.
        outside: how many members are no ranks of this mesh, or of which nothing is known.
    """

    group: ProcessGroup
    number: int
    waiting: dict[int, Wait]
    entered: set[int]
    absent: set[int]
    outside: int

    @property
    def call(self) -> Operation:
        """The operation, as one of those who wait called it."""
        return next(iter(self.waiting.values())).call


class Situation:
    """Ranks of a mesh at one moment.

    Args:
        evidence: of each rank of the mesh, settled.
        mesh: its name.

    Attributes:
        known: the ranks of the mesh by their world and their rank in `torch.distributed`.
        meetings: the operations in which ranks wait.
    """

    def __init__(self, evidence: Mapping[int, Evidence], mesh: str) -> None:
        self.evidence = dict(sorted(evidence.items()))
        self.mesh = mesh
        self.known = {(each.world, each.dist_rank): rank for rank, each in self.evidence.items() if each.dist_rank >= 0}
        self._guess_unknown()
        self.meetings = self._meet()

    def _guess_unknown(self) -> None:
        """Ranks that never answered, or have left it, have no rank in torch.distributed; the others' tell which."""
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

    # -- who waits for whom ------------------------------------------------------------------------

    def _meet(self) -> list[PendingOperation]:
        waits: dict[tuple[str, str, object], dict[int, Wait]] = {}
        for rank, each in self.evidence.items():
            if each.state != WAITS:
                continue
            for wait in each.waits:
                if wait.kind == "collective":
                    # Those without a number can only meet those in the same operation.
                    kind = "" if wait.call.number else wait.call.name
                    waits.setdefault((each.world, wait.call.group, kind), {}).setdefault(rank, wait)
                elif wait.kind == "group":
                    waits.setdefault((each.world, "", wait.members), {}).setdefault(rank, wait)
        return [self._meeting(world, name, which, found) for (world, name, which), found in waits.items()]

    def _meeting(self, world: str, name: str, which: object, found: dict[int, Wait]) -> PendingOperation:
        number = min(wait.call.number for wait in found.values())
        any_rank = next(iter(found))
        group = self.evidence[any_rank].groups.get(name) or ProcessGroup(name)
        if not name:  # a group in the making
            members = which if isinstance(which, tuple) and which else self._everybody(world)
            group = ProcessGroup("", "", tuple(members))
        ranks = {self.known.get((world, at)) for at in group.ranks}
        known = {rank for rank in ranks if rank is not None}
        outside = len(group.ranks) - len(known)
        unplaced = {rank for rank, each in self.evidence.items() if not each.answered} - set(self.known.values())
        if 0 < len(unplaced) == outside:  # they are the only ones that the others can be
            known |= unplaced
            outside = 0
        recorded = any(self.evidence[rank].at(name, wait.call.number) is not None for rank, wait in found.items())
        entered = set(found)
        if number:
            entered |= {rank for rank in known if self._reached(rank, name, recorded) >= number}
        waiting = {rank: wait for rank, wait in found.items() if wait.call.number == number}
        return PendingOperation(group, number, waiting, entered & known | set(found), known - entered, outside)

    def _reached(self, rank: int, group: str, recorded: bool) -> int:
        each = self.evidence[rank]
        return each.last(group) if recorded else each.counts.get(group, 0)

    def _everybody(self, world: str) -> Iterable[int]:
        return sorted(at for where, at in self.known if where == world)

    def edges(self) -> dict[int, set[int]]:
        """For each rank that waits, the ranks that it waits for."""
        edges: dict[int, set[int]] = {}
        for meeting in self.meetings:
            for rank in meeting.waiting:
                edges.setdefault(rank, set()).update(meeting.absent)
        for rank, each in self.evidence.items():
            for wait in each.waits if each.state == WAITS else ():
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
        """Those that others wait for, and that wait for nobody."""
        return {rank for rank in _reachable(waiting, edges) if self.evidence[rank].state != WAITS}

    def parting(self, rank: int, reference: int, group: str) -> history.Divergence:
        """How a rank's history in a group differs from another one's."""
        return history.parting(
            self.evidence[rank].history.get(group, ()), self.evidence[reference].history.get(group, ())
        )

    def who_waits(self, missing: set[int]) -> str:
        """Who waits for these ranks, and where, in phrases."""
        for meeting in self.meetings:
            if meeting.waiting:
                return phrases.waits_in(sorted(meeting.waiting), meeting.call, meeting.group)
        waiting = [rank for rank, each in self.evidence.items() if each.state == WAITS]
        if waiting:
            return phrases.states(self.evidence, waiting)
        return "no other rank waits for it" if len(missing) == 1 else "no other rank waits for them"

    def verdict(
        self,
        kind: str,
        culprits: Sequence[Culprit],
        sentence: str,
        *,
        likely: bool = False,
        alternatives: tuple[str, ...] = (),
    ) -> Verdict:
        """A verdict, with what all ranks are doing."""
        blamed = {culprit.rank for culprit in culprits}
        rows = phrases.rows(self.evidence, blamed)
        return Verdict(
            kind, tuple(culprits), sentence, rows, likely, phrases.timeouts(self.evidence), self.mesh, alternatives
        )


def _reachable(start: Iterable[int], edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(start)
    while todo:
        for rank in edges.get(todo.pop(), ()):
            if rank not in found:
                found.add(rank)
                todo.append(rank)
    return found
