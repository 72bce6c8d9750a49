"""`%mesh capture` and `%mesh replay` in the kernel: on idle ranks, in cells that fail, and in a joined torchrun job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.join.conftest import Job
from tests.join.conftest import start_module_job as start_module_job
from tests.join.conftest import torch_loaded as torch_loaded
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch

PROGRAM = """
import torch
def build():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    return net, torch.optim.Adam(net.parameters(), lr=0.1)
def step(net, optimizer, x, y):
    optimizer.zero_grad()
    ((net(x) - y) ** 2).mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the captures of kernels and jobs that start now."""
    with pytest.MonkeyPatch.context() as patched:
        data = tmp_path_factory.mktemp("data")
        patched.setenv("XDG_DATA_HOME", str(data))
        yield data / "monarch_kernel" / "captures"


@pytest.fixture(scope="module")
def mesh(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel with a mesh of two ranks that have a model. The notebook has the same functions."""
    notebook.ok("%mesh up pair --procs 2")
    notebook.ok(PROGRAM)
    notebook.ok(f"%%mesh --on pair\n{PROGRAM}\nnet, optimizer = build()")
    yield notebook
    notebook.ok("%mesh down pair")


def test_the_next_step_of_idle_ranks_is_captured_and_replayed_in_the_notebook(mesh: Kernel, folder: Path) -> None:
    said = mesh.ok("%mesh capture idle --on pair").stdout
    assert "Capture idle of the next step on 2 ranks: about 0.0 MB, in " in said and "It waits for that step" in said
    assert "[0-1] waiting" in mesh.ok("%mesh capture").stdout
    mesh.ok("%%mesh --on pair\nstep(net, optimizer, torch.full((2, 4), 1.0 + rank), torch.ones(2, 1))")
    written = mesh.ok("%mesh capture").stdout
    assert "[0] 0.0 MB in " in written and "[1] 0.0 MB in " in written and "%mesh replay idle --rank N" in written
    assert json.loads((folder / "idle" / "rank_00001.json").read_text())["world_size"] == 2
    outcome = mesh.run("%mesh replay idle --rank 1")
    assert outcome.ename == "UsageError" and 'with replay("idle", rank=1):' in outcome.evalue
    mesh.ok("from monarch_kernel.numerics import replay")
    # Another batch: the captured one takes its place.
    run = "step(*build(), torch.zeros(2, 4), torch.zeros(2, 1))"
    for _ in range(2):
        said = mesh.ok(f'with replay("idle", rank=1) as found:\n    {run}').stdout
        assert said.startswith("rank 1 of 2, capture 'idle': bit-equal"), said
    assert mesh.ok("print(found.report.gradients, found.report.updated)").stdout.strip() == "4 4"
    failed = mesh.run(f'with replay("idle", rank=0):\n    {run.replace("4)", "4), 1 / 0")}')
    assert failed.ename == "ZeroDivisionError"


def test_a_cell_that_fails_is_captured(mesh: Kernel, folder: Path) -> None:
    said = mesh.ok("%mesh capture failed --on-error -r 1 --on pair").stdout
    assert "of the step that raises on 1 rank: " in said
    mesh.ok("%%mesh --on pair\nfor _ in range(2):\n    step(net, optimizer, torch.ones(2, 4), torch.ones(2, 1))")
    assert mesh.run("%%mesh --on pair\n1 / 0").ename  # no step runs here
    assert "[1] waiting" in mesh.ok("%mesh capture").stdout
    cell = "%%mesh --on pair\nout = net(torch.ones(2, 4))\nraise ValueError(f'rank {rank} stops')"
    assert "stops" in mesh.run(cell).evalue
    assert "ValueError: rank 1 stops" in mesh.ok("%mesh capture").stdout
    description = json.loads((folder / "failed" / "rank_00001.json").read_text())
    assert description["error"]["message"] == "rank 1 stops" and len(description["calls"]) == 1
    assert not (folder / "failed" / "rank_00000.json").exists()


@pytest.mark.parametrize(
    "line, said",
    [
        ("capture x --timeout 0", "--timeout takes a number of seconds above 0, not 0"),
        ("capture a/b --on pair", "'a/b' is not a valid name of a capture"),
        ("capture idle --on pair", "already has a capture of rank"),
        ("replay nothing", "there is no capture 'nothing'"),
        ("replay idle", "has ranks 0, 1: name one with rank="),
        ("replay idle --rank 7", "has no capture of rank 7"),
        ("replay idle --rank 1 --all", "--rank and --all exclude each other"),
    ],
)
def test_bad_input_is_named(mesh: Kernel, line: str, said: str) -> None:
    outcome = mesh.run(f"%mesh {line}")
    assert outcome.ename == "UsageError" and said in outcome.evalue


@pytest.fixture(scope="module")
def job(start_module_job: Callable[..., Job], notebook: Kernel) -> Iterator[Job]:
    """A torchrun job of two ranks that trains; the notebook has joined it."""
    job = start_module_job("trains")
    notebook.ok("%mesh join trains")
    wait_until(lambda: notebook.run("%%mesh --at-step\nassert losses").status == "ok", "it trains", 30)
    yield job
    notebook.ok("%mesh leave trains")


def test_a_step_of_a_running_job_is_captured_and_replayed(job: Job, notebook: Kernel, folder: Path) -> None:
    said = notebook.ok("%mesh capture running --on trains").stdout
    assert "Capture running of the next step on 2 ranks: about 0.0 MB, in " in said
    assert "[1] 0.0 MB in " in said and ": next step" in said
    for rank in (0, 1):
        description = json.loads((folder / "running" / f"rank_{rank:05}.json").read_text())
        assert description["program"]["script"].endswith("train.py")
        kinds = [each["kind"] for each in description["collectives"]]
        assert kinds == ["all_reduce"] * 2  # of the gradients; the one that ends the job comes after the step
    notebook.ok("%%mesh --at-step\nassert losses")  # it still trains
    said = notebook.ok("%mesh replay running --all").stdout
    assert "rank 0 of 2, capture 'running': bit-equal" in said, said
    assert "rank 1 of 2, capture 'running': bit-equal" in said, said
    assert said.count("collectives: 2 answered from the capture") == 2
