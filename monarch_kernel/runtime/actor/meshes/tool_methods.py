"""Methods of meshes that tools provide: the tensor engine, the debugger, views and the sync of workspaces."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from monarch_kernel.runtime.actor import extensions
from monarch_kernel.runtime.actor.extensions import tensor_functions, view_functions, workspace_functions
from monarch_kernel.runtime.actor.mocks import mock_mesh
from monarch_kernel.runtime.mesh.shape import MeshTrait

# The debugger as methods of a proc mesh, and the controller's actor that is notified of stopped ranks.


class DebuggerMethods:
    """The debugger as methods of a proc mesh. ``monarch_kernel.debug`` has the same functions with more options."""

    def dead(self: Any) -> dict[int, str]:
        """Return the ranks that this process knows as dead, with the causes. Sends no messages."""
        deaths = self._system.node.deaths
        if not deaths:
            return {}
        return {rank: deaths[ref.id].cause for rank, ref in enumerate(self._target().procs) if ref.id in deaths}

    def stacks(self, **options: object) -> Any:
        """Return the Python stacks of all ranks, merged; see ``monarch_kernel.debug.stacks``."""
        return extensions.debugger_functions().stacks(self, **options)

    def diff(self, expression: str, **options: object) -> Any:
        """Return the distinct values of an expression over the ranks; see ``monarch_kernel.debug.diff``."""
        return extensions.debugger_functions().diff(self, expression, **options)

    def pull(self, expression: str, **options: object) -> Any:
        """Return the value of an expression on one rank; see ``monarch_kernel.debug.pull``."""
        return extensions.debugger_functions().pull(self, expression, **options)

    def hang(self, **options: object) -> Any:
        """Diagnose why these ranks make no progress; see ``monarch_kernel.debug.hang``."""
        return extensions.debugger_functions().hang(self, **options)

    @property
    def debug(self) -> Any:
        """The stopped ranks of this mesh, to step and inspect; a ``monarch_kernel.debug.StopSet``."""
        return extensions.debugger_functions().select(self)


def debug_controller() -> Any:
    """Return the controller's actor that is notified of stopped ranks.

    Programs use ``monarch_kernel.debug`` instead.
    """
    return extensions.debug_hub().hub_actor()


# Views of meshes as methods of them; ``monarch_kernel.widgets`` is loaded on first use.


class ViewMethods:
    """The method ``show`` of every mesh."""

    def show(self) -> Any:
        """Return a live view of this mesh, for the last line of a cell; see ``monarch_kernel.widgets.show``."""
        return view_functions().show(self)


class PlotMethods(ViewMethods):
    """The methods ``show`` and ``plot`` of meshes that have ranks."""

    def plot(self, expression: str, **options: object) -> Any:
        """Draw an expression of the ranks as it changes while a cell runs; see ``monarch_kernel.widgets.plot``."""
        return view_functions().plot(self, expression, **options)


def view_method(mesh: object, name: str) -> object:
    """Return `show` or `plot` of an actor mesh, unless an endpoint has this name; None for another name."""
    return partial(getattr(view_functions(), name), mesh) if name in ("show", "plot") else None


# Workspace sync as a method of host and proc meshes; ``workspace_sync`` is loaded on first use.


class WorkspaceMethods:
    """The method `sync_workspace` of a mesh of hosts or procs; on a slice, it applies to the hosts of the slice."""

    async def sync_workspace(self, workspace: object, conda: bool = False, auto_reload: bool = False) -> Any:
        """Sync folders of this machine, and optionally an environment, to all hosts of this mesh.

        Ranks that are spawned afterwards run in the synced tree. ``docs/sync.md`` describes the guarantees.

        Args:
            workspace: a ``monarch.tools.config.workspace.Workspace``.
            conda: sync its environment, too: ``workspace.env``, or that of this process.
            auto_reload: reload changed modules in ranks and live actors of this controller on these hosts.

        Returns:
            The report, a ``workspace_sync.SyncReport``.

        Raises:
            SyncError: a host stays on its old tree; the message names the host and the cause, and ``report`` is the
                report.
        """
        return await workspace_functions().sync_workspace(self, workspace, conda, auto_reload)


class RankCoordinates(Mapping[str, object]):
    """The coordinates of every rank of a mesh, by dimension.

    Lists of variables and debuggers read every property of an object. Tensors, which make every rank load torch, are
    therefore created when they are used.

    Args:
        procs: the mesh.
    """

    def __init__(self, procs: TensorMethods) -> None:
        self._procs = procs
        self._made: dict[str, object] = {}

    def __getitem__(self, dim: str) -> Any:
        if dim not in self._made:
            self._made[dim] = self._procs.rank_tensor(dim)
        return self._made[dim]

    def __contains__(self, dim: object) -> bool:
        return dim in self._procs.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._procs.names)

    def __len__(self) -> int:
        return len(self._procs.names)

    def __repr__(self) -> str:
        return f"<coordinates of the ranks of {self._procs!r}: {', '.join(self)}>"


class TensorMethods(MeshTrait):
    """Tensors on a proc mesh (or slice), with the names of Monarch's proc meshes and of its device meshes."""

    def activate(self) -> Any:
        """Run torch operations on every rank of the mesh: ``with mesh.activate():``.

        Their results are ``monarch_kernel.tensor.Tensor`` handles. ``fetch_shard`` and ``inspect`` return values.
        """
        mocked = mock_mesh(self)
        return tensor_functions().activate(self) if mocked is None else mocked.activate()

    def rank_tensor(self, dim: str) -> Any:
        """Return a tensor with a number on every rank: its coordinate in dimension `dim`.

        Raises:
            KeyError: the mesh has no such dimension.
        """
        return tensor_functions().rank_tensor(self, dim)

    def rank_tensors(self) -> Any:
        """Return the coordinates of every rank, as a dict from dimension to tensor."""
        return tensor_functions().rank_tensors(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its dimensions."""
        return self.extent.names

    def rank(self, dims: Sequence[str] | str) -> Any:
        """Return a tensor with a number on every rank: its row-major position in one or several dimensions.

        Raises:
            KeyError: the mesh has no such dimension.
        """
        if isinstance(dims, str):
            return self.rank_tensor(dims)
        place = 0
        for dim in dims:
            place = place * self.extent[dim] + self.rank_tensor(dim)
        return place

    @property
    def ranks(self) -> Mapping[str, Any]:
        """The coordinates of every rank: for each dimension a tensor, which is created when it is first used."""
        return RankCoordinates(self)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by dimension.

        Raises:
            IndexError: there is no such rank.
        """
        return dict(self.extent.point(rank))

    def __call__(self, **coords: int | builtins.slice) -> Any:
        """Return the part of the mesh at these coordinates, like `slice`."""
        return self.slice(**coords)

    def exit(self) -> None:
        """End its tensors, and those of all of its processes, after all issued operations. The processes continue."""
        tensor_functions().end_tensors(self)

    def process_group(self, dims: Sequence[str] | str) -> Any:
        """Return process groups over dimensions of the mesh, as an argument of functions of the ranks (``remote``).

        Raises:
            KeyError: the mesh has no such dimension.
        """
        return tensor_functions().process_group(self, dims)
