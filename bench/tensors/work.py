"""The operations that ``dtensors`` and ``spmd`` both run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure import QUICK

REPEATS = 3 if QUICK else 5
#: The number of float32 values, a gigabyte (a sixteenth in a quick run), and of reductions in one measurement.
ALLREDUCE_NUMBERS = (1 << 24 if QUICK else 1 << 28) - 1
ALLREDUCES = 1


@dataclass(frozen=True)
class Chain:
    """Chain of one operation, whose result is its next first operand.

    Attributes:
        metric: the prefix of its keys in the results.
        operation: of the last result and a constant operand.
        size: rows and columns of both operands.
        placements: of the first value and of the operand: "shard" (rows over the ranks) or "replicate".
        count: operations in one measurement.
    """

    metric: str
    operation: Callable[[Any, Any], Any]
    size: int
    placements: tuple[str, str]
    count: int

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first value, and the operand. The magnitude of the product is stable for chains of any length."""
        return torch.ones(self.size, self.size), torch.eye(self.size)


CHAINS = [
    Chain("dtensor_add", operator.add, 64, ("shard", "shard"), 500 if QUICK else 2000),
    Chain("dtensor_matmul", operator.matmul, 256, ("shard", "replicate"), 50 if QUICK else 300),
]
