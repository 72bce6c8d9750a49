"""The state of the cells of a rank: the executor writes it, the monitor reads it on another thread."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from monarch_kernel.kernel.rank.lazy_shell import LazyShell


class CellActivity:
    """What `CellExecutor` does on the main thread of this process, and what `Monitor` asks of it."""

    cell: str = ""
    file: str = ""
    since: float = 0.0
    stopped: ClassVar[set[str]] = set()
    shell: ClassVar[LazyShell | None] = None
    ended: ClassVar[deque[str]] = deque(maxlen=256)
