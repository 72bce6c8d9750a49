"""Select the function that a rank calls in place of an operation on DTensors.

DTensor runs the operations that it is known to run correctly (`trusted`). Random operations have separate rules
(`randomness`). All other operations run on whole tensors (`whole`), as do trusted operations in a layout that DTensor
does not support. The selection depends only on the operation and the layouts, which are the same on all ranks, so no
rank waits for another.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.program import bare, compiled_source
from monarch_kernel.runtime.tensor.sharded.rank import views
from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.layout import (
    dtensor_of,
    of_part,
    part_of,
    run_replicated,
    run_whole,
    strides_ordered_as,
)
from monarch_kernel.runtime.tensor.sharded.rank.randomness import MeshGenerator, random_rule
from monarch_kernel.runtime.tensor.wire import Definition, TensorSlot

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# Rules for operations on a batch of independent entries: each rank computes its entries.
#
# Examples are attention over heads, pooling over channels, convolutions, and gathering along a dimension that is not
# sharded.

# Rules for common operations for which DTensor has no rule or a wrong one, and gathering would be too costly.
#
# Each rule is built from an operation and its fallback. It selects by layouts and shapes only, because all ranks must
# select the same way.

Run = Callable[..., Any]


def aten_operations(names: str) -> frozenset[str]:
    """Return the full names of torch operations, separated by spaces."""
    return frozenset(f"aten::{name}" for name in names.split())


#: Element-wise operations that torch does not mark as such.
_POINTWISE = aten_operations(
    """
    elu_backward.default fill_.Tensor floor_divide.default floor_divide.Scalar hardsigmoid_backward.default
    hardswish.default hardswish_backward.default hardtanh_backward.default isclose.default
    leaky_relu_backward.default log_sigmoid_backward.default log_sigmoid_forward.default masked_fill.Tensor
    masked_fill_.Tensor mish_backward.default softplus_backward.default
    """
)


#: Reductions over a list of dimensions, and those of them whose list is empty by default.
_OVER_DIMENSIONS = aten_operations(
    """
    all.dims amax.default amin.default any.dims logsumexp.default mean.dim std.correction sum.default
    sum.dim_IntList var.correction
    """
)
_ALL_BY_DEFAULT = frozenset({"aten::amax.default", "aten::amin.default"})


#: Operations that reshape a tensor.
_RESHAPES = frozenset({"aten::_unsafe_view.default", "aten::view.default"})
#: Operations that fail or are incorrect on a rank without elements.
_NEED_ELEMENTS = aten_operations(
    """
    _log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default
    amax.default amin.default argmax.default argmin.default index_select.default logsumexp.default max.dim
    mean.default mean.dim median.dim min.dim sort.default std.correction topk.default var.correction
    """
)


def guarded(name: str, run: Run, fallback: Run) -> Run:
    """Return `run`, with `fallback` for layouts in which it fails on some rank."""
    fails = leaves_a_rank_empty if name in _NEED_ELEMENTS else is_cut_unevenly_twice if name in _RESHAPES else None
    if fails is None:
        return run

    def guard(x: Any, *args: object, **kwargs: object) -> object:
        return (fallback if fails(x) else run)(x, *args, **kwargs)

    return guard


def is_cut_unevenly_twice(x: DTensor) -> bool:
    """Return whether several mesh dimensions split one dimension of a tensor into parts of different sizes.

    DTensor (2.13) computes the parts of a view from each mesh dimension separately.
    """
    cuts: dict[int, list[int]] = {}
    for p, ranks in zip(x.placements, x.device_mesh.shape):
        if not p.is_replicate() and not p.is_partial():
            cuts.setdefault(p.dim, []).append(ranks)  # type: ignore[attr-defined]
    return any(len(parts) > 1 and x.shape[dim] % math.prod(parts) for dim, parts in cuts.items())


def leaves_a_rank_empty(x: DTensor) -> bool:
    """Return whether some rank has no elements. The last rank has the fewest."""
    rest = list(x.shape)
    for p, ranks in zip(x.placements, x.device_mesh.shape):
        if not p.is_replicate() and not p.is_partial():
            dim: int = p.dim  # type: ignore[attr-defined]
            rest[dim] -= -(-rest[dim] // ranks) * (ranks - 1)
            if rest[dim] <= 0:
                return True
    return False


def special_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
    """Return the rule for an operation; None if there is none.

    Args:
        fallback: runs the operation on whole tensors, for layouts that the rule does not support.
    """
    if name in ("aten::argmax.default", "aten::argmin.default"):
        return _along_a_free_dimension(op, fallback)
    if name in _OVER_DIMENSIONS:
        return _over_dimensions(op, name, fallback)
    return None


def pointwise_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
    """Return the rule for an element-wise operation."""
    if name not in _POINTWISE and torch.Tag.pointwise not in op.tags:
        return None
    writes = op._schema.is_mutable

    def run(*args: Any, **kwargs: object) -> object:
        flat, tree = tree_flatten((list(args), kwargs))
        given = [x for x in flat if isinstance(x, DTensor)]
        shape = max((x.shape for x in given), key=len)
        if any(x.shape != shape and x.dim() for x in given):
            return fallback(*args, **kwargs)
        if writes and (args[0].shape != shape or any(p.is_partial() for p in args[0].placements)):
            return fallback(*args, **kwargs)
        template = args[0] if writes else next((x for x in given if _is_cut(x) and x.dim()), given[0])
        layout = [Replicate() if p.is_partial() else p for p in template.placements]
        everywhere = [Replicate()] * len(layout)

        def local(x: object) -> Any:
            if not isinstance(x, DTensor):
                return x
            wanted = layout if x.dim() or not shape else everywhere
            return (x if list(x.placements) == wanted else x.redistribute(placements=wanted))._local_tensor

        local_args, local_kwargs = tree_unflatten([local(x) for x in flat], tree)
        out = op(*local_args, **local_kwargs)
        if writes:
            return args[0]
        return tree_map(
            lambda r: (
                of_part(r, template.device_mesh, layout, template.shape, template.stride())
                if isinstance(r, torch.Tensor)
                else r
            ),
            out,
        )

    return run


def _along_a_free_dimension(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for argmax and similar operations, if every rank has the whole dimension."""

    def run(x: Any, dim: int | None = None, keepdim: bool = False) -> object:
        if dim is None or not x.dim() or any(p.is_partial() for p in x.placements):
            return fallback(x, dim, keepdim)
        reduced = dim % x.dim()
        layout: list[Placement] = []
        for p in x.placements:
            if p.is_replicate():
                layout.append(p)
            elif type(p) is not Shard or p.dim == reduced:
                return fallback(x, dim, keepdim)
            else:
                layout.append(p if keepdim or p.dim < reduced else Shard(p.dim - 1))
        local = op(x._local_tensor, reduced, keepdim)
        shape = list(x.shape)
        shape[reduced] = 1
        if not keepdim:
            del shape[reduced]
        return of_part(local, x.device_mesh, layout, shape)

    return run


def _over_dimensions(op: OpOverload, name: str, fallback: Run) -> Run:
    """Return the rule for reductions.

    An empty list of dimensions means all dimensions, which DTensor treats as none. Booleans count as numbers.
    """
    sums = name.startswith("aten::sum")

    def run(x: Any, *args: Any, **kwargs: object) -> object:
        if sums and x.dtype is torch.bool:
            x = x.to(torch.int64)
        if args and args[0] is not None and not args[0]:
            args = (list(range(x.dim())), *args[1:])
        elif not kwargs.get("dim", True):
            kwargs = {**kwargs, "dim": list(range(x.dim()))}
        elif not args and "dim" not in kwargs and name in _ALL_BY_DEFAULT:
            args = (list(range(x.dim())),)
        return op(x, *args, **kwargs)

    return run


def _is_cut(x: DTensor) -> bool:
    return any(not p.is_replicate() for p in x.placements)


#: Operations with two leading batch dimensions, in all inputs and results.
_BATCHED = aten_operations(
    """
    _scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default
    max_pool2d_with_indices.default max_pool2d_with_indices_backward.default avg_pool2d.default
    avg_pool2d_backward.default _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default
    upsample_nearest1d.default upsample_nearest1d_backward.default upsample_nearest2d.default
    upsample_nearest2d_backward.default upsample_bilinear2d.default upsample_bilinear2d_backward.default
    """
)
_BATCH_DIMENSIONS = 2
#: Backward operations with an argument at this position for the size of the global result. Its first entries are the
#: batch dimensions.
_SIZES_AT = 2
_SIZED = aten_operations(
    "upsample_nearest1d_backward.default upsample_nearest2d_backward.default upsample_bilinear2d_backward.default"
)


def batched_rule(op: OpOverload, name: str, fallback: Run) -> Run | None:
    """Return the rule for a batched operation; None for others."""
    if name in _BATCHED:
        return _batched(op, name in _SIZED, fallback)
    if name == "aten::convolution.default":
        return _convolution(op, fallback)
    if name == "aten::convolution_backward.default":
        return _convolution_backward(op, fallback)
    if name == "aten::gather.default":
        return _gather(op, fallback)
    return None


def _batched(op: OpOverload, sized: bool, fallback: Run) -> Run:
    def run(*args: Any, **kwargs: Any) -> object:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        first = given[0]
        layout = first.placements
        if (
            any(x.placements != layout or x.shape[:_BATCH_DIMENSIONS] != first.shape[:_BATCH_DIMENSIONS] for x in given)
            or first.dim() <= _BATCH_DIMENSIONS
            or not _cut_below(layout, _BATCH_DIMENSIONS)
            or leaves_a_rank_empty(first)
        ):
            return fallback(*args, **kwargs)
        if sized:
            local_size = [*first._local_tensor.shape[:_BATCH_DIMENSIONS], *args[_SIZES_AT][_BATCH_DIMENSIONS:]]
            args = (*args[:_SIZES_AT], local_size, *args[_SIZES_AT + 1 :])
        out = op(*_locals(args), **_locals(kwargs))

        def wrapped(local: object) -> object:
            if not isinstance(local, torch.Tensor):
                return local
            shape = [*first.shape[:_BATCH_DIMENSIONS], *local.shape[_BATCH_DIMENSIONS:]]
            return _as_strided_like(local, first.device_mesh, layout, shape)

        return tree_map(wrapped, out)

    return run


def _convolution(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for a batch of images with replicated filters."""

    def run(x: DTensor, weight: DTensor, bias: DTensor | None, *args: Any) -> object:
        others = [t for t in (weight, bias) if t is not None]
        if any(not _everywhere(t) for t in others) or not _cut_below(x.placements, 1) or leaves_a_rank_empty(x):
            return fallback(x, weight, bias, *args)
        local = op(*_locals((x, weight, bias, *args)))
        return _as_strided_like(local, x.device_mesh, x.placements, [x.shape[0], *local.shape[1:]])

    return run


def _convolution_backward(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for gradients of a convolution. Gradients of filters are sums over the ranks of a batch."""

    def run(gradient: DTensor, x: DTensor, weight: DTensor, *args: Any) -> object:
        if (
            not _everywhere(weight)
            or gradient.placements != x.placements
            or not _cut_below(x.placements, 1)
            or leaves_a_rank_empty(x)
        ):
            return fallback(gradient, x, weight, *args)
        dx, dw, db = op(*_locals((gradient, x, weight, *args)))
        terms = [Partial() if p.is_shard() else p for p in x.placements]
        mesh = x.device_mesh
        return (
            None if dx is None else _as_strided_like(dx, mesh, x.placements, x.shape),
            None if dw is None else _as_strided_like(dw, mesh, terms, weight.shape),
            None if db is None else of_part(db, mesh, terms, db.shape),
        )

    return run


def _gather(op: OpOverload, fallback: Run) -> Run:
    """Return the rule for gathering along a dimension that is not sharded, from equally sharded tensors."""

    def run(x: DTensor, dim: int, index: DTensor, **kwargs: Any) -> object:
        free = dim % max(x.dim(), 1)
        layout = index.placements
        if (
            x.placements != layout
            or x.dim() != index.dim()
            or any(p.is_partial() for p in layout)
            or any(type(p) is not Shard or p.dim == free for p in layout if not p.is_replicate())
            or any(x.shape[p.dim] != index.shape[p.dim] for p in layout if isinstance(p, Shard))
        ):
            return fallback(x, dim, index, **kwargs)
        return of_part(op(*_locals((x, dim, index)), **kwargs), x.device_mesh, layout, index.shape)

    return run


def _locals(tree: object) -> Any:
    return tree_map(lambda x: x._local_tensor if isinstance(x, DTensor) else x, tree)


def _everywhere(x: DTensor) -> bool:
    return all(p.is_replicate() for p in x.placements)


def _cut_below(layout: Sequence[Placement], dimensions: int) -> bool:
    """Return whether only the first dimensions are sharded."""
    return all(p.is_replicate() or (type(p) is Shard and p.dim < dimensions) for p in layout)


def _as_strided_like(
    local: torch.Tensor, mesh: DeviceMesh, layout: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Create a DTensor of a local part. The whole has the same memory order of dimensions as the part."""
    return of_part(local, mesh, layout, shape, strides_ordered_as(local, shape))


# Operations that DTensor computes correctly, in every layout that it accepts and at uneven sizes.
#
# The list was found by comparing each operation with the same operation on whole tensors, on real ranks (torch 2.13).
# The correctness matrix of the tests checks each. Other operations have one of our rules, or run on whole tensors.

TRUSTED = aten_operations(
    """
    _log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default
    _to_copy.default abs.default add.Tensor add_.Scalar add_.Tensor addcdiv.default addcmul.default addcmul_.default
    addmm.default all.default all.dim amax.default any.default any.dim atan2.default baddbmm.default
    bitwise_and.Tensor bitwise_and_.Tensor bitwise_not.default bitwise_or.Tensor bitwise_xor.Tensor bmm.default
    cat.default ceil.default clamp.default clone.default constant_pad_nd.default copy_.default cos.default
    cumprod.default cumsum.default diag_embed.default diagonal.default div.Scalar div.Tensor div_.Tensor dot.default
    elu.default embedding.default embedding_dense_backward.default empty_like.default eq.Scalar eq.Tensor
    erf.default exp.default expand.default fill_.Scalar flip.default floor.default full_like.default ge.Scalar
    gelu.default gelu_backward.default gt.Tensor index.Tensor index_put.default index_select.default isinf.default
    isnan.default le.Scalar leaky_relu.default lerp.Scalar log.default logical_and.default logical_and_.default
    logical_not.default logical_or.default logical_or_.default logsumexp.default lt.Tensor masked_fill.Scalar
    masked_fill_.Scalar max.dim maximum.default mean.default mean.dim median.dim min.dim mish.default mm.default
    mul.Scalar mul.Tensor mul_.Tensor native_layer_norm.default native_layer_norm_backward.default ne.Scalar
    neg.default new_empty.default new_empty_strided.default new_zeros.default ones_like.default permute.default
    pow.Tensor_Scalar pow.Tensor_Tensor prod.dim_int reciprocal.default relu.default relu_.default remainder.Scalar
    remainder.Tensor repeat.default roll.default round.default rsqrt.default rsub.Scalar scatter.src scatter.value
    scatter_.value scatter_add.default select.int select_backward.default sgn.default sigmoid.default
    sigmoid_backward.default sign.default silu.default silu_backward.default sin.default slice.Tensor
    slice_backward.default softplus.default sort.default split.Tensor sqrt.default squeeze.dim stack.default
    std.correction sub.Scalar sub.Tensor sum.default sum.dim_IntList t.default tanh.default tanh_backward.default
    threshold_backward.default topk.default transpose.int tril.default triu.default trunc.default unbind.int
    unsqueeze.default var.correction view.default where.self zero_.default zeros_like.default
    """
)


# Repeat DTensor's work for an operation without calling DTensor.
#
# For most operations, DTensor runs the same operation on this rank's parts, and returns a result of a known layout.
# This depends only on the operation, the specs of its inputs and the literals, but takes four times as long as a small
# operation itself. This module therefore watches a call. If only the operation ran, once, on the parts of its inputs
# and with the given arguments, the spec of the result is cached, and later calls with the same specs run directly on
# the parts. Other cases (a layout change, one of our rules, a fallback) are never cached.
#
# Specs are compared by identity. DTensor uses one spec object for results of one kind, and an equal spec that is
# another object only misses the cache. Cached specs are kept alive, so that no other object can get their identity.

#: The maximum number of cached kinds of inputs for one operation of the program; then the cache is cleared.
DIRECT_KINDS = 64

#: The identities of the specs of the inputs.
Key = tuple[int, ...]


class KnownLayouts:
    """The cached result specs of one operation of the program with its literals, by the specs of its inputs.

    Attributes:
        results: the spec of the result, for inputs with which the operation may run directly on the parts.
    """

    def __init__(self) -> None:
        self.results: dict[Key, DTensorSpec] = {}
        self._met: dict[Key, tuple[object, ...]] = {}
        self._others: set[Key] = set()
        self._lock = threading.Lock()

    def is_due(self, inputs: Sequence[Any]) -> bool:
        """Return whether to watch this call: its specs occur for the second time, and were not watched yet."""
        if torch.is_grad_enabled() or any(type(x) is not DTensor or not _is_plain(x._spec) for x in inputs):
            return False  # a failure is not a DTensor
        key = tuple([id(x._spec) for x in inputs])
        if key in self._met:
            return key not in self._others
        if len(self._met) >= DIRECT_KINDS:
            self.forget()
        self._met[key] = tuple([x._spec for x in inputs])
        return False

    def note(self, inputs: Sequence[Any], result: DTensorSpec | None) -> None:
        """Record the outcome of a watched call.

        Args:
            result: the spec of its result, if the operation computed the result from the parts; otherwise None.
        """
        specs = tuple([x._spec for x in inputs])
        key = tuple(map(id, specs))
        with self._lock:
            self._met[key] = specs
            if result is None:
                self._others.add(key)
            else:
                self.results[key] = result

    def forget(self) -> None:
        """Clear the cache. Another stream may be using it."""
        with self._lock:
            self.results.clear()  # first, so that specs live as long as their identities are in use
            self._others.clear()
            self._met.clear()


class _Watch(TorchDispatchMode):
    """Records the operations that run on plain tensors, below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[object, object, object, object]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if DTensor in types:
            return NotImplemented  # DTensor then runs its operations on the parts
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out


def direct_rule(op: OpOverload, run: Run, definition: Definition) -> tuple[Run, KnownLayouts] | None:
    """Return a function to call in place of `run` and its cache, if the operation can ever run directly on parts.

    Args:
        op: an operation of torch; `run` runs it on DTensors.

    Random operations, writing operations, and operations whose results may share memory with inputs are excluded. The
    cache key does not include floats, so operations with floats are included only if they are element-wise: their
    layouts do not depend on floats.
    """
    if not _is_eligible(op, definition):
        return None
    args, kwargs = pickle.loads(definition.template)
    names = [*(f"a{n}" for n in range(len(args))), *kwargs]
    given = [*args, *kwargs.values()]
    tensors = [name for name, x in zip(names, given) if type(x) is TensorSlot]
    if len(tensors) != definition.inputs or any(iskeyword(name) for name in names):
        return None  # some inputs are in lists
    known = KnownLayouts()
    positional, named = names[: len(args)], names[len(args) :]

    def ask(inputs: Sequence[object], /, *args: object, **kwargs: object) -> object:
        if not known.is_due(inputs):
            return run(*args, **kwargs)
        with _Watch() as watch:
            out = run(*args, **kwargs)
        same = type(out) is DTensor and _ran_on_parts(op, watch.ran, args, kwargs, out)
        known.note(inputs, out._spec if same else None)
        return out

    def passed(source: Callable[[str], str]) -> str:
        return ", ".join([*map(source, positional), *(f"{name}={source(name)}" for name in named)])

    on_parts = passed(lambda name: f"{name}._local_tensor" if name in tensors else name)
    source = (
        f"def call({', '.join([*positional, *(['*'] if named else []), *named])}):\n"
        f"    if {' and '.join(f'type({name}) is DTensor' for name in tensors)}:\n"
        f"        spec = result_of(({''.join(f'id({name}._spec), ' for name in tensors)}))\n"
        f"        if spec is not None:\n"
        f"            return make(DTensor, op({on_parts}), spec, requires_grad=False)\n"
        f"    return ask(({', '.join(tensors)},), {passed(lambda name: name)})\n"
    )
    made: dict[str, Any] = {
        "DTensor": DTensor,
        "ask": ask,
        "make": DTensor.__new__,
        "op": bare(op),
        "result_of": known.results.get,
    }
    exec(compiled_source(source), made)
    call = made["call"]
    call.asking = run  # for tracing
    return call, known


def _is_eligible(op: OpOverload, definition: Definition) -> bool:
    """Return whether an operation computes one new tensor of its inputs, from its arguments alone."""
    if not isinstance(op, torch._ops.OpOverload) or not definition.inputs or definition.outputs != 1:
        return False
    schema = op._schema
    if definition.new is not None or len(schema.returns) != 1 or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(x.alias_info is not None for x in (*schema.arguments, *schema.returns)):
        return False
    return not definition.floats or torch.Tag.pointwise in op.tags


def _is_plain(spec: DTensorSpec, result: bool = False) -> bool:
    """Return whether a layout has no state.

    For inputs, terms of a sum do not count, because literals may affect them.
    """
    kinds = (Shard, Replicate, Partial) if result else (Shard, Replicate)
    return all(type(p) in kinds for p in spec.placements)


def _ran_on_parts(
    op: OpOverload, ran: list[tuple[object, object, object, object]], args: object, kwargs: object, out: DTensor
) -> bool:
    """Return whether only the operation ran, on the parts of its inputs, and returned `out`."""
    if len(ran) != 1:
        return False
    func, their_args, their_kwargs, made = ran[0]
    if func is not op or made is not out._local_tensor or type(made) is not torch.Tensor or out.requires_grad:
        return False
    if not _is_plain(out._spec, result=True):
        return False
    ours, theirs = _by_name(op, args, kwargs), _by_name(op, their_args, their_kwargs)
    return all(_is_same(ours[name], theirs[name]) for name in ours)


def _by_name(op: OpOverload, args: Any, kwargs: Any) -> dict[str, object]:
    """Return the arguments of a call by name, including defaults."""
    arguments = op._schema.arguments
    given = dict(zip([a.name for a in arguments], args)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def _is_same(ours: object, theirs: object) -> bool:
    if isinstance(ours, torch.Tensor):
        return type(ours) is DTensor and theirs is ours._local_tensor
    if isinstance(ours, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


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
        self.strict: set[DeviceMesh] = set()
        self.meshes: dict[object, DeviceMesh] = {}
        self.former: dict[object, DeviceMesh] = {}
        self.shared: dict[object, DeviceMesh] = {}
        self._known: list[KnownLayouts] = []
        self._specs: dict[DTensorSpec, DTensorSpec] = {}

    def of_definition(self, op: OpOverload, definition: Definition) -> Callable[..., Any]:
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

    def of(self, op: OpOverload, name: str, definition: int = -1) -> Callable[..., Any]:
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

    def placed(self, tensor: torch.Tensor, layout: tuple[object, Sequence[Placement] | None]) -> DTensor:
        """Return this rank's part of a tensor that all ranks received.

        Args:
            layout: the key of a mesh, and placements; None: replicated on every rank.
        """
        key, placements = layout
        mesh = self.meshes[key]
        made = part_of(tensor, mesh, [Replicate()] * mesh.ndim if placements is None else placements)
        local = made._local_tensor
        if (
            local.device != current_executor.of_rank()
            or local.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        ):
            # a copy, because received memory may be shared with other ranks of this host
            made._local_tensor = local.to(current_executor.of_rank(), copy=True)
        # Tensors of one kind share one spec, by which operations on them are cached.
        if len(self._specs) >= KINDS:
            self._specs.clear()
        made._spec = self._specs.setdefault(made._spec, made._spec)
        return made

    def for_actors(self, value: Any) -> DTensor:
        """Return a DTensor of the same memory on the device mesh of actors and cells."""
        key = next(key for key, mesh in self.meshes.items() if mesh is value.device_mesh)
        return dtensor_of(value._local_tensor, self.shared[key], value.placements, value._spec.tensor_meta)

    def from_actors(self, value: Any, key: object) -> DTensor:
        """Return an actor's tensor on the device mesh of the stream.

        Raises:
            TypeError: the tensor is on other ranks.
        """
        mesh, theirs = self.meshes[key], value.device_mesh
        if theirs.mesh.tolist() != mesh.mesh.tolist():
            raise TypeError(f"the DTensor is on {theirs}, and was to be on {mesh}: adopt() takes it where it is")
        return dtensor_of(value._local_tensor, mesh, value.placements, value._spec.tensor_meta)

    def _on_whole(self, op: OpOverload, name: str, definition: int) -> Callable[..., object]:
        def fallback(*args: object, **kwargs: object) -> object:
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


def _with_fallback(op: OpOverload, fallback: Callable[..., object]) -> Callable[..., object]:
    op = bare(op)

    def run(*args: object, **kwargs: object) -> object:
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


def _not_into_terms(run: Callable[..., object], fallback: Callable[..., object]) -> Callable[..., object]:
    def write(*args: object, **kwargs: object) -> object:
        x = args[0] if args else None
        if isinstance(x, DTensor) and any(p.is_partial() for p in x.placements):
            return fallback(*args, **kwargs)
        return run(*args, **kwargs)

    return write


def _writing(op: OpOverload, run: Callable[..., object]) -> Callable[..., object]:
    """Wrap a writing operation, so that views of the written tensor also change."""
    places = [
        (n, a.name) for n, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]

    def write(*args: object, **kwargs: object) -> object:
        out = run(*args, **kwargs)
        if views.any_detached():
            for n, name in places:
                value = args[n] if n < len(args) else kwargs.get(name)
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, DTensor):
                        views.written(x)
        return out

    return write


def _viewing(op: OpOverload, run: Callable[..., Any]) -> Callable[..., object]:
    """Wrap a view operation, so that a view whose layout required a copy is recorded as a view."""

    def view(x: object, *args: object, **kwargs: object) -> object:
        moves = counts.moves
        out = run(x, *args, **kwargs)
        if isinstance(x, DTensor):
            if counts.moves != moves:
                views.detach(out, op, x, args, kwargs)
            else:
                views.keep_source(out, x)
        return out

    return view
