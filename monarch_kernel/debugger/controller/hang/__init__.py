"""Find out why a mesh makes no progress: which ranks wait in which operation, and for which ranks (`hang`).

`sampling` queries the ranks for evidence, `judge` decides from it (with `situation`, `mismatch`, `absence`, `history`),
`phrases` words the decision, and a `verdict` displays itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_kernel.debugger import on_verdict

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, ProcMesh
    from monarch_kernel.debugger.controller.hang.verdict import Verdict


def hang(mesh: ProcMesh | ActorMesh[object], *, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> Verdict:
    """Find out why these ranks make no progress, and which rank is to blame, if that can be determined.

    Samples the stacks of all ranks, and PyTorch's record of their collectives, twice, half a second apart. This takes
    less than a second if all ranks answer, and does not affect user code.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        ranks: the ranks of ``mesh`` to query; by default all. Nothing is known about ranks that are not queried.
        timeout: how long to wait for ranks that do not answer (seconds, in total).

    Returns:
        The verdict, which prints and displays itself. It is undecided if the evidence does not suffice.

    Raises:
        ValueError: ``mesh`` has no such rank.
        TypeError: ``mesh`` is not a mesh.
    """
    from monarch_kernel.debugger.controller.hang.sampling import sample_and_judge

    verdict = sample_and_judge(mesh, ranks, timeout)
    if ranks is None:
        on_verdict.notify(mesh, verdict)
    return verdict
