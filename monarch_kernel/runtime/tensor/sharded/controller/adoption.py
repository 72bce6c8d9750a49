"""Create handles of tensors that actors or cells of the ranks have offered, without moving data: ``adopt``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.tensor.api.activation import active_sharded, engine_of
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.borrowing import ranks_by_proc, region_of
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, make_handle
from monarch_kernel.runtime.tensor.controller.spec import spec_of
from monarch_kernel.runtime.tensor.inspection.running import all_engines
from monarch_kernel.runtime.tensor.rank import offers as rank_offers
from monarch_kernel.runtime.tensor.sharded.controller.mesh import Mesh, mesh_from
from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh
from monarch_kernel.runtime.tensor.sharded.controller.values import Handover, Placements, placements_of
from monarch_kernel.runtime.tensor.sharded.rank import factories, sharing
from monarch_kernel.runtime.tensor.wire import OfferedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh


# Create tensors in parts: ``zeros``, ``ones``, ``randn`` and other functions of ``monarch_kernel.distributed``.


def zeros(*size: object, **options: object) -> Tensor:
    """Create a tensor of zeros. Each rank creates its part.

    ```python
    zeros(1024, 64, mesh=mesh, sharding_spec=["data", None])
    ```

    Args:
        size: integers, or one sequence of integers.
        options: common keyword options of this module's functions:

            * ``mesh`` (or ``device_mesh``): as for `distribute`; by default the active mesh (``with
              mesh.activate():``);
            * ``sharding_spec`` (or ``placements``): as for `distribute`; by default the tensor is replicated on every
              rank;
            * ``dtype``, ``requires_grad``, ``layout`` (only ``torch.strided``): as in torch.

    Raises:
        ValueError: no mesh is given or active; the layout does not fit; the tensor would be a sum of terms (Partial).
        TypeError: an option is unknown, or a size is not an integer.
    """
    return _filled("zeros", _size(size), 0, torch.get_default_dtype(), options)


def ones(*size: object, **options: object) -> Tensor:
    """Create a tensor of ones; see `zeros`."""
    return _filled("ones", _size(size), 1, torch.get_default_dtype(), options)


def empty(*size: object, **options: object) -> Tensor:
    """Create an uninitialised tensor; see `zeros`."""
    return _filled("empty", _size(size), None, torch.get_default_dtype(), options)


def full(size: object, fill_value: Any, **options: object) -> Tensor:
    """Create a tensor filled with one number, with the dtype that ``torch.full`` selects; see `zeros`."""
    with _disable_current_modes():
        dtype = torch.full((), fill_value).dtype
    return _filled("full", _size((size,)), fill_value, dtype, options)


def rand(*size: object, **options: object) -> Tensor:
    """Draw random numbers from [0, 1): the numbers of ``torch.rand`` on one device, in any layout; see `zeros`."""
    return _drawn("rand", _size(size), options)


def randn(*size: object, **options: object) -> Tensor:
    """Draw normal random numbers: the numbers of ``torch.randn`` on one device, in any layout; see `zeros`."""
    return _drawn("randn", _size(size), options)


def arange(start: Any, end: Any = None, step: Any = 1, **options: Any) -> Tensor:
    """Implement ``torch.arange``; for the options see `zeros`."""
    bounds = (0, start, step) if end is None else (start, end, step)
    dtype = options.pop("dtype", None)
    with _disable_current_modes():
        like = torch.arange(*bounds, dtype=dtype, device="meta")
    new = _New("arange", (like.numel(),), like.dtype, options)
    return new.issue(factories.counted, new.dtype, bounds)


class _New:
    """The checked options of a new tensor.

    Attributes:
        size, dtype: the size and dtype of the tensor.
    """

    def __init__(self, name: str, size: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> None:
        meshes = [options.pop(key, None) for key in ("mesh", "device_mesh")]
        specs = [options.pop(key, None) for key in ("sharding_spec", "placements")]
        for names, given in (("mesh or device_mesh", meshes), ("sharding_spec or placements", specs)):
            if None not in given:
                raise TypeError(f"{name}(): give {names}, not both")
        found = options.pop("dtype", None)
        self.size, self.dtype = size, dtype if found is None else found
        self._requires_grad = bool(options.pop("requires_grad", False))
        if options.pop("layout", torch.strided) is not torch.strided:
            raise TypeError(f"{name}(layout=...): tensors on meshes are dense (torch.strided)")
        if options:
            raise TypeError(
                f"{name}() has no option {', '.join(map(repr, options))}: it has mesh, sharding_spec, dtype and "
                "requires_grad"
            )
        self.target = _target(name, next((mesh for mesh in meshes if mesh is not None), None))
        spec: Any = next((spec for spec in specs if spec is not None), None)
        with _disable_current_modes():
            like = torch.empty(size, dtype=self.dtype, device="meta")
        self._placements: tuple[Placement, ...] = placements_of(spec, self.target.labels, like, self.target.name)
        if any(p.is_partial() for p in self._placements):
            raise ValueError(
                f"{name}(): a new tensor cannot be a sum of terms (Partial): make it in another layout, and "
                "redistribute() it"
            )

    def issue(self, function: Callable[..., object], *rest: Any) -> Tensor:
        """Make the ranks create the tensor: ``function(key of the mesh, placements, *rest)``."""
        size, dtype = self.size, self.dtype

        def like(*_: object) -> torch.Tensor:
            return torch.empty(size, dtype=dtype)

        made: Tensor = self.target.call(
            function, like, self.target.key, self._placements, *rest, key=(function, size, dtype)
        )
        return made.requires_grad_() if self._requires_grad else made  # pyright: ignore[reportReturnType]  # itself


def _filled(name: str, size: tuple[int, ...], value: object, dtype: torch.dtype, options: dict[str, object]) -> Tensor:
    new = _New(name, size, dtype, options)
    return new.issue(factories.filled, new.size, new.dtype, value)


def _drawn(name: str, size: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    new = _New(name, size, torch.get_default_dtype(), options)
    if not (new.dtype.is_floating_point or new.dtype.is_complex):
        raise TypeError(f"{name}(dtype={new.dtype}): only floating-point and complex numbers are drawn so")
    Handover.of(new.target.engine).before_draw(new.target)
    return new.issue(factories.drawn, new.size, new.dtype, name == "randn")


def _target(name: str, mesh: object) -> ShardedMesh:
    if mesh is None:
        target: Any = active_sharded()
        if target is None:
            raise ValueError(f"{name}(): no mesh is given: write mesh=..., or `with mesh.activate():`")
        return target
    found = mesh_from(mesh)
    found._check_open()
    return found._target


def _size(size: Sequence[Any]) -> tuple[int, ...]:
    given = size[0] if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    found = tuple(map(operator.index, given))
    if any(n < 0 for n in found):
        raise ValueError(f"size {list(found)}: sizes are not negative")
    return found


def adopt(values: object, mesh: object = None, sharding_spec: object = None) -> Any:
    """Create handles of tensors that the ranks have offered (`offer`). No data moves, and the memory stays shared.

    ```python
    y = adopt(trainers.make.call(x).get())                         # each rank offered a DTensor: one tensor in parts
    z = adopt(trainers.rows.call().get(), mesh, ["data", None])    # each rank offered its rows
    ```

    Args:
        values: the result of an endpoint call: an offer of each rank, or a list, tuple or dict with offers.
        mesh: the mesh of the handles: a `Mesh` or a proc mesh. By default, it is the mesh of the tensors of these
            processes, or for DTensors a mesh with the shape of their device mesh.
        sharding_spec: treat the offers as the parts of one tensor in this layout, as for `distribute`.

    Returns:
        A handle, or a list, tuple or dict with handles. For DTensors and parts, they are handles like those of
            `distribute`. Otherwise each handle stands for a separate tensor on each rank.

    Raises:
        TypeError: the offers of the ranks differ in kind, or are not tensors.
        ValueError: shapes or layouts differ between ranks, or the processes are not those of the mesh.
        RuntimeError: an offer was already adopted, or has expired.
    """
    of_ranks: list[object] = list(values.values()) if isinstance(values, ValueMesh) else [values]
    flat, trees = zip(*(tree_flatten(each) for each in of_ranks), strict=True)
    for rank, tree in enumerate(trees):
        if tree != trees[0]:
            raise TypeError(f"adopt(): rank {rank} gave {tree}, and rank 0 {trees[0]}: all ranks have to give alike")
    with _disable_current_modes():
        made = [_adopted([leaves[k] for leaves in flat], mesh, sharding_spec) for k in range(len(flat[0]))]
    return tree_unflatten(made, trees[0])


def _adopted(offers: list[OfferedTensor], mesh: Any, sharding_spec: object) -> Tensor:
    for rank, offered in enumerate(offers):
        if not isinstance(offered, OfferedTensor):
            raise TypeError(
                f"adopt(): rank {rank} gave a {type(offered).__name__}: endpoints and cells give offer(tensor) "
                "(monarch_kernel.distributed.offer) for what the controller is to adopt"
            )
    engine, ranks = _where(offers, mesh)
    by_rank = dict(zip(ranks, offers))
    first = offers[0]
    if first.layout is not None:
        if sharding_spec is not None:
            raise TypeError("adopt(): DTensors have a layout: give no sharding_spec (redistribute() makes another)")
        _check_alike(offers, lambda o: (o.size, o.dtype, o.layout and (o.layout.sizes, o.layout.placements)))
        target = _mesh_of_layout(engine, mesh, by_rank)
        return _hold(target, by_rank, first.layout.placements, first.size, first.stride)
    _check_alike(offers, lambda o: o.layout)
    if sharding_spec is not None:
        if not isinstance(mesh, Mesh):
            raise TypeError(
                "adopt(): sharding_spec needs the mesh that it is about: adopt(values, mesh, sharding_spec)"
            )
        target = mesh._target
        _check_all_there(target, by_rank)
        placements, size = _whole(target, by_rank, sharding_spec)
        stride = torch.empty(size, device="meta").stride()
        return _hold(target, by_rank, placements, size, stride)
    if isinstance(mesh, Mesh):
        raise TypeError(
            f"adopt(): the ranks offered tensors of their own: say how they are parts of one, "
            f"adopt(values, mesh, [{mesh.mesh_dim_names[0]!r}, ...]), or take each as it is, adopt(values, mesh.procs)"
        )
    _check_alike(offers, lambda o: (o.size, o.stride, o.dtype))
    plain = _plain_mesh(engine, mesh, ranks)
    return _hold(plain, by_rank, None, first.size, first.stride)


def _hold(
    target: TensorMesh,
    offers: dict[int, OfferedTensor],
    placements: Placements | None,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """Make the ranks store their offers as a value. Return its handle."""
    engine = target.engine
    engine.shares = True
    number = engine.new_number()
    taken = {rank: offered.number for rank, offered in offers.items()}
    if isinstance(target, ShardedMesh):
        assert placements is not None
        function = functools.partial(sharing.adopted, number, taken, target.key, placements, size, stride)
    else:
        function = functools.partial(rank_offers.adopted, number, taken)
    engine.ask(target, function)
    like = torch.empty_strided(size, stride, dtype=next(iter(offers.values())).dtype, device="meta")
    return make_handle(spec_of(target, like), ValueOwner(number, target.dead, frames.take(3, 16)))


def _where(offers: list[OfferedTensor], mesh: Any) -> tuple[TensorEngine, list[int]]:
    """Return the engine of the processes that made these offers, and their ranks in its world."""
    if mesh is not None:
        procs = mesh.procs if isinstance(mesh, Mesh) else mesh
        if not isinstance(procs, ProcMesh):
            raise TypeError(f"adopt(): {type(mesh).__name__} is no mesh: give a Mesh or a proc mesh")
        engines = [engine_of(procs)]
    else:
        engines = all_engines()
    for engine in engines:
        places = ranks_by_proc(engine)
        ranks = [places.get(offered.proc, -1) for offered in offers]
        if -1 not in ranks:
            return engine, ranks
    if mesh is None:
        raise ValueError("adopt(): these processes have no tensors yet: say the mesh, adopt(values, mesh)")
    raise ValueError(
        f"adopt(): not all of what was offered is on processes of mesh {engines[0].name} (a process that has died, or "
        "another mesh)"
    )


def _check_alike(offers: list[OfferedTensor], of: Any) -> None:
    for rank, offered in enumerate(offers):
        if of(offered) != of(offers[0]):
            raise ValueError(
                f"adopt(): rank {rank} offered {offered!r}, and rank 0 {offers[0]!r}: no handle can stand for both. "
                "Parts of one tensor are adopted with a layout, adopt(values, mesh, sharding_spec)"
            )


def _mesh_of_layout(engine: TensorEngine, mesh: object, offers: dict[int, OfferedTensor]) -> ShardedMesh:
    """Return the mesh for DTensors on this device mesh."""
    places = {offered.layout.rank: rank for rank, offered in offers.items() if offered.layout is not None}
    layout = next(iter(offers.values())).layout
    assert layout is not None
    missing = sorted(set(layout.ranks) - set(places))
    if missing:
        raise ValueError(
            f"adopt(): the DTensor is on ranks {name_ranks(layout.ranks)} of its device mesh, and "
            f"{name_ranks(missing)} offered nothing: call all of them"
        )
    ranks = tuple(places[rank] for rank in layout.ranks)
    known = [m for m in engine.meshes.values() if isinstance(m, ShardedMesh) and m.owner is not None]
    if isinstance(mesh, Mesh):
        known = [mesh._target]
    fitting = [m for m in known if (tuple(m.ranks), m.sizes) == (ranks, layout.sizes)]
    if fitting:
        return next((m for m in fitting if m.labels == layout.labels), fitting[0])
    if isinstance(mesh, Mesh):
        raise ValueError(
            f"adopt(): the DTensor is on a device mesh of shape {layout.sizes} over ranks {name_ranks(ranks)}, and "
            f"{mesh!r} is over {name_ranks(mesh._target.ranks)}: give the mesh that it is on, or none"
        )
    labels = layout.labels or tuple(f"dim_{i}" for i in range(len(layout.sizes)))
    region = region_of(labels, layout.sizes, ranks)
    if region is None:
        raise ValueError(f"adopt(): ranks {ranks} are no regular part of mesh {engine.name}: a handle needs one")
    return Mesh.of(engine.world._new_with_region(region))._target


def _plain_mesh(engine: TensorEngine, procs: ProcMesh | None, ranks: list[int]) -> TensorMesh:
    """Return the mesh for separate tensors on these ranks."""
    if procs is not None:
        mesh = engine.mesh_of(procs)
        _check_all_there(mesh, dict.fromkeys(ranks))
        return mesh
    for mesh in engine.meshes.values():
        if not mesh.sharded and mesh.labels != ("ranks",) and sorted(mesh.ranks) == sorted(ranks):
            return mesh
    raise ValueError("adopt(): which mesh they are on is not clear: say it, adopt(values, mesh)")


def _check_all_there(mesh: TensorMesh, offers: dict[int, Any]) -> None:
    if sorted(mesh.ranks) != sorted(offers):
        raise ValueError(
            f"adopt(): ranks {name_ranks(sorted(offers))} offered tensors, and mesh {mesh.name} has ranks "
            f"{name_ranks(sorted(mesh.ranks))}: call all of them, or give the part of the mesh that was called"
        )


def _whole(target: ShardedMesh, offers: dict[int, OfferedTensor], spec: object) -> tuple[Placements, tuple[int, ...]]:
    """Return placements and size of the tensor with these parts."""
    first = offers[target.ranks[0]]
    placements = placements_of(spec, target.labels, torch.empty(first.size, device="meta"), target.name)
    size = list(first.size)
    coordinates = [(rank, tuple(at.values())) for rank, at in zip(target.ranks, target.procs.extent.points())]
    for dim in range(len(size)):
        cut = [k for k, placement in enumerate(placements) if placement.is_shard(dim)]
        along = [rank for rank, at in coordinates if all(a == 0 or k in cut for k, a in enumerate(at))]
        if cut:
            size[dim] = sum(offers[rank].size[dim] if dim < len(offers[rank].size) else 0 for rank in along)
    for rank, at in coordinates:
        expected, _ = _compute_local_shape_and_global_offset(tuple(size), target.sizes, list(at), placements)
        offered = offers[rank]
        if tuple(expected) != offered.size or offered.dtype != first.dtype:
            raise ValueError(
                f"adopt(): rank {target.ranks.index(rank)} offered {offered!r}; as its part of a tensor {size} laid "
                f"out as {list(placements)} it should be {list(expected)}, {first.dtype}"
            )
    return placements, tuple(size)
