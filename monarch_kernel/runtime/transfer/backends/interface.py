"""What a way of moving bytes has to offer, and which ways there are. All have the same semantics: see the tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from monarch_kernel.runtime.transfer.handle import Handle, Op


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


class Simple:
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


def kinds() -> list[type[Backend]]:
    """Every backend that this installation has, best first."""
    from monarch_kernel.runtime.transfer.backends.cma import Cma
    from monarch_kernel.runtime.transfer.backends.cuda_ipc import CudaIpc
    from monarch_kernel.runtime.transfer.backends.local import Local
    from monarch_kernel.runtime.transfer.backends.segment import Segment
    from monarch_kernel.runtime.transfer.tcp.backend import Tcp

    found: list[type[Backend]] = [Local, CudaIpc, Cma, Segment]
    if find_spec("pyverbs") is not None:
        from monarch_kernel.runtime.transfer.verbs.backend import Verbs

        found.append(Verbs)
    return [*found, Tcp]
