"""The ranks' side of training: sums of gradients, modules on the ranks, copies of the training state."""

from __future__ import annotations

import os
import pickle
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from monarch_kernel.protocol.private_files import NotPrivateError, open_way, user_name
from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import here
from monarch_kernel.runtime.tensor.rank.values import RankStore, store_of
from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.layout import of_part
from monarch_kernel.runtime.tensor.sharded.rank.state import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


# Modules on the ranks: built there, sharded with torch's own functions, called by records.

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


_MODULE_NAME = "modules"
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
    mesh: DeviceMesh
    data: tuple[int, ...]
    sums: bool


@dataclass(slots=True)
class Ran:
    """One forward pass, until its backward pass. It is a value, so that it is deleted with its handle."""

    inputs: list[torch.Tensor]
    output: torch.Tensor


def build(
    key: int, mesh_key: object, function: bytes, data: tuple[int, ...], first: int
) -> list[tuple[str, bool, Like]]:
    """Build a module.

    Its parameters become the values from `first` on. Return their names, requires_grad flags and shapes.
    """
    built = _make(mesh_key, function, data)
    here().store.extras.setdefault(_MODULE_NAME, {})[key] = built
    values = here().store.values
    found: list[tuple[str, bool, Like]] = []
    for i, (name, parameter) in enumerate(built.module.named_parameters()):
        values[first + i] = _value(parameter, built.mesh)
        found.append((name, parameter.requires_grad, (tuple(parameter.shape), parameter.stride(), parameter.dtype)))
    return found


def rebuild(key: int, mesh_key: object, function: bytes, data: tuple[int, ...], first: int) -> None:
    """Build the module again after its process group was formed again.

    This rank's existing parameters keep their values.
    """
    values = here().store.values
    built = _make(mesh_key, function, data)
    here().store.extras.setdefault(_MODULE_NAME, {})[key] = built
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
    here().store.extras.get(_MODULE_NAME, {}).pop(key, None)


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


def backward(key: int, ran: Ran, gradient: DTensor, *inputs: DTensor) -> list[object]:
    """Return the gradients of the inputs, then those of the parameters."""
    built = _built(key)
    laid_out = gradient.redistribute(placements=inputs[0].placements)
    with torch.enable_grad():
        ran.output.backward(laid_out.to_local())
    # FSDP replaces its parameters by others between forward and backward
    parameters = [p for p in built.module.parameters() if p.requires_grad]
    found: list[object] = []
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


def call(key: int, function: Callable[..., object], *args: object) -> Any:
    """Call ``function(module, *args)`` on this rank."""
    return function(_built(key).module, *args)


def _built(key: int) -> Built:
    return here().store.extras[_MODULE_NAME][key]


def _make(mesh_key: object, function: bytes, data: tuple[int, ...]) -> Built:
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


def _value(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a parameter or gradient as a value: a DTensor that shares its memory."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _cut(local: torch.Tensor, size: int, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that is sharded along dimension 0 like `like`."""
    return of_part(local.contiguous(), like.device_mesh, like.placements, (size, *local.shape[1:]))


# Snapshots of the training state on a rank: its own, and a copy of another rank's, in case that rank dies.

# Save and load sharded values with ``torch.distributed.checkpoint``: each rank writes and reads its parts.

#: The file in the folder for the controller's own state.
LOCAL = "controller.pt"
#: The files of a checkpoint. No other files are ever removed.
_FILES = re.compile(rf"\.metadata(\.tmp)?|__\d+_\d+\.distcp|{re.escape(LOCAL)}")

#: Placements, size, stride and dtype of a value.
Layout = tuple[Sequence[Placement], Sequence[int], Sequence[int], torch.dtype]
#: By name: the number of the value, and its layout if it may have been lost.
Names = dict[str, tuple[int, Layout | None]]


def save(names: Names, folder: str, first: int) -> None:
    """Write values to a new folder that only this user can read.

    Args:
        first: the rank that creates the folder.
    """
    worker = here()
    values = {name: worker.value(number) for name, (number, _) in names.items()}
    if worker.rank == first:
        os.mkdir(folder, 0o700)
    torch.distributed.barrier()
    check(folder)
    dcp_save(values, checkpoint_id=folder)


def publish(folder: str, path: str, overwrite: bool) -> None:
    """Rename a finished checkpoint to its path.

    At any time, the path has the old checkpoint or the new one, never a mixture.
    """
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        try:
            os.fchmod(fd, 0o600)
            os.fsync(fd)
        finally:
            os.close(fd)
    before = f"{folder}.before"
    replaced = False
    if overwrite and os.path.lexists(path):
        check_replaceable(path)
        os.rename(path, before)
        replaced = True
    try:
        os.rename(folder, path)
    except OSError:
        if replaced:
            os.rename(before, path)
        raise
    if replaced:
        discard(before)
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_replaceable(folder: str) -> None:
    """Raise if a folder has more than a checkpoint, which replacing it would delete.

    Raises:
        FileExistsError: the folder has other files.
        NotPrivateError: another user could change the folder.
    """
    check(folder)
    with os.scandir(folder) as entries:
        foreign = [e.name for e in entries if not (_FILES.fullmatch(e.name) and e.is_file(follow_symlinks=False))]
    if foreign:
        raise FileExistsError(
            f"{folder} is not replaced: {min(foreign)} in it is no part of a checkpoint. Name another folder"
        )


def discard(folder: str) -> None:
    """Remove a complete or incomplete checkpoint. Other files stay, and the folder with them."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(fd):
            about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if _FILES.fullmatch(name) and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    with suppress(OSError):  # not empty
        os.rmdir(folder)


def load(names: Names, folder: str, key: object) -> None:
    """Read values in place. Lost values are created again."""
    check(folder)
    worker, mesh = here(), rules().meshes[key]
    held = worker.store.values
    values: dict[str, object] = {}
    for name, (number, layout) in names.items():
        value = held.get(number)
        if not isinstance(value, torch.Tensor):
            if layout is None:
                raise RuntimeError(f"{name} was lost, and how it was laid out is not known")
            value = held[number] = _empty(mesh, *layout)
        values[name] = value
    with torch.no_grad():
        dcp_load(values, checkpoint_id=folder)


def check(folder: str) -> None:
    """Check that no other user can write a checkpoint or change the path to it, because it is partly pickled.

    Raises:
        NotPrivateError: another user can do so.
        FileNotFoundError: there is no such folder.
    """
    fd = open_way(folder)
    try:
        for about, name in [(os.fstat(fd), folder)] + [
            (os.stat(os.path.join(folder, entry), follow_symlinks=False), os.path.join(folder, entry))
            for entry in os.listdir(folder)
        ]:
            if (
                about.st_uid != os.geteuid()
                or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                or stat.S_ISLNK(about.st_mode)
            ):
                raise NotPrivateError(
                    f"checkpoint {name} could be changed by others (it belongs to {user_name(about.st_uid)}, mode "
                    f"{stat.S_IMODE(about.st_mode):o}), and it is partly pickled: it is not read. "
                    "Copy what you trust into a folder of your own"
                )
    finally:
        os.close(fd)


def _empty(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    local = torch.zeros(size, dtype=dtype, device=current_executor.of_rank())
    return of_part(local, mesh, placements, shape, stride)


#: The number of snapshots kept, because the newest may be on some ranks only.
KEPT = 2
_NAME = "snapshots"


@dataclass(slots=True)
class SavedPart:
    """This rank's part of one value.

    Attributes:
        local: a copy of the local part.
        placements, shape, stride: the metadata of the DTensor; `placements` is None for a plain tensor.
    """

    local: torch.Tensor
    placements: tuple[Placement, ...] | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    def copy(self) -> SavedPart:
        """Copy the part to separate memory."""
        return SavedPart(self.local.clone(), self.placements, self.shape, self.stride)


@dataclass(slots=True)
class Copy:
    """A training state: parts by the number of the value, and the random states."""

    parts: dict[int, SavedPart]
    generator: dict[str, torch.Tensor]


@dataclass(slots=True)
class Copies:
    """The snapshots that a rank keeps.

    Attributes:
        own: its own snapshots, by number.
        others: the snapshots of other ranks, by rank.
        under_way: the copy that is being sent to another rank.
    """

    own: dict[int, Copy] = field(default_factory=dict[int, Copy])
    others: dict[int, dict[int, Copy]] = field(default_factory=dict[int, dict[int, Copy]])
    under_way: Any = None


def copies_of(store: RankStore) -> Copies:
    """Return this rank's snapshots for an engine."""
    found: Copies | None = store.extras.get(_NAME)
    if found is None:
        found = store.extras[_NAME] = Copies()
    return found


class SnapshotKeeper(Actor):
    """Keeps another rank's snapshots, beside the executors of an engine."""

    __tool__ = True

    def __init__(self, engine: str) -> None:
        self._copies = copies_of(store_of(engine, current_rank().rank))

    @endpoint
    def keep(self, rank: int, number: int, copy: Copy) -> None:
        """Store a snapshot of another rank."""
        mine = Copy({n: part.copy() for n, part in copy.parts.items()}, copy.generator)
        _add(self._copies.others.setdefault(rank, {}), number, mine)

    @endpoint
    def give(self, rank: int, number: int) -> Copy:
        """Return a snapshot of another rank."""
        return self._copies.others[rank][number]

    @endpoint
    def numbers(self) -> tuple[list[int], dict[int, list[int]]]:
        """Return the numbers of the snapshots here: its own, and those of other ranks by rank."""
        return sorted(self._copies.own), {rank: sorted(kept) for rank, kept in self._copies.others.items()}


def take(number: int, values: list[int], keepers: Any, keeper: dict[int, int], wait: bool) -> None:
    """Copy values of this rank, and send a second copy to the rank that keeps it. Called in order with the stream.

    Args:
        values: the numbers of the values.
        keeper: the rank that keeps each rank's copy.
        wait: return when the second copy is complete.

    Raises:
        OperationFailed: one of the values is a failure. Earlier snapshots stay.
    """
    worker = here()
    copies = copies_of(worker.store)
    _wait(copies)
    parts = {n: _part(worker.value(n)) for n in values}
    copy = Copy(parts, rules().generator.get())
    _add(copies.own, number, copy)
    other = keeper[worker.rank]
    if other == worker.rank:
        return
    copies.under_way = keepers.slice(ranks=other).keep.call_one(worker.rank, number, copy)
    if wait:
        _wait(copies)


def restore(number: int, values: list[int], key: object, keepers: Any, keeper: dict[int, int]) -> None:
    """Restore these values from a snapshot. All of them are DTensors on one mesh, or all are plain tensors.

    Args:
        key: the key of the mesh on the ranks.
    """
    worker = here()
    copies = copies_of(worker.store)
    copies.under_way = None
    copy = copies.own.get(number)
    if copy is None:
        copy = keepers.slice(ranks=keeper[worker.rank]).give.call_one(worker.rank, number).get()
    copies.own = {number: copy}
    state = rules()
    state.generator.restore(copy.generator)
    held = worker.store.values
    with torch.no_grad():
        for n in values:
            part, value = copy.parts[n], held.get(n)
            local = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(local, torch.Tensor) and local.shape == part.local.shape and local.dtype == part.local.dtype:
                local.copy_(part.local)  # modules of this rank may refer to it
            elif part.placements is None:
                held[n] = part.local.clone().to(current_executor.of_rank())
            else:
                local = part.local.clone().to(current_executor.of_rank())
                held[n] = of_part(local, state.meshes[key], part.placements, part.shape, part.stride)


def forget() -> None:
    """Delete all snapshots."""
    here().store.extras.pop(_NAME, None)


def _wait(copies: Copies) -> None:
    under_way, copies.under_way = copies.under_way, None
    if under_way is not None:
        try:
            under_way.get()
        except Exception:  # the rank that keeps the copy has died; this rank's copy remains
            pass


def _part(value: Any) -> SavedPart:
    if isinstance(value, DTensor):
        return SavedPart(value._local_tensor.clone(), value.placements, tuple(value.shape), value.stride())
    return SavedPart(value.clone())


def _add(copies: dict[int, Copy], number: int, copy: Copy) -> None:
    copies[number] = copy
    for old in sorted(copies)[:-KEPT]:
        del copies[old]
