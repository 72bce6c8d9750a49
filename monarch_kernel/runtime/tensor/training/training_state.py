"""The modules and optimizers that a program trains on a mesh, for snapshots and checkpoints: `TrainingState`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
from monarch_kernel.runtime.tensor.controller.handle import Tensor

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


class TrainingState:
    """The modules and optimizers of one mesh. It keeps none of them alive.

    A module is included once it is moved to the mesh, an optimizer after its first step.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[Any, TrainingState]] = weakref.WeakKeyDictionary()
    #: The layouts of parameters and buffers when they were moved to their mesh, for creating them again after a loss.
    layouts: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._objects: list[weakref.ref[object]] = []

    @classmethod
    def of(cls, mesh: Any) -> TrainingState:
        """Return the state of a `Mesh`."""
        return cls._of_target(mesh._target)

    @classmethod
    def _of_target(cls, target: TensorMesh) -> TrainingState:
        found = cls._all.get(target)
        if found is None:
            found = cls._all[target] = cls()
        return found

    def add_module(self, module: torch.nn.Module) -> None:
        """Add a module whose parameters are on the mesh."""
        self._modules = [ref for ref in self._modules if ref() is not None]
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer whose parameters are on the mesh."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def track(self, obj: object) -> None:
        """Track an object with ``state_dict`` and ``load_state_dict``, such as a scheduler or a data source."""
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise TypeError(f"track({type(obj).__name__}): it has no state_dict() and load_state_dict(state)")
        self._objects = [ref for ref in self._objects if ref() is not None]
        if all(ref() is not obj for ref in self._objects):
            self._objects.append(weakref.ref(obj))

    @property
    def objects(self) -> list[Any]:
        """The tracked objects that are alive."""
        return [obj for ref in self._objects if (obj := ref()) is not None]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]


def _stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Record a step of an optimizer. An optimizer of handles belongs to the meshes of these."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is Tensor:
                TrainingState._of_target(parameter._spec.mesh).add_optimizer(optimizer)
                return


def _bring_counters() -> None:
    """Turn step counters of optimizers into tensors of the meshes, whose known values a replay computes.

    A local tensor that a step writes would differ at each call of a recorded function.
    """
    for state in list(TrainingState._all.values()):
        for optimizer in state.optimizers:
            for parameter, held in optimizer.state.items():
                if type(parameter) is Tensor and parameter._spec.mesh.error is None:
                    for name, value in held.items():
                        if type(value) is torch.Tensor and value.dim() == 0:
                            held[name] = parameter._spec.mesh.put(value)


register_optimizer_step_post_hook(_stepped)
TensorEngine.before_recording.append(_bring_counters)
