"""Silent errors: which seeded ones are found by one command, and what rules cost.

``python -m bench.silent`` runs each program of ``tests/numerics/programs`` under torchrun with each of its errors, once
with rules and once recorded and compared with the recording of one process, and prints the table. ``--right N`` trains
the right programs for N steps with all rules, and counts alarms. ``--cost`` measures rules on a transformer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.environments import ROOT, STATE
from tests.numerics.programs import BUGS, FOLDER, PROGRAMS

#: The limit for one run of a program (seconds).
LIMIT = 300.0
_BROKEN = re.compile(
    r"^Rule (\w+) (possibly )?broken at step (\d+), ranks? [\d, ]+(?: \(([^)]*)\))?: (.*)$", re.MULTILINE
)


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


def run(program: str, ranks: int, *args: str) -> str:
    """Run a program, under torchrun if it has several ranks; returns its output.

    Raises RuntimeError with the end of the output if it fails.
    """
    script = [str(FOLDER / f"{program}.py"), *args]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, *script], capture_output=True, text=True, env=environ, timeout=LIMIT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(args)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


def find(number: str, folder: Path, references: dict[str, list[Path]]) -> Found:
    """Run a program with an error, with rules and recorded, and see what is found."""
    bug = BUGS[number]
    ranks = PROGRAMS[bug.program]
    began = time.monotonic()
    output = run(bug.program, ranks, "--bug", number, "--rules", "all")
    broken = [(rule, bool(unsure), text) for rule, unsure, _, _, text in _BROKEN.findall(output)]
    by_rule = any(rule == bug.found_by and bug.where in text for rule, _, text in broken)
    compared, by_comparison = compare_with_reference(number, folder, references)
    rules = ", ".join(dict.fromkeys(rule + "?" * unsure for rule, unsure, _ in broken))
    return Found(number, bug.program, bug.found_by, rules, compared, by_rule or by_comparison, time.monotonic() - began)


def compare_with_reference(number: str, folder: Path, references: dict[str, list[Path]]) -> tuple[str, bool]:
    """Record a program with an error, and compare it with one process; returns the first difference, and if it is it."""
    from monarch_kernel.numerics import compare

    bug = BUGS[number]
    if bug.program not in references:
        references[bug.program] = [folder / f"{bug.program}-{moved}" for moved in range(3)]
        for moved, target in enumerate(references[bug.program]):
            run(bug.program, 1, "--record", str(target), "--perturb", str(moved))
    reference, *noise = references[bug.program]
    target = folder / f"{bug.program}-bug-{number}"
    run(bug.program, PROGRAMS[bug.program], "--bug", number, "--record", str(target))
    try:
        found = compare(reference, target, noise=noise).first
    except ValueError as error:
        return f"{type(error).__name__}: {str(error)[:80]}", bug.phase is not None and bug.where in str(error)
    if found is None:
        return "equal", False
    name = f"{found.module}.{found.tensor}" if found.module else found.tensor
    return f"{found.phase} {name}", found.phase == bug.phase and bug.where in name


def alarms(steps: int) -> dict[str, int]:
    """Train each right program with all rules on every step; returns how many verdicts there were."""
    found: dict[str, int] = {}
    for program, ranks in PROGRAMS.items():
        output = run(program, ranks, "--rules", "all", "--steps", str(steps))
        found[program] = len(_BROKEN.findall(output))
        print(f"{program}: {steps} right steps, {found[program]} alarms", flush=True)
    return found


# -- cost ------------------------------------------------------------------------------------------------


def cost(rounds: int, every: int) -> dict[str, float]:
    """Measure rules on a transformer of 4 layers and 10 M parameters on 2 ranks of DDP; returns figures by name."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.silent"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--rank-of-cost", str(rounds), "--every", str(every)],
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


def measure_on_rank(rounds: int, every: int) -> None:
    """Train in turns of 2 * `every` steps without rules and with them; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from monarch_kernel.numerics.rules import rules

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.1, batch_first=True)
    net = torch.nn.Sequential(
        torch.nn.Embedding(4096, 384), torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(384, 4096)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + dist.get_rank())

    def step() -> float:
        tokens = torch.randint(4096, (4, 129))
        began = time.perf_counter()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        return time.perf_counter() - began

    step()
    plain: list[float] = []
    watched: list[float] = []
    broken: list[object] = []
    for _ in range(rounds):
        plain.append(sum(step() for _ in range(2 * every)))
        dist.barrier()
        with rules(every=every, report=broken.append):
            watched.append(sum(step() for _ in range(2 * every)))
        dist.barrier()
    if dist.get_rank() == 0:
        ratios = [with_rules / without for with_rules, without in zip(watched, plain, strict=True)]
        figures = {
            "parameters": sum(each.numel() for each in net.parameters()),
            "step_s": statistics.median(plain) / (2 * every),
            "overhead": statistics.median(ratios) - 1,
            "overhead_least": min(ratios) - 1,
            "overhead_most": max(ratios) - 1,
            "alarms": len(broken),
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


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
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="measure what rules cost")
    parser.add_argument("--every", type=int, default=10, help="check rules on every Nth step, for --cost")
    parser.add_argument("--rank-of-cost", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the figures go (default: .bench/results/silent-TIME.json)")
    args = parser.parse_args(argv)
    if args.rank_of_cost:
        measure_on_rank(args.rank_of_cost, args.every)
        return
    figures: dict[str, object] = {}
    if args.right:
        figures["alarms"] = alarms(args.right)
    if args.cost:
        figures["cost"] = cost(args.cost, args.every)
        print(json.dumps(figures["cost"], indent=1))
    if args.bugs or not (args.right or args.cost):
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
