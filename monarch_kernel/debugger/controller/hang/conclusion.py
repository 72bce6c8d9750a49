"""Build a verdict: the ranks to blame, the sentence, the activity of all ranks, and the timeouts of groups."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.debugger.controller.hang import phrases
from monarch_kernel.debugger.controller.hang.situation import Situation
from monarch_kernel.debugger.controller.hang.verdict import Culprit, Verdict


def conclude(
    now: Situation,
    kind: str,
    culprits: Sequence[Culprit],
    sentence: str,
    *,
    likely: bool = False,
    alternatives: tuple[str, ...] = (),
) -> Verdict:
    """Build a verdict about this situation. The arguments are as in `Verdict`."""
    rows = phrases.rows(now.evidence, {culprit.rank for culprit in culprits})
    notes = phrases.timeouts(now.evidence)
    return Verdict(kind, tuple(culprits), sentence, rows, likely, notes, now.mesh, alternatives)


def as_they_are(now: Situation, ranks: Sequence[int]) -> list[Culprit]:
    """Describe the activity of ranks without a line to blame."""
    return [Culprit(rank, None, phrases.state(now.evidence[rank])) for rank in ranks]
