"""How a verdict is put into phrases. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from monarch_kernel.debugger.controller.hang.history import SKIPPED, Divergence
from monarch_kernel.debugger.controller.hang.verdict import SHAPE, VerdictRow
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
    WAITS,
    Evidence,
    Operation,
    ProcessGroup,
    Wait,
)
from monarch_kernel.debugger.rank.hang.flight import SECOND
from monarch_kernel.debugger.source_locations import Place
from monarch_kernel.meshes import format_ranks

#: Names of the group of all ranks.
_DEFAULT = ("0", "default_pg")


def ranks(who: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    chosen = sorted(who)
    return f"rank{'s' * (len(chosen) != 1)} {format_ranks(chosen, limit=8).replace(',', ', ')}"


_PLURAL = {"is": "are", "has": "have", "does": "do", "was": "were", "waits": "wait", "stands": "stand", "runs": "run"}
_VERB = re.compile(rf"(?:^|(?<= and )|(?<=, or ))(?:{'|'.join(_PLURAL)})\b")
_IT = re.compile(rf"(?<=: |; )it ({'|'.join(_PLURAL)})\b")


def doing(who: Iterable[int], what: str) -> str:
    """`rank 3 is dead`, `ranks 0-2 are dead`; `what` is a verb phrase about one rank."""
    chosen = sorted(who)
    if len(chosen) != 1:
        what = _VERB.sub(lambda found: _PLURAL[found[0]], what)
        what = _IT.sub(lambda found: f"they {_PLURAL[found[1]]}", what)
    return f"{ranks(chosen)} {what}"


def states(evidence: Mapping[int, Evidence], who: Iterable[int]) -> str:
    """What these ranks do, those together that do the same."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(who):
        alike.setdefault(state(evidence[rank]), []).append(rank)
    return joined([doing(some, what) for what, some in alike.items()])


def capital(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def at(place: Place | None) -> str:
    """` at train.py:12`, or nothing where that is not known."""
    return f" at {place.where()}" if place is not None else ""


def group(which: ProcessGroup) -> str:
    """What to call a process group."""
    if not which.name:
        return "a process group that is being made"
    if which.desc:
        return f"group {which.desc}"
    name, over, backend = which.name.partition(SECOND)
    return ("the default group" if name in _DEFAULT else f"group {name}") + over + backend


def call(which: Operation) -> str:
    """`all_reduce at train.py:12`."""
    return f"{which.name or which.op}{at(which.place)}"


def size(which: Operation) -> str:
    """`5 elements of Float`."""
    kinds = "/".join(dict.fromkeys(which.dtypes))
    return f"{which.elements} element{'s' * (which.elements != 1)}{f' of {kinds}' if kinds else ''}"


def calling(which: Operation, kind: str, root: int) -> str:
    """`called all_reduce with 7 elements of Float at train.py:12`."""
    more = f" with {size(which)}" if kind == SHAPE else f" for rank {root}" if root >= 0 else ""
    return f"called {which.name or which.op}{more}{at(which.place)}"


def left_out(calls: Sequence[Operation]) -> str:
    """`left out all_reduce #7 at train.py:12`."""
    first = calls[0]
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"left out {first.name or first.op} #{first.number}{at(first.place)}{more}"


def parted(found: Divergence) -> str:
    """How a rank's history differs from that of the others."""
    if found.kind == SKIPPED:
        return left_out(found.calls)
    first = found.calls[0]
    return f"called {first.name or first.op} #{first.number}{at(first.place)}, which no other rank called"


def waits_in(who: Sequence[int], which: Operation, of: ProcessGroup) -> str:
    """`ranks 0-2 wait in all_reduce #7 of the default group at train.py:12`."""
    number = f" #{which.number}" if which.number else ""
    return doing(who, f"waits in {which.name or which.op}{number} of {group(of)}{at(which.place)}")


def _wait(each: Evidence, wait: Wait) -> str:
    if wait.kind in ("recv", "send"):
        word = "from" if wait.kind == "recv" else "to"
        peer = f" {word} rank {wait.peer}" if wait.peer >= 0 else ""
        return f"waits in {wait.call.name}{peer}{at(wait.place)}"
    if wait.kind == "work":
        return f"waits for what it has sent or is to receive{at(wait.place)}"
    if wait.kind == "call":
        return f"waits for an answer of {wait.call.name}{at(wait.place)}"
    if wait.kind == "group":
        return f"waits in {wait.call.name}{at(wait.place)}"
    number = f" #{wait.call.number}" if wait.call.number else ""
    of = each.groups.get(wait.call.group)
    where = f" of {group(of)}" if of is not None and (of.desc or of.name not in _DEFAULT) else ""
    started = at(wait.call.place)
    later = f", waited for{at(wait.place)}" if at(wait.place) != started else ""
    inputs = f" ({size(wait.call)})" if wait.call.shapes else ""
    return f"waits in {wait.call.name or wait.call.op}{number}{where}{inputs}{started}{later}"


def state(each: Evidence) -> str:
    """What a rank does, as a verb phrase."""
    if each.state == WAITS and each.waits:
        return _wait(each, each.waits[0])
    if each.state == IDLE:
        if each.failure is not None:
            return f"failed with {each.failure.text}{at(each.failure.place)}"
        return "has finished, or runs nothing"
    if each.state == DEAD:
        return f"is dead ({each.why})" if each.why else "is dead"
    if each.state == SILENT:
        was = f"; it was{at(each.place)}" if each.place is not None else ""
        return f"does not go on ({each.why}){was}" if each.why else f"does not go on{was}"
    if each.state == LATE:
        return f"does not answer ({each.why or 'nobody knows why; it may hold the interpreter lock'})"
    if each.state == UNASKED:
        return "was not asked"
    where = f"{at(each.place)}{_function(each.place)}"
    if each.state == LOADS:
        return f"is in a data loader{where}"
    if each.state == PAUSED:
        return f"is stopped in the debugger{where}"
    if each.state == STANDS:
        return f"stands{where}{f' ({each.why})' if each.why else ''}"
    return f"runs on{where}" if each.state in (RUNS, WAITS) else each.state


def _function(place: Place | None) -> str:
    return f" in {place.name}" if place is not None and place.name not in ("", "<module>") else ""


def rows(evidence: Mapping[int, Evidence], blamed: set[int]) -> tuple[VerdictRow, ...]:
    """What all ranks do, the same put together; those to blame first, then the smallest group."""
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, each in evidence.items():
        alike.setdefault((rank not in blamed, state(each)), []).append(rank)
    ordered = sorted(alike.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return tuple(VerdictRow(tuple(who), doing, evidence[who[0]].place) for (_, doing), who in ordered)


def timeouts(evidence: Mapping[int, Evidence]) -> tuple[str, ...]:
    """When the process groups in which ranks wait give up."""
    limits = {
        of.timeout: of
        for each in evidence.values()
        if each.state == WAITS
        for wait in each.waits
        if (of := each.groups.get(wait.call.group)) is not None and of.timeout > 0
    }
    return tuple(f"{capital(group(of))} gives up after {_minutes(limit)}." for limit, of in sorted(limits.items())[:1])


def _minutes(limit: float) -> str:
    return f"{limit / 60:g} min" if limit >= 120 else f"{limit:g} s"
