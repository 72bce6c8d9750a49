"""Send a stream of records to the ranks of one world, and receive their answers: `TensorEngine`.

The engine owns the pending records, the numbers of values and definitions, and the workers of each stream. Records of
one target (region and stream) are batched. A record of another target begins a new message, which keeps the order of
the program where targets share a rank. The protocol:

* The controller sends a definition to all ranks of the world ahead of the first record that names it.
* It runs ahead of the ranks by at most `WINDOW` records. Then it waits for the slowest rank.
* After the death of a rank, every later operation and fetch raises `DeviceMeshError`. Deaths are checked before each
  message.
* Ranks hold failures as values, and report them only on a fetch (or if `strict` is set).

The file is long because the sent records, their order and the answers are one protocol under one lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.tensor.controller import frames
from monarch_kernel.runtime.tensor.controller.errors import DeviceMeshError, NonFiniteError, RemoteException
from monarch_kernel.runtime.tensor.controller.fetched_values import ComparedValues, FetchedValues
from monarch_kernel.runtime.tensor.controller.frames import ReplayedFrames
from monarch_kernel.runtime.tensor.controller.handle import Tensor, ValueOwner, handle_of, make_handle
from monarch_kernel.runtime.tensor.controller.signature import Plan, operation_name
from monarch_kernel.runtime.tensor.controller.spec import spec_of
from monarch_kernel.runtime.tensor.controller.stream import MAIN, Stream
from monarch_kernel.runtime.tensor.controller.tensor_mesh import TensorMesh
from monarch_kernel.runtime.tensor.controller.world_group import WorldGroup, groups_on_ranks
from monarch_kernel.runtime.tensor.inspection.running import add_engine
from monarch_kernel.runtime.tensor.rank.groups import WithGroups
from monarch_kernel.runtime.tensor.wire import (
    DELETE,
    FIRST_DEFINITION,
    SIGNAL,
    WAIT,
    Definition,
    FailedValue,
    OperationFailed,
    TensorSlot,
)

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.tensor.replay.recorder import ReplayRecorder


#: The key of the engine in the state that a mesh shares with its slices.
_KEY = "tensors"
#: The number of records in one message.
BATCH = 128
#: The maximum number of records by which the controller is ahead of the ranks.
WINDOW = 20_000
#: The maximum number of deletions that wait for the next message.
DEAD = 256
#: The time limit of a rank for a message about the engine itself, such as the shape of a value (seconds). It includes
#: the operations before the message. None waits as long as the rank lives.
ANSWER = None
#: Pending records are sent after this time without new ones (seconds).
_IDLE = 0.001
#: The same while the program continues to issue operations: frequent checks would slow it down (seconds).
_BUSY = 0.004


@dataclass(frozen=True, slots=True, eq=False)
class NanCheckSettings:
    """The settings of a NaN and Inf watch on all engines.

    Attributes:
        inf: whether to report Inf.
        at_once: whether the operation itself raises, which costs a round trip for each operation.
    """

    inf: bool
    at_once: bool


class TensorEngine:
    """The tensor engine of one world, which is all processes that were spawned together. It is created on first use.

    Attributes:
        strict: failing operations raise at once, which costs a round trip for each operation.
        eager: whether operations raise at once, because of `strict` or of a watch.
        watching: the settings of the NaN and Inf watch, if it is on; common to all engines.
        plan: the costs of lines of the program.
        batch: the number of records in one message.
        replays: whether its ranks replay recorded functions.
        recording: the recorder, if a function is being recorded for a replay; common to all engines.
        groups: the process groups of its ranks.
        failures: how many failures of ranks were reported to the program.
        shares: whether values were passed to or from actors or cells.
        extras: the state of parts of the engine (random numbers, sharded meshes), by name.
    """

    batch: ClassVar[int] = BATCH
    replays: ClassVar[bool] = True
    recording: ClassVar[ReplayRecorder | None] = None
    watching: ClassVar[NanCheckSettings | None] = None
    #: The error of operations after the program has ended the tensors.
    exited: DeviceMeshError | None = None
    #: Called before a function is recorded for a replay.
    before_recording: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, procs: ProcMesh) -> None:
        world = procs._procs
        self.world = procs._new_with_region(Region.from_extent(Extent(("ranks",), (len(world),))))
        self.name = procs.name
        self._key = procs._mesh_uid
        add_engine(self._key, self)
        self.lock = threading.RLock()
        self.fake = FakeTensorMode()
        self._strict = False
        self.eager = self.watching is not None and self.watching.at_once
        self.plan = Plan()
        self.meshes: dict[Any, TensorMesh] = {}
        self.extras: dict[str, Any] = {}
        self.definitions: list[Definition] = []
        self._unsent: list[Definition] = []
        self._defined: dict[Stream, int] = {}
        # the pending records
        self.target: TensorMesh | None = None
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.pending = 0
        self.next_value = 1
        self.record = 0
        self.places: dict[int, frames.Frames] = {}
        self._forgotten = 0
        self._acknowledged = 0
        self._waits: list[tuple[int, Future[object]]] = []
        self.sent = 0
        self._wake = threading.Event()
        self._closed = False
        self.groups = WorldGroup(self)
        self.failures = 0
        self.shares = False
        #: Lines of the program that were warned that their value is the value of one rank.
        self.lines_told: set[tuple[str, int]] = set()
        #: Called, under the lock, when ranks have new processes.
        self.on_replaced: list[Callable[[], None]] = []
        #: Ranks with new processes, until the others know what these ranks have lost.
        self.lost: set[int] = set()
        self.replacements = 0
        #: Ranks whose workers have died, but whose processes live.
        self.lost_workers: set[int] = set()
        system = procs._system
        self._node = system.node
        self._target = self.world._target()
        self._procs = [ref.id for ref in self._target.procs]
        system.node.on_close.append(_closer(self))
        threading.Thread(
            target=_send_what_waits, args=(weakref.ref(self), self._wake), name="monarch-tensor", daemon=True
        ).start()

    @classmethod
    def of(cls, procs: ProcMesh) -> TensorEngine:
        """Return the engine of a proc mesh and its slices. It is created on first use.

        Raises:
            RuntimeError: the mesh was stopped.
            DeviceMeshError: its tensors were ended.
        """
        if procs._stopped:
            raise RuntimeError(f"proc mesh {procs.name} was stopped: there are no ranks for tensors")
        engine: TensorEngine | None = procs._shared.get(_KEY)
        if engine is not None and engine.exited is not None:
            raise engine.exited
        if engine is None:
            engine = procs._shared[_KEY] = cls(procs)
        return engine

    # -- the world ----------------------------------------------------------------------------------

    def mesh_of(self, procs: ProcMesh, stream: Stream = MAIN, kind: type[TensorMesh] | None = None) -> TensorMesh:
        """Return the target for operations on a mesh of this world."""
        key = (procs._region, stream, kind is not None)
        mesh = self.meshes.get(key)
        if mesh is None:
            mesh = self.meshes[key] = (kind or TensorMesh)(self, procs, stream, kind is not None)
        return mesh

    def spawn_workers(self, stream: Stream, cls: Any) -> Any:
        """Spawn the actors that run a stream in all processes of the world."""
        together = max(Counter(proc.host for proc in self.world._procs).values())
        workers = self.world.spawn(f"tensors-{stream.name}", cls, self._key, stream.name, together)
        if self.watching is not None:
            workers.watch.broadcast(self.watching.inf)
        return workers

    # -- how operations fail ------------------------------------------------------------------------

    @property
    def strict(self) -> bool:
        """Whether failing operations raise at once."""
        return self._strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._strict = strict
        self.eager = strict or (self.watching is not None and self.watching.at_once)

    def watch(self, watching: NanCheckSettings | None) -> None:
        """Begin or end a watch for NaN and Inf."""
        with self.lock:
            if self._closed or self.world._stopped:
                return
            self.eager = self._strict or (watching is not None and watching.at_once)
            self.flush()
            for stream in {mesh.stream: None for mesh in self.meshes.values()}:
                stream.workers_of(self).watch.broadcast(None if watching is None else watching.inf)

    def check_all(self) -> None:
        """Raise the first failure or NaN finding that has not been raised yet."""
        for mesh in list(self.meshes.values()):
            if mesh.error is None and not self._closed and not self.world._stopped:
                self.check(mesh)

    @property
    def key(self) -> str:
        """The key by which the ranks identify this engine."""
        return self._key

    def look_out(self, mesh: TensorMesh) -> None:
        """Check for dead ranks and new processes. Called before each message. The caller holds the lock.

        Raises:
            DeviceMeshError: a rank of the mesh has died and is not replaced yet.
        """
        others = self.world._target() is not self._target and bool(self.note_replaced())
        if others or (mesh.error is not None and self.lost_workers and self.bring_back()):
            for tell in self.on_replaced:
                tell()
        if mesh.error is not None:
            mesh.raise_error()
        if self._has_lost(mesh):
            try:
                # This raises as soon as the death is known, for which this thread now polls. It counts as the report of
                # the death.
                mesh.workers.done.call().get()
            except SupervisionError as e:
                raise mesh.lost(e) from e

    def _has_lost(self, mesh: TensorMesh) -> bool:
        """Return whether a rank of the mesh has died and is not replaced yet."""
        deaths, ended = self._node.deaths, self._node.unexplained
        return bool(deaths or ended) and any(
            self._procs[rank] in deaths or self._procs[rank] in ended for rank in mesh.ranks
        )

    def note_lost_workers(self, mesh: TensorMesh, error: SupervisionError) -> None:
        """Handle the failure of a call of a mesh's workers after a death, possibly of one worker only."""
        lost = {mesh.ranks[rank] for rank in error.ranks if rank < len(mesh.ranks)}
        self.lost_workers |= {rank for rank in lost if self._procs[rank] not in self._node.deaths}

    def bring_back(self) -> bool:
        """Continue with respawned workers after a heal, if workers had died in living processes.

        Return whether it did.
        """
        workers = self.lost_workers
        for stream in self._defined:
            for rank in workers:
                try:
                    stream.workers_of(self).slice(ranks=rank).done.call_one().get()
                except SupervisionError:
                    return False
        self.lost_workers = set()
        self.note_replaced(workers)
        return True

    def note_replaced(self, workers: Iterable[int] = ()) -> list[int]:
        """Send all definitions to new processes, if there are any. Return their ranks.

        Args:
            workers: ranks that have new workers in the same processes.

        Pending records are dropped. The values of a dead rank are failures there, until they are computed or restored
        again.
        """
        self._target = self.world._target()
        now = [ref.id for ref in self._target.procs]
        fresh = {rank for rank, (old, new) in enumerate(zip(self._procs, now)) if old != new}
        replaced = sorted(fresh.union(workers))
        if not replaced:
            return []
        self._procs = now
        self.lost_workers.difference_update(replaced)
        self.lost.update(replaced)
        self.replacements += 1
        self.groups.broken()
        self.ints, self.floats, self.pending = [], [], 0
        self._waits.clear()
        self._acknowledged = self.record
        for stream, known in self._defined.items():
            everywhere = stream.workers_of(self)
            for rank in replaced:
                everywhere.slice(ranks=rank).define.broadcast(self.definitions[:known])
        for mesh in self.meshes.values():
            if not any(now[rank] in self._node.deaths for rank in mesh.ranks):
                mesh.error = None
        return replaced

    # -- records ------------------------------------------------------------------------------------

    def turn_to(self, mesh: TensorMesh) -> None:
        """Direct the next records to this target."""
        if self.pending:
            # reported; the users of `mesh` need no second report
            if self.target is not None and self.target.error is not None:
                self._take(self.target)
            self.flush()
        self.target = mesh

    def awaken(self) -> None:
        """Note that a record is pending, and make sure that it is sent if no others follow."""
        if not self._wake.is_set():
            self._wake.set()

    def new_number(self) -> int:
        """Return a unique number for a value or a token."""
        with self.lock:
            number = self.next_value
            self.next_value = number + 1
            return number

    def order(self, before: TensorMesh, after: TensorMesh) -> None:
        """Order two streams: later records of `after` run on each rank when all earlier records of `before` have run.

        Args:
            before, after: targets of two streams; the ranks of `after` are a subset of the ranks of `before`.
        """
        there = self.mesh_of(after.procs, before.stream, type(before) if before.sharded else None)
        token = self.control(there, SIGNAL)
        self.control(after, WAIT, token=token)

    def control(self, mesh: TensorMesh, kind: int, *rest: int, token: int = 0) -> int:
        """Send a control record: ``[kind, token, *rest]``. Return the token, which is new by default."""
        if self.recording is not None:
            self.recording.stop("actors get tensors in it, or streams wait for each other")
        with self.lock:
            token = token or self.new_number()
            self.turn_to(mesh)
            self.ints += [kind, token, *rest]
            self.flush()
            return token

    def define(self, definition: Definition) -> int:
        """Assign a number to a definition. All ranks receive it before they need it."""
        with self.lock:
            number = FIRST_DEFINITION + len(self.definitions)
            self.definitions.append(replace(definition, number=number))
            return number

    def flush(self) -> None:
        """Send the pending records.

        Raises:
            DeviceMeshError: a rank of the target has died.
        """
        with self.lock:
            mesh = self.target
            if mesh is None or not (self.ints or mesh.dead):
                return
            self._send_definitions(mesh)
            try:
                mesh.workers.run.broadcast(*self._take(mesh))
            except SupervisionError as e:
                raise mesh.lost(e) from e
            if self.record - self._acknowledged >= WINDOW // 2:
                self._keep_window(mesh)

    def _take(self, mesh: TensorMesh) -> tuple[bytes, bytes, int]:
        dead = mesh.dead
        if dead:
            gone = dead[: len(dead)]
            del dead[: len(gone)]  # keeps concurrent appends
            self.ints += [DELETE, len(gone), *gone]
        body = (
            array("q", self.ints).tobytes(),
            array("d", self.floats).tobytes(),
            self.record - self.pending,
        )
        self.ints, self.floats, self.pending = [], [], 0
        self.sent += 1
        return body

    def _send_definitions(self, mesh: TensorMesh) -> None:
        self.look_out(mesh)
        stream = mesh.stream
        known = self._defined.get(stream, 0)
        if known < len(self.definitions):
            stream.workers_of(self).define.broadcast(self.definitions[known:])
            self._defined[stream] = len(self.definitions)

    def _keep_window(self, mesh: TensorMesh) -> None:
        self._acknowledged = self.record
        self._waits.append((self.record, mesh.workers.done.call()))
        if len(self._waits) > 2:
            record, wait = self._waits.pop(0)
            try:
                wait.get()
            except SupervisionError as e:
                raise mesh.lost(e) from e
            for number in range(self._forgotten, record):
                self.places.pop(number, None)
            self._forgotten = record

    def send_idle(self, dead: int = DEAD) -> None:
        """Send pending records, and deletions if there are more than `dead`."""
        with self.lock:
            if self._closed:
                return
            for mesh in [self.target, *self.meshes.values()]:
                if mesh is None:
                    continue
                pending = mesh is self.target and self.pending
                # deletions alone neither report a death nor form a group
                if pending or (len(mesh.dead) > dead and mesh.error is None and not self._has_lost(mesh)):
                    self.turn_to(mesh)
                    self.flush()

    def place_of(self, record: int) -> tuple[str, int, str] | None:
        """Return the file, line and function that issued a record, if still known."""
        place = self.places.get(record)
        return None if place is None else frames.innermost(place)

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        self._wake.set()

    def exit(self) -> None:
        """End the workers when the issued operations have run. The values are deleted, and later operations raise."""
        self.finish()
        with self.lock:
            self.close()
            self.exited = DeviceMeshError(f"mesh {self.name}: exit() has ended its tensors: spawn other processes")
            for mesh in self.meshes.values():
                mesh.error = self.exited
            streams = {mesh.stream: None for mesh in self.meshes.values()}
        for stream in streams:
            stream.workers_of(self).stop().get()

    def finish(self) -> None:
        """Wait until all living ranks have run all issued operations, in all streams."""
        with self.lock, _disable_current_modes():
            if self._closed:
                return
            try:
                self.flush()
            except DeviceMeshError:  # the next operation raises it
                return
            calls = [
                mesh.stream.workers_of(self, mesh.procs._region).done.call()
                for mesh in self.meshes.values()
                if mesh.error is None
            ]
        for call in calls:
            with suppress(SupervisionError):
                call.get()

    # -- data ---------------------------------------------------------------------------------------

    def put(self, mesh: TensorMesh, tensor: torch.Tensor, layout: object = None) -> int:
        """Send a tensor to all ranks. Return the number of the value. The caller holds the lock.

        Args:
            layout: on a sharded mesh, how ranks find their parts.
        """
        self.turn_to(mesh)
        self.flush()
        self.look_out(mesh)
        number = self.new_number()
        self.plan.line().sent += tensor.numel() * tensor.element_size()
        mesh.workers.put.broadcast(number, tensor, layout)
        return number

    # -- answers ------------------------------------------------------------------------------------

    def fetch(
        self, mesh: TensorMesh, obj: object, rank: int, why: str = "fetch", compare: bool = False
    ) -> FetchedValues:
        """Return a future of the values of all handles in `obj`, on one rank of their mesh.

        Args:
            why: the name of this wait in the plan.
            compare: warn, once for each line of the program, if other ranks hold different values.
        """
        if self.recording is not None:
            self.recording.stop("it fetches a value")
        flat, tree = tree_flatten(obj)
        positions = [i for i, x in enumerate(flat) if type(x) is Tensor]
        self.plan.line().fetched += sum(flat[i].numel() * flat[i].element_size() for i in positions)
        with self.lock, _disable_current_modes():
            mesh.check_alive()
            numbers = [flat[i]._owner.id for i in positions]
            self.turn_to(mesh)
            self._send_definitions(mesh)
            body = self._take(mesh)
            try:
                call = mesh.workers.fetch.call(*body, numbers, mesh.ranks[rank], compare)
            except SupervisionError as e:
                raise mesh.lost(e) from e
        kind = ComparedValues if compare else FetchedValues
        return kind(self, mesh, call, flat, tree, positions, rank, why)

    def ask(self, mesh: TensorMesh, function: object, *values: object) -> list[Any]:
        """Call a function on the ranks with their values, in order with the stream.

        Return the answers in rank order.
        """
        return list(self.answer(mesh, self.ask_later(mesh, function, *values)).values())

    def ask_later(self, mesh: TensorMesh, function: object, *values: object) -> Any:
        """Do the same as `ask` without waiting. Return a call for `answer`."""
        if self.recording is not None:
            self.recording.stop("it asks the ranks for something")
        with self.lock, _disable_current_modes():
            mesh.check_alive()
            # calls that may raise come before the records are taken, which would otherwise be lost
            called = cloudpickle.dumps(function)
            numbers = [v._owner.id if type(v) is Tensor else v for v in values]
            self.turn_to(mesh)
            self._send_definitions(mesh)
            return mesh.workers.ask.call(*self._take(mesh), called, numbers)

    def call_and_fetch(
        self,
        mesh: TensorMesh,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        rank: int,
    ) -> FetchedValues:
        """Call a function on the ranks, in order with the stream. Return a future of the result of one rank."""
        call = self.call_on_ranks(mesh, function, args, kwargs, rank)
        return FetchedValues.of_call(mesh, call, rank, "call_on_shard_and_fetch")

    def call_on_ranks(
        self,
        mesh: TensorMesh,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        rank: int,
    ) -> Any:
        """Call a function on the ranks. Return a call for `answer`. If `rank` is -1, all ranks send their results."""
        if self.recording is not None:
            self.recording.stop("it fetches a value")
        flat, tree = tree_flatten((list(args), kwargs))
        if groups_on_ranks(mesh, flat):
            function = WithGroups(function)
        handles = [handle_of(x) for x in flat]
        values = [handle._owner.id for handle in handles if handle is not None]
        positions = iter(range(len(values)))
        template = tree_unflatten(
            [x if handle is None else TensorSlot(next(positions)) for x, handle in zip(flat, handles)], tree
        )
        with self.lock, _disable_current_modes():
            mesh.check_alive()
            called = cloudpickle.dumps((function, template))
            self.turn_to(mesh)
            self._send_definitions(mesh)
            body = self._take(mesh)
            self.places[self.record] = frames.take(1, 16)
            self.record += 1
            wanted = rank if rank < 0 else mesh.ranks[rank]
            return mesh.workers.call_and_fetch.call(*body, called, values, wanted)

    def answer(self, mesh: TensorMesh, call: Any, timeout: float | None = None) -> Any:
        """Return the result of a call of workers. Failures are raised as errors of the program."""
        with _disable_current_modes():
            try:
                return call.get(timeout)
            except SupervisionError as e:
                raise mesh.lost(e) from e
            except ActorError as e:
                failed = _first_failure(e)
                if failed is None:
                    unknown = FailedValue(self.record - 1, -1, "")
                    failed = mesh.settled(unknown)
                    if failed is unknown:
                        raise
                raise self.error_of(mesh, failed) from None

    def check(self, mesh: TensorMesh) -> None:
        """Raise the first failure of an operation of the target that has not been raised yet."""
        with self.lock:
            self.flush()
            call = mesh.workers.check.call()
        self.answer(mesh, call)

    def error_of(self, mesh: TensorMesh, failed: FailedValue) -> Exception:
        """Convert a failure on a rank to an exception for the program."""
        failed = mesh.settled(failed)
        self.failures += 1
        if failed.lost:
            return DeviceMeshError(
                f"mesh {mesh.name}: {failed.text}. Go back to a snapshot or a checkpoint, or compute the value anew."
            )
        rank = mesh.ranks.index(failed.rank) if failed.rank in mesh.ranks else failed.rank
        place = self.places.get(failed.record)
        issued = place.of(failed.steps) if isinstance(place, ReplayedFrames) and failed.steps else frames.text(place)
        kind = NonFiniteError if failed.nonfinite else RemoteException
        return kind(rank, issued, failed.text, mesh.name)

    def run_and_describe(self, mesh: TensorMesh, func: Any, args: Any, kwargs: object) -> Any:
        """Run an operation whose result shapes are known only on the ranks.

        Return handles, and results that are not tensors.

        Raises:
            ValueError: the shapes differ between ranks, and therefore cannot have one handle.
        """
        name = operation_name(func)
        if self.recording is not None:
            self.recording.stop(f"the shape of what {name} gives depends on values")
        flat, tree = tree_flatten((list(args), kwargs or {}))
        ins: list[Tensor] = [x for x in flat if type(x) is Tensor]
        places = iter(range(len(ins)))
        template = tree_unflatten([TensorSlot(next(places)) if type(x) is Tensor else x for x in flat], tree)
        count = len(func._schema.returns)
        with self.lock, _disable_current_modes():
            called, numbers = cloudpickle.dumps(template), [a._owner.id for a in ins]
            first = self.next_value
            self.next_value += count
            self.turn_to(mesh)
            self._send_definitions(mesh)
            body = self._take(mesh)
            place = self.places[self.record] = frames.take(1, 16)
            self.record += 1
            call = mesh.workers.run_and_describe.call(*body, name, called, numbers, first, count, mesh.sharded)
        described = list(self.answer(mesh, call).values())
        if any(d != described[0] for d in described):
            differing = next(i for i, d in enumerate(described) if d != described[0])
            other, one = (x[0] if type(x) is tuple else x for x in (described[differing][0], described[0][0]))
            kind = "shape" if type(described[0][0]) is tuple else "value"
            raise ValueError(
                f"{name}: its result has another {kind} on rank {differing} ({other}) than on rank 0 ({one}) of mesh "
                f"{mesh.name}, so that nothing can stand for it: use call_on_shard_and_fetch(), or a function of the "
                "ranks (remote)"
            )
        results = [
            make_handle(
                spec_of(mesh, torch.empty_strided(like[0], like[1], dtype=like[2], device="meta")),
                ValueOwner(first + i, mesh.dead, place),
            )
            if type(like) is tuple
            else like
            for i, like in enumerate(described[0])
        ]
        return results[0] if count == 1 else tuple(results)


def _first_failure(error: ActorError) -> FailedValue | None:
    """Return the failure of the first rank that failed. The others may only have been released from a wait."""
    told = [error.exception, *(failure.exception for failure in error.failures)]
    return next((e.failed for e in told if isinstance(e, OperationFailed)), None)


def handles_in(obj: object) -> list[Tensor]:
    """Return all handles in nested lists, tuples and dicts, including handles of objects on the ranks."""
    return [handle for x in tree_flatten(obj)[0] if (handle := handle_of(x)) is not None]


def _closer(engine: TensorEngine) -> Any:
    weak = weakref.ref(engine)

    def close() -> None:
        living = weak()
        if living is not None:
            living.close()

    return close


def _send_what_waits(weak: weakref.ref[TensorEngine], wake: threading.Event) -> None:
    """Send pending records that no others follow.

    This runs on a thread that sleeps while idle and ends with the engine.
    """
    wait = _IDLE
    while True:
        if not wake.wait(10.0):
            engine = weak()
            if engine is None or engine._closed:
                return
            with suppress(Exception):  # the program's next operation or fetch raises it
                engine.send_idle(0)
            del engine
            continue
        engine = weak()
        sent = engine.sent if engine is not None else 0
        del engine
        time.sleep(wait)
        engine = weak()
        if engine is None or engine._closed:
            return
        if engine.sent != sent:  # the program continues to issue operations, which join the batch
            wait = _BUSY
        else:
            wait = _IDLE
            wake.clear()
            if engine.pending:  # checked after clear(), because a program counts its record before it sets the event
                with suppress(Exception):  # as above
                    engine.send_idle()
        del engine
