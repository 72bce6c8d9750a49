"""Read the owner, state, threads, processor time and rank of a process from the operating system."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch_kernel.engines.join.identity import identity

#: The size of a memory page (bytes), and the processor-time ticks per second.
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
#: The pattern of paths of Python's programs and libraries.
_PYTHON = re.compile(r"/(?:lib)?python3\.(\d+)(?=[^/\s]*(?:\s|$))", re.MULTILINE)
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
#: The maximum length of a command (characters).
_COMMAND = 200


class OutsideError(LookupError):
    """Processes cannot be read from outside. The message names them, the reason, and the remedy."""


class LaunchedRank(NamedTuple):
    """The rank, world size and job of a process, from its environment.

    Attributes:
        rank: -1 if unknown.
        world: the number of ranks; 0 if unknown.
        local: the ranks that its launcher has started on its host; empty if unknown.
        launch: equal for all ranks of a launch; "" if unknown.
        step: the step of a Slurm job; "" outside of one.
        elastic: whether torchrun, or another program that uses its agent, has started it.
    """

    rank: int = -1
    world: int = 0
    local: tuple[int, ...] = ()
    launch: str = ""
    step: str = ""
    elastic: bool = False


class Figures(NamedTuple):
    """The figures of a process at one moment.

    Attributes:
        state: the state letter of the operating system: R, S, D, T, t or Z.
        wchan: the kernel function in which its main thread sleeps; "" if it does not sleep, or this cannot be read.
        threads: the number of threads.
        rss: memory (bytes).
        cpu: processor time so far (seconds).
        ticks: processor time of each thread so far, by thread id (clock ticks).
        switches: how often each thread has gone to sleep so far, by thread id.
    """

    state: str
    wchan: str = ""
    threads: int = 0
    rss: int = 0
    cpu: float = 0.0
    ticks: Mapping[int, int] = {}
    switches: Mapping[int, int] = {}


def check_ours(pid: int) -> None:
    """Check that a process belongs to this user.

    Raises:
        OutsideError: it belongs to another user, or does not exist.
    """
    owner = owner_of(pid)
    if owner is None:
        raise OutsideError(f"there is no process {pid} on this machine")
    if owner != os.getuid():
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = str(owner)
        raise OutsideError(f"process {pid} belongs to user {name}; only processes of your own are read")


def owner_of(pid: int) -> int | None:
    """Return the user that a process runs as; None if there is no such process."""
    # The owner of its folder in /proc is root for a process that is not dumpable.
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def own_processes() -> list[int]:
    """Return all processes of this user on this machine."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return sorted(pid for pid in pids if owner_of(pid) == os.getuid())


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[1]) if fields else 0


def command_of(pid: int) -> str:
    """Return the command of a process, at most 200 characters; "" if it is gone."""
    text = _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return text if len(text) <= _COMMAND else f"{text[: _COMMAND - 1]}…"


def python_version(pid: int) -> tuple[int, int]:
    """Return the Python version that a process runs, from its program or its loaded library; (0, 0) for none."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return (0, 0)
    found = _PYTHON.search(program) or _PYTHON.search(_text(f"/proc/{pid}/maps"))
    return (3, int(found[1])) if found else (0, 0)


def launched_rank(pid: int) -> LaunchedRank:
    """Return the rank of a process. Nothing else from its environment is kept, as that may contain secrets."""
    pairs = (item.partition("=") for item in _text(f"/proc/{pid}/environ").split("\0"))
    return launched_rank_in({name: value for name, _, value in pairs})


def launched_rank_in(environ: Mapping[str, str]) -> LaunchedRank:
    """Return the rank of a process with this environment."""
    told = identity(environ)
    local: tuple[int, ...] = ()
    size = environ.get("LOCAL_WORLD_SIZE", "")
    if told.rank >= 0 and told.local_rank >= 0 and size.isdecimal():
        first = told.rank - told.local_rank
        local = tuple(range(first, first + int(size)))
    step = environ.get("SLURM_STEP_ID", "") if environ.get("SLURM_JOB_ID") else ""
    return LaunchedRank(told.rank, told.world, local, told.launch, step, "TORCHELASTIC_RUN_ID" in environ)


def figures(pid: int) -> Figures | None:
    """Return the current figures of a process; None if it is gone."""
    fields = _stat(f"/proc/{pid}/stat")
    if not fields:
        return None
    wchan = _text(f"/proc/{pid}/wchan").strip()
    ticks: dict[int, int] = {}
    switches: dict[int, int] = {}
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        tasks = []
    for task in tasks:
        of_task = _stat(f"/proc/{pid}/task/{task}/stat")
        if of_task:
            ticks[int(task)] = int(of_task[11]) + int(of_task[12])
            switches[int(task)] = _switches(f"/proc/{pid}/task/{task}/status")
    return Figures(
        fields[0],
        "" if wchan == "0" else wchan,
        len(ticks),
        int(fields[21]) * _PAGE,
        (int(fields[11]) + int(fields[12])) / _TICKS,
        ticks,
        switches,
    )


def _switches(path: str) -> int:
    found = _SWITCHES.search(_text(path))
    return int(found[1]) if found else 0


def _stat(path: str) -> list[str]:
    """Return the fields of a stat file, starting at the state; [] if the process is gone."""
    return _text(path).rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:  # it has ended, or belongs to another user
        return ""


# Select the processes that are the ranks of another program's job: by their pids, or as the workers of torchrun.


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
