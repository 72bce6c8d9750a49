"""The operations that ``dtensors`` and ``spmd`` run alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure import QUICK

REPEATS = 3 if QUICK else 5
#: float32 numbers, a gigabyte (a sixteenth in a quick run), and how often they are reduced in one measurement.
ALLREDUCE_NUMBERS = (1 << 24 if QUICK else 1 << 28) - 1
ALLREDUCES = 1


@dataclass(frozen=True)
class Chain:
    """One operation again and again, its result its first operand.

    Attributes:
        metric: what its keys in the results begin with.
        operation: of the last result and an operand that stays.
        size: of both, rows and columns.
        placements: of the first value and of the operand: "shard" (rows over the ranks) or "replicate".
        count: operations in one measurement.
    """

    metric: str
    operation: Callable[[Any, Any], Any]
    size: int
    placements: tuple[str, str]
    count: int

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first value, and the operand; the product keeps its size however long the chain is."""
        return torch.ones(self.size, self.size), torch.eye(self.size)


CHAINS = [
    Chain("dtensor_add", operator.add, 64, ("shard", "shard"), 500 if QUICK else 2000),
    Chain("dtensor_matmul", operator.matmul, 256, ("shard", "replicate"), 50 if QUICK else 300),
]
