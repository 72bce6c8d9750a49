"""Random numbers of the ranks of a mesh. Names are those of ``monarch.random``, and more.

This module holds names only; ``monarch_kernel.runtime.tensor`` has the code.
"""

from monarch_kernel.runtime.tensor.api.randomness import get_rng_state, make_deterministic, manual_seed, set_rng_state

__all__ = ["get_rng_state", "make_deterministic", "manual_seed", "set_rng_state"]
