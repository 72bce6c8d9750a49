"""Select the function that a rank calls in place of an operation on DTensors.

DTensor runs the operations that it is known to run correctly (`trusted`). Random operations have separate rules
(`randomness`). All other operations run on whole tensors (`whole`), as do trusted operations in a layout that DTensor
does not support. The selection depends only on the operation and the layouts, which are the same on all ranks, so no
rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.utils._pytree import tree_leaves

from monarch_kernel.runtime.tensor.rank import device
from monarch_kernel.runtime.tensor.rank.program import bare
from monarch_kernel.runtime.tensor.sharded.rank import views
from monarch_kernel.runtime.tensor.sharded.rank.batched import batched_rule
from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.direct import KnownLayouts, direct_rule
from monarch_kernel.runtime.tensor.sharded.rank.layout import dtensor_of, part_of
from monarch_kernel.runtime.tensor.sharded.rank.randomness import MeshGenerator, random_rule
from monarch_kernel.runtime.tensor.sharded.rank.special import guarded, pointwise_rule, special_rule
from monarch_kernel.runtime.tensor.sharded.rank.trusted import TRUSTED
from monarch_kernel.runtime.tensor.sharded.rank.whole import run_replicated, run_whole
from monarch_kernel.runtime.tensor.wire import Definition

#: Operations that may write into the terms of a sum (Partial) separately. For others, DTensor silently computes some
#: incorrectly.
_LINEAR = frozenset({"aten::add_.Tensor", "aten::sub_.Tensor", "aten::mul_.Scalar", "aten::div_.Scalar"})


#: The maximum number of cached specs of received tensors; then the cache is cleared.
KINDS = 1024


class NoRule(RuntimeError):
    """An operation without a rule would run on the whole tensor, and its mesh is strict."""


class OperationRules:
    """Selects how operations of one engine run on this rank.

    Attributes:
        generator: the random number generator of its meshes.
        strict: the device meshes that refuse operations on whole tensors.
        meshes: torch's device meshes, by the key of the controller's target.
        former: the device meshes of the previous process group, which values may still refer to.
        shared: the device meshes of actors and cells, by the same keys.
    """

    def __init__(self) -> None:
        self.generator = MeshGenerator()
        self.strict: set[Any] = set()
        self.meshes: dict[Any, Any] = {}
        self.former: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}
        self._known: list[KnownLayouts] = []
        self._specs: dict[Any, Any] = {}

    def of_definition(self, op: Any, definition: Definition) -> Callable[..., Any]:
        """Return the function that a program calls in place of its definition's operation."""
        run = self.of(op, definition.label)
        direct = direct_rule(op, run, definition)
        if direct is None:
            return run
        call, known = direct
        self._known.append(known)
        return call

    def forget_layouts(self) -> None:
        """Clear the cached specs: their meshes belong to a previous process group."""
        self._specs.clear()
        for known in self._known:
            known.forget()

    def of(self, op: Any, name: str, definition: int = -1) -> Callable[..., Any]:
        """Return the function to call in place of an operation.

        Args:
            name: the name, like ``aten::add.Tensor``.
            definition: the number of the definition, by which the controller finds the program's line.
        """
        if not isinstance(op, torch._ops.OpOverload):
            return op  # a function of ours or of the program's: it receives the DTensors
        if torch.Tag.nondeterministic_seeded in op.tags:
            return random_rule(op, self.generator)
        fallback = self._on_whole(op, name, definition)
        run = special_rule(op, name, fallback) or batched_rule(op, name, fallback)
        if run is None:
            run = _with_fallback(op, fallback) if name in TRUSTED else pointwise_rule(op, name, fallback) or fallback
        run = guarded(name, run, fallback)
        if op._schema.is_mutable:
            return _writing(op, run if name in _LINEAR else _not_into_terms(run, fallback))
        return _viewing(op, run) if op.is_view else run

    def placed(self, tensor: torch.Tensor, layout: tuple[Any, Sequence[Placement] | None]) -> DTensor:
        """Return this rank's part of a tensor that all ranks received.

        Args:
            layout: the key of a mesh, and placements; None: replicated on every rank.
        """
        key, placements = layout
        mesh = self.meshes[key]
        made = part_of(tensor, mesh, [Replicate()] * mesh.ndim if placements is None else placements)
        local = made._local_tensor
        if local.device != device.of_rank() or local.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            # a copy, because received memory may be shared with other ranks of this host
            made._local_tensor = local.to(device.of_rank(), copy=True)
        # Tensors of one kind share one spec, by which operations on them are cached.
        if len(self._specs) >= KINDS:
            self._specs.clear()
        made._spec = self._specs.setdefault(made._spec, made._spec)
        return made

    def for_actors(self, value: Any) -> DTensor:
        """Return a DTensor of the same memory on the device mesh of actors and cells."""
        key = next(key for key, mesh in self.meshes.items() if mesh is value.device_mesh)
        return dtensor_of(value._local_tensor, self.shared[key], value.placements, value._spec.tensor_meta)

    def from_actors(self, value: Any, key: Any) -> DTensor:
        """Return an actor's tensor on the device mesh of the stream.

        Raises:
            TypeError: the tensor is on other ranks.
        """
        mesh, theirs = self.meshes[key], value.device_mesh
        if theirs.mesh.tolist() != mesh.mesh.tolist():
            raise TypeError(f"the DTensor is on {theirs}, and was to be on {mesh}: adopt() takes it where it is")
        return dtensor_of(value._local_tensor, mesh, value.placements, value._spec.tensor_meta)

    def _on_whole(self, op: Any, name: str, definition: int) -> Callable[..., Any]:
        def fallback(*args: Any, **kwargs: Any) -> Any:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
            if not given:
                return op(*args, **kwargs)
            if any(not p.is_replicate() for x in given for p in x.placements):
                if given[0].device_mesh in self.strict:
                    layouts = ", ".join(f"{list(x.shape)} as {list(x.placements)}" for x in given)
                    raise NoRule(
                        f"{name} has no rule for {layouts}: it would gather the whole tensor on every rank. "
                        "Redistribute its inputs first (t.redistribute(...)), or make the mesh with strict=False"
                    )
                counts.fell_back(name, definition)
                return run_whole(op, args, kwargs)
            return run_replicated(op, args, kwargs)

        return fallback


def rules_of(extras: dict[str, Any]) -> OperationRules:
    """Return the rules of an engine, from its extras on this rank."""
    found: OperationRules | None = extras.get("rules")
    if found is None:
        found = extras["rules"] = OperationRules()
    return found


def _with_fallback(op: Any, fallback: Callable[..., Any]) -> Callable[..., Any]:
    op = bare(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as e:
            if not _has_no_way(e):
                raise
        return fallback(*args, **kwargs)

    return run


def _has_no_way(error: Exception) -> bool:
    """Return whether DTensor raised this error before any rank computed anything."""
    text = str(error)
    return "Sharding propagation failed" in text or "does not have a sharding strategy" in text


def _not_into_terms(run: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if isinstance(x, DTensor) and any(p.is_partial() for p in x.placements):
            return fallback(*args, **kwargs)
        return run(*args, **kwargs)

    return write


def _writing(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a writing operation, so that views of the written tensor also change."""
    places = [
        (n, a.name) for n, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]

    def write(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if views.any_detached():
            for n, name in places:
                value = args[n] if n < len(args) else kwargs.get(name)
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, DTensor):
                        views.written(x)
        return out

    return write


def _viewing(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a view operation, so that a view whose layout required a copy is recorded as a view."""

    def view(x: Any, *args: Any, **kwargs: Any) -> Any:
        moves = counts.moves
        out = run(x, *args, **kwargs)
        if isinstance(x, DTensor):
            if counts.moves != moves:
                views.detach(out, op, x, args, kwargs)
            else:
                views.keep_source(out, x)
        return out

    return view
