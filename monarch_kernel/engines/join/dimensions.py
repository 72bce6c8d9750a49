"""The dimensions of a job, from the device meshes and the process groups of its program.

It looks at what PyTorch, if it is imported, and the program's main module have by name. It imports the standard library
only.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

_UNNAMED = ("", "undefined", "default_pg")


def dimensions(rank: int, world: int) -> dict[str, int]:
    """The names and sizes of the dimensions that all ranks have together, the outermost first.

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
