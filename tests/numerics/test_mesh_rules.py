"""`%mesh watch --rules` on jobs of torchrun that were joined while they ran, and on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import Job
from tests.join.conftest import notebook as notebook
from tests.join.conftest import start_module_job as start_module_job
from tests.join.conftest import torch_loaded as torch_loaded
from tests.kernel.harness import Kernel
from tests.numerics.programs import FOLDER

pytestmark = pytest.mark.torch

SCRIPT = FOLDER / "data_parallel.py"


@pytest.fixture(scope="module")
def jobs(start_module_job: Callable[..., Job], notebook: Kernel) -> dict[str, Job]:
    """A right job and one in which a parameter is not reduced, both joined."""
    found = {
        "right": start_module_job("right", script=SCRIPT),
        "wrong": start_module_job("wrong", "--bug", "1", script=SCRIPT),
    }
    for name in found:
        notebook.ok(f"%mesh join {name}")
    return found


def checked(kernel: Kernel) -> int:
    """The steps that the report says were checked."""
    said = kernel.ok("%mesh watch --rules").stdout
    assert "not compared" not in said and "process group" not in said, said
    return int(said.split(" step")[0].split()[-1])


def test_a_running_job_that_is_right_breaks_no_rule(jobs: dict[str, Job], notebook: Kernel) -> None:
    said = notebook.ok("%mesh use right\n%mesh watch --rules --every 3").stdout
    assert "check replicas, updates, data, random, grads, lr, buffers, memory on one step in 3" in said
    wait_until(lambda: checked(notebook) > 20, "it checks", 60)
    said = notebook.ok("%mesh watch --off").stdout
    assert "Rules are no longer checked." in said and "no rule broken." in said, said
    assert "No rules were checked." in notebook.ok("%mesh watch --rules --off").stdout


def test_a_running_job_names_rank_parameter_and_line(jobs: dict[str, Job], notebook: Kernel) -> None:
    notebook.ok("%mesh use wrong\n%mesh watch --rules [replicas,grads] --every 2")
    wait_until(lambda: "1 broken" in notebook.ok("%mesh watch --rules").stdout, "it is found", 60)
    said = notebook.ok(
        "from monarch_kernel.kernel.magics.value_magics import ValueMagics\n"
        "ValueMagics._rules._count = 0\n%mesh watch --off"
    ).stdout  # shown again
    assert "Rule replicas broken at step" in said and ", rank 1 (data_parallel.py:" in said, said
    assert "values of temperature differ from those of rank 0; DistributedDataParallel replicates it" in said


def test_a_broken_rule_stops_all_ranks_in_the_debugger(jobs: dict[str, Job], notebook: Kernel) -> None:
    notebook.ok("%mesh use wrong\n%mesh watch --rules replicas --every 2 --stop")
    until(notebook, "%mesh debug list", r"\b0-1\b.*breakpoint")
    assert "data_parallel.py" in shown(notebook.ok("%mesh debug list"))
    notebook.ok("%mesh watch --off\n%mesh debug continue")


@pytest.mark.parametrize(
    "line, error",
    [
        ("%mesh watch --rules nothing", "no rule nothing; there are replicas, updates, data"),
        ("%mesh watch --rules --every 0", "--every takes a number of steps from 1 on, not 0"),
        ("%mesh watch --rules --placements missing", "no variable missing has placements"),
    ],
)
def test_wrong_options_say_what_is_possible(jobs: dict[str, Job], notebook: Kernel, line: str, error: str) -> None:
    notebook.ok("%mesh use right")
    assert error in notebook.run(line).evalue


CELL = """%%mesh
import torch, torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group('gloo')
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(rank)
for number in range(8):
    optimizer.zero_grad()
    net(torch.randn(3, 4)).pow(2).mean().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if number == 5 and rank == 1 and wrong:
        net.bias.data[0] += 1
"""


@pytest.fixture(scope="module")
def mesh(notebook: Kernel) -> Iterator[Kernel]:
    """The notebook, with a mesh of two ranks."""
    notebook.ok("%mesh up cells --procs 2")
    yield notebook
    notebook.ok("%mesh down cells")


def test_cells_of_a_mesh_are_checked_as_jobs_are(mesh: Kernel, notebook: Kernel) -> None:
    notebook.ok("%mesh watch --rules replicas,updates --every 1 --on cells")
    notebook.ok("%%mesh\nwrong = False")
    notebook.ok(CELL)
    said = notebook.ok("%mesh watch --rules").stdout
    assert "no rule broken." in said and "not compared" not in said, said
    assert int(said.split(" step")[0].split()[-1]) >= 6, said
    notebook.ok("%%mesh\nwrong = True")
    notebook.ok(CELL)
    wait_until(lambda: "1 broken" in notebook.ok("%mesh watch --rules").stdout, "it is found", 30)
    notebook.ok("%mesh watch --off")
