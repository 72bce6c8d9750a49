"""Proc meshes as interrupt targets, for ordinary cells that call endpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh

#: Ranks that do not report what they run within this time count as hung (seconds).
PROBE_TIMEOUT = 0.5
#: The time limit for killed ranks to exit (seconds).
KILL_TIMEOUT = 5.0


class MeshTarget:
    """A proc mesh, or a slice of one, as an interrupt target. Only ranks that run an endpoint react.

    Ranks, including those of a slice, are numbered as in the mesh that was spawned.

    Args:
        mesh: the procs.
        pending: returns the ranks that have not answered, if the caller knows them. Otherwise the ranks are asked.
        cells: the key prefix of the cells whose calls are interrupted; "" for all running code.
    """

    def __init__(self, mesh: ProcMesh, pending: Callable[[], Iterable[int]] | None = None, cells: str = "") -> None:
        self._mesh = mesh
        self._cells = cells
        self._pending = pending
        self._asked: Any = None
        self._positions = {rank: position for position, rank in enumerate(mesh._region.ranks())}

    @property
    def outlives_kernel(self) -> bool:
        """Whether the mesh outlives this kernel."""
        from monarch_kernel.engines import tool_runtime

        return tool_runtime().kept_host_of(self._mesh) is not None

    def describe(self) -> str:
        """See ``InterruptTarget``."""
        return f"mesh '{self._mesh.name}'"

    def interrupt(self) -> object:
        """See ``InterruptTarget``."""
        self._asked = self._mesh.interrupt(self._cells)
        return self._asked

    def unanswered(self) -> Iterable[int]:
        """Return the ranks on which interrupted code still runs, and those that do not reply.

        The query also interrupts code that still runs once more.
        """
        if self._pending is not None:
            return self._pending()
        suspects = self._suspects()
        probes = {rank: self._at(rank).interrupt(self._cells) for rank in suspects}
        deadline = time.monotonic() + PROBE_TIMEOUT
        return [rank for rank, probe in probes.items() if self._still_runs(probe, deadline)]

    def kill(self, ranks: Sequence[int]) -> None:
        """See ``InterruptTarget``."""
        kills = [self._at(rank).kill(reason="it did not answer an interrupt") for rank in ranks]
        deadline = time.monotonic() + KILL_TIMEOUT
        for kill in kills:
            kill.get(timeout=max(0.0, deadline - time.monotonic()))

    def _suspects(self) -> list[int]:
        if self._asked is None:
            return []
        everyone = self._awaited()
        if not self._asked.done():
            return everyone
        try:
            stopped = self._asked.get()
        except Exception:  # some ranks have died; query all ranks again
            return everyone
        return [rank for rank, position in self._positions.items() if stopped.get(position)]

    def _awaited(self) -> list[int]:
        """Return the ranks that may run code for this target; with ``cells``, those that this kernel has called."""
        if not self._cells:
            return list(self._positions)
        from monarch_kernel.engines import tool_runtime
        from monarch_kernel.kernel.session import session

        managed = session().managed(self._mesh.name)
        own = () if managed is None else (managed.executor._actor, managed.monitor._actor)
        called = {proc for call in tool_runtime().awaited_here(own) for proc in call.procs}
        procs = self._mesh._target().procs
        return [rank for rank, position in self._positions.items() if procs[position].id in called]

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
        return self._mesh.slice(**self._mesh.extent.point(self._positions[rank]))


def running_meshes() -> list[MeshTarget]:
    """Return a target for each proc mesh of this process, for the calls of this kernel's cells."""
    meshes = sys.modules.get("monarch_kernel.meshes")
    notebook = sys.modules.get("monarch_kernel.kernel.notebook")
    if meshes is None:
        return []
    cells = notebook.RUN if notebook is not None else ""
    return [MeshTarget(mesh, cells=cells) for mesh in meshes.list_proc_meshes()]
