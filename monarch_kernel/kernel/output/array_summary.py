"""What tells arrays apart at a glance: shape, type, range, and how their elements are distributed."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

#: Of larger arrays, only so many elements are read.
MOST_ELEMENTS = 1_000_000
BINS = 24


@dataclass(frozen=True, slots=True)
class ArraySummary:
    """An array or a tensor in figures. Elements that are not finite are counted, and left out of the others.

    Attributes:
        kind: its type and shape: `float32 [128, 64]`.
        low, mean, high: of its finite elements; NaN if there is none.
        bad: the share of elements that are not finite.
        counts: how many elements are in each equal part of the range.
        sampled: not all elements were read.
    """

    kind: str
    low: float = math.nan
    mean: float = math.nan
    high: float = math.nan
    bad: float = 0.0
    counts: tuple[int, ...] = ()
    sampled: bool = False


def summary_of(value: Any) -> ArraySummary | None:
    """The summary of a numpy array, or of a tensor in this process's memory; None for anything else."""
    kind = f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')} {list(getattr(value, 'shape', ()))}"
    try:
        elements = _elements(value)
    except Exception:  # a tensor without data, or of a kind that numpy does not know
        return ArraySummary(kind)
    if elements is None:
        return None
    import numpy

    size = elements.size
    sampled = size > MOST_ELEMENTS
    if sampled:
        elements = elements[:: size // MOST_ELEMENTS]
    if not elements.size or elements.dtype.kind not in "biuf":
        return ArraySummary(kind, sampled=sampled)
    numbers = elements.astype(numpy.float64)
    finite = numbers[numpy.isfinite(numbers)]
    bad = 1 - finite.size / numbers.size
    if not finite.size:
        return ArraySummary(kind, bad=bad, sampled=sampled)
    low, high = float(finite.min()), float(finite.max())
    counts, _edges = numpy.histogram(finite, BINS, (low, high) if high > low else (low - 0.5, high + 0.5))
    return ArraySummary(kind, low, float(finite.mean()), high, bad, tuple(map(int, counts)), sampled)


def _elements(value: Any) -> Any:
    """The elements as a flat numpy array; None if it is no array with at least one dimension."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if not value.dim():
            return None
        plain = value.detach()
        if plain.device.type != "cpu":  # reading it would wait for a GPU
            raise ValueError("not in this process's memory")
        if plain.is_floating_point() and plain.dtype not in (torch.float16, torch.float32, torch.float64):
            plain = plain.float()
        return plain.reshape(-1).numpy()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim:
        return value.reshape(-1)
    return None
