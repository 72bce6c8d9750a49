"""Handle operations that fail on some ranks while the other ranks wait for these in a collective: `LoneFailures`.

A rank reports its failures. If the other ranks do not fail in the same operation, they wait for that rank, or soon
will. The process group is then abandoned, which ends their wait with an error, and formed again on the next use.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.actor.ports.receiver import Channel
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.rank import rebinding
from monarch_kernel.runtime.tensor.sharded.rank.rebinding import StreamPosition
from monarch_kernel.runtime.tensor.wire import FailedValue

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld

#: The time for the other ranks to fail as well, once they have reached the operation (seconds).
GRACE = 0.1
#: The interval of queries for their position (seconds).
INTERVAL = 0.01


class LoneFailures:
    """Collects and resolves the failures that ranks of one world report."""

    def __init__(self, world: ShardedWorld, engine: TensorEngine) -> None:
        self._world = weakref.ref(world)
        self._size = len(engine.world)
        self._watch = engine.world.spawn("tensor-watch", StreamPosition, engine._key)
        self._lock = threading.Lock()
        self._receiver: Any = None
        self._next: Any = None
        self._groups = self._group = 0
        #: The ranks that have failed, by record.
        self._failed: dict[int, set[int]] = {}
        #: The reason why the last group was abandoned.
        self._cause: FailedValue | None = None
        #: From this record on, operations no longer fail because of it.
        self._until = 0
        self._judges: list[threading.Thread] = []

    def listen(self, engine: TensorEngine) -> None:
        """Accept reports of a new group, and ignore later reports of the previous one."""
        port, receiver = Channel.open()
        with self._lock:
            self._groups += 1
            group = self._group = self._groups
            self._failed = {}
            before, self._receiver = self._receiver, receiver
        if before is not None:
            before.close()
        self._wait(receiver)
        everywhere(engine, rebinding.report_to, port, group)

    def cause_of(self, failed: FailedValue) -> FailedValue:
        """Return the failure that caused a group to be abandoned, for a failure that results from this."""
        cause = self._cause
        if cause is None or failed.lost or not cause.record <= failed.record < self._until:
            return failed
        return cause

    def settle(self) -> None:
        """Wait until the reported failures are resolved."""
        for thread in list(self._judges):
            thread.join()

    def formed(self, record: int) -> None:
        """Note that a new group was formed. It is used from this record on."""
        self._until = min(self._until, record)

    def _wait(self, receiver: Any) -> None:
        weak = weakref.ref(self)

        def arrived(future: Any) -> None:
            living = weak()
            if living is not None:
                try:
                    report = future.get()
                except SupervisionError:  # all ranks have died
                    return
                living._reported(*report)
                living._wait(receiver)

        self._next = receiver.recv()  # nothing else holds it
        self._next.add_done_callback(arrived)

    def _reported(self, group: int, failed: FailedValue, ranks: list[int]) -> None:
        with self._lock:
            if group != self._group:
                return
            known = failed.record in self._failed
            self._failed.setdefault(failed.record, set()).add(failed.rank)
        if not known:
            participants = set(ranks) or set(range(self._size))
            judge = threading.Thread(
                target=self._judge, args=(group, failed, participants), name="monarch-tensor-failure", daemon=True
            )
            self._judges = [thread for thread in self._judges if thread.is_alive()] + [judge]
            judge.start()

    def _judge(self, group: int, failed: FailedValue, ranks: set[int]) -> None:
        """Wait until the other ranks have failed in the same operation, or are found not to fail."""
        arrived: float | None = None
        while True:
            with self._lock:
                if group != self._group:
                    return
                others = ranks - self._failed[failed.record]
            if not others:
                return
            if arrived is not None and time.monotonic() - arrived > GRACE:
                break
            try:
                at = list(self._watch.at.call().get().values())
            except (SupervisionError, ActorError, RuntimeError):  # a rank has died, or the mesh was stopped
                return
            if arrived is None and all(at[rank] >= failed.record for rank in others):
                arrived = time.monotonic()
            time.sleep(INTERVAL)
        with self._lock:
            if group != self._group:
                return
            self._group = -1  # later failures have this cause
            self._cause, self._until = failed, sys.maxsize
        world = self._world()
        if world is not None:
            world.give_up()
