"""The times at which ranks entered collectives, from PyTorch's records. The structs are also the file format."""

from __future__ import annotations

import msgspec

from monarch_kernel.debugger.source_locations import SourceLocation


class TimedCollective(msgspec.Struct, frozen=True):
    """A collective, as one rank called it.

    Attributes:
        group: the name of the process group, the same on all its ranks.
        number: the number of the collective in its group.
        op: the operation of the backend: `all_reduce`.
        name: the function that user code called: `all_gather_object`.
        place: the line of user code that called it; None if unknown.
        entered: when the rank called it, by the clock of its host (seconds since 1970).
        seconds: how long the rank was in it; 0 if unknown.
    """

    group: str
    number: int
    op: str
    name: str
    place: SourceLocation | None
    entered: float
    seconds: float = 0.0


class CollectiveTimes(msgspec.Struct, frozen=True):
    """The latest collectives of a rank.

    Attributes:
        rank: the rank in its mesh.
        dist_rank: the rank in `torch.distributed`; -1 if it is in no process group.
        world: identifies the instance of `torch.distributed`.
        clock: equal for ranks whose hosts share a clock.
        host: its host.
        groups: by name, the members of each group as ranks of `torch.distributed`.
        calls: the collectives, in the order in which the rank called them.
    """

    rank: int
    dist_rank: int
    world: str
    clock: str
    host: str
    groups: dict[str, tuple[int, ...]]
    calls: tuple[TimedCollective, ...]
