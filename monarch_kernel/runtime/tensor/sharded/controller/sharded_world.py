"""Manage torch's device meshes over the process group of a world. They are created again with it after a loss."""

from __future__ import annotations

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.actor.ports.receiver import Channel
from monarch_kernel.runtime.mesh.rankset import name_ranks
from monarch_kernel.runtime.spmd.groups import Group
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import DeviceMeshError
from monarch_kernel.runtime.tensor.controller.world_group import everywhere
from monarch_kernel.runtime.tensor.sharded.rank import sharing, state
from monarch_kernel.runtime.tensor.sharded.rank.sharing import StreamPosition
from monarch_kernel.runtime.tensor.wire import FailedValue

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.healing.healed import HostSource
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


# Handle operations that fail on some ranks while the other ranks wait for these in a collective: `LoneFailures`.
#
# A rank reports its failures. If the other ranks do not fail in the same operation, they wait for that rank, or soon
# will. The process group is then abandoned, which ends their wait with an error, and formed again on the next use.

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
        everywhere(engine, sharing.report_to, port, group)

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


#: The maximum number of attempts to form the group, if ranks die meanwhile.
ATTEMPTS = 5
#: Called when a group was formed again, with the ranks that have new processes. Returns the numbers of restored values.
AfterLoss = Callable[[list[int]], Iterable[int]]


class FallbackWarning(UserWarning):
    """An operation had no rule for the layout of its inputs, and ran on whole tensors on every rank."""


class Unformed(DeviceMeshError):
    """The process group must be formed again. This is never raised to users."""


class ShardedWorld:
    """The sharded meshes of an engine, over the process group of all its ranks.

    Attributes:
        after_forming: called when a group was formed again, before values are restored.
        after_loss: see `AfterLoss`.
    """

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = weakref.ref(engine)
        self._alone: LoneFailures | None = None
        self._joined: list[weakref.ref[ShardedMesh]] = []
        self._shared: set[tuple[Any, ...]] = set()
        self._port, self._notes = Channel[tuple[str, int]].open()
        self.after_forming: list[Callable[[], None]] = []
        self.after_loss: list[AfterLoss] = []

    @classmethod
    def of(cls, engine: TensorEngine) -> ShardedWorld:
        """Return the instance of an engine."""
        with engine.lock:
            found = engine.extras.get("world")
            if found is None:
                found = engine.extras["world"] = cls(engine)
            return found

    def join(self, target: ShardedMesh) -> None:
        """Make the ranks create the device mesh of a target. The first one forms the process group."""
        engine = target.engine
        with engine.lock:
            if self._alone is None:
                engine.groups.ensure()
                self._alone = LoneFailures(self, engine)
                engine.lost.clear()
                self._begin(engine, self._alone)
                engine.groups.after_joining.append(_later(self, ShardedWorld._formed_again))
                engine.on_replaced.append(_later(self, ShardedWorld.form))
            self._make(target)
            self._joined.append(weakref.ref(target))

    def form(self, hosts: HostMesh | HostSource | None = None) -> Group | None:
        """Form the process group again, after a loss.

        Ranks that wait in a collective are released, dead ranks are replaced, and device meshes are created again and
        bound to the values. A value that one rank has lost becomes a failure on all ranks, so that no rank waits for
        another because of it.

        Args:
            hosts: spare hosts, as for ``ProcMesh.heal``.

        Returns:
            The group; None if the program's own group is used.

        Raises:
            HealError: ranks cannot be replaced.
        """
        engine = self._engine()
        assert engine is not None  # the caller holds it
        with engine.lock:
            # Operations that the program has issued meanwhile are for the new group, unless it has lost values.
            issued = engine.ints, engine.floats, engine.pending, engine.target
            engine.ints, engine.floats, engine.pending = [], [], 0
            before = engine.replacements
            given_up = self.forgive()
            for attempt in range(ATTEMPTS):
                try:
                    group = engine.groups.form(hosts)
                    break
                except (SupervisionError, ActorError):  # another rank has died meanwhile
                    if attempt == ATTEMPTS - 1:
                        for target in given_up:
                            target.error = target.error or _unformed(target)
                        raise
            else:
                raise AssertionError("the last attempt has raised")
            if engine.replacements == before and not engine.lost:
                engine.ints, engine.floats, engine.pending, engine.target = issued
        return group

    def _formed_again(self) -> None:
        """Handle a new group that all ranks have joined."""
        engine, alone = self._engine(), self._alone
        if engine is None or alone is None:
            return
        self.forgive()
        self._begin(engine, alone)
        for target in self._targets():
            self._make(target)
        for key in self._shared:
            self._share(engine, key)
        self._agree(engine, alone, sorted(engine.lost))
        engine.lost.clear()

    def _begin(self, engine: TensorEngine, alone: LoneFailures) -> None:
        everywhere(engine, state.begin, self._port)
        alone.listen(engine)

    def _agree(self, engine: TensorEngine, alone: LoneFailures, lost: list[int]) -> None:
        """Make all ranks hold the same values as failures."""
        failures: dict[int, FailedValue] = {}
        for of_rank in everywhere(engine, sharing.rebind):
            for number, failed in of_rank.items():
                known = failures.get(number)
                if known is None or failed.record < known.record:
                    failures[number] = failed
        failures = {number: alone.cause_of(failed) for number, failed in failures.items()}
        alone.formed(engine.record)
        for again in self.after_forming:
            again()
        whole: set[int] = set()
        if lost:
            survivors = [r for r in range(len(engine.world)) if r not in lost]
            if survivors:  # all ranks draw the same random numbers
                everywhere(engine, sharing.set_generator, everywhere(engine, sharing.generator)[survivors[0]])
            for restore in self.after_loss:
                whole.update(restore(lost))
        everywhere(engine, sharing.fail, {n: failed for n, failed in failures.items() if n not in whole})
        if lost:
            everywhere(engine, sharing.lose, sorted(whole), f"it had a part on {name_ranks(lost)}, which died")

    # -- failures -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """After a failure, wait until it is known whether the group must be abandoned."""
        if self._alone is not None:
            self._alone.settle()

    def cause_of(self, failed: FailedValue) -> FailedValue:
        """Return the cause of a group's abandonment, for a failure that results from it."""
        return failed if self._alone is None else self._alone.cause_of(failed)

    def give_up(self) -> None:
        """Free the ranks that wait in the group for a failed rank. The next use forms the group again."""
        engine = self._engine()
        if engine is None:
            return
        engine.groups.release()
        for target in self._targets():
            if target.error is None:
                target.error = _unformed(target)

    def forgive(self) -> list[ShardedMesh]:
        """Undo `give_up`. Return the affected meshes."""
        found = [target for target in self._targets() if isinstance(target.error, Unformed)]
        for target in found:
            target.error = None
        return found

    def tell(self) -> None:
        """Warn about operations that ran on whole tensors, at the program's line. Each is reported once."""
        engine = self._engine()
        while engine is not None:
            try:
                name, record = self._notes.recv().get(timeout=0)
            except TimeoutError:
                return
            file, line, _ = frames.innermost(engine.places.get(record))
            warnings.warn_explicit(
                f"{name} has no rule for the layout of its inputs: it gathered whole tensors on every rank of mesh "
                f"{engine.name}, and kept the parts of its result. It is right, and slow for large tensors (said once)",
                FallbackWarning,
                file,
                line or 1,
            )

    def _targets(self) -> list[ShardedMesh]:
        return [target for joined in self._joined if (target := joined()) is not None]

    def share(self, target: ShardedMesh) -> None:
        """Make the ranks create the device mesh of this target for their actors and cells, on first use."""
        engine = target.engine
        with engine.lock:
            target.check_alive()
            engine.look_out(target)
            if target.key not in self._shared:
                self._shared.add(target.key)
                self._share(engine, target.key)

    @staticmethod
    def _share(engine: TensorEngine, key: tuple[object, ...]) -> None:
        everywhere(engine, sharing.share_mesh, key, *key)

    @staticmethod
    def _make(target: ShardedMesh) -> None:
        everywhere(target.engine, state.make_mesh, target.key, target.ranks, target.sizes, target.labels, target.strict)


def _unformed(target: ShardedMesh) -> Unformed:
    return Unformed(f"the process group of mesh {target.name} was given up, and is formed anew")


def _later(world: ShardedWorld, method: Callable[[ShardedWorld], object]) -> Callable[[], None]:
    """Return a call of a method that keeps nothing alive."""
    weak = weakref.ref(world)

    def call() -> None:
        living = weak()
        if living is not None:
            method(living)

    return call
