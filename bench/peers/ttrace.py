"""TTrace's procedure (arXiv 2506.09280) by hand on the programs with seeded errors: ``python -m bench.peers.ttrace``.

TTrace compares a distributed run with one process, tensor by tensor. The program is edited for that: each module is
tapped, and annotated with how its tensors and parameters lie on ranks (`PROGRAMS_TAPPED`, a line each). Shards are
merged to whole tensors. A tensor's threshold is ten times the distance that it moves in a run of the reference whose
input is perturbed by one unit in the last place of the program's precision. If any tensor is over its threshold, the
program runs again with the input of each module overwritten by the reference's, so that an error stays in its module,
and the first tensor over its threshold names the module.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from bench import silent
from monarch_kernel.numerics.summaries import local_of, perturbed
from tests.numerics import ranks as forked_ranks
from tests.numerics.programs import BUGS, PROGRAMS, common
from tests.numerics.ranks import run_ranks

STEPS = 6
#: A threshold is the distance of the perturbed run times this.
FACTOR = 10.0
#: Lines that every program needs besides its annotations: make the taps, begin a step, end it, write.
LINES = 4

# How a tensor lies on ranks: "same" on all, terms of a "sum", parts along a dimension ("0", "-1"), parts of the "batch"
# (gradients are those of a mean over the part), "grid" (batch over pairs of ranks, sequence within each), or "own":
# on the only rank that has it.
_ROWS = "batch batch batch batch"

#: By program: by module how its input, its output and their gradients lie on ranks; by parameter if it is not "same".
PROGRAMS_TAPPED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "data_parallel": (dict.fromkeys(("layers.0", "norm", "layers.1", "layers.2"), _ROWS), {}),
    "data_parallel_by_hand": (dict.fromkeys(("layers.0", "layers.1", "layers.2"), _ROWS), {}),
    "tensor_parallel": (
        {
            "embed": "same 1 same 1",
            "norm1": "1 1 1 1",
            "attention": "1 1 1 1",
            "attention.q": "same -1 sum -1",
            "attention.k": "same -1 sum -1",
            "attention.v": "same -1 sum -1",
            "attention.proj": "-1 sum -1 same",
            "norm2": "1 1 1 1",
            "mlp": "1 1 1 1",
            "mlp.up": "same -1 sum -1",
            "mlp.drop": "-1 -1 -1 -1",
            "mlp.down": "-1 sum -1 same",
            "norm": "1 1 1 1",
            "drop": "same same sum sum",
            "head": "same -1 sum -1",
            "loss": "-1 same -1 same",
        },
        {
            "embed.weight": "0",
            "attention.q.weight": "0",
            "attention.k.weight": "0",
            "attention.v.weight": "0",
            "attention.proj.weight": "1",
            "mlp.up.weight": "0",
            "mlp.up.bias": "0",
            "mlp.down.weight": "1",
            "head.weight": "0",
        },
    ),
    "context_parallel": (
        dict.fromkeys(
            ("embed", "position", "attention", "attention.q", "attention.k", "attention.v", "gate", "head"),
            "grid grid grid grid",
        )
        | {"balance": "grid same grid same"},
        {},
    ),
    "pipeline": (
        dict.fromkeys(
            ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"),
            "own own own own",
        ),
        {f"{each}.*": "own" for each in ("layers.0", "layers.1", "layers.2", "layers.3", "norm")},
    ),
    "fully_sharded": (
        dict.fromkeys(
            (
                "blocks.0",
                "blocks.0.norm",
                "blocks.0.up",
                "blocks.0.down",
                "blocks.1",
                "blocks.1.norm",
                "blocks.1.up",
                "blocks.1.down",
                "out",
            ),
            _ROWS,
        ),
        {"*": "0"},
    ),
    "sharded_optimizer": (dict.fromkeys(("embed", "layers.0", "layers.1", "head"), _ROWS), {}),
    "precision": (dict.fromkeys(("up", "scores", "down"), _ROWS), {}),
}
#: The right program of an error that is not that of one in FP32.
REFERENCES = {"24": "bf16"}
#: One unit in the last place of BF16, in those of FP32.
BF16 = 1 << 16

Key = tuple[int, str, str, int]
"""The step, the kind of tensor, its name, and the call of its module within the step."""
Trace = dict[Key, np.ndarray[Any, Any]]


class Overwrite(torch.autograd.Function):
    """Another value with the same place in the graph."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        return given.view_as(given) if value is None else value.to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Taps:
    """The taps of a program: its trace on this rank.

    Args:
        program: its name.
        inputs: the inputs of modules in the reference, which overwrite those of this run, if given.
        perturb: by how many units in the last place to perturb the first input, or the embedding of tokens.
    """

    def __init__(self, program: str, model: nn.Module, inputs: Trace | None, perturb: int) -> None:
        self.trace: Trace = {}
        self._step = 0
        self._calls: dict[str, int] = {}
        self._inputs, self._perturb = inputs, perturb
        self._specs, _ = PROGRAMS_TAPPED[program]
        self._first = next(iter(self._specs))
        self._model = model
        for name, module in model.named_modules():
            short = name.removeprefix("module.")
            if short in self._specs:
                module.register_forward_pre_hook(self._before(short))
                module.register_forward_hook(self._after(short))

    def _note(self, kind: str, name: str, call: int, value: torch.Tensor) -> None:
        self.trace[self._step, kind, name, call] = local_of(value).float().numpy().copy()

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            given = args[0]
            if not given.is_floating_point():
                return None
            if self._perturb and name == self._first:
                given = perturbed(given, self._perturb)
            self._note("input", name, call, given)
            value = None
            whole = None if self._inputs is None else self._inputs.get((self._step, "input", name, call))
            if whole is not None:
                value = torch.from_numpy(part_of(whole, self._specs[name].split()[0]))
            given = Overwrite.apply(given, value)
            self._on_gradient("grad_input", name, call, given)
            return (given, *args[1:])

        return hook

    def _after(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], torch.Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
            call = self._calls[name]
            if self._perturb and name == self._first and not args[0].is_floating_point():
                output = perturbed(output, self._perturb)
            self._note("output", name, call, output)
            self._on_gradient("grad_output", name, call, output)
            return output

        return hook

    def _on_gradient(self, kind: str, name: str, call: int, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._note(kind, name, call, gradient))

    def before_update(self, *_: object) -> None:
        """Note the gradients that the optimizer is given."""
        for name, each in self._model.named_parameters():
            if each.grad is not None:
                self._note("gradient", name.removeprefix("module."), 0, each.grad)

    def end_step(self) -> None:
        """Note the parameters, and begin the next step."""
        for name, each in self._model.named_parameters():
            self._note("parameter", name.removeprefix("module."), 0, each)
        self._step += 1
        self._calls.clear()


def part_of(whole: np.ndarray[Any, Any], spec: str) -> np.ndarray[Any, Any]:
    """Return this rank's part of a tensor of the reference."""
    rank, size = common.rank(), common.size()
    if spec == "grid":
        part = np.array_split(whole, size // 2, 0)[rank // 2]
        return np.array_split(part, 2, 1)[rank % 2].copy()
    if spec in ("same", "own"):
        return whole.copy()
    return np.array_split(whole, size, 0 if spec == "batch" else int(spec))[rank].copy()


def train(rank: int, program: str, bug: str, inputs: Trace | None, perturb: int) -> Trace:
    """Train the edited program; return the trace of this rank."""
    script = importlib.import_module(f"tests.numerics.programs.{program}")
    model, optimizer = common.begin(script.build_model, script.build_optimizer, bug)
    taps = Taps(program, model, inputs, perturb)
    optimizer.register_step_pre_hook(taps.before_update)
    for number in range(STEPS):
        script.step(model, optimizer, number, bug)
        taps.end_step()
    return taps.trace


def spec_of(program: str, key: Key) -> str:
    """Return how a tensor lies on ranks."""
    modules, parameters = PROGRAMS_TAPPED[program]
    _, kind, name, _ = key
    kinds = ("input", "output", "grad_input", "grad_output")
    if kind in kinds:
        return modules[name].split()[kinds.index(kind)]
    return next(
        (spec for each, spec in parameters.items() if each in ("*", name, f"{name.rpartition('.')[0]}.*")), "same"
    )


def merged(spec: str, kind: str, parts: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return the whole tensor that ranks have parts of, or all of its copies."""
    if spec in ("same", "own"):
        return parts
    if spec == "sum":
        return [np.sum(parts, 0)]
    if spec == "grid":
        pairs = zip(parts[::2], parts[1::2], strict=True)
        whole = np.concatenate([np.concatenate(pair, 1) for pair in pairs], 0)
    else:
        whole = np.concatenate(parts, 0 if spec == "batch" else int(spec))
    return [whole / len(parts) if spec in ("batch", "grid") and kind.startswith("grad_") else whole]


def distance(value: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Return the norm of the difference, relative to that of the reference."""
    if value.shape != reference.shape:
        return float("inf")
    norm = float(np.linalg.norm(reference))
    return float(np.linalg.norm(value - reference)) / (norm or 1.0)


def over_threshold(program: str, traces: list[Trace], reference: Trace, moved: Trace, unit: float) -> Iterator[Key]:
    """Yield the tensors over their thresholds, in the order of the reference.

    Args:
        unit: that of the last place of the program's numbers.
    """
    for key, whole in reference.items():
        spec = spec_of(program, key)
        parts = [trace[key] for trace in traces if key in trace]
        if len(parts) < (1 if spec == "own" else len(traces)):
            yield key
            continue
        threshold = FACTOR * max(distance(moved[key], whole), unit)
        try:
            wholes = merged(spec, key[1], parts)
        except ValueError:  # the parts do not fit
            yield key
            continue
        if any(not distance(each, whole) <= threshold for each in wholes):
            yield key


@dataclass
class Traced:
    """What the procedure finds of an error.

    Attributes:
        bug: its number; "" is the right program.
        detected: whether any tensor is over its threshold.
        named: the first one, with the inputs of modules overwritten.
        is_found: whether that is the right module.
        seconds: of the runs of the edited program, without those of the reference.
        lines: of edits of the program.
    """

    bug: str
    program: str
    detected: bool
    named: str
    is_found: bool
    seconds: float
    lines: int


def trace(program: str, bug: str, folder: Path, references: dict[tuple[str, str], tuple[Trace, Trace]]) -> Traced:
    """Run the procedure on a program."""
    right = REFERENCES.get(bug, "")
    if (program, right) not in references:
        units = BF16 if program == "precision" else 1  # of "bf16", tensors have that precision themselves
        references[program, right] = train(0, program, right, None, 0), train(0, program, right, None, units)
    reference, moved = references[program, right]
    unit = torch.finfo(torch.bfloat16 if right == "bf16" or program == "precision" else torch.float32).eps
    began = time.monotonic()

    def found(inputs: Trace | None) -> Key | None:
        target = Path(tempfile.mkdtemp(dir=folder))
        traces = run_ranks(train, PROGRAMS[program], target, program, bug, inputs, 0)
        return next(over_threshold(program, traces, reference, moved, unit), None)

    detected = found(None)
    first = None if detected is None else found(reference)
    seconds = time.monotonic() - began
    modules, parameters = PROGRAMS_TAPPED[program]
    lines = LINES + len(modules) + len(parameters)
    named = "" if first is None else f"{first[1]} {first[2]}, step {first[0]}"
    right_names = {BUGS[bug].where, BUGS[bug].compared or BUGS[bug].where} if bug in BUGS else set[str]()
    is_found = first is not None and any(
        each in first[2] or each.rpartition(".")[0] == first[2] for each in right_names
    )
    return Traced(bug, program, detected is not None, named, is_found, seconds, lines)


def main() -> None:
    """Find all errors, or those that are named, by this procedure and by ours; print a table. Right programs first."""
    forked_ranks._LIMIT = 3600.0
    torch.set_num_threads(1)
    for program in PROGRAMS:
        importlib.import_module(f"tests.numerics.programs.{program}")
    todo = [("", program) for program in PROGRAMS] + [(number, bug.program) for number, bug in BUGS.items()]
    if sys.argv[1:]:
        todo = [each for each in todo if each[0] in sys.argv[1:] or each[1] in sys.argv[1:]]
    rows: list[tuple[Traced, silent.Found | None]] = []
    references: dict[tuple[str, str], tuple[Trace, Trace]] = {}
    recordings: dict[str, list[Path]] = {}
    shown = Table(box=box.SIMPLE_HEAD, title="TTrace's procedure by hand, and ours")
    for heading in ("bug", "program", "first over its threshold", "right module", "s", "edited lines", "ours", "s"):
        shown.add_column(heading)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, program in todo:
            each = trace(program, number, folder, references)
            ours = silent.find(number, folder, recordings) if number else None
            rows.append((each, ours))
            own = ("yes" if ours.is_found else "no", f"{ours.seconds:.1f}") if ours else ("", "")
            verdict = "yes" if each.is_found else "" if not number else "no"
            shown.add_row(
                number or "(right)", program, each.named, verdict, f"{each.seconds:.1f}", str(each.lines), *own
            )
            print(json.dumps([asdict(each), ours and asdict(ours)]), file=sys.stderr, flush=True)
    Console(width=200, highlight=False).print(shown)
    listed = [(each, ours) for each, ours in rows if ours and each.bug.isdigit()]
    alarms = sum(each.detected for each, _ in rows if not each.bug)
    edited = sum({each.program: each.lines for each, _ in rows}.values())
    print(
        f"TTrace's procedure: {sum(each.is_found for each, _ in listed)} of {len(listed)} numbered errors, "
        f"{sum(each.seconds for each, _ in listed):.0f} s, {edited} edited lines, {alarms} alarms\n"
        f"ours: {sum(ours.is_found for _, ours in listed)} of {len(listed)}, "
        f"{sum(ours.seconds for _, ours in listed):.0f} s, no edits"
    )


if __name__ == "__main__":
    main()
