"""Questions to a buffer's owner, as Futures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.messages import OK, Death, ProcRef
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer.errors import RDMAError, RDMATimeoutError
from monarch_kernel.runtime.transfer.handle import Handle

if TYPE_CHECKING:
    from monarch_kernel.runtime.transfer.engine import Engine


class Ask(Future[Any]):
    """The answer to one message: its body and its buffers' lengths."""

    __slots__ = ("_begun", "_engine", "_handle", "deadline", "number")

    def __init__(self, engine: Engine, handle: Handle, what: str, deadline: float | None) -> None:
        super().__init__(engine.node.poller, what)
        self._engine = engine
        self._handle = handle
        self._begun = time.monotonic()
        self.deadline = deadline
        self.number = engine.node.new_call(self)

    def _end(self) -> None:
        self._engine.node.end_call(self.number)
        self._engine.answered(self)

    def on_reply(self, rank: int, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        self._end()
        if status == OK:
            self._resolve((body, buffers))
        else:
            self._reject(RDMAError(f"{self.what} failed: {bytes(body).decode()}", self._handle.owner.id))

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self._handle.owner.id:
            self._end()
            self._reject(RDMAError(self._engine.obituary(self._handle, self.what, death), proc))

    def expire(self) -> None:
        """The deadline has passed."""
        self._end()
        waited = time.monotonic() - self._begun
        self._reject(
            RDMATimeoutError(f"{self.what}: no answer from the owner within {waited:.3g} s", self._handle.owner.id)
        )


class Obituary(Future[Death]):
    """Why a proc died, as soon as its agent says so."""

    __slots__ = ("_node", "_number", "_proc")

    def __init__(self, node: Node, proc: ProcRef) -> None:
        super().__init__(node.poller, f"the cause of the death of {proc.id}")
        self._node = node
        self._proc = proc.id
        self._number = node.new_call(self)
        node.learn(proc)
        node.link_to(proc.id)  # a dead proc does not answer; its agent then tells why
        if proc.id in node.deaths:
            self._resolve(node.deaths[proc.id])

    def on_reply(self, rank: int, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        """Nobody is asked anything."""

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self._proc:
            self._resolve(death)

    def end(self) -> None:
        """Stop listening."""
        self._node.end_call(self._number)
