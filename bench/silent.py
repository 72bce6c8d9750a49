"""Silent errors: which seeded ones are found by one command, and what rules cost.

``python -m bench.silent`` runs each program of ``tests/numerics/programs`` with each of its errors, once with rules and
once recorded and compared with the recording of one process, and prints the table. Ranks are forked from this process.
``--right N`` trains the right programs for N steps with all rules, and counts alarms. ``--runs N`` trains them from N
seeds, with rules and compared with one process. ``--cost`` measures rules on a transformer of 10 M parameters,
``--recording`` recordings of it, and ``--capture`` captures of its step on 4 ranks.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from bench.environments import ROOT, STATE
from monarch_kernel.numerics import capture, compare, record
from monarch_kernel.numerics.alignment import Run
from monarch_kernel.numerics.claims import BrokenRule
from monarch_kernel.numerics.comparison import Comparison, compare_runs
from monarch_kernel.numerics.recording import Recording
from monarch_kernel.numerics.rules import rules
from tests.numerics import ranks as forked_ranks
from tests.numerics.programs import BUGS, PROGRAMS, common
from tests.numerics.ranks import run_ranks

#: The steps of a run with a seeded error.
STEPS = 6


@dataclass
class Found:
    """What was found of a seeded error.

    Attributes:
        bug: its number.
        program: the program that has it.
        meant_for: the rule, or "compare".
        rules: the rules that broke; those that only possibly broke have a question mark.
        compared: the first difference from the reference: phase and module; or why there is none.
        is_found: whether rules or the comparison name the right rule or phase, and the right module.
        seconds: how long both took, with the program's own time.
    """

    bug: str
    program: str
    meant_for: str
    rules: str
    compared: str
    is_found: bool
    seconds: float


def train(
    rank: int, program: str, number: str, steps: int, record_in: str, perturb: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Train a program in this process: recorded in a folder if there is one, else with all rules.

    Args:
        seed: of the weights; batches differ, too.

    Returns the broken rules.
    """
    script = importlib.import_module(f"tests.numerics.programs.{program}")
    placements = getattr(script, "PLACEMENTS", None)
    model, optimizer = common.begin(script.build_model, script.build_optimizer, number, seed)
    broken: list[BrokenRule] = []
    with ExitStack() as stack:
        if record_in:
            folder = Path(record_in)
            options: dict[str, Any] = {"full": True, "perturb": perturb, "placements": placements, "folder": folder}
            stack.enter_context(record(folder.name, model, optimizer, steps=steps, **options))
        else:
            stack.enter_context(rules(every=1, placements=placements, report=broken.append))
        for step in range(steps):
            script.step(model, optimizer, 1000 * seed + step, number)
    return [asdict(each) for each in broken]


def find(number: str, folder: Path, references: dict[str, list[Path]]) -> Found:
    """Run a program with an error, with rules and recorded, and see what is found."""
    bug = BUGS[number]
    began = time.monotonic()
    broken = run_ranks(train, PROGRAMS[bug.program], _new(folder), bug.program, number, STEPS, "", 0)[0]
    by_rule = any(
        each["rule"] == bug.found_by and any(bug.where in name for name in each["names"] or ("",)) for each in broken
    )
    compared, by_comparison = compare_with_reference(number, folder, references)
    shown = ", ".join(dict.fromkeys(each["rule"] + "?" * (not each["sure"]) for each in broken))
    return Found(number, bug.program, bug.found_by, shown, compared, by_rule or by_comparison, time.monotonic() - began)


def compare_with_reference(number: str, folder: Path, references: dict[str, list[Path]]) -> tuple[str, bool]:
    """Record a program with an error, and compare it with one process.

    Returns the first difference, and whether it is the error, for certain.
    """
    bug = BUGS[number]
    where = bug.compared or bug.where
    if bug.program not in references:
        references[bug.program] = [folder / f"{bug.program}-{moved}" for moved in range(3)]
        for moved, target in enumerate(references[bug.program]):
            train(0, bug.program, "", STEPS, str(target), moved)
    reference, *noise = references[bug.program]
    target = folder / f"{bug.program}-bug-{number}"
    run_ranks(train, PROGRAMS[bug.program], _new(folder), bug.program, number, STEPS, str(target), 0)
    try:
        compared = compare(reference, target, noise=noise)
    except ValueError as error:
        return f"{type(error).__name__}: {str(error)[:80]}", bug.phase is not None and where in str(error)
    found = compared.first
    if found is None:
        return "equal", False
    name = f"{found.module}.{found.tensor}" if found.module else found.tensor
    unsure = "unsure: " * (compared.equal is None)
    return f"{unsure}{found.phase} {name}", not unsure and found.phase == bug.phase and where in name


def alarms(steps: int) -> dict[str, int]:
    """Train each right program with all rules on every step; returns how many verdicts there were."""
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for program, ranks in PROGRAMS.items():
            broken = run_ranks(train, ranks, _new(Path(folder)), program, "", steps, "", 0)[0]
            found[program] = len(broken)
            print(f"{program}: {steps} right steps, {found[program]} alarms", flush=True)
    return found


#: What of a recording is left, as if no more had been recorded: its kinds of tensors begin so.
PARTS = {"modules": ("input", "output", "grad_"), "optimizer": ("gradient", "reduced_", "parameter", "update")}


def false_alarms(runs: int, programs: Sequence[str]) -> dict[str, list[str]]:
    """Train each right program from several seeds, with rules and compared with one process; returns the verdicts.

    Each run has weights and batches of its own. A comparison that is unsure is listed, too. Where less is known (no
    modules, no optimizer, no noise, or the job itself, perturbed), it may be unsure, but must find no difference.
    """
    found: dict[str, list[str]] = {}
    for program in programs:
        found[program] = []
        for seed in range(runs):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                broken = run_ranks(train, PROGRAMS[program], _new(folder), program, "", STEPS, "", 0, seed)[0]
                found[program] += [f"seed {seed}, rules: {each}" for each in broken]
                targets = [folder / f"{program}-{moved}" for moved in range(3)]
                for moved, target in enumerate(targets):
                    train(0, program, "", STEPS, str(target), moved, seed)
                jobs = [folder / f"job-{moved}" for moved in range(2)]
                for moved, target in enumerate(jobs):
                    run_ranks(train, PROGRAMS[program], _new(folder), program, "", STEPS, str(target), moved, seed)
                compared = compare(targets[0], jobs[0], noise=targets[1:])
                if compared.equal is not True:
                    found[program].append(f"seed {seed}, compared: {compared.sentence}")
                for how, sentence in _accusations(targets, jobs).items():
                    found[program].append(f"seed {seed}, {how}: {sentence}")
        print(f"{program}: {runs} runs, {len(found[program])} alarms", *found[program], sep="\n  ", flush=True)
    return found


def _accusations(targets: Sequence[Path], jobs: Sequence[Path]) -> dict[str, str]:
    """Compare parts of what was recorded, and without noise; returns the sentences that say "different"."""
    read = {folder: Recording.open(folder) for folder in (*targets, *jobs)}
    found: dict[str, Comparison] = {"the job itself, perturbed": compare(*(read[each] for each in jobs))}
    for what, kinds in PARTS.items():
        reference, *noise, job, moved = (_run(each, kinds) for each in read.values())
        found |= {
            f"{what} alone": compare_runs(reference, job, noise),
            f"{what} alone, without noise": compare_runs(reference, job),
            f"{what} alone, the job as the reference": compare_runs(job, reference, [moved]),
        }
    return {how: each.sentence for how, each in found.items() if each.equal is False}


def _run(recording: Recording, kinds: tuple[str, ...]) -> Run:
    return Run.of((each for each in recording.entries() if each.kind.startswith(kinds)), recording.name)


def _new(folder: Path) -> Path:
    """Make a folder for the store of a process group."""
    return Path(tempfile.mkdtemp(dir=folder))


# -- cost ------------------------------------------------------------------------------------------------


#: On how many ranks of DDP each tool is measured.
RANKS = {"rules": 2, "recording": 1, "capture": 4}


def cost(tool: str, rounds: int, every: int) -> dict[str, float]:
    """Measure a tool on a transformer of 4 layers and 10 M parameters on ranks of DDP; returns figures by name."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[tool])]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "bench.silent", "--rank-of", tool, str(rounds), "--every", str(every)],
        capture_output=True,
        text=True,
        env=environ,
        timeout=1800,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"the measurement failed:\n{(done.stdout + done.stderr)[-2000:]}")
    figures: dict[str, float] = json.loads(lines[0])
    return figures


def measure_on_rank(tool: str, rounds: int, every: int) -> None:
    """Measure `cost` on a rank; rank 0 prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "rules": lambda: _cost_of_rules(rounds, every),
            "recording": lambda: _cost_of_recordings(rounds, Path(folder)),
            "capture": lambda: _cost_of_captures(rounds, Path(folder)),
        }[tool]()
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    gc.collect()  # DDP must not be the last to hold the group
    dist.destroy_process_group()


class _Training:
    """A transformer that trains on this rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.1, batch_first=True)
        self.net = torch.nn.Sequential(
            torch.nn.Embedding(4096, 384), torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(384, 4096)
        )
        self._model = DistributedDataParallel(self.net)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        torch.manual_seed(1 + dist.get_rank())

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(each.numel() for each in self.net.parameters())

    def step(self) -> None:
        """Train one step."""
        tokens = torch.randint(4096, (4, 129))
        self._optimizer.zero_grad()
        logits = self._model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self._optimizer.step()

    def timed(self, steps: int = 1) -> tuple[float, float]:
        """Train steps after all ranks have come here; returns the time, and the processor time of this rank."""
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - began, time.process_time() - computed


def _cost_of_recordings(rounds: int, folder: Path) -> dict[str, float]:
    """Record single steps in turns with others; returns processor times of a step, and sizes."""
    training = _Training()
    training.timed(2)
    kinds = {"modules": ("modules", "optimizer"), "ops": ("ops",)}
    plain: list[float] = []
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    figures: dict[str, float] = {"parameters": training.parameters}
    for _ in range(rounds):
        plain.append(training.timed()[1])
        for kind, what in kinds.items():
            with record(kind, folder=folder / kind, what=what, steps=1, replace=True):
                taken[kind].append(training.timed()[1])
            file = folder / kind / "rank_00000.jsonl"
            figures[f"{kind}_bytes"], figures[f"{kind}_lines"] = (
                file.stat().st_size,
                len(file.read_bytes().splitlines()),
            )
    figures["step_cpu_s"] = statistics.median(plain)
    for kind, times in taken.items():
        figures[f"{kind}_overhead"] = statistics.median(times) / figures["step_cpu_s"] - 1
    return figures


def _cost_of_captures(rounds: int, folder: Path) -> dict[str, float]:
    """Capture steps in turns with others; returns how long ranks are held, and processor times."""
    training = _Training()
    training.timed(2)
    shared: list[Any] = [str(folder)]
    dist.broadcast_object_list(shared)
    plain: list[tuple[float, float]] = []
    taken: list[tuple[float, float]] = []
    held: list[float] = []
    size = 0
    for number in range(rounds):
        plain.append(training.timed())
        with capture("step", folder=Path(shared[0]) / str(number)) as waiting:
            taken.append(training.timed())
        if waiting.state != "written":
            raise RuntimeError(f"nothing was captured: {waiting!r}")
        held.append(waiting.seconds)
        size = waiting.size
    more_cpu = statistics.median(each[1] for each in taken) - statistics.median(each[1] for each in plain)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (max(held), more_cpu))
    return {
        "parameters": training.parameters,
        "bytes": size,
        "step_s": statistics.median(each[0] for each in plain),
        "captured_step_s": statistics.median(each[0] for each in taken),
        "held_s_most": max(each[0] for each in found),
        "more_cpu_s_most": max(each[1] for each in found),
    }


def _cost_of_rules(rounds: int, every: int) -> dict[str, float]:
    """Train in turns of 2 * `every` steps without rules and with them; returns times, and processor times of rank 0.

    The processor time is of all threads. Where other programs compute, it varies less than the time.
    """
    training = _Training()

    def train() -> tuple[float, float]:
        return training.timed(2 * every)

    train()
    plain: list[tuple[float, float]] = []
    checked: list[tuple[float, float]] = []
    broken: list[object] = []
    for _ in range(rounds):
        plain.append(train())
        with rules(every=every, report=broken.append):
            checked.append(train())
    figures: dict[str, float] = {"parameters": training.parameters, "alarms": len(broken)}
    for at, name in enumerate(("", "cpu_")):
        ratios = [with_rules[at] / without[at] for with_rules, without in zip(checked, plain, strict=True)]
        figures |= {
            f"step_{name}s": statistics.median(each[at] for each in plain) / (2 * every),
            f"{name}overhead": statistics.median(ratios) - 1,
            f"{name}overhead_least": min(ratios) - 1,
            f"{name}overhead_most": max(ratios) - 1,
        }
    return figures


# -- the command --------------------------------------------------------------------------------------------


def table(found: Sequence[Found]) -> Table:
    """Return the table of seeded errors."""
    shown = Table(box=box.SIMPLE_HEAD, title="Seeded errors")
    for heading in ("bug", "program", "what", "for", "rules that broke", "first difference", "found"):
        shown.add_column(heading)
    for each in found:
        what = BUGS[each.bug].what
        is_found = "yes" if each.is_found else "no"
        shown.add_row(each.bug, each.program, what, each.meant_for, each.rules, each.compared, is_found)
    return shown


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m bench.silent", description=__doc__)
    parser.add_argument("bugs", nargs="*", metavar="BUG", help="seeded errors (default: all)")
    parser.add_argument("--right", type=int, metavar="N", help="train the right programs for N steps with rules")
    parser.add_argument("--runs", type=int, metavar="N", help="train and compare the right programs from N seeds")
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="measure what rules cost")
    parser.add_argument("--every", type=int, default=10, help="check rules on every Nth step, for --cost")
    parser.add_argument("--recording", type=int, metavar="ROUNDS", help="measure what recordings cost")
    parser.add_argument("--capture", type=int, metavar="ROUNDS", help="measure what captures cost")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/silent-TIME.json)")
    args = parser.parse_args(argv)
    if args.rank_of:
        measure_on_rank(args.rank_of[0], int(args.rank_of[1]), args.every)
        return
    figures: dict[str, object] = {}
    forked_ranks._LIMIT = 3600.0
    torch.set_num_threads(1)
    for program in PROGRAMS:  # once, before ranks are forked
        importlib.import_module(f"tests.numerics.programs.{program}")
    if args.right:
        figures["alarms"] = alarms(args.right)
    if args.runs:
        figures["false_alarms"] = false_alarms(args.runs, list(PROGRAMS))
    rounds = {"rules": args.cost, "recording": args.recording, "capture": args.capture}
    for tool, number in rounds.items():
        if number:
            figures[tool] = cost(tool, number, args.every)
            print(json.dumps({tool: figures[tool]}, indent=1))
    if args.bugs or not (args.right or args.runs or any(rounds.values())):
        unknown = [each for each in args.bugs if each not in BUGS]
        if unknown:
            parser.error(f"there is no seeded error {', '.join(unknown)}; there are {', '.join(BUGS)}")
        found: list[Found] = []
        with tempfile.TemporaryDirectory() as folder:
            references: dict[str, list[Path]] = {}
            for number in args.bugs or BUGS:
                found.append(find(number, Path(folder), references))
                print(f"{number}: {'found' if found[-1].is_found else 'not found'}", file=sys.stderr, flush=True)
        Console(width=200, highlight=False).print(table(found))
        listed = [each for each in found if each.bug.isdigit()]
        print(f"{sum(each.is_found for each in listed)} of {len(listed)} numbered errors found")
        figures["bugs"] = [asdict(each) for each in found]
    target = args.json or STATE / "results" / f"silent-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
