"""Read the folder of a remote mount at the client: an actor in a separate process, with the memory that it lends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import time
import warnings
from typing import Any, NamedTuple

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning
from workspace_sync.model.errors import MountError, ScanError
from workspace_sync.model.manifest import FileEntry, Manifest, changes, delta, encode_delta
from workspace_sync.model.workspace import Workspace
from workspace_sync.mounts.layout import CLIENT, BlockRoutes, PackedSegment, lay_out
from workspace_sync.scanning import Index, Scan, scan

#: The interval at which a waiting host checks again without a notification (seconds).
_AGAIN = 0.5
#: Ignore rules for a mount: it shows the whole folder, whatever the folder's rules leave out of a sync.
_EVERYTHING = b"!*"


class Edition(NamedTuple):
    """New content of a folder.

    Attributes:
        change: the encoded difference to the previous manifest.
        segment: the segment with the new pieces.
    """

    change: bytes
    segment: PackedSegment


class Loan(NamedTuple):
    """A block in the memory of another process.

    Attributes:
        buffer: the memory.
        missing: the numbers of the pieces that could not be read.
        number: the number of the loan, for its return.
    """

    buffer: RDMABuffer
    missing: frozenset[int]
    number: int


class Way(NamedTuple):
    """Source of a block for a host.

    Attributes:
        source: a host, or ``CLIENT``.
        actor: the actor of the host that lends the block.
        loan: the block itself, if the client is the source.
    """

    source: int
    actor: Any = None
    loan: Loan | None = None


class MountSource(Actor):
    """Read a folder, and choose the source of each block for each host."""

    __tool__ = True

    def __init__(self) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._manifest: Manifest | None = None
        self._segments: list[PackedSegment] = []
        self._digests: set[bytes] = set()
        self._routes = BlockRoutes()
        self._hosts: dict[int, object] = {}
        self._incomplete: set[tuple[int, int]] = set()
        self._news = asyncio.Event()
        self._slabs = Slabs()
        self._scanning = asyncio.Lock()
        self._scan: Scan | None = None
        self._path = ""
        self._index: Index | None = None
        #: The number of bytes that hosts have received from here.
        self._sent = 0

    @concurrent_endpoint
    async def publish(self, path: str) -> Edition:
        """Read a folder, for the first time or again, and return the changes.

        Raises:
            MountError: it cannot be read.
        """
        async with self._scanning:
            if path != self._path:
                self._path, self._index = path, None
            found, self._index = await asyncio.to_thread(_scan, path, self._index)
            change = encode_delta(delta(self._manifest, found.manifest))
            changed = changes(self._manifest, found.manifest)
            files = [(each.path, each.new) for each in changed if isinstance(each.new, FileEntry)]
            segment = await asyncio.to_thread(lay_out, files, len(self._segments), self._digests)
            self._scan, self._manifest = found, found.manifest
            self._segments.append(segment)
            self._digests.update(piece.digest for block in segment.blocks for piece in block.pieces)
            for block in self._incomplete:  # unreadable blocks may have become readable
                self._routes.forget(block)
            self._incomplete.clear()
            return Edition(change, segment)

    @endpoint
    async def joined(self, hosts: list[object]) -> None:
        """Register the actors of all hosts, by their ranks."""
        self._hosts = dict(enumerate(hosts))

    @concurrent_endpoint
    async def route(self, host: int, segment: int, block: int, avoid: frozenset[int]) -> Way:
        """Return the source of a block for a host; wait until one is free."""
        key = (segment, block)
        while True:
            news = self._news
            source = self._routes.ask(host, key, time.monotonic(), avoid)
            if source == CLIENT:
                return await self._from_here(host, segment, block)
            if source is not None:
                return Way(source, self._hosts[source])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _AGAIN)

    @endpoint
    async def got(self, host: int, segment: int, block: int, source: int, loan: int) -> None:
        """Record that a host has received and verified a block."""
        if source == CLIENT:
            self._slabs.give_back(loan)
        self._routes.got(host, (segment, block), source)
        self._wake()

    @endpoint
    async def failed(self, host: int, segment: int, block: int, source: int, loan: int, dead: bool) -> None:
        """Record that a host did not get a block from its assigned source."""
        if source == CLIENT:
            self._slabs.give_back(loan)
        self._routes.failed(host, (segment, block), source)
        if dead and source != CLIENT:
            self._routes.dead(source)
        self._wake()

    @endpoint
    async def sent(self) -> int:
        """Return the number of bytes that hosts have received from here."""
        return self._sent

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _from_here(self, host: int, segment: int, block: int) -> Way:
        size = self._segments[segment].blocks[block].size
        slab: Slab | None = None
        try:
            slab = await self._slabs.get(size)
            missing = await asyncio.to_thread(self._fill, slab, segment, block)
        except BaseException:
            if slab is not None:
                self._slabs.free(slab)
            self._routes.failed(host, (segment, block), CLIENT)
            self._wake()
            raise
        if missing:
            self._incomplete.add((segment, block))
        self._sent += size
        return Way(CLIENT, None, Loan(slab.buffer, missing, self._slabs.lend(slab)))

    def _fill(self, slab: Slab, segment: int, block: int) -> frozenset[int]:
        """Read a block; return the numbers of the pieces whose file has changed."""
        assert self._scan is not None
        missing: set[int] = set()
        offset = 0
        for number, piece in enumerate(self._segments[segment].blocks[block].pieces):
            try:
                self._scan.read(piece.digest, slab.memory[offset : offset + piece.size])
            except (KeyError, ScanError):
                missing.add(number)
            offset += piece.size
        return frozenset(missing)


def _scan(path: str, index: Index | None) -> tuple[Scan, Index]:
    """Scan a folder completely, without ignore rules."""
    try:
        workspace = Workspace({path: ""}, links="keep")
        index = index or Index(f"{workspace.id}-mount")
        return scan(workspace, index, rules=_EVERYTHING), index
    except (ScanError, OSError) as e:
        raise MountError(str(e)) from None


#: The maximum number of blocks lent in parallel.
SLABS = 8
#: The time after which a process that has not returned a block is considered dead (seconds).
LEASE = 60.0


class Slab:
    """Memory registered for access by other processes."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.buffer = RDMABuffer(self.memory)


class Slabs:
    """Pool of memory to lend, one loan for each reader. Belongs to one event loop."""

    def __init__(self) -> None:
        self._slabs: list[Slab] = []
        self._free: asyncio.Queue[Slab] = asyncio.Queue()
        self._loans: dict[int, tuple[Slab, float]] = {}
        self._numbers = itertools.count(1)

    async def get(self, size: int) -> Slab:
        """Return memory of at least this size; wait until some is available."""
        while True:
            if self._free.empty() and len(self._slabs) < SLABS:
                self._slabs.append(Slab(size))
                return self._slabs[-1]
            try:
                slab = await asyncio.wait_for(self._free.get(), 1.0)
            except TimeoutError:
                late = time.monotonic() - LEASE
                for loan in [loan for loan, (_, since) in self._loans.items() if since < late]:
                    self.give_back(loan)
                continue
            if len(slab.memory) >= size:
                return slab
            self._slabs.remove(slab)
            await slab.buffer.drop()

    def lend(self, slab: Slab) -> int:
        """Record that another process reads from a slab; return the token with which that process returns it."""
        loan = next(self._numbers)
        self._loans[loan] = (slab, time.monotonic())
        return loan

    def give_back(self, loan: int) -> None:
        """End a loan."""
        held = self._loans.pop(loan, None)
        if held is not None:
            self.free(held[0])

    def free(self, slab: Slab) -> None:
        """Release memory from ``get`` that is not lent."""
        self._free.put_nowait(slab)
