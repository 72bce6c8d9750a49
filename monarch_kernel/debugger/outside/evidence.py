"""Convert two py-spy readings of processes to `Evidence` for the hang verdict. Pure.

From outside, frames are visible and most values are not. A collective has no number, and its process group is known
only if the call names none, which means the default group. If calls name a group, all ranks are assumed to name the
same one, and no verdict is returned that depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from monarch_kernel.debugger.controller.hang.judge import settle
from monarch_kernel.debugger.controller.hang.spied import (
    file_of,
    in_collective,
    is_native,
    is_user_spied,
    location_of_spied,
    user_location,
)
from monarch_kernel.debugger.controller.stacks.pyspy import SpiedFrame, SpiedThread, threads_of
from monarch_kernel.debugger.model.evidence import (
    DEAD,
    IDLE,
    LOADS,
    RUNS,
    SILENT,
    UNASKED,
    UNREAD,
    UNSEEN_GROUP,
    WAITS,
    Evidence,
    Operation,
    ProcessGroup,
    Wait,
)
from monarch_kernel.debugger.outside.reading import Moment, OutsideProcess
from monarch_kernel.debugger.rank.hang.collect import LOADER, MAKING, P2P
from monarch_kernel.debugger.rank.hang.flight import C10D, public_name
from monarch_kernel.debugger.source_locations import LIBRARY, SourceLocation
from monarch_kernel.introspection import py_spy

#: PyTorch's name of the default process group.
_DEFAULT = "0"
#: The file of the wrapper through which functions of `torch.distributed` are called, with all their arguments.
_WRAPPERS = "c10d_logger.py"
#: The innermost Python frame of a backward pass; with DistributedDataParallel, it waits for collectives.
_BACKWARD = (f"{os.sep}autograd{os.sep}graph.py", "_engine_run_backward")
_TORCH = f"{os.sep}torch{os.sep}"
#: Prefixes of the names of native functions in which a thread waits for collectives.
_NATIVE = ("c10d::", "gloo::", "nccl")


def evidence_of(ranks: Mapping[int, OutsideProcess], world: int, *, complete: bool = True) -> dict[int, Evidence]:
    """Determine the evidence of the ranks of a job, settled from both readings of each.

    Args:
        ranks: the processes that were read, by their rank.
        world: the number of ranks of the job.
        complete: whether these are all of the job's processes on their hosts; a rank that was started there and is not
            among them is then dead.
    """
    everyone = tuple(range(world))
    first = {rank: _evidence(rank, each, each.first, everyone) for rank, each in ranks.items()}
    second = {rank: _evidence(rank, each, each.second, everyone) for rank, each in ranks.items()}
    found = settle(first, second)
    started_here = {rank: each.host for each in ranks.values() for rank in each.place.local} if complete else {}
    for rank in everyone:
        if rank in found:
            continue
        host = started_here.get(rank)
        gone = f"{host} has no process of it any more" if host else ""
        found[rank] = Evidence(rank, DEAD if host else UNASKED, gone, answered=False)
    return found


def woken(ranks: Mapping[int, OutsideProcess]) -> set[int]:
    """Return the ranks whose main thread woke between the readings, and may therefore be in a later call than before.

    A thread that waits in one call sleeps all the time.
    """
    return {
        rank
        for rank, each in ranks.items()
        if each.first.figures is not None
        and each.second.figures is not None
        and each.first.figures.switches.get(each.pid) != each.second.figures.switches.get(each.pid)
    }


def _evidence(rank: int, process: OutsideProcess, moment: Moment, everyone: tuple[int, ...]) -> Evidence:
    figures = moment.figures
    if figures is None or figures.state == "Z":
        return Evidence(rank, DEAD, moment.error, answered=False)
    groups = {name: ProcessGroup(name, "", everyone) for name in (_DEFAULT, UNSEEN_GROUP)}
    # `answered` is true because `settle` compares only reports of ranks, and py-spy has read the same data.
    known = Evidence(rank, UNREAD, moment.error, rank, process.place.launch, groups)
    try:
        threads = threads_of(moment.dump) if moment.dump else []
    except ValueError as error:
        threads, known = [], replace(known, why=str(error))
    stopped = py_spy.state_of_letter(figures.state) if figures.state in "Tt" else ""
    main = next((thread for thread in threads if thread.get("os_thread_id") == process.pid), None)
    if main is None or not _acts(main):
        main = next((thread for thread in threads if user_location(thread) is not None), main)
    place = (user_location(main) or _library_place(main)) if main is not None else None
    if stopped:
        return replace(known, state=SILENT, why=stopped, place=place)
    if not threads:
        return replace(known, answered=False)
    chosen = [thread for thread in threads if thread is main or in_collective(thread)]
    chosen.sort(key=lambda thread: thread is not main)
    waits = [wait for thread in chosen if (wait := _wait(thread)) is not None]
    if main is None or place is None:
        return replace(known, state=WAITS if waits else IDLE, why="", waits=tuple(waits))
    state, why, thread = RUNS, "", int(main.get("os_thread_id") or 0)
    own = _wait(main)
    if own is not None and own.operation.name not in _MOVING:
        state = WAITS
    elif any(LOADER in file_of(frame) for frame in main.get("frames", ())):
        state = LOADS
    elif figures.state == "D":
        why = py_spy.state_of_letter("D")
    return replace(
        known,
        state=state,
        why=why,
        waits=tuple(waits),
        place=place,
        stack=tuple(location_of_spied(frame) for frame in reversed(main.get("frames", ())) if is_user_spied(frame)),
        ident=hash(tuple((file_of(frame), frame.get("line"), frame.get("name")) for frame in main.get("frames", ()))),
        # A thread that has woken has moved, even if it has taken less than a tick.
        ticks=figures.ticks.get(thread, 0) + figures.switches.get(thread, 0),
    )


#: Waits that may be work. They count only if the thread has not moved between the readings.
_MOVING = ("backward",)


def _wait(thread: SpiedThread) -> Wait | None:
    """Return what a thread waits for; None if no wait is visible."""
    frames = list(thread.get("frames", ()))
    place = user_location(thread)
    native = [frame for frame in frames if is_native(frame)]
    python = [frame for frame in frames if not is_native(frame)]
    # User code of data loaders and callbacks runs inside library code, and may be called from anywhere.
    inner = python[: next((at for at, frame in enumerate(python) if is_user_spied(frame)), len(python))]
    calls = [frame for frame in inner if file_of(frame).endswith(C10D)]
    if calls:
        return _in_c10d(calls, inner, place)
    if any(LOADER in file_of(frame) for frame in inner):
        return None
    if inner and (file_of(inner[0]).endswith(_BACKWARD[0]) and inner[0].get("name") == _BACKWARD[1]):
        return Wait(Operation(UNSEEN_GROUP, 0, "backward", "backward", place=place), place=place)
    if any((frame.get("name") or "").startswith(_NATIVE) for frame in native):
        return Wait(Operation(UNSEEN_GROUP, 0, "wait", "Work.wait", place=place), place=place)
    return None


def _in_c10d(calls: Sequence[SpiedFrame], inner: Sequence[SpiedFrame], place: SourceLocation | None) -> Wait:
    names = [str(frame.get("name") or "").rpartition(".")[2] for frame in calls]
    name = public_name(((file_of(frame), each) for frame, each in zip(calls, names, strict=True)), names[0])
    if MAKING.intersection(names):
        return Wait(Operation("", 0, name, name, place=place), "group", place=place)
    group = _DEFAULT if _names_no_group(inner) else UNSEEN_GROUP
    if names[0] in P2P or names[0] == "wait":
        kind = "recv" if "recv" in names[0] else "send"
        values = _values(calls[0])
        peer = next((int(values[key]) for key in ("src", "dst") if values.get(key, "").isdecimal()), -1)
        return Wait(Operation(group, 0, names[0], name, place=place), kind, peer=peer, place=place)
    return Wait(Operation(group, 0, names[0], name, place=place), place=place)


def _names_no_group(frames: Sequence[SpiedFrame]) -> bool:
    """Return whether the outermost call of `torch.distributed` named no process group, and so used the default one."""
    outermost = next((frame for frame in reversed(frames) if file_of(frame).endswith(_WRAPPERS)), None)
    if outermost is None:
        return False
    values = _values(outermost)
    if "args" not in values or "kwargs" not in values:
        return False
    given = values["args"] + values["kwargs"]
    return "ProcessGroup" not in given and "DeviceMesh" not in given and "..." not in given


def _values(frame: SpiedFrame) -> dict[str, str]:
    return {each.get("name", ""): each.get("repr") or "" for each in frame.get("locals") or ()}


def _acts(thread: SpiedThread) -> bool:
    return user_location(thread) is not None or _library_place(thread) is not None


def _library_place(thread: SpiedThread) -> SourceLocation | None:
    """Return the position of a thread without user code: its innermost line outside Python's and PyTorch's code."""
    for frame in thread.get("frames", ()):
        if is_native(frame):
            continue
        place = location_of_spied(frame)
        installed = "-packages" in place.file or place.kind != LIBRARY
        if installed and _TORCH not in place.file and not place.file.startswith("<"):
            return place
    return None
