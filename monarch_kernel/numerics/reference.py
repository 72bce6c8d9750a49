"""Run one recorded step again in a single process, as the reference that the job is compared with.

A recording with the tensors themselves (`full`) has all that a step needs: weights, batch, the gradient of the model's
output and the states of random generators. `reference_of` starts a process that builds the model with a function of the
user's, gives it the job's weights, joined from all ranks, and runs the batch of all ranks through it: once as it is, a
second time to find kernels that are not deterministic, and then with perturbed inputs, whose recordings tell how far
rounding alone may move each tensor. `compare_with_reference` compares.

The loss is not needed: gradients begin with the recorded gradient of the model's output. The optimizer is built again
with the job's settings and its state before the step. It gets the job's own gradients, so an update differs only if the
optimizer is wrong: gradients are compared before, and may have been clipped or unscaled.

Of a pipeline, the batch is the input of the first stage and the gradient that of the last stage's output, one for each
micro-batch. Whether the job sums or averages gradients, and divides them by the number of micro-batches or clips them
after backward, is measured; the reference does the same, as far as that can be right.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_kernel import programs
from monarch_kernel.numerics.alignment import RecordedPart, Run, by_location, clusters, count, exact, gradient_scale
from monarch_kernel.numerics.comparison import Comparison, assemble, compare_runs

if TYPE_CHECKING:
    import torch

    from monarch_kernel.numerics.recording import Entry, Recording

#: Classes of torch.optim whose `step` needs a closure.
_WITH_CLOSURE = frozenset(("LBFGS",))
#: How many runs with perturbed inputs measure the tolerances.
PERTURBED = 2
#: How close a gradient must be to that of a cross-entropy, and factors between gradients to known ones.
_OF_CROSS_ENTROPY, _OF_FACTORS = 0.02, 1e-3
#: The file of a reference's folder that has notes on the step, a list of sentences in JSON.
_NOTES = "notes.json"
#: Kinds of a step that a run without the job's optimizer has in common with it.
_KINDS = frozenset(
    ("input", "output", "grad_input", "grad_output", "gradient", "reduced_gradient", "generator", "operation")
)


class ReferenceRunError(RuntimeError):
    """The reference cannot be run; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Builder:
    """A function that returns the model.

    Attributes:
        file: the Python file.
        function: its name in that file.
    """

    file: Path
    function: str

    @classmethod
    def of(cls, text: str) -> Builder:
        """Read `train.py:build_model`. Raises ValueError if that is no function of a file."""
        file, colon, function = text.rpartition(":")
        if not colon or not function.isidentifier():
            raise ValueError(f"{text!r} is no function of a file: write FILE:FUNCTION, such as train.py:build_model")
        path = Path(file).expanduser().absolute()
        if not path.is_file():
            raise ValueError(f"there is no file {path} with {function}")
        return cls(path, function)


def compare_with_reference(recording: Recording, builder: str, optimizer: str = "") -> Comparison:
    """Compare the first step of a recorded job with a run of the same step in one process.

    Args:
        recording: of the job, with its tensors (`full=True`).
        builder: `FILE:FUNCTION`; the function takes no arguments and returns the whole model.
        optimizer: `FILE:FUNCTION`; the function takes the model and returns its optimizer. By default, the job's
            optimizer is built again, if torch has its class.

    Raises:
        ReferenceRunError: the step cannot be run again.
        ValueError: `builder` names no function.
        AlignmentError: the job has another model.
    """
    from monarch_kernel.numerics.recording import Recording

    steps = Optimizers.of(recording, Builder.of(optimizer) if optimizer else None)
    folders = reference_of(recording, Builder.of(builder), steps, again=True, perturbed=PERTURBED)
    plain, again, *perturbed = (Recording.open(folder) for folder in folders)

    found = compare_runs(
        first_step(plain, "reference", steps),
        first_step(recording, recording.name, steps),
        [first_step(each, "perturbed reference", steps) for each in perturbed],
        tensors=(plain.tensor, recording.tensor),
    )
    repeated = compare_runs(first_step(plain, "reference"), first_step(again, "reference, run again"))
    notes = [*found.notes, *json.loads((folders[0] / _NOTES).read_text()), *steps.notes]
    if repeated.identical != repeated.compared and repeated.worst is not None:
        notes.append(_nondeterminism(repeated, folders[0]))
    if _has_other_generators(recording):
        notes.append(
            "Ranks of the job have different random generators, so masks of dropout differ from the reference's: "
            "compare without dropout."
        )
    return replace(found, notes=tuple(notes))


def first_step(recording: Recording, name: str, optimizers: Optimizers | None = None) -> Run:
    """Return what a reference has in common with the first step of a recording.

    Args:
        optimizers: those of the reference; None if updates are not compared.
    """
    skipped: frozenset[str] | None = None if optimizers is None else optimizers.skipped
    entries = [entry for entry in recording.entries() if entry.step == 0 and _is_compared(entry, skipped)]
    return Run.of(entries, name)


def _is_compared(entry: Entry, skipped: frozenset[str] | None) -> bool:
    if entry.kind in _KINDS or (entry.kind == "parameter" and entry.phase == "forward"):
        return True
    if skipped is None or entry.name.startswith("optimizer."):
        return False
    return entry.kind in ("update", "parameter") and "" not in skipped and entry.name not in skipped


def _has_other_generators(recording: Recording) -> bool:
    states = {
        entry.hash
        for entry in recording.entries()
        if entry.kind == "generator" and entry.step == 0 and entry.name.startswith("torch")
    }
    return len(states) > 1


def _nondeterminism(repeated: Comparison, folder: Path) -> str:
    """Describe a reference that differs when it is run again, with the operations that torch blames."""
    first = min(repeated.differences, key=lambda each: each.step, default=repeated.worst)
    where = first.title if first is not None else "a tensor"
    try:
        operations: list[str] = json.loads((folder / "nondeterministic.json").read_text())
    except (OSError, ValueError):
        operations = []
    blamed = f" ({', '.join(operations)})" if operations else ""
    return (
        f"The reference differs when it is run again, first in {where}{blamed}: call "
        "torch.use_deterministic_algorithms(True) in both programs."
    )


def reference_of(
    recording: Recording,
    builder: Builder,
    optimizers: Optimizers,
    *,
    beside: Path | None = None,
    root: Path | None = None,
    again: bool = False,
    perturbed: int = 0,
) -> list[Path]:
    """Run the first recorded step in a process of its own.

    Args:
        recording: of the job, with its tensors.
        builder: the function that returns the model.
        optimizers: what runs after the backward.
        beside: the recordings are in folders beside it, whose names begin with its name; by default, beside the job's.
        root: the current folder of the process, from which modules can be imported, too; by default, that of the file.
        again: whether to run the same step twice.
        perturbed: how many further runs have perturbed inputs.

    Returns:
        The folders of the recordings: of the step, of the same step again, and of perturbed ones.

    Raises:
        ReferenceRunError: the step cannot be run again.
    """
    beside = recording.folder if beside is None else beside
    root = builder.file.parent if root is None else root
    units = [0, *([0] if again else []), *range(1, perturbed + 1)]
    names = ["reference", *(["reference-again"] if again else [])]
    names += [f"reference-perturbed-{number}" for number in range(1, perturbed + 1)]
    folders = [beside.with_name(f"{beside.name}.{name}") for name in names]
    StepData.of(recording)  # what is missing is said before a process is started
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    order = {
        "recording": str(recording.folder),
        "file": str(builder.file),
        "function": builder.function,
        "optimizer": None
        if optimizers.builder is None
        else [str(optimizers.builder.file), optimizers.builder.function],
        "paths": [str(path) for path in dict.fromkeys((builder.file.parent, root))],
        "runs": [[str(folder), number] for folder, number in zip(folders, units, strict=True)],
    }
    done = programs.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=environment,
        cwd=str(root),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ReferenceRunError(f"{builder.file.name}:{builder.function} cannot run as the reference: {reason}")
    return folders


# -- what a step needs -------------------------------------------------------------------------------


@dataclass(slots=True)
class StepData:
    """The tensors that a step begins with, joined from all ranks.

    Attributes:
        weights: parameters by name.
        inputs: by micro-batch, the inputs of the model by position or keyword.
        gradients: by micro-batch, the gradients of its outputs by name.
        generators: states of random generators of the first rank by name.
        scale: the factor by which gradients of parameters are multiplied after backward.
        notes: what was assumed, each a sentence.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    inputs: list[dict[str, torch.Tensor]] = field(default_factory=list[dict[str, "torch.Tensor"]])
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list[dict[str, "torch.Tensor"]])
    generators: dict[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    scale: float = 1.0
    notes: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, recording: Recording) -> StepData:
        """Read the first step of a recording. Raises ReferenceRunError if something is missing."""
        run = Run.of([entry for entry in recording.entries() if entry.step == 0], recording.name)
        found = cls()
        if not recording.description.get("full"):
            raise ReferenceRunError(
                f"{recording.name} has summaries only: record the job with full=True (%mesh record NAME --full), so "
                "that the reference has its weights and batch"
            )
        first, last = _stages(run)
        of_model = [key for key in run.parts if not key.name and key.call == 0]
        inputs, gradients = (
            {key: parts for key in of_model if key.kind == kind and (parts := _of_ranks(run.parts[key], ranks))}
            for kind, ranks in (("input", first), ("grad_output", last))
        )
        micros = sorted({key.micro for key in inputs})
        if not micros:
            raise ReferenceRunError(
                f"{recording.name} has no inputs of a whole model: the program calls parts of it one by one"
            )
        found.inputs, found.gradients = [{} for _ in micros], [{} for _ in micros]
        split = 1
        for key, parts in run.parts.items():
            if key.kind == "parameter" and key.phase == "forward":
                found.weights[key.name] = _joined(recording, key.name, parts)[0]
        for key, parts in inputs.items():
            value, number = _joined(recording, f"input {key.tensor}", parts, dim=0)
            found.inputs[micros.index(key.micro)][key.tensor] = value
            split = max(split, number)
        shares: set[bool | None] = set()
        averaged: list[tuple[int, str, int]] = []
        for key, parts in gradients.items():
            if key.micro not in micros:
                continue
            micro = micros.index(key.micro)
            if count(parts[0].entry) == 1:  # a loss: of each rank, of which the mean counts
                found.gradients[micro][key.tensor] = _tensor(recording, parts[0].entry)
                continue
            value, number = _joined(recording, "the output's gradient", parts, dim=0)
            if number not in (1, split):
                raise ReferenceRunError(
                    f"ranks have {number} different parts of the model's output, and {split} of its inputs: "
                    "record with placements of the output, such as {':output': Shard(-1)}"
                )
            outputs = _of_ranks(run.parts.get(key._replace(kind="output", phase="forward"), ()), last)
            if number > 1:
                logits = _joined(recording, "the output", outputs, dim=0)[0] if outputs else None
                shares.add(_is_share(logits, value, number, len(micros)))
                averaged.append((micro, key.tensor, number))
            found.gradients[micro][key.tensor] = value
        measured = gradient_scale(run, 0)
        if not found._sums(measured, shares, split):
            for micro, tensor, number in averaged:
                found.gradients[micro][tensor] = found.gradients[micro][tensor] / number
            measured = measured and measured * split
        if measured:
            found._scale(measured, run.group_sizes())
        for entry in run.aside:
            if entry.kind == "generator" and entry.rank == run.ranks[0]:
                found.generators[entry.name] = _tensor(recording, entry)
        if not found.weights:
            raise ReferenceRunError(
                f"{recording.name} has no weights from before the step: record with what='modules,optimizer' and name "
                "the model (%mesh record NAME --full --model EXPR)"
            )
        return found

    def _sums(self, measured: float | None, shares: set[bool | None], split: int) -> bool:
        """Return whether each rank's loss is a share of that of the whole batch, so that gradients must be summed.

        Otherwise it is the mean over its part of the batch, and gradients must be averaged.

        Args:
            measured: see `gradient_scale`.
            shares: what `_is_share` has found.
            split: how many parts the batch has.
        """
        if shares != {None} or measured is None or not math.isclose(measured, 1.0, rel_tol=_OF_FACTORS):
            return shares == {True}
        self.notes.append(
            f"The job sums gradients over {split} parts of the batch. That is right if the loss of a rank is its share "
            f"of the loss of the whole batch. If it is the mean over its part, gradients are {split} times too large, "
            "which the reference cannot know."
        )
        return True

    def _scale(self, factor: float, sizes: set[int]) -> None:
        """Scale the gradients of parameters after backward as the job does, as far as that can be right.

        A factor that a wrong reduction would cause is not applied, so that the comparison finds it.

        Args:
            factor: that of the job.
            sizes: of groups of ranks.
        """

        def is_close(one: float) -> bool:
            return math.isclose(factor, one, rel_tol=_OF_FACTORS)

        micros = len(self.inputs)
        if micros > 1 and is_close(1 / micros):
            self.scale = 1 / micros
            self.notes.append(
                f"The job divides gradients by its {micros} micro-batches after backward, and so does the reference."
            )
        elif 0 < factor < 1 and not any(is_close(size**power) for size in {1, *sizes} for power in (-0.5, -1, -2)):
            self.scale = factor
            self.notes.append(
                f"The job multiplies all gradients by {factor:.4g} after backward, as clipping does, and so does the "
                "reference."
            )


def _stages(run: Run) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ranks that have inputs of the whole model, and the ranks that have its outputs.

    All stages of a pipeline that a program makes by hand are models of the same name. The input of a later stage has
    the bytes of the output of the stage before.
    """
    bytes_of: dict[str, defaultdict[int, set[tuple[object, ...]]]] = {
        kind: defaultdict(set) for kind in ("input", "output")
    }
    for key, parts in run.parts.items():
        if not key.name and key.kind in bytes_of:
            for part in parts:
                if "float" in part.entry.dtype:
                    bytes_of[key.kind][part.rank].add((part.entry.hash, part.entry.shape))
    links = [
        (earlier, later)
        for earlier, outputs in bytes_of["output"].items()
        for later, inputs in bytes_of["input"].items()
        if earlier != later and outputs & inputs
    ]
    ranks = frozenset(run.ranks)
    return ranks - {later for _, later in links}, ranks - {earlier for earlier, _ in links}


def _of_ranks(parts: Sequence[RecordedPart], ranks: frozenset[int]) -> list[RecordedPart]:
    return [part for part in parts if part.rank in ranks]


def _is_share(logits: torch.Tensor | None, gradient: torch.Tensor, number: int, micros: int) -> bool | None:
    """Return whether the loss of a rank is its share of the loss of the whole batch, and not the mean over its part.

    A cross-entropy tells: its gradient is that of a sum over tokens, divided by a number of tokens.

    Args:
        number: how many parts the batch has.
        micros: how many micro-batches a step has, by which the loss may be divided, too.

    Returns:
        None if the gradient is not that of a cross-entropy of the outputs.
    """
    if logits is None or logits.shape != gradient.shape or not logits.is_floating_point() or logits.dim() < 2:
        return None
    gradient, probabilities = gradient.double().flatten(0, -2), logits.double().flatten(0, -2).softmax(-1)
    counted = gradient.abs().sum(-1) > 0  # others are ignored by the loss
    gradient, probabilities = gradient[counted], probabilities[counted]
    if not len(gradient):
        return None
    wanted = gradient.argmin(-1, keepdim=True)
    others = (1 - probabilities.gather(-1, wanted)).clamp(min=1e-12)
    weights = -gradient.gather(-1, wanted) / others
    weight = weights.median()
    expected = probabilities.scatter_add(-1, wanted, -weights.new_ones(weights.shape)) * weight
    if (gradient - expected).norm() > _OF_CROSS_ENTROPY * gradient.norm():
        return None
    shares = float(weight) * len(gradient)
    for is_share, total in ((False, shares / number), (True, shares)):
        if any(math.isclose(total, each, rel_tol=_OF_CROSS_ENTROPY) for each in (1, 1 / micros)):
            return is_share
    return None


def _tensor(recording: Recording, entry: Entry) -> torch.Tensor:
    found = recording.tensor(entry)
    if found is None:
        raise ReferenceRunError(
            f"{recording.name} has not kept {entry.kind} {entry.name or 'of the model'} of rank {entry.rank}: record "
            "it with full=True and keep=1"
        )
    return found


def _joined(
    recording: Recording, what: str, parts: Sequence[RecordedPart], dim: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return the tensor that parts make up, and how many distinct parts it has.

    Args:
        dim: the dimension along which parts without a placement are joined in the order of ranks, as of a batch.
    """
    import torch

    if all(part.entry.placement is not None for part in parts):
        return _joined_shards(recording, what, parts, dim)
    alike = clusters(parts, exact)
    if len(alike) == 1:
        return _tensor(recording, parts[0].entry), 1
    if dim is None and len({part.entry.shape for part in parts}) == 1:
        return _tensor(recording, parts[0].entry), 1  # replicas that differ, which the comparison reports
    if dim is None:
        raise ReferenceRunError(
            f"ranks have different parts of {what}, and it is not known which: record with placements, such as "
            f'{{"{what}": Shard(0)}}'
        )
    tensors = [_tensor(recording, cluster[0].entry) for cluster in alike]
    if len({(each.dim(), each.dtype) for each in tensors}) != 1 or not tensors[0].dim():
        raise ReferenceRunError(
            f"ranks have different tensors as {what}, which are no parts of one batch: in a pipeline, the input of a "
            "stage must be the output of the stage before as it is"
        )
    return torch.cat(tensors, dim), len(tensors)


def _joined_shards(
    recording: Recording, what: str, parts: Sequence[RecordedPart], dim: int | None
) -> tuple[torch.Tensor, int]:
    """Join parts with placements; see `_joined`. Different tensors at one place are of different parts of a batch."""
    import torch

    groups = [
        [each for cluster in clusters(group, exact) for each in cluster[: None if _is_partial(cluster[0]) else 1]]
        for group in by_location(parts)
    ]
    number = 1 if dim is None or any(_is_partial(part) for part in parts) else max(map(len, groups), default=1)
    if any(len(group) not in (1, number) for group in groups) and dim is not None and number > 1:
        raise ReferenceRunError(f"{recording.name}: ranks have parts of {what} that make up no batch")
    wholes: list[torch.Tensor] = []
    for at in range(number):
        chosen = [group if _is_partial(group[0]) else [group[min(at, len(group) - 1)]] for group in groups]
        whole = assemble([part for group in chosen for part in group], lambda entry: _tensor(recording, entry))
        if whole is None:
            raise ReferenceRunError(f"{recording.name}: parts of {what} are missing: ranks have not recorded all of it")
        wholes.append(whole)
    return (wholes[0] if number == 1 else torch.cat(wholes, dim or 0)), number


def _is_partial(part: RecordedPart) -> bool:
    return part.entry.placement is not None and part.entry.placement.partial


# -- its optimizers ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Parameters that an optimizer of the job treats alike.

    Attributes:
        kind: the name of the optimizer's class in `torch.optim`.
        parameters: their names.
        settings: the settings of the group.
    """

    kind: str
    parameters: list[str]
    settings: dict[str, Any]


@dataclass(slots=True)
class Optimizers:
    """The optimizers of a step, with their settings and states before it.

    Attributes:
        builder: the function that makes the optimizer of a model; None to build the job's again.
        groups: the parameters of the job's optimizers, each once, with settings.
        skipped: parameters whose updates are not compared; "" for all.
        notes: what is not compared and why, and how ranks differ, each a sentence.
        states: tensors and numbers of states by parameter and name; `gradients` those of the step, by parameter.
    """

    builder: Builder | None = None
    groups: list[_Group] = field(default_factory=list[_Group])
    skipped: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list[str])
    states: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])

    @classmethod
    def of(cls, recording: Recording, builder: Builder | None = None) -> Optimizers:
        """Read the settings of the first step of a recording, without tensors."""
        found = cls(builder)
        settings: dict[str, tuple[int, dict[str, Any]]] = {}
        strange = 0
        for rank in recording.ranks:
            for each in recording.optimizers(rank):
                module, _, kind = str(each["class"]).rpartition(".")
                if builder is None and (not module.startswith("torch.optim.") or kind in _WITH_CLOSURE):
                    found._skip(f"the optimizer {each['class']} cannot be built again")
                    return found
                for group in each["groups"]:
                    names: list[str] = [name for name in group["parameters"] if not name.startswith("optimizer.")]
                    strange += len(group["parameters"]) - len(names)
                    new = [name for name in names if name not in settings]
                    found._note_differing(
                        rank, group["settings"], [name for name in names if name in settings], settings
                    )
                    settings |= dict.fromkeys(new, (rank, group["settings"]))
                    if new:
                        found.groups.append(_Group(kind, new, group["settings"]))
                for name, scalars in each["scalars"].items():
                    found.states.setdefault(name, {}).update(scalars)
        if strange:
            found.notes.append(
                f"Optimizers of the job hold {strange:,} tensors that are no parameters of its model, such as copies, "
                "or parameters from before it was wrapped. Their updates were not compared."
            )
        if not settings:
            found._skip("the recording has no optimizer's state from before the step")
        return found

    def _skip(self, why: str) -> None:
        self.groups, self.states, self.skipped = [], {}, frozenset(("",))
        self.notes.append(f"Not compared: updates, because {why}.")

    def _note_differing(
        self, rank: int, own: dict[str, Any], names: Sequence[str], known: Mapping[str, tuple[int, dict[str, Any]]]
    ) -> None:
        """Note that ranks have different settings for parameters that both have."""
        for name in names:
            first, settings = known[name]
            for key in sorted(own.keys() & settings.keys()):
                if own[key] != settings[key] and first != rank:
                    self.notes.append(
                        f"For {name}, the optimizer has {key}={own[key]!r} on rank {rank}, and {settings[key]!r} on "
                        f"rank {first}, which the reference uses."
                    )
                    return

    def read_tensors(self, recording: Recording) -> None:
        """Read the tensors of states and gradients, joined from all ranks."""
        import torch

        if "" in self.skipped:
            return
        for scalars in self.states.values():
            for key, scalar in scalars.items():
                dtype = scalar.get("dtype")
                scalars[key] = (
                    scalar["value"] if dtype is None else torch.tensor(scalar["value"], dtype=getattr(torch, dtype))
                )
        entries = [entry for entry in recording.entries() if entry.step == 0]
        states: defaultdict[tuple[str, str], list[RecordedPart]] = defaultdict(list)
        for entry in entries:
            if entry.kind == "optimizer_state" and not entry.name.startswith("optimizer."):
                states[entry.name, entry.tensor].append(RecordedPart(entry.rank, 0, entry))
        for (name, key), parts in states.items():
            self.states.setdefault(name, {})[key] = _joined(recording, f"{key} of {name}", parts)[0]
        for key, parts in Run.of(entries, recording.name).parts.items():
            if key.kind == "reduced_gradient":
                self.gradients[key.name] = _joined(recording, f"the gradient of {key.name}", parts)[0]

    def built(self, model: torch.nn.Module, perturb: int) -> list[torch.optim.Optimizer]:
        """Build the optimizers of a model. Their steps use the job's gradients.

        Args:
            perturb: by how many units in the last place to move the gradients.
        """
        import torch

        from monarch_kernel.numerics.observer import named_parameters

        own = dict(named_parameters(model))
        names = {id(parameter): name for name, parameter in own.items()}
        if "" in self.skipped:
            return [torch.optim.SGD(model.parameters(), lr=0.0)]  # it ends the step, and moves nothing
        found: list[torch.optim.Optimizer] = []
        if self.builder is not None:
            made = _function(self.builder)(model)
            if not isinstance(made, torch.optim.Optimizer):
                raise ReferenceRunError(f"{self.builder.function}() returned {type(made).__name__}, not an optimizer")
            self._set_rates(made, names)
            found.append(made)
        else:
            for kind in dict.fromkeys(group.kind for group in self.groups):
                groups = [
                    {**group.settings, "params": [own[name] for name in group.parameters if name in own]}
                    for group in self.groups
                    if group.kind == kind
                ]
                found.append(getattr(torch.optim, kind)(groups))
        for optimizer in found:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.states.get(names.get(id(parameter), ""), {})
                    copied = {
                        key: value.clone().to(parameter.device if value.dim() else "cpu")
                        if isinstance(value, torch.Tensor)
                        else value
                        for key, value in state.items()
                    }
                    if copied:
                        optimizer.state[parameter] = copied
            # The recording's own hook, which notes the reference's gradients, is a global one, and runs before.
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._give_gradients(optimizer, names, perturb))
        return found

    def _set_rates(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Set learning rates to the job's, which a schedule may have changed since its optimizer was made."""
        rates = {name: group.settings.get("lr") for group in self.groups for name in group.parameters}
        for group in optimizer.param_groups:
            found = {rates.get(names.get(id(parameter), "")) for parameter in group["params"]} - {None}
            if len(found) == 1:
                group["lr"] = found.pop()

    def _give_gradients(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], perturb: int) -> None:
        from monarch_kernel.numerics.summaries import perturbed

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                value = self.gradients.get(names.get(id(parameter), ""))
                if value is not None:
                    value = value.to(parameter.device, parameter.dtype)
                    value = perturbed(value, perturb) if perturb else value.clone()
                parameter.grad = value


# -- the process that runs it ------------------------------------------------------------------------


def main() -> None:
    """Run the step that standard input describes. Ends with a message and exit code 1 if it cannot."""
    order = json.load(sys.stdin)
    try:
        _run(order)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        raise SystemExit(1) from None


def _run(order: Mapping[str, Any]) -> None:
    from monarch_kernel.numerics.recording import Recording

    recording = Recording.open(order["recording"])
    data = StepData.of(recording)
    file = order["optimizer"]
    optimizers = Optimizers.of(recording, None if file is None else Builder(Path(file[0]), file[1]))
    optimizers.read_tensors(recording)
    what = tuple({"modules", "optimizer"} | ({"ops"} & set(recording.description["what"])))
    sys.path[:0] = order["paths"]
    runs: list[tuple[str, int]] = [(folder, units) for folder, units in order["runs"]]
    with contextlib.redirect_stdout(sys.stderr):
        model = _model(Builder(Path(order["file"]), order["function"]))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        operations: set[str] = set()
        for at, (folder, units) in enumerate(runs):
            _load(model, data, buffers)
            with _deterministic_warnings(operations) if at and not units else contextlib.nullcontext():
                _step(model, data, optimizers, folder, units, what)
    _write(Path(runs[0][0]) / _NOTES, data.notes)
    if operations:
        _write(Path(runs[0][0]) / "nondeterministic.json", sorted(operations))


def _write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))
    path.chmod(0o600)


def _function(builder: Builder) -> Callable[..., Any]:
    """Load a function from its file. Two functions of one file are of one module."""
    known = sys.modules.get(builder.file.stem)
    if known is not None and getattr(known, "__file__", None) == str(builder.file):
        return _callable(known, builder)
    spec = importlib.util.spec_from_file_location(builder.file.stem, builder.file)
    if spec is None or spec.loader is None:
        raise ReferenceRunError(f"{builder.file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[builder.file.stem] = module
    spec.loader.exec_module(module)
    return _callable(module, builder)


def _callable(module: object, builder: Builder) -> Callable[..., Any]:
    build = getattr(module, builder.function, None)
    if not callable(build):
        raise ReferenceRunError(f"{builder.file.name} has no function {builder.function}")
    return build


def _model(builder: Builder) -> torch.nn.Module:
    import torch

    model = _function(builder)()
    if not isinstance(model, torch.nn.Module):
        raise ReferenceRunError(f"{builder.function}() returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _load(model: torch.nn.Module, data: StepData, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give the model the job's weights, the buffers that it was built with, and the states of generators."""
    import torch

    from monarch_kernel.numerics.observer import named_parameters

    own = dict(named_parameters(model))
    missing, extra = sorted(own.keys() - data.weights.keys()), sorted(data.weights.keys() - own.keys())
    shapes = [
        f"{name} {tuple(own[name].shape)} there and {tuple(data.weights[name].shape)} in the job"
        for name in own
        if name in data.weights and own[name].shape != data.weights[name].shape
    ]
    if missing or extra or shapes:
        raise ReferenceRunError(
            "the model is not the job's: "
            + "; ".join(
                f"{text} {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}"
                for text, names in (
                    ("only the reference has", missing),
                    ("only the job has", extra),
                    ("other shapes:", shapes),
                )
                if names
            )
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(data.weights[name])
            parameter.grad = None
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    for name, state in data.generators.items():
        if name == "torch.cpu":
            torch.set_rng_state(state)
        elif name.startswith("torch.cuda") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def _step(
    model: torch.nn.Module,
    data: StepData,
    optimizers: Optimizers,
    folder: str,
    perturb: int,
    what: tuple[str, ...],
) -> None:
    """Record a step: forward, backward from the recorded gradients of outputs, and the optimizer."""
    import torch

    from monarch_kernel.numerics.observer import _tensors
    from monarch_kernel.numerics.recording import record

    device = next(model.parameters()).device
    stepped = optimizers.built(model, perturb)
    name = Path(folder).name
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "replace": True, "full": not perturb, "perturb": perturb}
    with record(name, model, steps=1, what=what, folder=folder, **options) as recorder:
        for inputs, gradients in zip(data.inputs, data.gradients, strict=True):
            args, kwargs = _arguments({key: value.to(device) for key, value in inputs.items()})
            outputs = dict(_tensors(model(*args, **kwargs)))
            wanted = {name: value.to(device) for name, value in gradients.items() if name in outputs}
            if wanted:
                torch.autograd.backward(
                    [outputs[name] for name in wanted],
                    [value.to(outputs[name].dtype) for name, value in wanted.items()],
                )
        for parameter in model.parameters():
            if parameter.grad is not None and data.scale != 1:
                parameter.grad *= data.scale
        for optimizer in stepped:
            optimizer.step()
    if recorder.reason not in ("done", "stopped"):
        raise ReferenceRunError(f"the recording ended: {recorder.reason}")


def _arguments(inputs: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments by their names in a recording: "0", "mask", "1.0"."""
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    nested: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, value in inputs.items():
        outer, dot, inner = name.partition(".")
        if dot:
            nested[outer][inner] = value
        elif name.isdigit():
            args[int(name)] = value
        else:
            kwargs[name] = value
    for outer, values in nested.items():
        if not all(key.isdigit() or key.isidentifier() for key in values):
            raise ReferenceRunError(f"input {outer} of the model is nested too deeply to be given to the reference")
        whole = tuple(values.values()) if all(key.isdigit() for key in values) else dict(values)
        if outer.isdigit():
            args[int(outer)] = whole
        else:
            kwargs[outer] = whole
    if sorted(args) != list(range(len(args))):
        raise ReferenceRunError(
            "arguments of the model that are no tensors are not recorded: give them defaults in the model's forward"
        )
    return [args[at] for at in sorted(args)], kwargs


@contextlib.contextmanager
def _deterministic_warnings(operations: set[str]) -> Any:
    """Collect the names of operations that torch has no deterministic implementation of."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    for each in caught:
        found = re.match(r"(\S+) does not have a deterministic implementation", str(each.message))
        if found:
            operations.add(found[1])


if __name__ == "__main__":
    main()
