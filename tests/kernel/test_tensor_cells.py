"""Tensors of the notebook in `%%mesh` cells, and tensors of cells in the notebook, without a copy."""

from __future__ import annotations

import pytest

from tests.conftest import needs
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import kernel as kernel
from tests.kernel.harness import Kernel, Outcome

needs("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """A kernel with a mesh of two ranks, and a tensor of each kind on them."""
    kernel.ok("%mesh up --procs 2 --preload torch.distributed.tensor")
    kernel.ok(
        "import torch\n"
        "from monarch_kernel import get_mesh\n"
        "from monarch_kernel.distributed import Mesh, distribute\n"
        "from monarch_kernel.tensor import fetch_shard\n"
        "procs = get_mesh('m')\n"
        "grid = Mesh.of(procs)\n"
        "whole = distribute(torch.arange(10.).reshape(5, 2), grid, ['gpus'])\n"
        "with procs.activate():\n"
        "    own = torch.ones(2) * procs.rank_tensor('gpus')\n"
        "other = Mesh(1, name='other')\n"
        "elsewhere = other.distribute(torch.ones(2))"
    )
    return kernel


def value(kernel: Kernel, expression: str) -> str:
    return kernel.ok(expression).text


def printed(outcome: Outcome) -> str:
    """What ranks have printed; ranks that print later than others update what is shown."""
    return [*outcome.displays, *outcome.updates][-1]["text/plain"]


def test_a_cell_has_the_tensor_itself(mesh: Kernel) -> None:
    mesh.ok("%mesh push whole own grid")
    mesh.ok("whole += 1\nwith procs.activate():\n    own += 10")  # a cell comes behind what was issued
    outcome = mesh.ok(
        "%%mesh\n"
        "print(type(whole).__name__, list(whole.placements), whole.to_local().sum().item(), own.tolist())\n"
        "print(grid == whole.device_mesh, type(grid).__name__, grid.mesh_dim_names)\n"
        "whole.mul_(2)\n"
        "own.zero_();"
    )
    print(printed(outcome))
    assert "[0]   DTensor [Shard(dim=0)] 21.0 [10.0, 10.0]" in printed(outcome)
    assert "[1]   DTensor [Shard(dim=0)] 34.0 [11.0, 11.0]" in printed(outcome)
    assert "[0-1] True DeviceMesh ('gpus',)" in printed(outcome)
    assert value(mesh, "whole.full_tensor().sum().item()") == "110.0"
    assert value(mesh, "fetch_shard(own, gpus=1).get().tolist()") == "[0.0, 0.0]"


def test_a_tensor_of_a_cell_becomes_a_handle(mesh: Kernel) -> None:
    mesh.ok("%mesh push whole grid")
    mesh.ok(
        "%%mesh\n"
        "import torch\n"
        "from torch.distributed.tensor import DTensor, Shard, distribute_tensor\n"
        "rows = DTensor.from_local(torch.full((2, 3), float(rank)), grid, [Shard(0)])\n"
        "mine = torch.full((3,), float(rank))\n"
        "uneven = torch.ones(rank + 1)"
    )
    mesh.ok("%mesh pull rows mine --as-handle")
    assert value(mesh, "(rows @ rows.T).full_tensor().sum().item()") == "12.0"
    assert value(mesh, "fetch_shard(mine, gpus=1).get().tolist()") == "[1.0, 1.0, 1.0]"
    mesh.ok("%%mesh\nmine.add_(1)\nrows.add_(1);")
    assert (
        value(mesh, "(rows.full_tensor().sum().item(), fetch_shard(mine).get().tolist())") == "(18.0, [1.0, 1.0, 1.0])"
    )
    failed = mesh.run("%mesh pull uneven --as-handle")
    assert "rank 1 offered OfferedTensor([2], float32), and rank 0 OfferedTensor([1], float32)" in failed.evalue
    failed = mesh.run("%mesh pull rank --as-handle")
    assert "offer(int): only dense tensors" in failed.evalue


def test_values_of_cells_are_shown(mesh: Kernel) -> None:
    mesh.ok("%mesh push whole")
    outcome = mesh.ok("%%mesh -o values\nwhole")
    assert "DTensor(" in printed(outcome) and not outcome.stderr
    assert "not sent: a DTensor stays on its rank; %mesh pull NAME --as-handle" in value(mesh, "values")
    assert "a DTensor stays on its rank" in mesh.run("%mesh pull whole --as copy").evalue


def test_tensors_of_other_processes_are_refused(mesh: Kernel) -> None:
    failed = mesh.run("%mesh push elsewhere --on m")
    assert "actors that are not all on its ranks" in failed.evalue


def test_mixed_tensors_are_told_in_a_few_lines_with_what_to_write(mesh: Kernel) -> None:
    mesh.ok("local = torch.ones(2, 3000)\nwith procs.activate():\n    there = torch.zeros(2, 3000)")
    for code, advice in (
        ("there + local", "with mesh.activate(): there = torch.tensor(local.numpy())"),
        ("distribute(torch.zeros(2, 3000), grid) + local", "distribute(local, mesh, sharding_spec=['gpus', ...])"),
    ):
        failed = mesh.run(code)
        assert failed.ename == "MixedTensorsError" and failed.evalue.startswith("add: a local tensor [2, 3000]")
        assert advice in failed.evalue
        assert ".py" not in failed.traceback, failed.traceback
        assert failed.traceback.count("\n") < 10
    mesh.ok("with procs.activate():\n    brought = torch.tensor(local.numpy())")
    assert value(mesh, "from monarch_kernel.tensor import inspect\ninspect(brought + there).sum().item()") == "6000.0"
