"""Which rank of which job a process is, and in which dimensions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.engines.join.identity import RankIdentity, identity
from tests.conftest import needs
from tests.waiting import patience

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "h"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "123",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankIdentity(3, 8, 1, "torchrun a")),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, RankIdentity(3, 8, 1, "torchrun a", 2)),
        # torchrun in an allocation, whose own agent has a number among the tasks
        ({**TORCHRUN, **SRUN}, RankIdentity(3, 8, 1, "torchrun a")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},  # deepspeed
            RankIdentity(0, 2, -1, "h:1"),
        ),
        (SRUN, RankIdentity(5, 6, 1, "Slurm job 7.2")),
        # mpirun in an allocation: its ranks on several hosts have several steps, and that of the batch script is none
        ({**SRUN, **MPIRUN}, RankIdentity(1, 2, 1, "MPI job 123")),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, RankIdentity(launch="Slurm job 7")),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n", **SRUN}, RankIdentity(1, 6, 1, "MPI job n")),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, RankIdentity(1, 4, 1)),
        ({"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"}, RankIdentity(2, 4)),
        # Lightning starts all but the first process, and tells no rank
        (
            {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "2"},
            RankIdentity(1, 4, 1, "h:2"),
        ),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}, RankIdentity(-1, 4, 1)),
        ({"RANK": "two"}, RankIdentity()),
        ({}, RankIdentity()),
    ],
)
def test_the_variables_of_launchers(environ: dict[str, str], expected: RankIdentity) -> None:
    assert identity(environ) == expected


DIMENSIONS = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from monarch_kernel.engines.join.identity import dimensions

found = []
def look(make):
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    kept = make()
    found.append(dimensions(5, 8))
    dist.destroy_process_group()

def groups(*sizes):
    inner = 1
    for size, name in sizes:
        for first in range(8):
            if first // inner % size == 0:
                dist.new_group([first + inner * at for at in range(size)], group_desc=name)
        inner *= size

def named():
    global mesh
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

look(lambda: None)
look(named)
del mesh
look(lambda: init_device_mesh("cpu", (4, 1, 2), mesh_dim_names=("dp", "none", "tp")))  # a function's own
look(lambda: groups((2, "TENSOR_MODEL_PARALLEL_GROUP"), (2, "PP"), (2, "DP")))
look(lambda: groups((4, None), (2, None)))
look(lambda: dist.new_group([5, 6, 7]))
print(json.dumps(found))
"""


@pytest.mark.torch
def test_dimensions_are_those_of_the_programs_device_mesh_or_groups() -> None:
    needs("torch")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", DIMENSIONS], capture_output=True, text=True, timeout=patience(100), env=environment
    )
    assert done.returncode == 0, done.stderr
    assert [list(each.items()) for each in json.loads(done.stdout)] == [
        [],
        [("dp", 2), ("tp", 4)],
        [("dp", 4), ("tp", 2)],
        [("dp", 2), ("pp", 2), ("tensor_model_parallel_group", 2)],
        [("dim0", 2), ("dim1", 4)],
        [],
    ]
