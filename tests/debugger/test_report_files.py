"""Files of reports may come from anybody: what they say of sizes takes no memory, and what they name is not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.debugger.reports.job_report import load

#: The whole report is shown in two GiB of address space.
SHOW = """
import resource, sys
from monarch_kernel.debugger.reports.job_report import ReportError, load
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    report = load(sys.argv[1])
except ReportError as error:
    print("refused:", error)
else:
    print(len(report.text()), len(report.page()), report.stacks.extent.nelements)
"""


def plain(**changes: Any) -> dict[str, Any]:
    """A small report, as its JSON has it; ``changes`` are of the stacks."""
    frame = [["/code/train.py", 7, "train", "user"], "step()", [0, 4], 1, 0]
    stacks = {
        "mesh": "train",
        "dimensions": {"hosts": 2, "gpus": 2},
        "ranks": [0, 1, 2, 3],
        "distinct": [["thread", "MainThread", [frame]]],
        "snapshots": {"0": [11, [0]], "1": [12, [0, 0]]},
        "late": {"2": "it did not answer"},
        "dead": {},
        "unread": {"3": "no"},
        "hosts": {"0": "a", "1": "a"},
        "seconds": 0.1,
        "noun": "job",
        "idle_note": "idle",
    }
    job = {"name": "train", "launch": "", "program": "python train.py", "world": 4, "since": 1.7e9, "made": 1.7e9}
    ranks = [{"rank": 0, "host": "a", "pid": 11, "answers": True}]
    return {
        "form": "monarch-report-1",
        "version": "1",
        "job": {**job, "host": "a", "reason": "it was asked for", "ranks": ranks, "versions": {"torch": {"2": [0]}}},
        "verdict": {"kind": "nothing", "culprits": [], "sentence": "No rank waits."},
        "stacks": {**stacks, **changes},
        "threads": stacks,
        "stragglers": None,
        "notes": [],
    }


def shown(tmp_path: Path, report: dict[str, Any]) -> str:
    """What comes of opening it."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    done = subprocess.run([sys.executable, "-c", SHOW, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("size", [10**7, 10**9, 10**18])
def test_a_report_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    assert shown(tmp_path, plain(dimensions={"a": size, "b": 4})).split()[-1] == str(size * 4)
    assert shown(tmp_path, plain(ranks=[], dimensions={"a": size}, snapshots={}, late={}, unread={}, hosts={}))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dimensions": {"a": 3}}, "ranks 0 to 3 of 3"),
        ({"ranks": [-1]}, "ranks -1 to 3 of 4"),
        ({"dimensions": {"a": 0}}, "must have a size of at least 1"),
        ({"snapshots": {"0": [1, [7]]}}, "damaged"),
        (
            {"distinct": [["thread", "", [[["f", 1, "g", "user"]]] * 1000]], "snapshots": {"0": [1, [0] * 50_000]}},
            "frames",
        ),
    ],
)
def test_what_is_no_report(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    answer = shown(tmp_path, plain(**changes))
    assert answer.startswith("refused:") and said in answer


@pytest.mark.parametrize("moment", [1e18, -1e300, 1e300])
def test_a_time_that_no_calendar_has(tmp_path: Path, moment: float) -> None:
    report = plain()
    report["job"]["made"] = report["job"]["since"] = moment
    assert shown(tmp_path, report).startswith("refused:")


@pytest.mark.parametrize("kind", ["pipe", "pipe.py", "/dev/zero", "with a NUL", "a file of this user"])
def test_no_file_that_a_report_names_is_read_but_source(tmp_path: Path, kind: str) -> None:
    file = str(tmp_path / kind.replace(" ", "-")) if not kind.startswith("/") else kind
    if kind.startswith("pipe"):
        os.mkfifo(file)
    elif kind == "with a NUL":
        file += "\0.py"
    elif kind == "a file of this user":
        Path(file).write_text("first line\nsecret\n")
    lines = {"distinct": [["thread", "", [[[file, 1, "train", "user"], "first line", [0, 5], 1, 0]]]]}
    assert shown(tmp_path, plain(**lines))
    report = tmp_path / "report.json"
    assert "secret" not in load(report).page()


def test_source_that_is_as_the_report_has_it_is_shown_around_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("first line\nsecond line\n")
    frame = [[str(tmp_path / "train.py"), 1, "train", "user"], "first line", [0, 5], 1, 0]
    shown(tmp_path, plain(distinct=[["thread", "", [frame]]]))
    assert "second line" in load(tmp_path / "report.json").page()
