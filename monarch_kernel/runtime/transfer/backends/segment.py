"""Access buffers of other processes of this host through shared memory: the owner copies to or from a segment.

This is not one-sided: the owner needs a running thread. It is used if cross-memory attach is forbidden.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from monarch_kernel.protocol.messages import BufferRead, BufferWrite
from monarch_kernel.protocol.serialize import Apart
from monarch_kernel.runtime.transfer import device
from monarch_kernel.runtime.transfer.backends.interface import BackendContext, StatelessBackend
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Layout, Memory, address_of, copy, scratch

#: The size of a message (bytes), and the number of messages in flight.
CHUNK = 8 << 20
WINDOW = 4


class Segment(StatelessBackend):
    """Messages whose bytes lie in shared segments."""

    name = "segment"
    inline = -1  # it waits for answers

    def __init__(self, engine: BackendContext) -> None:
        self._engine = engine

    @staticmethod
    def available() -> bool:
        return True

    def bars(self, handle: Handle) -> str:
        return self._engine.elsewhere(handle)

    def move(self, op: Op, deadline: float | None) -> None:
        pending: deque[tuple[int, int, Any]] = deque()
        try:
            self._move(op, deadline, pending)
        except ConnectionError as e:
            raise RDMAError(f"{op} failed: {e}", op.handle.owner.id) from None
        finally:
            for _, _, answer in pending:  # after a failure: wait, so that nothing continues in the background
                answer.exception()

    def _move(self, op: Op, deadline: float | None, pending: deque[tuple[int, int, Any]]) -> None:
        at = 0
        while at < op.size or pending:
            if at < op.size and len(pending) < WINDOW:
                size = min(CHUNK, op.size - at)
                pending.append((at, size, self._ask(op, at, size, deadline)))
                at += size
                continue
            start, size, answer = pending.popleft()
            body, buffers = answer.get()
            if not op.write:
                with memoryview(received(body, buffers)) as data:
                    copy(op.memory.layout, start, Layout(address_of(data), (), size), 0, size)
                del body, answer  # releases the segment

    def _ask(self, op: Op, at: int, size: int, deadline: float | None) -> Any:
        key, offset = op.handle.key, op.offset + at
        if not op.write:
            return self._engine.ask(
                op.handle, lambda call: (BufferRead(call, key, offset, size), b""), str(op), deadline
            )

        def message(call: int) -> tuple[Any, Any]:
            node = self._engine.node
            body, segment = node.pack([bytes_of(op.memory, at, size), b""], (size,), [op.handle.owner.id])
            return BufferWrite(call, key, offset, (size,), segment), body

        return self._engine.ask(op.handle, message, str(op), deadline)


def received(body: Any, buffers: tuple[int, ...]) -> memoryview:
    """Return the bytes of a message with one buffer."""
    view = body.memory() if type(body) is Apart else memoryview(body)
    return view[: buffers[0]]


def bytes_of(memory: Memory, at: int, size: int) -> memoryview:
    """Return part of an object as contiguous bytes: a view if its memory is contiguous, otherwise a copy.

    The copy is valid until this thread makes the next one.
    """
    part = None if memory.device else memory.layout.part(at, at + size)
    if part is not None and part.contiguous:
        found: Any = (ctypes.c_char * size).from_address(part.address)
    else:
        found = device.staging(size) if memory.device else scratch(size)
        device.gather(memory, at, size, ctypes.addressof(found))
    return memoryview(found).cast("B")[:size]
