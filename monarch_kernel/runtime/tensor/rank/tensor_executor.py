"""The actor of one stream on one rank, which runs records in the order in which they were issued: `TensorExecutor`."""

from __future__ import annotations

import math
import os
import pickle
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.actor.execution.collectives import failed_by_peer
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import StreamState, runs_here, runs_one
from monarch_kernel.runtime.tensor.rank.program import Program, arguments, bare, compiled, compiled_source, operation_of
from monarch_kernel.runtime.tensor.rank.values import LENT, forget, store_of
from monarch_kernel.runtime.tensor.wire import (
    DELETE,
    FIRST_DEFINITION,
    LEND,
    SIGNAL,
    WAIT,
    Definition,
    FailedValue,
    FloatSlot,
    OperationFailed,
    Recorded,
    TensorSlot,
    digest,
    packed,
)

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.sharded.rank.rules import OperationRules

# Compile a recorded sequence of operations to one Python function: `RecordedProgram`.
#
# Each step, or sequence of `fused` steps, is a line of the function, so a traceback locates a failure. A failure has
# the same consequences as with separate records: the remaining steps run one at a time, and the steps that depend on
# the failure inherit it. Fused steps run again to find the step that fails.
#
# Python takes half the time of a small operation. `fused` makes TorchScript's interpreter call the same kernels in the
# same order without Python. Nothing is optimised, so results are bitwise equal. Operations that cannot be written as a
# graph are still called from Python.

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

    def call(*args: object) -> tuple[torch.Tensor, ...]:
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
        run_step: Callable[[Program, dict[int, object], list[int], list[float], int], None],
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
        V: dict[int, object],  # noqa: N803
        record: list[int],
        F: list[float],  # noqa: N803
        error: BaseException,
        failed_step: Callable[[dict[int, object], Program, list[int], list[float], BaseException, int], None],
    ) -> bool:
        """Run the steps that remain after a failure, as single records. Return false if the failing step is unknown.

        Args:
            record: the record of this program; `F` the floats that it names.
            failed_step: stores failures as the results of a step.
        """
        frame: object = None
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
    names: dict[str, object] = {}
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


def _run(definition: Definition, body: object, rebinds: tuple[int, ...]) -> Callable[..., None]:
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


# Check the results of each operation for NaN and Inf while the watch is on: `NanCheck`.
#
# Compiled programs do not change.
#
# A watched worker looks up its programs in a `CheckedPrograms`, which adds a check to each. Without a watch,
# operations have no extra cost.

#: Operations whose results are uninitialised memory.
_UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize")


class NanCheck:
    """The watch of one worker.

    Args:
        rank: the rank of the worker.
        inf: whether to also report Inf.
        at: the number of the running record.

    Attributes:
        found: the first operation that made a NaN or Inf from inputs without one, until an answer reports it.
    """

    def __init__(self, rank: int, inf: bool, at: Callable[[], int]) -> None:
        self._rank = rank
        self._inf = inf
        self._at = at
        self._steps: tuple[int, ...] = ()  # for a recorded sequence, the running steps
        self.found: FailedValue | None = None

    def checked(self, program: Program) -> Program:
        """Add a check to each run of the program."""
        if program.label.startswith(_UNINITIALISED):
            return program
        watched = _alike(program)
        if isinstance(program, RecordedProgram):

            def run_recorded(V: Any, L: list[int], i: int, F: list[float]) -> None:  # noqa: N803
                program.run_steps(V, L, i, F, self._run_step)

            watched.run = run_recorded
            return watched
        run = program.run
        first_float = 1 + program.inputs
        floats = program.definition.floats

        def run_and_check(V: Any, L: list[int], i: int, F: list[float]) -> None:  # noqa: N803  # as in programs
            ins = [V.get(number) for number in L[i + 1 : i + 1 + program.inputs]]
            before = [_faults(ins[k]) for k in program.mutates]
            run(V, L, i, F)
            if self.found is not None:
                return
            made = [V[number] for number in L[i + program.size - program.outputs : i + program.size]]
            made += [V[L[i + 1 + k]] for k in program.mutates]
            literals = [F[L[i + first_float + k]] for k in range(floats)]
            self.check(program.label, ins, made, literals, dict(zip(program.mutates, before)))

        watched.run = run_and_check
        return watched

    def check(
        self,
        label: str,
        ins: list[object],
        made: list[object],
        literals: Sequence[float] = (),
        written: Mapping[int, tuple[bool, bool] | None] = MappingProxyType({}),
    ) -> None:
        """Check the results of an operation.

        Args:
            label: the name of the operation.
            written: earlier faults of the inputs that it wrote, by position.
        """
        for value in made:
            faults = _faults(value)
            if faults is not None:
                sources = [written[k] if k in written else _faults(x) for k, x in enumerate(ins)]
                if self._is_new(faults, sources, literals):
                    label = label.removesuffix(".default")
                    text = f"{label} made {_told(value)}\nof {_inputs(ins, tuple(written), literals)}\n"
                    self.found = FailedValue(self._at(), self._rank, text, steps=self._steps, nonfinite=True)
                    return

    def _run_step(self, program: Program, values: object, step: list[int], floats: list[float], number: int) -> None:
        """Run a step of a recorded sequence, and check its results."""
        self._steps = (*self._steps, number)
        try:
            self.checked(program).run(values, step, 0, floats)
        finally:
            self._steps = self._steps[:-1]

    def _is_new(
        self, faults: tuple[bool, bool], sources: list[tuple[bool, bool] | None], literals: Sequence[float]
    ) -> bool:
        """Return whether a result has a fault that no input had."""
        nan, inf = faults
        if any(math.isnan(x) for x in literals) or any(x is not None and x[0] for x in sources):
            nan = False
        if not self._inf or any(map(math.isinf, literals)) or any(x is not None and any(x) for x in sources):
            inf = False
        return nan or inf


class CheckedPrograms(dict[int, Program]):
    """Programs by number, each with a check."""

    def __init__(self, programs: dict[int, Program], watch: NanCheck) -> None:
        super().__init__()
        self.unwatched = programs
        self._watch = watch

    def __missing__(self, number: int) -> Program:
        made = self[number] = self._watch.checked(self.unwatched[number])
        return made


def _alike(program: Program) -> Program:
    copied = object.__new__(type(program))
    for kind in type(program).__mro__:
        for name in vars(kind).get("__slots__", ()):
            setattr(copied, name, getattr(program, name))
    return copied


def _local(value: object) -> torch.Tensor | None:
    """Return the local part of a value, if it can contain a NaN."""
    if not isinstance(value, torch.Tensor):
        return None
    local = getattr(value, "_local_tensor", value)
    local = getattr(local, "elem", local)  # the result of an asynchronous collective that was not awaited
    return local.detach() if local.is_floating_point() or local.is_complex() else None


def _faults(value: object) -> tuple[bool, bool] | None:
    """Return whether a value has NaNs, and whether it has Infs; None if it has neither."""
    local = _local(value)
    if local is None or local.numel() == 0 or bool(torch.isfinite(local).all()):
        return None
    return bool(torch.isnan(local).any()), bool(torch.isinf(local).any())


def _told(value: object) -> str:
    """Describe the faults of a value: `3 NaN of 12 elements, the first at [0, 2]`."""
    local = _local(value)
    assert local is not None
    nan, inf = torch.isnan(local), torch.isinf(local)
    parts = [f"{int(mask.sum())} {name}" for name, mask in (("NaN", nan), ("Inf", inf)) if bool(mask.any())]
    size = local.numel()
    where = f", the first at {(nan | inf).nonzero()[0].tolist()}" if local.dim() else ""
    part = " of this rank's part" if local is not value and hasattr(value, "_local_tensor") else ""
    return f"{' and '.join(parts)} among {size:,} element{'s' * (size != 1)}{part}{where}"


def _inputs(ins: list[object], written: Sequence[int], literals: Sequence[float]) -> str:
    told = [
        f"{_kind(x)}, written in place" if k in written else _input(x)
        for k, x in enumerate(ins)
        if isinstance(x, torch.Tensor)
    ]
    return "; ".join([*told, *(f"{x:g}" for x in literals)]) or "no inputs"


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _input(value: torch.Tensor) -> str:
    kind = _kind(value)
    local = _local(value)
    if local is None or not local.numel() or local.is_complex():
        return kind
    finite = local[torch.isfinite(local)]
    return f"{kind} from {finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else kind


#: The number of traceback lines that are kept.
LINES = 12


class TensorExecutor(StreamState, Actor):
    """Runs the records of one stream. All streams of the engine share the values."""

    __tool__ = True

    def __init__(self, engine: str, stream: str, together: int) -> None:
        runs_here(self)
        current_executor.keep_device(runs_one)
        share_cores(together)
        rank = current_rank().rank
        super().__init__(engine, stream, rank, store_of(engine, rank))
        self.programs: dict[int, Program] = {}
        self.nan_check: NanCheck | None = None
        self.record = 0
        if stream == "main":
            self.store.at = lambda: self.at

    # -- records --------------------------------------------------------------------------------------

    @endpoint
    def define(self, definitions: list[Definition]) -> None:
        """Store definitions for later records."""
        programs = self.programs.unwatched if isinstance(self.programs, CheckedPrograms) else self.programs
        for definition in definitions:
            try:
                operation = definition.operation
                programs[definition.number] = (
                    RecordedProgram(definition, operation, programs)
                    if isinstance(operation, Recorded)
                    else compiled(definition, self._rules().of_definition if definition.sharded else None)
                )
            except Exception as e:
                programs[definition.number] = _broken(definition, e)

    @endpoint
    def run(self, ints: bytes, floats: bytes, record: int) -> None:
        """Run records. `record` is the number of the first."""
        self._run(ints, floats, record)

    @endpoint
    def watch(self, inf: bool | None) -> None:
        """Check the results of operations for NaN (and Inf, if `inf`) from now on. None ends the checks."""
        if isinstance(self.programs, CheckedPrograms):
            self.programs = self.programs.unwatched
        self.nan_check = None
        if inf is not None:
            self.nan_check = NanCheck(self.rank, inf, lambda: self.at)
            self.programs = CheckedPrograms(self.programs, self.nan_check)

    def _run(self, ints: bytes, floats: bytes, record: int) -> None:
        numbers = array("q")
        numbers.frombytes(ints)
        L = numbers.tolist()  # noqa: N806  # as in the compiled programs
        reals = array("d")
        reals.frombytes(floats)
        F = reals.tolist()  # noqa: N806
        V, programs, i, n = self.store.values, self.programs, 0, len(L)  # noqa: N806
        with torch.no_grad():
            while i < n:
                number = L[i]
                if number < FIRST_DEFINITION:
                    i = self._control(number, L, i)
                    continue
                program = programs[number]
                self.at = record
                try:
                    program.run(V, L, i, F)
                except BaseException as e:
                    self._failed(V, program, L[i : i + program.size], F, record, e)
                i += program.size
                record += 1
        self.record = record

    def _control(self, number: int, L: list[int], i: int) -> int:  # noqa: N803
        """Run a control record. Return where the next record begins."""
        if number == DELETE:
            count = L[i + 1]
            pop = self.store.values.pop
            for value in L[i + 2 : i + 2 + count]:
                pop(value, None)
            return i + 2 + count
        token, store = L[i + 1], self.store
        if number == LEND:
            return self._lend(token, L, i + 2)
        with store.changed:
            if number == SIGNAL:
                store.signals.add(token)
                store.changed.notify_all()
            else:  # the other stream is a thread of this process: it reaches the record, or both end
                assert number == WAIT, number
                store.changed.wait_for(lambda: token in store.signals or store.closed)
                store.signals.discard(token)
        return i + 2

    def _lend(self, token: int, L: list[int], i: int) -> int:  # noqa: N803
        """Store values for actors of this process. Return where the next record begins."""
        first, store = i + 1, self.store
        end = first + L[i]
        after = end + 1 + L[end]
        if self.rank in L[end + 1 : after]:
            with store.changed:
                values = [store.values[number] for number in L[first:end]]
                store.lent[token] = {k: self._for_actors(value) for k, value in enumerate(values)}
                if len(store.lent) > LENT:
                    store.let_go = next(iter(store.lent))
                    del store.lent[store.let_go]
                store.changed.notify_all()
        return after

    def _for_actors(self, value: object) -> object:
        """Return the same memory in a separate tensor for actors, whose gradients stay there."""
        if type(value) is torch.Tensor:
            return value.detach()
        if not isinstance(value, torch.Tensor):
            return value
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        return rules_of(self.store.extras).for_actors(value)

    def _failed(
        self,
        V: dict[int, Any],  # noqa: N803
        program: Program,
        L: list[int],  # noqa: N803
        F: list[float],  # noqa: N803
        record: int,
        error: BaseException,
        steps: tuple[int, ...] = (),
    ) -> None:
        """Store a failure as the results of the record `L`.

        Args:
            steps: the steps that lead to `L` in a recorded sequence.
        """

        def step_failed(
            values: Any, inner: Program, step: list[int], reals: list[float], e: BaseException, k: int
        ) -> None:
            self._failed(values, inner, step, reals, record, e, (*steps, k))

        if isinstance(program, RecordedProgram) and program.fail(V, L, F, error, step_failed):
            return
        inputs = L[1 : 1 + program.inputs]
        failed = next((v for v in (V[j] for j in inputs) if isinstance(v, FailedValue)), None)
        inherits = failed is not None
        if inherits and self.unseen is None:
            self.unseen = failed
        if isinstance(error, OperationFailed):  # of an input, or of another rank in the collective
            failed = error.failed
        elif failed is None:
            failed = FailedValue(record, self.rank, _text(error), steps=steps, of_peer=failed_by_peer(error))
            if self.unseen is None:
                self.unseen = failed
            if program.definition.sharded and self.store.report is not None:
                self.store.report(failed, [V[j] for j in inputs])
        if inherits and program.standins is not None:
            self._take_part(program, L, F, failed)
        for j in L[program.size - program.outputs :]:
            V[j] = failed
        for k in program.mutates:  # these values differ from what the program expects
            V[inputs[k]] = failed

    def _take_part(self, program: Program, L: list[int], F: list[float], failed: FailedValue) -> None:  # noqa: N803
        """Take part in a collective with zeros, so that other ranks do not wait for this one.

        The result is discarded.
        """
        assert program.standins is not None
        zeros = {
            L[1 + k]: torch.zeros(size, dtype=dtype, device=current_executor.of_rank())
            for k, (size, dtype) in enumerate(program.standins)
        }
        self.standing_in = failed
        try:
            program.run(zeros | dict.fromkeys(L[program.size - program.outputs :]), L, 0, F)
        except Exception:  # the first failure is reported
            pass
        finally:
            self.standing_in = None

    # -- answers --------------------------------------------------------------------------------------

    @endpoint
    def fetch(
        self, ints: bytes, floats: bytes, record: int, values: list[int], rank: int, compare: bool = False
    ) -> Any:
        """Return the values on `rank` (-1: on every rank). Other ranks return whether a value has failed.

        With `compare`, the other ranks return digests of their values.
        """
        self._run(ints, floats, record)
        found = [self.value(number) for number in values]
        whole = [self.whole(v) for v in found]
        if rank in (self.rank, -1):
            return [_to_send(v) for v in whole]
        return [digest(v) for v in whole] if compare else None

    @endpoint
    def ask(self, ints: bytes, floats: bytes, record: int, function: bytes, values: list[object]) -> Any:
        """Return the result of a function of values of this rank."""
        self._run(ints, floats, record)
        with torch.no_grad():
            return pickle.loads(function)(*[self.value(v) if type(v) is int else v for v in values])

    @endpoint
    def call_and_fetch(self, ints: bytes, floats: bytes, record: int, call: bytes, values: list[int], rank: int) -> Any:
        """Call a pickled function with values of this rank.

        Return its result if `rank` is this rank (-1: every rank).
        """
        self._run(ints, floats, record)
        inputs: list[object] = []
        self.at = self.record
        try:
            inputs += [self.value(number) for number in values]
            function, template = pickle.loads(call)
            args, kwargs = tree_map(lambda x: inputs[x.index] if type(x) is TensorSlot else x, template)
            with torch.no_grad():
                result = function(*args, **kwargs)
        except OperationFailed:
            raise
        except BaseException as e:
            raise self._failed_alone(e, inputs) from None
        finally:
            self.record += 1
        return [tree_map(_to_send, result)] if rank in (self.rank, -1) else None

    def _failed_alone(self, error: BaseException, inputs: list[object]) -> OperationFailed:
        """Return the error for an answer that fails here, and free ranks that wait for this one in it."""
        failed = FailedValue(self.record, self.rank, _text(error))
        if self.store.report is not None and any(type(x) is not torch.Tensor for x in inputs):
            self.store.report(failed, inputs)
        return OperationFailed(failed)

    @endpoint
    def check(self) -> None:
        """Raise the first failure that no check has raised yet."""
        self._tell_found()
        failed, self.unseen = self.unseen, None
        if failed is not None:
            raise OperationFailed(failed)

    @endpoint
    def done(self) -> int:
        """Return how many records have run. The answer is sent after all earlier records have run."""
        return self.record

    @endpoint
    def put(self, number: int, tensor: torch.Tensor, layout: Any) -> None:
        """Store a tensor, or, with a layout of a sharded mesh, this rank's part of it."""
        if layout is None:
            self.store.values[number] = tensor.to(current_executor.of_rank())
            return
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        try:
            self.store.values[number] = rules_of(self.store.extras).placed(tensor, layout)
        except Exception as e:
            self.store.values[number] = FailedValue(self.record, self.rank, _text(e))

    @endpoint
    def run_and_describe(
        self,
        ints: bytes,
        floats: bytes,
        record: int,
        operation: str,
        template: bytes,
        ins: list[int],
        first: int,
        count: int,
        sharded: bool,
    ) -> list[Any]:
        """Run an operation, and return size, stride and dtype of its results, which depend on values.

        Results that are not tensors (of ``allclose``) are returned themselves.
        """
        self._run(ints, floats, record)
        inputs = [self.value(number) for number in ins]
        args, kwargs = tree_map(lambda x: inputs[x.index] if type(x) is TensorSlot else x, pickle.loads(template))
        try:
            run = operation_of(operation)
            self.at = self.record
            if sharded:
                run = self._rules().of(run, operation)
            with torch.no_grad():
                out = run(*args, **kwargs)
        except BaseException as e:
            raise self._failed_alone(e, inputs) from None
        else:
            if self.nan_check is not None:
                made = [out] if count == 1 else list(out)
                self.nan_check.check(operation, inputs, [x for x in made if isinstance(x, torch.Tensor)])
                self._tell_found()
        finally:
            self.record += 1
        results = [out] if count == 1 else list(out)
        described: list[object] = []
        for i, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                self.store.values[first + i] = result
                result = tuple(result.shape), result.stride(), result.dtype
            described.append(result)
        return described

    @endpoint
    def held(self) -> int:
        """Return the number of values on this rank."""
        return len(self.store.values)

    def _rules(self) -> OperationRules:
        """Return the rules that replace operations on DTensors."""
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of  # loads DTensor, therefore on first use

        return rules_of(self.store.extras)

    def value(self, number: int) -> Any:
        """Return a value of this rank.

        Raises:
            OperationFailed: the value is a failure, or the watch for NaN has found one.
        """
        self._tell_found()
        return super().value(number)

    def _tell_found(self) -> None:
        """Raise the finding of the watch, once."""
        watch = self.nan_check
        if watch is not None and watch.found is not None:
            failed, watch.found = watch.found, None
            raise OperationFailed(failed)

    def whole(self, value: Any) -> Any:
        """Gather a DTensor as one tensor, a collective of all its ranks. Return anything else unchanged."""
        if type(value) is not torch.Tensor and hasattr(value, "full_tensor"):
            with torch.no_grad():
                return value.full_tensor()
        return value

    def __cleanup__(self, error: BaseException | None) -> None:
        """Release the engine's values when its executors stop."""
        forget(self.engine)


def _to_send(value: object) -> object:
    """Return a tensor without its graph, on the CPU, and without the rest of the memory of a view."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    small = packed(value)
    if small is not value:
        return small
    if value.layout == torch.strided and value.untyped_storage().nbytes() > value.numel() * value.element_size():
        return value.clone()
    return value


def share_cores(together: int) -> None:
    """Limit torch to this rank's share of the cores of its host, unless the program has set its number of threads.

    Args:
        together: the number of ranks on the host.
    """
    cores = len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() >= cores:
        torch.set_num_threads(max(1, cores // together))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-LINES:])


def _broken(definition: Definition, error: Exception) -> Program:
    """Return a program that raises the error of its compilation. On the rank, it counts as a failed operation."""
    text = f"{definition.label} cannot run on this rank: {type(error).__name__}: {error}"

    def run(V: object, L: object, i: int, F: object) -> None:  # noqa: N803
        raise RuntimeError(text)

    return Program(run, definition, run)
