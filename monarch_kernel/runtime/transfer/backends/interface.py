"""The interface between the transfer engine and its backends.

All backends have the same semantics: tests/transfer/test_conformance.py runs each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.handle import Handle, Op, OwnerRequest
from monarch_kernel.runtime.transfer.memory import Layout
from monarch_kernel.runtime.transfer.registration_table import PeerProcess, Registration
from monarch_kernel.runtime.transfer.thread_pool import ThreadPool


class BackendContext(Protocol):
    """The part of its engine that a backend may use.

    Attributes:
        node: this process's node.
        work: threads for transfers that this process starts.
        serve: threads for requests of other processes.
    """

    node: Node
    work: ThreadPool
    serve: ThreadPool

    def held(self, key: int, what: Any = "") -> AbstractContextManager[Registration]:
        """Hold a registration of this process for the context; ``what`` names the use in the error.

        Raises:
            RDMAError: the buffer was dropped.
        """
        ...

    def registration_around(self, layout: Layout) -> int:
        """Return the key of a registration that contains all of ``layout``; 0 if there is none."""
        ...

    def elsewhere(self, handle: Handle) -> str:
        """Return why this process cannot share memory with the buffer's owner; "" if it can."""
        ...

    def peer(self, handle: Handle) -> PeerProcess:
        """Return the owner's process, which is on this machine.

        Raises:
            Gone: the process has ended.
            OSError: the process cannot be accessed.
        """
        ...

    def dropped(self, op: Op) -> RDMAError:
        """Return the error of a transfer of a dropped buffer."""
        ...

    def ask(
        self, handle: Handle, message: Callable[[int], tuple[Any, Any]], what: str, deadline: float | None
    ) -> OwnerRequest:
        """Send the owner a message (header and body, for a call number).

        Return a future of the reply's body and buffer lengths.
        """
        ...

    def offer(self, handle: Handle, backend: str, request: bytes, deadline: float | None) -> bytes:
        """Make the owner's backend of that name prepare a buffer (``Backend.offer``). Blocks.

        Raises:
            Unfit: the owner's backend cannot prepare it; the message has the reason.
            RDMAError: the buffer was dropped, or its owner is dead.
            RDMATimeoutError: no answer before the deadline.
        """
        ...


class Backend(Protocol):
    """Moves bytes between this process and the owner of a buffer.

    Attributes:
        name: its name in ``RDMABuffer.backend`` and in the setting that forces a backend.
        inline: transfers of up to this many bytes run on the calling thread instead of on one of the engine's.
        devices: whether ``move`` accepts local memory of a GPU; otherwise the engine stages it through CPU memory.
    """

    name: str
    inline: int
    devices: bool

    @staticmethod
    def available() -> bool:
        """Return whether this process can use the backend at all."""
        ...

    def bars(self, handle: Handle) -> str:
        """Return why it cannot reach this buffer, in a few words; "" if it can.

        Called for each transfer: must be fast.
        """
        ...

    def move(self, op: Op, deadline: float | None) -> None:
        """Move the bytes, and return when they have arrived. Blocks, but lets other threads run.

        Args:
            deadline: on the clock of ``time.monotonic()``; checked between pieces of the transfer.

        Raises:
            Unfit: it cannot serve this pair of processes after all, and has not accessed any memory.
            Gone: the owner is dead.
            RDMAError: the buffer was dropped, or its memory is not mapped.
            RDMATimeoutError: the deadline has passed.
        """
        ...

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        """Prepare a buffer for a peer of this backend, at the owner.

        Runs on a thread of ``Engine.serve``: must be brief.

        Args:
            key: the registration that the peer is about to reach.
            request: what the peer's backend passed to ``Engine.offer``.
            peer: name of the requesting proc.

        Returns:
            What ``Engine.offer`` returns to the peer's backend.

        Raises:
            Unfit: the backend cannot serve the buffer; the message has the reason. The peer then uses the next best
                backend.
            RDMAError: the buffer was dropped.
        """
        ...

    def dropped(self, key: int) -> None:
        """Deny all peers access to a dropped registration of this process."""
        ...

    def peer_dead(self, proc: str) -> None:
        """End transfers with a proc that has died, and free its resources."""
        ...

    def close(self) -> None:
        """Free everything as the engine shuts down. Running transfers fail."""
        ...


class StatelessBackend:
    """Base of backends that keep no state and need no help from the owner's backend."""

    devices = False

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        raise NotImplementedError

    def dropped(self, key: int) -> None:
        """Do nothing: no state is kept."""

    def peer_dead(self, proc: str) -> None:
        """Do nothing: no state is kept."""

    def close(self) -> None:
        """Do nothing: no state is kept."""
