"""Supply blocks from the client: filled by a scan, or built when hosts need them, and dropped afterwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from monarch_kernel.rdma import RDMABuffer
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import EarlyFile, printable
from workspace_sync.scanning.hashing import ABOUT, CONTENT, ScanPlan, read_at
from workspace_sync.scanning.scanner import path_at_client
from workspace_sync.transfer.blocks import BlockPool, ContentBlock, fill, finished, refill

#: The number of blocks that are filled or sent at a time.
_AT_ONCE = 10


@dataclass(slots=True)
class EarlyBlock:
    """A block that a scan has filled.

    Attributes:
        size: the size of the block (bytes).
        end: the end of the block, which describes its content.
        memory: the block, until it is sent.
    """

    size: int
    end: bytes
    memory: memoryview | None


class EarlyPipe:
    """Bounded pipe between a scan, whose threads fill blocks, and the thread that sends them."""

    def __init__(self) -> None:
        self._pool = BlockPool()
        self._free = _AT_ONCE
        self._changed = threading.Condition()
        self._closed = False
        self._blocks: queue.SimpleQueue[EarlyBlock] = queue.SimpleQueue()
        self._plan: ScanPlan | None = None
        self._over = False
        self.arrived: Callable[[], object] = lambda: None

    # -- the scan ---------------------------------------------------------------------------------------

    def planned(self, plan: ScanPlan) -> None:
        """See ``ContentTaker``."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def take(self) -> memoryview | None:
        """See ``ContentTaker``."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                return None
            self._free -= 1
        return self._pool.take(CONTENT + ABOUT)

    def give(self, memory: memoryview, used: int, files: list[EarlyFile]) -> None:
        """See ``ContentTaker``."""
        if not files:
            self.back(memory)
            return
        block, end = finished(memory, used, files)
        self._blocks.put(EarlyBlock(len(block), end, block))
        self.arrived()

    def ended(self) -> None:
        """End the pipe: the scan is over, with or without success."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.arrived()

    # -- the sender -------------------------------------------------------------------------------------

    def plan(self) -> ScanPlan | None:
        """Wait for the plan of the scan; return None if it ended without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._plan is not None or self._over)
            return self._plan

    @property
    def over(self) -> bool:
        """Whether the scan is over and all blocks were popped."""
        return self._over and self._blocks.empty()

    def pop(self) -> Iterator[EarlyBlock]:
        """Iterate over the blocks that have been filled meanwhile."""
        while not self._blocks.empty():
            yield self._blocks.get()

    def back(self, memory: memoryview) -> None:
        """Return the memory of a block for reuse."""
        self._pool.give(memory)
        with self._changed:
            self._free += 1
            self._changed.notify()

    def close(self) -> None:
        """Refuse further content."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for _ in self.pop():
            pass

    def fill(self, block: memoryview, end: bytes) -> None:
        """Read the content of a dropped block again.

        Raises:
            ScanError: a file has changed.
        """
        assert self._plan is not None  # without a plan there are no blocks
        roots = self._plan.roots

        def read(path: bytes, offset: int, into: memoryview) -> bool:
            return read_at(path_at_client(roots, path), offset, into)

        changed = refill(block, end, read)
        if changed is not None:
            raise ScanError(
                f"{printable(path_at_client(roots, changed.path))} changed while it was read for the sync. Sync again "
                "when what writes it is done, or leave it out with a line in a .meshignore file."
            )


#: The number of threads that read files and build blocks.
BUILDERS = 2


class Supply:
    """Blocks of one sync at the client.

    Args:
        read: writes the content of a digest into a view; called by several threads.
        built: called with each block (number, its buffer or the error) by the thread that has built it.
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
        #: The blocks in memory, each with a function that releases the memory.
        self._ready: dict[int, tuple[RDMABuffer, memoryview, Callable[[], None]]] = {}
        self._pool = BlockPool()
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, blocks: Sequence[ContentBlock]) -> None:
        """Add blocks of pieces that may be requested."""
        for block in blocks:
            self._blocks[block.number] = block

    def add_data(self, number: int, data: memoryview) -> None:
        """Add a block of given bytes: a part of a manifest."""
        self._blocks[number] = data

    def add_early(self, number: int, block: EarlyBlock, pipe: EarlyPipe) -> None:
        """Add a block filled by a scan. When it is dropped, its memory returns to the pipe."""
        self._pipe = pipe
        memory, block.memory = block.memory, None
        assert memory is not None
        self._blocks[number] = block
        with self._lock:
            self._ready[number] = RDMABuffer(memory), memory, partial(pipe.back, memory)

    def want(self, number: int) -> None:
        """Build a block, or report an existing one at once, by a call of ``built``."""
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
        """Drop the bytes of a block; it can be built again."""
        with self._lock:
            ready = self._ready.pop(number, None)
        if ready is not None:
            buffer, _, over = ready
            buffer.drop().add_done_callback(lambda _: over())

    def close(self) -> None:
        """Drop all blocks, and wait for the threads."""
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
                over = partial(self._pool.give, memory)  # the pool accepts only its own memory
                result: RDMABuffer | BaseException = RDMABuffer(memory)
            except BaseException as e:
                result = e
            with self._lock:
                self._wanted.discard(number)
                if isinstance(result, RDMABuffer):
                    self._ready[number] = result, memory, over
            self._built(number, result)
