"""Tensors over the processes of a mesh, as methods of `ProcMesh`; the tensor engine is loaded on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.runtime.actor.extensions import tensor_functions
from monarch_kernel.runtime.actor.mocks import mock_mesh


class TensorMethods:
    """`activate`, `rank_tensor`, `rank_tensors` and `process_group` of a proc mesh (or slice)."""

    def activate(self) -> Any:
        """``with mesh.activate():`` runs torch operations on every rank of the mesh.

        Their results are ``monarch_kernel.tensor.Tensor`` handles; ``fetch_shard`` and ``inspect`` bring values here.
        """
        mocked = mock_mesh(self)
        return tensor_functions().activate(self) if mocked is None else mocked.activate()

    def rank_tensor(self, dim: str) -> Any:
        """A number on every rank: its coordinate in dimension `dim`.

        Raises:
            KeyError: the mesh has no such dimension.
        """
        return tensor_functions().rank_tensor(self, dim)

    def rank_tensors(self) -> Any:
        """The coordinates of every rank, as a dict from dimension to tensor."""
        return tensor_functions().rank_tensors(self)

    def process_group(self, dims: Sequence[str] | str) -> Any:
        """Process groups over dimensions of the mesh, as an argument of functions of the ranks (``remote``).

        Raises:
            KeyError: the mesh has no such dimension.
        """
        return tensor_functions().process_group(self, dims)
