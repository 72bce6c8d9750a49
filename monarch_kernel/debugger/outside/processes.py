"""Read the owner, state, threads, processor time and rank of a process from the operating system."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from typing import NamedTuple

from monarch_kernel.engines.join.identity import identity

#: The page of memory, and the tick of processor time.
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
#: In the paths of Python's programs and libraries.
_PYTHON = re.compile(r"/(?:lib)?python3\.(\d+)(?=[^/\s]*(?:\s|$))", re.MULTILINE)
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
#: How much of a command is kept.
_COMMAND = 200


class OutsideError(LookupError):
    """Processes cannot be read from outside; the message names them, the reason, and the remedy."""


class LaunchedRank(NamedTuple):
    """The rank, world size and job of a process, from its environment.

    Attributes:
        rank: -1 if it is not known.
        world: the number of ranks; 0 if it is not known.
        local: the ranks that its launcher has started on its host; none if it does not tell.
        launch: the same for all ranks of a launch; "" if it is not known.
        step: of a Slurm job; "" outside of one.
        elastic: torchrun has started it, or what else uses its agent.
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
        state: the letter of the kernel: R, S, D, T, t or Z.
        wchan: the function of the kernel in which its main thread sleeps; "" if it does not, or it cannot be read.
        threads: how many it has.
        rss: memory (bytes).
        cpu: processor time so far (seconds).
        ticks: processor time of each thread so far, by its number (clock ticks).
        switches: how often each thread has gone to sleep so far, by its number.
    """

    state: str
    wchan: str = ""
    threads: int = 0
    rss: int = 0
    cpu: float = 0.0
    ticks: Mapping[int, int] = {}
    switches: Mapping[int, int] = {}


def check_ours(pid: int) -> None:
    """Check that a process is this user's.

    Raises:
        OutsideError: it is another user's, or there is none.
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
    """The user that a process runs as; None if there is no such process."""
    # The owner of its folder would be root for a process that may not be dumped.
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def own_processes() -> list[int]:
    """All processes of this user on this machine."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return sorted(pid for pid in pids if owner_of(pid) == os.getuid())


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[1]) if fields else 0


def command_of(pid: int) -> str:
    """The command of a process, at most 200 characters; "" if it is gone."""
    text = _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return text if len(text) <= _COMMAND else f"{text[: _COMMAND - 1]}…"


def python_version(pid: int) -> tuple[int, int]:
    """The version of Python that a process runs, by its program, or the library that it has loaded; (0, 0) for none."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return (0, 0)
    found = _PYTHON.search(program) or _PYTHON.search(_text(f"/proc/{pid}/maps"))
    return (3, int(found[1])) if found else (0, 0)


def launched_rank(pid: int) -> LaunchedRank:
    """Which rank a process is. Of its environment, nothing else is kept: it may hold secrets."""
    pairs = (item.partition("=") for item in _text(f"/proc/{pid}/environ").split("\0"))
    return launched_rank_in({name: value for name, _, value in pairs})


def launched_rank_in(environ: Mapping[str, str]) -> LaunchedRank:
    """Which rank a process with this environment is."""
    told = identity(environ)
    local: tuple[int, ...] = ()
    size = environ.get("LOCAL_WORLD_SIZE", "")
    if told.rank >= 0 and told.local_rank >= 0 and size.isdecimal():
        first = told.rank - told.local_rank
        local = tuple(range(first, first + int(size)))
    step = environ.get("SLURM_STEP_ID", "") if environ.get("SLURM_JOB_ID") else ""
    return LaunchedRank(told.rank, told.world, local, told.launch, step, "TORCHELASTIC_RUN_ID" in environ)


def figures(pid: int) -> Figures | None:
    """The figures of a process now; None if it is gone."""
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
    """The fields of a stat file from the state on; [] if the process is gone."""
    return _text(path).rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:  # it has ended, or is another user's
        return ""
