"""An actor that owns memory which processes of other hosts read and write. No pytest here: every rank imports it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy

from monarch_kernel.actor import Actor, current_rank, endpoint
from monarch_kernel.rdma import RDMABuffer, RDMATcpFallbackWarning


class Owner(Actor):
    """Owns an array of bytes, and reaches for those of others."""

    def __init__(self, size: int) -> None:
        warnings.simplefilter("ignore", RDMATcpFallbackWarning)
        self.mine = numpy.full(size, current_rank().rank, numpy.uint8)

    @endpoint
    def buffer(self) -> RDMABuffer:
        return RDMABuffer(self.mine)

    @endpoint
    def contents(self) -> tuple[int, int]:
        """The least and the largest byte."""
        return int(self.mine.min()), int(self.mine.max())

    @endpoint
    def read(self, buffer: RDMABuffer) -> tuple[str, int, int]:
        """Read all of a buffer: by which backend, the least and the largest byte."""
        got = numpy.full(len(self.mine), 255, numpy.uint8)
        buffer.read_into(got).get(60)
        return buffer.backend, int(got.min()), int(got.max())

    @endpoint
    def write(self, buffer: RDMABuffer, value: int) -> None:
        """Fill a buffer with a value."""
        buffer.write_from(numpy.full(len(self.mine), value, numpy.uint8)).get(60)

    @endpoint
    def count(self, buffer: RDMABuffer, times: int) -> None:
        """Add to its first word."""
        for _ in range(times):
            buffer.fetch_add(1).get(60)

    @endpoint
    def read_on(self, buffer: RDMABuffer, started: Any) -> str:
        """Read it again and again until that fails, and say why."""
        got = numpy.empty(len(self.mine), numpy.uint8)
        while True:
            try:
                buffer.read_into(got).get(60)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            if started is not None:
                started.send(None)
                started = None
