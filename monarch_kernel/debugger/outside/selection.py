"""Select the processes that are the ranks of another program's job: by their pids, or as the workers of torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.debugger.outside.processes import (
    LaunchedRank,
    OutsideError,
    check_ours,
    command_of,
    launched_rank,
    own_processes,
    parent_of,
    python_version,
)


def named(pids: Sequence[int]) -> dict[int, LaunchedRank]:
    """Return the processes with these pids, in this order.

    Raises:
        OutsideError: a process does not exist, does not run Python, or belongs to another user.
    """
    for pid in pids:
        check_ours(pid)
        if python_version(pid) == (0, 0):
            raise OutsideError(f"process {pid} does not run Python, or may not be looked at: {command_of(pid)}")
    return {pid: launched_rank(pid) for pid in dict.fromkeys(pids)}


def torchrun_workers(agent: int = 0) -> dict[int, LaunchedRank]:
    """Return the workers of torchrun, or of another program that uses its agent (`accelerate launch`), on this machine.

    Args:
        agent: the pid of the agent; 0: the only job of this user here. The job may have further agents on this machine.

    Raises:
        OutsideError: there is no such job, or there are several.
    """
    if agent:
        check_ours(agent)
    places = {pid: launched_rank(pid) for pid in own_processes()}
    elastic = {pid: place for pid, place in places.items() if place.elastic and place.rank >= 0}
    workers = topmost({pid: place for pid, place in elastic.items() if python_version(pid) != (0, 0)})
    agents: dict[int, list[int]] = {}
    for pid in workers:
        above = parent_of(pid)
        while above in elastic:  # a shell or a tool that runs the worker
            above = parent_of(above)
        agents.setdefault(above, []).append(pid)
    launch_of = {parent: places[pids[0]].launch for parent, pids in agents.items()}
    if agent and agent not in agents:
        known = f"; these have:\n{_listed(agents)}" if agents else ", and no other process of yours here has"
        raise OutsideError(f"process {agent} has no workers of torchrun{known}")
    if not agents:
        raise OutsideError(
            "no process of yours on this machine has workers of torchrun; for ranks that something else has started, "
            "give their pids (--pids), or their Slurm job (--slurm)"
        )
    launches = {launch or str(parent) for parent, launch in launch_of.items()}
    if not agent and len(launches) > 1:
        raise OutsideError(f"several jobs of torchrun run here; give the pid of an agent:\n{_listed(agents)}")
    wanted = launch_of[agent] if agent else next(iter(launch_of.values()))
    chosen = [pid for parent, pids in agents.items() if parent == agent or launch_of[parent] == wanted for pid in pids]
    return {pid: places[pid] for pid in chosen}


def topmost(chosen: Mapping[int, LaunchedRank]) -> dict[int, LaunchedRank]:
    """Keep the processes whose parent is not the same rank: children, such as data loaders, inherit its variables."""
    return {pid: place for pid, place in chosen.items() if chosen.get(parent_of(pid)) != place}


def _listed(agents: Mapping[int, Sequence[int]]) -> str:
    return "\n".join(
        f"  {parent:>7}  {len(pids)} worker{'s' * (len(pids) != 1)}  {command_of(parent)}"
        for parent, pids in sorted(agents.items())
    )
