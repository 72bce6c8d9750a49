"""Snapshots and healing, as methods of a `Mesh`: `TrainingMethods`."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
from torch.utils.weak import WeakIdKeyDictionary

from monarch_kernel.runtime.actor.healing.healed import Healed
from monarch_kernel.runtime.tensor.controller.engine import TensorEngine
from monarch_kernel.runtime.tensor.controller.errors import DeviceMeshError
from monarch_kernel.runtime.tensor.controller.handle import Tensor
from monarch_kernel.runtime.tensor.sharded.controller.sharded_world import ShardedWorld
from monarch_kernel.runtime.tensor.training import rank as on_ranks

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
    from monarch_kernel.runtime.tensor.sharded.controller.target import ShardedMesh


class TrainingState:
    """The modules and optimizers of one mesh. It keeps none of them alive.

    A module is included once it is moved to the mesh, an optimizer after its first step.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[TensorMesh, TrainingState]] = weakref.WeakKeyDictionary()
    #: The layouts of parameters and buffers when they were moved to their mesh, for creating them again after a loss.
    layouts: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._objects: list[weakref.ref[object]] = []

    @classmethod
    def of(cls, mesh: TrainingMethods) -> TrainingState:
        """Return the state of a `Mesh`."""
        return cls._of_target(mesh._target)

    @classmethod
    def _of_target(cls, target: TensorMesh) -> TrainingState:
        found = cls._all.get(target)
        if found is None:
            found = cls._all[target] = cls()
        return found

    def add_module(self, module: torch.nn.Module) -> None:
        """Add a module whose parameters are on the mesh."""
        self._modules = [ref for ref in self._modules if ref() is not None]
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer whose parameters are on the mesh."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def track(self, obj: object) -> None:
        """Track an object with ``state_dict`` and ``load_state_dict``, such as a scheduler or a data source."""
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise TypeError(f"track({type(obj).__name__}): it has no state_dict() and load_state_dict(state)")
        self._objects = [ref for ref in self._objects if ref() is not None]
        if all(ref() is not obj for ref in self._objects):
            self._objects.append(weakref.ref(obj))

    @property
    def objects(self) -> list[Any]:
        """The tracked objects that are alive."""
        return [obj for ref in self._objects if (obj := ref()) is not None]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]


def _stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Record a step of an optimizer. An optimizer of handles belongs to the meshes of these."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is Tensor:
                TrainingState._of_target(parameter._spec.mesh).add_optimizer(optimizer)
                return


def _bring_counters() -> None:
    """Turn step counters of optimizers into tensors of the meshes, whose known values a replay computes.

    A local tensor that a step writes would differ at each call of a recorded function.
    """
    for state in list(TrainingState._all.values()):
        for optimizer in state.optimizers:
            for parameter, held in optimizer.state.items():
                if type(parameter) is Tensor and parameter._spec.mesh.error is None:
                    for name, value in held.items():
                        if type(value) is torch.Tensor and value.dim() == 0:
                            held[name] = parameter._spec.mesh.put(value)


register_optimizer_step_post_hook(_stepped)
TensorEngine.before_recording.append(_bring_counters)


# Copies of the training state in the memory of the ranks, for restoring it after deaths of ranks: `Snapshots`.


class OptimizerState:
    """The state of an optimizer at one time: handles, whose values the ranks copy, and copies of everything else."""

    def __init__(
        self, target: ShardedMesh, groups: list[dict[str, object]], state: list[tuple[torch.Tensor, dict[str, object]]]
    ) -> None:
        self._target = weakref.ref(target)
        self._groups = groups
        self._state = state

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, target: ShardedMesh) -> OptimizerState:
        """Return the current state of an optimizer.

        Args:
            target: the mesh whose handles the ranks copy; handles of other meshes are not copied.
        """
        groups = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        return cls(target, groups, [(parameter, _copied(state)) for parameter, state in optimizer.state.items()])

    def handles(self) -> list[Tensor]:
        """Return the handles of the values that the ranks are to copy."""
        target = self._target()
        held = [x for _, state in self._state for x in state.values() if type(x) is Tensor]
        return [x for x in held if x._spec.mesh is target]

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore this state in an optimizer."""
        for group, saved in zip(optimizer.param_groups, self._groups):
            group.update(_copied(saved))
        optimizer.state.clear()
        for parameter, state in self._state:
            optimizer.state[parameter] = _copied(state)


def _copied(values: dict[str, object]) -> dict[str, object]:
    return {
        k: v if type(v) is Tensor else v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for k, v in values.items()
    }


#: The number of snapshots kept on the controller, which equals the number on the ranks.
KEPT = on_ranks.KEPT


@dataclass(slots=True)
class TakenSnapshot:
    """The controller's part of a snapshot, and the values that the ranks have copied.

    Attributes:
        modules, optimizers: the handles of modules and the states of optimizers, by weak keys, so that none is kept
            alive.
        objects: the states of tracked objects (`TrainingState.track`).
        known: values that were known here, such as counters.
    """

    number: int
    modules: weakref.WeakKeyDictionary[torch.nn.Module, list[Tensor]]
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerState]
    objects: weakref.WeakKeyDictionary[Any, object]
    known: list[tuple[weakref.ref[Tensor], torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = [(weakref.ref(h), h._constant.clone()) for h in self._handles() if h._constant is not None]

    def _handles(self) -> list[Tensor]:
        handles = [h for kept in self.modules.values() for h in kept]
        return handles + [h for state in self.optimizers.values() for h in state.handles()]

    def values(self) -> list[int]:
        """Return the numbers of the values of all live objects."""
        return list({h._owner.id: None for h in self._handles()})


class Snapshots:
    """The snapshots of one sharded mesh.

    Each rank keeps a copy of its part. A second copy is on another rank, if possible on another host.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[ShardedMesh, Snapshots]] = weakref.WeakKeyDictionary()

    def __init__(self, target: ShardedMesh) -> None:
        self._target = weakref.ref(target)
        self._taken: dict[int, TakenSnapshot] = {}
        self._next = 1
        self._call: Any = None
        self._keepers: Any = None
        self._keeper: dict[int, int] = {}
        world = ShardedWorld.of(target.engine)
        weak = weakref.ref(self)

        def after_loss(replaced: list[int]) -> list[int]:
            living = weak()
            return [] if living is None else living._restore_after(replaced)

        world.after_loss.append(after_loss)
        #: The values that could not be restored after the last loss, if any.
        self.missing: str | None = None
        #: The number of the snapshot that was restored last.
        self.restored: int | None = None

    @classmethod
    def of(cls, mesh: TrainingMethods) -> Snapshots:
        """Return the snapshots of a `Mesh`."""
        target = mesh._target
        found = cls._all.get(target)
        if found is None:
            found = cls._all[target] = cls(target)
        return found

    @property
    def newest(self) -> int | None:
        """The number of the newest snapshot."""
        return max(self._taken, default=None)

    def covers(self, state: TrainingState) -> bool:
        """Return whether the newest snapshot has all modules of a training state."""
        taken = self._taken.get(self.newest or 0)
        return taken is not None and all(module in taken.modules for module in state.modules)

    def take(self, wait: bool = False) -> int:
        """Copy the training state after all operations issued so far. Return the number of the snapshot.

        The program continues meanwhile. At most one snapshot is in progress: a second waits for the first.

        Args:
            wait: return when all copies are complete.

        Raises:
            DeviceMeshError: a rank has died.
            RemoteException: a part of the state is a failure.
        """
        target = self._target()
        assert target is not None  # the caller's mesh has it
        engine = target.engine
        state = TrainingState._of_target(target)
        with engine.lock, _disable_current_modes():
            self._finish(target)
            number, self._next = self._next, self._next + 1
            taken = TakenSnapshot(
                number,
                weakref.WeakKeyDictionary({module: _handles(module, target) for module in state.modules}),
                weakref.WeakKeyDictionary({o: OptimizerState.of(o, target) for o in state.optimizers}),
                weakref.WeakKeyDictionary({o: copy.deepcopy(o.state_dict()) for o in state.objects}),
            )
            if self._keepers is None:
                self._keepers = engine.world.spawn("snapshots", on_ranks.SnapshotKeeper, engine._key)
                self._keeper = _keepers(engine, target)
            function = functools.partial(on_ranks.take, number, taken.values(), self._keepers, self._keeper, wait)
            self._call = engine.ask_later(target, function)
            self._taken[number] = taken
            for old in sorted(self._taken)[:-KEPT]:
                del self._taken[old]
        if wait:
            self._finish(target)
        return number

    def restore(self) -> int:
        """Restore the newest snapshot that all ranks have. Return its number.

        Raises:
            DeviceMeshError: there is none.
        """
        target = self._target()
        assert target is not None  # the caller's mesh has it
        with target.engine.lock, _disable_current_modes():
            target.check_alive()
            found = self._common(target, [])
            if isinstance(found, str):
                raise DeviceMeshError(f"mesh {target.name}: {found}")
            self._go_back(target, found)
        return found

    def drop(self) -> None:
        """Delete all snapshots. The ranks free their memory."""
        self._taken.clear()
        target = self._target()
        if target is not None and self._keepers is not None:
            target.engine.ask(target, on_ranks.forget)

    def _finish(self, target: ShardedMesh) -> None:
        """Wait for the snapshot in progress."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            target.engine.answer(target, call)
        except BaseException:
            self._taken.pop(max(self._taken, default=0), None)  # not all ranks have it
            raise

    def _restore_after(self, replaced: list[int]) -> list[int]:
        """Restore values after a process group was formed again. Return the numbers of the restored values."""
        target = self._target()
        self._call = None
        self.missing = self.restored = None
        if target is None or not set(replaced) & set(target.ranks) or not self._taken:
            return []
        found = self._common(target, replaced)
        if isinstance(found, str):
            self.missing = found
            return []
        return self._go_back(target, found)

    def _common(self, target: ShardedMesh, replaced: list[int]) -> int | str:
        """Return the newest snapshot with every rank's part available somewhere, or the reason why there is none."""
        if not self._taken or self._keepers is None:
            return "there is no snapshot: Mesh.snapshot() takes one, and so does Mesh.execute()"
        ranks = target.ranks
        answers = list(self._keepers.numbers.call().get().values())
        common: set[int] = set(self._taken)
        for rank in ranks:
            keeper = self._keeper[rank]
            if rank in replaced:
                mine = set() if keeper in replaced else set(answers[keeper][1].get(rank, []))
                if not mine:
                    return (
                        f"rank {rank} has died, and so has rank {keeper}, which had the copy of its state: "
                        "load a checkpoint (load_checkpoint)"
                    )
            else:
                mine = set(answers[rank][0])
            common &= mine
        if not common:
            return "the ranks have no snapshot in common: load a checkpoint (load_checkpoint)"
        return max(common)

    def _go_back(self, target: ShardedMesh, number: int) -> list[int]:
        taken = self._taken[number]
        values = taken.values()
        engine = target.engine
        function = functools.partial(on_ranks.restore, number, values, target.key, self._keepers, self._keeper)
        engine.flush()
        call = target.workers.ask.call(b"", b"", engine.record, cloudpickle.dumps(function), [])
        call.get()
        for handle in taken._handles():
            handle._constant = None
        for ref, value in taken.known:
            handle = ref()
            if handle is not None:
                handle._constant = value.clone()
        for optimizer, state in taken.optimizers.items():
            state.restore(optimizer)
        for optimizer in TrainingState._of_target(target).optimizers:
            if optimizer not in taken.optimizers:
                optimizer.state.clear()  # its first step was after the snapshot
        for obj, saved in taken.objects.items():
            obj.load_state_dict(copy.deepcopy(saved))
        for module in taken.modules:
            for parameter in module.parameters():
                parameter.grad = None
        self._taken = {number: taken}
        self.restored = number
        return values


def _handles(module: torch.nn.Module, target: ShardedMesh) -> list[Tensor]:
    found = [*module.parameters(), *module.buffers()]
    return [x for x in found if type(x) is Tensor and x._spec.mesh is target]


def _keepers(engine: TensorEngine, target: ShardedMesh) -> dict[int, int]:
    """Return the rank that keeps each rank's copy: the next rank, if possible on another host."""
    procs = engine.world._target().procs
    ranks: list[int] = list(target.ranks)
    found: dict[int, int] = {}
    for place, rank in enumerate(ranks):
        others = ranks[place + 1 :] + ranks[:place]
        found[rank] = next((r for r in others if procs[r].agent != procs[rank].agent), others[0] if others else rank)
    return found


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
    _target: ShardedMesh

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

    def track(self, obj: object) -> None:
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

    def __heal_mesh__(self, hosts: Any, timeout: float) -> object:
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
