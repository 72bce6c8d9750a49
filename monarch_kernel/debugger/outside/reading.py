"""Read processes of this machine twice: their state from the operating system, and their stacks by py-spy.

py-spy reads the memory of a process while that runs on. It pauses the process for some milliseconds if that fails, and
for about 0.1 s for native frames.
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
from monarch_kernel.debugger.outside.permission import permission_remedy
from monarch_kernel.debugger.outside.processes import Figures, LaunchedRank, command_of, figures, python_version
from monarch_kernel.introspection import py_spy, read_gpus_once

#: The time between the two readings (seconds), unless a caller wants another one.
APART = 1.0
#: How long py-spy may take for one process (seconds), with and without native frames.
NATIVE_TIMEOUT, TIMEOUT = 20.0, 5.0
#: The most py-spy processes at the same time.
AT_ONCE = 4

#: Where frames are whose variables are kept, and which.
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_KEPT = ("args", "kwargs", "src", "dst")


class Moment(msgspec.Struct, frozen=True):
    """A process at one moment.

    Attributes:
        figures: what the kernel tells; None if the process was gone.
        dump: what py-spy has read; "" if nothing.
        error: why it has not, as a clause.
    """

    figures: Figures | None
    dump: str = ""
    error: str = ""


class OutsideProcess(msgspec.Struct, frozen=True):
    """A process that was read twice. It travels between hosts as JSON.

    Attributes:
        host: its host.
        pid: there.
        place: which rank it is.
        command: as it was started.
        first: what was read first.
        second: what was read a moment later, and is shown.
        apart: the time between the two (seconds).
        gpus: the GPUs that it holds memory on (bytes), by their number.
        busy: how busy these are (percent), by their number.
        python: the version of its Python; (0, 0) if that is not known.
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
        chosen: their places, by pid.
        native: with native frames.
        apart: the time between the two readings (seconds).
        host: what to call this machine; its own name by default.
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
    # A pause for py-spy wakes threads. It must not count as motion, so it lies outside of the time between the figures.
    return Moment((figures(pid) or seen) if first else seen, dump, error)


def _dump(pid: int, native: bool, stopped: bool) -> tuple[str, str]:
    """What py-spy has read of a process, or why not."""
    read = py_spy.read(pid, native, stopped, NATIVE_TIMEOUT if native else TIMEOUT, "--locals")
    if read.dump:
        return _without_values(read.dump), ""
    return "", read.trouble or _refusal(read.said)


def _without_values(dump: str) -> str:
    """A dump without variables, but those by which calls of `torch.distributed` name groups and peers."""
    threads = threads_of(dump)
    for thread in threads:
        for frame in thread.get("frames", ()):
            keep = _KEPT if _DISTRIBUTED in (frame.get("filename") or "") else ()
            frame["locals"] = [each for each in frame.get("locals") or () if each.get("name") in keep]
    return json.dumps(threads)


def _refusal(said: str) -> str:
    """What py-spy has said, with what to do if the system does not let it read another process."""
    lower = said.lower()
    if "permission denied" in lower or "operation not permitted" in lower:
        return permission_remedy("py-spy", "read")
    first = said.partition("\n")[0].removeprefix("Error: ").rstrip(".")
    return f"py-spy said: {first}" if first else "py-spy has read nothing"


def _gpus() -> tuple[dict[int, dict[int, int]], dict[int, float]]:
    """The memory of processes on GPUs of this host, and how busy those are; nothing without NVML or a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return {}, {}
    gpus, memory = read_gpus_once()
    return memory, {gpu.index: gpu.use for gpu in gpus}


def as_json(processes: Sequence[OutsideProcess]) -> bytes:
    """Processes in one line, for another host."""
    return msgspec.json.encode(processes)


def from_json(line: bytes) -> list[OutsideProcess]:
    """What another host has read.

    Raises:
        ValueError: it is something else.
    """
    return msgspec.json.decode(line, type=list[OutsideProcess])
