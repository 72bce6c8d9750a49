"""Compare two recorded runs tensor by tensor, and name the first wrong one in program order.

`compare` aligns the tensors of both runs (`monarch_kernel.numerics.alignment`), measures how far each tensor of the
second run is from that of the first, and divides that by the tensor's tolerance: how far rounding alone may move it. A
tolerance comes from recordings of the first run with perturbed inputs (`noise`), or is estimated from the precision,
which the comparison then says. It says that it is unsure where a difference is too small for an estimate.

A difference in an inner tensor that the outer results do not show is no error: a program may distribute its work in any
way that leads to the same result.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from monarch_kernel.display.tables import AsReport
from monarch_kernel.numerics.alignment import (
    PHASES,
    STATE,
    Key,
    RecordedPart,
    Run,
    WholeTensor,
    ancestors,
    by_location,
    clusters,
    common_elements,
    count,
    exact,
    gradient_scale,
    mean_of_replicas,
    merged_order,
    names_on_one_side,
    replicas,
    same_layout,
    terms,
    whole_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pandas  # pyright: ignore[reportMissingImports]
    import torch

    from monarch_kernel.numerics.recording import Entry, Recording

#: The distance between neighbouring numbers at 1, by element type.
_SPACING = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
#: Summaries are sums in single precision.
_LEAST = 8 * _SPACING["float32"]
#: Sums of figures, which are in double precision, differ by less where parts of a tensor make up the same one.
_OF_SUMS = 1e-12
#: A tolerance is this many times the distance that perturbed inputs caused, because one run is one sample.
_OF_NOISE = 10.0
#: Neighbours in program order whose noise counts for a tensor.
_NEIGHBOURS = 8
#: An estimated tolerance is this many spacings of numbers, times the root of the depth.
_OF_SPACING = 8.0
#: Differences up to this many tolerances are doubtful.
_DOUBTFUL, _DOUBTFUL_ESTIMATE = 4.0, 30.0
#: Smaller distances of norms of optimizer states are doubtful: optimizers divide by small gradients.
_DOUBTFUL_UPDATE = 0.02
#: So are distances that so few elements explain, whose gradients are so small that rounding turns their signs.
_TURNED = 2
#: Smaller distances are doubtful if the precision is unknown.
_DOUBTFUL_BLIND = 0.1
#: The depth of tensors whose modules were not recorded.
_DEPTH = 64
#: A result shows that a difference has no effect if its own distance is this many times smaller.
_UNDONE = 10.0
#: A smaller change of a parameter outside of its optimizer is rounding of its summaries.
_JUMP = 1e-5
#: How close a distance must be for a guess.
_GUESS = 1e-3


class AlignmentError(ValueError):
    """Two runs are of different models, so that their tensors cannot be compared. The message has the names."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far a tensor of the second run is from that of the first.

    Attributes:
        step: the step, counted from the first one recorded.
        micro, call: micro-batch, and call of the module within it.
        phase: "forward", "backward", "reduction" or "optimizer".
        kind: the kind of tensor, such as "output" or "reduced_gradient".
        module: the module's qualified name; "" is the model.
        tensor: the name of the parameter or buffer in its module, or which input or output of the call.
        ranks: the ranks of the second run whose tensors differ; all ranks with a part if they cannot be told apart.
        line: the line of user code, such as "train.py:42"; "" if unknown.
        distance: the distance, relative to the norm of the first run's tensor.
        tolerance: the relative distance that rounding explains.
        suggests: what the figures of a wrong one suggest, as guesses; "" if nothing.
        is_certain: whether the distance is too large for doubts about the tolerance.
        is_consequence: whether an earlier difference explains it.
    """

    step: int
    micro: int
    call: int
    phase: str
    kind: str
    module: str
    tensor: str
    ranks: tuple[int, ...]
    line: str
    distance: float
    tolerance: float
    suggests: str = ""
    is_certain: bool = True
    is_consequence: bool = False

    @property
    def ratio(self) -> float:
        """The distance divided by the tolerance."""
        return _divided(self.distance, self.tolerance)

    @property
    def title(self) -> str:
        """What the tensor is, in words: `gradient of layers.0.norm.weight after reduction`."""
        return _title(self.kind, self.module, self.tensor)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How far a tensor of the second run is from the first.

    Attributes:
        distance, tolerance: relative to the first run's norm.
        ranks: the ranks that differ.
        hints: guesses at the reason.
        elements: the number of elements of a part.
        factor: the factor by which all elements differ; None if there is none.
        restores: whether a sum or a mean over ranks gives the right tensor.
        alone: the distance of single ranks' tensors if it is equal only as the sum over ranks; else 0.
        by_norm: the part of the distance that is between norms.
        is_same: whether all bytes are the same.
        is_before: whether it changed before its step began.
        is_blind: whether it is unknown in which precision it was computed.
    """

    key: Key
    distance: float
    tolerance: float
    is_estimate: bool
    ranks: tuple[int, ...]
    hints: tuple[str, ...] = ()
    elements: int = 0
    factor: float | None = None
    restores: bool = False
    alone: float = 0.0
    by_norm: float = 0.0
    is_same: bool = False
    is_before: bool = False
    is_blind: bool = False

    @property
    def ratio(self) -> float:
        return _divided(self.distance, self.tolerance)

    @property
    def differs(self) -> bool:
        return self.ratio > 1

    @property
    def is_certain(self) -> bool:
        if math.isinf(self.distance) or not self.tolerance:
            return True
        if self.is_before:  # measured within one run
            return self.ratio > _DOUBTFUL
        if self.is_blind and self.distance <= _DOUBTFUL_BLIND:
            return False
        is_optimized = self.key.kind == "update" or (self.key.kind == "parameter" and self.key.phase == "optimizer")
        if not self.is_estimate:
            if is_optimized and self.ratio <= _DOUBTFUL_ESTIMATE:
                few = 2 * _TURNED / math.sqrt(max(1, self.elements))
                return self.ratio > _DOUBTFUL and (self.by_norm > _DOUBTFUL_UPDATE or self.distance > few)
            return self.ratio > _DOUBTFUL
        if self.ratio <= _DOUBTFUL_ESTIMATE:
            return False
        if is_optimized:
            return self.by_norm > _DOUBTFUL_UPDATE
        return self.key.step == 0 or self.distance > _DOUBTFUL_UPDATE


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Comparison(AsReport):
    """The result of `compare`. Displays itself as text and as HTML.

    Attributes:
        names: the names of the two runs; the first one is the reference.
        tensors: the tensors that were compared, in program order.
        identical: how many of them have the same bytes.
        differences: those that differ by more than rounding explains, in program order, with consequences.
        is_estimate: whether tolerances are estimated, because no run with perturbed inputs was given.
        is_coarse: whether they are estimated for half precision, which is too wide to call runs equal.
        unaligned: how many tensors of both runs could not be compared.
        left_out: which tensors were not compared and why, each a sentence.
        notes: further facts, each a sentence.
    """

    names: tuple[str, str]
    tensors: tuple[TensorDifference, ...]
    identical: int
    differences: tuple[TensorDifference, ...]
    is_estimate: bool
    is_coarse: bool = False
    unaligned: int = 0
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> int:
        """How many tensors were compared."""
        return len(self.tensors)

    @property
    def worst(self) -> TensorDifference | None:
        """The tensor with the largest ratio to its tolerance; None if all are equal."""
        found = max(self.tensors, key=lambda each: each.ratio, default=None)
        return found if found is not None and found.distance else None

    @property
    def ratios(self) -> Mapping[tuple[str, int], float]:
        """The largest ratio of each module and step, by (module, step), modules in program order."""
        found: dict[tuple[str, int], float] = {}
        for each in (*self.tensors, *self.differences):
            at = each.module, each.step
            found[at] = max(found.get(at, 0.0), each.ratio)
        return found

    @property
    def first(self) -> TensorDifference | None:
        """The first wrong tensor in program order: a certain one if there is any."""
        causes = self.causes
        return next((each for each in causes if each.is_certain), next(iter(causes), None))

    @property
    def equal(self) -> bool | None:
        """Whether all tensors are equal within rounding; None if that is uncertain."""
        if not self.differences:
            is_vague = self.is_coarse and self.identical != self.compared
            return None if is_vague or self.compared <= self.unaligned else True
        return False if any(each.is_certain for each in self.differences) else None

    @property
    def causes(self) -> tuple[TensorDifference, ...]:
        """The differences that no earlier one explains; the first of them is `first`."""
        return tuple(each for each in self.differences if not each.is_consequence)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the differences as a table with a row for each. Raises ImportError without pandas."""
        import pandas  # pyright: ignore[reportMissingImports]

        names = (*(each for each in TensorDifference.__slots__), "ratio")
        rows = [{name: getattr(each, name) for name in names} for each in self.differences]
        return pandas.DataFrame(rows, columns=list(names))

    @property
    def sentence(self) -> str:
        """The verdict."""
        from monarch_kernel.numerics.comparison_view import sentence

        return sentence(self)

    def text(self) -> str:
        """Render the verdict with the table of causes as text."""
        from monarch_kernel.numerics.comparison_view import text

        return text(self)

    def html(self) -> str:
        """Render the verdict, the table of causes and the grid of modules and steps as HTML."""
        from monarch_kernel.numerics.comparison_view import html

        return html(self)


def compare(
    a: Recording | str | Path,
    b: Recording | str | Path,
    *,
    noise: Recording | str | Path | Sequence[Recording | str | Path] | None = None,
) -> Comparison:
    """Compare two recordings. Nothing is needed but their files.

    Args:
        a: the reference: a recording, or its name or folder.
        b: the run in question.
        noise: one or more recordings of the reference with perturbed inputs (`record(..., perturb=1)`), from which each
            tensor gets its tolerance.

    Raises:
        AlignmentError: the runs are of different models; the message has the names on one side only.
        ValueError: a recording has no tensors, or `noise` is not a recording of the same run.
    """
    from monarch_kernel.numerics.recording import Recording

    def opened(one: Recording | str | Path) -> Recording:
        return one if isinstance(one, Recording) else Recording.open(one)

    first, second = opened(a), opened(b)
    if noise is None:
        noises: list[Recording] = []
    elif isinstance(noise, Sequence) and not isinstance(noise, str):
        noises = [opened(each) for each in noise]
    else:
        noises = [opened(noise)]
    return compare_runs(
        _run(first),
        _run(second),
        [_run(each) for each in noises],
        tensors=(first.tensor, second.tensor),
    )


def _run(recording: Recording) -> Run:
    run = Run.of(recording.entries(), recording.name, recording.finished)
    if not run.parts:
        raise ValueError(f"recording {recording.name!r} has no tensors: {recording.folder}")
    return run


Load = Callable[["Entry"], "torch.Tensor | None"]


def compare_runs(a: Run, b: Run, noises: Sequence[Run] = (), tensors: tuple[Load, Load] | None = None) -> Comparison:
    """Compare two runs; see `compare`.

    Args:
        a: the reference.
        b: the run in question.
        noises: the reference with perturbed inputs.
        tensors: functions that return the whole tensor of an entry of `a` and `b` if the recording kept it.
    """
    left_out: list[str] = []
    notes: list[str] = []
    micros, other = a.micros(), b.micros()
    if any(micros[step] != other[step] for step in micros.keys() & other.keys()):
        notes.append("The runs have different numbers of micro-batches, which were compared together.")
        a, b = a.with_joined_micros(), b.with_joined_micros()
        noises = [each.with_joined_micros() for each in noises]
    kinds = _common_kinds(a, b)
    _check_names(a, b, kinds)
    steps = set(a.steps) & set(b.steps)
    for run, rest in ((a, set(a.steps) - steps), (b, set(b.steps) - steps)):
        if rest:
            left_out.append(f"Only {run.name} has {_listed('step', sorted(rest))}.")
    for run, rest in ((a, a.kinds - b.kinds - kinds), (b, b.kinds - a.kinds - kinds)):
        if rest:
            left_out.append(f"Only {run.name} has recorded {', '.join(sorted(rest))}.")
    order = [key for key in merged_order(a, b) if key.step in steps and key.kind in kinds]
    tolerances = Tolerances(a, b, noises, order)
    judge = _Judge(a, b, tolerances, tensors)
    outcomes = [outcome for key in order if (outcome := judge.outcome(key)) is not None]
    if not outcomes:
        raise AlignmentError(
            f"{a.name} and {b.name} have no tensor that can be compared. {' '.join((*left_out, *judge.left_out()))}"
        )
    left_out += judge.left_out()
    verdict = _Verdict(judge, outcomes)
    found = verdict.differences()
    outcomes = [each for each in outcomes if each not in verdict.healed]
    if other_bits := judge.first_other_bits(order):
        notes.append(f"The first operation that returns other bits from the same inputs: {other_bits}.")
    return Comparison(
        (a.name, b.name),
        tuple(judge.difference(outcome) for outcome in outcomes),
        sum(outcome.is_same for outcome in outcomes),
        tuple(found),
        tolerances.is_estimate,
        tolerances.is_coarse,
        judge.unaligned,
        tuple(left_out),
        (*notes, *tolerances.notes, *judge.notes()),
    )


def _common_kinds(a: Run, b: Run) -> frozenset[str]:
    """Return the kinds that both runs recorded. Of an optimizer, gradients and updates may be missing."""
    kinds = a.kinds & b.kinds
    return kinds | ((a.kinds | b.kinds) & {"reduced_gradient", "update"} if "parameter" in kinds else frozenset())


def _check_names(a: Run, b: Run, kinds: frozenset[str]) -> None:
    models = kinds & {"gradient", *STATE}
    only_a, only_b = names_on_one_side(a, b, models or kinds)
    only_a, only_b = ([name for name in each if not name.startswith("optimizer.")] for each in (only_a, only_b))
    # A parameter without a gradient, or that no optimizer has, is a difference. Other names are another model.
    if not only_b and only_a and b.finished and _modules(only_a) <= {key.name for key in b.parts}:
        return
    if not only_a and only_b and a.finished and _modules(only_b) <= {key.name for key in a.parts}:
        return
    if only_a and not b.finished and not only_b:
        return
    if only_b and not a.finished and not only_a:
        return
    shared = {key.name for key in a.parts} & {key.name for key in b.parts}
    if ((only_a or only_b) and models) or not shared:
        raise AlignmentError(
            f"{a.name} and {b.name} are of different models and cannot be aligned. "
            + " ".join(f"Only {run.name} has {_few(names)}." for run, names in ((a, only_a), (b, only_b)) if names)
            + " Compare runs of one model, or rename its modules."
        )


def _modules(parameters: Sequence[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in parameters}


def _few(names: Sequence[str]) -> str:
    from monarch_kernel.display.quantities import few

    return few(names, 8)


def _listed(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _divided(distance: float, tolerance: float) -> float:
    if distance == 0:
        return 0.0
    return math.inf if tolerance == 0 else distance / tolerance


def split_name(key: Key) -> tuple[str, str]:
    """Return the module of a tensor, and the tensor's name in it."""
    if key.kind in ("gradient", *STATE):
        module, _, tensor = key.name.rpartition(".")
        return module, tensor
    return key.name, f"{key.kind} {key.tensor}".strip()


def _title(kind: str, module: str, tensor: str) -> str:
    owner = module or "the model"
    if kind in ("gradient", *STATE):
        name = f"{module}.{tensor}".lstrip(".")
        return {
            "gradient": f"gradient of {name} before reduction",
            "reduced_gradient": f"gradient of {name}",
            "parameter": f"parameter {name}",
            "update": f"update of {name}",
            "buffer": f"buffer {name}",
        }[kind]
    if kind == "operation":
        return _operation_title(owner, tensor.removeprefix("operation "))
    if kind.startswith("grad_"):
        return f"gradient of {tensor.removeprefix('grad_')} of {owner}"
    return f"{tensor} of {owner}"


def _operation_title(owner: str, tensor: str) -> str:
    """Name a tensor of an operation, such as "aten.addmm#1/aten.mm#0:input.mat1"."""
    label, _, which = tensor.rpartition(":")
    forward, slash, backward = label.partition("/")

    def called(name: str) -> str:
        operation, _, number = name.partition("#")
        return f"{operation} (number {int(number) + 1})" if number.isdigit() and int(number) else operation

    inner = f"{called(backward)} in the backward of {called(forward)}" if slash else called(forward)
    return f"{which.replace('.', ' ', 1)} of {inner} in {owner}"


# -- distances and tolerances ------------------------------------------------------------------------


def distance(first: WholeTensor, second: WholeTensor, scale: float = 1.0) -> tuple[float, float]:
    """Return the distance of two tensors relative to the first's norm, and the part of it that is between norms.

    Args:
        scale: the factor by which the second is expected to exceed the first.
    """
    if scale == 1 and first.hash and first.hash == second.hash and first.projection == second.projection:
        return 0.0, 0.0
    if first.nonfinite != second.nonfinite:
        return math.inf, math.inf
    base = first.norm or (second.norm or 0) / scale
    if not base:
        return 0.0, 0.0
    norms = abs(first.norm - second.norm / scale) if first.norm is not None and second.norm is not None else 0.0
    found = [norms]
    if first.maximum is not None and second.maximum is not None:
        found.append(abs(first.maximum - second.maximum / scale))
    if first.projection is not None and second.projection is not None:
        found.append(abs(first.projection - second.projection / scale))
    if not (first.hash and second.hash) and max(found) < _OF_SUMS * base:
        return 0.0, 0.0
    return max(found) / base, norms / base


def _apart(first: Entry, second: Entry) -> float:
    if exact(first, second):
        return 0.0
    return distance(replicas([RecordedPart(0, 0, first)]), replicas([RecordedPart(0, 0, second)]))[0]


def _is_floating(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype


def _spacing(dtype: str) -> float:
    return _SPACING.get({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype), _SPACING["float32"])


class Tolerances:
    """How far rounding alone may move each tensor, relative to its norm.

    Attributes:
        is_estimate: whether no perturbed run tells.
        notes: facts about them, each a sentence.

    Args:
        a, b: the runs.
        noises: the first one with perturbed inputs.
        order: the tensors in program order.

    Raises:
        ValueError: a recording of noise is not one of the first run.
    """

    def __init__(self, a: Run, b: Run, noises: Sequence[Run], order: Sequence[Key]) -> None:
        self._a = a
        self.notes: list[str] = []
        self._spacings = self._precision(a, b, order)
        self._depths: dict[Key, int] = {}
        depth, step = 0, -1
        for key in order:
            is_result = key.kind in ("output", "grad_input") or (key.kind == "operation" and ":output" in key.tensor)
            depth = 0 if key.step != step else depth + is_result
            step = key.step
            self._depths[key] = depth
        self._noise = self._measured(a, noises, order)
        moved = any(self._noise.values())
        if noises and not moved:
            self.notes.append(
                "The perturbed run is equal to the reference in every bit, so tolerances are estimated: was it "
                "recorded with perturb=1?"
            )
        self.is_estimate = not moved
        self._smooth = self._smoothed(order) if moved else {}
        # Noise was measured in the precision of the first run.
        self._coarser = max(1.0, self._majority(b) / self._majority(a))
        if self.is_blind:
            self.notes.append(
                "Modules were not recorded, so that it is unknown in which precision gradients were computed."
            )
        self._cache: dict[Key, float] = {}

    @cached_property
    def is_blind(self) -> bool:
        """Whether the precision of what was computed is unknown: no tensor of a forward or a backward was recorded."""
        kinds = self._a.kinds
        return bool(kinds & {"gradient", "reduced_gradient", "update"}) and not kinds & {"output", "operation"}

    @property
    def is_coarse(self) -> bool:
        """Whether tolerances are estimated for half precision."""
        return self.is_estimate and max(self._spacings.values(), default=0.0) > _LEAST

    def of(self, key: Key) -> float:
        """Return the tolerance of a tensor; 0 for integers."""
        if key not in self._cache:
            self._cache[key] = self._of(key)
        return self._cache[key]

    def require_equal(self, key: Key) -> None:
        """Let rounding explain no difference of a tensor: only integers of it are compared."""
        self._cache[key] = 0.0

    def _of(self, key: Key) -> float:
        spacing = self._spacings.get(key, 0.0)
        if not spacing:
            return 0.0
        if not self.is_estimate:
            noise = max(self._noise.get(key, 0.0), self._smooth.get(key, 0.0))
            return max(_LEAST, 2 * spacing if spacing > _LEAST else 0.0, _OF_NOISE * self._coarser * noise)
        bound = _OF_SPACING * spacing * math.sqrt(1 + (_DEPTH if self.is_blind else self._depths[key]))
        if spacing > _LEAST:
            bound = min(bound, 0.5)
        return max(_LEAST, bound * self._cancellation(key))

    def _precision(self, a: Run, b: Run, order: Sequence[Key]) -> dict[Key, float]:
        """Return the spacing of numbers that rounding depends on: the coarsest that both runs have had so far."""
        usual_a, usual_b = self._majority(a), self._majority(b)
        coarsest = max(usual_a, usual_b) if usual_a != usual_b else 0.0
        found: dict[Key, float] = {}
        for key in order:
            # Stages of a pipeline may have inputs of different types: `_Judge` compares integers exactly.
            types = [{part.entry.dtype for part in run.parts.get(key, ())} for run in (a, b)]
            types = [{dtype for dtype in each if _is_floating(dtype)} for each in types]
            if not any(types):
                found[key] = 0.0
                continue
            one, two = (max(map(_spacing, each), default=0.0) for each in types)
            if one == two:
                coarsest = max(coarsest, one)
            found[key] = max(coarsest, min(one, two))
        return found

    @staticmethod
    def _majority(run: Run) -> float:
        counts = Counter(
            part.entry.dtype
            for key, parts in run.parts.items()
            for part in parts[:1]
            if key.phase == "forward" and _is_floating(part.entry.dtype)
        )
        return _spacing(counts.most_common(1)[0][0] if counts else "float32")

    def _measured(self, a: Run, noises: Sequence[Run], order: Sequence[Key]) -> dict[Key, float]:
        """Return the largest distance that a perturbation caused for each tensor, in this step or an earlier one."""
        found: dict[Key, float] = {}
        for noise in noises:
            missing = [key for key in a.parts if key not in noise.parts]
            if (missing and noise.finished) or not same_layout(a, noise):
                raise ValueError(
                    f"{noise.name} is not a recording of the same run as {a.name}, which is needed to estimate "
                    "tolerances: record the same program on the same ranks with perturb=1"
                )
            for key, parts in a.parts.items():
                for one, two in zip(parts, noise.parts.get(key, ()), strict=False):
                    moved = _apart(one.entry, two.entry)
                    found[key] = max(found.get(key, 0.0), moved if math.isfinite(moved) else 0.0)
        pooled: dict[tuple[str, str, str], float] = {}
        if any(found.values()):
            for key, moved in found.items():
                if key.phase == "optimizer":  # optimizers divide by small gradients, so noise differs between steps
                    pooled[key[4:]] = max(pooled.get(key[4:], 0.0), moved)
        for key in order:
            pooled[key[4:]] = found[key] = max(pooled.get(key[4:], 0.0), found.get(key, 0.0))
        return found

    def _smoothed(self, order: Sequence[Key]) -> dict[Key, float]:
        """Return the median noise of each tensor's neighbours of the same phase; the largest for an optimizer."""
        groups: defaultdict[tuple[int, str], list[Key]] = defaultdict(list)
        for key in order:
            if self._spacings[key]:
                groups[key.step, key.phase].append(key)
        found: dict[Key, float] = {}
        for keys in groups.values():
            values = [self._noise.get(key, 0.0) for key in keys]
            for at, key in enumerate(keys):
                near = values[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
                found[key] = max(near) if key.phase == "optimizer" else statistics.median(near)
        return found

    def _cancellation(self, key: Key) -> float:
        """Return by how much cancellation in the sum of a parameter's gradient may raise its relative error.

        A gradient is a product of the module's input and the gradient of its output, whose norms bound its error.
        """
        if key.kind not in ("gradient", "reduced_gradient", "update", "parameter"):
            return 1.0
        module, tensor = split_name(key)
        gradient = self._norm("reduced_gradient", key.name, key.step) or self._norm("gradient", key.name, key.step)
        above = self._norm("grad_output", module, key.step)
        if gradient is None:
            return 1.0
        if gradient[0] == 0:
            return 1 / _LEAST
        if above is None:
            # Errors are of the size of other gradients: how much of this one has cancelled is unknown.
            return max(1.0, self._largest.get(key.step, 0.0) * math.sqrt(gradient[1]) / gradient[0])
        inputs = self._norm("input", module, key.step)
        if tensor == "bias" or inputs is None:
            factor = math.sqrt(max(1.0, above[1] / gradient[1]))
        else:
            factor = inputs[0]
        return max(1.0, above[0] * factor / gradient[0])

    @cached_property
    def _norms(self) -> dict[tuple[str, str, int], tuple[float, int]]:
        sums: dict[tuple[str, str, int], tuple[float, int]] = {}
        for key, parts in self._a.parts.items():
            if _is_floating(parts[0].entry.dtype):
                squares, elements = sums.get((key.kind, key.name, key.step), (0.0, 0))
                squares += sum(part.entry.sum_of_squares for part in parts)
                sums[key.kind, key.name, key.step] = squares, elements + sum(count(part.entry) for part in parts)
        return {at: (math.sqrt(squares), elements) for at, (squares, elements) in sums.items()}

    @cached_property
    def _largest(self) -> dict[int, float]:
        """The largest gradient of a parameter in each step: the root of the mean of its squares."""
        found: dict[int, float] = {}
        for (kind, _, step), (norm, elements) in self._norms.items():
            if kind in ("gradient", "reduced_gradient") and elements:
                found[step] = max(found.get(step, 0.0), norm / math.sqrt(elements))
        return found

    def _norm(self, kind: str, name: str, step: int) -> tuple[float, int] | None:
        """Return norm and number of elements of the tensors of a kind together; None if there are none."""
        return self._norms.get((kind, name, step))


# -- judging tensors ---------------------------------------------------------------------------------


class _BatchLayout(NamedTuple):
    """How the batch of a run is split.

    Attributes:
        dim: along which dimension.
        order: whether its parts are in the order of ranks or of micro-batches ("rank", "micro").
        batches: the ranks of each part, in order; empty if parts are micro-batches.
    """

    dim: int
    order: str
    batches: tuple[frozenset[int], ...]


def _batches_of(parts: Sequence[RecordedPart]) -> tuple[frozenset[int], ...]:
    """Return the sets of ranks with equal parts of a batch, in the order of their first ranks."""
    if len({part.micro for part in parts}) > 1:
        return ()
    found = [frozenset(part.rank for part in cluster) for cluster in clusters(parts, exact)]
    return tuple(sorted(found, key=min))


def assemble(parts: Sequence[RecordedPart], tensor_of: Callable[[Entry], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the tensor of which ranks have shards or terms; None if any are missing, or replicas differ."""
    import torch

    first, placement = tensor_of(parts[0].entry), parts[0].entry.placement
    if first is None or placement is None:
        return None
    whole = torch.zeros(placement.global_shape, dtype=first.dtype)
    filled = 0
    for group in by_location(parts):
        placement = group[0].entry.placement
        if placement is None or placement.is_pending or (placement.partial and placement.replicas > 1):
            return None
        if not placement.partial and len(clusters(group, exact)) > 1:
            return None
        for part in group if placement.partial else group[:1]:
            local = tensor_of(part.entry)
            if local is None:
                return None
            whole[placement.indices(local.shape)] += local
        filled += count(group[0].entry)
    return whole if filled == whole.numel() else None


def _whole(tensor: torch.Tensor, parts: Sequence[RecordedPart]) -> WholeTensor:
    """Return the figures of a tensor that parts were joined to."""
    from monarch_kernel.numerics.summaries import summarize

    found = summarize(tensor, None)
    norm = math.sqrt(found.sum_of_squares)
    return WholeTensor(
        "shards", tuple(parts), tensor.numel(), norm, found.maximum, found.projection, found.nonfinite, found.hash
    )


class _Judge:
    """Compares single tensors of two runs.

    Args:
        a, b: the runs; `a` is the reference.
        tolerances: of each tensor.
        tensors: see `compare_runs`.
    """

    def __init__(self, a: Run, b: Run, tolerances: Tolerances, tensors: tuple[Load, Load] | None) -> None:
        self.a, self.b = a, b
        self._tolerances = tolerances
        self._tensors = tensors
        self.is_by_rank = same_layout(a, b)
        self.sizes = sorted(a.group_sizes() | b.group_sizes())
        self._unaligned: defaultdict[str, list[Key]] = defaultdict(list)
        self._has_operations = False  # that were not compared
        self._by_size = 0  # how many tensors were compared without their projections
        self._layouts: dict[tuple[int, int, int], _BatchLayout | None] = {}  # see `_layout`
        self.loss_scale = self._loss_scale()

    def outcome(self, key: Key) -> _Outcome | None:
        """Compare one tensor; None if it cannot be compared."""
        one, two = self.a.parts.get(key), self.b.parts.get(key)
        if key.kind == "operation" and not self.is_by_rank:
            self._has_operations = True
            return None
        if key.kind == "grad_input" and not self.is_by_rank and self._is_weight(key):
            return None
        if not one or not two:
            return self._missing(key, one or [], two or [])
        if key.kind == "operation":
            return self._operation(key, one, two)
        if self.is_by_rank:
            return self._by_rank(key, one, two)
        return self._joined(key, one, two)

    def _is_weight(self, key: Key) -> bool:
        """Return whether an input is a weight. Its gradient sums all its uses on a rank."""
        inputs = self.a.parts.get(key._replace(kind="input", phase="forward"), ())
        return any(part.entry.hash in self._weights for part in inputs)

    @cached_property
    def _weights(self) -> frozenset[str]:
        """The hashes of the parameters of the first run."""
        return frozenset(
            part.entry.hash for key, parts in self.a.parts.items() if key.kind == "parameter" for part in parts
        )

    def close(self, key: Key) -> Callable[[Entry, Entry], bool]:
        """Return the function that tells replicas of a tensor."""
        tolerance = self._tolerances.of(key)
        return lambda first, second: (
            first.dtype == second.dtype and _apart(first, second) <= tolerance * _is_floating(first.dtype)
        )

    def _make(
        self,
        key: Key,
        found: tuple[float, float],
        ranks: Sequence[int],
        hints: Sequence[str] = (),
        *,
        factor: float | None = None,
        restores: bool = False,
        alone: float = 0.0,
        is_same: bool = False,
    ) -> _Outcome:
        parts = self.b.parts.get(key) or self.a.parts[key]
        return _Outcome(
            key=key,
            distance=found[0],
            tolerance=self._tolerances.of(key),
            is_estimate=self._tolerances.is_estimate,
            ranks=tuple(sorted(set(ranks))),
            hints=tuple(hints),
            elements=count(parts[0].entry),
            factor=factor,
            restores=restores,
            alone=alone,
            by_norm=found[1],
            is_same=is_same,
            is_blind=self._tolerances.is_blind and not (key.kind == "parameter" and key.phase == "forward"),
        )

    # -- operations ------------------------------------------------------------------------------

    def _operation(self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart]) -> _Outcome | None:
        """Compare a tensor of an operation rank by rank, on the ranks that have it in both runs."""
        right = {part.rank: part for part in one}
        pairs = [(right[part.rank], part) for part in two if part.rank in right]
        if not pairs:
            self._unaligned["other ranks run it"].append(key)
            return None
        for first, second in pairs:
            if first.entry.shape != second.entry.shape:
                hint = f"its shape is {list(second.entry.shape)}, and {list(first.entry.shape)} in the reference"
                return self._make(key, (math.inf, math.inf), [part.rank for _, part in pairs], [hint])
        is_floating = all(_is_floating(part.entry.dtype) for pair in pairs for part in pair)
        if not is_floating and not all(exact(first.entry, second.entry) for first, second in pairs):
            is_output = ":output" in key.tensor
            computed = (
                not self._has_same_inputs(key)
                if is_output
                else any(part.entry.hash in self._computed for pair in pairs for part in pair)
            )
            if computed:
                self._unaligned["they are integers that rounding of floating-point numbers may change"].append(key)
                return None
        return self._by_rank(key, [first for first, _ in pairs], [second for _, second in pairs])

    def _has_same_inputs(self, key: Key) -> bool:
        """Return whether the inputs of an output's operation have the same bytes in both runs on all ranks."""
        for each in self._inputs[_call_of(key)]:
            one, two = self.a.parts.get(each, ()), self.b.parts.get(each, ())
            other = {part.rank: part.entry for part in two}
            if any(part.rank not in other or not exact(part.entry, other[part.rank]) for part in one) or not two:
                return False
        return True

    @cached_property
    def _inputs(self) -> defaultdict[Key, list[Key]]:
        """The inputs of each operation."""
        found: defaultdict[Key, list[Key]] = defaultdict(list)
        for key in self.a.parts:
            if key.kind == "operation" and ":input" in key.tensor:
                found[_call_of(key)].append(key)
        return found

    @cached_property
    def _computed(self) -> frozenset[str]:
        """The hashes of results of operations."""
        return frozenset(
            part.entry.hash
            for run in (self.a, self.b)
            for key, parts in run.parts.items()
            if key.kind == "operation" and ":output" in key.tensor
            for part in parts
        )

    def first_other_bits(self, order: Sequence[Key]) -> str:
        """Name the first operation that returns other bits from the same inputs; "" if there is none."""
        if not self.is_by_rank:
            return ""
        for key in order:
            if key.kind != "operation" or ":output" not in key.tensor:
                continue
            one, two = ({part.rank: part.entry for part in run.parts.get(key, ())} for run in (self.a, self.b))
            ranks = [rank for rank in one.keys() & two.keys() if not exact(one[rank], two[rank])]
            if ranks and self._has_same_inputs(key):
                line = two[min(ranks)].line
                return f"{_title(key.kind, *split_name(key))} on {_ranks(sorted(ranks))}" + (
                    f" at {line}" if line else ""
                )
        return ""

    # -- ways to compare -------------------------------------------------------------------------

    def _by_rank(self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart]) -> _Outcome:
        found = [distance(replicas([first]), replicas([second])) for first, second in zip(one, two, strict=True)]
        worst = max(found)
        limits = [self._tolerances.of(key) * _is_floating(part.entry.dtype) for part in two]
        each = zip(two, found, limits, strict=True)
        wrong = [part for part, (apart, _), limit in each if apart > limit]
        is_exact = any(not _is_floating(part.entry.dtype) for part in wrong)
        hints: list[str] = []
        if wrong:
            right = {part.rank: part for part in one}
            hints = self._hints(key, replicas([right[wrong[0].rank]]), replicas([wrong[0]]))
            hints += self._alone(wrong, two)
        same = all(exact(first.entry, second.entry) for first, second in zip(one, two, strict=True))
        outcome = self._make(key, worst, [part.rank for part in wrong or two], hints, is_same=same)
        return dataclasses.replace(outcome, tolerance=0.0) if is_exact else outcome

    def _joined(self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart]) -> _Outcome | None:
        if any(part.entry.placement is not None and part.entry.placement.is_pending for part in (*one, *two)):
            self._unaligned["its terms are masked only while they are summed"].append(key)
            return None
        close = self.close(key)
        one, two = _of_one_shape(one, two), _of_one_shape(two, one)
        if not _is_floating(one[0].entry.dtype) and not _is_floating(two[0].entry.dtype):
            self._tolerances.require_equal(key)
        options = common_elements(one, two)
        found = [(whole_of(one, elements, close), whole_of(two, elements, close), elements) for elements in options]
        scale = self.loss_scale if key.kind in ("grad_input", "grad_output") else 1.0
        if (outcome := self._by_assembly(key, one, two, scale)) is not None:
            return outcome
        for first, second, _ in found:
            if first is not None and second is not None:
                first, second = self._located(key, first, second, 0), self._located(key, second, first, 1)
                apart = distance(first, second, scale)
                self._by_size += first.projection is None or second.projection is None
                if key.kind == "gradient" and apart[0] > self._tolerances.of(key):
                    return self._reduced(key, one, two)
                hints = self._hints(key, first, second, scale) if apart[0] > self._tolerances.of(key) else []
                same = bool(first.hash) and first.hash == second.hash and not apart[0]
                factor = _factor(first, second, _GUESS) if hints else None
                return self._make(key, apart, second.ranks, hints, factor=factor, is_same=same)
        if key.kind == "gradient":
            return self._reduced(key, one, two)
        for first, second, elements in found:
            if first is not None and second is None:
                return self._disagreeing(key, first, two, elements)
            if second is not None and first is None:
                return self._disagreeing(key, second, one, elements, mirrored=True)
        sums = terms(one, 1.0, "sum"), terms(two, 1.0, "sum")
        if key.kind not in STATE and sums[0] is not None and sums[1] is not None:
            apart = self._by_terms(key, sums[0], sums[1], two)
            if apart[0] <= self._tolerances.of(key):
                return self._make(key, apart, sums[1].ranks)
        self._unaligned["its parts do not make up the same tensor in both runs"].append(key)
        return None

    def _by_assembly(
        self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart], scale: float
    ) -> _Outcome | None:
        """Compare a tensor whose parts are shards or terms of each part of the batch, if the recordings kept them all.

        Returns:
            None if they did not, or the places of the parts are unknown.
        """
        joined = self._assembled(key, one, 0), self._assembled(key, two, 1)
        wholes: list[WholeTensor] = []
        for at, (parts, made) in enumerate(zip((one, two), joined, strict=True)):
            if made is not None:
                wholes.append(_whole(made, parts))
                continue
            other = joined[1 - at]
            if other is None:
                return None
            whole = whole_of(parts, other.numel(), self.close(key))
            if whole is None or whole.projection is None or tuple(whole.parts[0].entry.shape) != tuple(other.shape):
                return None
            wholes.append(whole)
        first, second = wholes
        apart = distance(first, second, scale)
        if apart[0] <= self._tolerances.of(key):
            return self._make(key, apart, second.ranks)
        ranks = second.ranks
        if joined[0] is None and self._tensors is not None:
            ranks = self._differing_ranks(key, self._tensors[0](first.parts[0].entry), two, scale) or ranks
        hints = self._hints(key, first, second, scale)
        factor = _factor(first, second, _GUESS)
        return self._make(key, apart, ranks, hints, factor=factor)

    def _assembled(self, key: Key, parts: Sequence[RecordedPart], at: int) -> torch.Tensor | None:
        """Return the tensor that ranks with parts of a batch have parts of; None if it or its places are unknown.

        Args:
            at: the run that it is of, 0 or 1.
        """
        if any(part.entry.placement is None for part in parts) or key.phase not in PHASES[:2]:
            return None
        layout = self._layout(key.step, key.micro, at)
        if layout is None or len(layout.batches) < 2 or self._tensors is None:
            return None
        import torch

        wholes: list[torch.Tensor] = []
        for ranks in layout.batches:
            whole = assemble([part for part in parts if part.rank in ranks], self._tensors[at])
            if whole is None or layout.dim >= whole.dim():
                return None
            wholes.append(whole)
        if len({whole.shape[: layout.dim] + whole.shape[layout.dim + 1 :] for whole in wholes}) > 1:
            return None
        return torch.cat(wholes, layout.dim)

    def _differing_ranks(
        self, key: Key, right: torch.Tensor | None, parts: Sequence[RecordedPart], scale: float
    ) -> tuple[int, ...]:
        """Return the ranks of the second run whose shards differ from those of the right tensor."""
        layout = self._layout(key.step, key.micro, 1)
        if right is None or layout is None or self._tensors is None:
            return ()
        found: set[int] = set()
        limit = self._tolerances.of(key)
        begin = length = 0
        for ranks in layout.batches:
            begin += length
            for part in (each for each in parts if each.rank in ranks):
                placement, tensor = part.entry.placement, self._tensors[1](part.entry)
                if placement is None or placement.partial or tensor is None:
                    return ()
                length = placement.global_shape[layout.dim]
                wanted = right.narrow(layout.dim, begin, length)[placement.indices(tensor.shape)].double() * scale
                if wanted.shape != tensor.shape:
                    return ()
                if float((tensor.double() - wanted).norm()) > limit * float(wanted.norm()):
                    found.add(part.rank)
        return tuple(sorted(found))

    def _located(self, key: Key, whole: WholeTensor, other: WholeTensor, at: int) -> WholeTensor:
        """Return a tensor whose parts have unknown places with its projection, if the batch tells the places.

        The recordings must have kept the tensors. The parts must lie along the same dimension as those of the batch.

        Args:
            other: the tensor of the other run.
            at: the run that it is of, 0 or 1.
        """
        layout = self._layout(key.step, key.micro, at) if whole.how == "split" and other.how != "split" else None
        if layout is None or whole.projection is not None:
            return whole
        joined = self._cat(whole.parts, layout.dim, layout.order, at)
        if joined is None or tuple(joined.shape) != tuple(other.parts[0].entry.shape):
            return whole
        from monarch_kernel.numerics.summaries import summarize

        return dataclasses.replace(whole, projection=summarize(joined, None).projection)

    def _layout(self, step: int, micro: int, at: int) -> _BatchLayout | None:
        """Return how a run's batch is split; None if that is unknown."""
        place = step, micro, at
        if place not in self._layouts:
            self._layouts[place] = self._found_layout(*place)
        return self._layouts[place]

    def _found_layout(self, step: int, micro: int, at: int) -> _BatchLayout | None:
        if self._tensors is None:
            return None
        import torch

        run, other = (self.a, self.b) if at == 0 else (self.b, self.a)
        for key in other.parts:
            if (key.step, key.micro, key.call, key.kind, key.name) != (step, micro, 0, "input", ""):
                continue
            if key not in run.parts:
                continue
            batch = _of_one_shape(other.parts[key], run.parts[key])
            parts = _of_one_shape(run.parts[key], batch)
            whole = whole_of(parts, count(batch[0].entry), exact)
            if len(clusters(batch, exact)) > 1 or whole is None or whole.how != "split":
                continue
            wanted = self._tensors[1 - at](batch[0].entry)
            for order in ("micro", "rank"):
                for dim in range(len(batch[0].entry.shape)):
                    joined = self._cat(whole.parts, dim, order, at)
                    if joined is not None and wanted is not None and torch.equal(joined, wanted):
                        return _BatchLayout(dim, order, _batches_of(parts))
        return None

    def _cat(self, parts: Sequence[RecordedPart], dim: int, order: str, at: int) -> torch.Tensor | None:
        """Join the tensors of parts along a dimension, in the order of ranks or of micro-batches; None if it cannot."""
        import torch

        assert self._tensors is not None
        ordered = sorted(parts, key=lambda part: (part.micro, part.rank) if order == "micro" else part[:2])
        shapes = {part.entry.shape[:dim] + part.entry.shape[dim + 1 :] for part in ordered}
        if len(shapes) != 1 or any(dim >= len(part.entry.shape) for part in ordered):
            return None
        tensors = [self._tensors[at](part.entry) for part in ordered]
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found, dim) if len(found) == len(tensors) else None

    def _by_terms(
        self, key: Key, first: WholeTensor, second: WholeTensor, parts: Sequence[RecordedPart]
    ) -> tuple[float, float]:
        """Return the distance of sums, of which only projections are known, relative to their terms."""
        norms = [math.sqrt(part.entry.sum_of_squares) for part in parts]
        base = first.norm or second.norm or max(norms, default=0.0)
        if first.nonfinite != second.nonfinite:
            return math.inf, math.inf
        if not base or first.projection is None or second.projection is None:
            return 0.0, 0.0
        apart = abs(first.projection - second.projection) / max(base, *norms)
        return (apart, 0.0) if apart >= _OF_SUMS else (0.0, 0.0)

    def _reduced(self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart]) -> _Outcome | None:
        """Compare local gradients as far as sums and means over ranks agree. If not, the reduced ones tell."""

        def totals(run: Run, parts: Sequence[RecordedPart]) -> list[WholeTensor]:
            ranks, micros = len({part.rank for part in parts}), len({part.micro for part in parts})
            if len(parts) == 1:
                return [replicas(parts)]
            found = [terms(parts, 1 / factor, "sum") for factor in sorted({1, ranks, micros, ranks * micros})]
            return [each for each in found if each is not None]

        for first in totals(self.a, one):
            for second in totals(self.b, two):
                apart = self._by_terms(key, first, second, two)
                if apart[0] <= self._tolerances.of(key):
                    return self._make(key, apart, second.ranks)
        return None

    def _disagreeing(
        self, key: Key, whole: WholeTensor, parts: Sequence[RecordedPart], elements: int, mirrored: bool = False
    ) -> _Outcome | None:
        """Compare a tensor with parts of the other run that should be replicas and are not.

        Args:
            mirrored: whether `parts` are of the first run.
        """
        tolerance = self._tolerances.of(key)
        placements = [part.entry.placement for part in parts]
        total = terms(parts, 1.0, "sum")
        if total is not None and all(each is not None and each.partial for each in placements):
            apart = self._by_terms(key, whole, total, parts)
            return self._make(key, apart, total.ranks, self._hints(key, whole, total) if apart[0] > tolerance else [])
        if mirrored and key.kind not in STATE and elements > 1:
            if total is not None and self._by_terms(key, whole, total, parts)[0] <= tolerance:
                return self._make(key, self._by_terms(key, whole, total, parts), whole.ranks)
            self._unaligned["it is not the same on the ranks of the reference"].append(key)
            return None
        if elements == 1 and key.kind not in STATE:
            # A loss of each rank: the whole is their mean, or their sum.
            for value in (terms(parts, 1 / len(parts), "mean"), total):
                apart = distance(whole, value) if value is not None else (math.inf, math.inf)
                if apart[0] <= tolerance:
                    return self._make(key, apart, whole.ranks if mirrored else [part.rank for part in parts])
            if mirrored or key.kind.startswith("grad_"):
                self._unaligned["ranks have different scalars"].append(key)
                return None
        if total is not None and key.kind not in STATE:
            apart = self._by_terms(key, whole, total, parts)
            if apart[0] <= tolerance:
                alone = max(distance(whole, replicas([part]))[0] for part in parts)
                return self._make(key, apart, total.ranks, self._reductions(key, whole, parts), alone=alone)
        if not all(count(part.entry) == elements for part in parts):
            differing = next((group for group in by_location(parts) if len(clusters(group, self.close(key))) > 1), None)
            if differing is None:
                self._unaligned["parts of it are missing"].append(key)
                return None
            apart = max(_apart(differing[0].entry, part.entry) for part in differing[1:])
            reductions = self._reductions(key, whole, parts)
            hints = reductions + self._alone([], differing)
            ranks = [part.rank for part in differing]
            return self._make(key, (apart, apart), ranks, hints, restores=bool(reductions))
        each = [(part, distance(whole, replicas([part]))) for part in parts]
        wrong = [part for part, apart in each if apart[0] > tolerance]
        reductions = self._reductions(key, whole, parts)
        hints = list(reductions)
        if wrong and not hints:
            hints = self._hints(key, whole, replicas([wrong[0]]))
        hints += self._alone(wrong, parts)
        if mirrored:
            hints = [f"the replicas of the reference {self.a.name} differ from each other", *hints]
        ranks = [part.rank for part in wrong or parts]
        return self._make(key, max(apart for _, apart in each), ranks, hints, restores=bool(reductions))

    def _missing(self, key: Key, one: Sequence[RecordedPart], two: Sequence[RecordedPart]) -> _Outcome | None:
        if key.name.startswith("optimizer.") and key.kind != "update":
            return None
        run = self.b if not two else self.a
        if not run.finished or not run.has_optimized(key.step):
            return None  # its recording ended before
        if key.kind == "update" and key._replace(kind="parameter") in run.parts:
            return None  # the optimizer has it, but the recording kept no copy to compare with
        known = {each.kind for each in run.parts if each.name == key.name and each.step == key.step}
        update = key._replace(kind="update", phase="optimizer")
        is_trained = update._replace(kind="parameter") in run.parts
        if key.kind == "reduced_gradient" and update in self._other(run).parts and not is_trained:
            return None  # no optimizer has it, which its missing update says
        if key.kind in ("reduced_gradient", "update"):
            what = "gradient" if key.kind == "reduced_gradient" else "update"
            reason = f"it has no {what} in {run.name}" if not two else f"it has no {what} in the reference {run.name}"
            if key.name.startswith("optimizer."):
                reason = f"an optimizer of {self._other(run).name} has a tensor that is no parameter of its model"
            elif key.kind == "update" and "reduced_gradient" not in known:
                reason = f"no optimizer of {run.name} has it"
        elif key.kind == "output" and known:
            calls = [
                len({each.call for each in one_run.parts if each[:2] == key[:2] and each[3:] == key[3:]})
                for one_run in (self.a, self.b)
            ]
            if calls[0] == calls[1]:
                return None
            reason = f"the module is called {calls[1]} times in {self.b.name} and {calls[0]} times in {self.a.name}"
        else:
            owner = self._other(run).name
            if not two:
                owner = "the reference" if owner == "reference" else f"the reference {owner}"
            self._unaligned[f"only {owner} has it"].append(key)
            return None
        ranks = [part.rank for part in two] or list(self.b.ranks)
        # An optimizer that works during backward leaves no gradient.
        restores = key.kind == "reduced_gradient"
        return self._make(key, (math.inf, math.inf), ranks, [reason], restores=restores)

    def uneven_step(self) -> _Outcome | None:
        """Return the first step of the second run in which some ranks have more forwards than most others."""
        for step in self.b.steps:
            forwards: defaultdict[int, set[int]] = defaultdict(set)
            for key, parts in self.b.parts.items():
                if key.step == step and key.kind == "input" and not key.name:
                    for part in parts:
                        forwards[part.rank].add(part.micro)
            counts = Counter(len(micros) for micros in forwards.values())
            if len(counts) < 2:
                continue
            usual = min(counts)
            ranks = [rank for rank, micros in forwards.items() if len(micros) != usual]
            keys = [key for key in self.a.parts if key.step == step and key.kind == "update"]
            if not keys or (step == self.b.steps[-1] and not self.b.finished):
                return None
            key = min(keys, key=self.a.order.__getitem__)
            reason = f"{_ranks(ranks)} ran the model again before a step of the optimizer, which may have been skipped"
            return self._make(key, (math.inf, math.inf), ranks, [reason])
        return None

    def moved_outside(self) -> _Outcome | None:
        """Return the first parameter of the second run that something else than its optimizer has changed.

        A parameter after a step is the one after the step before, plus its update. The reference must not do the same.
        """
        keys = (key for key in self.b.order if key.kind == "parameter" and key.phase == "optimizer")
        for key in sorted(keys, key=self.b.order.__getitem__):
            jumps = _jumps(self.b, key)
            if jumps and not _jumps(self.a, key):
                reason = "it changed between the step before and this one, not by the optimizer"
                hints = [reason, *self._alone([], self.b.parts[key])]
                worst = max(jumps.values())
                found = self._make(key, (worst, worst), list(jumps), hints)
                # It is measured within the one run, so that noise between runs says nothing of it.
                limit = max(_jump_limit(part.entry) for part in self.b.parts[key])
                return dataclasses.replace(found, tolerance=limit, is_estimate=False, is_before=True)
        return None

    def _other(self, run: Run) -> Run:
        return self.a if run is self.b else self.b

    def _loss_scale(self) -> float:
        """Return the factor between gradients of activations that a split of the batch explains.

        The loss of a rank is the mean over its part of the batch, so its gradients are larger by the number of parts
        until the reduction averages them. The same holds of micro-batches whose gradients are averaged after backward.
        """
        if self.is_by_rank:
            return 1.0
        parts: list[int] | None = None
        for key in sorted(self.a.order, key=self.a.order.__getitem__):
            if key not in self.b.parts or key.kind not in ("input", "grad_output"):
                continue
            one, two = self.a.parts[key], self.b.parts[key]
            if key.kind == "grad_output" and count(one[0].entry) == 1:
                continue  # a scalar may be of all ranks together
            for elements in common_elements(one, two):
                first, second = whole_of(one, elements, exact), whole_of(two, elements, exact)
                if first is None or second is None or not first.norm or not second.norm:
                    continue
                if key.kind == "input":
                    if parts is None and not key.name:
                        parts = [len(each.ranks) if each.how == "split" else 1 for each in (first, second)]
                    break
                return self._chosen_scale(second.norm / first.norm, parts or [1, 1], key.step)
        return 1.0

    def _chosen_scale(self, found: float, parts: Sequence[int], step: int) -> float:
        """Return the factor that is right if gradients of outputs differ by the factor `found`.

        Args:
            parts: how many parts the batch has in each run.
        """

        def is_close(one: float, two: float) -> bool:
            return math.isclose(one, two, rel_tol=_GUESS)

        expected = parts[1] / parts[0]
        if is_close(found, expected):
            return expected
        first, second = gradient_scale(self.a, step), gradient_scale(self.b, step)
        if first and second and is_close(found, first / second):
            # The second run makes up for it: it sums over ranks, or divides by its micro-batches.
            return 1.0 if is_close(found, 1.0) else found
        # If it averages over ranks, the loss of a rank must be the mean over its part of the batch.
        return expected if second and is_close(second * expected, 1.0) else 1.0

    # -- guesses ---------------------------------------------------------------------------------

    def _hints(self, key: Key, first: WholeTensor, second: WholeTensor, scale: float = 1.0) -> list[str]:
        """Return what the figures of a differing tensor suggest."""
        found: list[str] = []
        one, two = first.parts[0].entry, second.parts[0].entry
        if second.nonfinite > first.nonfinite:
            found.append(f"{second.nonfinite:,} of {second.elements:,} elements are NaN or infinite")
        elif first.nonfinite > second.nonfinite:
            found.append(f"only in the reference, {first.nonfinite:,} elements are NaN or infinite")
        if one.dtype != two.dtype:
            found.append(f"it is computed in {two.dtype}, and in {one.dtype} in the reference")
        elif one.dtype == "float32" and _is_rounded_to_half(first, second):
            found.append("its largest element fits into bfloat16: it may be computed in lower precision")
        if second.norm == 0 and first.norm:
            return [*found, "all its elements are zero"]
        if first.norm == 0 and second.norm:
            return [*found, "all its elements are zero in the reference"]
        if first.nonfinite or second.nonfinite:
            return found
        tolerance = max(self._tolerances.of(key), _GUESS / 10)
        factor = _factor(first, second, tolerance, scale)
        if factor is not None and not math.isclose(factor, scale, rel_tol=tolerance):
            found.append(self._of_factor(factor / scale))
        elif key.kind != "update" and _is_permutation(first, second):
            found.append("it has the same elements in another order: shards or heads may be permuted")
        elif key.kind == "input" and _is_floating(one.dtype) is False:
            found.append("the runs read different data")
        if second.how == "split" and len(second.parts) > 1 and key.phase == "forward":
            alike = clusters(second.parts, exact)
            if len(alike) == 1 and len(second.parts) > 1:
                found.append(f"{_ranks(second.ranks)} have the same part, which should be different ones")
        if factor is None and (single := _single_element(first, second)):
            found.append(single)
        found += self._of_tensors(first, second)
        return found

    def _of_factor(self, factor: float) -> str:
        size = abs(factor)
        sign = "minus " if factor < 0 else ""
        if math.isclose(size, 1, rel_tol=_GUESS):
            return "every element has the opposite sign"
        for power, text in ((1.0, "{}"), (-1.0, "1/{}"), (0.5, "√{}"), (-0.5, "1/√{}"), (2.0, "{}²"), (-2.0, "1/{}²")):
            for number in self.sizes:
                if math.isclose(size, number**power, rel_tol=_GUESS):
                    why = {
                        1.0: "summed instead of averaged, or reduced once too often",
                        -1.0: "averaged instead of summed, or divided once too often",
                        2.0: "summed twice",
                        -2.0: "divided twice",
                    }.get(power, "a wrong scale")
                    return f"every element is {sign}{text.format(number)} times that of the reference: {why}"
        return f"every element is {factor:.4g} times that of the reference"

    def _reductions(self, key: Key, whole: WholeTensor, parts: Sequence[RecordedPart]) -> list[str]:
        """Return whether a sum or a mean over ranks gives the right tensor."""
        if whole.projection is None or len(parts) < 2:
            return []
        tolerance = max(self._tolerances.of(key), _GUESS / 10)
        ranks = _ranks(sorted({part.rank for part in parts}))

        def fits(total: WholeTensor | None) -> bool:
            return total is not None and self._by_terms(key, whole, total, parts)[0] <= tolerance

        groups = clusters(parts, exact)
        if 1 < len(groups) < len(parts) and len({len(group) for group in groups}) == 1:
            names = " and ".join(_ranks([part.rank for part in group]) for group in groups[:4])
            chosen = [group[0] for group in groups]
            for factor in (1.0, 1 / len(groups), 1 / len(parts)):
                if fits(terms(chosen, factor, "sum")):
                    return [f"it is reduced over {names} separately, not over all of them"]
        if fits(terms(parts, 1.0, "sum")):
            return [f"the sum over {ranks} is the reference's: a reduction is missing"]
        if fits(mean_of_replicas(parts)):
            return [f"the mean over {ranks} is the reference's: it is not reduced"]
        return []

    @staticmethod
    def _alone(wrong: Sequence[RecordedPart], parts: Sequence[RecordedPart]) -> list[str]:
        if len({part.rank for part in parts}) < 3:
            return []
        groups = sorted(clusters(parts, exact), key=len)
        if len({part.rank for part in wrong}) == 1:
            return [f"rank {wrong[0].rank} alone differs"]
        if len(groups) == 2 and len(groups[0]) == 1 and not wrong:
            return [f"rank {groups[0][0].rank} alone differs"]
        return []

    def _of_tensors(self, first: WholeTensor, second: WholeTensor) -> list[str]:
        """Return what the tensors themselves show, if both recordings kept them whole."""
        if self._tensors is None or (len({part.rank for part in first.parts}) > 1 and first.how != "replicas"):
            return []
        if second.how != "replicas" or first.how != "replicas":
            return []
        one, two = self._tensors[0](first.parts[0].entry), self._tensors[1](second.parts[0].entry)
        if one is None or two is None or one.shape != two.shape:
            return []
        return _elementwise(one, two, self.sizes)

    # -- what was left out -----------------------------------------------------------------------

    @property
    def unaligned(self) -> int:
        """How many tensors of both runs could not be compared."""
        return sum(key in self.a.parts and key in self.b.parts for keys in self._unaligned.values() for key in keys)

    def left_out(self) -> list[str]:
        """Return which tensors could not be compared, each reason in a sentence."""
        found: list[str] = []
        if self._has_operations:
            found.append("Not compared: operations, because the runs have other ranks or shards.")
        for reason, keys in self._unaligned.items():
            names = list(dict.fromkeys(_title(key.kind, *split_name(key)) for key in keys))
            found.append(f"Not compared, because {reason}: {_few(names)}.")
        return found

    def notes(self) -> list[str]:
        """Return further facts about the runs."""
        found: list[str] = []
        states: defaultdict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
        for at, run in enumerate((self.a, self.b)):
            for entry in run.aside:
                if entry.kind == "generator" and not entry.step and entry.name.startswith("torch"):
                    states[entry.name][at].add(entry.hash)
        differing = [name for name, (one, two) in states.items() if one and two and not one & two]
        if differing:
            found.append(
                f"The random generators ({', '.join(differing)}) are in different states at the first step, so dropout "
                "and other random operations differ."
            )
        if self._by_size:
            found.append(
                f"{self._by_size:,} tensors were compared by norm and maximum alone, because it is unknown which "
                "part of them a rank has: record with placements."
            )
        if self.loss_scale != 1:
            found.append(
                f"Gradients of activations were compared without the factor {self.loss_scale:g} that comes from "
                "splitting the batch; the reduction, or a division after backward, makes up for it."
            )
        return found

    def difference(self, outcome: _Outcome, is_consequence: bool = False) -> TensorDifference:
        """Return an outcome as it is reported."""
        key = outcome.key
        module, tensor = split_name(key)
        return TensorDifference(
            key.step,
            key.micro,
            key.call,
            key.phase,
            key.kind,
            module,
            tensor,
            outcome.ranks,
            self._line(outcome),
            outcome.distance,
            outcome.tolerance,
            "; ".join(dict.fromkeys(outcome.hints)),
            outcome.is_certain,
            is_consequence,
        )

    def _line(self, outcome: _Outcome) -> str:
        """Return the line of the first differing rank; of a parameter, that of its module's call."""
        key = outcome.key
        parts = self.b.parts.get(key) or self.a.parts[key]
        chosen = [part for part in parts if part.rank in outcome.ranks] or parts
        line = next((part.entry.line for part in chosen if part.entry.line), "")
        if line or key.kind not in STATE:
            return line
        return self._lines.get(split_name(key)[0], "")

    @cached_property
    def _lines(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for run in (self.b, self.a):
            for key, parts in run.parts.items():
                if key.kind == "output" and parts[0].entry.line:
                    found.setdefault(key.name, parts[0].entry.line)
        return found


def _call_of(key: Key) -> Key:
    """Return what the keys of one operation's tensors have in common."""
    return key._replace(tensor=key.tensor.rpartition(":")[0])


def _jumps(run: Run, key: Key) -> dict[int, float]:
    """Return by how much a parameter changed outside of its optimizer, relative to its norm, by rank."""
    before = key._replace(step=key.step - 1) if key.step else key._replace(phase="forward")
    update = key._replace(kind="update")
    if before not in run.parts or update not in run.parts:
        return {}
    former, moves = ({part.rank: part.entry for part in run.parts[each]} for each in (before, update))
    found: dict[int, float] = {}
    for part in run.parts[key]:
        entry, rank = part.entry, part.rank
        if rank not in former or rank not in moves or not entry.sum_of_squares or entry.nonfinite:
            continue
        jump = abs(entry.projection - former[rank].projection - moves[rank].projection)
        relative = jump / math.sqrt(max(entry.sum_of_squares, former[rank].sum_of_squares))
        if relative > _jump_limit(entry):
            found[rank] = relative
    return found


def _jump_limit(entry: Entry) -> float:
    """Return how large a change of a parameter the rounding of its summaries explains, relative to its norm."""
    return max(_JUMP, 4 * _spacing(entry.dtype))


def _of_one_shape(parts: Sequence[RecordedPart], other: Sequence[RecordedPart]) -> Sequence[RecordedPart]:
    """Return the parts that have the shape of the other run's only part; all if they do not tell stages apart.

    Stages of a pipeline are models of one name, whose inputs and outputs are different tensors.
    """
    if len(other) != 1 or len(parts) < 2 or parts[0].entry.placement is not None:
        return parts
    entry = other[0].entry
    kinds = {(part.entry.dtype, len(part.entry.shape), part.entry.shape[-1:]) for part in parts}
    matching = [part for part in parts if part.entry.dtype == entry.dtype and part.entry.shape == entry.shape]
    return matching if len(kinds) > 1 and matching else parts


def _ranks(ranks: Sequence[int]) -> str:
    from monarch_kernel.meshes import format_ranks

    return f"rank{'s' * (len(ranks) != 1)} {format_ranks(ranks, limit=6)}"


def _factor(first: WholeTensor, second: WholeTensor, tolerance: float, scale: float = 1.0) -> float | None:
    """Return the factor by which all elements of the second tensor exceed the first's, as far as figures tell.

    Args:
        scale: the expected factor, which counts as none if only norms tell.
    """
    if not first.norm or second.norm is None:
        return None
    factor = second.norm / first.norm
    if first.maximum and second.maximum and not math.isclose(second.maximum / first.maximum, factor, rel_tol=_GUESS):
        return None
    if first.projection is None or second.projection is None:
        return factor if abs(factor / scale - 1) > _GUESS else None
    for sign in (1, -1):
        if abs(second.projection - sign * factor * first.projection) <= tolerance * second.norm:
            return sign * factor
    return None


def _is_permutation(first: WholeTensor, second: WholeTensor) -> bool:
    if not first.norm or not second.norm or not first.maximum or not second.maximum or first.elements < 2:
        return False
    if first.projection is None or second.projection is None:
        return False
    same = math.isclose(first.norm, second.norm, rel_tol=4 * _LEAST)
    same = same and math.isclose(first.maximum, second.maximum, rel_tol=_LEAST)
    flat = math.isclose(first.maximum * math.sqrt(first.elements), first.norm, rel_tol=0.05)
    return same and not flat and abs(first.projection - second.projection) > _GUESS * first.norm


def _is_rounded_to_half(first: WholeTensor, second: WholeTensor) -> bool:
    """Return whether the second's largest element may be the first's after rounding to bfloat16."""

    def fits(number: float) -> bool:
        (bits,) = struct.unpack("<I", struct.pack("<f", number)) if number < 3.4e38 else (1,)
        return bits & 0xFFFF == 0

    if not first.maximum or not second.maximum or not fits(second.maximum) or fits(first.maximum):
        return False
    return math.isclose(second.maximum, first.maximum, rel_tol=4 * _SPACING["bfloat16"])


def _single_element(first: WholeTensor, second: WholeTensor) -> str:
    """Return whether one element that became the largest explains all of the difference."""
    if not first.norm or second.norm is None or not second.maximum or first.maximum is None or first.elements < 2:
        return ""
    before = second.maximum**2 - (second.norm**2 - first.norm**2)
    slack = 1e-5 * second.norm**2
    if second.maximum > 2 * first.maximum and -slack <= before <= first.maximum**2 + slack:
        return "a single element explains it: a flipped bit or a wrong index"
    return ""


def _elementwise(one: torch.Tensor, two: torch.Tensor, sizes: Sequence[int]) -> list[str]:
    """Return what the elements of two tensors of one shape show."""
    import torch

    if one.dtype != two.dtype or one.numel() == 0 or one.is_complex():
        return []
    wrong = (one != two) & ~(one.isnan() & two.isnan())
    number = int(wrong.sum())
    if number == 1 and one.is_floating_point() and one.element_size() in (2, 4, 8):
        at = tuple(wrong.nonzero()[0].tolist())
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        width = 8 * one.element_size()
        bits = (int(one[at].view(kind).item()) ^ int(two[at].view(kind).item())) & ((1 << width) - 1)
        one_bit = f"bit {bits.bit_length() - 1} of " if bits.bit_count() == 1 else ""
        return [f"only {one_bit}element {list(at)} differs"]
    if one.dim() and torch.equal(one.flatten().sort().values, two.flatten().sort().values):
        for dim in range(one.dim()):
            for size in sizes:
                if one.shape[dim] % size or size > 8:
                    continue
                found = _order_of(one.chunk(size, dim), two.chunk(size, dim))
                if found is not None:
                    return [f"parts {found} of {size} along dimension {dim} restore it: shards are in another order"]
        for dims in ((-1, -2),):
            if one.dim() > 1 and one.shape[dims[0]] == one.shape[dims[1]] and torch.equal(one, two.transpose(*dims)):
                return ["it is transposed"]
        return ["it has the same elements in another order"]
    zeros = (one == 0), (two == 0)
    shares = [each.float().mean().item() for each in zeros]
    masked = one.is_floating_point() and 0.02 < shares[1] < 0.98 and abs(shares[0] - shares[1]) < 0.1
    if masked and not torch.equal(*zeros):
        return ["other elements are zero: it has another random mask"]
    if one.dim() and number < one.numel():
        for dim in range(one.dim()):
            others = [each for each in range(one.dim()) if each != dim]
            rows = wrong.sum(others).nonzero().flatten().tolist() if others else wrong.nonzero().flatten().tolist()
            if rows and len(rows) <= one.shape[dim] // 2 and rows == list(range(rows[0], rows[-1] + 1)):
                return [f"only indices {rows[0]} to {rows[-1]} of dimension {dim} differ"]
    return []


def _order_of(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the order of the second tensors in which they equal the first ones; None if there is none."""
    import torch

    found: list[int] = []
    for part in one:
        at = next((at for at, other in enumerate(two) if at not in found and torch.equal(part, other)), None)
        if at is None:
            return None
        found.append(at)
    return found


# -- the verdict -------------------------------------------------------------------------------------


class _Verdict:
    """Decides which outcomes are errors, which one is first, and which are consequences."""

    def __init__(self, judge: _Judge, outcomes: Sequence[_Outcome]) -> None:
        self._judge = judge
        self._outcomes = list(outcomes)
        #: Outcomes that are no error because what follows from them is right.
        self.healed = {each for each in outcomes if each.differs and self._is_healed(each)}

    def differences(self) -> list[TensorDifference]:
        """Return the differences in program order."""
        wrong = [each for each in self._outcomes if each.differs and each not in self.healed]
        wrong = self._after(self._judge.moved_outside(), self._after_skipped_step(wrong))
        certain = [each for each in wrong if each.is_certain]
        wrong = self._blamed(certain[0] if certain else wrong[0], wrong) if wrong else wrong
        causes: list[_Outcome] = []
        found: list[TensorDifference] = []
        scaled = self._scaled_together(wrong)
        for each in wrong:
            later = (bool(certain) and not each.is_certain) or any(_explains(cause, each) for cause in causes)
            later = later or each in scaled
            if not later:
                causes.append(each)
            found.append(self._judge.difference(each, is_consequence=later))
        return found

    def _is_healed(self, outcome: _Outcome) -> bool:
        """Return whether what follows from a tensor is right, so that another division of work explains it."""
        key = outcome.key
        if self._judge.is_by_rank and key.step <= self._drifts.get(key.name, key.step):
            return False
        if key.kind == "reduced_gradient":  # reduced within the optimizer's step
            return outcome.restores and self._is_right("update", key) and self._is_right("parameter", key)
        if key.kind in STATE or key.kind == "gradient":
            return False
        gradients = self._gradients.get(key.step, {})
        earliest = gradients.get(self._earliest)
        flows = earliest is not None and _undoes(earliest, outcome)
        if key.phase == "forward":
            around = [*([key.name] if key.kind == "input" else []), *ancestors(key.name)]
            results = (self._results.get((key.step, key.micro, name)) for name in around)
            if any(result is not None and _undoes(result, outcome) for result in results):
                return True
            # Gradients upstream depend on each activation, but not on the value of the loss.
            return flows and outcome.elements > 1
        own = (each for name, each in gradients.items() if name.rpartition(".")[0] == key.name)
        if key.name and any(each.differs for each in own):
            return False
        if flows or (gradients and all(_undoes(each, outcome) for each in gradients.values())):
            return True
        last = self._last_backwards.get((key.step, key.micro))
        return last is not None and last.key.name != key.name and _undoes(last, outcome)

    @cached_property
    def _drifts(self) -> dict[str, int]:
        """The first step in which rounding alone moves parameters of a module apart, by its name.

        An optimizer that divides by gradients moves a parameter whose gradient is rounding alone as far as all others.
        """
        found: dict[str, int] = {}
        for each in self._outcomes:
            if each.key.kind == "update" and not each.differs and each.distance > _DOUBTFUL_UPDATE:
                module = each.key.name.rpartition(".")[0]
                found[module] = min(each.key.step, found.get(module, each.key.step))
        return found

    def _is_right(self, kind: str, key: Key) -> bool:
        at = key._replace(kind=kind, phase="optimizer")
        return at in self._by_key and not self._by_key[at].differs

    @cached_property
    def _by_key(self) -> dict[Key, _Outcome]:
        return {each.key: each for each in self._outcomes}

    @cached_property
    def _last_backwards(self) -> dict[tuple[int, int], _Outcome]:
        """The gradient of an activation that is computed last, by step and micro-batch: all others lead to it."""
        return {
            each.key[:2]: each for each in self._outcomes if each.key.kind.startswith("grad_") and each.elements > 1
        }

    @cached_property
    def _results(self) -> dict[tuple[int, int, str], _Outcome]:
        """The output of each module's call that is farthest from the reference, by step, micro-batch and name."""
        found: dict[tuple[int, int, str], _Outcome] = {}
        for each in self._outcomes:
            at = each.key.step, each.key.micro, each.key.name
            if each.key.kind == "output" and (at not in found or max(each.ratio, each.alone) > found[at].ratio):
                found[at] = dataclasses.replace(each, distance=max(each.distance, each.alone))
        return found

    @cached_property
    def _gradients(self) -> dict[int, dict[str, _Outcome]]:
        """Each parameter's gradient after reduction, by step."""
        found: dict[int, dict[str, _Outcome]] = {}
        for each in self._outcomes:
            if each.key.kind == "reduced_gradient":
                found.setdefault(each.key.step, {})[each.key.name] = each
        return found

    @cached_property
    def _earliest(self) -> str:
        """The parameter of the module that runs first: an error in any backward reaches its gradient."""
        called = dict.fromkeys(each.key.name for each in self._outcomes if each.key.kind in ("input", "output"))
        parameters = [each.key.name for each in self._outcomes if each.key.kind == "reduced_gradient"]
        owners = {name.rpartition(".")[0]: name for name in reversed(parameters)}
        return next((owners[name] for name in called if name and name in owners), "")

    def _scaled_together(self, wrong: Sequence[_Outcome]) -> set[_Outcome]:
        """Return gradients that differ by one factor while others differ otherwise: they were clipped together."""
        found: set[_Outcome] = set()
        for step in {each.key.step for each in wrong}:
            gradients = [each for each in wrong if each.key.kind == "reduced_gradient" and each.key.step == step]
            factors = [each.factor for each in gradients if each.factor is not None]
            if len(factors) < 2:
                continue
            usual = statistics.median_low(factors)
            alike = [each for each in gradients if each.factor and math.isclose(each.factor, usual, rel_tol=_GUESS)]
            if 2 <= len(alike) < len(gradients) and not any(math.isclose(usual, size) for size in self._judge.sizes):
                found.update(alike)
        return found

    def _after_skipped_step(self, wrong: list[_Outcome]) -> list[_Outcome]:
        """Put first that some ranks of the second run have more forwards before a step of the optimizer than others."""
        found = self._judge.uneven_step()
        if found is None or not wrong or any(each.key.step < found.key.step for each in wrong):
            return wrong
        earlier = [each for each in wrong if each.key.step == found.key.step and each.key.phase == "forward"]
        return wrong if earlier else [found, *(each for each in wrong if each.key.step >= found.key.step)]

    def _after(self, moved: _Outcome | None, wrong: list[_Outcome]) -> list[_Outcome]:
        """Put a parameter that changed before a step in front of the differences of that step."""
        if moved is None or not wrong or any(each.key.step < moved.key.step for each in wrong):
            return wrong
        if moved.key.step == 0 and any(each.key.phase == "forward" for each in wrong):
            return wrong
        return [moved, *(each for each in wrong if each.key != moved.key)]

    def _blamed(self, first: _Outcome, wrong: list[_Outcome]) -> list[_Outcome]:
        """Blame a tensor that is right only as a sum over ranks if the next one is wrong: the sum is missing."""
        if first not in self._outcomes:
            return wrong
        at = self._outcomes.index(first)
        chain: list[_Outcome] = []
        for before in reversed(self._outcomes[:at]):
            if not before.alone or before.key[:2] != first.key[:2] or before.key.phase != first.key.phase:
                break
            chain.insert(0, before)
        if not chain:
            return wrong
        blamed = chain[0]
        blamed = dataclasses.replace(blamed, distance=blamed.alone)
        at = wrong.index(first)
        return [*wrong[:at], blamed, *wrong[at:]]


def _undoes(result: _Outcome, outcome: _Outcome) -> bool:
    """Return whether what follows from a differing tensor is right: within tolerance, and not just by dilution."""
    return not result.differs and result.distance * _UNDONE <= outcome.distance


def _explains(cause: _Outcome, other: _Outcome) -> bool:
    """Return whether a difference may be the consequence of an earlier one."""
    one, two = cause.key, other.key
    if one.step < two.step or cause.is_before:
        return True
    if two.kind == "parameter" and two.phase == "forward":
        return False  # weights at the start
    if two.phase in ("forward", "backward") or one.phase in ("forward", "backward"):
        return one.phase != "reduction"
    if two.phase == "reduction":
        return False
    return one.name == two.name
