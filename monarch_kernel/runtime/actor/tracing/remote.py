"""Turning records on and off in other processes, and collecting them; both sides.

A process records for one controller at a time, and stops when that controller is gone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_kernel.protocol.messages import AskTrace, Death, ProcRef
from monarch_kernel.protocol.trace_records import RecordedTrace, decode_recorded, encode_recorded
from monarch_kernel.runtime.actor.calls.pending import OneCall
from monarch_kernel.runtime.actor.calls.requests import acknowledge
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths, Target
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.actor.tracing import call_records, collective_calls
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink
from monarch_kernel.runtime.mesh.shape import SINGLE
from monarch_kernel.runtime.node import recorder
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.recorder import CAPACITY


def start_recording(capacity: int = CAPACITY) -> None:
    """Begin to record in this process."""
    recorder.start(capacity)
    call_records.follow()
    collective_calls.install()


def take_records() -> RecordedTrace:
    """What this process has recorded since it was last asked."""
    ring = recorder.recording
    taken = ring.take() if ring is not None else recorder.Recorder(1).take()
    return decode_recorded(encode_recorded(taken))


def stop_recording() -> None:
    """Record no more in this process."""
    recorder.stop()
    call_records.follow()
    collective_calls.uninstall()


# -- asked ------------------------------------------------------------------------------------------


class TraceService:
    """Answers ``AskTrace`` in a rank. Only its controller may ask for more than the time."""

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
    """A rank that can be asked for its records.

    Attributes:
        mesh: the name of its mesh.
        rank: its rank there.
        proc: the identifier of the process.
        host: the name of its host.
    """

    mesh: str
    rank: int
    proc: str
    host: str
    _ref: ProcRef

    def ask(self, order: str, capacity: int = 0) -> Future[Any]:
        """Send an ``AskTrace``; a future of its answer, which fails if the process is dead."""
        return _ask(get_system(), self._ref, order, capacity)


def living_ranks() -> list[TracedRank]:
    """The living ranks of all meshes of this controller, except those of tools."""
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
