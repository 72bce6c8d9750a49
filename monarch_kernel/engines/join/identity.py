"""Determine the rank and job of this process from its launcher's variables, and the dimensions of the job.

It imports only the standard library.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

#: Names of rank, size and local rank, in order of precedence: those of torchrun (also used by Accelerate, DeepSpeed and
#: Ray Train), Open MPI, MVAPICH2, PMIx and PMI, and Slurm.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
#: Slurm numbers special steps, such as the batch script, from here.
_SPECIAL_STEPS = 0xFFFFFFF0


_UNNAMED = ("", "undefined", "default_pg")


@dataclass(frozen=True)
class RankIdentity:
    """A rank of a job.

    Attributes:
        rank: the rank; -1 if unknown.
        world: the number of ranks; 0 if unknown.
        local_rank: the rank among the ranks of its host; -1 if unknown.
        launch: an id that all ranks of one launch share and no other launch of the user has, if the launcher provides
            one; otherwise "".
        restarts: how often the launcher has restarted the ranks.
    """

    rank: int = -1
    world: int = 0
    local_rank: int = -1
    launch: str = ""
    restarts: int = 0

    @property
    def known(self) -> bool:
        """Return whether the rank or the launch is known."""
        return self.rank >= 0 or bool(self.launch)


def identity(environ: Mapping[str, str] | None = None) -> RankIdentity:
    """Determine the identity from the environment of a process."""
    environ = os.environ if environ is None else environ
    for names in _NAMES:
        rank, world, local = (_number(environ.get(name)) for name in names)
        if rank < 0 or (names[0] == "SLURM_PROCID" and not _in_step(environ)):
            continue
        if world < 0:  # PMIx provides no size, and older versions of Slurm only that of the job
            world = _number(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")))
        if local < 0:
            local = _number(environ.get("SLURM_LOCALID"))
        restarts = _number(environ.get("TORCHELASTIC_RESTART_COUNT"))
        return RankIdentity(rank, max(0, world), local, _launch(environ, names[0]), max(0, restarts))
    # Lightning sets these for its processes on the first host, and for other hosts when it creates the process group.
    local, node = _number(environ.get("LOCAL_RANK")), _number(environ.get("NODE_RANK"))
    world = max(0, _number(environ.get("WORLD_SIZE")))
    return RankIdentity(local if node == 0 and world else -1, world, local, _launch(environ, "RANK"))


def _in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started the process. The script of sbatch has a number among tasks, too."""
    return 0 <= _number(environ.get("SLURM_STEP_ID")) < _SPECIAL_STEPS


def _launch(environ: Mapping[str, str], by: str) -> str:
    """Return the launch of a process whose rank is in the variable ``by``."""
    job = environ.get("SLURM_JOB_ID", "")
    if by == "SLURM_PROCID":
        return f"Slurm job {job}.{environ.get('SLURM_STEP_ID', '')}"
    if by == "RANK":
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        if run not in ("", "none"):
            return f"torchrun {run}"
        address = environ.get("MASTER_ADDR", "")
        if address:
            return f"{address}:{environ.get('MASTER_PORT', '')}"
    else:
        # Use the part of a process name that all ranks share: ranks of mpirun have different Slurm steps.
        for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MV2_COMM_WORLD_JOBID"):
            if environ.get(name):
                return f"MPI job {environ[name]}"
    return f"Slurm job {job}" if job else ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1


def present_identity(told: RankIdentity) -> RankIdentity:
    """Return the identity now. The program's default process group takes precedence over the initial environment."""
    found = told
    if found.rank < 0:  # a launcher may set the variables in the program itself, like Lightning
        later = identity()
        found = later if later.known else found
    try:
        found = _of_ray(told, found)
    except Exception:  # it is being created or destroyed
        pass
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
            if rank >= 0:
                found = replace(found, rank=rank, world=world)
    except Exception:  # it is being created or destroyed
        pass
    return found


def _of_ray(told: RankIdentity, found: RankIdentity) -> RankIdentity:
    """Determine the identity of a Ray worker.

    This only uses modules that are already imported and functions that import nothing: an import on this thread can
    break an import in progress in the program.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return found
    context = ray.runtime_context.get_runtime_context()
    if context.get_actor_id() is None:  # the driver program of the job, or a worker between tasks
        return found
    # Train sets the variables for torch only in its own workers; other actors share the same job.
    found = replace(found, launch=told.launch or f"Ray job {context.get_job_id()}")
    worker = _worker_of_train() if told.rank < 0 else None
    return found if worker is None else replace(worker, launch=found.launch, restarts=found.restarts)


def _worker_of_train() -> RankIdentity | None:
    """Return the rank in Ray Train; None in other actors. Train's own functions import modules, so this avoids them."""
    context = getattr(sys.modules.get("ray.train.v2._internal.execution.context"), "_train_context", None)
    if context is not None:
        return RankIdentity(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
    session = getattr(sys.modules.get("ray.train._internal.session"), "_session", None)  # of its first version
    if session is not None:
        return RankIdentity(session.world_rank, session.world_size, session.local_rank)
    return None


def present_dimensions(now: RankIdentity) -> dict[str, int]:
    """Return the dimensions of the job, as created by its program; empty if there are none."""
    try:
        return dimensions(now.rank, now.world)
    except Exception:  # they are being created or destroyed
        return {}


def dimensions(rank: int, world: int) -> dict[str, int]:
    """Return names and sizes of the dimensions that together contain all ranks, outermost first.

    They come from the named device meshes and process groups of PyTorch, if it is imported, and of the main module.

    Args:
        rank: this rank in the default process group.
        world: the number of ranks.

    Returns:
        Empty if the program has created no dimensions, or none with ranks in row-major order.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or world < 2 or rank < 0:
        return {}
    return _of_meshes(world) or _of_groups(c10d, rank, world)


def _of_meshes(world: int) -> dict[str, int]:
    """Return the dimensions of the device mesh that contains all ranks and has the most dimensions."""
    module: ModuleType | None = sys.modules.get("torch.distributed.device_mesh")
    main = sys.modules.get("__main__")
    if module is None or main is None:
        return {}
    found: dict[str, int] = {}
    resources = getattr(module, "_mesh_resources", None)
    candidates: list[Any] = [*list(vars(main).values()), *getattr(resources, "mesh_stack", ())]
    for mesh in candidates:
        if type(mesh) is not module.DeviceMesh or mesh.mesh.flatten().tolist() != list(range(world)):
            continue
        sizes = [int(size) for size in mesh.mesh.shape]
        names = mesh.mesh_dim_names or [f"dim{number}" for number in range(len(sizes))]
        if len(sizes) > len(found):
            found = dict(zip(map(_label, names), sizes, strict=True))
    return found if math.prod(found.values()) == world else {}


def _of_groups(c10d: ModuleType, rank: int, world: int) -> dict[str, int]:
    """Return the dimensions of the process groups of this rank, if together they contain all ranks.

    PyTorch describes the groups of device meshes by their dimensions, and other libraries do the same for their groups.
    """
    by_stride: dict[int, tuple[int, str]] = {}
    for group, members in list(c10d._world.pg_group_ranks.items()):
        ranks = sorted(members)
        if rank not in members or not 2 <= len(ranks) < world:
            continue
        stride = ranks[1] - ranks[0]
        name = str(getattr(group, "group_desc", None) or "")
        if ranks != list(range(ranks[0], ranks[0] + stride * len(ranks), stride)):
            continue
        known = by_stride.get(stride)
        # Of groups with the same start, the smallest is one dimension, and the others combine several.
        if known is None or len(ranks) < known[0] or (len(ranks) == known[0] and known[1] in _UNNAMED):
            by_stride[stride] = len(ranks), name
    inner: list[tuple[str, int]] = []
    stride = 1
    while stride in by_stride:
        size, name = by_stride[stride]
        inner.append((name, size))
        stride *= size
    if stride != world:
        return {}
    outer = inner[::-1]
    labels = ["" if name in _UNNAMED else _label(name.removeprefix("mesh_")) for name, _ in outer]
    named = all(labels) and len(set(labels)) == len(labels)
    return {labels[at] if named else f"dim{at}": size for at, (_, size) in enumerate(outer)}


def _label(name: str) -> str:
    """Convert a name to a valid name of a mesh dimension."""
    found = re.sub(r"\W", "_", name).lower()
    return found if found.isidentifier() else f"dim_{found}"
