"""`module_to_mesh`: a module of the program with its parameters and buffers on the ranks, and sums of gradients."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.sharded.controller.layout import placements_of
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, mesh_from
from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh
from monarch_kernel.runtime.tensor.training.controller.training_state import TrainingState
from monarch_kernel.runtime.tensor.training.rank.gradients import reduced

#: The word for parameters that are cut along the data dimension.
SHARD = "shard"


def module_to_mesh(
    module: torch.nn.Module,
    mesh: Any,
    plan: Mapping[str, Any] | str | None = None,
    *,
    data: str | Sequence[str] | None = None,
) -> torch.nn.Module:
    """Bring a module to a mesh: its parameters and buffers, in place.

    ```python
    model = module_to_mesh(nn.Sequential(...), mesh)
    optimizer = optim.AdamW(model.parameters())
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    optimizer.step()
    ```

    Local tensors that the module is called with are cut along their dimension 0 over the data dimension of the mesh.
    Gradients have the layouts of their parameters when backward returns. All of it gives what one device gives.

    Args:
        module: it is changed and returned. Optimizers are to be made afterwards.
        mesh: a `Mesh`, a proc mesh or a torch ``DeviceMesh``.
        plan: how parameters are laid out. None: all of each on every rank (data parallel). ``"shard"``: each is cut
            along its dimension 0 over the data dimension, and gathered where an operation needs it (like FSDP). Or
            sharding specs (see `distribute`) by pattern of parameter names, such as
            ``{"*.up.weight": ["model", None]}`` (tensor parallel); the first pattern that fits counts, and parameters
            that none fits are on every rank.
        data: the dimension of the mesh (or several) along which the inputs are cut; by default the first.

    Raises:
        ValueError: a pattern fits no parameter, or a dimension is not one of the mesh.
        TypeError: no module, or no plan.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module_to_mesh({type(module).__name__}, ...): give a torch.nn.Module")
    mesh = mesh_from(mesh)
    dims = _data_dims(mesh, data)
    layouts = _layouts(module, plan, dims)
    # a parameter or buffer that stands in several places stays one
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is None or type(parameter) is Tensor:
                continue
            if id(parameter) not in moved:
                spec = layouts[f"{prefix}.{name}" if prefix else name]
                moved[id(parameter)] = parameter, _parameter(parameter, mesh, spec)
            part._parameters[name] = moved[id(parameter)][1]
        for name, buffer in part._buffers.items():
            if buffer is None or type(buffer) is Tensor:
                continue
            if id(buffer) not in moved:
                made = mesh.distribute(buffer.detach())
                TrainingState.layouts[made] = placements_of(None, mesh.mesh_dim_names, buffer, mesh.name)
                moved[id(buffer)] = buffer, made
            part._buffers[name] = moved[id(buffer)][1]

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda x: _input(x, mesh, dims), (args, kwargs))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    TrainingState.of(mesh).add_module(module)
    return module


def _data_dims(mesh: Mesh, data: str | Sequence[str] | None) -> tuple[str, ...]:
    dims = mesh.mesh_dim_names[:1] if data is None else (data,) if isinstance(data, str) else tuple(data)
    for dim in dims:
        if dim not in mesh.mesh_dim_names:
            raise ValueError(f"data={dim!r}: mesh {mesh.name} has {', '.join(mesh.mesh_dim_names)}")
    return dims


def _layouts(module: torch.nn.Module, plan: Any, dims: tuple[str, ...]) -> dict[str, Any]:
    """The sharding spec of each parameter, by every name that it has."""
    named = dict(module.named_parameters(remove_duplicate=False))
    if plan is None:
        return dict.fromkeys(named)
    if isinstance(plan, str):
        if plan != SHARD:
            raise ValueError(f"plan={plan!r}: give {SHARD!r}, or sharding specs by pattern of parameter names")
        return {name: [dims] if p.dim() else None for name, p in named.items()}
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan={plan!r}: give None, {SHARD!r}, or sharding specs by pattern of parameter names")
    for pattern in plan:
        if not fnmatch.filter(named, pattern):
            raise ValueError(f"plan: no parameter is called {pattern!r}: there are {', '.join(named) or 'none'}")
    return {
        name: next((spec for pattern, spec in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        for name in named
    }


def _parameter(parameter: torch.nn.Parameter, mesh: Mesh, spec: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(mesh.distribute(parameter.detach(), spec), requires_grad=parameter.requires_grad)
    TrainingState.layouts[made] = placements_of(spec, mesh.mesh_dim_names, parameter, mesh.name)
    if made.requires_grad:
        GradientSums.follow(made)  # type: ignore[arg-type]  # a Parameter of a handle is a handle
    return made


def _copied(tensor: Tensor, copy: Tensor) -> None:
    """A parameter or buffer of a mesh was deep-copied."""
    if tensor in TrainingState.layouts:
        TrainingState.layouts[copy] = TrainingState.layouts[tensor]
        if copy.requires_grad:
            GradientSums.follow(copy)


ShardedMesh.on_copied.append(_copied)


def _input(x: Any, mesh: Any, dims: tuple[str, ...]) -> Any:
    if not isinstance(x, torch.Tensor) or isinstance(x, (Tensor, DTensor)):
        return x
    if isinstance(mesh, DeviceMesh):  # the module was passed to an actor of a rank
        names = mesh.mesh_dim_names or ()
        placements = placements_of([dims] if x.dim() else None, names, x, "here")
        return distribute_tensor(x, mesh, placements, src_data_rank=None)
    return mesh.distribute(x, [dims] if x.dim() else None)


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
