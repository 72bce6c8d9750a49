"""`OptimizerState`: what an optimizer of the program remembers, as a snapshot keeps it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from monarch_kernel.runtime.tensor.controller.handle import Tensor


class OptimizerState:
    """The state of an optimizer at one time: handles as they are (the ranks copy their values), copies of all else."""

    def __init__(self, target: Any, groups: list[dict[str, Any]], state: list[tuple[Any, dict[str, Any]]]) -> None:
        self._target = weakref.ref(target)
        self._groups = groups
        self._state = state

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, target: Any) -> OptimizerState:
        """That of an optimizer now.

        Args:
            target: the mesh whose handles the ranks copy; those of other meshes stay as they are.
        """
        groups = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        return cls(target, groups, [(parameter, _copied(state)) for parameter, state in optimizer.state.items()])

    def handles(self) -> list[Tensor]:
        """The values of which the ranks are to have copies."""
        target = self._target()
        held = [x for _, state in self._state for x in state.values() if type(x) is Tensor]
        return [x for x in held if x._spec.mesh is target]

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer go on from here."""
        for group, saved in zip(optimizer.param_groups, self._groups):
            group.update(_copied(saved))
        optimizer.state.clear()
        for parameter, state in self._state:
            optimizer.state[parameter] = _copied(state)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v if type(v) is Tensor else v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for k, v in values.items()
    }
