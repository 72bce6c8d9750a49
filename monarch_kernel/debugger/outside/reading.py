"""Read processes of this machine twice: their states from the operating system, and their stacks with py-spy.

py-spy reads the memory of a process while the process runs. If that fails, it pauses the process for some milliseconds.
For native frames, it pauses the process for about 0.1 s.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from monarch_kernel.debugger.controller.stacks.pyspy import threads_of
from monarch_kernel.debugger.outside.processes import Figures, LaunchedRank, command_of, figures, python_version
from monarch_kernel.introspection import py_spy, read_gpus_once

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
