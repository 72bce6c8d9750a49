"""The notebook on tensors: a training on a mesh, what its tools tell, and a replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture  # pyright: ignore[reportUnusedImport]

needs("torch")


@pytest.fixture(scope="module")
def tensors(run: Callable[[Path], Run]) -> Run:  # noqa: F811
    """The notebook, run."""
    done = run(ROOT / "notebooks" / "09_tensors.ipynb")
    assert done.status == 0, done.printed
    return done


def test_values_are_on_ranks(tensors: Run) -> None:
    first = tensors.text("first")
    assert "rank 3: [[0, 4, 8], [12, 16, 20]]" in first and "sum:    [[0, 10, 20], [30, 40, 50]]" in first
    assert "gpus=3  [0:2, 0:3]" in tensors.text("picture")
    assert tensors.text("mistake").startswith("RuntimeError: ")


def test_the_training_learns_alike_everywhere(tensors: Run) -> None:
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)", tensors.text("train"))
    assert found is not None and float(found[2]) < float(found[1]) / 10
    assert "the same weights on all ranks: True" in tensors.text("train")


def test_tools_tell_lines(tensors: Run) -> None:
    waits = next(line for line in tensors.text("plan").split("\n") if "if loss < 0.001" in line)
    assert waits.startswith("Cell In[") and "item()" in waits
    assert re.search(
        r"last\):\n  Cell In\[\d+\], line \d+, in <module>\n    logs = scaled.log\(\)", tensors.text("nan")
    )
    assert "aten::log made 1 Inf" in tensors.text("nan")
    assert "4 distinct values on 4 ranks" in tensors.text("diff")
    assert "model.0.weight" in tensors.text("memory")


def test_a_replay_is_one_operation(tensors: Run) -> None:
    assert re.search(r"<compiled step>: [1-9]\d* calls recorded, 1\d\d replayed", tensors.text("replay"))
    assert re.search(
        r"The notebook has \d+ times less to do, and a step is done [\d.]+ times as fast", tensors.text("replay")
    )


def test_a_tensor_in_parts_and_in_cells(tensors: Run) -> None:
    assert "as on one device: True" in tensors.text("parts")
    assert "data=1  [3:5, 0:4]  [3:5, 4:8]" in tensors.text("parts")
    assert "[2-3] DTensor ('data', 'model') (2, 4)" in tensors.text("cell")
    assert "[2, 2, 2, 2, 3, 3, 3, 3]" in tensors.text("seen")
    assert "data=1  [3:5, 0:8]  [3:5, 0:8]" in tensors.text("pull")
    assert tensors.text("pulled") == "the same values: True"


def test_a_killed_rank_does_not_change_the_curve(tensors: Run) -> None:
    told = tensors.text("loop")
    assert "batch 10: DeviceMeshError" in told and "killed by SIGKILL" in told and "state of training from" in told
    assert re.search(r"The curves are equal within [\d.]+e-", tensors.text("same"))
    assert "as in one process: True" in tensors.text("layout")
    assert re.search(r"train_step>: 2 calls recorded, 22 replayed", tensors.text("layout"))
    assert "data_parallel=3  [0:32, 0:8]       [32:64, 0:8]" in tensors.text("layout")


def test_no_cell_warns(tensors: Run) -> None:
    shown = [output for cell in tensors.notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in shown if output.output_type == "stream" and output.name == "stderr"]
