"""`%mesh compare` and `%mesh bisect` in the kernel, on recordings of a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import wait_until
from tests.join.conftest import Job
from tests.join.conftest import start_module_job as start_module_job
from tests.join.conftest import torch_loaded as torch_loaded
from tests.kernel import harness
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import stop_kernel
from tests.kernel.harness import Kernel

pytestmark = pytest.mark.torch

TRAIN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.down(self.up(x).relu())

def build_model():
    return Net()

def build_layer():
    return torch.nn.Linear(4, 4)
"""
CELL = """%%mesh
import sys
sys.path.insert(0, {folder!r})
from train import *
def begin(factor=1.0):
    global net, optimizer
    torch.manual_seed(0)
    net = build_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * factor)
def step(factor=1.0):
    optimizer.zero_grad()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).chunk(2)[rank]
    net(inputs).square().mean().backward()
    for parameter in net.parameters():
        parameter.grad *= factor
    optimizer.step()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with a mesh of two ranks that have a training program."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        kernel = harness.start_kernel()
        try:
            kernel.ok(f"import os; os.chdir({str(folder)!r})")
            kernel.ok("%mesh up pair --procs 2 --preload torch,torch._dynamo,torch.distributed.tensor")
            kernel.ok(CELL.format(folder=str(folder)))
            yield kernel
        finally:
            stop_kernel(kernel)


def record(notebook: Kernel, name: str, cell: str, options: str = "") -> None:
    """Record what a cell does."""
    notebook.ok(f"%mesh record {name} --steps 1 --on pair --replace {options}")
    notebook.ok(f"%%mesh pair\n{cell}")
    notebook.ok("%mesh record")


def test_two_recordings_are_compared(notebook: Kernel) -> None:
    record(notebook, "right", "begin(); step()")
    record(notebook, "again", "begin(); step()")
    record(notebook, "fast", "begin(3.0); step()")
    shown = notebook.ok("%mesh compare right again").text
    assert "Equal in every bit: " in shown
    notebook.ok("found = %mesh compare right fast")
    first = notebook.ok("print(found.equal, found.first.phase, found.first.module, found.first.ranks)").stdout
    assert first.strip() == "False optimizer up (0, 1)"
    assert "3 times" in notebook.ok("print(found)").stdout


def test_ranks_compare_with_a_reference_in_one_process(notebook: Kernel) -> None:
    """Two ranks with a half of the batch each, whose gradients nobody reduces."""
    notebook.ok("%%mesh pair\nbegin()")
    record(notebook, "job", "step()", "--full --model net")
    notebook.ok("found = %mesh compare job --reference train.py:build_model")
    said = notebook.ok("print(found)").stdout
    assert re.search(r"Different from step 0, reduction: gradient of up\.\w+ on ranks 0-1", said), said
    assert "the mean over ranks 0-1 is the reference's" in said


@pytest.fixture(scope="module")
def job(start_module_job: Callable[..., Job], notebook: Kernel) -> Iterator[Job]:
    """A torchrun job of two ranks that trains; the notebook has joined it."""
    job = start_module_job("trains")
    notebook.ok("%mesh join trains")
    wait_until(lambda: notebook.run("%%mesh --at-step\nassert losses").status == "ok", "it trains", 30)
    yield job
    notebook.ok("%mesh leave trains")


def test_the_next_step_of_a_running_job_compares_with_a_reference(job: Job, notebook: Kernel) -> None:
    """Both ranks read the same batch, and sum their gradients, which is not what one process does."""
    notebook.ok(f"found = %mesh compare --reference train.py:build_layer --on {job.name}")
    said = notebook.ok("print(found)").stdout
    assert re.search(r"Different from step 0, reduction: gradient of (weight|bias) on ranks 0-1", said), said
    assert "every element is 2 times that of the reference: summed instead of averaged" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare right", "name two recordings"),
        ("compare right nothing", "there is no recording 'nothing'"),
        ("compare right again --reference train.py:build_model", "one recording at most"),
        ("compare right --reference train.py:build_model", "full=True"),
        ("compare right --reference train.py", "FILE:FUNCTION"),
        ("compare --reference train.py:build_model --on pair", "nothing runs on pair"),
        ("bisect right --good HEAD --model train.py:build_model", "not a git repository"),
    ],
)
def test_mistakes_are_said_in_a_sentence(notebook: Kernel, line: str, message: str) -> None:
    record(notebook, "right", "begin(); step()")
    assert message in notebook.run(f"%mesh {line}").stderr
