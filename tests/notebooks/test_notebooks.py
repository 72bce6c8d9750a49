"""The notebooks that users start with, run on the real kernel by what `make demo` runs; and their results."""

from __future__ import annotations

import ast
import base64
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from monarch_kernel.kernel.install import DISPLAY_NAME, KERNEL_NAME, install
from tests.conftest import needs
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUNNER = ROOT / "notebooks" / "run.py"

#: No notebook may take longer than this (seconds).
PATIENCE = patience(150)


@dataclass
class Run:
    """A notebook that has been run."""

    status: int
    printed: str
    folder: Path
    notebook: Any

    def outputs(self, cell: str) -> list[Any]:
        """The outputs of the cell with this id."""
        return next(each.outputs for each in self.notebook.cells if each.id == cell)

    def text(self, cell: str) -> str:
        """What the cell shows, as plain text, without colours."""
        parts: list[str] = []
        for output in self.outputs(cell):
            if output.output_type == "stream":
                parts.append(output.text)
            elif output.output_type == "error":
                parts.append("\n".join(output.traceback))
            else:
                parts.append(output.data.get("text/plain", ""))
        plain = "\n".join(part.rstrip("\n") for part in parts)
        return re.sub(r"\x1b\[[0-9;]*m", "", plain)

    def images(self, cell: str) -> list[bytes]:
        """The pictures that the cell shows."""
        found = [output.get("data", {}).get("image/png") for output in self.outputs(cell)]
        return [base64.b64decode(image) for image in found if image]

    def error(self, cell: str) -> str:
        """The type of the error that the cell ended in; empty if it did not."""
        return "".join(output.ename for output in self.outputs(cell) if output.output_type == "error")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs a notebook; fails if it leaves a process behind."""
    needs("nbconvert")
    root = tmp_path_factory.mktemp("jupyter")
    install(prefix=str(root / "prefix"))

    def run(source: Path, python: Path | None = None) -> Run:
        """Run it on the kernel of this environment, or of another interpreter."""
        mark = uuid.uuid4().hex
        prefix = root / "prefix"
        if python is not None:
            prefix = root / "other"
            subprocess.run([python, "-m", "monarch_kernel", "install", "--prefix", prefix], check=True, timeout=60)
        environment = {
            **os.environ,
            "JUPYTER_PATH": str(prefix / "share" / "jupyter"),
            "JUPYTER_RUNTIME_DIR": str(root / "runtime"),
            "JUPYTER_CONFIG_DIR": str(root / "config"),
            "IPYTHONDIR": str(root / "ipython"),
            "NOTEBOOK_TEST": mark,
        }
        out = tmp_path_factory.mktemp(source.stem)
        done = subprocess.run(
            [sys.executable, RUNNER, source, "--out", out, "--timeout", "60"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert marked(mark) == [], "the notebook left processes behind"
        return Run(done.returncode, done.stdout + done.stderr, out, nbformat.read(out / source.name, 4))

    return run


@pytest.fixture(scope="module")
def quickstart(run: Callable[[Path], Run]) -> Run:
    """The demo."""
    needs("torch")
    needs("sklearn")
    needs("matplotlib")
    return run(ROOT / "notebooks" / "01_quickstart.ipynb")


def marked(mark: str) -> list[str]:
    """Command lines of the processes whose environment has this mark."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it ended, or is another user's
                continue
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_have_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == KERNEL_NAME
    assert notebook.metadata.kernelspec.display_name == DISPLAY_NAME
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cell.id), cell.id
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert "execution" not in cell.metadata


# -- 01: the quickstart ------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_demo_runs_and_says_what_came_out(quickstart: Run) -> None:
    assert quickstart.status == 0, quickstart.printed
    accuracy = re.search(r"^accuracy +([\d.]+)% ", quickstart.printed, re.M)
    assert accuracy is not None, quickstart.printed
    assert float(accuracy[1]) >= 97
    assert re.search(r"^ranks +4$", quickstart.printed, re.M)
    assert "3 x figure, 2 x table, 1 x error on purpose" in quickstart.printed
    page = quickstart.folder / "01_quickstart.html"
    assert str(quickstart.folder / "01_quickstart.ipynb") in str(
        [Path(line.split()[-1]).resolve() for line in quickstart.printed.splitlines() if line.startswith("notebook")]
    )
    assert "test accuracy" in page.read_text("utf-8")
    assert "WARNING" not in quickstart.printed


@pytest.mark.torch
def test_training_reaches_the_accuracy_on_every_rank(quickstart: Run) -> None:
    head, row = quickstart.text("value").splitlines()
    assert head == "ValueMesh({gpus: 4}):"
    ranks, accuracy = row.split()
    assert ranks == "gpus=0-3"  # all equal: the gradients were averaged
    assert float(accuracy) >= 0.97
    assert quickstart.text("test") == f"[0-3] {accuracy}"


@pytest.mark.torch
def test_equal_output_is_folded_and_different_output_labelled(quickstart: Run) -> None:
    assert quickstart.text("hello").splitlines() == [
        "[0-3] ready, 4 of us",
        "[0]   I am rank 0",
        "[1]   I am rank 1",
        "[2]   I am rank 2",
        "[3]   I am rank 3",
    ]
    assert "[0-2] 337 of them are mine\n[3]   336 of them are mine" in quickstart.text("data")
    epochs = quickstart.text("train").splitlines()
    assert len(epochs) == 3
    assert epochs[0].startswith("[0-3] epoch  5: test accuracy")


@pytest.mark.torch
@pytest.mark.parametrize("cell", ["figure", "curves", "mistakes"])
def test_figures_are_drawn(quickstart: Run, cell: str) -> None:
    (image,) = quickstart.images(cell)
    assert image.startswith(b"\x89PNG")
    assert len(image) > 2000


@pytest.mark.torch
def test_a_part_of_the_mesh_runs_alone(quickstart: Run) -> None:
    lines = quickstart.text("slice").splitlines()
    assert lines[0] == "[1-2] some of us"
    assert [line.split()[0] for line in lines[1:]] == ["[1]", "[2]"]


@pytest.mark.torch
def test_a_failed_rank_is_named_and_the_others_answer(quickstart: Run) -> None:
    text = quickstart.text("failure")
    assert {"[0] -0.5", "[1] -1.0", "[3] 1.0"} <= set(text.splitlines())
    assert "rank 2" in text
    assert "1 / (rank - 2)" in text
    assert "ZeroDivisionError: division by zero" in text


@pytest.mark.torch
def test_actors_judge_the_network_that_was_trained(quickstart: Run) -> None:
    by_four, by_two = (ast.literal_eval(line) for line in quickstart.text("judge").splitlines())
    assert (len(by_four), len(by_two)) == (4, 2)
    accuracy = float(quickstart.text("test").split()[1])
    for verdict in by_four, by_two:
        counts = [tuple(map(int, re.findall(r"\d+", text))) for text in verdict]
        assert sum(count for _, count in counts) == 450
        assert sum(wrong for wrong, _ in counts) == round((1 - accuracy) * 450)


@pytest.mark.torch
def test_the_mesh_is_healthy_to_its_end(quickstart: Run) -> None:
    assert quickstart.text("status").count("alive") == 4
    assert "4 ranks stopped" in quickstart.text("down")
