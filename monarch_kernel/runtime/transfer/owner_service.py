"""Serves requests to the owner of a buffer: copies through segments, atomics, drops, and offers of its backends."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.messages import (
    ERROR,
    OK,
    BufferAtomic,
    BufferDrop,
    BufferOffer,
    BufferRead,
    BufferWrite,
    Reply,
    encode,
)
from monarch_kernel.runtime.transfer.backends.segment import bytes_of, received
from monarch_kernel.runtime.transfer.device import scatter
from monarch_kernel.runtime.transfer.errors import RDMAError, Unfit
from monarch_kernel.runtime.transfer.memory import address_of

if TYPE_CHECKING:
    from monarch_kernel.runtime.transfer.engine import TransferEngine

#: The polling thread serves requests for up to this many bytes.
INLINE = 64 << 10
#: First byte of the answer to an offer.
TAKEN, UNFIT = b"+", b"-"


class OwnerService:
    """Handles the data plane's messages for an engine, on the polling thread; long work goes to ``engine.serve``."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        engine.node.handlers.update(
            {
                BufferRead: self._on_read,
                BufferWrite: self._on_write,
                BufferAtomic: self._on_atomic,
                BufferDrop: self._on_drop,
                BufferOffer: self._on_offer,
            }
        )

    def _on_read(self, link: Any, message: BufferRead, _body: Any) -> None:
        engine, at, size = self._engine, message.offset, message.size

        def serve() -> None:
            with self._answering(link, message.call), engine.held(message.buffer) as registration:
                registration.within(at, size)
                data = bytes_of(registration.memory, at, size)
                body, segment = engine.node.pack([data, b""], (size,), [link.peer])
                link.send(encode(Reply(message.call, 0, OK, (size,), segment)), body)

        self._serve(size, serve)

    def _on_write(self, link: Any, message: BufferWrite, body: Any) -> None:
        engine, size = self._engine, message.buffers[0]
        data = engine.node.apart(message.segment, body) if message.segment is not None else body

        def serve() -> None:
            nonlocal data
            with self._answering(link, message.call), engine.held(message.buffer) as registration:
                registration.within(message.offset, size, write=True)
                with received(data, message.buffers) as view:
                    scatter(registration.memory, message.offset, size, address_of(view))
                del view
                data = None  # releases the segment before the answer
                link.send(encode(Reply(message.call, 0, OK)), b"")

        self._serve(size, serve)

    def _on_atomic(self, link: Any, message: BufferAtomic, _body: Any) -> None:
        with self._answering(link, message.call):
            before = self._engine.change(message.buffer, message.offset, message.operand, message.expected)
            link.send(encode(Reply(message.call, 0, OK)), before.to_bytes(8, "little"))

    def _on_drop(self, link: Any, message: BufferDrop, _body: Any) -> None:
        self._engine.drop_here(message.buffer).add_done_callback(
            lambda _done: link.send(encode(Reply(message.call, 0, OK)), b""),
        )

    def _on_offer(self, link: Any, message: BufferOffer, body: Any) -> None:
        engine, request = self._engine, bytes(body)

        def serve() -> None:
            with self._answering(link, message.call):
                with engine.held(message.buffer):
                    backend = next((b for b in engine.backends if b.name == message.backend), None)
                    try:
                        if backend is None:
                            raise Unfit(f"{message.backend} is not available at {engine.node.id}")
                        answer = TAKEN + backend.offer(message.buffer, request, link.peer)
                    except Unfit as e:
                        answer = UNFIT + str(e).encode()
                link.send(encode(Reply(message.call, 0, OK)), answer)

        engine.serve.run(serve)

    def _serve(self, size: int, job: Callable[[], None]) -> None:
        if size <= INLINE:
            job()
        else:
            self._engine.serve.run(job)

    @contextmanager
    def _answering(self, link: Any, call: int) -> Generator[None, None, None]:
        try:
            yield
        except Exception as e:
            text = str(e) if isinstance(e, RDMAError) else f"{type(e).__name__}: {e}"
            link.send(encode(Reply(call, 0, ERROR)), text.encode())
