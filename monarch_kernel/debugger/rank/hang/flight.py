"""Read PyTorch's Flight Recorder in a rank: the latest collectives of every process group, and which have ended.

Since about PyTorch 2.8, the recorder is on by default for gloo and NCCL, with a buffer of 2,000 entries
(`TORCH_FR_BUFFER_SIZE=0` turns it off). It records neither `send` and `recv` over gloo nor `monitored_barrier`.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from monarch_kernel.debugger.model.collective_times import TimedCollective
from monarch_kernel.debugger.model.evidence import Operation
from monarch_kernel.debugger.source_locations import SourceLocation, is_user, kind_of

C10D = "distributed_c10d.py"
#: Separates the names of group and backend, for operations of a backend other than gloo.
SECOND = " over "

_DONE = "completed"


def record(depth: int) -> dict[str, tuple[Operation, ...]]:
    """Return the latest `depth` collectives of each process group, oldest first; {} without a recorder."""
    return {name: tuple(_call(name, entry) for entry in calls[-depth:]) for name, calls in _by_group().items()}


def timed(depth: int) -> dict[str, tuple[TimedCollective, ...]]:
    """Return the same collectives, with the times at which this process called them."""
    return {name: tuple(_timed(name, entry) for entry in calls[-depth:]) for name, calls in _by_group().items()}


def _by_group() -> dict[str, list[Mapping[str, Any]]]:
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


def _entries() -> Iterator[Mapping[str, Any]]:
    try:
        bindings: Any = importlib.import_module("torch._C._distributed_c10d")
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
    torch: Any = sys.modules.get("torch")
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


def _call(group: str, entry: Mapping[str, Any]) -> Operation:
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
    call = _call(group, entry)
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
