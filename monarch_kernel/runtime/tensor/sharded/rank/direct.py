"""What DTensor did for an operation once, done again without asking it.

For most operations that is: the same operation on this rank's parts, and a result of a layout that it knows. What it
does depends on the operation, the specs of its inputs and the literals alone, yet it takes DTensor four times as long
as a small operation itself. So a call is watched: if all that ran was the operation, once, on the parts of its inputs
and with the arguments that were given, the spec of the result is remembered, and calls with the same specs run on the
parts. Whatever else may happen (a layout that changes, a rule of ours, a fallback) is never repeated from memory.

Specs are compared by identity: DTensor gives results of one kind one spec, and an equal one that is another object
costs no more than it did. Those that are remembered are kept, so that none can take another's place.
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

#: How many kinds of inputs one operation of the program is remembered for; then it begins anew.
KINDS = 64

Run = Callable[..., Any]
#: Identities of the specs of the inputs.
Key = tuple[int, ...]


class KnownLayouts:
    """What one operation of the program, with its literals, makes of which specs.

    Attributes:
        results: the spec of the result, for inputs on whose parts it may run.
    """

    def __init__(self) -> None:
        self.results: dict[Key, Any] = {}
        self._met: dict[Key, tuple[Any, ...]] = {}
        self._others: set[Key] = set()
        self._lock = threading.Lock()

    def is_due(self, inputs: Sequence[Any]) -> bool:
        """Whether to watch this call: inputs of these specs come for the second time, and were not watched."""
        if torch.is_grad_enabled() or any(type(x) is not DTensor or not _is_plain(x._spec) for x in inputs):
            return False  # a failure is no DTensor
        key = tuple([id(x._spec) for x in inputs])
        if key in self._met:
            return key not in self._others
        if len(self._met) >= KINDS:
            self.forget()
        self._met[key] = tuple([x._spec for x in inputs])
        return False

    def note(self, inputs: Sequence[Any], result: Any) -> None:
        """A call was watched.

        Args:
            result: the spec of its result, if it is what the operation makes of the parts; else None.
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
        """Begin anew; another stream may be at work."""
        with self._lock:
            self.results.clear()  # first: no spec is let go while its identity means something
            self._others.clear()
            self._met.clear()


class _Watch(TorchDispatchMode):
    """Notes what runs on plain tensors, below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes to what it does with the parts
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out


def direct_rule(op: Any, run: Run, definition: Definition) -> tuple[Run, KnownLayouts] | None:
    """What to call in place of `run`, if the operation may ever run on parts; and what it will remember.

    Args:
        op: an operation of torch; `run` does it on DTensors.

    Random operations, and those that write or whose results may share memory with inputs, never do. Floats are no part
    of what is remembered, so that only operations by element, whose layouts do not depend on them, have some.
    """
    if not _is_eligible(op, definition):
        return None
    args, kwargs = pickle.loads(definition.template)
    names = [*(f"a{n}" for n in range(len(args))), *kwargs]
    given = [*args, *kwargs.values()]
    tensors = [name for name, x in zip(names, given) if type(x) is TensorSlot]
    if len(tensors) != definition.inputs or any(iskeyword(name) for name in names):
        return None  # some are in lists
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
    call.asking = run  # for those who would trace it
    return call, known


def _is_eligible(op: Any, definition: Definition) -> bool:
    """Whether an operation makes one new tensor of its inputs, by its arguments alone."""
    if not isinstance(op, torch._ops.OpOverload) or not definition.inputs or definition.outputs != 1:
        return False
    schema = op._schema
    if definition.new is not None or len(schema.returns) != 1 or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(x.alias_info is not None for x in (*schema.arguments, *schema.returns)):
        return False
    return not definition.floats or torch.Tag.pointwise in op.tags


def _is_plain(spec: Any, result: bool = False) -> bool:
    """Whether a layout has no state of its own. Of inputs, terms of a sum do not count: literals may matter to them."""
    kinds = (Shard, Replicate, Partial) if result else (Shard, Replicate)
    return all(type(p) in kinds for p in spec.placements)


def _ran_on_parts(op: Any, ran: list[tuple[Any, Any, Any, Any]], args: Any, kwargs: Any, out: Any) -> bool:
    """Whether nothing ran but the operation on the parts of its inputs, and `out` is what it made."""
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
    """The arguments of a call with those that were left out."""
    arguments = op._schema.arguments
    given = dict(zip([a.name for a in arguments], args)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return type(ours) is DTensor and theirs is ours._local_tensor
    if isinstance(ours, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs
