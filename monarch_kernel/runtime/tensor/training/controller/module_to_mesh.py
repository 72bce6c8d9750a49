"""Move a module of the program to the ranks (`module_to_mesh`), and sum its gradients."""

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

#: The plan that shards parameters along the data dimension.
SHARD = "shard"


def module_to_mesh(
    module: torch.nn.Module,
    mesh: Any,
    plan: Mapping[str, Any] | str | None = None,
    *,
    data: str | Sequence[str] | None = None,
) -> torch.nn.Module:
    """Move the parameters and buffers of a module to a mesh, in place.

    ```python
    model = module_to_mesh(nn.Sequential(...), mesh)
    optimizer = optim.AdamW(model.parameters())
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    optimizer.step()
    ```

    Local tensor arguments of the module are sharded along their dimension 0 over the data dimension of the mesh.
    Gradients have the layouts of their parameters when backward returns. The results equal those of one device.

    Args:
        module: the module, which is changed and returned. Create optimizers afterwards.
        mesh: a `Mesh`, a proc mesh or a torch ``DeviceMesh``.
        plan: the layout of parameters. None: replicate on every rank (data parallel). ``"shard"``: shard each along its
            dimension 0 over the data dimension, and gather it for operations that need it (like FSDP). Or sharding
            specs (see `distribute`) by pattern of parameter names, such as ``{"*.up.weight": ["model", None]}`` (tensor
            parallel). The first matching pattern applies; parameters without a match are replicated.
        data: the dimension of the mesh (or several) along which the inputs are sharded; by default the first.

    Raises:
        ValueError: a pattern matches no parameter, or the mesh lacks a dimension.
        TypeError: an argument is not a module or a plan.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module_to_mesh({type(module).__name__}, ...): give a torch.nn.Module")
    mesh = mesh_from(mesh)
    dims = _data_dims(mesh, data)
    layouts = _layouts(module, plan, dims)
    # a parameter or buffer in several places stays one object
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
    """Return the sharding spec of each parameter, by each of its names."""
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
    """Register the deep copy of a parameter or buffer of a mesh."""
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


#: Gradients are sent together once they reach this size (bytes), so that few wait until the end of the pass.
BUCKET = 25 * 1024 * 1024


class GradientSums:
    """The accumulated gradients of one mesh that do not have the layouts of their parameters yet.

    A gradient of a sharded loss is a sum with a term on each rank. If an optimizer used it directly, it would be summed
    again at every use.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[Any, GradientSums]] = weakref.WeakKeyDictionary()

    def __init__(self, target: Any) -> None:
        self._target = weakref.ref(target)
        self._waiting: list[Tensor] = []
        self._bytes = 0
        self._pass = -1

    @classmethod
    def follow(cls, parameter: Tensor) -> None:
        """Convert all later gradients that backward accumulates for this parameter to the parameter's layout."""
        target = parameter._spec.mesh
        sums = cls._all.get(target)
        if sums is None:
            sums = cls._all[target] = cls(target)
        parameter.register_post_accumulate_grad_hook(sums._accumulated)

    def _accumulated(self, parameter: Any) -> None:
        running = torch._C._current_graph_task_id()
        if running != self._pass:  # the rest of a failed pass is not in use
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
