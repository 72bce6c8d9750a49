"""Track the known senders of a port for its receiver, and detect when none is left. Pure: its input is events."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent


class Sender(msgspec.Struct, frozen=True):
    """An actor, or a process, that was given a port.

    Attributes:
        proc: the process.
        actor: the actor there; "" for any code in that process.
        mesh, rank, extent: its position in its mesh, for messages.
    """

    proc: ProcRef
    actor: str
    mesh: str
    rank: int
    extent: Extent


class Senders:
    """The senders of one port.

    The port is lost when no sender has it any more and at least one sender died with it. If all live senders have
    released it, nothing more will be sent. If an unknown sender might have it, it is never lost.
    """

    def __init__(self) -> None:
        self._living: dict[tuple[str, str], Sender] = {}
        self._copies: dict[tuple[str, str], int] = {}
        self._gone: dict[tuple[str, str], tuple[Sender, Death]] = {}
        self._unknown = False

    def given(self, senders: Iterable[Sender]) -> None:
        """Record that each of these senders gets a copy of the port."""
        for sender in senders:
            key = (sender.proc.id, sender.actor)
            self._gone.pop(key, None)
            self._living[key] = sender
            self._copies[key] = self._copies.get(key, 0) + 1

    def given_to_unknown(self) -> None:
        """Record that unknown senders may have the port, so that no death can end it any more."""
        self._unknown = True

    def let_go(self, proc: str, actor: str) -> bool:
        """Record that an actor has released one of its copies. Return the same as ``ended``."""
        key = (proc, actor)
        if key not in self._living:
            return False
        self._copies[key] -= 1
        if self._copies[key]:
            return False
        del self._living[key], self._copies[key]
        return bool(self.lost)

    def ended(self, gone: Callable[[Sender], bool], death: Death) -> bool:
        """Record that these senders have died or were stopped. Return whether the port is lost now."""
        found = [key for key, sender in self._living.items() if gone(sender)]
        for key in found:
            del self._copies[key]
            self._gone[key] = (self._living.pop(key), death)
        return bool(found) and bool(self.lost)

    @property
    def lost(self) -> list[tuple[Sender, Death]]:
        """The senders that died with the port, if no other sender has it; empty while one may still send."""
        return [] if self._unknown or self._living else list(self._gone.values())
