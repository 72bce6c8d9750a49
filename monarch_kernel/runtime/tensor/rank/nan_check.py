"""Check the results of each operation for NaN and Inf while the watch is on: `NanCheck`.

Compiled programs do not change.

A watched worker looks up its programs in a `CheckedPrograms`, which adds a check to each. Without a watch, operations
have no extra cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from monarch_kernel.runtime.tensor.rank.program import Program
from monarch_kernel.runtime.tensor.rank.recorded import RecordedProgram
from monarch_kernel.runtime.tensor.wire import FailedValue

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
        ins: list[Any],
        made: list[Any],
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

    def _run_step(self, program: Program, values: Any, step: list[int], floats: list[float], number: int) -> None:
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


def _local(value: Any) -> torch.Tensor | None:
    """Return the local part of a value, if it can contain a NaN."""
    if not isinstance(value, torch.Tensor):
        return None
    local: Any = getattr(value, "_local_tensor", value)
    local = getattr(local, "elem", local)  # the result of an asynchronous collective that was not awaited
    return local.detach() if local.is_floating_point() or local.is_complex() else None


def _faults(value: Any) -> tuple[bool, bool] | None:
    """Return whether a value has NaNs, and whether it has Infs; None if it has neither."""
    local = _local(value)
    if local is None or local.numel() == 0 or bool(torch.isfinite(local).all()):
        return None
    return bool(torch.isnan(local).any()), bool(torch.isinf(local).any())


def _told(value: Any) -> str:
    """Describe the faults of a value: `3 NaN of 12 elements, the first at [0, 2]`."""
    local = _local(value)
    assert local is not None
    nan, inf = torch.isnan(local), torch.isinf(local)
    parts = [f"{int(mask.sum())} {name}" for name, mask in (("NaN", nan), ("Inf", inf)) if bool(mask.any())]
    size = local.numel()
    where = f", the first at {(nan | inf).nonzero()[0].tolist()}" if local.dim() else ""
    part = " of this rank's part" if local is not value and hasattr(value, "_local_tensor") else ""
    return f"{' and '.join(parts)} among {size:,} element{'s' * (size != 1)}{part}{where}"


def _inputs(ins: list[Any], written: Sequence[int], literals: Sequence[float]) -> str:
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
