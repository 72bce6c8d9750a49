"""When gradients are summed over ranks: once for each backward pass, many parameters together."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch.autograd import Variable

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.training.rank.gradients import reduced

#: Gradients are sent together once there are so many bytes of them, so that few wait whole for the end of the pass.
BUCKET = 25 * 1024 * 1024


class GradientSums:
    """The gradients of one mesh that backward has accumulated, and that are not in the layouts of their parameters yet.

    A gradient of a sharded loss is a sum of which each rank has a term. An optimizer that used it as it is would have
    it summed again at every use.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[Any, GradientSums]] = weakref.WeakKeyDictionary()

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)
        self._waiting: list[Tensor] = []
        self._bytes = 0
        self._pass = -1

    @classmethod
    def follow(cls, parameter: Tensor) -> None:
        """From now on, bring every gradient that backward accumulates for this parameter to its layout."""
        target = parameter._spec.mesh
        sums = cls._all.get(target)
        if sums is None:
            sums = cls._all[target] = cls(target)
        parameter.register_post_accumulate_grad_hook(sums._accumulated)

    def _accumulated(self, parameter: Any) -> None:
        running = torch._C._current_graph_task_id()
        if running != self._pass:  # what is left of a pass that failed is not in use
            self._waiting, self._bytes, self._pass = [], 0, running
            Variable._execution_engine.queue_callback(self._sum)
        self._waiting.append(parameter)
        self._bytes += parameter.numel() * parameter.element_size()
        if self._bytes >= BUCKET:
            self._sum()

    def _sum(self) -> None:
        parameters = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._bytes = [], 0
        target = self._target()
        if not parameters or target is None:
            return
        with torch.no_grad():
            results = target.call(
                reduced, _alike, [p.grad for p in parameters], [p.detach() for p in parameters], key="gradients"
            )
        for parameter, gradient in zip(parameters, results):
            parameter.grad = gradient


def _alike(gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(g.size(), g.stride(), dtype=g.dtype) for g in gradients]
