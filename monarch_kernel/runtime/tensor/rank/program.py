"""Compile a definition to a function of one line that runs a record: `Program`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.wire import Definition, FloatSlot, RankDevice, Recorded, TensorSlot

#: Operations that compute data for their backward only while gradients are on. Ranks have them off, because autograd
#: runs on the controller.
_KEEP_MORE_WITH_GRAD = frozenset({"aten::mkldnn_rnn_layer.default"})


class Program:
    """The compiled code for records of a definition.

    Attributes:
        run: ``run(V, L, i, F)`` runs the record that begins at ``L[i]``, on values ``V``, with floats ``F``.
        call: the operation, with the arguments of the definition's template.
        rebinds: the positions of inputs that it may replace by other objects.
        size: the number of integers in a record.
        inputs, outputs, mutates, standins, label: the same as in the definition.
    """

    __slots__ = ("call", "definition", "inputs", "label", "mutates", "outputs", "rebinds", "run", "size", "standins")

    def __init__(
        self, run: Callable[..., None], definition: Definition, call: Callable[..., Any], rebinds: tuple[int, ...] = ()
    ) -> None:
        self.run = run
        self.call = call
        self.rebinds = rebinds
        self.definition = definition
        self.inputs = definition.inputs
        self.outputs = definition.outputs
        self.size = 1 + definition.inputs + definition.floats + definition.outputs
        self.mutates = definition.mutates
        self.standins = definition.standins
        self.label = definition.label

    def assignment(self, ins: Sequence[str], outs: Sequence[str]) -> str:
        """Return the source of the assignment (``... = ``) of a call's results.

        Args:
            ins: the sources of the places of the inputs; `outs` has the sources of the places of the new values.
        """
        definition = self.definition
        if definition.new is not None:
            places = iter(outs)
            targets = [next(places) if new else "_" for new in definition.new]
            targets += [ins[k] for k in self.rebinds]
            return f"{', '.join(targets)}, = " if targets else ""
        if self.rebinds:
            return f"{ins[self.rebinds[0]]} = "
        return f"{outs[0]} = " if outs else ""


def compiled(definition: Definition, wrap: Callable[[Any, Definition], Any] | None = None) -> Program:
    """Compile a definition to its program.

    Args:
        wrap: takes the operation and its definition, and returns the function to call instead (rules of sharded
            meshes).
    """
    args, kwargs = pickle.loads(definition.template)
    assert not isinstance(definition.operation, Recorded)  # sequences have a separate kind of program
    operation = operation_of(definition.operation)
    if wrap is not None:
        operation = wrap(operation, definition)
    if definition.operation in _KEEP_MORE_WITH_GRAD:
        operation = _with_grad(operation)
    names: dict[str, Any] = {"op": bare(operation)}
    first_float = 1 + definition.inputs
    first_out = first_float + definition.floats

    def tensor(k: int) -> str:
        return f"V[L[i + {1 + k}]]"

    def number(k: int) -> str:
        return f"F[L[i + {first_float + k}]]"

    call = f"op({arguments(args, kwargs, tensor, number, names)})"
    # an operation in place on DTensors may have to change the layout, which returns another object
    rebound = definition.sharded and len(definition.mutates) == 1 and definition.outputs == 0
    program = Program(_not_yet, definition, operation, definition.mutates if rebound else ())
    ins = [tensor(k) for k in range(definition.inputs)]
    outs = [f"V[L[i + {first_out + k}]]" for k in range(definition.outputs)]
    exec(compiled_source(f"def run(V, L, i, F):\n    {program.assignment(ins, outs)}{call}\n"), names)
    program.run = names["run"]
    return program


def _with_grad(operation: Callable[..., object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> Any:
        with torch.enable_grad():
            return operation(*args, **kwargs)

    return run


def compiled_source(source: str) -> CodeType:
    """Compile source of a program, with a file name that debuggers recognise as not being user code."""
    return compile(source, "<monarch operation>", "exec")


def _not_yet(V: object, L: object, i: int, F: object) -> None:  # noqa: N803
    raise AssertionError("a program is run before it is compiled")


def operation_of(operation: str | bytes) -> Any:
    """Return the torch operation of this name, or the pickled function."""
    if isinstance(operation, bytes):
        return pickle.loads(operation)
    space, rest = operation.split("::")
    packet, overload = rest.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def bare(operation: object) -> Any:
    """Return the function that an operation of torch calls, without the Python wrapper.

    Return anything else unchanged.
    """
    return operation._op if type(operation) is torch._ops.OpOverload else operation


def written(operation: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[object]:
    """Return the arguments that an operation writes, according to its schema, including items of lists.

    Functions that are not operations write none.
    """
    schema = getattr(operation, "_schema", None)
    found: list[object] = []
    for n, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def arguments(
    args: Sequence[object],
    kwargs: dict[str, object],
    tensor: Callable[[int], str],
    number: Callable[[int], str],
    names: dict[str, object],
) -> str:
    """Return the source of a call's arguments. Objects without a literal form get a name in `names`."""

    def source(x: object) -> str:
        if type(x) is TensorSlot:
            return tensor(x.index)
        if type(x) is FloatSlot:
            return number(x.index)
        if type(x) is RankDevice:
            x = current_executor.of_rank()
        if type(x) is list:
            return f"[{', '.join(map(source, x))}]"
        if type(x) is tuple:
            return f"({', '.join(map(source, x))}{',' if len(x) == 1 else ''})"
        if type(x) is dict:
            return "{" + ", ".join(f"{k!r}: {source(v)}" for k, v in x.items()) + "}"
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        name = f"c{len(names)}"
        names[name] = x
        return name

    return ", ".join([source(a) for a in args] + [f"{k}={source(v)}" for k, v in kwargs.items()])
