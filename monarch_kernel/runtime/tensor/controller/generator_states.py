"""Where random numbers are: of a generator of this process, and of those of the ranks of a mesh."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.rank import randomness

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.handle import Tensor
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


def digest_of(state: torch.Tensor) -> bytes:
    """A few bytes that stand for a state of a generator of this process."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()


def state_of(mesh: TensorMesh) -> Tensor:
    """Where the random numbers of each rank are: a handle of uint8 numbers."""
    with _disable_current_modes():
        size = torch.default_generator.get_state().numel() + randomness.OF_GPU
    return mesh.call(randomness.state, lambda: torch.empty(size, dtype=torch.uint8), key="rng_state")


def go_on_from(state: Tensor) -> None:
    """Have each rank of its mesh go on from a state."""
    state._spec.mesh.call(randomness.set_state, lambda _: None, state, key="set_rng_state")
