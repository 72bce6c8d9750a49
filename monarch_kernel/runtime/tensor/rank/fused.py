"""`fused`: consecutive operations of a recorded sequence as one function of TorchScript's interpreter.

Half of what a small operation takes is Python's: the interpreter calls the same kernels, in the same order, without it.
Nothing is optimised, so results are the same to the bit. What cannot be written as a graph stays a call from Python.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.program import Program, bare
from monarch_kernel.runtime.tensor.wire.template import FloatSlot, TensorSlot

#: Fewer operations than this are not worth a function of their own.
FEWEST = 3
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
_jit: Any = torch._C


class _NotInGraph(Exception):
    """An operation has no form in a graph."""


def can_fuse(program: Program) -> bool:
    """Whether an operation is one of torch's on plain tensors that can run again, if another one beside it fails.

    Operations that write do so by element, which cannot fail on values.
    """
    op: Any = program.call
    definition = program.definition
    if definition.sharded or definition.new is not None or bare(op) is op:
        return False
    returns = op._schema.returns
    if op.namespace != "aten" or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    if definition.mutates:
        return torch.Tag.pointwise in op.tags and definition.outputs == 0
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def regions(programs: Sequence[Program]) -> list[range]:
    """Runs of operations that may be fused: in each, those that write come last, so that the others can be repeated."""
    found: list[range] = []
    first, writes = 0, False
    for k, program in enumerate(programs):
        fits = can_fuse(program)
        if not fits or (writes and not program.mutates):
            found.append(range(first, k))
            first, writes = (k, False) if fits else (k + 1, False)
        writes = writes or bool(fits and program.mutates)
    found.append(range(first, len(programs)))
    return [region for region in found if len(region) >= FEWEST]


def _schema(program: Program) -> Any:
    op: Any = program.call
    return op._schema


def fused(
    steps: Sequence[tuple[int, ...]],
    programs: Sequence[Program],
    tensors: Sequence[int],
    numbers: Sequence[int],
    results: Sequence[int],
) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """A function that runs these steps; None if one of them has no form in a graph.

    Args:
        steps, programs: records, and what they run.
        tensors: places of the values that come from outside, which are the first arguments.
        numbers: places of the floats that they use, the arguments after those.
        results: places of the values that it returns.
    """
    lines: list[str] = []

    def constant(kind: str, value: str | None) -> str:
        name = f"%c{len(lines)}"
        lines.append(f"{name} : {kind} = prim::Constant{'' if value is None else f'[value={value}]'}()")
        return name

    def operand(x: Any) -> str:
        if x is None:
            return constant("NoneType", None)
        if type(x) is bool:
            return constant("bool", str(int(x)))
        if type(x) is int:
            return constant("int", str(x))
        if type(x) is torch.memory_format:
            return constant("int", str(_MEMORY_FORMATS[x]))
        if type(x) in (list, tuple) and x and all(type(n) is int for n in x):
            items = ", ".join([operand(n) for n in x])
            name = f"%c{len(lines)}"
            lines.append(f"{name} : int[] = prim::ListConstruct({items})")
            return name
        raise _NotInGraph

    try:
        for number, (step, program) in enumerate(zip(steps, programs)):
            definition = program.definition
            schema = _schema(program)
            first_float, first_out = 1 + definition.inputs, 1 + definition.inputs + definition.floats
            args, kwargs = pickle.loads(definition.template)
            operands: list[str] = []
            for n, argument in enumerate(schema.arguments):
                x = args[n] if n < len(args) else kwargs.get(argument.name, argument.default_value)
                if type(x) is TensorSlot:
                    operands.append(f"%x{step[1 + x.index]}")
                elif type(x) is FloatSlot:
                    operands.append(f"%f{step[first_float + x.index]}")
                else:
                    operands.append(operand(x))
            out = f"%x{step[first_out]}" if definition.outputs else f"%w{number}"
            lines.append(f"{out} : Tensor = {schema.name}({', '.join(operands)})")
        formals = [f"%x{place} : Tensor" for place in tensors] + [f"%f{place} : float" for place in numbers]
        kinds, given = ", ".join(["Tensor"] * len(results)), ", ".join(f"%x{place}" for place in results)
        lines.append(f"%r : ({kinds}) = prim::TupleConstruct({given})")
        graph = _jit.parse_ir(f"graph({', '.join(formals)}):\n  " + "\n  ".join(lines) + "\n  return (%r)\n")
        written = [node.schema() for node in graph.nodes() if node.kind().startswith("aten::")]
        if written != [str(_schema(program)) for program in programs]:
            return None  # the names of arguments' types have led to another overload
        run = _jit._create_function_from_graph("recorded", graph)
    except (_NotInGraph, KeyError, RuntimeError, AttributeError):  # it is no public part of torch
        return None
    optimised, optimise = _jit._get_graph_executor_optimize, _jit._set_graph_executor_optimize

    def call(*args: Any) -> tuple[torch.Tensor, ...]:
        before = optimised()
        optimise(False)  # of this thread
        try:
            return run(*args)
        finally:
            optimise(before)

    return call
