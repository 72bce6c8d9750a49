"""Which rank of which job this process is, as its launcher tells it. It imports the standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Names of rank, size, local rank and local size, in the order in which they are looked for: torchrun's (also those of
#: Accelerate, Lightning and DeepSpeed), Open MPI's, MVAPICH2's, those of PMIx and PMI, Slurm's.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class RankIdentity:
    """A rank of a job.

    Attributes:
        rank: -1 if it is not known.
        world: the number of ranks; 0 if it is not known.
        local_rank: among the ranks of its host; -1 if it is not known.
        launch: the same for all ranks of one launch and for no other launch of the user, as far as launchers tell;
            "" if they do not.
        restarts: how often the launcher has started the ranks again.
    """

    rank: int = -1
    world: int = 0
    local_rank: int = -1
    launch: str = ""
    restarts: int = 0


def identity(environ: Mapping[str, str] | None = None) -> RankIdentity:
    """What the environment of a process tells."""
    environ = os.environ if environ is None else environ
    for rank, world, local, _ in _NAMES:
        if _number(environ.get(rank)) >= 0:
            return RankIdentity(
                _number(environ[rank]),
                max(0, _number(environ.get(world))),
                _number(environ.get(local)),
                _launch(environ),
                max(0, _number(environ.get("TORCHELASTIC_RESTART_COUNT"))),
            )
    return RankIdentity(launch=_launch(environ))


def _launch(environ: Mapping[str, str]) -> str:
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):
        return f"torchrun {run}"
    job = environ.get("SLURM_JOB_ID", "")
    if job:
        return f"Slurm job {job}.{environ.get('SLURM_STEP_ID', '')}"
    namespace = environ.get("PMIX_NAMESPACE", "")
    if namespace:
        return f"MPI job {namespace}"
    address = environ.get("MASTER_ADDR", "")
    return f"{address}:{environ.get('MASTER_PORT', '')}" if address else ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1


def present_identity(told: RankIdentity) -> RankIdentity:
    """The identity now: the program's default process group knows better than its environment."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
            return RankIdentity(rank, world, told.local_rank, told.launch, told.restarts)
    except Exception:  # it is being made, or ended
        pass
    if told.rank >= 0:
        return told
    later = identity()  # a launcher that sets the variables in the program itself, as Lightning does
    return later if later.rank >= 0 else told
