"""Claims that ranks make about a step, their verdicts, and the exchange of claims through the job's store.

A rank cannot see by itself that its copy of a weight differs. So each rank describes what it has as claims: "this value
must be equal on ranks 0 to 3". Rank 0 reads the claims of all ranks and compares them. Claims travel through a
connection of their own to the store of `torch.distributed`, on a thread of their own. So no collective of the program
is added, delayed or moved, and a rank that is slow or dead delays nobody: what is missing at the deadline is reported
as not compared.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: How long rank 0 waits for the claims of other ranks (seconds).
DEADLINE = 30.0

#: `Claim.given` of a parameter all of whose elements were equal before the step, as zeros and ones are at the start.
CONSTANT = "constant"

_SLICE = 0.5  # seconds that a wait blocks at most, so that an end is noticed
_PREFIX = "monarch_kernel/rules"


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that a step broke.

    Attributes:
        rule: its name.
        step: the index of the step.
        ranks: the ranks at which it broke, or which differ from the others.
        names: the parameters, buffers or modules concerned; empty if there are none.
        message: what is wrong.
        line: the line of user code of that step, such as "train.py:42".
        sure: False if another explanation is possible, which the message gives.
    """

    rule: str
    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    message: str
    line: str = ""
    sure: bool = True

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        at = f" ({self.line})" if self.line else ""
        what = "broken" if self.sure else "possibly broken"
        return f"Rule {self.rule} {what} at step {self.step}, {ranks}{at}: {self.message}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BrokenRule:
        """Read what `dataclasses.asdict` returned."""
        return cls(**{**data, "ranks": tuple(data["ranks"]), "names": tuple(data["names"])})


@dataclass(frozen=True, slots=True)
class Claim:
    """A value of one rank, and how it must relate to those of other ranks with the same rule and name.

    Attributes:
        rule: the rule that claims it.
        name: of the parameter, buffer, module or input.
        value: the value, usually a hash.
        kind: "equal" or "different": what values of two ranks must be.
        ranks: the ranks among which it holds; None if they are not known, for parameters (see `Judge`).
        given: ranks are compared only if this is equal ("equal") or differs ("different"); "" compares all.
        what: the noun of the value in a message, such as "values" or "dropout masks".
        why: why it must hold, such as "DistributedDataParallel replicates it".
        line: the line of user code.
        before: the value before the step, of a parameter that the step trained; otherwise "".
        sure: whether it certainly must hold.
        twice: whether it counts only if two checks in succession break it.
    """

    rule: str
    name: str
    value: str
    kind: Literal["equal", "different"] = "equal"
    ranks: tuple[int, ...] | None = None
    given: str = ""
    what: str = "values"
    why: str = ""
    line: str = ""
    before: str = ""
    sure: bool = True
    twice: bool = False


@dataclass(slots=True)
class _Breach:
    """Claims of one rule that break in the same way, with the ranks and names concerned."""

    ranks: tuple[int, ...]
    claim: Claim
    names: list[str] = field(default_factory=list[str])


class Judge:
    """Compares the claims of all ranks, step after step. Pure: no clock, no store.

    Parameters whose replicas are not known (`ranks` is None) are replicas as soon as ranks had equal values, trained
    them, and had equal values again. Until then, equal values before the first step that part in it are reported as
    possibly broken, because layers of the same seed start equal, too.
    """

    def __init__(self) -> None:
        self._equal: dict[tuple[str, str], dict[int, str]] = {}  # (rule, name) -> values after the previous step
        self._replicas: dict[tuple[str, str], set[frozenset[int]]] = {}
        self._reported: set[tuple[str, str, str]] = set()
        self._once: set[tuple[str, str]] = set()  # broken claims that count from the second time on
        self._first = True

    def judge(self, step: int, claims: dict[int, Sequence[Claim]]) -> list[BrokenRule]:
        """Return the rules that a step broke, each rule and name once in a run.

        Args:
            step: its index.
            claims: the claims of the ranks that have reported it.
        """
        named: dict[tuple[str, str, str], dict[int, Claim]] = {}
        for rank, each in claims.items():
            for claim in each:
                named.setdefault((claim.rule, claim.name, claim.kind), {})[rank] = claim
        broken: dict[tuple[Any, ...], _Breach] = {}
        once: set[tuple[str, str]] = set()
        for (rule, name, kind), of in named.items():
            key = (rule, name)
            for odd, claim in self._differing(key, of) if kind == "equal" else self._repeated(of):
                if claim.twice and key not in self._once:
                    once.add(key)
                    continue
                if (rule, name, kind) in self._reported:
                    continue
                self._reported.add((rule, name, kind))
                same = (rule, kind, odd, claim.sure, claim.why)
                broken.setdefault(same, _Breach(odd, claim)).names.append(name)
        self._once = once
        self._first = False
        return [self._verdict(step, breach, claims) for breach in broken.values()]

    def _differing(self, key: tuple[str, str], of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        groups: dict[tuple[tuple[int, ...], str], dict[int, Claim]] = {}
        unknown: dict[int, Claim] = {}
        for rank, claim in of.items():
            if claim.ranks is None:
                unknown[rank] = claim
            else:
                groups.setdefault((claim.ranks, claim.given), {})[rank] = claim
        for (ranks, _), found in groups.items():
            inside = {rank: claim for rank, claim in found.items() if rank in ranks}
            if len({claim.value for claim in inside.values()}) > 1:
                odd = _odd({rank: claim.value for rank, claim in inside.items()})
                yield odd, inside[odd[0]]
                return
        yield from self._learned(key, unknown)

    def _learned(self, key: tuple[str, str], of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        values = {rank: claim.value for rank, claim in of.items()}
        previous, known = self._equal.get(key, {}), self._replicas.setdefault(key, set())
        self._equal[key] = values
        for ranks in list(known):
            inside = {rank: values[rank] for rank in ranks if rank in values}
            if len(set(inside.values())) > 1:
                known.discard(ranks)
                odd = _odd(inside)
                why = "it was equal on these ranks at earlier steps, while it was trained"
                yield odd, _because(of[odd[0]], why, sure=True)
                return
        for ranks in _alike(values):
            earlier = {previous.get(rank) for rank in ranks}
            if (
                len(earlier) == 1
                and earlier.isdisjoint((None, values[min(ranks)]))
                and all(of[r].before for r in ranks)
            ):
                known.add(ranks)
        if self._first:
            random = {rank: claim.before for rank, claim in of.items() if claim.before and claim.given != CONSTANT}
            for ranks in _alike(random):
                inside = {rank: values[rank] for rank in ranks}
                if len(set(inside.values())) > 1:
                    odd = _odd(inside)
                    why = (
                        "it was equal on these ranks before this step. Either it is replicated and its gradient is "
                        "not reduced, or it is sharded and its parts started from equal random numbers; "
                        "placements={...} tells which"
                    )
                    yield odd, _because(of[odd[0]], why, sure=False)
                    return

    def _repeated(self, of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        seen: dict[str, list[int]] = {}
        for rank, claim in sorted(of.items()):
            seen.setdefault(claim.value, []).append(rank)
        for ranks in seen.values():
            first = of[ranks[0]]
            found = [
                rank
                for rank in ranks
                if rank in (first.ranks or ())
                and (not first.given or rank == ranks[0] or of[rank].given != first.given)
            ]
            if len(found) > 1:
                yield tuple(found), first
                return

    def _verdict(self, step: int, breach: _Breach, claims: dict[int, Sequence[Claim]]) -> BrokenRule:
        claim, names = breach.claim, breach.names
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if claim.kind == "equal":
            others = [rank for rank in (claim.ranks or sorted(claims)) if rank not in breach.ranks and rank in claims]
            rest = f"rank{'s' * (len(others) != 1)} {', '.join(map(str, others))}"
            text = f"{claim.what} of {shown} differ from those of {rest}"
        else:
            text = f"{claim.what} of {shown} are equal on these ranks" if shown else f"{claim.what} are equal"
        why = f"; {claim.why}" if claim.why else ""
        return BrokenRule(claim.rule, step, breach.ranks, tuple(names), f"{text}{why}", claim.line, claim.sure)


def _because(claim: Claim, why: str, sure: bool) -> Claim:
    return Claim(claim.rule, claim.name, claim.value, claim.kind, what=claim.what, why=why, line=claim.line, sure=sure)


def _alike(values: dict[int, str]) -> list[frozenset[int]]:
    """Return the sets of two or more ranks that have the same value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return [frozenset(ranks) for ranks in found.values() if len(ranks) > 1]


def _odd(values: dict[int, str]) -> tuple[int, ...]:
    """Return the ranks that have not the value of most ranks, or of the lowest rank if there is no majority."""
    counts: dict[str, int] = {}
    for _, value in sorted(values.items()):
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=lambda value: counts[value])
    return tuple(sorted(rank for rank, value in values.items() if value != usual))


class Exchange:
    """Sends this rank's claims to rank 0, which judges them and returns the verdicts.

    Args:
        store: a store of the job, over a connection of its own; None for a process alone.
        rank, size: of this process in the job.
        session: a name that all ranks of the job choose alike, and that no earlier session had.
        report: called with each verdict, on rank 0 from the exchange's thread.
        deadline: how long to wait for other ranks (seconds).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        session: str,
        report: Callable[[BrokenRule], None],
        deadline: float = DEADLINE,
    ) -> None:
        self._store, self._rank, self._size, self._deadline = store, rank, size, deadline
        self._prefix = f"{_PREFIX}/{session}"
        self._report = report
        self._queue: queue.Queue[tuple[str, int, list[Claim]] | None] = queue.Queue()
        self._judge = Judge()
        self._silent: set[int] = set()
        self._written: list[str] = []
        self._over = threading.Event()
        self.missing: list[str] = []
        """What was not compared, and why."""
        self.compared = 0
        """The number of steps of which the claims of all ranks were compared; on rank 0."""
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._run, name="monarch_kernel rules", daemon=True)
            self._thread.start()

    def send(self, key: str, step: int, claims: list[Claim]) -> None:
        """Hand over this rank's claims about a step; returns at once.

        Args:
            key: names the step; the same on all ranks.
            step: the index of the step, for messages.
            claims: of this rank.
        """
        if self._thread is None:
            for broken in self._judge.judge(step, {self._rank: claims}):
                self._report(broken)
            self.compared += 1
            return
        self._queue.put((key, step, claims))

    def verdicts(self, key: str, seconds: float) -> list[BrokenRule] | None:
        """Wait for the verdicts on a step; None if they have not come in time."""
        if self._thread is None:
            return []
        name = f"{self._prefix}/{key}/verdicts"
        return None if (data := self._read(name, seconds)) is None else [BrokenRule.from_dict(each) for each in data]

    def end(self, seconds: float = 5.0) -> None:
        """End it, after what was sent is judged or the time is over."""
        if self._thread is None or self._over.is_set():
            return
        self._queue.put(None)
        self._thread.join(seconds)
        self._over.set()
        self._thread.join(2 * _SLICE)

    def _run(self) -> None:
        while not self._over.is_set() and (taken := self._queue.get()) is not None:
            key, step, claims = taken
            try:
                if self._rank == 0:
                    self._decide(key, step, claims)
                else:
                    data = json.dumps([asdict(claim) for claim in claims])
                    self._store.set(f"{self._prefix}/{key}/{self._rank}", data)
            except Exception as error:  # the job's store is gone, or the job ends
                self.missing.append(f"step {step}: {type(error).__name__}: {error}")
                self._over.set()

    def _decide(self, key: str, step: int, claims: list[Claim]) -> None:
        """Judge the claims of all ranks; those that have not come before the deadline are left out."""
        until = time.monotonic() + self._deadline
        reported: dict[int, Sequence[Claim]] = {0: claims}
        missing: list[int] = []
        for rank in range(1, self._size):
            # A rank that was silent before gets no more time: one dead rank must not delay the verdicts of the others.
            left = 0.0 if rank in self._silent else max(0.0, until - time.monotonic())
            data = self._read(f"{self._prefix}/{key}/{rank}", left)
            if data is None:
                missing.append(rank)
                continue
            reported[rank] = [_claim(each) for each in data]
            self._store.delete_key(f"{self._prefix}/{key}/{rank}")
        self._silent = set(missing)
        if missing:
            ranks = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
            self.missing.append(f"step {step}: {ranks} did not report within {self._deadline:g} s")
        verdicts = self._judge.judge(step, reported)
        self.compared += not missing
        self._store.set(f"{self._prefix}/{key}/verdicts", json.dumps([asdict(each) for each in verdicts]))
        self._written.append(f"{self._prefix}/{key}/verdicts")
        for old in self._written[:-2]:  # all ranks have sent claims about a later step
            self._store.delete_key(old)
        del self._written[:-2]
        for each in verdicts:
            self._report(each)

    def _read(self, name: str, seconds: float) -> Any:
        """Read a key; None if it does not come in time."""
        until = time.monotonic() + seconds
        while not self._over.is_set():
            if self._store.check([name]):
                return json.loads(self._store.get(name))
            left = min(_SLICE, until - time.monotonic())
            if left <= 0:
                return None
            try:
                self._store.wait([name], datetime.timedelta(seconds=max(left, 0.001)))
            except RuntimeError:  # not yet
                continue
        return None


def _claim(data: dict[str, Any]) -> Claim:
    ranks = data["ranks"]
    return Claim(**{**data, "ranks": None if ranks is None else tuple(ranks)})
