"""Random numbers of this rank: functions that the controller calls here."""

from __future__ import annotations

import torch

from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.current_executor import here

#: Bytes of the state of a generator of a GPU; on a rank without one they are zeros.
OF_GPU = 16


def seed(number: int, places: dict[int, int] | None) -> None:
    """Seed the random numbers of this rank: equally on all ranks, or by the index of each rank in the mesh."""
    torch.manual_seed(number if places is None else number + places[here().rank])


def state() -> torch.Tensor:
    """The states of this rank's random numbers: of the CPU, then of the GPU."""
    gpu = torch.zeros(OF_GPU, dtype=torch.uint8)
    if device.of_rank().type == "cuda":
        gpu = torch.cuda.get_rng_state(device.of_rank())
    return torch.cat([torch.get_rng_state(), gpu]).to(device.of_rank())


def set_state(found: torch.Tensor) -> None:
    """Go on from there."""
    found = found.cpu()
    torch.set_rng_state(found[:-OF_GPU].clone())
    if device.of_rank().type == "cuda":
        torch.cuda.set_rng_state(found[-OF_GPU:].clone(), device.of_rank())


def fresh_state(number: torch.Tensor) -> list[torch.Tensor]:
    """The states of generators that begin with this number: of the CPU, then of the GPU."""
    generator = torch.Generator().manual_seed(int(number))
    gpu = torch.zeros(OF_GPU, dtype=torch.uint8)
    if device.of_rank().type == "cuda":
        gpu = torch.Generator(device.of_rank()).manual_seed(int(number)).get_state()
    return [x.to(device.of_rank()) for x in (generator.get_state(), gpu)]


def states() -> list[torch.Tensor]:
    """The states of this rank's generators: of the CPU, then of the GPU."""
    whole = state()
    return [whole[:-OF_GPU].clone(), whole[-OF_GPU:].clone()]


def seed_by_index(number: int, place: int | torch.Tensor) -> None:
    """Begin anew, with a number that differs by place."""
    torch.manual_seed(number ^ int(place))


def seed_at_random() -> None:
    """Begin anew, with a number of the operating system's."""
    torch.seed()
