"""What a way of moving bytes has to offer. All have the same semantics; one conformance test runs on each."""

from __future__ import annotations

from typing import Protocol

from monarch_kernel.runtime.transfer.handle import Handle, Op


class Backend(Protocol):
    """A way of moving bytes between this process and the owner of a buffer.

    Attributes:
        name: as in ``RDMABuffer.backend`` and in the setting that forces one.
        inline: up to so many bytes ``move`` is done in the thread that asks for it, instead of on one of ours.
    """

    name: str
    inline: int

    @staticmethod
    def available() -> bool:
        """Whether this process can use it at all."""
        ...

    def bars(self, handle: Handle) -> str:
        """Why this pair of processes cannot use it, in a few words; empty if it can. Called often: be quick."""
        ...

    def move(self, op: Op, deadline: float | None) -> None:
        """Move the bytes, and return when they are there. Blocks, and lets other threads run meanwhile.

        Args:
            deadline: by ``time.monotonic()``; looked at between pieces of the transfer.

        Raises:
            Unfit: it cannot serve this pair after all, and has not touched anything.
            Gone: the owner is dead.
            RDMAError: the buffer was dropped, or its memory is not there.
            RDMATimeoutError: the deadline has passed.
        """
        ...
