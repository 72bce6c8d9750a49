"""The interface between the transfer engine and its backends: what a backend offers, and what it may ask for.

All backends have the same semantics: tests/transfer/test_conformance.py runs each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.transfer.errors import RDMAError
from monarch_kernel.runtime.transfer.handle import Handle, Op
from monarch_kernel.runtime.transfer.memory import Layout
from monarch_kernel.runtime.transfer.registration import Registration
from monarch_kernel.runtime.transfer.registration_table import PeerProcess
from monarch_kernel.runtime.transfer.requests import OwnerRequest
from monarch_kernel.runtime.transfer.thread_pool import ThreadPool


class Engine(Protocol):
    """What a backend may ask of the engine it belongs to.

    Attributes:
        node: this process's node.
        work: threads for transfers that this process begins.
        serve: threads for what other processes ask of this one.
    """

    node: Node
    work: ThreadPool
    serve: ThreadPool

    def held(self, key: int, what: Any = "") -> AbstractContextManager[Registration]:
        """A registration of this process, which is not let go meanwhile; ``what`` names the use in the error.

        Raises:
            RDMAError: the buffer was dropped.
        """
        ...

    def registration_around(self, layout: Layout) -> int:
        """The key of a registration that all of ``layout`` lies in; 0 for none."""
        ...

    def elsewhere(self, handle: Handle) -> str:
        """Why this process cannot share memory with the buffer's owner; empty if it can."""
        ...

    def peer(self, handle: Handle) -> PeerProcess:
        """The owner's process, which is of this machine.

        Raises:
            Gone: it has ended.
            OSError: it may not be looked into.
        """
        ...

    def dropped(self, op: Op) -> RDMAError:
        """What a transfer of a dropped buffer raises."""
        ...

    def ask(
        self, handle: Handle, message: Callable[[int], tuple[Any, Any]], what: str, deadline: float | None
    ) -> OwnerRequest:
        """Send the owner a message (header and body, for a call number); a Future of the answer's body and buffers."""
        ...

    def offer(self, handle: Handle, backend: str, request: bytes, deadline: float | None) -> bytes:
        """Have the owner's backend of that name do its part for a buffer (``Backend.offer``). Blocks.

        Raises:
            Unfit: it is not possible there; says why.
            RDMAError: the buffer was dropped, or its owner is dead.
            RDMATimeoutError: no answer before the deadline.
        """
        ...


class Backend(Protocol):
    """A way of moving bytes between this process and the owner of a buffer.

    Attributes:
        name: as in ``RDMABuffer.backend`` and in the setting that forces one.
        inline: up to so many bytes ``move`` is done in the thread that asks for it, instead of on one of ours.
        devices: whether ``move`` can take local memory of a GPU; if not, it goes through the CPU's.
    """

    name: str
    inline: int
    devices: bool

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

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        """At the owner: do what this way needs done there before a peer can reach a buffer. Not for ever: be quick.

        Args:
            key: the registration that the peer wants to reach.
            request: what the peer's backend passed to ``Engine.offer``.
            peer: name of the proc that asks.

        Returns:
            What ``Engine.offer`` gives to the peer's backend.

        Raises:
            Unfit: this way is not possible here; says why. The peer then takes the next best.
            RDMAError: the buffer was dropped.
        """
        ...

    def dropped(self, key: int) -> None:
        """A registration of this process is let go: nobody may reach its memory from here on."""
        ...

    def peer_dead(self, proc: str) -> None:
        """A proc died: what is under way with it must end now, and what was kept for it can go."""
        ...

    def close(self) -> None:
        """This process's engine ends: give everything back. Transfers that are under way fail."""
        ...


class StatelessBackend:
    """What backends have in common that keep nothing and need nothing of the owner's backend."""

    devices = False

    def offer(self, key: int, request: bytes, peer: str) -> bytes:
        raise NotImplementedError

    def dropped(self, key: int) -> None:
        """Nothing is kept for it."""

    def peer_dead(self, proc: str) -> None:
        """Nothing is kept for it."""

    def close(self) -> None:
        """There is nothing to give back."""
