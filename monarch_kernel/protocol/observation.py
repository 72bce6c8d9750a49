"""Messages by which host agents and ranks report their activity to watching controllers (docs/watching.md).

Every request is a lease: when it is not renewed in time, reports end, so a controller that is gone costs nothing.
"""

import msgspec

from monarch_kernel.protocol.refs import Message, Seconds


class Observe(Message, tag=80):
    """From a controller to a host agent: report on the host and on the sender's procs. Answered with ``Observed``s.

    The sender renews the lease before it expires. Values are reported again only after a change.
    """

    lease: Seconds  # duration of the lease; 0: stop reporting
    period: Seconds  # the minimum time between two reports
    again: bool = False  # report everything, including values that were already reported
    number: int = 0  # number of the sender's requests with ``again``, which the reports of ranks repeat


class ObserveRank(Message, tag=81):
    """From a host agent to one of its ranks: report what its actors do. Answered with ``RankActivity``s."""

    lease: Seconds  # as in Observe
    period: Seconds
    again: bool = False
    number: int = 0


class ActorActivity(msgspec.Struct, array_like=True, frozen=True):
    """One actor of a rank."""

    actor: str  # the unique name of its mesh
    name: str
    cls: str
    endpoint: str = ""  # the running endpoint
    since: float = 0.0  # when it started (seconds since 1970, on its host's clock)
    waiting: int = 0  # messages in its mailbox
    calls: int = 0
    failures: int = 0


class RankActivity(Message, tag=82):
    """From a rank to its host agent: the changes since its last report."""

    actors: list[ActorActivity]  # new or different
    gone: list[str]  # actors that have ended
    cell: str = ""  # the notebook cell that runs on the rank itself
    cell_since: float = 0.0
    sent: int = 0  # bytes of answers so far
    received: int = 0  # bytes of calls
    number: int = 0  # number of the last request with ``again`` before this report

    def joined(self, later: "RankActivity") -> "RankActivity":
        """Merge this report and a later one of the same rank."""
        actors = {actor.actor: actor for actor in self.actors if actor.actor not in later.gone}
        actors.update((actor.actor, actor) for actor in later.actors)
        gone = [actor for actor in dict.fromkeys((*self.gone, *later.gone)) if actor not in actors]
        return msgspec.structs.replace(later, actors=list(actors.values()), gone=gone)


class ProcFigures(msgspec.Struct, array_like=True, frozen=True):
    """A process, as its host sees it."""

    proc: str
    pid: int
    started: float  # on its host's clock
    up: bool  # it has said hello to its agent
    rss: int
    cpu: float  # percent of one processor
    gpu_memory: dict[int, int] = {}  # by GPU


class GpuFigures(msgspec.Struct, array_like=True, frozen=True):
    """A GPU of a host."""

    index: int
    name: str
    use: float
    memory_used: int
    memory_total: int


class HostFigures(msgspec.Struct, array_like=True, frozen=True):
    """A host."""

    cores: int
    cpu: float  # percent of all cores
    memory_used: int
    memory_total: int
    gpus: list[GpuFigures] = []


class Observed(Message, tag=83):
    """From a host agent to a watching controller: changes since its last report."""

    time: float  # when it was sent, on the host's clock
    host: HostFigures | None
    procs: list[ProcFigures]
    activity: dict[str, RankActivity]  # by proc
