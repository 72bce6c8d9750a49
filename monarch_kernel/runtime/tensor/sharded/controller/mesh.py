"""A mesh of ranks that hold sharded tensors, with named dimensions: `Mesh`."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.actor.hosts.host_mesh import this_host
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.mesh.shape import unknown_dimension
from monarch_kernel.runtime.tensor.api.activation import activate_sharded, engine_of
from monarch_kernel.runtime.tensor.controller.borrowing import current_loan
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.stream import MAIN
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld
from monarch_kernel.runtime.tensor.sharded.controller.target import KeepsMesh, ShardedMesh
from monarch_kernel.runtime.tensor.sharded.controller.values import distribute as distribute_to
from monarch_kernel.runtime.tensor.sharded.rank import sharing
from monarch_kernel.runtime.tensor.training.mesh_methods import TrainingMethods

#: Modules that ranks import once, before they are forked.
PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch._dynamo",  # otherwise DTensor's first operation imports it in each rank, which takes seconds
    "monarch_kernel.runtime.tensor.sharded.rank.sharing",
    "monarch_kernel.runtime.tensor.training.rank",
)


class Mesh(TrainingMethods):
    """Processes with named dimensions, over which tensors are distributed.

    ```python
    mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
    x = distribute(torch.randn(512, 64), mesh, sharding_spec=["data_parallel", None])
    y = (x @ x.T).relu()      # runs on the ranks; y.full_tensor() brings it here
    ```

    It starts its processes on this host, and ends them when it is closed (``with Mesh(...) as mesh:``) or when it and
    all its tensors are deleted. `Mesh.of` uses existing processes.

    Args:
        shape: the number of ranks in each dimension.
        mesh_dim_names: the dimensions' names; by default ``dim_0``, ``dim_1``, ...
        strict: fail operations that have no rule for a layout, instead of gathering the whole tensor on every rank.
            Failed operations raise at once, which costs a round trip for each operation.
        name: its name in errors and tools.

    Raises:
        ValueError: sizes are not positive integers, or the names do not match them.
    """

    def __init__(
        self,
        shape: Sequence[int] | int,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        strict: bool = False,
        name: str | None = None,
    ) -> None:
        sizes = _sizes(shape)
        names = _names(mesh_dim_names, sizes)
        procs = this_host().spawn_procs(per_host=dict(zip(names, sizes)), preload=PRELOAD, name=name or "mesh")
        try:
            self._begin(procs, strict, owned=True)
        except BaseException:
            procs.stop("it could not become a mesh for tensors").get()
            raise
        self._end: Any = weakref.finalize(self, _stop, procs)
        self._end.atexit = False  # at exit, the runtime ends all processes

    @classmethod
    def of(
        cls,
        procs: ProcMesh | DeviceMesh,
        mesh_dim_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        *,
        strict: bool = False,
    ) -> Mesh:
        """Create a mesh of existing processes (a proc mesh or a slice of one), which it does not end.

        Args:
            procs: the processes. For a ``DeviceMesh`` of torch, a new mesh of its shape and names is started.
            mesh_dim_names, shape: another shape for the same processes; by default that of `procs`.
        """
        if isinstance(procs, DeviceMesh):
            return _of_device_mesh(cls, procs, strict)
        if not isinstance(procs, ProcMesh):
            raise TypeError(f"Mesh.of({type(procs).__name__}): give a proc mesh, such as this_host().spawn_procs(...)")
        if shape is not None or mesh_dim_names is not None:
            sizes = _sizes(shape if shape is not None else procs.extent.sizes)
            procs = _reshaped(procs, sizes, _names(mesh_dim_names, sizes))
        known = engine_of(procs).meshes.get((procs._region, MAIN, True))
        if isinstance(known, ShardedMesh) and isinstance(known.owner, cls):
            if known.strict != strict:
                known.be_strict(strict)
            return known.owner
        made = cls.__new__(cls)
        made._begin(procs, strict, owned=False)
        made._end = None
        return made

    def _begin(self, procs: ProcMesh, strict: bool, *, owned: bool) -> None:
        self._closed = False
        self.procs = procs
        engine = engine_of(procs)
        target = engine.mesh_of(procs, kind=ShardedMesh)
        assert isinstance(target, ShardedMesh)
        target.strict = strict
        ShardedWorld.of(engine).join(target)
        self._keeper = KeepsMesh(self)
        target.belong_to(self._keeper, owned)
        self._target = target

    # -- shape --------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks in each dimension."""
        return self._target.sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The names of the dimensions."""
        return self._target.labels

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._target.sizes)

    @property
    def name(self) -> str:
        """The name of the mesh in errors and tools."""
        return self._target.name

    def size(self, dim: str | int | None = None) -> int:
        """Return the number of ranks in total, or in a dimension (its name or position).

        Raises:
            KeyError: there is no such dimension.
            IndexError: the position is out of range.
        """
        if dim is None:
            return len(self._target.ranks)
        if isinstance(dim, str):
            if dim not in self.mesh_dim_names:
                raise unknown_dimension(dim, self.mesh_dim_names)
            dim = self.mesh_dim_names.index(dim)
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"dimension {dim}: mesh {self.name} has {self.ndim}")
        return self.shape[dim]

    def __len__(self) -> int:
        return self.size()

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.mesh_dim_names, self.shape))
        return f"Mesh({shape}{', closed' if self._closed else ''})"

    # -- work ---------------------------------------------------------------------------------------

    def execute(self, fn: Callable[..., object], batch: object, sharding_spec: object = "first") -> Any:
        """Call ``fn(batch)`` with the tensors of a batch distributed, and wait until the ranks have completed it.

        A step that fails or loses a rank therefore raises here, not later. After ``heal_mesh``, which restores the
        state after the last successful call (see `snapshot_every`), the same batch can be executed again.

        Args:
            fn: takes the batch; its result is returned.
            batch: a tensor, or lists, tuples and dicts with tensors. Tensors of the mesh are not changed.
            sharding_spec: the layout of the tensors; by default, dimension 0 is sharded along the first dimension of
                the mesh.

        Raises:
            DeviceMeshError: a rank has died.
            RemoteException: an operation failed on a rank.
        """

        def place(x: object) -> Any:
            if not isinstance(x, torch.Tensor) or type(x) is Tensor:
                return x
            spec = sharding_spec
            if isinstance(spec, str) and spec == "first":
                spec = [self.mesh_dim_names[0]] if x.dim() else None
            return self.distribute(x, spec)

        self._before_step()
        result = fn(tree_map(place, batch))
        self._target.engine.check(self._target)
        self._after_step()
        ShardedWorld.of(self._target.engine).tell()
        return result

    @contextmanager
    def activate(self) -> Generator[Mesh]:
        """Create the new tensors of this block on the mesh, replicated on every rank: ``with mesh.activate():``.

        `zeros`, `randn` and the like of ``monarch_kernel.distributed`` create tensors in parts, on this mesh by
        default.
        """
        self._check_open()
        with activate_sharded(self._target):
            yield self

    def distribute(self, tensor: torch.Tensor, sharding_spec: object = None) -> Tensor:
        """Distribute a tensor over this mesh; see `monarch_kernel.distribute`."""
        self._check_open()
        return distribute_to(tensor, self._target, sharding_spec)

    def manual_seed(self, seed: int) -> None:
        """Do the same as ``torch.manual_seed``: random operations on the mesh draw the numbers of one device."""
        torch.manual_seed(operator.index(seed))

    def costs(self) -> Any:
        """Return the costs of the program's lines so far: redistributions, synchronisations, fallbacks and bytes."""
        self._target.collect_costs()
        return self._target.engine.plan

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Return the mesh itself: the copy of a module is on the same ranks."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle the mesh as an argument of an endpoint of actors on its ranks, which receive torch's `DeviceMesh`."""
        target = self._target
        current_loan(self).ranks_of(target, self)
        target.prepare_loan()
        target.engine.shares = True
        return sharing.device_mesh_here, (target.engine.key, target.key)

    # -- end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes, if the mesh started them. Its tensors are lost."""
        if self._closed:
            return
        self._closed = True
        if self._end is not None:
            self._end.detach()
            self.procs.stop("its mesh was closed").get()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"mesh {self.name} was closed: make a new one")


#: The meshes for torch's device meshes of this process.
_by_device_mesh: weakref.WeakKeyDictionary[object, Mesh] = weakref.WeakKeyDictionary()


def mesh_from(mesh: object) -> Mesh:
    """Return the `Mesh` for an argument: a `Mesh`, a proc mesh, or a device mesh of torch.

    Raises:
        TypeError: the argument has another type.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, (ProcMesh, DeviceMesh)):
        return Mesh.of(mesh)
    raise TypeError(f"{type(mesh).__name__} is no mesh: give a Mesh, a proc mesh or a torch DeviceMesh")


def distribute(
    tensor: torch.Tensor, mesh: object, sharding_spec: object = None, *, placements: object = None
) -> Tensor:
    """Distribute a tensor over a mesh, in parts.

    ```python
    distribute(t, mesh, sharding_spec=["data_parallel", None])   # rows along a dimension of the mesh
    distribute(t, mesh, [Shard(0), Replicate()])                 # DTensor's placements, by dimension of the mesh
    ```

    Sizes need not be divisible by the number of ranks. Operations on the result run on the ranks and return distributed
    tensors. Their results equal those of the same operations on one device.

    Args:
        tensor: a local tensor. If it requires grad, the result does too: if the tensor is a leaf, the result is one;
            otherwise gradients pass.
        mesh: a `Mesh`, a proc mesh, or a ``DeviceMesh`` of torch.
        sharding_spec: for each dimension of the tensor a dimension of the mesh, several in a tuple, or None; or for
            each dimension of the mesh a placement. None: replicated on every rank.
        placements: the same as sharding_spec.

    Raises:
        ValueError: the layout names a dimension that the mesh does not have, or one twice.
        IndexError: the layout shards a dimension that the tensor does not have.
        TypeError: an argument is not a tensor, a mesh or a layout.
    """
    if placements is not None:
        if sharding_spec is not None:
            raise TypeError("distribute(): give sharding_spec or placements, not both")
        sharding_spec = placements
    return mesh_from(mesh).distribute(tensor, sharding_spec)


def _of_device_mesh(cls: type[Mesh], device_mesh: DeviceMesh, strict: bool) -> Mesh:
    known = _by_device_mesh.get(device_mesh)
    if known is None or known._closed:
        known = _by_device_mesh[device_mesh] = cls(tuple(device_mesh.shape), device_mesh.mesh_dim_names, strict=strict)
    return known


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"shape={shape!r}: sizes of a mesh are whole numbers, at least 1")
    if not sizes:
        raise ValueError("shape=(): a mesh has at least one dimension")
    return sizes


def _names(names: Sequence[str] | None, sizes: tuple[int, ...]) -> tuple[str, ...]:
    if names is None:
        return tuple(f"dim_{i}" for i in range(len(sizes)))
    if isinstance(names, str):
        names = (names,)
    found = tuple(names)
    if len(found) != len(sizes) or len(set(found)) != len(found) or not all(isinstance(n, str) and n for n in found):
        raise ValueError(
            f"mesh_dim_names={names!r}: give {len(sizes)} different names, one for each dimension of {sizes}"
        )
    return found


def _reshaped(procs: ProcMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> ProcMesh:
    count = len(procs)
    product = 1
    for size in sizes:
        product *= size
    if product != count:
        raise ValueError(f"shape={sizes}: that are {product} ranks, and {procs.name} has {count}")
    flat = procs.flatten("ranks")
    if len(names) == 1:
        return flat.rename(ranks=names[0])
    return flat.split(ranks=names, **dict(zip(names[1:], sizes[1:])))


def _stop(procs: ProcMesh) -> None:
    with suppress(Exception):  # for example, the runtime has ended, and its processes with it
        procs.stop("its mesh is no longer used")
