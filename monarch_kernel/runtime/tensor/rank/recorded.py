"""Compile a recorded sequence of operations to one Python function: `RecordedProgram`.

Each step, or sequence of `fused` steps, is a line of the function, so a traceback locates a failure. A failure has the
same consequences as with separate records: the remaining steps run one at a time, and the steps that depend on the
failure inherit it. Fused steps run again to find the step that fails.

Python takes half the time of a small operation. `fused` makes TorchScript's interpreter call the same kernels in the
same order without Python. Nothing is optimised, so results are bitwise equal. Operations that cannot be written as a
graph are still called from Python.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.program import Program, arguments, bare, compiled_source
from monarch_kernel.runtime.tensor.wire import Definition, FailedValue, FloatSlot, Recorded, TensorSlot

#: The minimum number of operations for a fused function.
FEWEST = 3
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
_jit: Any = torch._C
_numbers = count()


class _NotInGraph(Exception):
    """An operation has no form in a graph."""


def can_fuse(program: Program) -> bool:
    """Return whether an operation can be fused.

    It must be a torch operation on plain tensors that can run again if another one fails.

    Operations that write must write element by element, which cannot fail because of values.
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
    """Return the sequences of operations that can be fused.

    In each, writing operations come last, so the others can be repeated.
    """
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
    """Return a function that runs these steps; None if one of them has no form in a graph.

    Args:
        steps, programs: records, and their programs.
        tensors: the places of external values, which are the first arguments.
        numbers: the places of the floats that they use, which are the next arguments.
        results: the places of the returned values.
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
            return None  # the types of the arguments selected another overload
        run = _jit._create_function_from_graph("recorded", graph)
    except (_NotInGraph, KeyError, RuntimeError, AttributeError):  # this is not a public part of torch
        return None
    optimised, optimise = _jit._get_graph_executor_optimize, _jit._set_graph_executor_optimize

    def call(*args: Any) -> tuple[torch.Tensor, ...]:
        before = optimised()
        optimise(False)  # for this thread
        try:
            return run(*args)
        finally:
            optimise(before)

    return call


class RecordedProgram(Program):
    """The compiled code for records of a recorded sequence."""

    __slots__ = ("_code", "_lines", "_programs", "_recorded")

    def __init__(self, definition: Definition, recorded: Recorded, programs: dict[int, Program]) -> None:
        rebinds = _rebound_inputs(recorded, programs)
        body, self._lines = _body(recorded, programs, rebinds)
        self._code = body.__code__
        self._programs = programs
        self._recorded = recorded
        if recorded.backend is not None:
            body = torch.compile(body, backend=recorded.backend)
        super().__init__(_run(definition, body, rebinds), definition, body, rebinds)

    def run_steps(
        self,
        V: dict[int, Any],  # noqa: N803
        L: list[int],  # noqa: N803
        i: int,
        F: list[float],  # noqa: N803
        run_step: Callable[[Program, dict[int, Any], list[int], list[float], int], None],
    ) -> None:
        """Run the record that begins at ``L[i]`` step by step. `run_step` runs the record of one step."""
        recorded = self._recorded
        values = {k: V[L[i + 1 + k]] for k in range(recorded.inputs)}
        first_float = i + 1 + self.inputs
        given = iter(F[k] for k in L[first_float : first_float + self.definition.floats])
        floats = [next(given) if number is None else number for number in recorded.floats]
        for number, step in enumerate(recorded.steps):
            run_step(self._programs[step[0]], values, list(step), floats, number)
        for k, place in enumerate(recorded.results):
            V[L[i + self.size - self.outputs + k]] = values[place]
        for k in self.rebinds:
            V[L[i + 1 + k]] = values[k]

    def fail(
        self,
        V: dict[int, Any],  # noqa: N803
        record: list[int],
        F: list[float],  # noqa: N803
        error: BaseException,
        failed_step: Callable[[dict[int, Any], Program, list[int], list[float], BaseException, int], None],
    ) -> bool:
        """Run the steps that remain after a failure, as single records. Return false if the failing step is unknown.

        Args:
            record: the record of this program; `F` the floats that it names.
            failed_step: stores failures as the results of a step.
        """
        frame: Any = None
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is self._code:
                frame = traceback.tb_frame
                line = traceback.tb_lineno
                break
            traceback = traceback.tb_next
        else:
            return False
        recorded = self._recorded
        values = {int(name[1:]): value for name, value in frame.f_locals.items() if name[0] == "x"}
        given = iter(F[k] for k in record[1 + self.inputs : 1 + self.inputs + self.definition.floats])
        floats = [next(given) if number is None else number for number in recorded.floats]
        steps = self._lines[line - 2]
        first = steps.start
        for number, step in enumerate(recorded.steps[first:], first):
            program = self._programs[step[0]]
            try:
                if number == first and len(steps) == 1:
                    raise error
                program.run(values, step, 0, floats)
            except BaseException as e:
                failed_step(values, program, list(step), floats, e, number)
        for k, place in enumerate(recorded.results):
            V[record[self.size - self.outputs + k]] = values[place]
        for k in range(recorded.inputs):
            if k in self.rebinds or isinstance(values[k], FailedValue):
                V[record[1 + k]] = values[k]
        return True


def _rebound_inputs(recorded: Recorded, programs: dict[int, Program]) -> tuple[int, ...]:
    """Return the inputs that are replaced by other objects."""
    found = {step[1 + k] for step in recorded.steps for k in programs[step[0]].rebinds}
    return tuple(sorted(place for place in found if place < recorded.inputs))


def _body(recorded: Recorded, programs: dict[int, Program], rebinds: tuple[int, ...]) -> tuple[Any, list[range]]:
    """Return a function of the inputs and of a call's floats. It returns the results and the rebound inputs.

    Returns:
        The function, and the steps that each of its lines runs.
    """
    names: dict[str, Any] = {}
    kept = {*recorded.results, *range(recorded.inputs)}
    last = {place: s for s, step in enumerate(recorded.steps) for place in _places(step, programs[step[0]])}

    def number_at(position: int) -> str:
        value = recorded.floats[position]
        if value is None:
            return f"f{position}"
        name = f"n{len(names)}"
        names[name] = value
        return name

    def line_of(s: int) -> str:
        step, program = recorded.steps[s], programs[recorded.steps[s][0]]
        definition = program.definition
        # a compiler's trace must not depend on earlier runs
        names[f"op{s}"] = bare(
            program.call if recorded.backend is None else getattr(program.call, "asking", program.call)
        )
        ins = step[1 : 1 + definition.inputs]
        first_out = 1 + definition.inputs + definition.floats
        numbers = step[1 + definition.inputs : first_out]
        args, kwargs = pickle.loads(definition.template)
        given = arguments(args, kwargs, lambda k: f"x{ins[k]}", lambda k: number_at(numbers[k]), names)
        target = program.assignment([f"x{place}" for place in ins], [f"x{place}" for place in step[first_out:]])
        return f"{target}op{s}({given})"

    def line_of_all(run: range) -> str | None:
        steps = [recorded.steps[s] for s in run]
        theirs = [programs[step[0]] for step in steps]
        made = [place for step, p in zip(steps, theirs) for place in step[p.size - p.outputs :]]
        used = [place for step, p in zip(steps, theirs) for place in step[1 : 1 + p.inputs]]
        tensors = [*dict.fromkeys(place for place in used if place not in made)]
        floats = [*dict.fromkeys(k for step, p in zip(steps, theirs) for k in step[1 + p.inputs : p.size - p.outputs])]
        results = [place for place in made if place in kept or last[place] >= run.stop]
        function = fused(steps, theirs, tensors, floats, results)
        if function is None:
            return None
        names[f"op{run.start}"] = function
        given = ", ".join([*(f"x{place}" for place in tensors), *map(number_at, floats)])
        return "".join(f"x{place}, " for place in results) + f"{'= ' if results else ''}op{run.start}({given})"

    fusible: dict[int, range] = {}
    if recorded.backend is None:
        fusible = {run.start: run for run in regions([programs[step[0]] for step in recorded.steps])}
    runs: list[range] = []
    lines: list[str] = []
    there = set(range(recorded.inputs))
    s = 0
    while s < len(recorded.steps):
        run = fusible.get(s, range(s, s + 1))
        line = line_of_all(run) if len(run) > 1 else None
        if line is None:
            run = range(s, s + 1)
            line = line_of(s)
        named = {place for k in run for place in _places(recorded.steps[k], programs[recorded.steps[k][0]])}
        if len(run) == 1:
            there |= named
        else:
            there |= {place for place in named if last[place] >= run.stop or place in kept}
        done = sorted(place for place in named - kept if place in there and last[place] < run.stop)
        lines.append("; ".join([line, *(f"x{place} = None" for place in done)]))
        runs.append(run)
        s = run.stop
    floats = [f"f{k}" for k, value in enumerate(recorded.floats) if value is None]
    formals = ", ".join([f"x{k}" for k in range(recorded.inputs)] + floats)
    given = "".join(f"x{place}, " for place in (*recorded.results, *rebinds))
    source = f"def recorded({formals}):\n" + "".join(f"    {line}\n" for line in lines) + f"    return ({given})\n"
    exec(compile(source, f"<monarch recorded {next(_numbers)}>", "exec"), names)
    return names["recorded"], runs


def _places(step: tuple[int, ...], program: Program) -> list[int]:
    """Return the places of the values that a step names."""
    definition = program.definition
    return [*step[1 : 1 + definition.inputs], *step[1 + definition.inputs + definition.floats :]]


def _run(definition: Definition, body: Any, rebinds: tuple[int, ...]) -> Callable[..., None]:
    first_float = 1 + definition.inputs
    first_out = first_float + definition.floats
    given = [f"V[L[i + {k}]]" for k in range(1, first_float)]
    given += [f"F[L[i + {k}]]" for k in range(first_float, first_out)]
    targets = [f"V[L[i + {first_out + k}]]" for k in range(definition.outputs)]
    targets += [f"V[L[i + {1 + k}]]" for k in rebinds]
    left = f"{', '.join(targets)}, = " if targets else ""
    names: dict[str, Any] = {"body": body}
    exec(compiled_source(f"def run(V, L, i, F):\n    {left}body({', '.join(given)})\n"), names)
    return names["run"]
