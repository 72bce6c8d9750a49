"""Claims that ranks make about a step, their verdicts, and the exchange of claims through the job's store.

A rank cannot see by itself that its copy of a weight differs. So each rank describes what it has as claims: "this value
must be equal on ranks 0 to 3". Rank 0 reads the claims of all ranks and compares them. Claims travel through a
connection of their own to the store of `torch.distributed`, on a thread of their own. So no collective of the program
is added, delayed or moved, and a rank that is slow or dead delays nobody: what is missing at the deadline is reported
as not compared.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from monarch_kernel.display.quantities import few

#: How long rank 0 waits for the claims of other ranks (seconds).
DEADLINE = 30.0

#: `Claim.given` of a parameter all of whose elements were equal before the step, as zeros and ones are at the start.
CONSTANT = "constant"

_LAST_WORDS = 2.0  # seconds that rank 0 waits for what others saw before the end
_END = "end 0"  # the key of the last message
_JOINT = "joint"  # set once rank 0 has compared a step of all ranks
_KEPT = 50  # verdicts that are sent to the ranks with those of the next step
_SLICE = 0.5  # seconds that a wait blocks at most, so that an end is noticed
_PREFIX = "monarch_kernel/rules"


Relation = Literal["replicas", "data", "model"]


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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BrokenRule:
        """Read what `dataclasses.asdict` returned."""
        fields: dict[str, Any] = {**data, "ranks": tuple(data["ranks"]), "names": tuple(data["names"])}
        return cls(**fields)

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        at = f" ({self.line})" if self.line else ""
        what = "broken" if self.sure else "possibly broken"
        return f"Rule {self.rule} {what} at step {self.step}, {ranks}{at}: {self.message}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A value of one rank, and how it must relate to those of other ranks with the same rule and name.

    Attributes:
        rule: the rule that claims it.
        name: of the parameter, buffer, module or input.
        value: the value, usually a hash.
        kind: "equal" or "different": what values of two ranks must be. "gradient" claims nothing: the value is a hash
            of a parameter's final gradient, from which `Judge` learns which ranks train alike.
        ranks: the ranks among which it holds, or how they relate, if the rank does not know which they are:
            "replicas" hold the same parameter, "data" train the same model on different batches, "model" hold parts of
            one model.
        given: ranks are compared only if this is equal ("equal") or differs ("different"); "" compares all.
        what: the noun of the value in a message, such as "values" or "dropout masks".
        why: why it must hold, such as "DistributedDataParallel replicates it".
        line: the line of user code.
        before: the value before the step, of a parameter that the step trained, or what no other rank has if that
            value is unknown; of other parameters "".
        sure: whether it certainly must hold.
        twice: whether it counts only if two checks in succession break it.
        family: the class of the parameter's module, if modules of this class are alike in what they share.
    """

    rule: str
    name: str
    value: str
    kind: Literal["equal", "different", "gradient"] = "equal"
    ranks: tuple[int, ...] | Relation = "replicas"
    given: str = ""
    what: str = "values"
    why: str = ""
    line: str = ""
    before: str = ""
    sure: bool = True
    twice: bool = False
    family: str = ""


@dataclass(slots=True)
class _Breach:
    """Claims of one rule that break in the same way, with the ranks and names concerned."""

    ranks: tuple[int, ...]
    claim: Claim
    names: list[str] = field(default_factory=list[str])


class Judge:
    """Compares the claims of all ranks, step after step. Pure: no clock, no store.

    Which ranks hold the same parameter, where they do not know it, is learned from what they do. Final gradients are
    equal on ranks that reduce them, or that compute the same. If that holds for all parameters, these ranks train the
    same model on different batches; if for some, they hold parts of one model. Ranks whose values were equal, trained
    and equal again are replicas, too. What was equal before the first step alone, and differs after it, is reported as
    possibly broken, because layers of the same seed start equal as well.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], dict[int, str]] = {}  # (rule, name) -> values after the previous step
        self._replicas: dict[tuple[str, str], set[frozenset[int]]] = {}  # whose values stayed equal
        self._reduced: dict[str, frozenset[int]] = {}  # by name: the ranks that had equal final gradients
        self._related: dict[int, tuple[Relation, frozenset[int]]] = {}  # by rank
        self._reported: set[tuple[str, str, str]] = set()
        self._once: set[tuple[str, str]] = set()  # broken claims that count from the second time on
        self._families: dict[str, list[frozenset[int]]] = {}  # by class of a module: the groups of `_reduced`
        self._first = True

    def judge(self, step: int, claims: dict[int, Sequence[Claim]]) -> list[BrokenRule]:
        """Return the rules that a step broke, each rule and name once in a run.

        Args:
            step: its index.
            claims: the claims of the ranks that have reported it.
        """
        named: dict[tuple[str, str, str, bool], dict[int, Claim]] = {}
        for rank, each in claims.items():
            for claim in each:
                conditional = claim.kind == "different" and bool(claim.given)
                named.setdefault((claim.rule, claim.name, claim.kind, conditional), {})[rank] = claim
        self._relate({name: of for (_, name, kind, _), of in named.items() if kind == "gradient"})
        broken: dict[tuple[Any, ...], _Breach] = {}
        once: set[tuple[str, str]] = set()
        for (rule, name, kind, _), of in named.items():
            if kind == "gradient":
                continue
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

    def _relate(self, gradients: dict[str, dict[int, Claim]]) -> None:
        """Learn from final gradients which ranks train alike."""
        over: dict[int, set[frozenset[int]]] = {}
        for name, of in gradients.items():
            alike = _alike({rank: claim.value for rank, claim in of.items()})
            if len(alike) == 1:
                self._reduced.setdefault(name, alike[0])
            for rank in of:
                over.setdefault(rank, set()).add(next((each for each in alike if rank in each), frozenset()))
        for rank, groups in over.items():
            shared = groups - {frozenset[int]()}
            if len(shared) == 1 and rank not in self._related:
                self._related[rank] = ("data" if len(groups) == 1 else "model", next(iter(shared)))
        self._families = {}
        for name, group in self._reduced.items():
            for claim in gradients.get(name, {}).values():
                self._families.setdefault(claim.family, []).append(group)
                break

    def _ranks_of(self, rank: int, claim: Claim) -> tuple[tuple[int, ...], str, bool] | None:
        """Return the ranks among which a claim of a rank holds, why, and whether that is sure; None if unknown."""
        if not isinstance(claim.ranks, str):
            return claim.ranks, claim.why, claim.sure
        if claim.ranks != "replicas":
            relation, group = self._related.get(rank, ("", frozenset[int]()))
            return (tuple(sorted(group)), claim.why, claim.sure) if relation == claim.ranks else None
        group = self._reduced.get(claim.name)
        if group is not None and rank in group:
            return tuple(sorted(group)), "their gradients are equal, as if reduced over these ranks", claim.sure
        kin = self._families.get(claim.family, []) if claim.family else []
        if len(kin) > 1 and len(set(kin)) == 1 and rank in kin[0]:
            why = f"the gradients of {len(kin)} other parameters of {claim.family} modules are reduced over these ranks"
            return tuple(sorted(kin[0])), why, False
        return None

    def _differing(self, key: tuple[str, str], of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        groups: dict[tuple[tuple[int, ...], str], dict[int, tuple[Claim, str, bool]]] = {}
        unknown: dict[int, Claim] = {}
        for rank, claim in of.items():
            resolved = self._ranks_of(rank, claim)
            if resolved is not None:
                ranks, why, sure = resolved
                groups.setdefault((ranks, claim.given), {})[rank] = claim, why, sure
            elif claim.ranks == "replicas":
                unknown[rank] = claim
        for (ranks, _), found in groups.items():
            values = {rank: claim.value for rank, (claim, _, _) in found.items() if rank in ranks}
            if len(set(values.values())) > 1:
                odd = _odd(values)
                claim, why, sure = found[odd[0]]
                yield odd, replace(claim, ranks=ranks, why=why, sure=sure)
                return
        yield from self._learned(key, unknown)

    def _learned(self, key: tuple[str, str], of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        values = {rank: claim.value for rank, claim in of.items()}
        previous, known = self._values.get(key, {}), self._replicas.setdefault(key, set())
        self._values[key] = values
        for ranks in list(known):
            inside = {rank: values[rank] for rank in ranks if rank in values}
            if len(set(inside.values())) > 1:
                known.discard(ranks)
                odd = _odd(inside)
                why = "it was equal on these ranks at earlier steps, while it was trained"
                yield odd, replace(of[odd[0]], ranks=tuple(sorted(ranks)), why=why)
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
                    yield odd, replace(of[odd[0]], ranks=tuple(sorted(ranks)), why=why, sure=False)
                    return

    def _repeated(self, of: dict[int, Claim]) -> Iterable[tuple[tuple[int, ...], Claim]]:
        seen: dict[str, list[int]] = {}
        for rank, claim in sorted(of.items()):
            seen.setdefault(claim.value, []).append(rank)
        for ranks in seen.values():
            for first in ranks:
                resolved, given = self._ranks_of(first, of[first]), of[first].given
                among = () if resolved is None else resolved[0]
                same = {rank for rank in ranks if rank in among and (not given or of[rank].given != given)}
                if same - {first}:
                    yield tuple(sorted({first, *same})), of[first]
                    return

    def _verdict(self, step: int, breach: _Breach, claims: dict[int, Sequence[Claim]]) -> BrokenRule:
        claim, names = breach.claim, breach.names
        shown = few(names, 3)
        if claim.kind == "equal":
            among = sorted(claims) if isinstance(claim.ranks, str) else claim.ranks
            others = [rank for rank in among if rank not in breach.ranks and rank in claims]
            rest = f"rank{'s' * (len(others) != 1)} {', '.join(map(str, others))}"
            text = f"{claim.what} of {shown} differ from those of {rest}"
        else:
            text = f"{claim.what} of {shown} are equal on these ranks" if shown else f"{claim.what} are equal"
        why = f"; {claim.why}" if claim.why else ""
        return BrokenRule(claim.rule, step, breach.ranks, tuple(names), f"{text}{why}", claim.line, claim.sure)


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
    """Sends this rank's claims, and the broken rules that it sees by itself, to rank 0, which reports verdicts once.

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
        self._queue: queue.Queue[tuple[str, int, _Message, bool] | None] = queue.Queue()
        self._judge = Judge()
        self._own: list[BrokenRule] = []  # seen by this rank, and not sent yet
        self._silent: set[int] = set()
        self._begins: dict[int, str] = {}  # by rank: the key of its first step
        self._written: list[str] = []
        self._decided = threading.Condition()
        self._latest = ""  # the key of the step judged last
        self._verdicts: list[BrokenRule] = []
        self._joint = False
        self._was_joint = False  # when this rank last sent claims
        self._reported: set[tuple[str, tuple[str, ...], str]] = set()
        self._over = threading.Event()
        self.missing: list[str] = []
        """What was not compared, and why."""
        self.compared = 0
        """The number of steps of which the claims of all ranks were compared; on rank 0."""
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._run, name="monarch_kernel rules", daemon=True)
            self._thread.start()

    @property
    def reaches_others(self) -> bool:
        """Whether there are other ranks to exchange claims with."""
        return self._store is not None

    def keep(self, broken: Sequence[BrokenRule]) -> None:
        """Keep broken rules that this rank sees by itself for the next `send`."""
        self._own += broken

    def send(self, key: str, step: int, claims: Sequence[Claim], waits: bool = True) -> None:
        """Hand over this rank's claims about a step, and what it kept; returns at once.

        Args:
            key: names the step, the same on all ranks: a word and a number that grows, such as "step 20".
            step: the index of the step, for messages.
            claims: of this rank.
            waits: whether this rank waits for the verdicts. Where rank 0 does not, no rank gets any for this step: it
                alone would stop.
        """
        message = _Message(list(claims), self._own)
        self._own = []
        if self._thread is None:
            self.conclude(step, {self._rank: (message.claims, message.broken)})
            return
        self._queue.put((key, step, message, waits))
        self._was_joint = self._joint

    def conclude(self, step: int, found: Mapping[int, tuple[list[Claim], list[BrokenRule]]]) -> list[BrokenRule]:
        """Report the verdicts of a step of which this process has what all ranks found: claims and broken rules."""
        messages = {rank: _Message(claims, broken) for rank, (claims, broken) in found.items()}
        judged = self._judge.judge(step, {rank: each.claims for rank, each in messages.items()})
        verdicts = [*_merged(messages), *judged]
        self.compared += 1
        self._conclude(verdicts)
        return verdicts

    @property
    def is_joint(self) -> bool:
        """Whether rank 0 has compared a step of all ranks already, so that they check the same steps.

        Rank 0 says so one step later than it knows it: then the other ranks have found it in the store, too.
        """
        if self._rank == 0:
            return self._was_joint
        if not self._joint and self._store is not None:
            self._joint = self._store.check([f"{self._prefix}/{_JOINT}"])
        return self._joint

    def verdicts(self, key: str, seconds: float) -> list[BrokenRule] | None:
        """Wait for the verdicts up to a step, the latest of this session; None if they have not come in time."""
        if self._thread is None:
            return []
        if self._rank == 0:  # the thread may be waiting in the store
            with self._decided:
                self._decided.wait_for(lambda: self._latest == key or self._over.is_set(), seconds)
                return list(self._verdicts) if self._latest == key else None
        data = self._read(f"{self._prefix}/{key}/verdicts", seconds)
        return None if data is None else msgspec.json.decode(data, type=list[BrokenRule])

    def end(self, seconds: float = 5.0) -> None:
        """End it, after what was sent is judged or the time is over."""
        if self._over.is_set():
            return
        if self._thread is None:
            self._conclude(_merged({self._rank: _Message([], self._own)}))
        else:
            self._queue.put((_END, -1, _Message([], self._own), False))
            self._queue.put(None)
            self._thread.join(seconds)
        self._own = []
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _SLICE)

    def _run(self) -> None:
        while not self._over.is_set() and (taken := self._queue.get()) is not None:
            key, step, message, waits = taken
            try:
                if self._rank == 0:
                    self._decide(key, step, message, waits)
                else:
                    if not self._begins:
                        self._begins[self._rank] = key
                        self._store.set(f"{self._prefix}/begins/{self._rank}", key)
                    self._store.set(f"{self._prefix}/{key}/{self._rank}", msgspec.json.encode(message).decode())
            except Exception as error:  # the job's store is gone, or the job ends
                if step >= 0:
                    self.missing.append(f"step {step}: {type(error).__name__}: {error}")
                self._over.set()

    def _decide(self, key: str, step: int, message: _Message, waits: bool) -> None:
        """Judge the claims of all ranks; those that have not come before the deadline are left out."""
        until = time.monotonic() + (self._deadline if step >= 0 else min(self._deadline, _LAST_WORDS))
        messages = {0: message}
        missing: list[int] = []
        late = False
        for rank in range(1, self._size):
            if self._begins_after(rank, key, until):
                late = True
                continue
            # A rank that was silent before gets no more time: one dead rank must not delay the verdicts of the others.
            left = 0.0 if rank in self._silent else max(0.0, until - time.monotonic())
            data = self._read(f"{self._prefix}/{key}/{rank}", left)
            if data is None:
                missing.append(rank)
                continue
            messages[rank] = msgspec.json.decode(data, type=_Message)
            self._store.delete_key(f"{self._prefix}/{key}/{rank}")
        if step < 0:
            self._conclude(_merged(messages))
            return
        self._silent = set(missing)
        if missing:
            ranks = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
            self.missing.append(f"step {step}: {ranks} did not report within {self._deadline:g} s")
        judged = self._judge.judge(step, {rank: each.claims for rank, each in messages.items()})
        found = [*_merged(messages), *judged]
        if not missing and not late:
            self.compared += 1
            if not self._joint:
                self._joint = True
                self._store.set(f"{self._prefix}/{_JOINT}", "1")
        with self._decided:
            self._verdicts = [*self._verdicts, *found][-_KEPT:]
            self._latest = key
            self._decided.notify_all()
        sent = self._verdicts if waits else []
        self._store.set(f"{self._prefix}/{key}/verdicts", msgspec.json.encode(sent).decode())
        self._written.append(f"{self._prefix}/{key}/verdicts")
        for old in self._written[:-2]:  # all ranks have sent claims about a later step
            self._store.delete_key(old)
        del self._written[:-2]
        self._conclude(found)

    def _begins_after(self, rank: int, key: str, until: float) -> bool:
        """Return whether a rank begins with a later step, as happens in a running job."""
        if rank not in self._begins:
            left = 0.0 if rank in self._silent else max(0.0, until - time.monotonic())
            first = self._read(f"{self._prefix}/begins/{rank}", left)
            if first is None:
                return False
            self._begins[rank] = first.decode()
        (kind, number), (of, first) = key.split(), self._begins[rank].split()
        return kind == of and int(first) > int(number)

    def _conclude(self, verdicts: Sequence[BrokenRule]) -> None:
        """Report what was not reported before."""
        for each in verdicts:
            known = (each.rule, each.names, "" if each.names else each.message)
            if known not in self._reported:
                self._reported.add(known)
                self._report(each)

    def _read(self, name: str, seconds: float) -> bytes | None:
        """Read a key; None if it does not come in time."""
        until = time.monotonic() + seconds
        while not self._over.is_set():
            if self._store.check([name]):
                return self._store.get(name)
            left = min(_SLICE, until - time.monotonic())
            if left <= 0:
                return None
            try:
                self._store.wait([name], datetime.timedelta(seconds=max(left, 0.001)))
            except RuntimeError:  # not yet
                continue
        return None


@dataclass(slots=True)
class _Message:
    """What a rank sends about a step."""

    claims: list[Claim]
    broken: list[BrokenRule]


def _merged(messages: dict[int, _Message]) -> list[BrokenRule]:
    """Return broken rules that ranks have seen by themselves, once each, with all their ranks."""
    found: dict[tuple[str, tuple[str, ...], str], BrokenRule] = {}
    for message in messages.values():
        for each in message.broken:
            key = (each.rule, each.names, "" if each.names else each.message)
            known = found.setdefault(key, each)
            found[key] = replace(known, ranks=tuple(sorted({*known.ranks, *each.ranks})))
    return list(found.values())
