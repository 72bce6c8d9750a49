"""Distribute, redistribute and fetch sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it

from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.controller.redraws import digest_of
from monarch_kernel.runtime.tensor.sharded.rank import randomness as on_ranks
from monarch_kernel.runtime.tensor.sharded.rank import state

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


# Random numbers: a program on a mesh draws the numbers that it would draw on one device.
#
# At the first random operation on the mesh after a seed, the ranks take over the state of torch's generator in this
# process. From then on, the mesh draws from the stream of that seed. This process continues with a derived stream, so
# that local draws and draws on the mesh never coincide.

#: The number of draws whose states are kept.
REMEMBERED = on_ranks.REMEMBERED


class Handover:
    """Decides which numbers a mesh draws next, from the state of this process's generator.

    `torch.initial_seed()` reveals a new seed: after a hand-over, this process's generator has a seed that no program
    chooses. Each draw on the mesh also advances this process's generator, so that its states identify the states of the
    mesh. A program that restores a state, as activation checkpointing does, draws the same numbers again.
    """

    def __init__(self) -> None:
        self._mark: int | None = None
        self._expected = b""
        #: The numbers under which ranks keep their states, by the state of this process.
        self._kept: dict[bytes, int] = {}

    @classmethod
    def of(cls, engine: TensorEngine) -> Handover:
        """Return the instance of an engine."""
        return engine.extras.setdefault("generator", cls())

    def before_draw(self, mesh: ShardedMesh) -> None:
        """Make the next operation of the mesh draw the numbers of one device. The caller holds the engine's lock."""
        generator, engine = torch.default_generator, mesh.engine
        with _disable_current_modes():
            given = generator.get_state()
            digest = digest_of(given)
            if generator.initial_seed() != self._mark:
                self._mark = int.from_bytes(digest, "little") >> 1
                generator.manual_seed(self._mark)
                engine.turn_to(mesh)
                engine.flush()
                set_state = cloudpickle.dumps(functools.partial(state.set_generator, given, self._keep_latest(engine)))
                mesh.workers.ask.broadcast(b"", b"", engine.record, set_state, [])
                digest = digest_of(generator.get_state())
            elif digest != self._expected and digest in self._kept:
                function = functools.partial(state.rewind_generator, self._kept[digest], self._keep_latest(engine))
                engine.ask(mesh, function)
            self._keep(digest, engine.record)
            torch.rand(1, generator=generator)
            self._expected = digest_of(generator.get_state())

    def _keep_latest(self, engine: TensorEngine) -> int:
        """Return the number under which ranks are to keep their current state."""
        number = -engine.new_number()
        self._keep(self._expected, number)
        return number

    def _keep(self, digest: bytes, number: int) -> None:
        self._kept.pop(digest, None)
        self._kept[digest] = number
        if len(self._kept) > REMEMBERED:
            del self._kept[next(iter(self._kept))]


# Convert the layouts that a program writes to DTensor's placements (one per dimension of the mesh).
#
# A program may name a mesh dimension for each dimension of the tensor, as in Monarch and JAX (``["data", None]``
# shards dimension 0 along the mesh dimension "data"), or use DTensor's placements (``[Shard(0), Replicate()]``).

Placements = tuple[Placement, ...]


def placements_of(spec: object, labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    """Return the placements that `spec` describes for a tensor.

    Args:
        spec: None (replicated); or, for each dimension of the tensor, a name, a tuple of names or None; or, for each
            dimension of the mesh, a placement of DTensor.
        labels: the names of the mesh's dimensions.
        mesh: the mesh's name, for errors.

    Raises:
        ValueError: `spec` names a dimension that the mesh does not have, names a dimension twice, or has the wrong
            length.
        IndexError: `spec` shards a dimension that the tensor does not have.
        TypeError: `spec` has another form.
    """
    if spec is None:
        return (Replicate(),) * len(labels)
    if isinstance(spec, (str, Placement)):
        spec = [spec]
    if not isinstance(spec, Sequence):
        raise TypeError(
            f"sharding_spec={spec!r}: give a list with a name of the mesh's dimensions or None for each dimension of "
            f"the tensor, such as [{labels[0]!r}, None], or placements such as [Shard(0)]"
        )
    items: list[object] = list(spec)
    if any(isinstance(item, Placement) for item in items):
        return _by_mesh_dimension(items, labels, tensor, mesh)
    return _by_tensor_dimension(items, labels, tensor, mesh)


def _by_mesh_dimension(items: list[object], labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    if len(items) != len(labels):
        raise ValueError(
            f"{len(items)} placements for mesh {mesh} of {len(labels)} dimensions ({', '.join(labels)}): "
            f"give one for each"
        )
    found: list[Placement] = []
    for item in items:
        if item is None:
            item = Replicate()
        if not isinstance(item, Placement):
            raise TypeError(
                f"{item!r} among placements: give Shard(dim), Replicate() or Partial() for each mesh dimension"
            )
        if isinstance(item, Shard):
            item = Shard(_dimension(item.dim, tensor))
        elif isinstance(item, Partial) and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"a tensor of {tensor.dtype} cannot be split into terms (Partial): only floating-point ones"
            )
        found.append(item)
    return tuple(found)


def _by_tensor_dimension(items: list[Any], labels: tuple[str, ...], tensor: torch.Tensor, mesh: str) -> Placements:
    if len(items) > tensor.dim():
        raise IndexError(
            f"sharding_spec {items} has {len(items)} entries, but the tensor has {tensor.dim()} dimensions "
            f"({list(tensor.shape)})"
        )
    found: list[Placement] = [Replicate()] * len(labels)
    for dim, names in enumerate(items):
        for name in (names,) if isinstance(names, str) or names is None else tuple(names):
            if name is None:
                continue
            if name not in labels:
                raise ValueError(f"mesh {mesh} has no dimension {name!r}: it has {', '.join(labels)}")
            at = labels.index(name)
            if not found[at].is_replicate():
                raise ValueError(f"sharding_spec {items} names mesh dimension {name!r} twice")
            found[at] = Shard(dim)
    return tuple(found)


def _dimension(dim: int, tensor: torch.Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"Shard({dim}): the tensor has {tensor.dim()} dimensions ({list(tensor.shape)})")
    return dim % tensor.dim()


def distribute(tensor: torch.Tensor, target: ShardedMesh, spec: object) -> Tensor:
    """Distribute a local tensor over the ranks and return its handle; see `monarch_kernel.distribute`."""
    if type(tensor) is Tensor:
        if tensor._spec.mesh is not target:
            raise TypeError(
                f"distribute(): the tensor is on {tensor._spec.mesh!r} already: take it here first (full_tensor()), "
                "or lay it out anew where it is (redistribute())"
            )
        return redistribute(tensor, spec)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute(): {type(tensor).__name__} is no tensor: torch.as_tensor(...) makes one")
    if tensor.layout != torch.strided:
        raise TypeError(f"distribute(): a {tensor.layout} tensor: only dense ones (to_dense()) can be distributed")
    placements = placements_of(spec, target.labels, tensor, target.name)
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        return _Distribute.apply(tensor, target, placements)
    made = target.put(tensor, placements)
    made.requires_grad_(tensor.requires_grad)
    return made


def redistribute(tensor: Tensor, spec: object) -> Tensor:
    """Change the layout of a tensor. Gradients pass."""
    target = _mesh_of(tensor)
    placements = placements_of(spec, target.labels, tensor, target.name)
    return _Redistribute.apply(tensor, target, placements)


def full_tensor(tensor: Tensor) -> torch.Tensor:
    """Fetch the whole tensor, in one round trip. Gradients pass."""
    target = _mesh_of(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _FullTensor.apply(tensor, target)
    with _disable_current_modes():
        return target.value_of(tensor, "full_tensor()")


def to_local(tensor: Tensor, coords: dict[str, int]) -> torch.Tensor:
    """Fetch the part of one rank, in one round trip.

    Args:
        coords: the rank's coordinates by dimension of the mesh; other dimensions default to 0.
    """
    from monarch_kernel.runtime.tensor.api.fetching import rank_at

    target = _mesh_of(tensor)
    rank = rank_at(target, coords)
    engine = target.engine
    engine.plan.synchronised("to_local()")
    with _disable_current_modes():
        return engine.call_and_fetch(target, state.local_part, (tensor,), {}, rank).get()


def device_mesh(tensor: Tensor) -> Any:
    """Return the `Mesh` of a tensor."""
    return _mesh_of(tensor).owner


def placements(tensor: Tensor) -> Placements:
    """Return the layout of a tensor, a placement for each dimension of its mesh, in one round trip."""
    return _mesh_of(tensor).placements_of(tensor)


def preview(tensor: Tensor, count: int) -> str:
    """Return the `repr` and the first values, in one round trip each."""
    target = _mesh_of(tensor)
    with torch.no_grad():
        first = tensor.detach().flatten()[:count].tolist() if tensor.numel() else []
    numbers = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in first)
    return f"{target.describe(tensor)}\n[{numbers}{', ...' if tensor.numel() > count else ''}]"


def _mesh_of(tensor: Tensor) -> ShardedMesh:
    return tensor._spec.mesh  # type: ignore[return-value]  # only handles of sharded meshes come here


class _Distribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor, target: ShardedMesh, placements: Placements) -> Any:  # type: ignore[override]
        return target.put(tensor, placements)

    @staticmethod
    def backward(ctx: object, gradient: Any) -> object:  # type: ignore[override]
        return full_tensor(gradient.detach()), None, None


class _Redistribute(torch.autograd.Function):
    """Redistributes a tensor. The gradient keeps its layout, because it is the gradient of the same tensor."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor, target: ShardedMesh, placements: Placements) -> Any:  # type: ignore[override]
        return target.call(
            state.redistributed, _alike, tensor, placements, key=("redistribute", placements), meets=False
        )

    @staticmethod
    def backward(ctx: object, gradient: object) -> object:  # type: ignore[override]
        return gradient, None, None


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: ShardedMesh) -> torch.Tensor:  # type: ignore[override]
        ctx.target = target
        with _disable_current_modes():
            return target.value_of(tensor, "full_tensor()")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> object:  # type: ignore[override]
        return ctx.target.put(gradient), None


def _alike(x: torch.Tensor, placements: object) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
