"""Stragglers among real ranks with gloo: by PyTorch's Flight Recorder, by files of it, by traces of the profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debug import stragglers
from monarch_kernel.debugger.controller.stragglers import report_of, save
from tests.debugger.hang.matrix import Runner
from tests.waiting import patience

pytest.importorskip("torch")

FILE = "<late>"
PROGRAM = """
import time
def step():
    if rank == 1: time.sleep(0.05)
    dist.all_reduce(torch.ones(4))
pair = dist.new_group([0, 2])
for _ in range(8):
    dist.barrier()
    step()
for _ in range(3):
    if rank == 2: time.sleep(0.03)
    if rank != 1: dist.all_reduce(torch.ones(1), group=pair)
"""
BARRIER, REDUCE, PAIR = 8, 5, 12


@pytest.fixture
def ran(procs: Callable[..., Any], tmp_path: Path) -> Any:
    """A mesh on which the program has run."""
    mesh = procs(3, preload=("torch",))
    runners = mesh.spawn("runner", Runner, os.fspath(tmp_path / "store"), 3)
    runners.initialized.get(patience(120))
    runners.run.call(PROGRAM, FILE).get(patience(120))
    return mesh


def test_the_late_rank_and_its_line_are_named(ran: Any, tmp_path: Path) -> None:
    report = stragglers(ran)
    worst = report.found.stragglers[0]
    assert worst.rank == 1 and worst.last >= 8, report.text()
    assert worst.place is not None and (worst.place.file, worst.place.line) == (FILE, REDUCE)
    assert worst.after is not None and worst.after.line == BARRIER
    assert report.found.incomplete == 0 and report.notes == ()  # one host, so there is one clock
    by_line = {line.place.line: line for line in report.found.lines if line.place is not None}
    assert {line: share.count for line, share in by_line.items()} == {BARRIER: 8, REDUCE: 8, PAIR: 3}
    assert next(iter(by_line[REDUCE].last)) == 1 and by_line[REDUCE].last[1] == 8
    assert by_line[PAIR].last == {2: 3}  # of the two ranks of that group
    waited = {share.rank: share.waited for share in report.found.ranks}
    # Rank 1 is 0.05 s late each time; on a busy machine the others come a little late, too.
    assert waited[0] >= 8 * 0.04 and waited[2] >= 8 * 0.04 > waited[1]
    # The same from a file, in a process without any mesh.
    path = tmp_path / "records.json"
    save(report, str(path))
    line = [sys.executable, "-m", "monarch_kernel", "stragglers", str(path), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patience(60), check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(report.asdict()))
    # Fewer of each line, and some ranks only: without rank 2 no collective has all of its ranks.
    assert len(stragglers(ran, last=2).found.meetings) == 6
    assert stragglers(ran, ranks=[0, 1]).found.meetings == ()


TRACED = """
import time
from torch.profiler import ProfilerActivity, profile
store = dist.distributed_c10d._get_default_store()
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    for step in range(6):
        if rank == 0: store.set(f"first {{step}}", "there")  # one profiler may have begun long after the other
        if rank == 1: store.wait([f"first {{step}}"]); time.sleep(0.05)
        dist.all_reduce(torch.ones(4))
profiled.export_chrome_trace(os.path.join({folder!r}, f"{{rank}}.json.gz"))
"""


def test_traces_of_the_profiler_tell_the_same(procs: Callable[..., Any], tmp_path: Path) -> None:
    mesh = procs(2, preload=("torch",))
    runners = mesh.spawn("runner", Runner, os.fspath(tmp_path / "store"), 2)
    runners.run.call(TRACED.format(folder=os.fspath(tmp_path)), FILE).get(patience(120))
    report = report_of([os.fspath(tmp_path / f"{rank}.json.gz") for rank in range(2)])
    assert [each.rank for each in report.found.stragglers] == [1], report.text()
    assert report.found.measured and len(report.found.meetings) == 6


def test_a_mesh_without_collectives(procs: Callable[..., Any]) -> None:
    report = stragglers(procs(1))
    assert report.found.meetings == () and "no rank has called any" in str(report)
    with pytest.raises(ValueError, match="last is a number of at least 1, not 0"):
        stragglers(procs(1), last=0)
