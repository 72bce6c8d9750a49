"""Memory of this process that others may reach."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.memory import Layout, Memory


@dataclass(slots=True)
class Registration:
    """Memory of this process that others may reach."""

    memory: Memory
    slot: int
    users: int = 0  # running transfers of this process
    dropped: Future[None] | None = None

    def within(self, offset: int, size: int, *, write: bool = False) -> Layout:
        """Check a request of another process to read (or write) these bytes; returns the memory's layout.

        Raises:
            RDMAError: the bytes are out of range, or may not be written.
        """
        layout = self.memory.layout
        if offset < 0 or size < 0 or offset + size > layout.nbytes:
            raise RDMAError(f"bytes {offset} to {offset + size} are not within its {layout.nbytes} bytes")
        if write and self.memory.why_readonly:
            raise RDMAError(self.memory.why_readonly)
        return layout
