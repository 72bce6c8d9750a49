"""The user-facing types of healing: ``HostSource``, the report ``Healed``, ``HealError``, and ``Healable``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh

#: Limit for the start of a successor, with every ``__init__`` and ``__restore__`` on it (seconds).
HEAL_TIMEOUT = 60.0
#: The largest checkpoint of an actor that is kept for a later controller (bytes).
MAX_KEPT_CHECKPOINT = 64 * 1024 * 1024


@runtime_checkable
class HostSource(Protocol):
    """Something that replaces lost hosts, such as ``monarch_kernel.job.EngineJob``."""

    def replacements(self, gone: Sequence[str], timeout: float) -> HostMesh:
        """Return new hosts that replace lost ones.

        Args:
            gone: the ids of the lost hosts' agents.
            timeout: the time limit (seconds).

        Returns:
            As many new hosts, attached, in the same order.

        Raises:
            RuntimeError: there are none; the message names the cause.
        """
        ...


class HealError(RuntimeError):
    """A mesh could not be healed completely. The message names what is missing and why."""


class Replacement(msgspec.Struct, frozen=True):
    """One rank that was healed.

    Attributes:
        what: "proc", or "actor" if its process survived.
        cause: why its predecessor died.
    """

    rank: int
    coords: dict[str, int]
    what: str
    cause: str
    host: str
    pid: int
    old_host: str
    old_pid: int


class Healed(msgspec.Struct):
    """The report of one ``heal``.

    Attributes:
        replaced: one entry for each rank that was dead.
        respawned: names of the actor meshes that got new actors; not those of tools.
        restored: names of the actor meshes whose actors were restored from a checkpoint.
        seconds: how long the heal took.
    """

    mesh: str
    replaced: list[Replacement] = msgspec.field(default_factory=list)
    respawned: list[str] = msgspec.field(default_factory=list)
    restored: list[str] = msgspec.field(default_factory=list)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __str__(self) -> str:
        if not self.replaced:
            return f"{self.mesh}: nothing to heal"
        lines = [f"{self.mesh}: {len(self.replaced)} healed in {self.seconds:.2f} s"]
        for one in self.replaced:
            where = " ".join(f"{k}={v}" for k, v in one.coords.items()) or "the only one"
            if one.what == "actor":
                lines.append(f"  rank {one.rank} ({where}): new actors in process {one.pid}; before: {one.cause}")
                continue
            moved = f"{one.old_host}/{one.old_pid} -> {one.host}/{one.pid}"
            lines.append(f"  rank {one.rank} ({where}): {moved}; before: {one.cause}")
        if self.respawned:
            lines.append(f"  new actors: {', '.join(self.respawned)}")
        if self.restored:
            lines.append(f"  restored from checkpoints: {', '.join(self.restored)}")
        return "\n".join(lines)


class Healable:
    """A handle of a mesh that ``heal_mesh`` may have returned."""

    _healed: Future[Healed] | None = None

    @property
    def healed(self) -> Healed:
        """The report of the ``heal_mesh`` that returned this handle; waits until it is done.

        Raises:
            HealError: the heal failed.
        RuntimeError: this handle did not come from ``heal_mesh``.
        """
        if self._healed is None:
            raise RuntimeError(f"{self!r} did not come from heal_mesh: heal() reports in its future")
        return self._healed.get()
