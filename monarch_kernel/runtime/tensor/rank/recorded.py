"""`RecordedProgram`: a recorded sequence of operations, compiled to one Python function.

Each step is a line of the function, so the traceback of a failure tells the step. A failure then has the consequences
that it has when the steps are records of their own: the rest of the steps are run one by one, and those that depend on
the failure inherit it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.program import Program, arguments, bare, compiled_source
from monarch_kernel.runtime.tensor.wire.definition import Definition
from monarch_kernel.runtime.tensor.wire.failures import FailedValue
from monarch_kernel.runtime.tensor.wire.recorded import Recorded

_numbers = count()


class RecordedProgram(Program):
    """How a record of a recorded sequence is run."""

    __slots__ = ("_code", "_programs", "_recorded")

    def __init__(self, definition: Definition, recorded: Recorded, programs: dict[int, Program]) -> None:
        rebinds = _rebound_inputs(recorded, programs)
        body = _body(recorded, programs, rebinds)
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
        """Run the record that begins at ``L[i]`` step by step; `run_step` runs the record of one step."""
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
        """Run what a failure has left over, as single records; false if the failing step is not known.

        Args:
            record: the record of this program; `F` the floats that it names.
            failed_step: puts failures in the places of the results of a step.
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
        first = line - 2
        for number, step in enumerate(recorded.steps[first:], first):
            program = self._programs[step[0]]
            try:
                if number == first:
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
    """The inputs whose places get other objects."""
    found = {step[1 + k] for step in recorded.steps for k in programs[step[0]].rebinds}
    return tuple(sorted(place for place in found if place < recorded.inputs))


def _body(recorded: Recorded, programs: dict[int, Program], rebinds: tuple[int, ...]) -> Any:
    """A function of the inputs and the floats that come with a call; gives the results, and the rebound inputs."""
    names: dict[str, Any] = {}
    kept = {*recorded.results, *range(recorded.inputs)}
    last = {place: s for s, step in enumerate(recorded.steps) for place in _places(step, programs[step[0]])}
    lines: list[str] = []
    for s, step in enumerate(recorded.steps):
        program = programs[step[0]]
        definition = program.definition
        names[f"op{s}"] = bare(program.call)
        ins = step[1 : 1 + definition.inputs]
        first_out = 1 + definition.inputs + definition.floats
        numbers = step[1 + definition.inputs : first_out]
        args, kwargs = pickle.loads(definition.template)

        def number(k: int, numbers: tuple[int, ...] = numbers) -> str:
            value = recorded.floats[numbers[k]]
            if value is None:
                return f"f{numbers[k]}"
            name = f"n{len(names)}"
            names[name] = value
            return name

        def tensor(k: int, ins: tuple[int, ...] = ins) -> str:
            return f"x{ins[k]}"

        target = program.assignment([f"x{place}" for place in ins], [f"x{place}" for place in step[first_out:]])
        line = f"{target}op{s}({arguments(args, kwargs, tensor, number, names)})"
        done = sorted({place for place in _places(step, program) if last[place] == s} - kept)
        lines.append("; ".join([line, *(f"x{place} = None" for place in done)]))
    floats = [f"f{k}" for k, value in enumerate(recorded.floats) if value is None]
    formals = ", ".join([f"x{k}" for k in range(recorded.inputs)] + floats)
    given = "".join(f"x{place}, " for place in (*recorded.results, *rebinds))
    source = f"def recorded({formals}):\n" + "".join(f"    {line}\n" for line in lines) + f"    return ({given})\n"
    exec(compile(source, f"<monarch recorded {next(_numbers)}>", "exec"), names)
    return names["recorded"]


def _places(step: tuple[int, ...], program: Program) -> list[int]:
    """The places of the values that a step names."""
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
