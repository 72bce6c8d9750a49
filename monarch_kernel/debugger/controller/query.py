"""Call one function in all ranks of a mesh, with one deadline for all answers.

The first query spawns agents on the mesh (`rank.agent.DebugAgent`). Ranks that are dead, stopped, or hold the
interpreter lock are reported separately from those that have answered, and do not delay them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from monarch_kernel.actor import SupervisionError
from monarch_kernel.debugger import get_debugger
from monarch_kernel.debugger.events import RankStop
from monarch_kernel.introspection import Whole, whole_of
from monarch_kernel.protocol.faults import Fault
from monarch_kernel.runtime.actor.errors import ActorError

if TYPE_CHECKING:
    from monarch_kernel.actor import ActorMesh, ProcMesh
    from monarch_kernel.debugger.rank.rank_debugger import DebugAgent


@dataclass(slots=True)
class Answers:
    """The answers to a query; ranks are numbered as in the queried mesh.

    Attributes:
        values: what `function` returned.
        errors: what it raised, as a traceback of the rank or a sentence.
        late: the ranks that did not answer in time.
        dead: the ranks that are dead, and why.
    """

    values: dict[int, Any] = field(default_factory=dict[int, Any])
    errors: dict[int, Fault | str] = field(default_factory=dict[int, "Fault | str"])
    late: tuple[int, ...] = ()
    dead: dict[int, str] = field(default_factory=dict[int, str])

    def error_of(self, rank: int) -> str:
        """Return what a rank raised, in one line; "" if nothing."""
        fault = self.errors.get(rank, "")
        return fault if isinstance(fault, str) else fault.summary


def ask(
    mesh: ProcMesh | ActorMesh[object],
    function: Callable[..., object],
    *args: object,
    ranks: Iterable[int] | None = None,
    timeout: float = 1.0,
) -> Answers:
    """Call ``function(*args)`` in each rank, on a thread of its debug agent, and gather answers until the deadline.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        function: a function of a module that ranks can import, or any callable that pickles.
        ranks: the ranks of ``mesh`` to query; all by default.
        timeout: the time for all ranks together (seconds).

    Raises:
        ValueError: ``mesh`` has no such rank.
        TypeError: ``mesh`` is not a mesh, or an argument does not pickle.
        RuntimeError: the mesh was stopped.
    """
    deadline = time.monotonic() + timeout
    whole = whole_of(mesh)
    agents = get_debugger().registry.watch_whole(whole).agents
    return ask_agents(agents, whole, function, *args, ranks=ranks, timeout=deadline - time.monotonic())


def ask_agents(
    agents: ActorMesh[DebugAgent],
    whole: Whole,
    function: Callable[..., object],
    *args: object,
    ranks: Iterable[int] | None = None,
    timeout: float = 1.0,
) -> Answers:
    """Run `ask` for a mesh whose agents are known (`registry.DebuggedMesh`).

    Args:
        agents: the agents of all its ranks.
        whole: the mesh, and the subset of its ranks in which `ranks` are numbered.
    """
    deadline = time.monotonic() + timeout
    chosen = chosen_ranks(ranks, len(whole.ranks))
    back = {whole.ranks[rank]: rank for rank in chosen}  # from ranks of the whole to those of `mesh`
    request = cloudpickle.dumps((function, args))
    answers = Answers(dead={back[rank]: why for rank, why in whole.procs.dead().items() if rank in back})
    living = [rank for rank in sorted(back) if back[rank] not in answers.dead]
    parts = _parts(agents, len(whole.procs), living)
    calls = [(part, of, part.run.stream(request)) for part, of in parts]
    waiting = set(living)
    for _part, of, call in calls:
        for slot in call:
            try:
                rank, value = slot.get(max(0.0, deadline - time.monotonic()))
            except SupervisionError as error:
                for failure in error.failures:
                    rank = of[failure.rank]
                    waiting.discard(rank)
                    answers.dead[back[rank]] = failure.death.cause if failure.death is not None else str(error)
            except ActorError as error:
                for failure in error.failures:
                    rank = of[failure.rank]
                    waiting.discard(rank)
                    answers.errors[back[rank]] = failure.fault or str(error)
            except TimeoutError:
                break  # answers come in completion order, so there are no others
            else:
                waiting.discard(rank)
                answers.values[back[rank]] = value
    answers.late = tuple(sorted(back[rank] for rank in waiting))
    return answers


def stops_of(whole: Whole) -> dict[int, RankStop]:
    """Return the reported stops of ranks, by rank of the queried mesh.

    For a rank that does not answer, this is its last known state.
    """
    back = {rank: at for at, rank in enumerate(whole.ranks)}
    stops = get_debugger().stops(whole.procs)
    return {back[at.rank]: at for at in stops if at.rank in back and at.stop.thread and at.stop.frames}


def chosen_ranks(ranks: Iterable[int] | None, size: int) -> list[int]:
    """Return these ranks (None: all) of a mesh of that size, sorted. Raises ValueError if there is no such rank."""
    if ranks is None:
        return list(range(size))
    chosen = sorted(set(ranks))
    for rank in chosen:
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank}: the mesh has {size} (0 to {size - 1})")
    return chosen


def _parts(
    agents: ActorMesh[DebugAgent], size: int, ranks: Sequence[int]
) -> list[tuple[ActorMesh[DebugAgent], Sequence[int]]]:
    """Return the agents of these ranks (sorted) as slices, each with its ranks."""
    if not ranks:
        return []
    if len(ranks) == size:
        return [(agents, ranks)]
    flat = agents.flatten("ranks")
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return [(flat.slice(ranks=slice(start, end)), range(start, end)) for start, end in runs]
