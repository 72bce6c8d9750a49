"""Handles of registered buffers, which are sent between processes, and operations on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from monarch_kernel.protocol.messages import OK, Death, ProcRef
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer.errors import RDMAError, RDMATimeoutError
from monarch_kernel.runtime.transfer.memory import Layout, Memory


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """The location of a registered buffer: a few hundred bytes that are valid in every process."""

    owner: ProcRef
    machine: str  # see ``registration_table.machine``
    pid: int
    started: int  # when the process started, to distinguish it from a later process with the same pid
    table: int  # the owner's file descriptor of its registration table
    slot: int
    key: int
    address: int
    dims: tuple[tuple[int, int], ...]
    run: int
    why_readonly: str
    signed: bool
    device: str = ""  # as in ``Memory.device``

    @property
    def layout(self) -> Layout:
        """The layout of the bytes in the owner's memory."""
        return Layout(self.address, self.dims, self.run)

    @property
    def size(self) -> int:
        """The size of the buffer (bytes)."""
        return self.layout.nbytes

    @property
    def who(self) -> str:
        """The name of the owner for messages."""
        return f"proc {self.owner.id} (pid {self.pid} on {self.owner.host})"


@dataclass(slots=True)
class Op:
    """One transfer: ``size`` bytes between a buffer, from ``offset`` on, and the start of local memory."""

    write: bool  # into the buffer
    handle: Handle
    offset: int
    memory: Memory
    size: int

    def __str__(self) -> str:
        verb = "write to" if self.write else "read of"
        end = self.offset + self.size
        return f"{verb} bytes {self.offset} to {end} of a buffer of {self.handle.size} bytes of {self.handle.who}"


encode_handle = msgspec.msgpack.Encoder().encode
decode_handle = msgspec.msgpack.Decoder(Handle).decode


# Requests to the owner of a buffer, as futures.


class OwnerRequest(Future[Any]):
    """The answer of a buffer's owner to one message: its body and its buffers' lengths.

    Args:
        ended: called with this request when it is answered, or has failed.
    """

    __slots__ = ("_begun", "_ended", "_handle", "_node", "deadline", "number")

    def __init__(
        self, node: Node, handle: Handle, what: str, deadline: float | None, ended: Callable[[OwnerRequest], None]
    ) -> None:
        super().__init__(node.poller, what)
        self._node = node
        self._handle = handle
        self._ended = ended
        self._begun = time.monotonic()
        self.deadline = deadline
        self.number = node.new_call(self)

    def _end(self) -> None:
        self._node.end_call(self.number)
        self._ended(self)

    def on_reply(self, rank: int, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        self._end()
        if status == OK:
            self._resolve((body, buffers))
        else:
            self._reject(RDMAError(f"{self.what} failed: {bytes(body).decode()}", self._handle.owner.id))

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self._handle.owner.id:
            self._end()
            self._reject(RDMAError(death_text(self._handle, self.what, death), proc))

    def expire(self) -> None:
        """Fail the request after its deadline."""
        self._end()
        waited = time.monotonic() - self._begun
        self._reject(
            RDMATimeoutError(f"{self.what}: no answer from the owner within {waited:.3g} s", self._handle.owner.id)
        )


def death_text(handle: Handle, what: str, death: Death | None) -> str:
    """Return the error text of a transfer that failed because the buffer's owner is dead."""
    cause = f": {death.cause}" if death is not None and death.cause else ""
    return f"{what} failed: the buffer's owner, {handle.who}, is gone{cause}"


def await_death(node: Node, proc: ProcRef, seconds: float) -> Death | None:
    """Wait for a host agent's report of how a proc died; None if there is no report in time.

    The polling thread does not wait.
    """
    death = node.deaths.get(proc.id)
    if death is None and not node.poller.in_leader():
        notice = _DeathNotice(node, proc)
        try:
            return notice.get(seconds)
        except TimeoutError:
            pass
        finally:
            notice.end()
    return death


class _DeathNotice(Future[Death]):
    """A future of a proc's death, done when its host agent reports it."""

    __slots__ = ("_node", "_number", "_proc")

    def __init__(self, node: Node, proc: ProcRef) -> None:
        super().__init__(node.poller, f"the cause of the death of {proc.id}")
        self._node = node
        self._proc = proc.id
        self._number = node.new_call(self)
        node.learn(proc)
        node.link_to(proc.id)  # a dead proc does not answer; its agent then reports why
        if proc.id in node.deaths:
            self._resolve(node.deaths[proc.id])

    def on_reply(self, rank: int, status: int, body: object, buffers: tuple[int, ...]) -> None:
        """Never called: no request was sent."""

    def on_peer_dead(self, proc: str, death: Death) -> None:
        if proc == self._proc:
            self._resolve(death)

    def end(self) -> None:
        """Stop listening."""
        self._node.end_call(self._number)
