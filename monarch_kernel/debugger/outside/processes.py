"""Read the owner, state, threads, processor time and rank of a process from the operating system."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from monarch_kernel.debugger.controller.stacks.pyspy import threads_of
from monarch_kernel.engines.join.identity import identity
from monarch_kernel.introspection import py_spy, read_gpus_once

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


# Read processes of this machine twice: their states from the operating system, and their stacks with py-spy.
#
# py-spy reads the memory of a process while the process runs. If that fails, it pauses the process for some
# milliseconds. For native frames, it pauses the process for about 0.1 s.

# Explain why the system denies this user access to the memory of a process, and the remedy.

_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def permission_remedy(who: str, verb: str, ptrace_scope: str | None = None) -> str:
    """Build a clause with the reason and the remedy.

    Args:
        who: the program that was denied access.
        verb: what it tried to do with the memory: "read", "write to".
        ptrace_scope: the value of that setting; by default that of this system.
    """
    scope = _ptrace_scope() if ptrace_scope is None else ptrace_scope
    if scope in ("1", "2", "3"):
        whom = {"1": "its ancestors and root", "2": "root only", "3": "no process"}[scope]
        what = (
            "an administrator can set it to 0 (sysctl kernel.yama.ptrace_scope=0)"
            if scope != "3"
            else "only a restart of the machine can change that"
        )
        return f"the system lets {whom} {verb} its memory (kernel.yama.ptrace_scope is {scope}); {what}"
    return (
        f"the system does not let {who} {verb} its memory; in a container, the capability SYS_PTRACE is missing "
        "(docker run --cap-add SYS_PTRACE, or securityContext.capabilities.add of a Pod)"
    )


def _ptrace_scope() -> str:
    try:
        with open(_PTRACE_SCOPE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # a kernel without Yama
        return ""


#: The default time between the two readings (seconds).
APART = 1.0
#: The time limit of py-spy for one process (seconds), with and without native frames.
NATIVE_TIMEOUT, TIMEOUT = 20.0, 5.0
#: The maximum number of parallel py-spy processes.
AT_ONCE = 4

#: The files of frames whose variables are kept, and the kept variables.
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_KEPT = ("args", "kwargs", "src", "dst")


class Moment(msgspec.Struct, frozen=True):
    """A process at one moment.

    Attributes:
        figures: the figures from the operating system; None if the process was gone.
        dump: the dump of py-spy; "" if there is none.
        error: why there is no dump, as a clause.
    """

    figures: Figures | None
    dump: str = ""
    error: str = ""


class OutsideProcess(msgspec.Struct, frozen=True):
    """A process that was read twice. It is sent between hosts as JSON.

    Attributes:
        host: its host.
        pid: its pid on the host.
        place: its rank.
        command: its command line.
        first: the first reading.
        second: the second reading, which is shown.
        apart: the time between the two readings (seconds).
        gpus: the memory that it holds on each GPU (bytes), by GPU number.
        busy: the utilization of these GPUs (percent), by GPU number.
        python: its Python version; (0, 0) if unknown.
    """

    host: str
    pid: int
    place: LaunchedRank
    command: str
    first: Moment
    second: Moment
    apart: float
    gpus: dict[int, int] = {}
    busy: dict[int, float] = {}
    python: tuple[int, int] = (0, 0)


def read_processes(
    chosen: Mapping[int, LaunchedRank], *, native: bool = False, apart: float = APART, host: str = ""
) -> list[OutsideProcess]:
    """Read processes of this machine and user, twice.

    Args:
        chosen: their ranks, by pid.
        native: include native frames.
        apart: the time between the two readings (seconds).
        host: the name to report for this machine; by default its own.
    """
    pids = list(chosen)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="monarch-look") as pool:

        def read_all(first: bool) -> dict[int, Moment]:
            return dict(zip(pids, pool.map(lambda pid: _moment(pid, native, first), pids), strict=True))

        began = time.monotonic()
        first = read_all(first=True)
        time.sleep(max(0.0, began + apart - time.monotonic()))
        between = time.monotonic() - began
        second = read_all(first=False)
    gpus, busy = _gpus()
    return [
        OutsideProcess(
            host or socket.gethostname(),
            pid,
            place,
            command_of(pid),
            first[pid],
            second[pid],
            between,
            gpus.get(pid, {}),
            {index: busy[index] for index in gpus.get(pid, {}) if index in busy},
            python_version(pid),
        )
        for pid, place in chosen.items()
    ]


def _moment(pid: int, native: bool, first: bool) -> Moment:
    seen = figures(pid)
    if seen is None:
        return Moment(None, error="it has ended")
    if seen.state == "Z":
        return Moment(seen, error="it has ended, and its parent has not taken notice")
    dump, error = _dump(pid, native, stopped=seen.state in "Tt")
    # A pause by py-spy wakes threads. It is kept outside of the time between the figures, so that it does not count as
    # motion.
    return Moment((figures(pid) or seen) if first else seen, dump, error)


def _dump(pid: int, native: bool, stopped: bool) -> tuple[str, str]:
    """Return py-spy's dump of a process, or the reason why there is none."""
    read = py_spy.read(pid, native, stopped, NATIVE_TIMEOUT if native else TIMEOUT, "--locals")
    if read.dump:
        return _without_values(read.dump), ""
    return "", read.trouble or _refusal(read.said)


def _without_values(dump: str) -> str:
    """Return a dump without variables, except those by which calls of `torch.distributed` name groups and peers."""
    threads = threads_of(dump)
    for thread in threads:
        for frame in thread.get("frames", ()):
            keep = _KEPT if _DISTRIBUTED in (frame.get("filename") or "") else ()
            frame["locals"] = [each for each in frame.get("locals") or () if each.get("name") in keep]
    return json.dumps(threads)


def _refusal(said: str) -> str:
    """Return py-spy's error, with a remedy if the system does not let it read another process."""
    lower = said.lower()
    if "permission denied" in lower or "operation not permitted" in lower:
        return permission_remedy("py-spy", "read")
    first = said.partition("\n")[0].removeprefix("Error: ").rstrip(".")
    return f"py-spy said: {first}" if first else "py-spy has read nothing"


def _gpus() -> tuple[dict[int, dict[int, int]], dict[int, float]]:
    """Return the GPU memory of processes of this host, and the GPUs' utilization; empty without NVML or a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return {}, {}
    gpus, memory = read_gpus_once()
    return memory, {gpu.index: gpu.use for gpu in gpus}


def as_json(processes: Sequence[OutsideProcess]) -> bytes:
    """Encode processes as one line, for another host."""
    return msgspec.json.encode(processes)


def from_json(line: bytes) -> list[OutsideProcess]:
    """Decode processes that another host has read.

    Raises:
        ValueError: the line is invalid.
    """
    return msgspec.json.decode(line, type=list[OutsideProcess])
