"""The actor that reports where the main thread of a rank is, and interrupts or releases the cell that runs there."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.engines import tool_runtime
from monarch_kernel.kernel.rank.lazy_shell import LazyShell
from monarch_kernel.kernel.rank.user_code import cpu_ticks, is_foreign, where_is
from monarch_kernel.spmd import in_process_group, release


class CellActivity:
    """The state of `CellExecutor` on its thread, and the requests of `Monitor` to it."""

    cell: str = ""
    file: str = ""
    since: float = 0.0
    thread: int = 0
    stopped: ClassVar[set[str]] = set()
    shell: ClassVar[LazyShell | None] = None
    ended: ClassVar[deque[str]] = deque(maxlen=256)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank's main thread is.

    Attributes:
        rank: the rank in its mesh.
        file: the file of the innermost line of user code.
        line: the number of that line.
        function: its function.
        waits: whether it waits in torch for other ranks.
        cell: the id of the running cell.
        cell_file: the name of the cell in tracebacks.
        since: when the cell began (`time.time()`).
        endpoint: the endpoint that runs instead of a cell: `trainers.step`.
    """

    rank: int
    file: str
    line: int
    function: str
    waits: bool
    cell: str = ""
    cell_file: str = ""
    since: float = 0.0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A rank's reply to an interrupt: whether the cell had begun. If it had not, it never runs there."""

    rank: int
    begun: bool


class Monitor(Actor):
    """Reports where the main thread of this rank is, from another thread."""

    __tool__ = True

    def __init__(self) -> None:
        self._rank = tool_runtime().actor_here().rank.rank
        self._main = threading.main_thread().ident or 0
        self._ticks = -1

    @endpoint
    def where(self) -> Whereabouts | None:
        """Return where this rank is in its cell, or in an endpoint; None while neither runs."""
        if not CellActivity.cell:
            return self._in_endpoint()
        place = where_is(CellActivity.thread or self._main, is_foreign)
        if place is None:
            return None
        return Whereabouts(self._rank, *place, self._waits(), CellActivity.cell, CellActivity.file, CellActivity.since)

    def _in_endpoint(self) -> Whereabouts | None:
        for each in tool_runtime().endpoints_here():
            place = None if each.tool else where_is(each.thread, is_foreign)
            if place is not None:
                return Whereabouts(self._rank, *place, False, endpoint=each.label)
        return None

    @endpoint
    def interrupt_cell(self, cell: str) -> Interrupted:
        """Raise KeyboardInterrupt in that cell, now or as soon as it begins, and in no other."""
        dropped = self._drop(cell)
        if dropped.begun and cell not in CellActivity.ended:
            tool_runtime().interrupt_main_thread()
            self._release(cell, None)  # no signal ends a wait in a collective
        return dropped

    @endpoint
    def release_cell(self, cell: str, failed: tuple[int, ...]) -> None:
        """End the waits of this rank for ranks that have failed in that cell, until the cell ends here."""
        self._release(cell, frozenset(failed))

    def _release(self, cell: str, failed: frozenset[int] | None) -> None:
        if tool_runtime().OF_PROGRAM:  # the process groups of a joined program must not be broken
            return

        def thread() -> int:
            return self._main if CellActivity.cell == cell else 0

        # An interrupt makes a separate request: it ends more waits than a request for failed ranks, which may be active
        # already.
        release((cell, failed is None), thread, lambda: cell not in CellActivity.ended, failed)

    @endpoint
    def drop_cell(self, cell: str) -> Interrupted:
        """If that cell has not begun, raise KeyboardInterrupt as soon as it does."""
        return self._drop(cell)

    def _drop(self, cell: str) -> Interrupted:
        # The order matters: a cell that begins sets its id before it checks whether it was stopped.
        CellActivity.stopped.add(cell)
        return Interrupted(self._rank, CellActivity.cell == cell or cell in CellActivity.ended)

    def _waits(self) -> bool:
        """Return whether the main thread is in torch and a process group, and was idle since the last call."""
        ticks, self._ticks = self._ticks, cpu_ticks(os.getpid())
        if ticks != self._ticks or not in_process_group():
            return False
        innermost = where_is(CellActivity.thread or self._main, lambda _file: False)
        return innermost is not None and f"{os.sep}torch{os.sep}" in innermost[0]
