"""The senders of a port, as far as its receiver knows, and whether any is left. Pure: events go in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monarch_kernel.protocol.messages import Death, ProcRef
from monarch_kernel.runtime.mesh.shape import Extent


@dataclass(frozen=True, slots=True)
class Sender:
    """An actor, or a process, that was given a port.

    Attributes:
        proc: the process.
        actor: the actor there; "" for any code in that process.
        mesh, rank, extent: what it is a rank of, for people.
    """

    proc: ProcRef
    actor: str
    mesh: str
    rank: int
    extent: Extent


class Senders:
    """Those that were given one port.

    It is lost when no sender has it any more, and at least one died with it; if all have let go of it alive, they only
    have nothing more to send. If an unknown sender might have it, it is never lost.
    """

    def __init__(self) -> None:
        self._living: dict[tuple[str, str], Sender] = {}
        self._copies: dict[tuple[str, str], int] = {}
        self._gone: dict[tuple[str, str], tuple[Sender, Death]] = {}
        self._unknown = False

    def given(self, senders: Iterable[Sender]) -> None:
        """The port goes to these, a copy to each."""
        for sender in senders:
            key = (sender.proc.id, sender.actor)
            self._gone.pop(key, None)
            self._living[key] = sender
            self._copies[key] = self._copies.get(key, 0) + 1

    def given_to_unknown(self) -> None:
        """The port may be anywhere: no death can end it any more."""
        self._unknown = True

    def let_go(self, proc: str, actor: str) -> bool:
        """An actor does not have one of its copies any more. Returns as ``ended``."""
        key = (proc, actor)
        if key not in self._living:
            return False
        self._copies[key] -= 1
        if self._copies[key]:
            return False
        del self._living[key], self._copies[key]
        return bool(self.lost)

    def ended(self, gone: Callable[[Sender], bool], death: Death) -> bool:
        """These have died, or were stopped. Returns whether that leaves no sender."""
        found = [key for key, sender in self._living.items() if gone(sender)]
        for key in found:
            del self._copies[key]
            self._gone[key] = (self._living.pop(key), death)
        return bool(found) and bool(self.lost)

    @property
    def lost(self) -> list[tuple[Sender, Death]]:
        """All senders that died with the port, if no other has it; empty while one may still send."""
        return [] if self._unknown or self._living else list(self._gone.values())
