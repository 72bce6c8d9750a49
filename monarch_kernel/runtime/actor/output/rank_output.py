"""`RankOutput`: one piece of output, and the rank that wrote it."""

from __future__ import annotations

from typing import Any

import msgspec


class RankOutput(msgspec.Struct, frozen=True):
    """One output of one rank; ``kind``, ``cell`` and ``data`` are as in ``protocol.output_records.OutputEvent``."""

    mesh: str
    proc: str
    rank: int
    coords: dict[str, int]
    host: str
    pid: int
    stream: str
    cell: str
    kind: str
    data: Any
