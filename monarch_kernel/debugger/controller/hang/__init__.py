"""Why a mesh does not go on: which ranks wait in which operation, and for whom (`hang`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.debugger.controller.hang.verdict import Verdict


def hang(mesh: Any, *, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> Verdict:
    """Why these ranks do not go on, and which one is to blame, as far as that can be told.

    Looks twice, half a second apart, at the stacks of all ranks and at what PyTorch records of their collectives, and
    takes less than a second where all of them answer. Nothing of the user's is touched.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        ranks: of ``mesh``, if only some are to be asked; of the others nothing is known then.
        timeout: how long to wait for ranks that do not answer (seconds, in all).

    Returns:
        The verdict; it is undecided rather than guessed, and prints and shows itself.

    Raises:
        ValueError: ``mesh`` has no such rank.
        TypeError: ``mesh`` is no mesh.
    """
    from monarch_kernel.debugger.controller.hang.sampling import look

    return look(mesh, ranks, timeout)
