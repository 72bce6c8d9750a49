"""Determine what this process waits for, as evidence for the verdict over all ranks."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import threading
import traceback
import types
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_kernel.debugger.events import shown_frame
from monarch_kernel.debugger.model.evidence import (
    IDLE,
    LOADS,
    PAUSED,
    RUNS,
    WAITS,
    CollectiveTimes,
    Evidence,
    Operation,
    ProcessGroup,
    TimedCollective,
    UserException,
    Wait,
)
from monarch_kernel.debugger.rank.rank_debugger import existing_tracer, rank_of
from monarch_kernel.debugger.source_locations import (
    SourceLocation,
    is_user,
    is_user_frame,
    kind_of,
    location_of,
    outwards,
)
from monarch_kernel.engines import tool_runtime
from monarch_kernel.introspection import (
    WAITING,
    awaited_by,
    called_method,
    failed_by_peer,
    latest_failure,
    operation_on,
    said_first,
)
from monarch_kernel.thread_frames import current_frames

if TYPE_CHECKING:
    from types import ModuleType


# Read PyTorch's Flight Recorder in a rank: the latest collectives of every process group, and which have ended.
#
# Since about PyTorch 2.8, the recorder is on by default for gloo and NCCL, with a buffer of 2,000 entries
# (`TORCH_FR_BUFFER_SIZE=0` turns it off). It records neither `send` and `recv` over gloo nor `monitored_barrier`.

C10D = "distributed_c10d.py"
#: Separates the names of group and backend, for operations of a backend other than gloo.
SECOND = " over "

_DONE = "completed"


def record(depth: int) -> dict[str, tuple[Operation, ...]]:
    """Return the latest `depth` collectives of each process group, oldest first; {} without a recorder."""
    return {name: tuple(_recorded_call(name, entry) for entry in calls[-depth:]) for name, calls in _by_group().items()}


def timed(depth: int) -> dict[str, tuple[TimedCollective, ...]]:
    """Return the same collectives, with the times at which this process called them."""
    return {name: tuple(_timed(name, entry) for entry in calls[-depth:]) for name, calls in _by_group().items()}


def _by_group() -> dict[str, list[Mapping[str, object]]]:
    """Return the entries of each process group, oldest first."""
    entries = sorted(_entries(), key=lambda entry: (_key(entry), entry["record_id"]))
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        calls = by_group.setdefault(_key(entry), [])
        if calls:
            last = calls[-1]
            number, latest = entry["collective_seq_id"], last["collective_seq_id"]
            if entry.get("pg_id") != last.get("pg_id") or number < latest:
                calls.clear()  # a new group with the same name
            elif number == latest:
                continue  # several entries of one coalesced operation
        calls.append(entry)
    return by_group


def _key(entry: Mapping[str, Any]) -> str:
    """Return the name of the group, with the backend unless it is gloo: each backend has separate numbers."""
    name: str = entry["process_group"][0]
    backend: str = entry["profiling_name"].partition(":")[0]
    return name if backend == "gloo" else f"{name}{SECOND}{backend}"


def _entries() -> Iterator[Mapping[str, object]]:
    try:
        bindings = importlib.import_module("torch._C._distributed_c10d")
    except ImportError:
        return
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        try:
            with _no_inductor():
                found = pickle.loads(dump(True, True, False))
        except Exception:  # another build of PyTorch: its frames are available even without its record
            continue
        yield from found.get("entries", ())


class _Unimported(types.ModuleType):
    """A substitute for `torch._inductor` that imports it if any attribute is used which the recorder does not query.

    To translate the frames of compiled code, the recorder checks whether `torch._inductor` has a `codecache`. That
    alone would import it: a second of processor time and 800 modules that this process does not use.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "codecache":
            raise AttributeError(name)
        torch = sys.modules["torch"]
        if vars(torch).get("_inductor") is self:
            del torch.__dict__["_inductor"]
        return getattr(importlib.import_module("torch._inductor"), name)


@contextmanager
def _no_inductor() -> Generator[None]:
    torch = sys.modules.get("torch")
    if torch is None or "_inductor" in vars(torch) or "torch._inductor" in sys.modules:
        yield
        return
    stand_in = _Unimported("torch._inductor")
    torch.__dict__["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:
            del torch.__dict__["_inductor"]


def _recorded_call(group: str, entry: Mapping[str, Any]) -> Operation:
    frames = entry.get("frames") or ()
    profiling: str = entry["profiling_name"]
    op = profiling.partition(":")[2] or profiling
    return Operation(
        group,
        int(entry["collective_seq_id"]),
        op,
        public_name(((frame["filename"], frame["name"]) for frame in frames), op),
        tuple(tuple(int(size) for size in shape) for shape in entry.get("input_sizes") or ()),
        tuple(entry.get("input_dtypes") or ()),
        _place(frames),
        bool(entry.get("retired")) or entry.get("state") == _DONE,
    )


def _timed(group: str, entry: Mapping[str, Any]) -> TimedCollective:
    call = _recorded_call(group, entry)
    # NCCL reports how long an operation took if TORCH_NCCL_ENABLE_TIMING is set. gloo does not.
    seconds = float(entry.get("duration_ms") or 0.0) / 1e3
    return TimedCollective(
        group, call.number, call.op, call.name, call.place, int(entry["time_created_ns"]) / 1e9, seconds
    )


def public_name(frames: Iterable[tuple[str, str]], op: str) -> str:
    """Return the outermost function of `torch.distributed` on a stack of (file, name) pairs, innermost first."""
    name = op
    for file, function in frames:
        if is_user(file):
            break
        if file.endswith(C10D) and not function.startswith("_") and function != "wrapper":
            name = function
    return name


def _place(frames: Iterable[Mapping[str, Any]]) -> SourceLocation | None:
    for frame in frames:
        if is_user(frame["filename"]):
            return SourceLocation(frame["filename"], int(frame["line"]), frame["name"], kind_of(frame["filename"]))
    return None


# Collect what this rank is doing, as `Evidence`. Reads the frames of other threads, and changes nothing.
#
# Only two kinds of threads count: those that run endpoints or cells, and those that are in `torch.distributed`.

_TORCH = f"{os.sep}torch{os.sep}"
#: The part of a path that identifies data loaders.
LOADER = f"{_TORCH}utils{os.sep}data{os.sep}"
#: Functions of `torch.distributed` that send or receive, and functions that create process groups.
P2P = {"send", "isend", "recv", "irecv", "send_object_list", "recv_object_list"}
MAKING = {
    "_store_based_barrier",
    "_new_process_group_helper",
    "_new_group_with_tag",
    "new_group",
    "init_process_group",
}


def collect(depth: int = 128) -> Evidence:
    """Collect what this rank is doing.

    Args:
        depth: how many of the latest collectives of each group to report.
    """
    rank = rank_of()[1]
    c10d: ModuleType | None = sys.modules.get("torch.distributed.distributed_c10d")
    groups, numbers, dist_rank, world = process_groups(c10d) if c10d is not None else ({}, {}, -1, "")
    history: dict[str, tuple[Operation, ...]] = {}
    for name, calls in (record(depth) if groups else {}).items():
        base = name.partition(SECOND)[0]
        if base in groups:
            groups.setdefault(name, replace(groups[base], name=name))
            numbers.setdefault(name, calls[-1].number)
            history[name] = calls
    # A group that replaces one of the same name has counted fewer operations than the record of the old one contains.
    history = {name: calls for name, calls in history.items() if calls[-1].number <= numbers[name]}
    threads = sorted(_threads(), key=lambda thread: not thread.endpoint)
    waits: list[Wait | None] = []
    looks: list[int] = []
    ticks = 0
    for thread in threads:
        ticks += thread.ticks()
        looks.append(thread.ident())
        waits.append(_Reader(c10d, groups, numbers, history).wait(thread.frames) or _call(thread))
    main = threads[0] if threads else None  # the thread of an endpoint or cell, if there is one
    running = main.operation if main is not None else None
    paused = _paused({thread.thread for thread in threads})
    state = IDLE
    if main is not None:
        state = WAITS if waits[0] is not None else LOADS if main.loads else RUNS
    if paused is not None:
        state = PAUSED
    return Evidence(
        rank,
        state,
        dist_rank=dist_rank,
        world=world,
        groups=groups,
        history=history,
        waits=tuple(wait for wait in waits if wait is not None),
        place=paused or (main.place if main is not None else None),
        stack=main.stack if main is not None else (),
        failure=_failure(history) if state == IDLE else None,
        endpoint=main.endpoint if main is not None else "",
        cell=main.cell if main is not None else "",
        ident=hash(tuple(looks)),
        ticks=ticks,
        counts=numbers,
        proc=tool_runtime().proc_here(),
        doing=running.label if running is not None else "",
        issued=(running.engine, running.record) if running is not None else None,
    )


# -- threads ----------------------------------------------------------------------------------------


class _Thread:
    """A thread that runs user code."""

    def __init__(self, thread: int, frame: FrameType, endpoint: str, cell: str = "") -> None:
        self.thread = thread
        self.endpoint = endpoint
        self.cell = cell
        self.frames = list(outwards(frame))
        self.operation = operation_on(self.frames)

    @property
    def stack(self) -> tuple[SourceLocation, ...]:
        return tuple(location_of(frame) for frame in reversed(self.frames) if is_user_frame(frame))

    @property
    def place(self) -> SourceLocation | None:
        return next((location_of(frame) for frame in self.frames if is_user_frame(frame)), None)

    @property
    def loads(self) -> bool:
        return any(LOADER in frame.f_code.co_filename for frame in self.frames)

    def ident(self) -> int:
        return hash(tuple((id(frame), frame.f_lasti) for frame in self.frames))

    def ticks(self) -> int:
        native = next((each.native_id for each in threading.enumerate() if each.ident == self.thread), None)
        return 0 if native is None else cpu_ticks(native)


def cpu_ticks(thread: int) -> int:
    """Return the processor time of a thread of this process so far, in clock ticks; 0 if unknown."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0


def _threads() -> Iterator[_Thread]:
    frames = current_frames()
    running = {each.thread: each for each in tool_runtime().endpoints_here()}
    own = {each.ident for each in threading.enumerate() if each.name.startswith("monarch-debug")}
    for thread, frame in frames.items():
        if thread in own or thread == threading.get_ident():
            continue
        found = running.get(thread)
        name = "" if found is None else "cell" if found.tool else found.label
        each = _Thread(thread, frame, name, "" if found is None else found.cell)
        in_c10d = any(frame.f_code.co_filename.endswith(C10D) for frame in each.frames) and not any(
            frame.f_code.co_name == "_distributed_excepthook" for frame in each.frames
        )
        if in_c10d or (found is not None and (each.place is not None or each.operation is not None)):
            yield each


def _call(thread: _Thread) -> Wait | None:
    """Return the call whose answer a thread waits for."""
    awaited = awaited_by(thread.frames)
    if awaited is None:
        return None
    place = thread.place
    return Wait(
        Operation("", awaited.number, "call", awaited.what, place=place), "call", place=place, procs=awaited.procs
    )


def _paused(threads: set[int]) -> SourceLocation | None:
    engine = existing_tracer()
    for stop in engine.stops() if engine is not None else ():
        frame = shown_frame(stop.frames) if stop.thread in threads else None
        if frame is not None:
            return SourceLocation(frame.file, frame.line, frame.name, kind_of(frame.file))
    return None


def _failure(history: dict[str, tuple[Operation, ...]]) -> UserException | None:
    last = latest_failure()
    if last is None:
        return None
    error = last.error
    frames = [
        SourceLocation(frame.filename, frame.lineno or 0, frame.name, kind_of(frame.filename))
        for frame in traceback.extract_tb(error.__traceback__, limit=-64)
    ]
    users = [frame for frame in frames if is_user(frame.file)]
    message = said_first(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return UserException(
        text if len(text) <= 200 else f"{text[:199]}…",
        users[-1] if users else None,
        last.cell,
        last.when,
        failed_by_peer(error),
        users[0].file if users else "",
    )


# -- torch.distributed ------------------------------------------------------------------------------


def process_groups(c10d: ModuleType) -> tuple[dict[str, ProcessGroup], dict[str, int], int, str]:
    """Return the process groups, the operation count of each, the rank of this process, and the id of its world."""
    groups: dict[str, ProcessGroup] = {}
    numbers: dict[str, int] = {}
    try:
        world = c10d._world
        default = world.default_pg
        if default is None:
            return {}, {}, -1, ""
        for group, name in list(world.pg_names.items()):
            ranks = world.pg_group_ranks.get(group)
            if ranks is None:
                continue
            groups[name] = ProcessGroup(name, _desc(group), tuple(sorted(ranks)), _timeout(group))
            numbers[name] = _number(group)
        return groups, numbers, int(c10d.get_rank()), _world(world.pg_map[default][1])
    except Exception:  # a process group is being created or destroyed at this moment, or this PyTorch is unknown
        return groups, numbers, -1, ""


def _desc(group: object) -> str:
    desc = getattr(group, "group_desc", "") or ""
    return "" if desc in ("undefined", "default_pg") else desc


def _timeout(group: Any) -> float:
    try:
        device = next(iter(group._device_types))
        return float(group._get_backend(device).options._timeout.total_seconds())
    except Exception:  # not every backend has a timeout
        return 0.0


def _number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:  # not every backend counts operations
        return 0


def _world(store: object) -> str:
    for _ in range(8):
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            break
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", "")
    return f"{host}:{port}" if port else str(getattr(store, "path", ""))


class _Reader:
    """Determines what a thread waits for from its frames."""

    def __init__(
        self,
        c10d: Any,  # the module; None without torch.distributed
        groups: dict[str, ProcessGroup],
        numbers: dict[str, int],
        history: dict[str, tuple[Operation, ...]],
    ) -> None:
        self._c10d = c10d
        self._groups = groups
        self._numbers = numbers
        self._pending = [call for calls in history.values() for call in calls if not call.done]
        self._recorded = bool(history)

    def wait(self, frames: Sequence[FrameType]) -> Wait | None:
        """Return what the thread with these frames (innermost first) waits for in torch.distributed, if anything."""
        if self._c10d is None:
            return None
        place = next((location_of(frame) for frame in frames if is_user_frame(frame)), None)
        ours: list[FrameType] = []
        for frame in frames:
            if frame.f_code.co_filename.endswith(C10D):
                ours.append(frame)
            elif is_user_frame(frame):
                break
        if ours:
            return self._in_c10d(ours, place)
        if any(LOADER in frame.f_code.co_filename for frame in frames):
            return None
        innermost = frames[0]
        file = innermost.f_code.co_filename
        called = called_method(innermost)
        in_torch = _TORCH in file
        if self._pending and (in_torch or called in WAITING):
            return Wait(self._pending[0], place=place)
        if called == "wait" and is_user(file) and self._work_of(innermost):
            return Wait(Operation("", 0, "p2p", "wait", place=place), "work", place=place)
        return None

    def _in_c10d(self, frames: list[FrameType], place: SourceLocation | None) -> Wait | None:
        names = [frame.f_code.co_name for frame in frames]
        name = public_name(((frame.f_code.co_filename, frame.f_code.co_name) for frame in frames), names[0])
        making = MAKING.intersection(names)
        if making:
            return Wait(Operation("", 0, name, name, place=place), "group", members=_members(frames), place=place)
        frame = next((each for each in frames if each.f_code.co_name not in ("wrapper",)), frames[0])
        values = frame.f_locals
        function = frame.f_code.co_name
        group = self._group_of(values.get("group"))
        root = next((values[key] for key in ("src", "dst") if isinstance(values.get(key), int)), -1)
        if function in P2P or (function == "wait" and not self._pending):
            kind = "recv" if "recv" in function else "send"
            shape = _shapes(values)
            call = Operation(group, 0, function, name, shape, place=place)
            return Wait(call, kind, peer=root, place=place)
        pending = [call for call in self._pending if call.group.partition(SECOND)[0] == group]
        if pending:
            # A call that blocks is the latest of its thread.
            mine = next((call for call in reversed(pending) if _same_line(call.place, place)), pending[-1])
            return Wait(mine, root=root, place=place)
        if function == "monitored_barrier" or not self._recorded:
            number = 0 if function == "monitored_barrier" else self._numbers.get(group, 0)
            return Wait(Operation(group, number, function, name, _shapes(values), place=place), root=root, place=place)
        return None  # it is just entering or leaving the call

    def _group_of(self, group: Any) -> str:
        world = self._c10d._world
        member = group if group is not None else world.default_pg
        try:
            return str(world.pg_names.get(member, ""))
        except TypeError:  # not hashable, so not a group
            return ""

    @staticmethod
    def _work_of(frame: FrameType) -> bool:
        return any(type(value).__name__.endswith("Work") for value in _flat(frame.f_locals.values()))


def _same_line(one: SourceLocation | None, other: SourceLocation | None) -> bool:
    return one is not None and other is not None and (one.file, one.line) == (other.file, other.line)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from list(value)[:32]
        else:
            yield value


def _members(frames: Sequence[FrameType]) -> tuple[int, ...]:
    for frame in reversed(frames):
        for key in ("ranks", "global_ranks_in_group"):
            ranks = frame.f_locals.get(key)
            if isinstance(ranks, list | tuple) and ranks and all(isinstance(rank, int) for rank in ranks):
                return tuple(sorted(ranks))
    return ()


def _shapes(values: dict[str, object]) -> tuple[tuple[int, ...], ...]:
    for key in ("tensor", "input_tensor", "input", "input_list", "input_tensor_list", "tensor_list"):
        value = values.get(key)
        many: Any = value if isinstance(value, list | tuple) else [value]
        if value is not None and all(hasattr(each, "shape") for each in many):
            return tuple(tuple(int(size) for size in each.shape) for each in many)
    return ()


# Read from PyTorch's Flight Recorder when this rank entered its latest collectives.


def collective_times(depth: int) -> CollectiveTimes:
    """Return the latest collectives of this rank, with the times at which it called them.

    Args:
        depth: how many collectives of each process group.
    """
    c10d: ModuleType | None = sys.modules.get("torch.distributed.distributed_c10d")
    groups, _, dist_rank, world = process_groups(c10d) if c10d is not None else ({}, {}, -1, "")
    members = {name: group.ranks for name, group in groups.items()}
    calls = [
        call for name, found in (timed(depth) if groups else {}).items() for call in found if _base(name) in groups
    ]
    for call in calls:
        members.setdefault(call.group, members[_base(call.group)])
    calls.sort(key=lambda call: call.entered)
    return CollectiveTimes(rank_of()[1], dist_rank, world, _clock(), socket.gethostname(), members, tuple(calls))


def _base(group: str) -> str:
    return group.partition(SECOND)[0]


def _clock() -> str:
    """Return an id that is equal for all processes that share a system clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
