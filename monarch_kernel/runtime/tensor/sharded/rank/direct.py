"""Repeat DTensor's work for an operation without calling DTensor.

For most operations, DTensor runs the same operation on this rank's parts, and returns a result of a known layout. This
depends only on the operation, the specs of its inputs and the literals, but takes four times as long as a small
operation itself. This module therefore watches a call. If only the operation ran, once, on the parts of its inputs and
with the given arguments, the spec of the result is cached, and later calls with the same specs run directly on the
parts. Other cases (a layout change, one of our rules, a fallback) are never cached.

Specs are compared by identity. DTensor uses one spec object for results of one kind, and an equal spec that is another
object only misses the cache. Cached specs are kept alive, so that no other object can get their identity.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_kernel.runtime.tensor.rank.program import bare, compiled_source
from monarch_kernel.runtime.tensor.wire import Definition, TensorSlot

#: The maximum number of cached kinds of inputs for one operation of the program; then the cache is cleared.
KINDS = 64

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
        if len(self._met) >= KINDS:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then runs its operations on the parts
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out


def direct_rule(op: Any, run: Run, definition: Definition) -> tuple[Run, KnownLayouts] | None:
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


def _is_eligible(op: Any, definition: Definition) -> bool:
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


def _ran_on_parts(op: Any, ran: list[tuple[Any, Any, Any, Any]], args: Any, kwargs: Any, out: Any) -> bool:
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


def _by_name(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
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
