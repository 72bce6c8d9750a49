"""Blocks that a first sync sends during the scan: content, followed by the files that it belongs to.

A block is the bytes of all pieces, then a list of ``EarlyFile`` (MessagePack), then its length (``<u32>``). The list
stands at the end, as it is known only when all have been read.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from workspace_sync.model.errors import ScanError, TamperedError
from workspace_sync.model.manifest import EarlyFile, digest_of, printable
from workspace_sync.scanning.hashing import ABOUT, CONTENT, ScanPlan, read_at
from workspace_sync.scanning.scanner import path_at_client
from workspace_sync.transfer.blocks import BlockPool

_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[EarlyFile]).decode
#: Blocks that are being filled or sent at a time.
_AT_ONCE = 10


def finished(memory: memoryview, used: int, files: list[EarlyFile]) -> tuple[memoryview, bytes]:
    """A block whose content is in its place, and its end: what describes that."""
    text = _encode(files)
    end = text + _LENGTH.pack(len(text))
    block = memory[: used + len(end)]
    block[used:] = end
    return block, end


def files_in(block: memoryview) -> tuple[list[tuple[EarlyFile, memoryview]], bytes]:
    """The files of a block, each with the bytes of its pieces, and the end of the block.

    Raises:
        TamperedError: this is no such block.
    """
    try:
        (length,) = _LENGTH.unpack(block[-_LENGTH.size :])
        end = bytes(block[len(block) - _LENGTH.size - length :])
        files = _decode(end[:length])
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise TamperedError(f"a block that arrived does not say what is in it: {e}") from None
    found: list[tuple[EarlyFile, memoryview]] = []
    at = 0
    for file in files:
        size = sum(file.sizes)
        found.append((file, block[at : at + size]))
        at += size
    if at + len(end) != len(block):
        raise TamperedError("a block that arrived is not as long as it says")
    return found, end


def refill(block: memoryview, end: bytes, read: Callable[[bytes, int, memoryview], bool]) -> EarlyFile | None:
    """Write a block once more; the file that is not as it was, if there is one.

    Args:
        block: as long as it was.
        end: of the block.
        read: reads bytes of a path in the tree from an offset; whether they are all there.
    """
    block[len(block) - len(end) :] = end
    at = 0
    for file in _decode(end[: -_LENGTH.size]):
        offset = file.offset
        for digest, size in zip(file.digests, file.sizes, strict=True):
            view = block[at : at + size]
            if not read(file.path, offset, view) or digest_of(view) != digest:
                return file
            at += size
            offset += size
    return None


@dataclass(slots=True)
class EarlyBlock:
    """A block at the client.

    Attributes:
        size: of it (bytes).
        end: what it says of its content.
        memory: the block, until it is sent.
    """

    size: int
    end: bytes
    memory: memoryview | None


class EarlyPipe:
    """Joins a scan, whose threads fill blocks, and the thread that sends them. It holds few at a time.

    Args:
    """

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
        """The scan is over, whatever has come of it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.arrived()

    # -- who sends --------------------------------------------------------------------------------------

    def plan(self) -> ScanPlan | None:
        """Wait for the plan of the scan; None: it ended without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._plan is not None or self._over)
            return self._plan

    @property
    def over(self) -> bool:
        """Whether the scan is over, and all blocks were popped."""
        return self._over and self._blocks.empty()

    def pop(self) -> Iterator[EarlyBlock]:
        """The blocks that have been filled meanwhile."""
        while not self._blocks.empty():
            yield self._blocks.get()

    def back(self, memory: memoryview) -> None:
        """A block's memory may be used again."""
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
        """Read the content of a block that was dropped once more.

        Raises:
            ScanError: a file has changed.
        """
        assert self._plan is not None  # there are no blocks before
        roots = self._plan.roots

        def read(path: bytes, offset: int, into: memoryview) -> bool:
            return read_at(path_at_client(roots, path), offset, into)

        changed = refill(block, end, read)
        if changed is not None:
            raise ScanError(
                f"{printable(path_at_client(roots, changed.path))} changed while it was read for the sync. Sync again "
                "when what writes it is done, or leave it out with a line in a .meshignore file."
            )
