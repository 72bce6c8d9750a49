"""Select the function that a rank calls in place of an operation on DTensors.

DTensor runs the operations that it is known to run correctly (`trusted`). Random operations have separate rules
(`randomness`). All other operations run on whole tensors (`whole`), as do trusted operations in a layout that DTensor
does not support. The selection depends only on the operation and the layouts, which are the same on all ranks, so no
rank waits for another.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.program import bare, compiled_source
from monarch_kernel.runtime.tensor.sharded.rank import views
from monarch_kernel.runtime.tensor.sharded.rank.batched import batched_rule, guarded, pointwise_rule, special_rule
from monarch_kernel.runtime.tensor.sharded.rank.counts import counts
from monarch_kernel.runtime.tensor.sharded.rank.layout import dtensor_of, part_of, run_replicated, run_whole
from monarch_kernel.runtime.tensor.sharded.rank.randomness import MeshGenerator, random_rule
from monarch_kernel.runtime.tensor.wire import Definition, TensorSlot

if TYPE_CHECKING:
    from torch._ops import OpOverload


# Operations that DTensor computes correctly, in every layout that it accepts and at uneven sizes.
#
# The list was found by comparing each operation with the same operation on whole tensors, on real ranks (torch 2.13).
# The correctness matrix of the tests checks each. Other operations have one of our rules, or run on whole tensors.

TRUSTED = frozenset(
    {
        "aten::_log_softmax.default",
        "aten::_log_softmax_backward_data.default",
        "aten::_softmax.default",
        "aten::_softmax_backward_data.default",
        "aten::_to_copy.default",
        "aten::abs.default",
        "aten::add.Tensor",
        "aten::add_.Scalar",
        "aten::add_.Tensor",
        "aten::addcdiv.default",
        "aten::addcmul.default",
        "aten::addcmul_.default",
        "aten::addmm.default",
        "aten::all.default",
        "aten::all.dim",
        "aten::amax.default",
        "aten::any.default",
        "aten::any.dim",
        "aten::atan2.default",
        "aten::baddbmm.default",
        "aten::bitwise_and.Tensor",
        "aten::bitwise_and_.Tensor",
        "aten::bitwise_not.default",
        "aten::bitwise_or.Tensor",
        "aten::bitwise_xor.Tensor",
        "aten::bmm.default",
        "aten::cat.default",
        "aten::ceil.default",
        "aten::clamp.default",
        "aten::clone.default",
        "aten::constant_pad_nd.default",
        "aten::copy_.default",
        "aten::cos.default",
        "aten::cumprod.default",
        "aten::cumsum.default",
        "aten::diag_embed.default",
        "aten::diagonal.default",
        "aten::div.Scalar",
        "aten::div.Tensor",
        "aten::div_.Tensor",
        "aten::dot.default",
        "aten::elu.default",
        "aten::embedding.default",
        "aten::embedding_dense_backward.default",
        "aten::empty_like.default",
        "aten::eq.Scalar",
        "aten::eq.Tensor",
        "aten::erf.default",
        "aten::exp.default",
        "aten::expand.default",
        "aten::fill_.Scalar",
        "aten::flip.default",
        "aten::floor.default",
        "aten::full_like.default",
        "aten::ge.Scalar",
        "aten::gelu.default",
        "aten::gelu_backward.default",
        "aten::gt.Tensor",
        "aten::index.Tensor",
        "aten::index_put.default",
        "aten::index_select.default",
        "aten::isinf.default",
        "aten::isnan.default",
        "aten::le.Scalar",
        "aten::leaky_relu.default",
        "aten::lerp.Scalar",
        "aten::log.default",
        "aten::logical_and.default",
        "aten::logical_and_.default",
        "aten::logical_not.default",
        "aten::logical_or.default",
        "aten::logical_or_.default",
        "aten::logsumexp.default",
        "aten::lt.Tensor",
        "aten::masked_fill.Scalar",
        "aten::masked_fill_.Scalar",
        "aten::max.dim",
        "aten::maximum.default",
        "aten::mean.default",
        "aten::mean.dim",
        "aten::median.dim",
        "aten::min.dim",
        "aten::mish.default",
        "aten::mm.default",
        "aten::mul.Scalar",
        "aten::mul.Tensor",
        "aten::mul_.Tensor",
        "aten::native_layer_norm.default",
        "aten::native_layer_norm_backward.default",
        "aten::ne.Scalar",
        "aten::neg.default",
        "aten::new_empty.default",
        "aten::new_empty_strided.default",
        "aten::new_zeros.default",
        "aten::ones_like.default",
        "aten::permute.default",
        "aten::pow.Tensor_Scalar",
        "aten::pow.Tensor_Tensor",
        "aten::prod.dim_int",
        "aten::reciprocal.default",
        "aten::relu.default",
        "aten::relu_.default",
        "aten::remainder.Scalar",
        "aten::remainder.Tensor",
        "aten::repeat.default",
        "aten::roll.default",
        "aten::round.default",
        "aten::rsqrt.default",
        "aten::rsub.Scalar",
        "aten::scatter.src",
        "aten::scatter.value",
        "aten::scatter_.value",
        "aten::scatter_add.default",
        "aten::select.int",
        "aten::select_backward.default",
        "aten::sgn.default",
        "aten::sigmoid.default",
        "aten::sigmoid_backward.default",
        "aten::sign.default",
        "aten::silu.default",
        "aten::silu_backward.default",
        "aten::sin.default",
        "aten::slice.Tensor",
        "aten::slice_backward.default",
        "aten::softplus.default",
        "aten::sort.default",
        "aten::split.Tensor",
        "aten::sqrt.default",
        "aten::squeeze.dim",
        "aten::stack.default",
        "aten::std.correction",
        "aten::sub.Scalar",
        "aten::sub.Tensor",
        "aten::sum.default",
        "aten::sum.dim_IntList",
        "aten::t.default",
        "aten::tanh.default",
        "aten::tanh_backward.default",
        "aten::threshold_backward.default",
        "aten::topk.default",
        "aten::transpose.int",
        "aten::tril.default",
        "aten::triu.default",
        "aten::trunc.default",
        "aten::unbind.int",
        "aten::unsqueeze.default",
        "aten::var.correction",
        "aten::view.default",
        "aten::where.self",
        "aten::zero_.default",
        "aten::zeros_like.default",
    }
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

Run = Callable[..., Any]
#: The identities of the specs of the inputs.
Key = tuple[int, ...]


class KnownLayouts:
    """The cached result specs of one operation of the program with its literals, by the specs of its inputs.

    Attributes:
        results: the spec of the result, for inputs with which the operation may run directly on the parts.
    """

    def __init__(self) -> None:
        self.results: dict[Key, Any] = {}
        self._met: dict[Key, tuple[Any, ...]] = {}
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

    def note(self, inputs: Sequence[Any], result: Any) -> None:
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
        self.ran: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def ask(inputs: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
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


def _is_plain(spec: Any, result: bool = False) -> bool:
    """Return whether a layout has no state.

    For inputs, terms of a sum do not count, because literals may affect them.
    """
    kinds = (Shard, Replicate, Partial) if result else (Shard, Replicate)
    return all(type(p) in kinds for p in spec.placements)


def _ran_on_parts(op: OpOverload, ran: list[tuple[Any, Any, Any, Any]], args: Any, kwargs: Any, out: Any) -> bool:
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


def _by_name(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
    arguments = op._schema.arguments
    given = dict(zip([a.name for a in arguments], args)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def _is_same(ours: Any, theirs: Any) -> bool:
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
        self.strict: set[Any] = set()
        self.meshes: dict[Any, Any] = {}
        self.former: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}
        self._known: list[KnownLayouts] = []
        self._specs: dict[Any, Any] = {}

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

    def placed(self, tensor: torch.Tensor, layout: tuple[Any, Sequence[Placement] | None]) -> DTensor:
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

    def from_actors(self, value: Any, key: Any) -> DTensor:
        """Return an actor's tensor on the device mesh of the stream.

        Raises:
            TypeError: the tensor is on other ranks.
        """
        mesh, theirs = self.meshes[key], value.device_mesh
        if theirs.mesh.tolist() != mesh.mesh.tolist():
            raise TypeError(f"the DTensor is on {theirs}, and was to be on {mesh}: adopt() takes it where it is")
        return dtensor_of(value._local_tensor, mesh, value.placements, value._spec.tensor_meta)

    def _on_whole(self, op: OpOverload, name: str, definition: int) -> Callable[..., Any]:
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


def _with_fallback(op: OpOverload, fallback: Callable[..., Any]) -> Callable[..., Any]:
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


def _writing(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
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


def _viewing(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
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
