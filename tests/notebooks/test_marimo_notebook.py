"""The notebook of docs/other_notebooks.md in marimo: as a script, and exported with its outputs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench.environments import EnvironmentFailed, python_above
from tests.notebooks.test_notebooks import ROOT
from tests.waiting import patience


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter with marimo, above the packages of this one."""
    try:
        return python_above("marimo", torch=False)
    except EnvironmentFailed as error:
        pytest.skip(str(error))


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """The notebook, as the page has it."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "other_notebooks.md").read_text(), re.M | re.S)
    path = tmp_path / "workers.py"
    path.write_text(code)
    return path


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def outputs(page: str) -> list[dict[str, str]]:
    """What the cells of an exported notebook show, by MIME type."""
    found: list[dict[str, str]] = []
    for begin in re.finditer(r'"outputs": (?=\[)', page):
        shown, _ = json.JSONDecoder().raw_decode(page, begin.end())
        found += [each["data"] for each in shown if "data" in each]
    return found


def test_as_a_script(python: Path, notebook: Path) -> None:
    done = run(python, notebook, cwd=notebook.parent)
    assert "Traceback" not in done.stderr


def test_a_view_is_html(python: Path, notebook: Path) -> None:
    page = notebook.with_suffix(".html")
    run(python, "-m", "marimo", "export", "html", notebook, "-o", page, cwd=notebook.parent)
    shown = outputs(page.read_text())
    (values,) = [each["text/html"] for each in shown if "ValueMesh" in each.get("text/html", "")]
    assert "49" in values
    (view,) = [each["text/html"] for each in shown if "mesh workers" in each.get("text/html", "")]
    assert "2 idle" in view and view.count("<svg") >= 3


def test_the_death_of_a_rank_ends_no_notebook(python: Path, notebook: Path) -> None:
    code = notebook.read_text()
    deadly = code.replace(
        "            return x * x\n", "            import os\n\n            os.kill(os.getpid(), 9)\n"
    )
    deadly = deadly.replace(
        "    squares = workers.square.call(7).get()\n",
        "    try:\n        workers.square.call(7).get()\n"
        "    except Exception as error:\n        squares = [str(error)] * 2\n",
    )
    assert deadly.count("os.kill") == deadly.count("except Exception") == 1
    notebook.write_text(deadly)
    page = notebook.with_suffix(".html")
    run(python, "-m", "marimo", "export", "html", notebook, "-o", page, cwd=notebook.parent)
    (view,) = [each["text/html"] for each in outputs(page.read_text()) if "mesh workers" in each.get("text/html", "")]
    assert "2 dead" in view and "killed by SIGKILL" in view
