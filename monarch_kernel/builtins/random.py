"""What Monarch has in ``monarch.builtins.random``: seeds and states of the ranks' random numbers."""

from monarch_kernel.runtime.tensor.api.randomness import get_rng_state as get_rng_state_remote
from monarch_kernel.runtime.tensor.api.randomness import random_seed as random_seed_remote
from monarch_kernel.runtime.tensor.api.randomness import seed_by_index as set_manual_seed_remote
from monarch_kernel.runtime.tensor.api.randomness import set_rng_state as set_rng_state_remote

seed_remote = random_seed_remote

__all__ = [
    "get_rng_state_remote",
    "random_seed_remote",
    "seed_remote",
    "set_manual_seed_remote",
    "set_rng_state_remote",
]
