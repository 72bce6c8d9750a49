"""Snapshots and healing, as methods of a `Mesh`: `TrainingMethods`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from monarch_kernel.runtime.actor.healing.healed import Healed
from monarch_kernel.runtime.tensor.controller.errors import DeviceMeshError
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld
from monarch_kernel.runtime.tensor.training.controller.snapshots import Snapshots
from monarch_kernel.runtime.tensor.training.controller.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class MeshHealed:
    """The report of one `heal_mesh` of a `Mesh`.

    Attributes:
        procs: the report on the processes.
        snapshot: the number of the restored snapshot; None if none was restored.
        steps_back: how many calls of `Mesh.execute` the restoration undid, without the failed one.
        seconds: the total duration.
    """

    procs: Healed
    snapshot: int | None
    steps_back: int
    seconds: float

    def __bool__(self) -> bool:
        return bool(self.procs) or self.snapshot is not None

    def __str__(self) -> str:
        if self.snapshot is None:
            return str(self.procs)
        undone = f", {self.steps_back} steps back" if self.steps_back else ""
        return f"{self.procs}\n  state of training from snapshot {self.snapshot}{undone}: {self.seconds:.2f} s in all"


class TrainingMethods:
    """Methods of a mesh for training modules from `module_to_mesh` with optimizers of their parameters.

    Attributes:
        snapshot_every: `execute` takes a snapshot after this many successful calls, and waits for it; 0 for none. A
            snapshot costs the time to copy parameters and optimizer state, and memory: each rank keeps up to two copies
            of its own state, and two of another rank's.
    """

    snapshot_every: int = 1
    _healed: MeshHealed | None = None
    _steps = 0
    _target: Any

    def snapshot(self, wait: bool = False) -> int:
        """Copy parameters, buffers and optimizer state in the memory of the ranks. Return the number of the snapshot.

        The snapshot has the state after all operations issued so far. The program continues meanwhile. Each rank keeps
        a copy of its part, and another rank, if possible on another host, keeps a second copy. `heal_mesh` restores the
        newest complete snapshot.

        Args:
            wait: return when all copies are complete.

        Raises:
            DeviceMeshError: a rank has died.
            RemoteException: a part of the state is a failure.
        """
        self._steps = 0
        return Snapshots.of(self).take(wait)

    def restore_snapshot(self) -> int:
        """Restore the newest snapshot, for example after a failed operation. Return its number.

        Raises:
            DeviceMeshError: there is none, or a rank has died; `heal_mesh` then restores the snapshot.
        """
        return Snapshots.of(self).restore()

    def drop_snapshots(self) -> None:
        """Free the memory of all snapshots on the ranks."""
        Snapshots.of(self).drop()

    def track(self, obj: Any) -> None:
        """Include an object of this process with a state in snapshots, such as a scheduler or a data source.

        Raises:
            TypeError: the object has no ``state_dict`` and ``load_state_dict`` methods.
        """
        TrainingState.of(self).track(obj)

    @property
    def healed(self) -> MeshHealed:
        """The report of the last `heal_mesh`.

        Raises:
            RuntimeError: `heal_mesh` was not called.
        """
        if self._healed is None:
            raise RuntimeError(f"{self!r} was not healed: heal_mesh(mesh) replaces dead ranks")
        return self._healed

    def __heal_mesh__(self, hosts: Any, timeout: float) -> Any:
        """Replace dead ranks, form the process group again, and restore the newest snapshot (`heal_mesh`)."""
        began = time.monotonic()
        target = self._target
        world, state, snapshots = ShardedWorld.of(target.engine), TrainingState.of(self), Snapshots.of(self)
        snapshots.missing = snapshots.restored = None
        group = world.form(hosts=hosts)
        trains = bool(state.modules or state.optimizers)
        healed = Healed(target.name) if group is None else group.healed
        if trains and not healed and snapshots.newest is not None:
            snapshots.restore()  # a failed step may have changed a part of the state
        steps, self._steps = self._steps, 0
        if trains and snapshots.missing is None and snapshots.newest is not None:
            snapshots.take()  # the new rank must hold copies again
        self._healed = MeshHealed(healed, snapshots.restored, max(steps, 0), time.monotonic() - began)
        if trains and healed and snapshots.restored is None:
            raise DeviceMeshError(
                f"mesh {target.name} is healed, but its modules and optimizers are not whole: "
                f"{snapshots.missing or 'there was no snapshot'}"
            )
        return self

    def _before_step(self) -> None:
        """Make sure, before `execute`, that a snapshot exists in case the step fails."""
        if self.snapshot_every:
            state = TrainingState.of(self)
            if (state.modules or state.optimizers) and not Snapshots.of(self).covers(state):
                self.snapshot(wait=True)

    def _after_step(self) -> None:
        """Take a snapshot after a successful `execute`, if one is due."""
        self._steps += 1
        state = TrainingState.of(self)
        if self.snapshot_every and self._steps >= self.snapshot_every and (state.modules or state.optimizers):
            self.snapshot(wait=True)
