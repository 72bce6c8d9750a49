"""Why a mesh makes no progress: which ranks wait in which operation, and for which ranks (`hang`).

`sampling` asks the ranks for evidence, `judge` decides on it (with `situation`, `mismatch`, `absence`, `history`),
`phrases` puts the decision into words, and a `verdict` shows itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, ProcMesh
    from monarch_kernel.debugger.controller.hang.verdict import Verdict


def hang(mesh: ProcMesh | ActorMesh[Any], *, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> Verdict:
    """Why these ranks make no progress, and which one is to blame, as far as that can be told.

    Samples the stacks of all ranks, and what PyTorch records of their collectives, twice, half a second apart; takes
    less than a second where all of them answer. User code is not touched.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        ranks: of ``mesh``, if only some are to be asked; nothing is known of the others then.
        timeout: how long to wait for ranks that do not answer (seconds, in all).

    Returns:
        The verdict; it is undecided rather than guessed, and prints and shows itself.

    Raises:
        ValueError: ``mesh`` has no such rank.
        TypeError: ``mesh`` is no mesh.
    """
    from monarch_kernel.debugger.controller.hang.sampling import sample_and_judge

    return sample_and_judge(mesh, ranks, timeout)
