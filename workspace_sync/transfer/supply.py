"""Build blocks at the client when hosts need them, and drop them afterwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from monarch_kernel.rdma import RDMABuffer
from workspace_sync.transfer.blocks import BlockPool, ContentBlock, fill
from workspace_sync.transfer.early import EarlyBlock, EarlyPipe

#: Threads that read files and build blocks.
BUILDERS = 2


class Supply:
    """The blocks of one sync at the client.

    Args:
        read: writes the content of a digest into a view; called by several threads.
        built: told of each block (number, its buffer or the error) by a thread that has built it.
    """

    def __init__(
        self,
        read: Callable[[bytes, memoryview], None],
        built: Callable[[int, RDMABuffer | BaseException], None],
    ) -> None:
        self._read = read
        self._built = built
        self._blocks: dict[int, ContentBlock | EarlyBlock | memoryview] = {}
        self._pipe: EarlyPipe | None = None
        #: Each with its memory, and what is done with that in the end.
        self._ready: dict[int, tuple[RDMABuffer, memoryview, Callable[[], None]]] = {}
        self._pool = BlockPool()
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, blocks: Sequence[ContentBlock]) -> None:
        """Blocks of pieces that may be asked for."""
        for block in blocks:
            self._blocks[block.number] = block

    def add_data(self, number: int, data: memoryview) -> None:
        """A block of bytes as they are: a part of a manifest."""
        self._blocks[number] = data

    def add_early(self, number: int, block: EarlyBlock, pipe: EarlyPipe) -> None:
        """A block that a scan has filled; its memory goes back to the pipe when it is dropped."""
        self._pipe = pipe
        memory, block.memory = block.memory, None
        assert memory is not None
        self._blocks[number] = block
        with self._lock:
            self._ready[number] = RDMABuffer(memory), memory, partial(pipe.back, memory)

    def want(self, number: int) -> None:
        """Build a block, or report one that is there at once; ``built`` is called with it."""
        with self._lock:
            ready = self._ready.get(number)
            if ready is None:
                if number in self._wanted:
                    return
                self._wanted.add(number)
                if len(self._threads) < BUILDERS:
                    thread = threading.Thread(target=self._build, name="monarch-sync-build", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                self._queue.put(number)
                return
        self._built(number, ready[0])

    def drop(self, number: int) -> None:
        """Forget the bytes of a block; it can be built again."""
        with self._lock:
            ready = self._ready.pop(number, None)
        if ready is not None:
            buffer, _, over = ready
            buffer.drop().add_done_callback(lambda _: over())

    def close(self) -> None:
        """Drop everything, and wait for the threads."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(-1)
        for thread in self._threads:
            thread.join()
        for number in list(self._ready):
            self.drop(number)

    def _build(self) -> None:
        while (number := self._queue.get()) >= 0:
            if self._closed:
                continue
            memory = memoryview(b"")
            over = partial(self._pool.give, memory)
            try:
                block = self._blocks[number]
                if isinstance(block, memoryview):
                    memory = block
                else:
                    memory = self._pool.take(block.size)
                    if isinstance(block, ContentBlock):
                        fill(memory, block.pieces, self._read)
                    elif self._pipe is not None:
                        self._pipe.fill(memory, block.end)
                over = partial(self._pool.give, memory)  # it takes only what it gave
                result: RDMABuffer | BaseException = RDMABuffer(memory)
            except BaseException as e:
                result = e
            with self._lock:
                self._wanted.discard(number)
                if isinstance(result, RDMABuffer):
                    self._ready[number] = result, memory, over
            self._built(number, result)
