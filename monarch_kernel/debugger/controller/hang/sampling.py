"""Has the ranks of a mesh looked at, twice, and the verdict made."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from monarch_kernel.debugger.controller.hang import history
from monarch_kernel.debugger.controller.hang.judge import judge, settle
from monarch_kernel.debugger.controller.hang.verdict import Verdict
from monarch_kernel.debugger.controller.query import ask
from monarch_kernel.debugger.model.evidence import DEAD, LATE, SILENT, STANDS, UNASKED, WAITS, Evidence
from monarch_kernel.debugger.rank.hang.collect import collect
from monarch_kernel.debugger.rank.hang.flight import C10D
from monarch_kernel.debugger.source_locations import Place, is_user, kind_of
from monarch_kernel.tools import stacks_from_outside, whole_of

#: How far the two looks are apart (seconds).
APART = 0.4
#: A rank that has not answered after so long is looked at from outside, too (seconds).
PROMPT = 1.0
#: How many collectives ranks tell of at first, and how many if that does not reach back to where they parted.
DEPTH, ALL = 128, 2000


def look(mesh: Any, ranks: Iterable[int] | None, timeout: float) -> Verdict:
    """See `hang`."""
    deadline = time.monotonic() + timeout
    whole = whole_of(mesh)
    size = len(whole.ranks)
    chosen = None if ranks is None else sorted(set(ranks))
    first = _ask(mesh, chosen, DEPTH, deadline)
    answered = [rank for rank, each in first.items() if each.answered]
    time.sleep(APART)
    second = {**first, **(_ask(mesh, answered, DEPTH, deadline) if answered else {})}
    if _reaches_too_short(second.values()):
        second.update(_ask(mesh, answered, ALL, deadline + timeout))
    found = settle(first, second)
    for rank in range(size):
        found.setdefault(rank, Evidence(rank, UNASKED, answered=False))
    return judge(found, whole.procs.name)


def _ask(mesh: Any, ranks: Sequence[int] | None, depth: int, deadline: float) -> dict[int, Evidence]:
    """What each of these ranks says, or what others say of it."""
    found: dict[int, Evidence] = {}
    missing: Sequence[int] | None = ranks
    outside: dict[int, Evidence] = {}
    while True:
        left = max(0.05, deadline - time.monotonic())
        answers = ask(mesh, collect, depth, ranks=missing, timeout=min(PROMPT, left))
        for rank, each in answers.values.items():
            found[rank] = _of_rank(each, rank)
        for rank, why in answers.dead.items():
            found[rank] = Evidence(rank, DEAD, str(why), answered=False)
        for rank, fault in answers.errors.items():
            found[rank] = Evidence(rank, LATE, f"it could not tell: {_in_words(fault)}", answered=False)
        unsure = [rank for rank in answers.late if rank not in outside]
        outside.update(_from_outside(mesh, unsure))
        missing = [rank for rank in answers.late if outside[rank].state == LATE]
        found.update({rank: outside[rank] for rank in answers.late})
        if not missing or time.monotonic() >= deadline:
            return found


def _of_rank(each: Evidence, rank: int) -> Evidence:
    """What a rank says, with its rank in the mesh that was asked, which may be a slice."""
    return each if each.rank == rank else replace(each, rank=rank)


def _in_words(fault: Any) -> str:
    return str(getattr(fault, "summary", fault)).strip()


def _from_outside(mesh: Any, ranks: Sequence[int]) -> dict[int, Evidence]:
    """Ranks that did not answer, as their host agents see them."""
    if not ranks:
        return {}
    whole = whole_of(mesh)
    reads = stacks_from_outside(whole.procs, [whole.ranks[rank] for rank in ranks], timeout=2.0)
    return {rank: _seen(rank, reads[whole.ranks[rank]]) for rank in ranks}


def _seen(rank: int, read: Any) -> Evidence:
    threads = _threads(read.dump)
    place = next((place for _, place, _ in threads if place is not None), None)
    if read.why:
        return Evidence(rank, SILENT, read.why, place=place, answered=False)
    holder = next((place for holds, place, in_c10d in threads if holds and not in_c10d), None)
    if holder is not None and not any(in_c10d for _, _, in_c10d in threads):
        return Evidence(rank, STANDS, "it holds the interpreter's lock", place=holder, answered=False)
    return Evidence(rank, LATE, read.error, place=place, answered=False)


def _threads(dump: str) -> list[tuple[bool, Place | None, bool]]:
    """Of each thread in a dump of py-spy: whether it holds the interpreter, its line, whether it is in a collective."""
    try:
        threads: list[dict[str, Any]] = json.loads(dump) if dump else []
    except ValueError:
        return []
    return [
        (
            bool(thread.get("owns_gil")),
            next(
                (
                    Place(frame["filename"], int(frame.get("line") or 0), frame["name"], kind_of(frame["filename"]))
                    for frame in thread.get("frames", ())
                    if is_user(frame["filename"])
                ),
                None,
            ),
            any(frame["filename"].endswith(C10D) for frame in thread.get("frames", ())),
        )
        for thread in threads
    ]


def _reaches_too_short(evidence: Iterable[Evidence]) -> bool:
    """Whether histories differ already where they begin, while somebody waits."""
    found = list(evidence)
    if not any(each.state == WAITS for each in found):
        return False
    reference: dict[str, Evidence] = {}
    for each in found:
        for name, calls in each.history.items():
            other = reference.setdefault(name, each)
            if len(calls) >= DEPTH and history.starts_apart(calls, other.history[name]):
                return True
    return False
