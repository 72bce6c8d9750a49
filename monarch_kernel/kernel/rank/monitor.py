"""The actor that tells where a rank's main thread is, and interrupts or releases the cell that runs there."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from monarch_kernel.actor import Actor, context, endpoint
from monarch_kernel.introspection import endpoints_here
from monarch_kernel.kernel.rank.activity import Activity
from monarch_kernel.kernel.rank.process_group import cpu_ticks
from monarch_kernel.kernel.rank.user_code import is_foreign, where_is
from monarch_kernel.spmd import in_process_group, release


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank's main thread is.

    Attributes:
        rank: the rank in its mesh.
        file: of the user's innermost line.
        line: its number.
        function: its function.
        waits: whether it waits in torch for other ranks.
        cell: the id of the cell that runs.
        cell_file: what tracebacks call that.
        since: when that began (`time.time()`).
        endpoint: what runs instead of a cell, if it is an actor: `trainers.step`.
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
    """What an interrupt found on a rank: whether the cell had begun. One that had not will not run any of its code."""

    rank: int
    begun: bool


class Monitor(Actor):
    """Tells where this rank's main thread is, from a thread of its own."""

    __tool__ = True

    def __init__(self) -> None:
        self._rank = context().actor_instance.rank.rank
        self._main = threading.main_thread().ident or 0
        self._ticks = -1

    @endpoint
    def where(self) -> Whereabouts | None:
        """Where this rank is in its cell, or in an endpoint of an actor; None when neither runs."""
        if not Activity.cell:
            return self._in_endpoint()
        place = where_is(self._main, is_foreign)
        if place is None:
            return None
        return Whereabouts(self._rank, *place, self._waits(), Activity.cell, Activity.file, Activity.since)

    def _in_endpoint(self) -> Whereabouts | None:
        for each in endpoints_here():
            place = None if each.tool else where_is(each.thread, is_foreign)
            if place is not None:
                return Whereabouts(self._rank, *place, False, endpoint=f"{each.actor}.{each.endpoint}")
        return None

    @endpoint
    def interrupt_cell(self, cell: str) -> Interrupted:
        """Raise KeyboardInterrupt in that cell, now or as soon as it begins; never in another one."""
        dropped = self._drop(cell)
        if dropped.begun and cell not in Activity.ended:
            os.kill(os.getpid(), signal.SIGINT)
            self._release(cell, ())  # no signal ends a wait in a collective
        return dropped

    @endpoint
    def release_cell(self, cell: str, failed: tuple[int, ...]) -> None:
        """Other ranks have failed in that cell: end this one's waits for them, until the cell has ended here."""
        self._release(cell, failed)

    def _release(self, cell: str, failed: tuple[int, ...]) -> None:
        def thread() -> int:
            return self._main if Activity.cell == cell else 0

        release(cell, thread, lambda: cell not in Activity.ended, frozenset(failed))

    @endpoint
    def drop_cell(self, cell: str) -> Interrupted:
        """If that cell has not begun, raise KeyboardInterrupt in it as soon as it does."""
        return self._drop(cell)

    def _drop(self, cell: str) -> Interrupted:
        # In this order: a cell that begins now says so before it looks whether it was stopped.
        Activity.stopped.add(cell)
        return Interrupted(self._rank, Activity.cell == cell or cell in Activity.ended)

    def _waits(self) -> bool:
        """Whether the main thread is in torch, in a process group, and has not computed since it was last asked."""
        ticks, self._ticks = self._ticks, cpu_ticks(os.getpid())
        if ticks != self._ticks or not in_process_group():
            return False
        innermost = where_is(self._main, lambda _file: False)
        return innermost is not None and f"{os.sep}torch{os.sep}" in innermost[0]
