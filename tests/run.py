"""Run the suite in batches of files, two of them at a time: ``python -m tests.run``, which is what ``make test`` calls.

Most tests wait: for a process to start, to die, to be missed. So two cores carry two batches. Each batch is a pytest
process of its own: a test that ends its process (``pytest-timeout`` does, when one hangs) takes its batch with it and
no other, and the report names the batch. Arguments go to every pytest.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: What the processes of the tests import: compiled once, where the environment says that imports leave no bytecode.
#: Otherwise each of thousands of processes compiles it, which takes as long as all the rest.
COMPILED = ["monarch_kernel", "workspace_sync", "bench", "tests"]
#: What each file took in the last run here (seconds); the longest begin first.
DURATIONS = ROOT / "build" / "tests" / "durations.json"
#: A batch takes about so long, if its files allow it (seconds): long enough to make up for the start of pytest, which
#: computes for two seconds.
BATCH = 60.0
#: What is assumed for a file that was never run here, by its size (seconds a byte).
GUESS = 1 / 2000
#: Files that take far longer than their size tells, on two idle cores (seconds).
LONG = {
    "transfer/test_verbs.py": 170,
    "launchers/test_ray.py": 95,
    "join/test_ray.py": 95,
    "test_chaos.py": 75,
    "launchers/test_slurm.py": 70,
    "debugger/dap/test_front_end.py": 70,
    "launchers/test_sky.py": 65,
    "tensor/test_sharded_matrix.py": 60,
    "join/test_frameworks.py": 55,
    "host/test_workers.py": 50,
    "actor/test_waits.py": 48,
    "notebooks/test_titan_notebook.py": 45,
    "launchers/test_kubernetes_meshes.py": 44,
    "transfer/test_tcp.py": 42,
    "join/test_reports.py": 42,
    "kept/test_kernels.py": 40,
    "launchers/test_kubernetes_sets.py": 40,
    "network/test_training.py": 37,
    "actor/test_healing.py": 34,
    "sync/reload/test_ranks.py": 32,
    "notebooks/test_tensors_notebook.py": 32,
    "network/test_deaths.py": 32,
    "join/test_meeting.py": 30,
    "notebooks/test_notebooks.py": 29,
    "notebooks/test_fault_tolerance_notebook.py": 29,
    "join/test_front_end.py": 25,
    "join/test_torchrun.py": 22,
    "join/test_chaos.py": 21,
}
#: A line of a test file that loads torch when the file is collected.
TORCH = re.compile(r"^(import torch|from torch|\w+ = pytest\.importorskip\(.torch)\b", re.MULTILINE)
#: What ``--quick`` runs: each part of the project in its everyday use, and all that needs no processes.
QUICK = [
    "actor/test_casting.py",
    "actor/test_meshes.py",
    "actor/test_failures.py",
    "actor/test_supervision.py",
    "actor/test_ports.py",
    "actor/test_references.py",
    "actor/test_bad_input.py",
    "actor/test_execution.py",
    "actor/test_deaths.py",
    "debugger/hang/test_judge.py",
    "debugger/stacks/test_merge.py",
    "debugger/stopping/test_stopping.py",
    "debugger/test_hub.py",
    "debugger/values",
    "debugger/dap/test_rank_session.py",
    "debugger/dap/test_gateway.py",
    "host/test_agent.py",
    "host/test_procs.py",
    "kernel/test_kernel_basics.py",
    "kernel/test_magics_arguments.py",
    "kernel/test_output_folding.py",
    "kernel/test_output_router.py",
    "mesh",
    "node/test_allowed.py",
    "node/test_keys.py",
    "node/test_link.py",
    "node/test_poller.py",
    "node/test_remote.py",
    "node/test_tcp.py",
    "node/test_trust.py",
    "security",
    "supervision",
    "sync/mounts/test_routes.py",
    "sync/scanning/test_rules.py",
    "sync/scanning/test_scan.py",
    "sync/store/test_switch.py",
    "sync/test_manifest.py",
    "sync/transfer/test_scheduler.py",
    "sync/transfer/test_sync.py",
    "test_errors.py",
    "test_imports.py",
    "test_output_protocol.py",
    "test_project.py",
    "transfer/test_memory.py",
]


@dataclass
class Batch:
    """Some files that one pytest runs, and what came out."""

    files: list[Path]
    took: float = 0.0
    computed: float = 0.0  # processor time of all its processes that were waited for (seconds)
    code: int = 0
    output: str = ""
    counts: Counter[str] = field(default_factory=Counter[str])
    again: list[str] = field(default_factory=list[str])  # what has to be run once more
    skipped: Counter[str] = field(default_factory=Counter[str])

    @property
    def name(self) -> str:
        first = self.files[0].relative_to(TESTS)
        return str(first) if len(self.files) == 1 else f"{first} and {len(self.files) - 1} more"


def main() -> int:
    """Run the batches; 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="what tells most, in under three minutes")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many batches at a time (2)")
    parser.add_argument("--again", action="store_true", help="run what failed once more, on its own and in plain sight")
    options, rest = parser.parse_known_args()
    began = time.monotonic()
    known: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    batches = divide(files_of(options.quick), known)
    for name in COMPILED:
        compileall.compile_dir(str(ROOT / name), quiet=2, workers=options.jobs)
    folder = Path(tempfile.mkdtemp(prefix="mkt-"))
    failed: list[Batch] = []
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            running = [pool.submit(run, batch, folder / str(n), rest, known) for n, batch in enumerate(batches)]
            for done in as_completed(running):
                batch = done.result()
                tell(batch)
                if batch.code:
                    failed.append(batch)
        save(known)
        if failed and options.again:
            failed = once_more(failed, folder, rest)
        return summary(batches, failed, time.monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files_of(quick: bool) -> list[Path]:
    """The test files, by folder."""
    if not quick:
        return sorted(TESTS.rglob("test_*.py"))
    found: list[Path] = []
    for name in QUICK:
        path = TESTS / name
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    missing = [str(path) for path in found if not path.exists()]
    if missing:
        raise SystemExit(f"tests/run.py: --quick names files that are not there: {', '.join(missing)}")
    return found


def divide(files: list[Path], known: dict[str, float]) -> list[Batch]:
    """Neighbouring files in batches, the longest batch first.

    Files that load torch have batches of their own: a process that has it loads it for the ranks of all its tests.
    """
    batches: list[tuple[float, Batch]] = []
    torch = {path: bool(TORCH.search(path.read_text())) for path in files}
    for path in sorted(files, key=lambda path: (path.parent, torch[path])):
        name = str(path.relative_to(TESTS))
        took = known.get(name, LONG.get(name, path.stat().st_size * GUESS))
        if batches:
            total, last = batches[-1]
            before = last.files[-1]
            if total + took <= BATCH and before.parent == path.parent and torch[before] == torch[path]:
                last.files.append(path)
                batches[-1] = total + took, last
                continue
        batches.append((took, Batch([path])))
    return [batch for _took, batch in sorted(batches, key=lambda entry: -entry[0])]


def run(batch: Batch, folder: Path, rest: list[str], known: dict[str, float]) -> Batch:
    """Run a batch in a process of its own, and read what came out."""
    folder.mkdir(mode=0o700)
    report = folder / "report.xml"
    options = [f"--junitxml={report}", f"--basetemp={folder / 'p'}", "-o", f"cache_dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *rest, *map(str, batch.files)]
    began = time.monotonic()
    # A group of its own: what a test that hangs has started ends with it.
    ran = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert ran.stdout is not None
        batch.output = ran.stdout.read()
        _pid, status, usage = os.wait4(ran.pid, 0)
        ran.returncode = os.waitstatus_to_exitcode(status)
        batch.computed = usage.ru_utime + usage.ru_stime
    finally:
        try:
            os.killpg(ran.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    batch.took = time.monotonic() - began
    batch.code = 0 if ran.returncode == 5 else ran.returncode  # 5: nothing in these files is for this machine
    if report.exists():
        read(batch, report, known)
    elif batch.code:
        batch.again = [str(path.relative_to(ROOT)) for path in batch.files]
        batch.counts["failed"] = 1  # the number of further failures is unknown
    return batch


def read(batch: Batch, report: Path, known: dict[str, float]) -> None:
    """Count, and note what each file took."""
    spent: dict[str, float] = {}
    by_module = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in batch.files}
    for case in ElementTree.parse(report).iter("testcase"):
        group = case.get("classname", "")
        module = next((name for name in by_module if group == name or group.startswith(f"{name}.")), "")
        if module:
            name = str(by_module[module].relative_to(TESTS))
            spent[name] = spent.get(name, 0.0) + float(case.get("time", 0))
        tags = {child.tag: child for child in case}
        if "failure" in tags or "error" in tags:
            batch.counts["failed"] += 1
            path = by_module.get(module, batch.files[0]).relative_to(ROOT)
            inner = group[len(module) :].lstrip(".").replace(".", "::")
            batch.again.append("::".join(filter(None, (str(path), inner, case.get("name", "")))))
        elif "skipped" in tags:
            batch.counts["skipped"] += 1
            batch.skipped[str(tags["skipped"].get("message"))] += 1
        else:
            batch.counts["passed"] += 1
    known.update({name: round(seconds, 1) for name, seconds in spent.items()})


def tell(batch: Batch) -> None:
    """One line of a batch that passed; all that pytest said of one that did not."""
    counts = ", ".join(f"{n} {what}" for what, n in sorted(batch.counts.items()))
    said = f"{'FAILED' if batch.code else 'ok':6} {batch.took:5.0f} s, computing {batch.computed:4.0f}"
    print(f"{said}  {batch.name}: {counts}", flush=True)
    if batch.code:
        print(batch.output, flush=True)


def once_more(failed: list[Batch], folder: Path, rest: list[str]) -> list[Batch]:
    """Run what failed again, alone; gives the batches that fail again."""
    print("\n*** Failed at first; once more, only those, one after the other:", flush=True)
    left: list[Batch] = []
    for n, batch in enumerate(failed):
        command = [sys.executable, "-m", "pytest", f"--basetemp={folder / f'again{n}'}", *rest, *batch.again]
        if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
            left.append(batch)
        else:
            batch.counts["passed"] += batch.counts.pop("failed", 0)
    return left


def save(known: dict[str, float]) -> None:
    """Remember what each file took."""
    DURATIONS.parent.mkdir(parents=True, exist_ok=True)
    DURATIONS.write_text(json.dumps(known, indent=0, sort_keys=True))


def summary(batches: list[Batch], failed: list[Batch], took: float) -> int:
    """What was skipped and why, what failed, and the sums."""
    total: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for batch in batches:
        total += batch.counts
        skipped += batch.skipped
    print()
    for reason, n in sorted(skipped.items()):
        print(f"skipped {n}: {reason.splitlines()[0][:200]}")
    for batch in failed:
        for name in batch.again:
            print(f"FAILED {name}")
    print(f"\n{took / 60:.1f} minutes")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
