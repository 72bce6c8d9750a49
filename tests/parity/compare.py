"""Running the scripts, and what the real Monarch printed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("*.py") if path.stem != "report")


def output(python: str, which: str, script: str) -> str:
    """What a script reports under an interpreter that has this project (``ours``) or torchmonarch (``peer``)."""
    path = HERE / "scripts" / f"{script}.py"
    command = [python, str(path)]
    if which == "ours":
        code = "import runpy, sys, monarch_kernel as ours; ours.enable_monarch_imports(); " + (
            "sys.path[0] = sys.argv[1]; runpy.run_path(sys.argv[2], run_name='__main__')"
        )
        command = [python, "-c", code, str(path.parent), str(path)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=HERE)
    if run.returncode != 0:
        raise AssertionError(f"{script} failed ({which}, exit code {run.returncode}):\n{run.stdout}\n{run.stderr}")
    return "".join(line + "\n" for line in run.stdout.splitlines() if line.startswith("> "))


def public_names(python: str) -> str:
    """The public names of the torchmonarch of an interpreter: a line for each module, with its names."""
    run = subprocess.run([python, str(HERE / "list_names.py")], capture_output=True, text=True, timeout=120, check=True)
    return "".join(line[2:] + "\n" for line in run.stdout.splitlines() if line.startswith("= "))


def expected(script: str) -> str:
    """What torchmonarch 0.7.0 reported."""
    return (HERE / "expected" / f"{script}.txt").read_text()


def names() -> list[str]:
    """``monarch.actor.__all__`` of torchmonarch 0.7.0."""
    return (HERE / "names.txt").read_text().split()
