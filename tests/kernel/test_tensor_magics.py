"""`%mesh plan`, `watch`, `memory` and `diff` of tensors on meshes, in a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import needs
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import kernel as kernel
from tests.kernel.harness import Kernel, Outcome

needs("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a mesh of two ranks, and tensors on it."""
    kernel.ok("%mesh up --procs 2 --preload torch")
    kernel.ok(
        "import torch\n"
        "from monarch_kernel import get_mesh\n"
        "from monarch_kernel.tensor import inspect\n"
        "procs = get_mesh('m')\n"
        "with procs.activate():\n"
        "    same = torch.ones(3)\n"
        "    t = torch.ones(2, 2) * procs.rank_tensor('gpus')\n"
        "    weights = {'w': torch.zeros(100)}\n"
        "float(same.sum())"
    )
    yield kernel


def shown(outcome: Outcome) -> list[str]:
    assert outcome.result is not None
    return outcome.result["text/plain"].split("\n")


def test_the_plan_tells_lines_of_cells(mesh: Kernel) -> None:
    lines = shown(mesh.ok("%mesh plan"))
    assert "1 wait for values" in lines[0]
    waits = next(line for line in lines if "float(same.sum())" in line)
    assert waits.startswith("Cell In[") and "item()" in waits


def test_the_plan_of_each_cell_below_it(mesh: Kernel) -> None:
    assert "is shown below it" in mesh.ok("%mesh plan on").stdout
    try:
        outcome = mesh.ok("if same.sum() > 2:\n    print('yes')")
        assert "item()" in outcome.displays[-1]["text/plain"] and "<table>" in outcome.displays[-1]["text/html"]
        assert not mesh.ok("1 + 1").displays
    finally:
        mesh.ok("%mesh plan off")
    assert not mesh.ok("same.tolist()").displays
    mesh.ok("%mesh plan clear")
    assert shown(mesh.ok("%mesh plan")) == ["No operation on a mesh has cost anything yet."]


def test_tensors_of_the_notebook_are_compared_on_the_ranks(mesh: Kernel) -> None:
    lines = shown(mesh.ok("%mesh diff t"))
    assert lines[0].startswith("t: 2 distinct values on 2 ranks of mesh m, as the ranks hold it (")
    assert any("[0]" in line and "[2, 2]" in line for line in lines)
    assert shown(mesh.ok("%mesh diff weights['w']"))[0].startswith("weights['w']: the same on")
    assert shown(mesh.ok("from monarch_kernel.debug import diff\ndiff(same)"))[0].startswith("tensor: the same on")


def test_a_watch_stops_the_cell(mesh: Kernel) -> None:
    said = mesh.ok("%mesh watch t --nan")
    assert "t: its values are finite (on rank 0)." in said.stdout
    try:
        outcome = mesh.run("with procs.activate():\n    a = t + 1\n    bad = torch.log(-a)")
        assert outcome.ename == "NonFiniteError"
        assert "aten::log made 4 NaN" in outcome.evalue
    finally:
        mesh.ok("%mesh watch --off")
    mesh.ok("with procs.activate():\n    bad = torch.log(-t - 1)")
    assert "bad: 4 of its values are NaN or Inf already" in mesh.ok("%mesh watch bad --nan").stdout
    assert "no longer watched" in mesh.ok("%mesh watch --off\ndel bad").stdout


def test_memory_by_line_and_holder(mesh: Kernel) -> None:
    lines = shown(mesh.ok("%mesh memory"))
    assert any("weights['w']" in line and "400 bytes" in line for line in lines), lines
    assert shown(mesh.ok("%mesh memory weights"))[0] == "1 tensors on ranks, 400 bytes on each rank"


@pytest.mark.parametrize(
    "line, said",
    [
        ("%mesh plan sideways", "invalid choice"),
        ("%mesh watch", "say --nan to begin"),
        ("%mesh watch nothing --nan", "names no tensor on a mesh"),
        ("%mesh memory nothing", "names no tensor on a mesh"),
        ("%mesh memory procs", "no tensor of a mesh"),
    ],
)
def test_mistakes_are_told_in_a_sentence(mesh: Kernel, line: str, said: str) -> None:
    outcome = mesh.run(line)
    assert outcome.ename == "UsageError"
    assert said in outcome.evalue


def test_completion_knows_tensors(mesh: Kernel) -> None:
    reply = mesh.client.complete("%mesh memory ", reply=True, timeout=20)
    assert {"same", "t"} <= set(reply["content"]["matches"])
    assert "procs" not in reply["content"]["matches"]
