"""What an interrupt concerns when a plain cell calls endpoints: every proc mesh of this kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh

#: Ranks that do not say within this time what still runs there count as hung (seconds).
PROBE_TIMEOUT = 0.5


class MeshTarget:
    """A proc mesh as an interrupt target. Only ranks that run an endpoint react to the interrupt."""

    def __init__(self, mesh: ProcMesh) -> None:
        self._mesh = mesh
        self._asked: Any = None

    def describe(self) -> str:
        """See ``InterruptTarget``."""
        return f"mesh '{self._mesh.name}'"

    def interrupt(self) -> object:
        """See ``InterruptTarget``."""
        self._asked = self._mesh.interrupt()
        return self._asked

    def unanswered(self) -> Iterable[int]:
        """The ranks where something that was interrupted still runs, and those that do not reply at all.

        Asking again is a second interrupt for what still runs.
        """
        suspects = self._suspects()
        probes = {rank: self._at(rank).interrupt() for rank in suspects}
        deadline = time.monotonic() + PROBE_TIMEOUT
        return [rank for rank, probe in probes.items() if self._still_runs(probe, deadline)]

    def kill(self, ranks: Sequence[int]) -> object:
        """See ``InterruptTarget``."""
        for rank in ranks:
            self._at(rank).kill(reason="it did not answer an interrupt")
        return None

    def _suspects(self) -> list[int]:
        everyone = range(self._mesh.extent.nelements)
        if self._asked is None:
            return []
        if not self._asked.done():
            return list(everyone)
        try:
            stopped = self._asked.get()
        except Exception:  # ranks died meanwhile; the others are asked again
            return list(everyone)
        return [rank for rank in everyone if stopped.get(rank)]

    @staticmethod
    def _still_runs(probe: Any, deadline: float) -> bool:
        try:
            running = probe.get(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return True
        except Exception:  # a dead rank runs nothing
            return False
        return any(running.values())

    def _at(self, rank: int) -> Any:
        point = self._mesh.extent.point(rank)
        return self._mesh.slice(**dict(point))


def running_meshes() -> list[MeshTarget]:
    """A target for each proc mesh of this process; none when it never used the runtime."""
    meshes = sys.modules.get("monarch_kernel.meshes")
    if meshes is None:
        return []
    return [MeshTarget(mesh) for mesh in meshes.list_proc_meshes()]
