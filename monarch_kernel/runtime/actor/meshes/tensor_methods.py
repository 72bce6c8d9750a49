"""Tensors over the processes of a mesh, as methods of `ProcMesh`; the tensor engine is loaded on first use."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from monarch_kernel.runtime.actor.extensions import tensor_functions
from monarch_kernel.runtime.actor.mocks import mock_mesh
from monarch_kernel.runtime.mesh.shape import MeshTrait


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
        place: Any = 0
        for dim in dims:
            place = place * self.extent[dim] + self.rank_tensor(dim)
        return place

    @property
    def ranks(self) -> dict[str, Any]:
        """The coordinates of every rank, as a dict from dimension to tensor."""
        return self.rank_tensors()

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
