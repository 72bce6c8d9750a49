"""The tools in a process of another runtime: their actors, and the calls that the process waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any, NoReturn

from monarch_kernel.actor import Future
from monarch_kernel.engines.hosted import tool_actor, wire
from monarch_kernel.engines.hosted.message_node import MessageNode, MessageSystem, set_message_system
from monarch_kernel.engines.hosted.tool_actor import Answer, ToolActor
from monarch_kernel.engines.interface import NotOffered, ToolRuntime
from monarch_kernel.introspection import Awaited, Running, keep_failure
from monarch_kernel.output import calling_origin
from monarch_kernel.protocol.refs import ProcRef
from monarch_kernel.runtime.actor.calls.pending import ManyCall, OneCall, StreamCall

_GET = Future.get.__code__


class ToolProcess(ToolRuntime):
    """The actors of tools in this process, and information about the process for tools
    (``interface.ToolRuntime``).

    Args:
        name: the name of the other runtime for users.
        ref: this process, as others address it.
    """

    def __init__(self, name: str, ref: ProcRef) -> None:
        super().__init__()
        self.NAME = name
        self.OFFERS = frozenset()
        self.node = MessageNode(ref)
        self.system = MessageSystem(self.node, self.send)
        self.actors: dict[str, ToolActor] = {}
        set_message_system(self.system)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, procs: tuple[ProcRef, ...], message: Any) -> None:
        """Send a message to procs."""
        raise NotImplementedError

    def receive(self, data: bytes) -> None:
        """Handle a message that the other runtime has carried here.

        Thread-safe; messages of one sender arrive in order.
        """
        self.handle(wire.decode(data))

    def handle(self, message: Any) -> None:
        """Handle a decoded message."""
        match message:
            case wire.CallAnswer():
                self.node.on_answer(message.proc, message.call, message.status, message.body)
            case wire.CallActor():
                actor = self.actors.get(message.actor)
                answer = self.answer_to(message.sender, message.call)
                if actor is not None:
                    actor.call(message.endpoint, message.body, message.origin, answer if message.call else None)
            case wire.SpawnActor(actor=name) if name in self.actors:
                pass  # an actor of the controller, requested by a rank
            case wire.SpawnActor():
                actor = self.actors[message.actor] = self.make_actor(message)
                actor.create(message.body, self.answer_to(message.sender, message.call))
            case wire.StopToolActor():
                actor = self.actors.pop(message.actor, None)
                answer = self.answer_to(message.sender, message.call)
                if actor is None:
                    answer(0, b"")
                else:
                    actor.stop(lambda: answer(0, b""))
            case _:
                pass  # from a later version

    def make_actor(self, message: wire.SpawnActor) -> ToolActor:
        """Create an actor."""
        raise NotImplementedError

    def answer_to(self, sender: str, call: int) -> Answer:
        """Return a function that answers a call of a process."""

        def answer(status: int, body: bytes) -> None:
            self.send((self.ref_of(sender),), wire.CallAnswer(self.node.id, call, status, bytes(body)))

        return answer

    def ref_of(self, proc: str) -> ProcRef:
        """Return the reference of a proc."""
        return ProcRef(proc, "", "", proc, "")

    # -- what tools ask about the process --------------------------------------------------------------

    def actor_here(self) -> ToolActor:
        """See ``ToolRuntime``."""
        actor = tool_actor.here.get()
        if actor is None:
            raise RuntimeError("this code does not run for an actor of a tool")
        return actor

    def running_here(self) -> tuple[str, str, str]:
        """See ``ToolRuntime``."""
        actor = tool_actor.here.get()
        return ("", "", calling_origin()) if actor is None else (actor.name, actor.running or "", calling_origin())

    def endpoints_here(self) -> list[Running]:
        """See ``ToolRuntime``."""
        return [
            Running(actor.name, running, actor.thread, None, True, actor.running_for)
            for actor in list(self.actors.values())
            if (running := actor.running) is not None
        ]

    def actors_here(self, actor: str = "") -> dict[str, Any]:
        """See ``ToolRuntime``."""
        found = list(self.actors.items())
        return {uid: each.object for uid, each in found if actor in ("", uid) and each.object is not None}

    def awaited_by(self, frames: Iterable[FrameType]) -> Awaited | None:
        """See ``ToolRuntime``."""
        for frame in frames:
            if frame.f_code is _GET:
                call = frame.f_locals.get("self")
                return _awaited(call) if isinstance(call, OneCall | ManyCall) else None
        return None

    def awaited_here(self, without: Collection[str] = ()) -> list[Awaited]:
        """See ``ToolRuntime``."""
        calls = list(self.node.calls.values())
        return [
            _awaited(call)
            for call in calls
            if isinstance(call, OneCall | ManyCall | StreamCall) and call._target.actor not in without
        ]

    def proc_here(self) -> str:
        """See ``ToolRuntime``."""
        return self.node.id

    def interrupt_main_thread(self) -> None:
        """See ``ToolRuntime``."""
        raise self.not_offered("interrupt the main thread of the controller")

    def keep_failure(self, error: BaseException, cell: str, running: tuple[str, str] | None = None) -> None:
        """See ``ToolRuntime``. ``running``: an actor and an endpoint of the other runtime."""
        keep_failure(error, cell, running or self.running_here()[:2], _later)

    def call_in_wait(self, errand: Callable[[], None]) -> None:
        """See ``ToolRuntime``."""
        self.node.poller.call_in_wait(errand)

    def not_offered(self, what: str) -> NotOffered:
        """Return the error for a feature that only this package's own runtime has."""
        return NotOffered(f"the engine {self.NAME} cannot {what}")

    def refuse(self, what: str) -> NoReturn:
        """Raise `NotOffered`."""
        raise self.not_offered(what)


def _awaited(call: OneCall | ManyCall | StreamCall) -> Awaited:
    target = call._target
    asked = tuple(dict.fromkeys(ref.id for ref in target.procs))
    if isinstance(call, OneCall):
        waiting = asked if not call.done() else ()
    else:
        waiting = tuple(dict.fromkeys(target.procs[rank].id for rank in call.unanswered()))
    return Awaited(call.what, waiting, call._number, asked, 1, target.of_tool)


def _later(delay: float, callback: Callable[[], None]) -> None:
    timer = threading.Timer(delay, callback)
    timer.daemon = True
    timer.start()
