"""Functions of the controller for the random number generators of this rank."""

from __future__ import annotations

import torch

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here

#: The size of the state of a GPU's generator (bytes). On a rank without a GPU, it is zeros.
OF_GPU = 16


def seed(number: int, places: dict[int, int] | None) -> None:
    """Seed this rank's generators: equally on all ranks, or by the index of each rank in the mesh."""
    torch.manual_seed(number if places is None else number + places[here().rank])


def state() -> torch.Tensor:
    """Return the states of this rank's generators as one tensor: the CPU, then the GPU."""
    gpu = torch.zeros(OF_GPU, dtype=torch.uint8)
    if current_executor.of_rank().type == "cuda":
        gpu = torch.cuda.get_rng_state(current_executor.of_rank())
    return torch.cat([torch.get_rng_state(), gpu]).to(current_executor.of_rank())


def set_state(found: torch.Tensor) -> None:
    """Restore these states."""
    found = found.cpu()
    torch.set_rng_state(found[:-OF_GPU].clone())
    if current_executor.of_rank().type == "cuda":
        torch.cuda.set_rng_state(found[-OF_GPU:].clone(), current_executor.of_rank())


def fresh_state(number: torch.Tensor) -> list[torch.Tensor]:
    """Return the states of generators with this seed: of the CPU, then of the GPU."""
    generator = torch.Generator().manual_seed(int(number))
    gpu = torch.zeros(OF_GPU, dtype=torch.uint8)
    if current_executor.of_rank().type == "cuda":
        gpu = torch.Generator(current_executor.of_rank()).manual_seed(int(number)).get_state()
    return [x.to(current_executor.of_rank()) for x in (generator.get_state(), gpu)]


def states() -> list[torch.Tensor]:
    """Return the states of this rank's generators: of the CPU, then of the GPU."""
    whole = state()
    return [whole[:-OF_GPU].clone(), whole[-OF_GPU:].clone()]


def seed_by_index(number: int, place: int | torch.Tensor) -> None:
    """Seed the generators with a number that depends on the rank's position."""
    torch.manual_seed(number ^ int(place))


def seed_at_random() -> None:
    """Seed the generators with a random number from the operating system."""
    torch.seed()
