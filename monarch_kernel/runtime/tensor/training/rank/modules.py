"""Modules on the ranks: built there, sharded with torch's own functions, called by records."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part
from monarch_kernel.runtime.tensor.sharded.rank.state import rules

# Sum gradients over ranks, each once, into the layout of its parameter.


def reduced(gradients: list[DTensor], parameters: list[DTensor]) -> list[DTensor]:
    """Return the gradients in the layouts of their parameters.

    Gradients with sums over the same dimensions of the mesh are sent together.
    """
    results = list(gradients)
    together: dict[Any, list[int]] = {}
    for i, (gradient, parameter) in enumerate(zip(gradients, parameters)):
        if gradient.placements == parameter.placements:
            continue
        counts.moved(gradient.placements, parameter.placements, gradient.numel() * gradient.element_size())
        dims = _summed(gradient, parameter)
        if dims is None:
            results[i] = gradient.redistribute(placements=parameter.placements)
        else:
            together.setdefault((gradient.device_mesh, dims, gradient.dtype), []).append(i)
    for (mesh, dims, _), members in together.items():
        parts = [gradients[i]._local_tensor for i in members]
        flat = torch.cat([part.reshape(-1) for part in parts])
        for dim in dims:
            torch.distributed.all_reduce(flat, group=mesh.get_group(dim))
        for i, part, summed in zip(members, parts, flat.split([part.numel() for part in parts])):
            local, gradient = summed.view(part.shape), gradients[i]
            results[i] = of_part(local, mesh, parameters[i].placements, gradient.shape, gradient.stride())
    return results


def _summed(gradient: DTensor, parameter: DTensor) -> tuple[int, ...] | None:
    """Return the dimensions of the mesh over which to sum, if no other change is needed; otherwise None."""
    dims: list[int] = []
    for dim, (given, wanted) in enumerate(zip(gradient.placements, parameter.placements)):
        if given == wanted:
            continue
        if not (wanted.is_replicate() and isinstance(given, Partial) and given.reduce_op == "sum"):
            return None
        dims.append(dim)
    return tuple(dims)


_NAME = "modules"
#: Size, stride and dtype of a tensor.
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class Built:
    """A module of this rank.

    Attributes:
        data: the dimensions of the mesh along which its inputs are sharded.
        sums: whether gradients still need a sum over these dimensions; FSDP does it itself.
    """

    module: torch.nn.Module
    mesh: Any
    data: tuple[int, ...]
    sums: bool


@dataclass(slots=True)
class Ran:
    """One forward pass, until its backward pass. It is a value, so that it is deleted with its handle."""

    inputs: list[torch.Tensor]
    output: torch.Tensor


def build(key: int, mesh_key: Any, function: bytes, data: tuple[int, ...], first: int) -> list[tuple[str, bool, Like]]:
    """Build a module.

    Its parameters become the values from `first` on. Return their names, requires_grad flags and shapes.
    """
    built = _make(mesh_key, function, data)
    here().store.extras.setdefault(_NAME, {})[key] = built
    values = here().store.values
    found: list[tuple[str, bool, Like]] = []
    for i, (name, parameter) in enumerate(built.module.named_parameters()):
        values[first + i] = _value(parameter, built.mesh)
        found.append((name, parameter.requires_grad, (tuple(parameter.shape), parameter.stride(), parameter.dtype)))
    return found


def rebuild(key: int, mesh_key: Any, function: bytes, data: tuple[int, ...], first: int) -> None:
    """Build the module again after its process group was formed again.

    This rank's existing parameters keep their values.
    """
    values = here().store.values
    built = _make(mesh_key, function, data)
    here().store.extras.setdefault(_NAME, {})[key] = built
    with torch.no_grad():
        for i, parameter in enumerate(built.module.parameters()):
            value = _value(parameter, built.mesh)
            before = values.get(first + i)
            if isinstance(before, DTensor):
                value._local_tensor.copy_(before._local_tensor)
                values[first + i] = value
            elif before is None:  # a new process
                values[first + i] = value


def drop(key: int) -> None:
    """Release a module."""
    here().store.extras.get(_NAME, {}).pop(key, None)


def forward(key: int, size: int, *inputs: DTensor) -> tuple[DTensor, Ran]:
    """Call a module with this rank's parts.

    Args:
        size: the size of dimension 0 of the whole result.
    """
    built = _built(key)
    with torch.enable_grad():
        local = [x.to_local().detach().requires_grad_(x.is_floating_point()) for x in inputs]
        output = built.module(*local)
        if isinstance(output, DTensor):  # tensor parallel: every rank then has the whole result
            output = output.full_tensor()
    return _cut(output.detach(), size, inputs[0]), Ran(local, output)


def backward(key: int, ran: Ran, gradient: DTensor, *inputs: DTensor) -> list[Any]:
    """Return the gradients of the inputs, then those of the parameters."""
    built = _built(key)
    laid_out = gradient.redistribute(placements=inputs[0].placements)
    with torch.enable_grad():
        ran.output.backward(laid_out.to_local())
    # FSDP replaces its parameters by others between forward and backward
    parameters = [p for p in built.module.parameters() if p.requires_grad]
    found: list[Any] = []
    for x, local in zip(inputs, ran.inputs):
        if local.is_floating_point():
            found.append(_cut(local.grad if local.grad is not None else torch.zeros_like(local), x.shape[0], x))
    for parameter in parameters:
        given = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parameter.grad = None
        if built.sums:
            part = given._local_tensor if isinstance(given, DTensor) else given
            for dim in built.data:
                torch.distributed.all_reduce(part, group=built.mesh.get_group(dim))
        found.append(_value(given, built.mesh))
    return found


def call(key: int, function: Any, *args: Any) -> Any:
    """Call ``function(module, *args)`` on this rank."""
    return function(_built(key).module, *args)


def _built(key: int) -> Built:
    return here().store.extras[_NAME][key]


def _make(mesh_key: Any, function: bytes, data: tuple[int, ...]) -> Built:
    mesh = rules().meshes[mesh_key]
    with torch.enable_grad():
        module = pickle.loads(function)(mesh)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"build(device_mesh) returned {type(module).__name__}: it is to return a torch.nn.Module")
    from torch.distributed.fsdp import FSDPModule

    sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # the gradient of the whole batch is the sum of the gradients of its parts
        part.set_force_sum_reduction_for_comms(True)
    return Built(module, mesh, data, not sharded)


def _value(tensor: torch.Tensor, mesh: Any) -> DTensor:
    """Return a parameter or gradient as a value: a DTensor that shares its memory."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _cut(local: torch.Tensor, size: int, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that is sharded along dimension 0 like `like`."""
    return of_part(local.contiguous(), like.device_mesh, like.placements, (size, *local.shape[1:]))
