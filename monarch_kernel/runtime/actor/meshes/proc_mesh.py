"""`ProcMesh`: an array of processes, on which actors are spawned."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from monarch_kernel.protocol.messages import (
    Create,
    GetStatus,
    Interrupt,
    KillProcs,
    ProcRef,
    ProcStatus,
    StopProcs,
)
from monarch_kernel.protocol.serialize import explain
from monarch_kernel.runtime.actor.calls.pending import ManyCall, ask_agent, send_to_all
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.context import calling_origin, current
from monarch_kernel.runtime.actor.definition import check_constructor, class_label, spec_of
from monarch_kernel.runtime.actor.errors import ActorError
from monarch_kernel.runtime.actor.extensions import pool_functions
from monarch_kernel.runtime.actor.healing.healed import HEAL_TIMEOUT, Healable, Healed, HostSource
from monarch_kernel.runtime.actor.ids import unique
from monarch_kernel.runtime.actor.meshes.actor_mesh import RESERVED, ActorMesh, settled
from monarch_kernel.runtime.actor.meshes.tool_methods import (
    DebuggerMethods,
    PlotMethods,
    TensorMethods,
    WorkspaceMethods,
)
from monarch_kernel.runtime.actor.mocks import stand_in
from monarch_kernel.runtime.actor.ports.holders import give, pickled
from monarch_kernel.runtime.actor.process import System, get_system
from monarch_kernel.runtime.mesh.ndslice import unsigned
from monarch_kernel.runtime.mesh.rankset import shrunk
from monarch_kernel.runtime.mesh.shape import SINGLE, Extent, MeshTrait, Region
from monarch_kernel.runtime.mesh.valuemesh import ValueMesh
from monarch_kernel.runtime.node.future import CoroutineFuture, Future, gathered, resolved
from monarch_kernel.runtime.supervision import OwnedMesh

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh

T = TypeVar("T")


#: How long a stopped proc may take for its actors' cleanup before it is killed (seconds).
STOP_GRACE = 5.0


class ProcMesh(Healable, DebuggerMethods, PlotMethods, TensorMethods, WorkspaceMethods, MeshTrait):
    """A mesh of processes, on which actors are spawned. Created by ``HostMesh.spawn_procs``.

    It can be pickled: any process that receives it can spawn actors on it, too.
    """

    def __init__(
        self,
        system: System,
        uid: str,
        name: str,
        procs: tuple[ProcRef, ...],
        region: Region,
        host_region: Region,
        owner: str = "",
        ready: Future[Any] | None = None,
    ) -> None:
        self._system = system
        self._mesh_uid = uid
        self.name = name
        self._procs = procs
        self._shape = region
        self._host_region = host_region
        self._owner = owner
        self._ready = ready
        # Shared by the mesh and all its slices. "hosts": the state that the spawning host mesh shares with its views.
        # "tool": the procs are a tool's, and users do not see them.
        self._shared: dict[str, Any] = {"stopped": False, "hosts": None, "tool": False}
        self._part = False  # whether this is only a part of the spawned mesh, although its region is whole
        self._cached: Target | None = None
        self._cached_at = 0  # the node's generation at that time

    @classmethod
    def from_host_mesh(
        cls, host_mesh: Any, per_host: Mapping[str, int] | None = None, setup: Callable[[], Any] | None = None
    ) -> ProcMesh:
        """Start procs on hosts, like ``host_mesh.spawn_procs(per_host, bootstrap=setup)``."""
        return host_mesh.spawn_procs(per_host, bootstrap=setup)

    # -- shape ----------------------------------------------------------------------------------

    @property
    def _region(self) -> Region:
        return self._shape

    def _new_with_region(self, region: Region) -> ProcMesh:
        mesh = ProcMesh(
            self._system,
            self._mesh_uid,
            self.name,
            self._procs,
            region,
            self._host_region,
            self._owner,
            self._ready,
        )
        mesh._shared = self._shared
        mesh._part = self._part
        return mesh

    @property
    def _stopped(self) -> bool:
        return bool(self._shared["stopped"])

    @_stopped.setter
    def _stopped(self, value: bool) -> None:
        self._shared["stopped"] = value

    @property
    def _tool(self) -> bool:
        return bool(self._shared["tool"])

    def _target(self) -> Target:
        node = self._system.node
        if self._cached is None or self._cached_at != node.generation:
            self._cached_at = node.generation
            procs = tuple(node.current(self._procs[rank]) for rank in self._shape.ranks())
            self._cached = Target(self.name, self._mesh_uid, self._shape.extent, procs, self._system.reported)
        return self._cached

    # -- actors ---------------------------------------------------------------------------------

    def spawn(self, name: str, cls: type[T], *args: object, **kwargs: object) -> ActorMesh[T]:
        """Create one actor of ``cls`` in every proc, with these constructor arguments.

        Returns immediately. Await the result (or its ``initialized``) to wait until all ``__init__`` have returned.

        Raises:
            ValueError: ``cls`` is not an ``Actor``, or mixes sync and async.
            TypeError: the constructor does not take these arguments, or one of them cannot be pickled.
            RuntimeError: the mesh was stopped.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"spawn(name, Class, ...): the name must be a non-empty string, not {name!r}")
        cls = stand_in(cls)
        spec = spec_of(cls, RESERVED)
        check_constructor(cls, args, kwargs)
        if self._stopped:
            raise RuntimeError(f"proc mesh {self.name} was stopped: spawn on a new one")
        system = self._system
        node = system.node
        if system.held_calls.active:
            over: Future[None] = Future(node.poller, f"{self.name}.heal")
            if system.held_calls.keep((ref.id for ref in self._target().procs), lambda: over._resolve(None)):
                over.get()
        target = self._target()
        extent = target.extent
        actor = unique(name)
        here = current.get()
        owner = here.actor_instance if here is not None else system.client
        try:
            body, buffers, ports = pickled((spec.cls, args, kwargs, self))
        except Exception as e:
            explain(e, f"{cls.__name__} or an argument of its constructor")
            raise
        call = ManyCall(node, f"{name}.__init__", Target(name, actor, extent, target.procs, system.reported), True)
        mesh: ActorMesh[T] = ActorMesh(
            system, actor, name, self.name, cls, target.procs, Region.from_extent(extent), _Ready(call, actor)
        )
        mesh._spawned_on = self
        system.tree.spawned_actors(
            OwnedMesh(actor, name, owner.mesh_id, extent, target.procs, spec.tool, class_label(spec.cls))
        )
        owner.owned.append(mesh)
        if self._tool:
            give(ports, target)
        else:
            system.healer.born(mesh, owner.mesh_id, body, buffers, ports)
        message = Create(
            actor,
            name,
            call._number,
            0,
            extent.names,
            extent.shape,
            owner.mesh_id,
            node.ref,
            buffers,
            calling_origin(),
            self._mesh_uid == target.procs[0].id,
        )
        send_to_all(system, target, message, body, call)
        if self._mesh_uid not in system.proc_meshes:
            # Procs of another process: their agents report deaths only on request.
            others = [ref for ref in target.procs if ref.id != node.id]
            for ref in others:
                node.learn(ref)
            node.watch([ref.id for ref in others])
        return mesh

    # -- independent work; the pool is loaded on first use -----------------------------------------

    def map(
        self,
        function: Callable[..., object],
        *iterables: Iterable[object],
        chunk: int = 1,
        ahead: int | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Call ``function(item)`` for every item, each on any idle process.

        The result is a ``monarch_kernel.pool.Mapping``. Iterating it yields the values in the order of the items;
        ``as_completed()`` yields ``(number, value)`` pairs as they arrive; ``get()`` (or ``await``) returns a list of
        all values. The function is sent once per process. Items of a process that dies move to other processes.

        Args:
            function: called with an item, or with one of each iterable, in a process of the mesh.
            iterables: read ahead only by ``ahead`` items, so they may be infinite.
            chunk: how many items are sent together; increase it for functions that take less than a millisecond.
            ahead: how many items may be read beyond the last value taken (default: 16 chunks per process, and at least
                256).
            return_errors: return the exception that the function raises for an item as its value. Otherwise the
                exception is raised in its place, with a note that names the item, and items that have not started are
                cancelled.

        Raises:
            TypeError: the function cannot be pickled, or an argument is not iterable.
            ValueError: ``chunk`` or ``ahead`` is less than 1.
        """
        return pool_functions().start_map(
            self, function, iterables, chunk=chunk, ahead=ahead, return_errors=return_errors
        )

    def submit(self, function: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Call ``function(*args, **kwargs)`` on any idle process. Return a future of its value.

        The future is a ``concurrent.futures.Future`` (``wait`` and ``as_completed`` accept it) that can also be awaited
        and has ``get()``, ``rank`` and ``interrupt()``.
        """
        if not callable(function):
            raise TypeError(f"submit(function, ...): {function!r} cannot be called")
        return pool_functions().pool_of(self).submit(function, args, kwargs)

    def scatter(self, name: str, values: object) -> ValueMesh[int]:
        """Split ``values`` into one piece per process, and set each piece as the variable ``name`` of its process.

        The variables are set in ``__main__``, where ``%%mesh`` cells run. The pieces are slices of a list, a tuple, a
        string, an array or a tensor (along its first dimension), in rank order and as equal in size as possible. Each
        process receives only its own piece.

        Returns:
            The number of elements on each process.
        """
        return pool_functions().scatter(self, name, values)

    def gather(self, name: str) -> Any:
        """Return the values of the variable ``name`` of all processes, joined in rank order; the inverse of
        ``scatter``.

        Lists, tuples, strings, bytes, NumPy arrays and tensors can be joined.
        """
        return pool_functions().gather(self, name)

    # -- life -----------------------------------------------------------------------------------

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves to True when every proc runs and its bootstrap has returned."""
        if self._ready is None:
            raise RuntimeError(
                f"{self!r} came from another process: only the handle that spawn_procs returned knows when it is ready"
            )
        return self._ready

    def __await__(self) -> Generator[Any, None, ProcMesh]:
        if self._ready is not None:
            yield from self._ready.__await__()
        return self

    def stop(self, reason: str = "stopped by its owner") -> Future[None]:
        """Stop all actors of these procs (with ``__cleanup__``), then the procs.

        Procs that do not end in time are killed.
        """
        return self._stop(reason)

    def _stop(self, reason: str) -> Future[Any]:
        if len(self._shape.ranks()) == len(self._procs) and not self._part:
            self._forget()
        self._system.tree.ending(ref.id for ref in self._target().procs)
        done = self._ask_agents(lambda call, procs: StopProcs(call, procs, reason, STOP_GRACE), "stop")
        self._system.changed()
        return settled(done)  # if a host agent is dead, so are its procs

    def _forget(self) -> None:
        """Record that the whole mesh ends on purpose: it becomes unusable, and its end is not a fault."""
        self._stopped = True
        self._system.proc_meshes.pop(self._mesh_uid, None)
        self._system.tree.stopped(self._mesh_uid)
        self._system.healer.forget(self._mesh_uid)

    def kill(self, reason: str = "") -> Future[None]:
        """Kill these procs with SIGKILL, without cleanup.

        The future is done when they are gone. Their end is not a fault.
        """
        self._system.tree.ending(ref.id for ref in self._target().procs)
        return settled(self._ask_agents(lambda call, procs: KillProcs(call, procs, reason), "kill"))

    # -- healing --------------------------------------------------------------------------------

    def _whole(self) -> ProcMesh:
        """Return the mesh as spawned, of which this may be a slice."""
        return self._system.proc_meshes.get(self._mesh_uid, self)

    def heal(self, hosts: HostMesh | HostSource | None = None, timeout: float = HEAL_TIMEOUT) -> Future[Healed]:
        """Replace dead ranks: start new procs in their place, and recreate their actors.

        A successor runs on the same host or, if that host is gone, on a spare one. It runs the mesh's bootstrap and
        gets the actors of its predecessor, with their original arguments and the result of their last ``checkpoint``.
        Live ranks are not affected, and all references to the mesh stay valid, also in other processes. Failed calls
        are not retried. New calls over ranks that are being replaced wait for the successors.

        Args:
            hosts: spare hosts, to replace hosts that are gone, or a job, which requests replacements from its provider.
            timeout: limit for starting the procs and for every ``__init__`` and ``__restore__`` (seconds).

        Returns:
            A report (``Healed``), which is false if nothing was dead.

        Raises:
            HealError: this process did not spawn these procs, or a host is gone and there is no spare host.
            ActorError: a bootstrap, an ``__init__`` or a ``__restore__`` raised.
        """
        return self._system.healer.heal(self, hosts, timeout)

    def healthy(self) -> ProcMesh:
        """Return a mesh of the live ranks, to continue with.

        It keeps its dimensions if only whole slices along one of them are dead (a host, for example). Otherwise it has
        one dimension.

        Raises:
            RuntimeError: no rank is alive.
        """
        node = self._system.node
        target = self._target()
        alive = [rank for rank, ref in enumerate(target.procs) if ref.id not in node.deaths]
        if not alive:
            raise RuntimeError(f"all ranks of {self.name} are dead: heal() it, or spawn a new mesh")
        if len(alive) == len(target.procs):
            return self
        extent = shrunk(target.extent, alive)
        mesh = ProcMesh(
            self._system,
            self._mesh_uid,
            self.name,
            tuple(target.procs[rank] for rank in alive),
            Region.from_extent(extent),
            self._host_region,
            self._owner,
            self._ready,
        )
        mesh._shared = self._shared
        mesh._part = True
        return mesh

    def _ask_agents(self, message: Any, what: str) -> Future[list[Any]]:
        """Send one message to each host agent of the mesh. Return a future of the raw replies of live agents.

        It fails only if all agents are dead.
        """
        node = self._system.node
        by_agent: dict[str, list[ProcRef]] = {}
        for ref in self._target().procs:
            by_agent.setdefault(ref.agent, []).append(ref)
        calls: list[Future[object]] = []
        for refs in by_agent.values():
            first = refs[0]
            if first.id == node.id:
                raise RuntimeError(f"this process cannot {what} itself: use shutdown_context()")
            names = [ref.id for ref in refs]
            calls.append(ask_agent(node, first.agent_ref(), f"{self.name}.{what}", message, names))
        if len(calls) == 1:
            return calls[0].then(lambda reply: [reply])

        def answers(_settled: list[object]) -> list[Any]:
            if all(call.exception() is not None for call in calls):
                calls[0].get()
            return [call.get() for call in calls if call.exception() is None]

        return gathered(node.poller, [settled(call) for call in calls], f"{self.name}.{what}").then(answers)

    def interrupt(self, cells: str = "") -> Future[ValueMesh[list[str]]]:
        """Raise KeyboardInterrupt in all endpoints that run in these procs. Return the names of interrupted endpoints.

        With ``cells``, interrupt only endpoints that run for notebook cells whose ids have this prefix, and not cells
        that run directly on the ranks.

        A proc that cannot answer (native code holds the GIL) leaves the future pending: pass a timeout to ``get``.
        """
        return self._ask_procs(lambda call, rank: Interrupt(call, rank, cells), "interrupt")

    def _ask_procs(self, message: Any, what: str) -> Future[Any]:
        node = self._system.node
        target = self._target()
        call = ManyCall(node, f"{self.name}.{what}", target)
        send_to_all(self._system, target, message(call._number, 0), sink=call)
        return call

    def status(self) -> Future[ValueMesh[ProcStatus]]:
        """Return state, pid, memory and CPU use of every proc, as measured by its host agent."""
        target = self._target()

        def merge(replies: list[Any]) -> ValueMesh[ProcStatus]:
            known = {s.proc: s for reply in replies for s in msgspec.msgpack.decode(reply, type=list[ProcStatus])}
            return ValueMesh(target.extent, [known.get(ref.id) or self._unknown(ref) for ref in target.procs])

        asked = self._ask_agents(GetStatus, "status")
        return settled(asked).then(lambda _: merge([] if asked.exception() is not None else asked.get()))

    def unresponsive(self) -> dict[int, str]:
        """Return the live ranks that do not respond, with the reasons from their host agents.

        Sends no messages.
        """
        node = self._system.node
        silent = node.unresponsive
        if not silent:
            return {}
        return {k: silent[ref.id].why for k, ref in enumerate(self._target().procs) if ref.id in silent}

    def _unknown(self, ref: ProcRef) -> ProcStatus:
        """Return the status of a proc whose agent did not answer."""
        death = self._system.node.deaths.get(ref.id) or self._system.node.deaths.get(ref.agent)
        if death is None:
            return ProcStatus(ref.id, "starting", 0, ref.host)
        return ProcStatus(ref.id, "dead", self._system.node.pids.get(ref.id, 0), ref.host, death.cause)

    def pids(self) -> ValueMesh[int]:
        """Process ids (0: not started yet)."""
        target = self._target()
        return ValueMesh(target.extent, [self._system.node.pids.get(ref.id, 0) for ref in target.procs])

    @property
    def host_mesh(self) -> Any:
        """The hosts of this mesh. If a slice leaves hosts out, the result has one dimension, ``hosts``."""
        from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh, HostRef

        hosts: dict[str, HostRef] = {}
        for ref in self._target().procs:
            hosts.setdefault(ref.agent, HostRef(ref.agent_ref(), ref.host))
        region = self._host_region
        if len(hosts) != region.nelements:
            region = Region.from_extent(Extent(("hosts",), (len(hosts),)))
        return HostMesh(self._system, tuple(hosts.values()), region, use=self._shared["hosts"], part=True)

    def to_table(self) -> str:
        """Render the mesh as a text table with one line per proc."""
        from monarch_kernel.display.tables import TableView, table_text

        rows: list[tuple[str, ...]] = []
        node = self._system.node
        for (point, status), ref in zip(self.status().get(10).items(), self._target().procs, strict=True):
            where = " ".join(f"{k}={v}" for k, v in point.items())
            rows.append((str(point.rank), where, ref.host, str(status.pid or node.pids.get(ref.id, 0)), status.state))
        return table_text(TableView(("rank", "point", "host", "pid", "state"), rows))

    def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = 20
    ) -> CoroutineFuture[None]:
        """Set how this mesh's output appears on a script's terminal (a notebook routes output to its cells).

        The result is a future, and a coroutine for ``asyncio.run``, as in Monarch.

        Args:
            stream_to_client: prefix each line with its rank, ``[3] text``.
            aggregate_window_sec: hold lines for this time, and show equal lines of several ranks once. Lines held when
                this is called are shown immediately.
            level: the level of the actors' ``logger``, as a number: ``logging.WARNING``.

        Raises:
            RuntimeError: there is a window, but no stream.
            TypeError: the window or the level is not an integer.
            ValueError: the window or the level is negative, or the level is above 255.
        """
        if aggregate_window_sec is not None and not stream_to_client:
            raise RuntimeError(
                "aggregate_window_sec needs stream_to_client=True: there is nothing to aggregate otherwise"
            )
        if unsigned(level) > 255:
            raise ValueError(f"level={level} is no level of logging: use logging.INFO and its like")
        from monarch_kernel.runtime.actor import output

        window = None if aggregate_window_sec is None else unsigned(aggregate_window_sec)
        return output.set_option(self, stream_to_client, window, int(level))

    async def __aenter__(self) -> ProcMesh:
        return await self

    async def __aexit__(self, *_exc: object) -> None:
        if not self._stopped:
            await self.stop("left its async with block")

    def __reduce__(self) -> Any:
        procs = tuple(map(self._system.node.current, self._procs))
        return (_rebuild_proc_mesh, (self._mesh_uid, self.name, procs, self._shape, self._host_region))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"<ProcMesh {self.name} ({sizes or 'one proc'})>"


def _rebuild_proc_mesh(uid: str, name: str, procs: tuple[ProcRef, ...], region: Region, hosts: Region) -> ProcMesh:
    system = get_system()
    known = system.proc_meshes.get(uid)
    if known is not None and known._region == region:
        return known
    return ProcMesh(system, uid, name, procs, region, hosts)


def proc_mesh_of(system: System, name: str, procs: tuple[ProcRef, ...], extent: Extent) -> ProcMesh:
    """Return the proc mesh with these procs, which another process spawned."""
    uid = procs[0].id.rpartition(".")[0] or procs[0].id
    known = system.proc_meshes.get(uid)
    if known is not None and known._procs == procs:
        return known
    hosts = Region.from_extent(Extent(("hosts",), (len({ref.agent for ref in procs}),)))
    return ProcMesh(system, uid, name, procs, Region.from_extent(extent), hosts)


def proc_mesh_of_this_process(system: System) -> ProcMesh:
    """Return this process as a proc mesh of one."""
    region = SINGLE.region
    ready = resolved(system.node.poller, "this_proc()", True)
    return ProcMesh(
        system, system.node.id, "this_proc", (system.node.ref,), region, region, system.client.mesh_id, ready
    )


class _Ready(Future[None]):
    """Done when every ``__init__`` has returned. Reading its result marks failures of ``__init__`` as reported."""

    __slots__ = ("_actor", "_call")

    def __init__(self, call: ManyCall, actor: str) -> None:
        super().__init__(call._poller, call.what)
        self._call = call
        self._actor = actor
        call.add_done_callback(lambda _c: self._resolve(None))

    def _result(self) -> None:
        try:
            self._call._result()
        except ActorError as e:
            self._call._target.reported.met.update((self._actor, failure.proc) for failure in e.failures)
            raise
