"""`Recorded`: a sequence of operations that ranks run as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records, with places of their own: values are numbered from 0, the inputs first, and floats likewise.

    Attributes:
        steps: records like those of a stream.
        inputs: how many values come from outside.
        floats: each float of the records; None for one that comes with every call, in order.
        results: the places of the values that the sequence gives.
        backend: what ``torch.compile`` makes of it on the ranks, or None: as it stands.
    """

    steps: tuple[tuple[int, ...], ...]
    inputs: int
    floats: tuple[float | None, ...]
    results: tuple[int, ...]
    backend: str | None
