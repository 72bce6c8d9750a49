"""When ranks entered collectives, from PyTorch's records. The structs are also the file format."""

from __future__ import annotations

import msgspec

from monarch_kernel.debugger.source_locations import SourceLocation


class TimedCollective(msgspec.Struct, frozen=True):
    """A collective, as one rank called it.

    Attributes:
        group: the name of the process group, the same on all its ranks.
        number: which collective of the group it is.
        op: what the backend does: `all_reduce`.
        name: the function that user code called: `all_gather_object`.
        place: the line of user code that called it; None if it is not known.
        entered: when the rank called it, by the clock of its host (seconds since 1970).
        seconds: how long the rank was in it; 0 if it is not known.
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
        rank: in its mesh.
        dist_rank: in `torch.distributed`; -1 if it is in no process group.
        world: tells one `torch.distributed` from another.
        clock: equal for ranks whose hosts' clock is the same.
        host: its host.
        groups: the ranks in `torch.distributed` of each group, by its name.
        calls: in the order in which it called them.
    """

    rank: int
    dist_rank: int
    world: str
    clock: str
    host: str
    groups: dict[str, tuple[int, ...]]
    calls: tuple[TimedCollective, ...]
