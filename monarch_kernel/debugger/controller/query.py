"""Questions to all ranks of a mesh, with one deadline for all of them.

The first question to a mesh puts an agent on it (`agent.DebugAgent`). A rank that is dead, stopped, or does not let go
of the interpreter is told apart from those that answered; nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from monarch_kernel.actor import SupervisionError
from monarch_kernel.debugger import get_debugger
from monarch_kernel.errors import ActorError, Fault
from monarch_kernel.introspection import Whole, whole_of


@dataclass(slots=True)
class Answers:
    """What the ranks that were asked have said; ranks are those of the mesh that was asked.

    Attributes:
        values: what `function` returned.
        errors: what it raised, as a traceback of the rank or a sentence.
        late: who has not answered in time.
        dead: who is dead, and why.
    """

    values: dict[int, Any] = field(default_factory=dict[int, Any])
    errors: dict[int, Fault | str] = field(default_factory=dict[int, "Fault | str"])
    late: tuple[int, ...] = ()
    dead: dict[int, str] = field(default_factory=dict[int, str])

    def error_of(self, rank: int) -> str:
        """What a rank has raised, in one line; "" if it has not."""
        fault = self.errors.get(rank, "")
        return fault if isinstance(fault, str) else fault.summary


def ask(
    mesh: Any,
    function: Callable[..., Any],
    *args: Any,
    ranks: Iterable[int] | None = None,
    timeout: float = 1.0,
) -> Answers:
    """Call ``function(*args)`` in each rank, on a thread of its debug agent, and gather what comes back in time.

    Args:
        mesh: a proc mesh or an actor mesh, or a slice of one.
        function: of a module that ranks can import, or anything else that pickles.
        ranks: of ``mesh``; all by default.
        timeout: seconds, for all ranks together.

    Raises:
        ValueError: ``mesh`` has no such rank.
        TypeError: ``mesh`` is no mesh, or an argument does not pickle.
        RuntimeError: the mesh was stopped.
    """
    deadline = time.monotonic() + timeout
    whole = whole_of(mesh)
    agents = get_debugger().registry.watch_whole(whole).agents
    return ask_agents(agents, whole, function, *args, ranks=ranks, timeout=deadline - time.monotonic())


def ask_agents(
    agents: Any,
    whole: Whole,
    function: Callable[..., Any],
    *args: Any,
    ranks: Iterable[int] | None = None,
    timeout: float = 1.0,
) -> Answers:
    """The same, of a mesh whose agents are known already (`registry.WatchedMesh`).

    Args:
        agents: of the whole mesh.
        whole: that mesh, and the part of it that is asked.
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
                break  # they come in order of completion: nobody else has answered either
            else:
                waiting.discard(rank)
                answers.values[back[rank]] = value
    answers.late = tuple(sorted(back[rank] for rank in waiting))
    return answers


def chosen_ranks(ranks: Iterable[int] | None, size: int) -> list[int]:
    """These ranks of a mesh of that size, sorted (None: all). Raises ValueError if there is no such rank."""
    if ranks is None:
        return list(range(size))
    chosen = sorted(set(ranks))
    for rank in chosen:
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank}: the mesh has {size} (0 to {size - 1})")
    return chosen


def _parts(agents: Any, size: int, ranks: Sequence[int]) -> list[tuple[Any, Sequence[int]]]:
    """Slices of the agents that are these ranks (sorted), each with its ranks."""
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
