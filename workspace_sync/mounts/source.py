"""The client's side of a remote mount: an actor, in a process of its own, that reads the folder and gives its blocks away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import time
import warnings
from typing import Any, NamedTuple

from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning
from workspace_sync.model.errors import ScanError
from workspace_sync.model.manifest import Manifest, delta, encode_delta
from workspace_sync.mounts.layout import BLOCK_SIZE, Segment, lay_out
from workspace_sync.mounts.routes import CLIENT, Routes

#: How many blocks the client has in memory for hosts at a time.
SLABS = 8
#: A host that has not said that it has its block after so long has ended (seconds).
LEASE = 60.0
#: How often a host that has to wait looks again, if nothing tells it to (seconds).
_AGAIN = 0.5


class Edition(NamedTuple):
    """What a folder has become.

    Attributes:
        change: the encoded difference to the manifest before.
        segment: where the new pieces lie.
    """

    change: bytes
    segment: Segment


class Way(NamedTuple):
    """Where a host gets a block.

    Attributes:
        source: a host, or ``CLIENT``.
        buffer: the memory that has it, from ``offset`` on.
        missing: the numbers of the pieces that could not be read.
        lease: to be given back, if the client is the source.
    """

    source: int
    buffer: RDMABuffer
    offset: int
    missing: frozenset[int]
    lease: int


class _Slab:
    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.buffer = RDMABuffer(self.memory)


class MountSource(Actor):
    """Reads a folder, and decides who gets which block from whom."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self._manifest: Manifest | None = None
        self._segments: list[Segment] = []
        self._digests: set[bytes] = set()
        self._routes = Routes()
        self._memories: dict[tuple[int, int], RDMABuffer] = {}
        self._missing: dict[tuple[int, int], frozenset[int]] = {}
        self._news = asyncio.Event()
        self._slabs: list[_Slab] = []
        self._free: asyncio.Queue[_Slab] = asyncio.Queue()
        self._leases: dict[int, tuple[_Slab, float]] = {}
        self._numbers = itertools.count(1)
        self._scanning = asyncio.Lock()
        self._scan: Any = None
        #: Bytes that hosts have got from here.
        self._sent = 0

    @concurrent_endpoint
    async def publish(self, path: str) -> Edition:
        """Read a folder, anew or again, and say what has changed.

        Raises:
            MountError: it cannot be read.
        """
        async with self._scanning:
            found = await asyncio.to_thread(_scan, path)
            change = encode_delta(delta(self._manifest, found.manifest))
            segment = await asyncio.to_thread(lay_out, found.manifest, len(self._segments), self._digests)
            self._scan, self._manifest = found, found.manifest
            self._segments.append(segment)
            self._digests.update(piece.digest for block in segment.blocks for piece in block.pieces)
            for block in self._missing:  # what could not be read may have become readable
                self._routes.forget(block)
            self._missing.clear()
            return Edition(change, segment)

    @endpoint
    async def joined(self, host: int, segment: int, memory: RDMABuffer) -> None:
        """A host has room for a segment, and serves from there the blocks that it has."""
        self._memories[host, segment] = memory

    @concurrent_endpoint
    async def route(self, host: int, segment: int, block: int, avoid: frozenset[int]) -> Way:
        """Where a host gets a block; waits until there is a place."""
        key = (segment, block)
        while True:
            news = self._news
            source = self._routes.ask(host, key, time.monotonic(), avoid)
            if source == CLIENT:
                return await self._from_here(host, segment, block)
            if source is not None:
                offset = self._segments[segment].blocks[block].offset
                missing = self._missing.get(key, frozenset())
                return Way(source, self._memories[source, segment], offset, missing, 0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _AGAIN)

    @endpoint
    async def got(self, host: int, segment: int, block: int, source: int, lease: int) -> None:
        """A host has a block, verified."""
        self._give_back(lease)
        self._routes.got(host, (segment, block), source)
        self._wake()

    @endpoint
    async def failed(self, host: int, segment: int, block: int, source: int, lease: int, dead: bool) -> None:
        """A host did not get a block from where it was sent to."""
        self._give_back(lease)
        self._routes.failed(host, (segment, block), source)
        if dead and source != CLIENT:
            self._routes.dead(source)
        self._wake()

    @endpoint
    async def sent(self) -> int:
        """How many bytes hosts have got from here."""
        return self._sent

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _from_here(self, host: int, segment: int, block: int) -> Way:
        try:
            slab = await self._slab()
            missing = await asyncio.to_thread(self._fill, slab, segment, block)
        except BaseException:
            self._routes.failed(host, (segment, block), CLIENT)
            self._wake()
            raise
        if missing:
            self._missing[segment, block] = missing
        self._sent += self._segments[segment].blocks[block].size
        lease = next(self._numbers)
        self._leases[lease] = (slab, time.monotonic())
        return Way(CLIENT, slab.buffer, 0, missing, lease)

    async def _slab(self) -> _Slab:
        largest = max((b.size for segment in self._segments for b in segment.blocks), default=BLOCK_SIZE)
        while True:
            if self._free.empty() and len(self._slabs) < SLABS:
                self._slabs.append(_Slab(largest))
                return self._slabs[-1]
            try:
                slab = await asyncio.wait_for(self._free.get(), 1.0)
            except TimeoutError:
                late = time.monotonic() - LEASE
                for lease, (_, since) in list(self._leases.items()):
                    if since < late:
                        self._give_back(lease)
                continue
            if len(slab.memory) < largest:
                self._slabs.remove(slab)
                await slab.buffer.drop()
                continue
            return slab

    def _give_back(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        if held is not None:
            self._free.put_nowait(held[0])

    def _fill(self, slab: _Slab, segment: int, block: int) -> frozenset[int]:
        """Read a block; returns the numbers of the pieces whose file is not what it was any more."""
        missing: set[int] = set()
        offset = 0
        for number, piece in enumerate(self._segments[segment].blocks[block].pieces):
            try:
                self._scan.read(piece.digest, slab.memory[offset : offset + piece.size])
            except ScanError:
                missing.add(number)
            offset += piece.size
        return frozenset(missing)


class _Naive:
    def __init__(self, path: str) -> None:
        from workspace_sync.model.manifest import FileEntry, Folder, digest_of, seal

        folders: dict[bytes, Folder] = {}
        self.where: dict[bytes, tuple[bytes, int]] = {}
        root = os.fsencode(path)
        for top, names, files in os.walk(root):
            rel = os.path.relpath(top, root)
            rel = b"" if rel == b"." else rel
            folder = folders[rel] = Folder(os.stat(top).st_mode & 0o777, {}, {}, {})
            for name in [*files, *names]:
                full = os.path.join(top, name)
                if os.path.islink(full):
                    folder.links[name] = os.readlink(full)
                elif name in files:
                    st = os.stat(full)
                    data = open(full, "rb").read()
                    digests: list[bytes] = []
                    sizes: list[int] = []
                    if len(data) > 1 << 20:
                        for o in range(0, len(data), 1 << 20):
                            part = data[o : o + (1 << 20)]
                            digests.append(digest_of(part))
                            sizes.append(len(part))
                            self.where[digests[-1]] = (full, o)
                    d = digest_of(data)
                    self.where[d] = (full, 0)
                    folder.files[name] = FileEntry(
                        len(data), st.st_mode & 0o777, d, st.st_mtime_ns, tuple(digests), tuple(sizes)
                    )
            names[:] = [n for n in names if not os.path.islink(os.path.join(top, n))]
        self.manifest = seal(folders)

    def read(self, digest: bytes, into: memoryview) -> None:
        from workspace_sync.model.manifest import digest_of

        if digest not in self.where:
            raise ScanError("gone")
        full, offset = self.where[digest]
        try:
            with open(full, "rb") as f:
                f.seek(offset)
                n = f.readinto(into)
        except OSError as e:
            raise ScanError(str(e)) from None
        if digest_of(into[:n]) != digest:
            raise ScanError("changed")


def _scan(path: str) -> Any:
    return _Naive(path)
