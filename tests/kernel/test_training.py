"""Training on ranks when one of them raises: the others are released, that one is named, and the next cell works."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.kernel.harness import Kernel, Outcome
from tests.kernel.screen import text

needs("torch")
pytestmark = pytest.mark.torch

IMPORTS = "%%mesh\nimport torch, torch.distributed as dist\n"
ALL_MEET = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"

TRAINING = """%%mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        if {loader} and rank == 1 and i == 20:
            raise ValueError('no sample')
        return torch.randn(8)

model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i, x in enumerate(DataLoader(Samples(), batch_size=4, num_workers={workers})):
    if not {loader} and rank == 1 and i == 5:
        raise ValueError('no sample')
    model(x).sum().backward()
    optimizer.step()
"""

SHARDED = """%%mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group('gloo')
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
for i in range(4):
    if rank == 2 and i == 2:
        raise ValueError('no more')
    model(torch.randn(4, 8)).sum().backward()
"""

PLAIN = """%%mesh
dist.init_process_group('gloo')
for i in range(4):
    if rank == 2 and i == 2:
        raise ValueError('no more')
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
"""

SCRIPT = """import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("the script failed")
model(torch.randn(2, 4)).sum().backward()
print("trained by", dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def joined(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of three ranks in a process group."""
    kernel.ok("%mesh up joined --procs 3 --dist gloo --preload torch,torch._dynamo")
    kernel.ok(IMPORTS)
    return kernel


@pytest.fixture(scope="module")
def alone(joined: Kernel) -> Kernel:
    """The same kernel, and a mesh whose cells make groups of their own."""
    joined.ok("%mesh up alone --procs 3 --preload torch,torch._dynamo")
    joined.ok(IMPORTS)
    return joined


@pytest.fixture
def trainers(joined: Kernel) -> Kernel:
    """The mesh that is in a process group, in use."""
    joined.ok("%mesh use joined")
    return joined


@pytest.fixture
def scripts(alone: Kernel) -> Iterator[Kernel]:
    """The mesh whose cells make groups of their own, in use; in none afterwards."""
    alone.ok("%mesh use alone")
    yield alone
    alone.ok("%%mesh\nif dist.is_initialized():\n    dist.destroy_process_group()")


def told(outcome: Outcome, failed: int, error: str) -> str:
    """What a cell said that failed on one rank, while the others were released."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
    others = ",".join(str(rank) for rank in range(3) if rank != failed).replace("0,1", "0-1").replace("1,2", "1-2")
    assert said.startswith(f"Failed on rank {failed} (gpus={failed}) of the 3"), said
    assert error in said
    assert re.search(rf"Ranks {others} waited in torch.distributed at \S.* for rank {failed}, and were released", said)
    assert "by peer" not in said
    return said


@pytest.mark.parametrize(("loader", "workers"), [(False, 0), (True, 0), (True, 2)], ids=["loop", "loader", "workers"])
def test_a_rank_that_raises_in_ddp_releases_the_others(trainers: Kernel, loader: bool, workers: int) -> None:
    if workers:  # the failure is kept for a while, and with it the loader and its processes, until the ranks end
        trainers.ok("%mesh up loading --procs 3 --dist gloo --preload torch,torch._dynamo")
        trainers.ok(IMPORTS)
    said = told(trainers.run(TRAINING.format(loader=loader, workers=workers)), 1, "ValueError")
    assert "raise ValueError('no sample')" in said
    assert "replaced by a new one" in said
    assert text(trainers.ok(f"%%mesh\n{ALL_MEET}")) == "[0-2] 3.0"
    if workers:
        trainers.ok("%mesh down loading")


@pytest.mark.parametrize("cell", [SHARDED, PLAIN], ids=["fsdp", "plain"])
def test_groups_that_the_user_made_are_released_alike_and_can_be_made_again(scripts: Kernel, cell: str) -> None:
    said = told(scripts.run(cell), 2, "ValueError: no more")
    assert "----> " in said and "raise ValueError('no more')" in said
    assert "call init_process_group() again" in said
    assert text(scripts.ok(f"%%mesh\ndist.init_process_group('gloo')\n{ALL_MEET}")) == "[0-2] 3.0"


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_that_wait_for_one_to_join_are_released(scripts: Kernel, failing: int) -> None:
    cell = f"%%mesh\nif rank == {failing}:\n    raise ValueError('not I')\ndist.init_process_group('gloo')"
    told(scripts.run(cell), failing, "ValueError: not I")
    assert text(scripts.ok(f"%%mesh\ndist.init_process_group('gloo')\n{ALL_MEET}")) == "[0-2] 3.0"


def test_what_a_rank_catches_breaks_nothing(trainers: Kernel) -> None:
    cell = "try:\n    if rank == 1:\n        raise KeyError('caught')\nexcept KeyError:\n    pass\n"
    trainers.ok(f"%%mesh\nbefore = dist.group.WORLD\n{cell}{ALL_MEET}")
    trainers.run("%%mesh\nif rank == 1:\n    raise KeyError('nobody waits')")
    assert text(trainers.ok(f"%%mesh\nassert dist.group.WORLD is before\n{ALL_MEET}")) == "[0-2] 3.0"


def test_a_rank_that_dies_releases_the_others(trainers: Kernel) -> None:
    trainers.ok("%mesh up dying --procs 3 --preload torch,torch._dynamo")
    outcome = trainers.run(
        f"{IMPORTS}import os\ndist.init_process_group('gloo')\n"
        "if rank == 2:\n    os.kill(os.getpid(), 9)\ndist.barrier()"
    )
    told(outcome, 2, "killed by SIGKILL")
    trainers.ok("%mesh heal")
    assert text(trainers.ok(f"{IMPORTS}dist.init_process_group('gloo')\n{ALL_MEET}")) == "[0-2] 3.0"
    trainers.ok("%mesh down dying")


def test_a_stop_reaches_ranks_in_a_collective(trainers: Kernel) -> None:
    cell = trainers.send("%%mesh\nif rank:\n    dist.all_reduce(torch.ones(1))")  # rank 0 leaves it out
    cell.until(lambda out: bool(out.displays))
    trainers.interrupt()
    outcome = cell.wait()
    assert outcome.ename == "MeshCellInterrupt", outcome
    assert text(trainers.ok(f"%%mesh\n{ALL_MEET}")) == "[0-2] 3.0"


def test_a_script_runs_twice_and_its_error_fails_the_cell(scripts: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for arguments in ("", "", "fail", ""):
        outcome = scripts.run(f"%%mesh\n%run {script} {arguments}")
        if arguments:
            assert f"{script}:6" in told(outcome, 1, "ValueError: the script failed")
        else:
            assert text(outcome) == "[0-2] trained by 3", outcome
    # Without the barrier, a rank that is ahead closes its connections while others still make theirs, as in torchrun.
    again = "dist.init_process_group('gloo')\n    dist.barrier()\n    dist.destroy_process_group()"
    scripts.ok(f"%%mesh\nfor _ in range(5):\n    {again}")
    outcome = scripts.run("%%mesh\n%%time\n1 / 0")
    assert outcome.ename == "MeshCellError"


def test_programs_of_torchrun_run_beside_cells_and_after_a_heal(trainers: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    trainers.ok("%mesh up programs --procs 3 --preload torch,torch._dynamo")
    meet = "%%mesh\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + ALL_MEET
    run = f"""
async def run():
    address, port = await spmd.slice(gpus=0).get_host_port.call_one()
    assert all((await spmd.main.call(address, port, [{str(script)!r}])).values())
"""
    trainers.ok("from monarch.spmd import SPMDActor\nfrom monarch_kernel import get_mesh" + run)
    trainers.ok("spmd = get_mesh('programs').spawn('spmd', SPMDActor)")
    assert text(trainers.ok(f"{meet}\ndist.destroy_process_group()")) == ""  # the ranks have met once
    assert text(trainers.ok("await run()")) == "[0-2] trained by 3"
    trainers.ok("%mesh kill -r 1")
    trainers.ok("%mesh heal")  # the new rank has met nobody yet
    assert text(trainers.ok("await run()")) == "[0-2] trained by 3"
    assert text(trainers.ok(meet)) == "[0-2] 3.0"
    trainers.ok("%mesh down programs")


def test_ranks_know_of_one_world_whatever_started_the_kernel(start_kernel: Callable[..., Kernel]) -> None:
    """A kernel in a task of Slurm or MPI, as on many JupyterHubs: frameworks would take its variables for a rank's."""
    tasks = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    tasks |= {"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "hub", "SLURM_CPUS_PER_TASK": "2"}
    kernel = start_kernel(env={**os.environ, **tasks, **job})
    kernel.ok("%mesh up --procs 2")
    kernel.ok(
        f"%%mesh -o told\nimport os, sys\n_ = {{f'name{{i}}': 'x' * 20 for i in range(5)}}\ndisplay(_)\n"
        f"([n for n in {list(tasks)} if n in os.environ], [os.environ.get(n) for n in {list(job)}],"
        " os.environ['RANK'], os.environ['WORLD_SIZE'], 'TORCHELASTIC_RUN_ID' in os.environ, hasattr(sys, 'ps1'))"
    )
    expected = [([], list(job.values()), str(rank), "2", True, False) for rank in range(2)]
    assert ast.literal_eval(kernel.ok("list(told.values())").text) == expected
    assert kernel.ok("import os; os.environ['SLURM_NTASKS']").text == "'1'"
