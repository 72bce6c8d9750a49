"""The state of a rank's cells: the executor writes it, and the monitor reads it on another thread."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from monarch_kernel.kernel.rank.lazy_shell import LazyShell


class CellActivity:
    """What `CellExecutor` is doing, on which thread of this process, and what `Monitor` requests from it."""

    cell: str = ""
    file: str = ""
    since: float = 0.0
    thread: int = 0
    stopped: ClassVar[set[str]] = set()
    shell: ClassVar[LazyShell | None] = None
    ended: ClassVar[deque[str]] = deque(maxlen=256)
