"""Which rank of which job this process is, as its launcher tells it, and in which dimensions.

It imports the standard library only.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

#: Names of rank, size and local rank, in the order in which they are looked for: torchrun's (also those of Accelerate,
#: DeepSpeed and Ray Train), Open MPI's, MVAPICH2's, those of PMIx and PMI, Slurm's.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
#: The steps of Slurm that have no number of their own, such as the batch script, are numbered from here.
_SPECIAL_STEPS = 0xFFFFFFF0


_UNNAMED = ("", "undefined", "default_pg")


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

    @property
    def known(self) -> bool:
        """Whether the process has said which rank, or of which launch it is."""
        return self.rank >= 0 or bool(self.launch)


def identity(environ: Mapping[str, str] | None = None) -> RankIdentity:
    """What the environment of a process tells."""
    environ = os.environ if environ is None else environ
    for names in _NAMES:
        rank, world, local = (_number(environ.get(name)) for name in names)
        if rank < 0 or (names[0] == "SLURM_PROCID" and not _in_step(environ)):
            continue
        if world < 0:  # PMIx tells no size, and older versions of Slurm that of the job alone
            world = _number(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")))
        if local < 0:
            local = _number(environ.get("SLURM_LOCALID"))
        restarts = _number(environ.get("TORCHELASTIC_RESTART_COUNT"))
        return RankIdentity(rank, max(0, world), local, _launch(environ, names[0]), max(0, restarts))
    # Lightning numbers its processes on the first host so, and those of other hosts when it makes the process group.
    local, node = _number(environ.get("LOCAL_RANK")), _number(environ.get("NODE_RANK"))
    world = max(0, _number(environ.get("WORLD_SIZE")))
    return RankIdentity(local if node == 0 and world else -1, world, local, _launch(environ, "RANK"))


def _in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started the process, rather than sbatch, whose script has a number among tasks, too."""
    return 0 <= _number(environ.get("SLURM_STEP_ID")) < _SPECIAL_STEPS


def _launch(environ: Mapping[str, str], by: str) -> str:
    """The launch of a process, whose rank is in the variable ``by``."""
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
        # Of each name of a process, the part that all have: mpirun's ranks have different steps of Slurm.
        for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MV2_COMM_WORLD_JOBID"):
            if environ.get(name):
                return f"MPI job {environ[name]}"
    return f"Slurm job {job}" if job else ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1


def present_identity(told: RankIdentity) -> RankIdentity:
    """The identity now. The program's default process group knows better than what its environment was at first."""
    found = told
    if found.rank < 0:  # a launcher may set the variables in the program itself, as Lightning does
        later = identity()
        found = later if later.known else found
    try:
        found = _of_ray(told, found)
    except Exception:  # it is being connected, or ended
        pass
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
            if rank >= 0:
                found = replace(found, rank=rank, world=world)
    except Exception:  # it is being made, or ended
        pass
    return found


def _of_ray(told: RankIdentity, found: RankIdentity) -> RankIdentity:
    """What Ray tells of its worker.

    Only what has been imported is asked, and nothing that would import more: an import on this thread can break one
    that the program is in.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return found
    context: Any = ray.runtime_context.get_runtime_context()
    if context.get_actor_id() is None:  # the program that drives the job, or a worker between tasks
        return found
    # Train sets variables for torch in its workers alone, and their job is also that of its other actors.
    found = replace(found, launch=told.launch or f"Ray job {context.get_job_id()}")
    worker = _worker_of_train() if told.rank < 0 else None
    return found if worker is None else replace(worker, launch=found.launch, restarts=found.restarts)


def _worker_of_train() -> RankIdentity | None:
    """The rank in Ray Train; None in other actors. Train's own functions import modules, so this looks beside them."""
    context: Any = getattr(sys.modules.get("ray.train.v2._internal.execution.context"), "_train_context", None)
    if context is not None:
        return RankIdentity(context.get_world_rank(), context.get_world_size(), context.get_local_rank())
    session: Any = getattr(sys.modules.get("ray.train._internal.session"), "_session", None)  # of its first version
    if session is not None:
        return RankIdentity(session.world_rank, session.world_size, session.local_rank)
    return None


def present_dimensions(now: RankIdentity) -> dict[str, int]:
    """The dimensions of the job, as its program has made them; empty if it has made none."""
    try:
        return dimensions(now.rank, now.world)
    except Exception:  # they are being made, or ended
        return {}


def dimensions(rank: int, world: int) -> dict[str, int]:
    """The names and sizes of the dimensions that all ranks have together, the outermost first.

    They come from the device meshes and process groups that PyTorch, if it is imported, and the main module have by
    name.

    Args:
        rank: this rank in the default process group.
        world: how many there are.

    Returns:
        Empty if the program has made none, or none in which ranks count as in the rows of an array.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or world < 2 or rank < 0:
        return {}
    return _of_meshes(world) or _of_groups(c10d, rank, world)


def _of_meshes(world: int) -> dict[str, int]:
    """The dimensions of the device mesh with the most of them that has all ranks."""
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    main: Any = sys.modules.get("__main__")
    if module is None or main is None:
        return {}
    found: dict[str, int] = {}
    resources: Any = getattr(module, "_mesh_resources", None)
    candidates: list[Any] = [*list(vars(main).values()), *getattr(resources, "mesh_stack", ())]
    for mesh in candidates:
        if type(mesh) is not module.DeviceMesh or mesh.mesh.flatten().tolist() != list(range(world)):
            continue
        sizes = [int(size) for size in mesh.mesh.shape]
        names = mesh.mesh_dim_names or [f"dim{number}" for number in range(len(sizes))]
        if len(sizes) > len(found):
            found = dict(zip(map(_label, names), sizes, strict=True))
    return found if math.prod(found.values()) == world else {}


def _of_groups(c10d: Any, rank: int, world: int) -> dict[str, int]:
    """The dimensions along which the process groups of this rank lie, if together they have all ranks.

    PyTorch describes the groups of device meshes by their dimensions, and other libraries theirs.
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
        # Of groups that begin alike, the smallest is a dimension, and the others are several ones.
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
    """A name that a dimension of a mesh can have."""
    found = re.sub(r"\W", "_", name).lower()
    return found if found.isidentifier() else f"dim_{found}"
