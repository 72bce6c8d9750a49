"""A program that starts its ranks itself, run by ``python -m monarch_kernel.join``: these can be joined, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from monarch_kernel.engines.join.own_ranks import _FOLDER
from tests.join.conftest import ROOT
from tests.waiting import patience

#: Starts itself once more as rank 1, as Lightning does, and a tool.
PROGRAM = """
import json, os, subprocess, sys, threading

def told():
    return {
        "prepared": "monarch-join" in [each.name for each in threading.enumerate()],
        "path": [each for each in sys.path if "at_start" in each],
        "variable": os.environ.get("PYTHONPATH", ""),
        "customized": getattr(sys, "customized", 0),
        "hold": os.environ.get("MONARCH_KERNEL_JOIN_HOLD", ""),
    }

seen = [told()]
if "RANK" not in os.environ and "LOCAL_RANK" not in os.environ:
    launched = {**os.environ, "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    rank = subprocess.check_output([sys.executable, os.path.abspath(sys.argv[0])], env=launched, text=True)
    code = "import threading; print('monarch-join' in [each.name for each in threading.enumerate()])"
    tool = subprocess.check_output([sys.executable, "-c", code], text=True)
    seen += [json.loads(rank), {"tool": tool}]
print(json.dumps(seen[0] if "LOCAL_RANK" in os.environ else seen))
"""


def run(folder: Path, *options: str, **variables: str) -> list[dict[str, object]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment.pop("MONARCH_KERNEL_JOIN", None)
    line = [sys.executable, "-m", "monarch_kernel.join", "--name", "own", *options, str(program)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patience(60), env=environment)
    assert done.returncode == 0 and not done.stderr, done
    return json.loads(done.stdout)


def test_a_rank_that_the_program_starts_is_prepared_and_a_tool_is_not(tmp_path: Path) -> None:
    own, rank, tool = run(tmp_path, "--hold-on-error=7")
    assert own["prepared"] and rank["prepared"] and tool == {"tool": "False\n"}
    assert rank["hold"] == "7.0" and rank["path"] == [] and rank["variable"] == str(ROOT)


def test_a_sitecustomize_of_the_user_is_run(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "sitecustomize.py").write_text("import sys\nsys.customized = getattr(sys, 'customized', 0) + 1\n")
    own, rank, _ = run(tmp_path, PYTHONPATH=f"{mine}{os.pathsep}{ROOT}")
    assert own["customized"] == rank["customized"] == 1 and rank["prepared"]
    assert rank["variable"] == f"{mine}{os.pathsep}{ROOT}"


def test_under_a_launcher_nothing_is_passed_on(tmp_path: Path) -> None:
    (own,) = run(tmp_path, RANK="0", WORLD_SIZE="1")
    assert own["prepared"] and _FOLDER not in str(own["variable"])
