"""`Definition`: everything about an operation that is the same in all its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monarch_kernel.runtime.tensor.wire.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Definition:
    """One operation with all that is fixed about it, as ranks get it.

    Attributes:
        number: what records name it by.
        operation: ``"aten::add.Tensor"``, a pickled function, or a recorded sequence of operations.
        template: pickled ``(args, kwargs)`` with slots.
        inputs: how many values a record names; `floats` and `outputs` likewise.
        new: for each result in turn, whether it is a new value; None where the result is a single new value, or none.
        mutates: positions of the inputs that the operation writes.
        sharded: whether values are DTensors.
        standins: for an operation in which ranks meet: size and dtype of each input. A rank on which an input has
            failed takes part with zeros of these, so that no other rank waits for it.
        label: what errors call it.
    """

    number: int
    operation: str | bytes | Recorded
    template: bytes
    inputs: int
    floats: int
    outputs: int
    new: tuple[bool, ...] | None
    mutates: tuple[int, ...]
    sharded: bool
    standins: tuple[tuple[tuple[int, ...], Any], ...] | None
    label: str
