"""`GroupArgument`: what stands for process groups among the arguments of functions of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.tensor.rank.groups import RankGroups

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class GroupArgument(ABC):
    """Process groups of a mesh; `RemoteProcessGroup` is what programs have."""

    @abstractmethod
    def on_ranks(self, mesh: TensorMesh) -> RankGroups:
        """What ranks get in its place, of which they make their group. Sees to it that the groups exist."""


def groups_on_ranks(mesh: TensorMesh, flat: list[Any]) -> bool:
    """Put what ranks get in the places of process groups among arguments; returns whether there were any."""
    found = [k for k, x in enumerate(flat) if isinstance(x, GroupArgument)]
    for k in found:
        flat[k] = flat[k].on_ranks(mesh)
    return bool(found)
