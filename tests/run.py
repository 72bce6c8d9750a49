"""Run the suite in batches of files, several at a time: ``python -m tests.run``, which is what ``make test`` calls.

There are two lanes: ``--engines`` (``make test-engines``) has the tests that need another product's engine, a virtual
machine or a long time, and the plain one all others.

Each batch is a pytest of its own, forked from a process that has loaded pytest (``tests/warm.py``): a test that ends
its process (``pytest-timeout`` does, when one hangs) takes its batch with it and no other, and the report names the
batch. Most tests wait for processes: where two batches leave the cores idle, others begin. Names of test files run
these alone; other arguments go to every pytest.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import astuple, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.reach import reached
from tests.waiting import measured
from tests.warm import Ended, Warm

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: What the processes of the tests import: compiled once, where the environment says that imports leave no bytecode.
#: Otherwise each of thousands of processes compiles it, which takes as long as all the rest.
COMPILED = ["monarch_kernel", "workspace_sync", "bench", "tests"]
#: What each file took when it was last recorded (``--record``), and the commit at which all tests of a lane passed.
DURATIONS = TESTS / "durations.json"
#: A batch computes about so long, if its files allow it (seconds): its files share a runtime and its templates, and
#: each that loads torch does so for 2 s.
BATCH = 30.0
#: No file outside the lane of engines may compute longer (seconds).
LIMIT = 20.0
#: What `_computation` takes where that limit was set (seconds of processor time). Records are in its seconds.
COMPUTATION = 0.015
#: What is assumed for a file that was never recorded, by its size (seconds a byte).
GUESS = 1 / 2000
#: How busy the cores may be when one more batch begins than ``--jobs``, and how many times as many there may be.
IDLE, MOST = 0.9, 3
#: Needs another product's engine, a browser, a virtual machine, or jobs of torchrun and other launchers; or trains or
#: injects faults for a long time: the lane of ``--engines``. Folders, and files.
ENGINES = [
    "actor/test_waits.py",
    "browser",
    "debugger/dap/test_front_end.py",
    "debugger/outside/test_look_slurm.py",
    "engines",
    "host/test_workers.py",
    "hub",
    "installs",
    "join/test_chaos.py",
    "join/test_elastic.py",
    "join/test_frameworks.py",
    "join/test_front_end.py",
    "join/test_holding.py",
    "join/test_launchers.py",
    "join/test_meeting.py",
    "join/test_parallel.py",
    "join/test_places.py",
    "join/test_ray.py",
    "join/test_remote.py",
    "join/test_reports.py",
    "join/test_stragglers.py",
    "join/test_tools.py",
    "join/test_torchrun.py",
    "join/test_unprepared.py",
    "kept/test_kernels.py",
    "kernel/test_training.py",
    "launchers/test_kubernetes.py",
    "launchers/test_kubernetes_meshes.py",
    "launchers/test_kubernetes_sets.py",
    "launchers/test_lightning.py",
    "launchers/test_ray.py",
    "launchers/test_sky.py",
    "launchers/test_slurm.py",
    "launchers/test_ssh.py",
    "network/test_training.py",
    "notebooks/test_debugging_notebook.py",
    "notebooks/test_fault_tolerance_notebook.py",
    "notebooks/test_join_notebook.py",
    "notebooks/test_lightning_notebook.py",
    "notebooks/test_marimo_notebook.py",
    "notebooks/test_notebooks.py",
    "notebooks/test_tensors_notebook.py",
    "notebooks/test_titan_notebook.py",
    "notebooks/test_torchft_notebook.py",
    "numerics/test_capture_magics.py",
    "numerics/test_reference.py",
    "numerics/test_replay.py",
    "numerics/test_mesh_rules.py",
    "numerics/test_programs.py",
    "numerics/test_reference.py",
    "numerics/test_titan.py",
    "parity/test_parity.py",
    "spmd/test_process_groups.py",
    "sync/transfer/test_losses.py",
    "tensor/test_healing.py",
    "tensor/test_pipes.py",
    "tensor/test_repeated_operations.py",
    "tensor/test_sharded_matrix.py",
    "test_chaos.py",
    "transfer/test_verbs.py",
]
#: Files whose names begin so share what takes long to start (a browser with JupyterLab, an API server of Kubernetes):
#: one batch, however long it computes, unless its tests take longer than `LONGEST`.
TOGETHER = ("browser/", "launchers/test_kubernetes")
#: What the tests of a batch of several files may take (seconds): a longer one could end alone, long after all others.
LONGEST = 200.0
#: What one test may take on an idle machine (seconds); by hand, it is as pyproject.toml says.
TIMEOUT = 180.0
#: A line of a test file that loads torch when the file is collected.
TORCH = re.compile(r"^(import torch|from torch|(\w+ = )?pytest\.importorskip\(.torch)\b", re.MULTILINE)
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
class Took:
    """What a file took (seconds), and how many of its tests were skipped: what they tell is not known."""

    wall: float
    computed: float
    skipped: int = 0


#: A file that was never recorded.
UNKNOWN = Took(0, 0, 1)


@dataclass
class Record:
    """What is kept of earlier runs.

    Attributes:
        passed: the commit at which all tests of each lane passed.
        files: what each test file took.
    """

    passed: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, Took] = field(default_factory=dict[str, Took])

    @classmethod
    def read(cls) -> Record:
        """What was kept; nothing, if there is none."""
        if not DURATIONS.exists():
            return cls()
        data = json.loads(DURATIONS.read_text())
        return cls(data["passed"], {name: Took(*took) for name, took in data["files"].items()})

    def write(self) -> None:
        """Keep it: a file a line, without those that are gone."""
        files = {name: took for name, took in sorted(self.files.items()) if (TESTS / name).exists()}
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(astuple(took))}" for name, took in files.items())
        DURATIONS.write_text(f'{{"passed": {json.dumps(self.passed, sort_keys=True)},\n"files": {{\n{rows}\n}}}}\n')


@dataclass
class Batch:
    """Some files that one pytest runs, and what came out."""

    files: list[Path]
    torch: bool
    output: str = ""
    failed: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    unrun: Counter[Path] = field(default_factory=Counter[Path])  # its skipped tests, by file
    walls: dict[Path, float] = field(default_factory=dict[Path, float])  # the time of its tests, by file (seconds)

    @property
    def name(self) -> str:
        first = self.files[0].relative_to(TESTS)
        return str(first) if len(self.files) == 1 else f"{first} and {len(self.files) - 1} more"


def main() -> int:
    """Run the batches; 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="what tells most, in under three minutes")
    which.add_argument(
        "--engines", action="store_true", help="what needs another product's engine or a virtual machine"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many batches at a time, at least (2)")
    parser.add_argument("--changed", action="store_true", help="only what changes since the recorded run can reach")
    parser.add_argument(
        "--record", action="store_true", help=f"each file alone; keeps what it took in {DURATIONS.name}"
    )
    parser.add_argument("--list", action="store_true", help="print the files that would run, and run none")
    options, rest = parser.parse_known_args()
    began = time.monotonic()
    lane = "quick" if options.quick else "engines" if options.engines else "test"
    named = [TESTS.parent / word for word in rest if word.endswith(".py")]
    rest = [word for word in rest if not word.endswith(".py")]
    record, files = Record.read(), named or files_of(lane)
    if options.changed:
        files = only_reached(lane, files, record)
        if not files:
            return 0
    if options.list:
        print(*(path.relative_to(ROOT) for path in files), sep="\n")
        return 0
    if not named and lane != "quick":
        subprocess.run([TESTS / "prepare.sh", lane], stdin=subprocess.DEVNULL)
    batches = divide(files, record)
    for name in COMPILED:
        compileall.compile_dir(str(ROOT / name), quiet=2, workers=options.jobs)
    folder = Path(tempfile.mkdtemp(prefix="mkt-"))
    try:
        passed = Suite(batches, folder, rest, record if options.record else None).run(options.jobs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.record:
        if passed and not named and (commit := clean_commit()):
            record.passed[lane] = commit
        record.write()
    return summary(batches, time.monotonic() - began)


def is_engines(path: Path) -> bool:
    """Whether a test file is in the lane of ``--engines``."""
    name = str(path.relative_to(TESTS))
    return any(name == entry or name.startswith(f"{entry}/") for entry in ENGINES)


def files_of(lane: str) -> list[Path]:
    """The test files of a lane, by folder."""
    if lane != "quick":
        return [path for path in sorted(TESTS.rglob("test_*.py")) if is_engines(path) == (lane == "engines")]
    found: list[Path] = []
    for name in QUICK:
        path = TESTS / name
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    missing = [str(path) for path in found if not path.exists()]
    if missing:
        raise SystemExit(f"tests/run.py: --quick names files that are not there: {', '.join(missing)}")
    return found


def only_reached(lane: str, files: list[Path], record: Record) -> list[Path]:
    """The files that a change since the recorded commit can reach, and those of which tests were skipped then.

    It says which are left out, or why none is.
    """
    commit = record.passed.get(lane)
    changed = changed_since(commit) if commit else None
    if changed is None:
        print(f"Lane {lane}: everything runs; there is no earlier commit at which all of it passed.", flush=True)
        return files
    unknown = {path for path in files if record.files.get(str(path.relative_to(TESTS)), UNKNOWN).skipped}
    reach = {*reached(files, changed), *unknown}
    found = [path for path in files if path in reach]
    for path in files:
        if path not in found:
            print(f"not reached, and so skipped: {path.relative_to(ROOT)}")
    what = f"{len(found)} of {len(files)} files run" if found else "SKIPPED, all of it"
    print(
        f"Lane {lane}: {what}. All passed at {commit}; changed since: {' '.join(sorted(changed)) or 'nothing'}",
        flush=True,
    )
    return found


def changed_since(commit: str) -> set[str] | None:
    """Files that differ from a commit before this one, or are new; None if that cannot be known."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return [name for name in done.stdout.split("\0") if name]

    try:
        git("merge-base", "--is-ancestor", commit, "HEAD")
        return {
            *git("diff", "--name-only", "--no-renames", "-z", commit),
            *git("ls-files", "--others", "--exclude-standard", "-z"),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def clean_commit() -> str | None:
    """The commit that is checked out, if nothing differs from it but the record."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    differs = changed_since(head.stdout.strip())
    return head.stdout.strip() if differs is not None and differs <= {str(DURATIONS.relative_to(ROOT))} else None


def divide(files: list[Path], record: Record) -> list[Batch]:
    """Neighbouring files in batches, the longest batch first.

    Files that load torch have batches of their own: a process that has it loads it for the ranks of all its tests. So
    has a file that was never recorded, but if it is one of those that are run together.
    """
    batches: list[tuple[float, float, Batch]] = []  # the wall-clock time that it is about to take, and the computing
    torch = {path: bool(TORCH.search(path.read_text())) for path in files}
    open_one, together = False, ""
    for path in sorted(files, key=lambda path: (path.parent, torch[path])):
        name = str(path.relative_to(TESTS))
        took = record.files.get(name)
        guess = took or Took(path.stat().st_size * GUESS, BATCH)
        before, together = together, next(filter(name.startswith, TOGETHER), "")
        if batches:
            wall, computed, last = batches[-1]
            fits = open_one and took and computed + guess.computed <= BATCH and last.files[-1].parent == path.parent
            ends = wall + guess.wall <= LONGEST
            if together == before and last.torch == torch[path] and ends and (together or fits):
                last.files.append(path)
                batches[-1] = wall + guess.wall, computed + guess.computed, last
                continue
        batches.append((guess.wall, guess.computed, Batch([path], torch[path])))
        open_one = took is not None
    return [batch for _wall, _computed, batch in sorted(batches, key=lambda entry: -entry[0])]


class Suite:
    """A run of some batches."""

    def __init__(self, batches: list[Batch], folder: Path, rest: list[str], record: Record | None) -> None:
        self._batches = batches
        self._folder = folder
        self._rest = rest
        self._record = record
        self._started = 0
        self._running = 0
        self._cores = Cores()

    def run(self, jobs: int) -> bool:
        """Run them all, so many at a time at least; returns whether all passed."""
        # Both are forked while this process has loaded little, and has no thread.
        servers = {torch: Warm(torch) for torch in sorted({batch.torch for batch in self._batches})}
        try:
            while self._running or self._started < len(self._batches):
                while self._started < len(self._batches) and self._may_start(jobs):
                    self._start(servers)
                ready, _, _ = select.select(list(servers.values()), [], [], 1.0)
                for server in ready:
                    for ended in server.ended():
                        self._running -= 1
                        self._finish(self._batches[ended.number], ended)
        finally:
            for server in servers.values():
                server.close()
        return not any(batch.failed for batch in self._batches)

    def _may_start(self, jobs: int) -> bool:
        return self._running < jobs or (self._running < jobs * MOST and self._cores.busy() < IDLE)

    def _start(self, servers: dict[bool, Warm]) -> None:
        number, batch = self._started, self._batches[self._started]
        self._started += 1
        self._running += 1
        self._cores.begin()
        folder = self._folder / str(number)
        folder.mkdir(mode=0o700)
        options = [
            f"--junitxml={folder / 'report.xml'}",
            f"--basetemp={folder / 'p'}",
            f"--timeout={TIMEOUT * measured():.0f}",
            "-o",
            f"cache_dir={folder / 'cache'}",
        ]
        servers[batch.torch].start(number, ["-q", *options, *self._rest, *map(str, batch.files)], folder)

    def _finish(self, batch: Batch, ended: Ended) -> None:
        folder = self._folder / str(ended.number)
        batch.output = (folder / "output").read_text(errors="replace")
        if (folder / "report.xml").exists():
            read(batch, folder / "report.xml")
        if ended.code not in (0, 5) and not batch.failed:  # 5: nothing in these files is for this machine
            batch.failed = [f"{path.relative_to(ROOT)} (pytest ended with {ended.code})" for path in batch.files]
            batch.counts["failed"] += 1  # the number of further failures is unknown
        if ended.left:
            batch.failed.append(f"{batch.name} left processes behind: {'; '.join(ended.left)}")
        if self._record is not None and ended.code == 0:
            slower = _computation() / COMPUTATION
            for path, each in shares(batch, ended, folder).items():
                each.computed = round(each.computed / slower, 1)
                self._record.files[str(path.relative_to(TESTS))] = each
            self._record.write()
        tell(batch, ended)


def _computation() -> float:
    """The processor time of a fixed computation: more on a slower machine, and while its cores are shared."""

    def once() -> float:
        began, table = time.process_time(), dict[int, int]()
        for at in range(200_000):
            table[at & 1023] = at * 7 ^ at >> 3
        return time.process_time() - began

    return statistics.median(once() for _ in range(5))


def shares(batch: Batch, ended: Ended, folder: Path) -> dict[Path, Took]:
    """What each file of a batch took: the processor time that it told of, and its part of what nobody waited for."""
    if not (folder / "computed").exists():
        return {}
    told: dict[Path, float] = {}
    before = 0.0
    for line in (folder / "computed").read_text().splitlines():
        name, _, seconds = line.rpartition(" ")
        told[Path(name)] = max(0.0, float(seconds) - before)
        before = max(before, float(seconds))
    return {
        path: Took(round(batch.walls.get(path, 0.0), 1), round(ended.computed * seconds / before, 1), batch.unrun[path])
        for path, seconds in told.items()
    }


class Cores:
    """How busy this machine's processors are."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from now on: what begins needs a moment until it computes."""
        self._since, self._idle = time.monotonic(), self._now()

    def busy(self) -> float:
        """The part of the last second or two in which they computed; 1.0 until a batch has run for so long."""
        passed = time.monotonic() - self._since
        if passed < 1.0:
            return 1.0
        busy = 1.0 - (self._now() - self._idle) / (passed * (os.cpu_count() or 1))
        if passed > 2.0:
            self.begin()
        return busy

    def _now(self) -> float:
        idle, waiting = Path("/proc/stat").read_text().split(None, 6)[4:6]
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


def read(batch: Batch, report: Path) -> None:
    """Count what a batch reports."""
    by_module = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in batch.files}
    for case in ElementTree.parse(report).iter("testcase"):
        group = case.get("classname", "")
        module = next((name for name in by_module if group == name or group.startswith(f"{name}.")), "")
        path = by_module.get(module, batch.files[0])
        batch.walls[path] = batch.walls.get(path, 0.0) + float(case.get("time", 0))
        tags = {child.tag: child for child in case}
        if "failure" in tags or "error" in tags:
            batch.counts["failed"] += 1
            inner = group[len(module) :].lstrip(".").replace(".", "::")
            batch.failed.append("::".join(filter(None, (str(path.relative_to(ROOT)), inner, case.get("name", "")))))
        elif "skipped" in tags:
            batch.counts["skipped"] += 1
            batch.unrun[path] += 1
            batch.skipped[str(tags["skipped"].get("message"))] += 1
        else:
            batch.counts["passed"] += 1


def tell(batch: Batch, ended: Ended) -> None:
    """One line of a batch that passed; all that pytest said of one that did not."""
    counts = ", ".join(f"{n} {what}" for what, n in sorted(batch.counts.items()))
    said = f"{'FAILED' if batch.failed else 'ok':6} {ended.took:5.0f} s, computing {ended.computed:4.0f}"
    print(f"{said}  {batch.name}: {counts}", flush=True)
    if batch.failed:
        print(batch.output, flush=True)


def summary(batches: list[Batch], took: float) -> int:
    """What was skipped and why, what failed, and the sums."""
    total: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for batch in batches:
        total += batch.counts
        skipped += batch.skipped
    print()
    for reason, n in sorted(skipped.items()):
        print(f"skipped {n}: {reason.splitlines()[0][:200]}")
    failed = [name for batch in batches for name in batch.failed]
    for name in failed:
        print(f"FAILED {name}")
    print(f"\n{took / 60:.1f} minutes")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
