"""An actor in its proc: its mailbox, its driver thread and its end (long because a class is not split over files).

Each actor has one thread, its *driver*, which handles messages one at a time and polls for the whole process while the
mailbox is empty. The main thread can drive one actor per proc. `async_instance` has the async kind.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from monarch_kernel import logs
from monarch_kernel.protocol.faults import capture
from monarch_kernel.protocol.messages import (
    ERROR,
    OK,
    ActorFailed,
    Call,
    Checkpoint,
    Create,
    Death,
    DeathKind,
    PeersFailed,
    ProcRef,
    Reply,
    StopActor,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.calls.pending import acknowledge
from monarch_kernel.runtime.actor.context import Context, current, origin, shared
from monarch_kernel.runtime.actor.definition import ActorSpec, EndpointSpec
from monarch_kernel.runtime.actor.errors import ActorError, MeshFailure, RankFailure, build_actor_error
from monarch_kernel.runtime.actor.execution import collectives, postmortem
from monarch_kernel.runtime.actor.execution.collectives import fault_body
from monarch_kernel.runtime.actor.extensions import tensor_functions
from monarch_kernel.runtime.actor.healing.healed import MAX_KEPT_CHECKPOINT
from monarch_kernel.runtime.actor.ids import ActorId
from monarch_kernel.runtime.actor.ports.holders import give, give_to_unknown, leave, pickled
from monarch_kernel.runtime.actor.ports.port import Port, ReplyPort
from monarch_kernel.runtime.actor.process import CONTROLLERS
from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.runtime.actor.wire_types import ActorMessage, Body, Buffers, LocalLink, MessageLink, Pickled
from monarch_kernel.runtime.mesh.shape import SINGLE, Point
from monarch_kernel.runtime.node import recorder
from monarch_kernel.thread_frames import raise_in_thread

if TYPE_CHECKING:
    import asyncio

    from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
    from monarch_kernel.runtime.actor.process import SpawnedMesh, System

log = logs.logger(__name__)

#: How long ``__cleanup__`` and the end of owned meshes may take (seconds).
CLEANUP_TIMEOUT = 10.0


class _FailureDue:
    """Mailbox marker: handle the next entry of ``_failures``."""


FAILURE: Final = _FailureDue()


_NO_LINK = LocalLink()


class Aborted(BaseException):
    """Raised in an actor that ends itself with ``context().actor_instance.abort()``."""


class Instance:
    """The value of ``context().actor_instance``; the client's instance has no mailbox.

    Attributes:
        mesh_id: the unique name of its mesh.
        name: the name that it was spawned under.
        class_name: the name of its class.
        rank: its position in the mesh as spawned.
        creator: the id of the actor that spawned it.
    """

    def __init__(self, system: System, mesh_id: str, name: str, class_name: str, rank: Point, creator: str) -> None:
        self._system = system
        self.mesh_id = mesh_id
        self.name = name
        self.class_name = class_name
        self.rank = rank
        self.creator = creator
        self.proc_mesh: ProcMesh | None = None
        self.owned: list[SpawnedMesh] = []  # meshes that this actor spawned, in order
        self.ports: weakref.WeakSet[Port[Any]] = weakref.WeakSet()  # ports that arrived in messages to it
        self.ended = False
        #: For a sync actor: an event loop that its driver runs while the mailbox is empty.
        self.background: asyncio.AbstractEventLoop | None = None

    def hold(self, port: Port[object]) -> None:
        """Record a port that arrived in a message to this actor."""
        self.ports.add(port)

    @property
    def actor_id(self) -> ActorId:
        """Unique name of this actor; it differs for each rank of its mesh."""
        text = f"{self.mesh_id}.{self.rank.rank}" if self.creator else self.mesh_id
        name = self.name if self.creator else "client"
        return ActorId.of(text, name, self.mesh_id, self._system.node.id, self.rank.rank)

    @property
    def proc_id(self) -> str:
        """Unique name of the proc this actor runs in."""
        return self._system.node.id

    @property
    def proc(self) -> ProcMesh:
        """The proc this actor runs in, as a mesh of one."""
        return self._system.this_proc()

    def supervise(self, failure: MeshFailure) -> None:
        """Handle the failure of a mesh that this actor owns. The client of a process forwards it to the root."""
        self._system.fault_at_root(failure)

    def stop_owned(self, reason: str) -> None:
        """Stop the meshes that this actor spawned, last first, and wait for them."""
        from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh

        own = {ref.id for mesh in self.owned if isinstance(mesh, ProcMesh) for ref in mesh._target().procs}
        while self.owned:
            mesh = self.owned.pop()
            if not isinstance(mesh, ProcMesh) and all(ref.id in own for ref in mesh._target().procs):
                continue  # it ends with its procs, which limit the time for cleanup
            try:
                mesh._stop(reason).get(CLEANUP_TIMEOUT)
            except Exception as e:
                log.debug("while stopping %s: %s", mesh, e)

    def describe(self) -> str:
        """Describe this actor for failure reports."""
        host, pid = self._system.node.ref.host, self._system.pid
        if not self.creator:
            what = "the controller" if self._system.is_root else "a rank's own code, outside any actor"
            return f"{what} (host {host}, pid {pid})"
        at = ", ".join(f"{label}={place}" for label, place in self.rank.items())
        return f"actor {self.name!r}, rank {self.rank.rank}{f' ({at})' if at else ''}, host {host}, pid {pid}"

    def abort(self, reason: str = "") -> None:
        """End this actor at once as failed."""
        raise Aborted(reason or "abort() was called (no reason provided)")

    kill = abort

    def stop(self, reason: str = "") -> None:
        """End this actor normally after the current message."""
        raise RuntimeError("the client cannot stop itself: use shutdown_context()")

    def __repr__(self) -> str:
        return f"<{self.class_name} {self.mesh_id} at rank {self.rank.rank}>"


class ActorInstance(Instance):
    """One actor, from its Create message to its end."""

    def __init__(
        self,
        system: System,
        create: Create,
        spec: ActorSpec,
        build: Callable[[], Any],
        link: MessageLink,
        proc_mesh: ProcMesh,
    ) -> None:
        rank = Point(create.rank, shared(create.labels, create.sizes))
        super().__init__(system, create.actor, create.name, spec.cls.__name__, rank, create.owner)
        self.proc_mesh = proc_mesh
        self.owner_proc: ProcRef = create.owner_proc
        self._spec = spec
        self._build = build
        self._create = (link, create.call, create.rank)
        self._context = Context(self, rank.rank, rank.extent)  # of the last message
        self._born_for = create.cell or None
        self._object: object = None
        self._functions: dict[str, Callable[..., object]] = {}
        self._queue: deque[tuple[MessageLink, ActorMessage | _FailureDue, Body]] = deque()
        self._done = False  # the mailbox as a waitable: it is not empty
        self._parked: list[Any] = []
        self._failures: deque[MeshFailure] = deque()  # failures of owned meshes that are not handled yet
        self.open_ports: set[ReplyPort[Any]] = set()  # neither answered nor passed on
        self._thread = 0
        self._stopping: tuple[str, list[tuple[MessageLink, int, int]]] | None = None
        self.death: Death | None = None
        self._fatal: BaseException | None = None  # the error that ended the actor outside its messages
        self.running: str | None = None  # the endpoint that runs now
        self.running_for = create.cell  # the cell that it runs for
        self.answering: Call | None = None  # the call that it answers
        self.began = monotonic()  # when the newest endpoint began
        self.latest = ""  # its name
        self.calls = 0  # endpoints that it has begun
        self.failures = 0  # how many of them raised
        self._warned = False  # whether it warned about a checkpoint that is too large
        self.handling = 0  # messages that it handles now; see `message_gate`
        self._interruptible = False
        self._woken: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None  # set while that loop runs

    @property
    def object(self) -> Any:
        """The user's object; None before ``__init__`` returns, and after the actor has ended."""
        return self._object

    def hold(self, port: Port[Any]) -> None:
        """Record a port that arrived. Its receiver is notified when this actor drops the port or ends."""
        super().hold(port)
        port._holder = self

    # -- mailbox (any thread) ---------------------------------------------------------------------

    def deliver(self, link: MessageLink, message: ActorMessage, body: Body) -> None:
        """Put a message into the mailbox."""
        if self.death is not None:
            self.refuse(link, message)
            return
        self._queue.append((link, message, body))
        self._notify()
        if self.death is not None:
            self._refuse_queue()

    def _notify(self) -> None:
        """Notify the driver that the mailbox is not empty."""
        if not self._done:
            self._done = True
            if self._woken is not None:
                loop, event = self._woken
                loop.call_soon_threadsafe(event.set)
            self._system.node.poller.notify(self)

    def refuse(self, link: MessageLink, message: ActorMessage | _FailureDue) -> None:
        """Answer a message that arrived after the actor ended."""
        assert self.death is not None
        if isinstance(message, Call):
            if message.tensors:
                tensor_functions().call_ended(message.tensors, self.death.cause)
            if message.call:
                self._system.reply_dead(link, message, self.death)
        elif isinstance(message, StopActor):
            acknowledge(link, message.call, message.rank)

    def _refuse_queue(self) -> None:
        while self._queue:
            try:
                link, message, _ = self._queue.popleft()
            except IndexError:
                return
            self.refuse(link, message)

    def release(self, message: PeersFailed) -> None:
        """Release this actor from collectives with other ranks of its call, because these have failed."""
        there = [self.answering, *(each[1] for each in list(self._queue))]
        # By identity: a call that comes after this one may have the same actor, endpoint and sender.
        concerned = {
            id(call): call
            for call in there
            if type(call) is Call and (call.actor, call.endpoint, call.sender) == message.asked
        }

        def runs() -> bool:
            return id(self.answering) in concerned or any(id(each[1]) in concerned for each in list(self._queue))

        def thread() -> int:
            return self._thread if id(self.answering) in concerned else 0

        if concerned:
            collectives.release(frozenset(concerned), thread, runs, frozenset(message.ranks))

    # -- driving ----------------------------------------------------------------------------------

    def start_thread(self) -> None:
        """Start a thread for the actor. Debuggers recognize the threads of tools by name, and skip them."""
        name = "monarch-tool" if self._spec.tool else "monarch-actor-driver"
        threading.Thread(target=self.drive, name=name, daemon=True).start()

    def drive(self) -> None:
        """Run the actor from ``__init__`` to its end; called on its thread."""
        self._thread = threading.get_ident()
        current.set(self._context)
        origin.set(self._born_for)
        error: BaseException | None = None
        try:
            error = self._run()
        except BaseException as e:  # a bug in the runtime, or an interrupt outside any endpoint
            error = e
        self._finish(error)

    def _run(self) -> BaseException | None:
        """Construct the object and handle messages until the end. Returns the error that ended the actor, if any."""
        error = self._construct()
        while error is None and self._stopping is None:
            try:
                error = self._take_messages()
            except KeyboardInterrupt:  # meant for an endpoint that has just returned
                continue
        return error

    def _construct(self) -> BaseException | None:
        self._enter()
        self.running = "__init__"
        self._interruptible = True
        try:
            self._object = self._build()
        except BaseException as e:
            self._answer_create(ERROR, fault_body(e))
            return e
        finally:
            self._interruptible = False
            self.running = None
            self.handling = 0
        self.bind_endpoints()
        self._answer_create(OK, dumps(None)[0])
        return None

    def bind_endpoints(self) -> None:
        """Look up the methods of all endpoints: after ``__init__``, and when the class was changed in place."""
        if self._object is not None:
            self._functions = {
                name: endpoint.function.__get__(self._object) for name, endpoint in self._spec.endpoints.items()
            }

    @property
    def spec(self) -> ActorSpec:
        """The description of its class."""
        return self._spec

    def _enter(self) -> None:
        """Begin to handle a message, as soon as no tool holds messages."""
        self.handling = 1
        gate = self._system.gate
        while gate.closed:
            self.handling = 0
            gate.wait()
            self.handling = 1

    def _answer_create(self, status: int, body: Body) -> None:
        link, call, rank = self._create
        if call:
            link.send(encode_header(Reply(call, rank, status)), body)

    def _take_messages(self) -> BaseException | None:
        poller = self._system.node.poller
        queue = self._queue
        while True:
            while not queue:
                self.handling = 0
                self._done = False
                if queue:
                    break
                if self._stopping is not None:
                    return None
                if self.background is None:
                    poller.wait(self, idle=True)
                else:
                    self._wait_in(self.background)
            link, message, body = queue.popleft()
            self.handling = 1
            if self._system.gate.closed:  # read after `handling` is set; see `message_gate`
                self._enter()
            if type(message) is Call:
                if recorder.recording is None and not message.trace:
                    error = self._handle(link, message, body)
                else:
                    error = call_hooks.handle(self, link, message, body)
                if error is not None:
                    return error
            elif type(message) is StopActor:
                self._note_stop(link, message)
            elif message is FAILURE:
                error = self._supervised(self._failures.popleft())
                if error is not None:
                    return error
            if self._stopping is not None:
                return None

    def _wait_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the mailbox in an event loop; another thread polls."""
        import asyncio

        event = asyncio.Event()
        self._woken = (loop, event)
        waiting = loop.create_task(event.wait())
        try:
            if not self._done:
                self._system.node.poller.start_background()
                loop.run_until_complete(waiting)
        except SystemExit:  # raised by a task of the loop; it must not end the actor
            pass
        finally:
            self._woken = None
            waiting.cancel()

    def _handle(self, link: MessageLink, message: Call, body: Body) -> BaseException | None:
        """Run one endpoint. Returns the exception that ends the actor, if any."""
        endpoint: CalledEndpoint | None = self._spec.endpoints.get(message.endpoint)
        self._enter_context(message)
        if endpoint is None:
            endpoint = self._undecorated(message.endpoint)
        try:
            function, args, kwargs = self._prepare(link, message, endpoint, body)
            self.running = message.endpoint
            self.running_for = message.cell
            self.answering = message
            self._interruptible = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._interruptible = False
                self.running = self.answering = None
            del args, kwargs  # releases the memory of arrays among them to the caller with the answer
            if endpoint.explicit_port or not message.call:
                self._end_of_tensors(message)
                return None
            if message.stays:
                tensor_functions().keep_result(message.tensors, result)
                result = None
            reply, buffers, ports = pickled(result)
        except BaseException as e:
            return self._failed(link, message, endpoint, e)
        if ports or message.tensors or message.endpoint == "checkpoint":
            self._answer(link, message, reply, buffers, ports)
        else:
            self._system.reply(link, message, OK, reply, buffers)
        return None

    def _enter_context(self, message: Call) -> None:
        """Set a message's context and origin for the thread. Usually they are unchanged."""
        here = self._context
        if (
            here._endpoint != message.endpoint
            or here._rank != message.rank
            or here._extent.shape != message.sizes
            or here._extent.names != message.labels
        ):
            extent = shared(message.labels, message.sizes)
            here = self._context = Context(self, message.rank, extent, message.endpoint, self.calls)
        if current.get() is not here:
            current.set(here)
        cell = message.cell or None
        if origin.get() != cell:
            origin.set(cell)

    def _end_of_tensors(self, message: Call) -> None:
        """Continue operations on tensors that wait for the end of a call."""
        if message.tensors:
            tensor_functions().call_ended(message.tensors)

    def _answer(
        self, link: MessageLink, message: Call, reply: Pickled, buffers: Buffers, ports: Sequence[Port[object]]
    ) -> None:
        """Send the result of an endpoint."""
        is_checkpoint = message.endpoint == "checkpoint"
        if ports and is_checkpoint:
            give_to_unknown(ports)
        elif ports:
            give(ports, message.reply_to or self._system.node.refs[link.peer])
        if is_checkpoint:
            self._keep_checkpoint(reply, buffers)
        self._system.reply(link, message, OK, reply, buffers)
        self._end_of_tensors(message)  # not earlier: operations may write memory that the reply contains

    def _keep_checkpoint(self, state: Pickled, buffers: Buffers) -> None:
        """Send the result of ``checkpoint`` to the owner's process, which keeps it for this actor's successor."""
        if hasattr(self._object, "__restore__"):
            size = sum(buffers) + len(state[-1] if type(state) is list else state)
            if size > MAX_KEPT_CHECKPOINT and self.owner_proc.id in self._system.kept_from and not self._warned:
                self._warned = True
                print(
                    f"{self.name}: its checkpoint of {size >> 20} MB serves heal() while this controller lives, "
                    f"but is too large to be kept for a later one (the limit is {MAX_KEPT_CHECKPOINT >> 20} MB): "
                    "write it to a file, and return the path",
                    file=sys.stderr,
                )
            self._system.node.learn(self.owner_proc)
            self._system.node.send(self.owner_proc.id, Checkpoint(self.mesh_id, self.rank.rank, buffers), state)

    def _prepare(
        self, link: MessageLink, message: Call, endpoint: CalledEndpoint, body: Body
    ) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        """Return the function to call for a message, and its arguments."""
        self.calls += 1
        self.began = monotonic()
        self.latest = message.endpoint
        args, kwargs = loads(body, message.buffers)
        function = self._functions.get(message.endpoint)
        if function is None:
            function = getattr(self._object, message.endpoint.removesuffix("!port"))
        if endpoint.explicit_port:
            to = message.reply_to or self._system.node.refs[link.peer]
            args = (ReplyPort(to, message.call, message.rank, self), *args)
        return function, args, kwargs

    def _undecorated(self, name: str) -> _Undecorated:
        return _Undecorated(name.endswith("!port"))

    def _failed(
        self,
        link: MessageLink,
        message: Call,
        endpoint: CalledEndpoint,
        error: BaseException,
        interrupted: bool = False,
    ) -> BaseException | None:
        """Answer for an endpoint that raised. Return the error if it ends the actor."""
        self.failures += 1
        if message.tensors:
            tensor_functions().call_ended(message.tensors, error)
        if message.trace or recorder.recording is not None:
            call_hooks.failed(error)
        if self.death is not None:  # the endpoint was cancelled because the actor ends
            if message.call:
                self._system.reply_dead(link, message, self.death)
            return None
        if isinstance(error, KeyboardInterrupt):
            interrupted = self._system.was_interrupted(self) or interrupted
        elif not self._spec.tool:
            later = self._system.node.poller.call_later
            postmortem.failed(error, self.name, message.endpoint, message.cell, later, self.calls)
        fatal = endpoint.explicit_port or not message.call or not isinstance(error, Exception)
        if fatal and self._spec.outlives_errors and isinstance(error, Exception):
            fatal = False
            log.warning("%s.%s raised: %s", self.name, message.endpoint, error, exc_info=error)
        if fatal and not interrupted:
            death = self._death_of(error)
            self.death = death
            if message.call:
                self._system.reply_dead(link, message, death)
            return error
        if message.call:
            self._system.reply(link, message, ERROR, fault_body(error if message.reply_to is None else self._of(error)))
        return None

    def _of(self, error: BaseException) -> ActorError:
        """Return the exception that the receiver of a port raises if it got this in place of an answer (``send``)."""
        here, node = self._context, self._system.node
        rank, extent, fault = here.message_rank, here._extent, capture(error)
        failure = RankFailure(rank.rank, dict(rank), node.ref.host, self._system.pid, self.proc_id, fault)
        return build_actor_error(f"{self.name}.{here._endpoint}", extent, [failure], {}, [])

    def _death_of(self, error: BaseException) -> Death:
        text = capture(error).text
        cause = f"actor explicitly aborted due to: {type(error).__name__}: {error}"
        if isinstance(error, Aborted) or type(error) is MeshFailure:
            cause = f"actor explicitly aborted due to: {error}"
        if isinstance(error, MeshFailure):  # an owned mesh failed: the first cause has the traceback
            text = "\n".join(error.report().split("\n")[1:])
        node = self._system.node
        death = Death.of(DeathKind.ACTOR_FAILED, cause, self.proc_id, node.ref.host, self._system.pid, text)
        return msgspec.structs.replace(death, what="controller") if self.creator == CONTROLLERS else death

    # -- supervision --------------------------------------------------------------------------------

    def supervise(self, failure: MeshFailure) -> None:
        """Handle the failure of an owned mesh: call ``__supervise__`` before handling waiting messages."""
        if self.death is not None or self.ended:
            self._system.pass_up(self, failure)
            return
        self._failures.append(failure)
        self._queue.appendleft((_NO_LINK, FAILURE, b""))
        self._notify()

    def _is_told_to_stop(self) -> bool:
        """Return whether this actor is about to stop, so that it ignores further failures."""
        return self._stopping is not None or any(type(message) is StopActor for _, message, _ in list(self._queue))

    def _supervised(self, failure: MeshFailure) -> BaseException | None:
        if self._is_told_to_stop():
            return None
        current.set(Context(self, self.rank.rank, self.rank.extent))
        hook = getattr(self._object, "__supervise__", None)
        if hook is not None:
            try:
                if hook(failure):
                    return None
            except BaseException as e:
                e.__cause__ = failure
                return e
        return failure

    # -- ending ------------------------------------------------------------------------------------

    def _note_stop(self, link: MessageLink, message: StopActor) -> None:
        if self._stopping is None:
            self._stopping = (message.reason, [])
        self._stopping[1].append((link, message.call, message.rank))

    def stop(self, reason: str = "") -> None:
        """End this actor normally after the current message."""
        if self._stopping is None:
            self._stopping = (reason or "stop() was called", [])

    def _note_death(self, error: BaseException | None) -> None:
        """Refuse messages from now on, with this error as the cause."""
        if self.death is not None:
            return
        if error is not None:
            self.death = self._death_of(error)
        else:
            reason = self._stopping[0] if self._stopping is not None else ""
            host = self._system.node.ref.host
            self.death = Death.of(DeathKind.STOPPED, f"stopped: {reason}", self.proc_id, host, self._system.pid)

    def _finish(self, error: BaseException | None) -> None:
        """End the actor: clean up, answer waiting messages, and notify the owner."""
        error = error or self._fatal
        self._note_death(error)
        assert self.death is not None
        _, askers = self._stopping or ("", [])
        ports = list(self.ports)  # __cleanup__ may still use them
        self.stop_owned("its owner ended")
        self._clean_up(error)
        self._drop_object()
        self.ended = True
        for link, call, rank in askers:
            if call:
                acknowledge(link, call, rank)
        self._refuse_queue()
        while self.open_ports:
            self.open_ports.pop().abandon(self.death)
        leave(self._system, self.mesh_id, ports, self.death)
        self._system.actor_ended(self)
        if error is not None:
            failed = ActorFailed(self.mesh_id, self.rank.rank, self.creator)
            node = self._system.node
            node.learn(self.owner_proc)
            node.send(self.owner_proc.id, failed, node.death_body(self.owner_proc.id, self.death))

    def _drop_object(self) -> None:
        if hasattr(self._object, "__del__"):
            alive = [actor for actor in self._system.finalizing if actor() is not None]
            self._system.finalizing = [*alive, weakref.ref(self._object)]
        self._object = None
        self._functions = {}

    def _clean_up(self, error: BaseException | None) -> None:
        cleanup = getattr(self._object, "__cleanup__", None)
        if cleanup is not None:
            try:
                cleanup(error)
            except BaseException:
                log.exception("%s.__cleanup__ failed", self.class_name)

    # -- interrupts ----------------------------------------------------------------------------------

    def interrupt(self, cells: str = "") -> list[str]:
        """Raise KeyboardInterrupt in the running endpoint. Return the names of interrupted endpoints.

        With ``cells``, only do so if the actor is not a tool and runs for a notebook cell whose id has this prefix.
        """
        name, call = self.running, self.answering
        if name is None or not self._runs_for(self.running_for, cells):
            return []
        self._raise_in_driver()
        self._end_waits((name, id(call)), lambda: self.running == name and self.answering is call)
        return [f"{self.name}.{name}"]

    def _end_waits(self, key: object, runs: Callable[[], bool]) -> None:
        """End the waits in collectives of interrupted endpoints. Neither a signal nor an exception ends them."""
        collectives.release((self.mesh_id, key), lambda: self._thread if runs() else 0, runs)

    def _runs_for(self, cell: str, cells: str) -> bool:
        return not cells or (not self._spec.tool and cell.startswith(cells))

    def _raise_in_driver(self) -> None:
        if self._thread == threading.main_thread().ident:
            self._system.signal_main_thread()  # a signal also interrupts a system call
        elif self._interruptible:
            self.interrupted_here()
            raise_in_thread(self._thread, KeyboardInterrupt)

    def interrupted_here(self) -> None:
        """Record that a requested KeyboardInterrupt is about to be raised in user code of this actor."""
        self._system.note_interrupt(self)


def on_peers_failed(actors: Mapping[str, ActorInstance], _link: MessageLink, message: PeersFailed, _body: Body) -> None:
    """Handle ``PeersFailed`` for the actors of a process."""
    actor = actors.get(message.asked[0])
    if actor is not None:
        actor.release(message)


class _Undecorated:
    """The spec of a plain method that is called through ``as_endpoint``."""

    __slots__ = ("concurrent", "explicit_port")

    def __init__(self, explicit_port: bool) -> None:
        self.explicit_port = explicit_port
        self.concurrent = False


#: A method that handles a call: an endpoint, or a plain method that is called through ``as_endpoint``.
CalledEndpoint: TypeAlias = EndpointSpec | _Undecorated


class Client(Instance):
    """Code outside any actor: the root client in the controller, a nameless client in other procs."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system, name, name, "client", Point(0, SINGLE), "")
