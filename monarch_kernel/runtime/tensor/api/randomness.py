"""Seed random number generators of the ranks, and get and set their states.

`torch.manual_seed` also seeds the active mesh.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.runtime.tensor.api.activation import active_target, tensor_mesh
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.redraws import Redraws, go_on_from, state_of
from monarch_kernel.runtime.tensor.rank import randomness


def manual_seed(seed: int, *, per_rank: bool = False) -> None:
    """Seed the generators of the ranks of the active mesh.

    Args:
        seed: an integer.
        per_rank: draw different numbers on each rank: its position in the mesh is added to the seed. By default, all
            ranks draw the same numbers.

    Raises:
        ValueError: no mesh is active.
    """
    mesh = tensor_mesh()
    places = {rank: place for place, rank in enumerate(mesh.ranks)} if per_rank else None
    Redraws.of(mesh.engine).seeded()
    mesh.call(randomness.seed, lambda *_: None, operator.index(seed), places, key=("seed", per_rank))


def seed_by_index(seed: int, process_idx: int | Tensor | None = None) -> None:
    """Seed the generators of the ranks of the active mesh with ``seed ^ process_idx``.

    Args:
        process_idx: an integer, or a tensor with an integer on each rank, such as a `rank_tensor`; None for 0.
    """
    place = 0 if process_idx is None else process_idx
    mesh = place._spec.mesh if type(place) is Tensor else tensor_mesh()
    Redraws.of(mesh.engine).seeded()
    mesh.call(randomness.seed_by_index, lambda *_: None, operator.index(seed), place, key="seed by place")


def random_seed() -> None:
    """Seed the generators of each rank of the active mesh with a different, unpredictable number."""
    mesh = tensor_mesh()
    Redraws.of(mesh.engine).seeded()
    mesh.call(randomness.seed_at_random, lambda: None, key="seed at random")


def get_rng_state() -> Tensor:
    """Return the generator state of each rank of the active mesh: a handle of a uint8 tensor for `set_rng_state`."""
    return state_of(tensor_mesh())


def set_rng_state(state: Tensor) -> None:
    """Restore the generator state that `get_rng_state` returned, on each rank."""
    Redraws.of(state._spec.mesh.engine).seeded()
    go_on_from(state)


class State(NamedTuple):
    """The states of the random number generators of each rank.

    Attributes:
        cpu, cuda: the state of each kind of generator; `cuda` is zeros on a rank without a GPU.
    """

    cpu: Tensor
    cuda: Tensor


def get_state() -> State:
    """Return the generator states of each rank of the active mesh, for `set_state`."""
    sizes = _sizes()
    return State(*tensor_mesh().call(randomness.states, lambda: _of_sizes(sizes), key="rng_states"))


def set_state(state: State) -> None:
    """Restore states that `get_state` or `new_state` returned, on each rank."""
    set_rng_state(torch.cat([state.cpu, state.cuda]))  # type: ignore[arg-type]  # an operation on handles gives one


def new_state(seed: Tensor) -> State:
    """Return the state of generators with a new seed: an integer on each rank, such as a `rank_tensor`."""
    sizes = _sizes()
    made = seed._spec.mesh.call(randomness.fresh_state, lambda _: _of_sizes(sizes), seed, key="fresh_state")
    return State(*made)


def _sizes() -> tuple[int, int]:
    with _disable_current_modes():
        return torch.get_rng_state().numel(), randomness.OF_GPU


def _of_sizes(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def make_deterministic(seed: int = 0) -> None:
    """Use torch's deterministic algorithms on the ranks of the active mesh, and seed all ranks equally."""
    tensor_mesh().call(_use_deterministic, lambda: None, key="deterministic")
    manual_seed(seed)


def _use_deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def _wrapped(local: Any) -> object:
    @functools.wraps(local)
    def seeded(seed: int) -> torch.Generator:
        with _disable_current_modes():
            generator = local(seed)
        if active_target()[0] is not None:
            manual_seed(int(seed))
        return generator

    return seeded


torch.manual_seed = torch.random.manual_seed = _wrapped(torch.manual_seed)
