"""Bookkeeping of calls in a process without its own links, whose messages another runtime carries."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from monarch_kernel.protocol.refs import Death, ProcRef
from monarch_kernel.runtime.actor.calls.pending import OneCall
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths
from monarch_kernel.runtime.node.poller import Poller


class MessageNode:
    """The parts of a node that pending calls need: a poller, the table of calls, and the known deaths.

    Args:
        ref: this process, as others address it.
    """

    def __init__(self, ref: ProcRef) -> None:
        self.id = ref.id
        self.ref = ref
        self.poller = Poller()
        self.calls: dict[int, Any] = {}
        #: The calls among them that are answered with arbitrary objects of the program. All others are answered with
        #: plain data.
        self.value_calls: set[int] = set()
        self.pids: dict[str, int] = {}
        self.deaths: dict[str, Death] = {}
        self.unresponsive: dict[str, Any] = {}
        self.generation = 0
        #: Held while an answer or a death is recorded; several threads may do that.
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)

    def new_call(self, sink: Any) -> int:
        """Register a pending call. Return its number."""
        number = next(self._numbers)
        self.calls[number] = sink
        return number

    def current(self, ref: ProcRef) -> ProcRef:
        """Return the proc itself: procs are never replaced here."""
        return ref

    def learn(self, ref: ProcRef) -> None:
        """Do nothing: sending needs no information about a proc."""

    def send(self, _proc: str, _message: Any) -> None:
        """Do nothing: messages of the runtime itself have no receiver here."""

    def on_answer(self, proc: str, call: int, status: int, body: bytes) -> None:
        """Pass the answer of a proc to its call."""
        with self.lock:
            sink = self.calls.get(call)
            if isinstance(sink, OneCall):
                sink.on_reply(0, status, body, ())
            elif sink is not None:
                for rank in sink._target.by_proc.get(proc, ()):
                    sink.on_reply(rank, status, body, ())

    def on_death(self, proc: str, death: Death) -> bool:
        """Fail the calls over a proc. Return whether its death was not known before."""
        with self.lock:
            if proc in self.deaths:
                return False
            self.deaths[proc] = death
            for sink in list(self.calls.values()):
                sink.on_peer_dead(proc, death)
        return True


class NothingHeld:
    """The table of calls that wait for a heal. Always empty, because procs are never replaced."""

    active = False


class MessageSystem:
    """The parts of an actor system that mesh handles need.

    Args:
        node: the calls of this process.
        send: sends a message to procs.
    """

    held_calls = NothingHeld()

    def __init__(self, node: MessageNode, send: Callable[[tuple[ProcRef, ...], Any], None]) -> None:
        self.node = node
        self.send = send
        self.reported = ReportedDeaths()
        self.proc_meshes: dict[str, Any] = {}


_system: MessageSystem | None = None


def set_message_system(system: MessageSystem | None) -> None:
    """Set the system for handles that are unpickled in this process."""
    global _system
    _system = system


def message_system() -> MessageSystem:
    """Return the system for handles that are unpickled in this process.

    Raises:
        RuntimeError: no tools of another engine run in this process.
    """
    if _system is None:
        raise RuntimeError("this handle belongs to a mesh of another engine, whose tools do not run in this process")
    return _system
