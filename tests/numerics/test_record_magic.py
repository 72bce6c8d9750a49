"""`%mesh record` in the kernel: on idle ranks, on ranks that train, and in a joined torchrun job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.numerics.recording import Entry, Recording, recordings_folder
from tests.conftest import wait_until
from tests.join.conftest import Job
from tests.join.conftest import start_module_job as start_module_job
from tests.join.conftest import torch_loaded as torch_loaded
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch

PROGRAM = """%%mesh
import torch
torch.manual_seed(rank)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the recordings of kernels and jobs that start now."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield Path(recordings_folder())


@pytest.fixture(scope="module")
def mesh(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel with a mesh of two ranks that have a model."""
    notebook.ok("%mesh up pair --procs 2 --preload torch,torch._dynamo,torch.distributed.tensor")
    notebook.ok(PROGRAM)
    yield notebook
    notebook.ok("%mesh down pair")


def kinds(entries: list[Entry]) -> set[str]:
    return {entry.kind for entry in entries}


def test_the_next_cells_of_idle_ranks_are_recorded(mesh: Kernel, folder: Path) -> None:
    said = mesh.ok("%mesh record idle --steps 2 --on pair").stdout
    assert "The ranks of pair record the next 2 steps" in said
    mesh.ok("%%mesh\nstep()")
    assert "idle: 1 steps recorded so far" in mesh.ok("%mesh record").stdout
    mesh.ok("%%mesh\nstep()\nstep()")
    mesh.ok("found = %mesh record")
    assert mesh.ok("print(found.ranks, found.steps, found.finished, found.notes)").stdout.strip() == "(0, 1) 2 True []"
    assert re.search(r"^idle: .*Z, 2 of 2 ranks, 2 steps$", mesh.ok("%mesh record --list").stdout, re.MULTILINE)
    recording = Recording.open(folder / "idle")
    assert kinds(recording.entries(1)) >= {"input", "output", "gradient", "reduced_gradient", "update", "parameter"}
    first = [next(each for each in recording.entries(rank) if each.kind == "parameter") for rank in (0, 1)]
    assert first[0].hash != first[1].hash
    line = mesh.ok(
        "print({each.line for each in found.entries(0) if each.name == '' and each.kind == 'output'})"
    ).stdout
    assert re.fullmatch(r"\{'Cell In\[\d+\]:8'\}", line.strip()), line


def test_cells_of_the_notebook_are_recorded_with_tensors_on_ranks(mesh: Kernel, folder: Path) -> None:
    mesh.ok("import torch\nfrom monarch_kernel import get_mesh\nprocs = get_mesh('pair')")
    assert "The next cells of this notebook are recorded" in mesh.ok("%mesh record here --here --steps 1").stdout
    mesh.ok(
        "with procs.activate():\n"
        "    layer = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "    layer(torch.ones(3, 4)).sum().backward()\n"
        "    optimizer.step()"
    )
    mesh.ok("found = %mesh record")
    assert mesh.ok("print(found.ranks, found.steps, found.finished, found.notes)").stdout.strip() == "(0, 1) 1 True []"
    recording = Recording.open(folder / "here")
    assert {each.name for each in recording.entries(1) if each.kind == "update"} == {"weight", "bias"}
    line = mesh.ok("print({each.line for each in found.entries(1) if each.kind == 'output'})").stdout
    assert re.fullmatch(r"\{'Cell In\[\d+\]:4'\}", line.strip()), line


@pytest.mark.parametrize(
    "line, said",
    [
        ("--what words x", "--what takes modules, optimizer, collectives and ops, not 'words'"),
        ("x --steps 0", "--steps takes a number from 1 on, not 0"),
        ("x --full --keep 2", "--keep takes a fraction above 0 and at most 1, not 2"),
        ("a/b", "'a/b' is no name of a recording"),
        ("idle", "already has a recording of rank"),
        ("x --model nets", "name 'nets' is not defined"),
        ("x --here", "--here records the notebook's own steps"),
        ("x --model rank", "rank is int, not a torch.nn.Module"),
        ("x --placements nothing", "no variable nothing has placements by name"),
    ],
)
def test_bad_input_is_named(mesh: Kernel, line: str, said: str) -> None:
    outcome = mesh.run(f"%mesh record {line} --on pair")
    assert outcome.ename == "UsageError"
    assert said in outcome.evalue


@pytest.fixture(scope="module")
def job(start_module_job: Callable[..., Job], notebook: Kernel) -> Iterator[Job]:
    """A torchrun job of two ranks that trains; the notebook has joined it."""
    job = start_module_job("trains")
    notebook.ok("%mesh join trains")
    wait_until(lambda: notebook.run("%%mesh --at-step\nassert losses").status == "ok", "it trains", 30)
    yield job
    notebook.ok("%mesh leave trains")


def test_ranks_of_a_running_job_record_the_same_steps(job: Job, notebook: Kernel, folder: Path) -> None:
    notebook.ok("running = %mesh record running --steps 2 --what modules,optimizer,collectives --on trains")
    recording = Recording.open(folder / "running")
    assert recording.finished, recording.notes
    assert recording.steps == 2
    first, second = recording.entries(0), recording.entries(1)
    assert [each.name for each in first] == [each.name for each in second]
    # The job sets its input by the number of the step, and sums its gradients over ranks.
    for kind in ("input", "reduced_gradient", "update", "parameter"):
        ours, theirs = ([each.hash for each in entries if each.kind == kind] for entries in (first, second))
        assert ours and ours == theirs, kind
    reduced = [each for each in first if each.kind == "collective" and each.name == "all_reduce"]
    assert {each.op for each in reduced} >= {"sum"}
    assert {each.group for each in reduced} == {(0, 1)}
    assert {each.line for each in first if each.kind == "output"} == {"train.py:14"}
