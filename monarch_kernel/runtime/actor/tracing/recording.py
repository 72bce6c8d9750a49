"""Turn recording on and off, here and in other processes, and collect the records; both sides.

A process records for one controller at a time, and stops when that controller is gone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel.loading import after_import
from monarch_kernel.protocol.messages import AskTrace, Death, ProcRef
from monarch_kernel.protocol.trace_records import COLLECTIVE, RecordedTrace, decode_recorded, encode_recorded
from monarch_kernel.runtime.actor.calls.pending import OneCall, acknowledge
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths, Target
from monarch_kernel.runtime.actor.execution.collectives import C10D
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.actor.tracing import call_records
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.node import recorder
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.recorder import CAPACITY

if TYPE_CHECKING:
    from collections.abc import Sequence


def start_recording(capacity: int = CAPACITY) -> None:
    """Start recording in this process."""
    recorder.start(capacity)
    call_records.follow()
    _record_collectives()


def take_records() -> RecordedTrace:
    """Return the records of this process since the last call."""
    ring = recorder.recording
    taken = ring.take() if ring is not None else recorder.Recorder(1).take()
    return decode_recorded(encode_recorded(taken))


def stop_recording() -> None:
    """Stop recording in this process."""
    recorder.stop()
    call_records.follow()
    _restore_collectives()


def trace_clock() -> int:
    """Return the time on the clock of records (nanoseconds)."""
    return recorder.clock()


def is_recording() -> bool:
    """Return whether a trace is on in this process."""
    return recorder.recording is not None


def begin_record(kind: str, name: str, *, group: int = 0, call: str = "", size: int = 0) -> Callable[[int], None]:
    """Record that an activity begins now on this thread.

    Args:
        kind, name, group, size: see ``TraceRecord``.
        call: its ``id``.

    Returns:
        A function that records its end, with the ``mark`` of the record. It does nothing if no trace is on.
    """
    ring = recorder.recording
    if ring is None:
        return lambda _mark: None
    number = ring.begin(kind, name, group, call, size)
    return lambda mark: ring.end(number, mark)


@contextmanager
def recorded(kind: str, name: str, *, call: str = "") -> Generator[None]:
    """Record the block; see ``begin_record``."""
    end = begin_record(kind, name, group=recorder.group.get(), call=call)
    failed = 1
    try:
        yield
        failed = 0
    finally:
        end(failed)


# -- asked ------------------------------------------------------------------------------------------


class TraceService:
    """Answers ``AskTrace`` in a rank. Other processes than its controller may only ask for the time."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._for = ""  # the controller that has turned it on
        system.node.handlers[AskTrace] = self.on_ask
        system.node.on_peer_dead.append(self._on_peer_dead)

    def on_ask(self, link: MessageLink, message: AskTrace, _body: Body) -> None:
        """Handle the message."""
        now = recorder.clock()
        if message.order == "clock":
            acknowledge(link, message.call, message.rank, now)
            return
        taken = b""
        if link.peer != self._system.root.id:
            pass  # the answer has no records
        elif message.order == "on":
            self._for = link.peer
            start_recording(message.capacity or CAPACITY)
        else:
            ring = recorder.recording if self._for == link.peer else None
            taken = encode_recorded(ring.take()) if ring is not None else b""
            if message.order == "off" and ring is not None:
                self._end()
        acknowledge(link, message.call, message.rank, (now, taken))

    def _end(self) -> None:
        self._for = ""
        stop_recording()

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        if proc == self._for:
            self._end()


# -- asking -----------------------------------------------------------------------------------------


class TracedRank(msgspec.Struct, frozen=True):
    """A rank from which records can be requested.

    Attributes:
        mesh: the name of its mesh.
        rank: its rank in the mesh.
        proc: the identifier of the process.
        host: the name of its host.
    """

    mesh: str
    rank: int
    proc: str
    host: str
    _ref: ProcRef

    def ask(self, order: str, capacity: int = 0) -> Future[Any]:
        """Send an ``AskTrace``. Return a future of its answer, which fails if the process is dead."""
        return _ask(get_system(), self._ref, order, capacity)


def living_ranks() -> list[TracedRank]:
    """Return the living ranks of all meshes of this controller, except those of tools."""
    system = get_system()
    found: list[TracedRank] = []
    for mesh in list(system.proc_meshes.values()):
        if mesh._stopped or mesh._tool:
            continue
        for rank, ref in enumerate(mesh._target().procs):
            if ref.id not in system.node.deaths and ref.id != system.node.id:
                found.append(TracedRank(mesh.name, rank, ref.id, ref.host, ref))
    return found


def _ask(system: System, ref: ProcRef, order: str, capacity: int) -> OneCall:
    target = Target(f"rank on {ref.host}", ref.id, SINGLE, (ref,), ReportedDeaths())
    call = OneCall(system.node, f"trace {order}", target, 0)
    system.node.learn(ref)
    if not system.node.send(ref.id, AskTrace(call._number, 0, order, capacity)):
        call.on_peer_dead(ref.id, system.node.deaths[ref.id])
    return call


# -- collectives ------------------------------------------------------------------------------------

#: Functions of ``torch.distributed`` that wait for other ranks, and that a trace replaces by functions that record.
#: (Calls by C++ code, for the gradients of DistributedDataParallel, do not pass through them.)
_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
#: The modules that export them.
_MODULES = ("torch.distributed", C10D)

_watched = False


def _record_collectives() -> None:
    """Record collectives from now on, as soon as torch.distributed is imported."""
    global _watched
    if not _watched:
        _watched = True
        after_import(C10D, lambda _module: _replace())
    else:
        _replace()


def _restore_collectives() -> None:
    """Restore torch's own functions."""
    for name in _MODULES:
        module = sys.modules.get(name)
        for function in _COLLECTIVES if module is not None else ():
            original = getattr(getattr(module, function, None), "_monarch_records", None)
            if original is not None:
                setattr(module, function, original)


def _replace() -> None:
    c10d = sys.modules.get(C10D)
    if recorder.recording is None or c10d is None:
        return
    for function in _COLLECTIVES:
        original = getattr(c10d, function, None)
        if original is None or hasattr(original, "_monarch_records"):
            continue
        recording = _recording(function, original)
        for name in _MODULES:
            module = sys.modules.get(name)
            if getattr(module, function, None) is original:
                setattr(module, function, recording)


def _recording(name: str, original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def collective(*args: object, **kwargs: object) -> object:
        ring = recorder.recording
        if ring is None:
            return original(*args, **kwargs)
        number = ring.begin(COLLECTIVE, name, recorder.group.get(), "", _nbytes((*args, *kwargs.values())))
        failed = 1
        try:
            result = original(*args, **kwargs)
            failed = 0
            return result
        finally:
            ring.end(number, failed)

    collective._monarch_records = original  # type: ignore[attr-defined]  # how _restore_collectives() finds it
    return collective


def _nbytes(values: Sequence[object]) -> int:
    """Return the size of the largest tensor, or list of tensors, among the arguments (bytes)."""
    largest = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            largest = max(largest, sum(_bytes_of(each) for each in value))
        else:
            largest = max(largest, _bytes_of(value))
    return largest


def _bytes_of(value: object) -> int:
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if type(nbytes) is int else 0
