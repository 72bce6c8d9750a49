"""What a rank's cells do at this moment: written by the executor, read by the monitor beside it."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from monarch_kernel.kernel.rank.lazy_shell import LazyShell


class Activity:
    """What `CellExecutor` does on the main thread of this process, and what `Monitor` wants of it."""

    cell: str = ""
    file: str = ""
    since: float = 0.0
    stopped: ClassVar[set[str]] = set()
    shell: ClassVar[LazyShell | None] = None
    ended: ClassVar[deque[str]] = deque(maxlen=256)
