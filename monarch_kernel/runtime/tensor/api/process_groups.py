"""Pass a process group over dimensions of a mesh to functions of the ranks: `RemoteProcessGroup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch_kernel.runtime.tensor.api.activation import engine_of
from monarch_kernel.runtime.tensor.controller import reducing
from monarch_kernel.runtime.tensor.controller.errors import MixedTensorsError
from monarch_kernel.runtime.tensor.controller.world_group import GroupArgument
from monarch_kernel.runtime.tensor.rank.groups import RankGroups

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class RemoteProcessGroup(GroupArgument):
    """Process groups over dimensions of a mesh. Each group has the ranks that differ only in these dimensions.

    A function of the ranks receives the ``torch.distributed`` group of its rank in its place:

    ```python
    @remote(propagate=lambda t, group: t)
    def summed(t, group):
        t = t.clone()
        torch.distributed.all_reduce(t, group=group)
        return t


    with mesh.activate():
        rows = RemoteProcessGroup("gpus", mesh)
        y = summed(x, rows)
    ```

    The groups are formed on first use, and again after a death or a failed collective. Each stream has separate groups.
    If a rank fails in a function that uses a group, the other ranks fail too instead of waiting for it.

    Args:
        dims: names of dimensions of the mesh; ranks are counted in their order.
        device_mesh: a proc mesh or slice.

    Raises:
        KeyError: the mesh has no such dimension.
    """

    def __init__(self, dims: Sequence[str] | str, device_mesh: ProcMesh) -> None:
        self._engine = engine_of(device_mesh)
        mesh = self._engine.mesh_of(device_mesh)
        self.dims = reducing.dimensions(mesh, dims)
        self.mesh = device_mesh
        self.dropped = False
        self._partition = reducing.groups_of(mesh, self.dims)

    def __repr__(self) -> str:
        return f"<RemoteProcessGroup over {', '.join(self.dims)} of {self.mesh!r}>"

    def size(self) -> int:
        """Return the number of ranks in each group."""
        return len(self._partition[0])

    def drop(self) -> None:
        """Stop using the group. Functions that receive it later raise here."""
        self.dropped = True

    def on_ranks(self, mesh: TensorMesh) -> RankGroups:
        """Return the object that ranks receive and turn into their group. The groups are formed if necessary.

        Raises:
            RuntimeError: the group was dropped.
            MixedTensorsError: the function does not run on all ranks of a group.
            DeviceMeshError: a rank has died.
        """
        if self.dropped:
            raise RuntimeError(f"{self!r} is used after drop(): make another one")
        there = set(mesh.ranks)
        if mesh.engine is not self._engine or any(there & set(g) and not there >= set(g) for g in self._partition):
            raise MixedTensorsError(
                f"{self!r} is an argument of a function that runs on mesh {mesh.name}, which has not all ranks of its "
                "groups: call the function on the mesh of the group"
            )
        groups = RankGroups(~mesh.stream.number, self._partition)
        mesh.engine.groups.need_own(groups)
        return groups


def process_group(procs: ProcMesh, dims: Sequence[str] | str) -> RemoteProcessGroup:
    """Implement ``ProcMesh.process_group``."""
    return RemoteProcessGroup(dims, procs)
