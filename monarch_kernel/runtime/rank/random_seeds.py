"""Gives each rank, and each process that a rank forks, its own random numbers.

A rank is a fork of a process that may have loaded torch and NumPy, so it inherits the state of their generators; and a
fresh torch has the same seed in every process. ``random`` reseeds itself in each fork. Generators that a user has
seeded stay reproducible: torch keeps its state, and NumPy in a child of a rank is seeded from the rank's state and the
child's number.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from monarch_kernel.runtime.actor.import_hooks import after_import


class _Seeds:
    """The seeds of this process."""

    torch: int | None = None  # the seed that this module gave torch
    children = 0


def install() -> None:
    """Give this rank and the processes that it forks their own random numbers. Imports nothing."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    after_import("torch", _seed_torch)
    os.register_at_fork(before=_count, after_in_child=_in_child)


def _seed_torch(torch: Any) -> None:
    """Seed torch; CUDA gets its seed with it, on first use."""
    torch.seed()
    _Seeds.torch = torch.initial_seed()


def _count() -> None:
    _Seeds.children += 1


def _in_child() -> None:
    """Reseed a process that the rank, or one of its children, has forked."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state = numpy_random.get_state()
        if isinstance(state, tuple):  # it is not for generators other than NumPy's default
            numpy_random.seed([*state[1][:8], state[2], _Seeds.children])
    torch: Any = sys.modules.get("torch")
    # torch.seed() would also seed CUDA, which fails in a child of a process that has used CUDA.
    if torch is not None and _Seeds.torch is not None and torch.initial_seed() == _Seeds.torch:
        torch.default_generator.seed()
        _Seeds.torch = torch.initial_seed()
