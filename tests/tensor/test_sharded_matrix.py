"""Operations on sharded tensors give what they give on one device: values and gradients, whatever the layout.

The oracle is this process with plain tensors. Everything runs on four ranks with gloo; each operation's cases are
issued together, and fetched then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from monarch_kernel.distributed import FallbackWarning, Mesh, distribute
from monarch_kernel.tensor import fetch_shard
from tests.tensor.catalogue import OPERATIONS, SIZES, Operation

#: Name of a layout: the mesh's shape, and placements of the k-th input.
LAYOUTS: dict[str, tuple[int, tuple[tuple[Placement, ...], ...]]] = {
    "rows": (1, ((Shard(0),),)),
    "columns": (1, ((Shard(1),),)),
    "mixed": (1, ((Shard(0),), (Shard(1),), (Replicate(),))),
    "grid": (2, ((Shard(0), Shard(1)),)),
    "terms": (1, ((Partial(),),)),
}
#: What each operation is tried with: layout, sizes, dtype.
TRIED = [
    ("rows", "even", torch.float32),
    ("rows", "uneven", torch.float32),
    ("columns", "uneven", torch.float32),
    ("mixed", "uneven", torch.float32),
    ("grid", "uneven", torch.float32),
    ("terms", "even", torch.float32),
    ("rows", "uneven", torch.bfloat16),
]
#: Every other operation leaves out one of these, and every other two bfloat16, for the time of the suite.
ALTERNATING = [("rows", "even"), ("columns", "uneven")]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 5e-2, "atol": 0.15}}


@pytest.fixture(scope="module")
def meshes(runtime: None) -> Iterator[dict[int, Mesh]]:
    """One and two dimensions over the same four ranks."""
    with Mesh(shape=(4,), mesh_dim_names=("x",)) as line:
        yield {1: line, 2: Mesh.of(line.procs, ("a", "b"), (2, 2))}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)
def test_operation_is_as_on_one_device(meshes: dict[int, Mesh], operation: Operation) -> None:
    expected: dict[Any, Any] = {}
    issued: dict[Any, Any] = {}
    seen: list[Any] = []  # what was distributed: layouts that differ in a later input alone are often one
    index = OPERATIONS.index(operation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for layout, sizes, dtype in TRIED:
            if dtype is torch.bfloat16 and (not operation.bfloat16 or index // 2 % 2):
                continue
            if (layout, sizes) == ALTERNATING[index % 2]:
                continue
            dimensions, placements = LAYOUTS[layout]
            tensors = operation.make(SIZES[sizes], dtype)
            cut = [fitting(placements[k % len(placements)], t) for k, t in enumerate(tensors)]
            if (dimensions, cut, sizes, dtype) in seen:
                continue
            seen.append((dimensions, cut, sizes, dtype))
            if (sizes, dtype) not in expected:
                expected[sizes, dtype] = outcome(operation, operation.make(SIZES[sizes], dtype))
            inputs = [distribute(t, meshes[dimensions], each) for t, each in zip(tensors, cut)]
            issued[layout, sizes, dtype] = outcome(operation, inputs)
        for (layout, sizes, dtype), results in issued.items():
            case = f"{operation.name}, {layout}, {sizes}, {dtype}"
            for got, wanted in zip(fetch_shard(results).get(), expected[sizes, dtype], strict=True):
                torch.testing.assert_close(
                    got, wanted, **TOLERANCE[dtype], msg=lambda text, case=case: f"{case}: {text}"
                )


def outcome(operation: Operation, inputs: list[Any]) -> list[Any]:
    """Results and gradients of an operation."""
    if operation.backward:
        for tensor, given in zip(inputs, operation.inputs):
            tensor.requires_grad_(given.learned and tensor.is_floating_point())
    results = flat(operation.run(*inputs))
    if not operation.backward:
        return results
    learning = [r for r in results if r.requires_grad]
    loss = learning[0] if len(learning) == 1 and not learning[0].dim() else sum((r * r).sum() for r in learning)
    loss.backward()
    return [r.detach() for r in results] + [t.grad for t in inputs if t.requires_grad]


def flat(results: Any) -> list[Any]:
    return [results] if isinstance(results, torch.Tensor) else [r for part in results for r in flat(part)]


def fitting(placements: tuple[Placement, ...], tensor: torch.Tensor) -> list[Placement]:
    """The placements, with what cuts a dimension that this tensor does not have left out."""
    found: list[Placement] = []
    for p in placements:
        if isinstance(p, Shard) and p.dim >= tensor.dim():
            p = Shard(0) if tensor.dim() and len(placements) == 1 else Replicate()
        if p.is_partial() and not tensor.is_floating_point():
            p = Replicate()
        found.append(p)
    return found
