"""Random numbers of a rank are its own: no other rank's, and no other child's of it.

A rank is a fork of a process that may have torch and NumPy loaded, so it has their generators as they were there; and a
fresh torch has the same seed in every process. ``random`` seeds itself anew in each fork. What a user has seeded stays
reproducible: torch as it is, and NumPy in children of a rank by what the rank had and by which child it is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch_kernel.runtime.actor.import_hooks import after_import


class _Seeds:
    """What was seeded here."""

    torch: int | None = None  # the seed that we gave torch
    children = 0


def install() -> None:
    """Give this rank its own random numbers, and those that it forks theirs. Imports nothing."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    after_import("torch", _seed_torch)
    os.register_at_fork(before=_count, after_in_child=_in_child)


def _seed_torch(torch: Any) -> None:
    """CUDA is seeded with the rest, when it is first used."""
    torch.seed()
    _Seeds.torch = torch.initial_seed()


def _count() -> None:
    _Seeds.children += 1


def _in_child() -> None:
    """In a process that the rank, or a child of it, has forked."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state = numpy_random.get_state()
        if isinstance(state, tuple):  # as that of another generator than NumPy's own is not
            numpy_random.seed([*state[1][:8], state[2], _Seeds.children])
    torch: Any = sys.modules.get("torch")
    # Not all of torch.seed(): a child of a process that has used CUDA cannot.
    if torch is not None and _Seeds.torch is not None and torch.initial_seed() == _Seeds.torch:
        torch.default_generator.seed()
        _Seeds.torch = torch.initial_seed()
