"""Control random numbers on the ranks of a mesh: the names of ``monarch.random``, and more.

This module only exports names; ``monarch_kernel.runtime.tensor`` has the code.
"""

from monarch_kernel.runtime.tensor.api.randomness import (
    State,
    get_rng_state,
    get_state,
    make_deterministic,
    manual_seed,
    new_state,
    set_rng_state,
    set_state,
)

__all__ = [
    "State",
    "get_rng_state",
    "get_state",
    "make_deterministic",
    "manual_seed",
    "new_state",
    "set_rng_state",
    "set_state",
]
