"""A proc mesh that runs cells: its processes, and the kernel's two actors on each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from monarch_kernel.actor import ActorMesh, Extent, ProcMesh
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.cell import Cell
from monarch_kernel.kernel.rank.executor import CellExecutor
from monarch_kernel.kernel.rank.monitor import Monitor
from monarch_kernel.meshes import kept_host_of

# Split a set of ranks into a few slices of their mesh; each slice needs one call.


class Sliceable(Protocol):
    """A mesh of procs or of actors."""

    def slice(self, **within: Any) -> Any:
        """Return the mesh of the ranks within these coordinates."""
        ...


Sliced = TypeVar("Sliced", bound=Sliceable)


@dataclass(frozen=True, slots=True)
class MeshPart(Generic[Sliced]):
    """A slice of a mesh, and its ranks in order, as numbered in the whole mesh."""

    mesh: Sliced
    ranks: tuple[int, ...]


def parts(whole: Sliced, flat: Sliced, extent: Extent, ranks: Sequence[int]) -> list[MeshPart[Sliced]]:
    """Return slices that together contain exactly these ranks.

    Args:
        whole: the mesh.
        flat: the same mesh in one dimension, `ranks`.
        extent: the extent of the mesh.
        ranks: the ranks, sorted.
    """
    chosen = tuple(ranks)
    if not chosen:
        return []
    if len(chosen) == extent.nelements:
        return [MeshPart(whole, chosen)]
    box = boxed(chosen, extent)
    if box is not None:
        return [MeshPart(whole.slice(**box), chosen)]
    everyone = range(extent.nelements)
    return [MeshPart(flat.slice(ranks=run), tuple(everyone[run])) for run in runs(chosen)]


def boxed(ranks: Sequence[int], extent: Extent) -> dict[str, slice] | None:
    """Return `ranks` (sorted) as a slice of each dimension; None if they form no box."""
    slices: dict[str, slice] = {}
    count = 1
    for label, size, stride in zip(extent.names, extent.shape, extent.strides, strict=True):
        coords = sorted({rank // stride % size for rank in ranks})
        steps = {later - earlier for earlier, later in pairwise(coords)}
        if len(steps) > 1:
            return None
        slices[label] = slice(coords[0], coords[-1] + 1, steps.pop() if steps else 1)
        count *= len(coords)
    return slices if count == len(ranks) else None


def runs(ranks: Sequence[int]) -> list[slice]:
    """Return `ranks` (sorted) as a few slices of a one-dimensional mesh."""
    found: list[slice] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at == 2 and step > 1:  # two distant ranks are the end of one run and the beginning of another
            end, step = at + 1, 1
        found.append(slice(ranks[at], ranks[end - 1] + 1, step))
        at = end
    return found


#: The time for ranks to start, rendezvous or stop (seconds). Importing torch on a busy machine is slow.
UP_TIMEOUT = 300.0
#: How many cells of a mesh are kept for running them again on new ranks.
MOST_CELLS = 500


@dataclass(frozen=True)
class UpOptions:
    """The arguments of `%mesh up`, which `%mesh restart` reuses."""

    name: str
    dims: dict[str, int]
    env: dict[str, str] = field(default_factory=dict)
    dist: str = ""
    preload: tuple[str, ...] = ()
    keep: bool = False
    idle: float = 0.0
    environment: str = ""  # the folder of the environment whose interpreter runs the ranks; "": the kernel's own
    sync: bool = False
    on: str = ""  # the argument of `--on`: a provider, a profile or a job; "": this host


@dataclass(slots=True)
class RanCell:
    """A cell that has run: for each rank on which it succeeded, the process that ran it."""

    cell: Cell
    ran: dict[int, str]


class ManagedMesh:
    """A proc mesh with the actors that run cells on it.

    Args:
        procs: the mesh.
        options: the options of the `%mesh up` that started it; None if user code did.
        actors: the actors that an earlier kernel spawned on it, if any.
    """

    def __init__(
        self,
        procs: ProcMesh,
        options: UpOptions | None = None,
        actors: tuple[ActorMesh[CellExecutor], ActorMesh[Monitor]] | None = None,
    ) -> None:
        self.name = procs.name
        self.procs = procs
        self.extent = procs.extent
        self.options = options
        executor, monitor = actors or (procs.spawn("cells", CellExecutor), procs.spawn("monitor", Monitor))
        self.executor: ActorMesh[CellExecutor] = executor
        self.monitor: ActorMesh[Monitor] = monitor
        # One-dimensional, for sets of ranks that are no slice of the original dimensions.
        self._flat: ActorMesh[CellExecutor] = self.executor.flatten("ranks")
        self._flat_monitor: ActorMesh[Monitor] = self.monitor.flatten("ranks")
        self._flat_procs: ProcMesh = procs.flatten("ranks")
        #: The cells that this kernel has run on the mesh.
        self._history: deque[RanCell] = deque(maxlen=MOST_CELLS)

    def get_ready(self) -> None:
        """Wait for the ranks, and set up `torch.distributed`: its environment, and a process group if requested."""
        self.executor.initialized.get(UP_TIMEOUT)
        if not tool_runtime().is_joined(self.procs):  # a job has its own process groups
            self.join()

    def join(self) -> None:
        """Set up a new rendezvous of all ranks, and a new process group if the mesh has one."""
        dist = self.options.dist if self.options is not None else ""
        local = "hosts" not in self.extent
        first = self._flat.slice(ranks=0)
        local_size = self.extent.nelements // (1 if local else self.extent["hosts"])
        meet = first.reserve.call_one(dist, self.extent.nelements, local_size, local).get(UP_TIMEOUT)
        threads = max(1, (os.cpu_count() or 1) // local_size)
        self.executor.set_up.call(meet, threads).get(UP_TIMEOUT)

    def is_group_broken(self) -> bool:
        """Return whether the process group of some rank was shut down to end a wait."""
        return not tool_runtime().is_joined(self.procs) and any(
            self.executor.group_broken.call().get(UP_TIMEOUT).values()
        )

    def rejoin(self) -> None:
        """Make all ranks leave their process group, also one created by user code, and set up a new rendezvous."""
        self.executor.leave_group.call().get(UP_TIMEOUT)
        self.join()

    def describe(self) -> str:
        """Return the mesh's size and shape as a short text: `4 ranks (gpus=4)`."""
        count = self.extent.nelements
        sizes = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        return f"{count} rank{'s' * (count != 1)}" + (f" ({sizes})" if sizes else "")

    def shape(self, ranks: Sequence[int]) -> Extent:
        """Return the shape of values from these ranks: that of their slice, or one dimension if they are no slice."""
        box = boxed(ranks, self.extent)
        if box is None:
            return Extent(("ranks",), (len(ranks),))
        return Extent(self.extent.names, [len(range(self.extent[label])[part]) for label, part in box.items()])

    # -- the cells that have run -----------------------------------------------------------------

    def note_ran(self, cell: Cell, ranks: Iterable[int]) -> None:
        """Record that a cell has succeeded on these ranks."""
        procs = self.procs._target().procs
        self._history.append(RanCell(cell, {rank: procs[rank].id for rank in ranks}))

    def missed(self, rank: int) -> list[RanCell]:
        """Return the cells that a predecessor of this rank's process has run, and that this process has not."""
        here = self.procs._target().procs[rank].id
        return [each for each in self._history if each.ran.get(rank, here) != here]

    def note_replayed(self, cell: RanCell, ranks: Iterable[int]) -> None:
        """Record that a cell has run again on these ranks."""
        procs = self.procs._target().procs
        cell.ran.update({rank: procs[rank].id for rank in ranks})

    @property
    def is_alive(self) -> bool:
        """Whether the mesh is up, that is, not stopped."""
        return any(mesh is self.procs for mesh in tool_runtime().list_proc_meshes())

    # -- some ranks, sorted, as few slices -----------------------------------------------------

    def executors(self, ranks: Sequence[int]) -> list[MeshPart[ActorMesh[CellExecutor]]]:
        """The actors that run cells."""
        return parts(self.executor, self._flat, self.extent, ranks)

    def monitors(self, ranks: Sequence[int]) -> list[MeshPart[ActorMesh[Monitor]]]:
        """The actors that report where their ranks are."""
        return parts(self.monitor, self._flat_monitor, self.extent, ranks)

    def procs_at(self, ranks: Sequence[int]) -> list[MeshPart[ProcMesh]]:
        """The processes."""
        return parts(self.procs, self._flat_procs, self.extent, ranks)


# -- kept meshes ----------------------------------------------------------


def remember(managed: ManagedMesh) -> None:
    """Store on a kept mesh the state that the next kernel needs to run cells."""
    host = kept_host_of(managed.procs)
    if host is not None:
        host.note(f"cells:{managed.name}", (managed.options, managed.executor, managed.monitor))


def recall(procs: ProcMesh) -> ManagedMesh | None:
    """Return the mesh that an earlier kernel stored with `remember`, or None."""
    host = kept_host_of(procs)
    found = None if host is None else host.noted(f"cells:{procs.name}")
    if found is None:
        return None
    options, executor, monitor = found
    return ManagedMesh(procs, options, (executor, monitor))
