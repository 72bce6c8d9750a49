"""The notebook on tensors: a training on a mesh, what its tools tell, and a replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebooks.test_notebooks import ROOT, Run, run  # noqa: F401  # run is a fixture

pytest.importorskip("torch")


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
    assert re.search(r"<compiled step>: [1-9]\d* calls recorded, 3\d\d replayed", tensors.text("replay"))


def test_a_tensor_in_parts(tensors: Run) -> None:
    assert "as on one device: True" in tensors.text("parts")
    assert "data=1  [3:5, 0:4]  [3:5, 4:8]" in tensors.text("parts")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", tensors.text("parts-train"))]
    assert losses[1] < losses[0] / 5
    assert "layouts changed" in tensors.text("parts-train") and "loss.backward()" in tensors.text("parts-train")
