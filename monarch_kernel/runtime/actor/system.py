"""The actor system of one process: its node, its actors, its meshes and their owners, from start to end.

There is one ``ActorSystem`` in a process, and ``process`` holds it. A rank creates it from its configuration; any other
process becomes a controller when it first needs a system. The file is long because everything in a process begins and
ends here, in one order.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from monarch_kernel import environment, logs
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    OK,
    ActorFailed,
    Call,
    Create,
    Death,
    DeathKind,
    EndProc,
    Interrupt,
    Launch,
    OutputChunk,
    OutputEnd,
    PeersFailed,
    Ping,
    ProcRef,
    Reply,
    SetLogLevel,
    Shutdown,
    StopActor,
    StopProcs,
    death_of,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import LARGE, Apart, loads
from monarch_kernel.runtime.actor import process
from monarch_kernel.runtime.actor.calls.caster import Caster
from monarch_kernel.runtime.actor.calls.pending import acknowledge, ask_agent
from monarch_kernel.runtime.actor.calls.target import ReportedDeaths
from monarch_kernel.runtime.actor.definition import ActorSpec, spec_of
from monarch_kernel.runtime.actor.errors import MeshFailure
from monarch_kernel.runtime.actor.execution import postmortem
from monarch_kernel.runtime.actor.execution.collectives import fault_body
from monarch_kernel.runtime.actor.execution.instance import ActorInstance, Client, Instance, on_peers_failed
from monarch_kernel.runtime.actor.execution.message_gate import MessageGate
from monarch_kernel.runtime.actor.extensions import tensor_functions
from monarch_kernel.runtime.actor.healing.healer import Healer, HeldCalls
from monarch_kernel.runtime.actor.hosts.placing import Placements
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh, proc_mesh_of, proc_mesh_of_this_process
from monarch_kernel.runtime.actor.ports.holders import PortHolders, arrived
from monarch_kernel.runtime.actor.tracing import call_records
from monarch_kernel.runtime.actor.tracing.recording import TraceService
from monarch_kernel.runtime.actor.wire_types import Body, Buffers, LocalLink, MessageLink, ReplyBody
from monarch_kernel.runtime.mesh.shape import Extent
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.interfaces import LargeBodies
from monarch_kernel.runtime.node.node import Node, provide_node
from monarch_kernel.runtime.supervision import Notice, Tree
from monarch_kernel.subscriptions import Subscribers

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.hosts.host_mesh import HostMesh
    from monarch_kernel.runtime.host.launch import AgentProcess

# Hold messages back while the bootstrap of a process runs.
#
# Actors that the owner of a proc spawns on it wait until the bootstrap returns, and so do messages for these actors. An
# actor that the bootstrap itself spawns, on ``this_proc()``, must not wait: the bootstrap may call it, or wait for
# another process that calls it.

HeldMessage: TypeAlias = Call | Create | StopActor


class BootstrapHold:
    """Messages for actors that must wait for the bootstrap, in order of arrival.

    Args:
        handle: handles one message at once.
        is_known: whether an actor with that id exists here, or existed.
    """

    def __init__(
        self, handle: Callable[[MessageLink, HeldMessage, Body], None], is_known: Callable[[str], bool]
    ) -> None:
        self._handle = handle
        self._is_known = is_known
        self._lock = threading.RLock()
        self._kept: list[tuple[MessageLink, HeldMessage, Body]] = []
        self._releasing = False
        self._over = False

    def takes(self, link: MessageLink, message: HeldMessage, body: Body) -> bool:
        """Hold or handle the message and return True. If it returns False, the caller must handle the message now."""
        with self._lock:
            if self._over:
                return False
            if not self._releasing:
                if self._is_known(message.actor):
                    return False
                if type(message) is Create and message.inner:
                    self._create(link, message, body)
                    return True
            self._kept.append((link, message, bytes(body) if isinstance(body, memoryview) else body))
            return True

    def _create(self, link: MessageLink, create: Create, body: Body) -> None:
        """Create an actor now, and deliver the messages that arrived for it before."""
        mine = [entry for entry in self._kept if entry[1].actor == create.actor]
        self._kept = [entry for entry in self._kept if entry[1].actor != create.actor]
        self._handle(link, create, body)
        for entry in mine:
            self._handle(*entry)

    def release(self) -> None:
        """Handle the held messages in order, and hold no further messages."""
        while True:
            with self._lock:
                # Later messages queue behind the held ones, whichever actor they are for.
                self._releasing = True
                kept, self._kept = self._kept, []
                if not kept:
                    self._over = True
                    return
            for entry in kept:
                self._handle(*entry)


log = logs.logger(__name__)

#: How long a call waits for its actor to be created (seconds).
EARLY_TIMEOUT = 30.0
#: How long a fault at the root waits for a pending call to report it instead (seconds).
FAULT_GRACE = 0.1


class OutputMarks(Protocol):
    """Marks the end of a rank's output before an answer.

    Attributes:
        used: whether this process has written output; only then, or for a notebook cell, is there anything to mark.
    """

    used: bool

    def mark(self, peer: str, cell: str) -> int:
        """Return the number of the last mark before an answer to this process, on behalf of this cell.

        0 if there is none.
        """
        ...


class ActorSystem:
    """The actors and meshes of this process.

    Args:
        node: the process's node, already listening.
        root: the reference to the controller.
        mesh: the proc mesh that this proc belongs to ("" in a controller).
    """

    def __init__(self, node: Node, root: ProcRef, mesh: str = "") -> None:
        environment.check()
        self.node = node
        self.root = root
        self.mesh = mesh
        self.pid = os.getpid()
        self.is_root = root.id == node.id
        self.actors: dict[str, ActorInstance] = {}
        self.ended: dict[str, Death] = {}
        self.finalizing: list[weakref.ref[object]] = []  # objects of ended actors that have a __del__
        self.client = Client(self, "root" if self.is_root else f"client-{node.id}")
        self.agent: ProcRef | None = None
        self.launch: Launch | None = None  # the command of this proc, if not forked; procs that it starts use the same
        self.agent_process: AgentProcess | None = None
        self.own_agents: set[str] = set()  # the agents that this process has started, one after another
        self.agent_answers: Future[bool] | None = None  # done when other processes can reach the agent, too
        self.agent_env: dict[str, str] = {}  # this process's environment when it started the agent
        self.workers: dict[str, ProcRef] = {}  # the agents of other hosts that this controller is attached to
        self.placements = Placements()
        #: In a rank: marks the end of the output before an answer.
        self.output_marks: OutputMarks | None = None
        self.output_sinks: list[Callable[[str, int, bytes | None], None]] = []
        self.held_calls = HeldCalls()
        self.gate = MessageGate()
        self.tree = Tree()
        self.proc_meshes: dict[str, ProcMesh] = {}  # by unique id, oldest first
        self.kept_from: set[str] = set()  # controllers whose end this rank, with their actors on it, survives
        self.reported = ReportedDeaths()
        self.caster = Caster(node)
        self.main_driver: Callable[[Callable[[], None]], bool] = lambda _drive: False
        self._interrupted: dict[str, int] = {}
        self.sent = 0  # bytes of answers to calls
        self.received = 0  # bytes of calls
        self.sigints = 0  # how often the main thread's handler has run
        self.bootstrap_error: bytes | None = None
        self.on_end_proc: Callable[[str], None] = lambda _reason: None
        self._hold: BootstrapHold | None = None  # while the bootstrap runs
        self._early: dict[str, list[tuple[MessageLink, Call, Body]]] = {}
        self._this_proc: ProcMesh | None = None
        self._this_host: HostMesh | None = None
        self._closed = False
        node.handlers.update(
            {
                Call: self._on_call,
                Create: self._on_create,
                StopActor: self._on_stop_actor,
                ActorFailed: self._on_actor_failed,
                Interrupt: self._on_interrupt,
                PeersFailed: partial(on_peers_failed, self.actors),
                Ping: self._on_ping,
                SetLogLevel: self._on_set_log_level,
                EndProc: self._on_end_proc,
                OutputChunk: self._on_output,
                OutputEnd: self._on_output_end,
            }
        )
        if not self.is_root:
            TraceService(self)
        call_records.install()
        node.make_bodies = _message_bodies
        self.healer = Healer(self)
        self.ports = PortHolders(self)
        node.on_peer_dead.append(self._on_peer_dead)
        node.on_hello.append(self._on_hello)

    # -- messages for actors ---------------------------------------------------------------------

    def hold(self) -> None:
        """Hold messages for actors of other processes until ``release``, because a bootstrap is about to run."""
        self._hold = BootstrapHold(self._handle_now, lambda actor: actor in self.actors or actor in self.ended)

    def release(self) -> None:
        """Handle the held messages in order, and hold no further messages."""
        hold = self._hold
        if hold is not None:
            hold.release()
            self._hold = None

    def _handle_now(self, link: MessageLink, message: HeldMessage, body: Body) -> None:
        if isinstance(message, Call):
            self._call(link, message, body)
        elif isinstance(message, Create):
            self._create(link, message, body)
        else:
            self._stop_actor(link, message)

    def _on_call(self, link: MessageLink, message: Call, body: Body) -> None:
        if not isinstance(body, Apart):
            self.received += len(body)
        if message.segment is not None:
            self.received += message.segment.size
            body = self.node.apart(message.segment, body)
        actor = self.actors.get(message.actor)
        if actor is not None and self._hold is None:  # the usual case
            actor.deliver(link, message, body)
        elif self._hold is None or not self._hold.takes(link, message, body):
            self._call(link, message, body)

    def _on_create(self, link: MessageLink, message: Create, body: Body) -> None:
        hold = self._hold
        if hold is None or not hold.takes(link, message, body):
            self._create(link, message, body)

    def _on_stop_actor(self, link: MessageLink, message: StopActor, body: Body) -> None:
        hold = self._hold
        if hold is None or not hold.takes(link, message, body):
            self._stop_actor(link, message)

    def _call(self, link: MessageLink, message: Call, body: Body) -> None:
        actor = self.actors.get(message.actor)
        if actor is None and message.actor == "controllers" and self.is_root:
            from monarch_kernel.runtime.actor.meshes.singletons import start_directory

            start_directory()
            actor = self.actors.get(message.actor)
        if actor is not None:
            actor.deliver(link, message, body)
        elif message.actor in self.ended or self.bootstrap_error is not None:
            self._refuse(link, message)
        else:
            self._keep_early(link, message, body)

    def _refuse(self, link: MessageLink, message: Call) -> None:
        death = self.ended.get(message.actor) or self._missing(message.actor)
        if message.tensors:
            tensor_functions().call_ended(message.tensors, death.cause)
        if message.call:
            self.reply_dead(link, message, death)

    def _missing(self, actor: str) -> Death:
        if self.bootstrap_error is not None:
            cause = "the bootstrap of its proc failed"
        else:
            cause = f"there is no actor {actor} in this proc"
        return Death.of(DeathKind.NO_ACTOR, cause, self.node.id, self.node.ref.host, self.pid)

    def _keep_early(self, link: MessageLink, message: Call, body: Body) -> None:
        """Keep a call whose actor does not exist yet: a reference may arrive before the actor's Create message."""
        early = self._early.setdefault(message.actor, [])
        early.append((link, message, body))
        if len(early) == 1:
            self.node.poller.call_later(EARLY_TIMEOUT, lambda: self._end_early(message.actor))

    def _end_early(self, actor: str) -> None:
        for link, message, _ in self._early.pop(actor, ()):
            self._refuse(link, message)

    def reply(self, link: MessageLink, message: Call, status: int, body: Body, buffers: Buffers = ()) -> None:
        """Answer a call; the answer goes to the process that the call names."""
        to = message.reply_to
        if to is not None and to.id != link.peer:
            self.node.learn(to)
            other: MessageLink | None = self.node.link_to(to.id)
            if other is None:
                return
            link = other
        segment = None
        if type(body) is bytes:
            self.sent += len(body)
        elif buffers:
            self.sent += sum(buffers)
        if buffers or (status == OK and type(body) is bytes and len(body) >= LARGE):
            body, segment = self.node.pack(body, buffers, [link.peer])
        marks = self.output_marks
        written = 0
        if marks is not None and (marks.used or message.cell):
            written = marks.mark(link.peer, message.cell)
        link.send(encode_header(Reply(message.call, message.rank, status, buffers, segment, written)), body)

    def reply_dead(self, link: MessageLink, message: Call, death: Death) -> None:
        """Answer a call to an actor that has ended."""
        to = message.reply_to
        self.reply(link, message, DEAD, self.node.death_body(to.id if to is not None else link.peer, death))

    def _create(self, link: MessageLink, create: Create, body: Body) -> None:
        if self.bootstrap_error is not None:
            self._born_dead(link, create, self.bootstrap_error, self._missing(create.actor))
            return
        try:
            (cls, args, kwargs, proc_mesh), ports = arrived(partial(loads, body, create.buffers))
            spec = spec_of(cls, frozenset())
        except BaseException as e:
            cause = f"its class or arguments could not be loaded: {type(e).__name__}: {e}"
            death = Death.of(DeathKind.NO_ACTOR, cause, self.node.id, self.node.ref.host, self.pid)
            self._born_dead(link, create, fault_body(e), death)
            return
        instance = self._instance(create, spec, lambda: cls(*args, **kwargs), link, proc_mesh)
        for port in ports:
            instance.hold(port)
        self.actors[create.actor] = instance
        self.ended.pop(create.actor, None)  # the actor was healed
        for early in self._early.pop(create.actor, ()):
            instance.deliver(*early)
        if spec.background or not self.main_driver(instance.drive):
            instance.start_thread()

    def _instance(
        self, create: Create, spec: ActorSpec, build: Callable[[], object], link: MessageLink, proc_mesh: ProcMesh
    ) -> ActorInstance:
        if spec.is_async:
            from monarch_kernel.runtime.actor.execution.async_instance import AsyncActorInstance

            return AsyncActorInstance(self, create, spec, build, link, proc_mesh)
        return ActorInstance(self, create, spec, build, link, proc_mesh)

    def _born_dead(self, link: MessageLink, create: Create, error: bytes, death: Death) -> None:
        """Report an actor that cannot be created here as ended."""
        link.send(encode_header(Reply(create.call, create.rank, ERROR)), error)
        self.ended[create.actor] = death
        self._end_early(create.actor)
        self.node.learn(create.owner_proc)
        failed = ActorFailed(create.actor, create.rank, create.owner)
        self.node.send(create.owner_proc.id, failed, self.node.death_body(create.owner_proc.id, death))

    def start_local_actor(self, actor: str, name: str, cls: type) -> None:
        """Start an actor with a fixed id in this process, if it does not exist."""
        if actor in self.actors:
            return
        create = Create(actor, name, 0, 0, (), (), self.client.mesh_id, self.node.ref)
        instance = self._instance(create, spec_of(cls, frozenset()), cls, LocalLink(), self.this_proc())
        self.actors[actor] = instance
        instance.start_thread()

    def _stop_actor(self, link: MessageLink, message: StopActor) -> None:
        actor = self.actors.get(message.actor)
        if actor is not None:
            actor.deliver(link, message, b"")
        elif message.call:
            acknowledge(link, message.call, message.rank)

    def actor_ended(self, instance: ActorInstance) -> None:
        """Record the end of an actor of this process."""
        assert instance.death is not None
        if self.actors.get(instance.mesh_id) in (instance, None):  # otherwise it was already replaced
            self.ended[instance.mesh_id] = instance.death
            self.actors.pop(instance.mesh_id, None)

    def _on_ping(self, link: MessageLink, message: Ping, _body: Body) -> None:
        acknowledge(link, message.call, message.rank)

    def _on_set_log_level(self, link: MessageLink, message: SetLogLevel, _body: Body) -> None:
        logs.logger("monarch_kernel.actors").setLevel(message.level)
        acknowledge(link, message.call, message.rank)

    def _on_end_proc(self, _link: MessageLink, message: EndProc, _body: Body) -> None:
        self.on_end_proc(message.reason)

    def stop_all_actors(self, reason: str, timeout: float) -> None:
        """Stop every actor of this process, and wait until all have ended."""
        waiting = []
        for actor in list(self.actors.values()):
            future: Future[object] = Future(self.node.poller, "stop")
            actor.deliver(LocalLink(future), StopActor(actor.mesh_id, 1, 0, reason), b"")
            waiting.append(future)
        for future in waiting:
            try:
                future.get(timeout)
            except TimeoutError:
                return

    # -- interrupts --------------------------------------------------------------------------------

    def _on_interrupt(self, link: MessageLink, message: Interrupt, _body: Body) -> None:
        names = [name for actor in list(self.actors.values()) for name in actor.interrupt(message.cells)]
        acknowledge(link, message.call, message.rank, names)

    def note_interrupt(self, instance: ActorInstance) -> None:
        """Record that a KeyboardInterrupt in this actor was requested."""
        self._interrupted[instance.mesh_id] = self._interrupted.get(instance.mesh_id, 0) + 1

    def was_interrupted(self, instance: ActorInstance) -> bool:
        """Return whether a KeyboardInterrupt (or cancellation) in this actor was requested; resets the request."""
        return self._interrupted.pop(instance.mesh_id, 0) > 0

    def signal_main_thread(self, attempts: int = 20) -> None:
        """Interrupt the main thread, even in a blocking system call.

        A signal that arrives just before a system call does not end that call, and its handler does not run. So this
        repeats the signal until the handler has run.
        """
        heard = self.sigints
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)

        def insist() -> None:
            if self.sigints == heard and attempts > 1:
                self.signal_main_thread(attempts - 1)

        self.node.poller.call_later(0.1, insist)

    # -- ownership and faults --------------------------------------------------------------------------

    def instance(self, actor_id: str) -> Instance:
        """Return an actor of this process, or its client."""
        return self.actors.get(actor_id) or self.client

    def _on_actor_failed(self, _link: MessageLink, message: ActorFailed, body: ReplyBody) -> None:
        death = death_of(body)
        notices = self.tree.actor_failed(message.actor, message.rank, death)
        if notices:
            self._tell_unless_restarted(notices[0].mesh.procs[message.rank].id, death, notices)

    def _on_peer_dead(self, proc: str, death: Death) -> None:
        if self._closed:
            return
        self._tell_unless_restarted(proc, death, self.tree.proc_died(proc, death))
        if not death.kind.intended:
            self.healer.ask_root(proc)
        # Actors whose owner was in that process end with it.
        for actor in list(self.actors.values()):
            if actor.owner_proc.id == proc and proc not in self.kept_from:
                actor.deliver(LocalLink(), StopActor(actor.mesh_id, 0, 0, "its owner's process ended"), b"")
        self.workers.pop(proc, None)
        if self.is_root and self.agent is not None and proc == self.agent.id:
            if self.agent_answers is not None:
                self.agent_answers._resolve(True)  # it will never answer; calls over it fail
            self.agent = self._this_host = None  # the next this_host() starts a new agent
        if proc == self.root.id and not self.is_root and proc not in self.kept_from:
            self.on_end_proc("the controller ended")
        self.changed()

    def _tell_unless_restarted(self, proc: str, death: Death, notices: list[Notice]) -> None:
        """Notify the owners of a failure, unless the restart policy of their procs repairs it."""

        def give_up(reason: str) -> None:
            self._tell(notices, reason)

        if not notices or not self.healer.takes_over(proc, death, give_up):
            self._tell(notices)

    def _tell(self, notices: list[Notice], why: str = "") -> None:
        for notice in notices:
            mesh = notice.mesh
            death = notice.death
            if why:
                death = msgspec.structs.replace(death, cause=f"{death.cause}; {why}")
            owner = self.instance(mesh.owner)
            failure = MeshFailure.of(mesh.name, mesh.name, mesh.extent, notice.ranks, death, owner.describe(), mesh.cls)
            failure.key = notice.key
            failure.was_raised = partial(self.reported.raised.__contains__, notice.key)
            owner.supervise(failure)

    def pass_up(self, instance: ActorInstance, failure: MeshFailure) -> None:
        """Drop a failure whose owner has ended; the owner's own owner was already notified of that end."""
        log.debug("%s has ended before it could handle %s", instance, failure)

    def fault_at_root(self, failure: MeshFailure) -> None:
        """Handle a failure that no actor handled, and that has reached the client of this process."""
        from monarch_kernel.runtime.actor import unhandled_fault

        hook = unhandled_fault.hook()
        if not unhandled_fault.is_default(hook):
            unhandled_fault.call_hook(hook, failure)
            return

        def decide() -> None:
            # If a pending call encountered the same death, that call reports it.
            if failure.key not in self.reported.met:
                unhandled_fault.end_script(failure)

        self.node.poller.call_later(FAULT_GRACE, decide)
        self.node.poller.start_background()

    def changed(self) -> None:
        """Notify subscribers that a mesh of this controller was spawned, died or was stopped."""
        mesh_changes.notify()

    # -- output ----------------------------------------------------------------------------------------

    def _on_output(self, _link: MessageLink, message: OutputChunk, body: memoryview) -> None:
        for sink in self.output_sinks:
            sink(message.proc, message.stream, bytes(body))

    def _on_output_end(self, _link: MessageLink, message: OutputEnd, _body: Body) -> None:
        for sink in self.output_sinks:
            sink(message.proc, 0, None)

    def _on_hello(self, link: MessageLink) -> None:
        if self.agent_answers is not None and self.agent is not None and link.peer == self.agent.id:
            self.agent_answers._resolve(True)

    # -- hosts -----------------------------------------------------------------------------------------

    def ensure_agent(self) -> ProcRef:
        """Return the host agent of this host, started if this is a controller without one."""
        agent = self.agent
        if agent is None:
            from monarch_kernel.runtime.host.launch import launch_local_agent

            self.agent_env = dict(os.environ)
            self.agent_process = launch_local_agent(self.node)
            logs.load_reports()  # while the agent starts
            agent = self.agent = self.agent_process.ref
            self.placements.renew(self, list(self.own_agents), agent)
            self.own_agents.add(agent.id)
            self.agent_answers = Future(self.node.poller, "the host agent")
        return agent

    def this_proc(self) -> ProcMesh:
        """Return this process as a proc mesh of one."""
        if self._this_proc is None:
            self._this_proc = proc_mesh_of_this_process(self)
        return self._this_proc

    def proc_mesh_of(self, name: str, procs: tuple[ProcRef, ...], extent: Extent) -> ProcMesh:
        """Return the proc mesh with these procs, which another process may have spawned."""
        return proc_mesh_of(self, name, procs, extent)

    def this_host(self) -> HostMesh:
        """Return this host as a host mesh of one."""
        if self._this_host is None:
            from monarch_kernel.runtime.actor.hosts.host_mesh import host_mesh_of_this_host

            self._this_host = host_mesh_of_this_host(self)
        return self._this_host

    # -- ending ----------------------------------------------------------------------------------------

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop everything this controller started, and close the node."""
        if self._closed:
            return
        self._closed = True
        for mesh in self.proc_meshes.values():
            mesh._stopped = True
        self.node.drain(timeout / 2)
        self.stop_all_actors("the controller shuts down", timeout)
        ending = [
            ask_agent(self.node, agent, "stop", StopProcs, None, "the controller shuts down", timeout / 2)
            for agent in self.workers.values()
        ]
        if self.agent is not None and self.agent_process is not None:
            ending.append(ask_agent(self.node, self.agent, "shutdown", Shutdown, timeout / 2))
        deadline = time.monotonic() + timeout
        for asked in ending:
            try:
                asked.get(max(0.0, deadline - time.monotonic()))
            except Exception as e:
                log.debug("a host agent did not confirm that all has ended: %s", e)
        self.node.close()
        if self.agent_process is not None:
            self.agent_process.close(timeout)
        else:
            from monarch_kernel.runtime.host.launch import remove_run_dir

            remove_run_dir(self.node.run_dir)


#: Notified whenever a mesh of this controller was spawned, died or was stopped.
mesh_changes: Subscribers[[]] = Subscribers("a callback of meshes.on_change")


def get_actor_system() -> ActorSystem:
    """Return this process's system with its concrete type, for modules above it; see ``process.get_system``."""
    system = process.get_system()
    assert isinstance(system, ActorSystem)
    return system


def _after_fork() -> None:
    system = process.current_system()
    if system is not None:
        system.node.abandon()


os.register_at_fork(after_in_child=_after_fork)


def _make_controller() -> ActorSystem:
    # Ranks, which wait for what their fork server loads, need none of these.
    from monarch_kernel.runtime.actor import output, unhandled_fault
    from monarch_kernel.runtime.actor.inspection import console_endpoint
    from monarch_kernel.runtime.host.launch import new_run_dir

    run_dir = new_run_dir()
    node = Node(f"controller-{os.urandom(4).hex()}", "controller", run_dir, socket.gethostname())
    node.listen()
    system = ActorSystem(node, node.ref)
    unhandled_fault.install()
    console_endpoint.install(system)
    output.hub(system)
    atexit.register(_at_exit)
    node.poller.start_background()
    return system


def _at_exit() -> None:
    system = process.current_system()
    if isinstance(system, ActorSystem) and system.pid == os.getpid():
        system.shutdown()
        _flush_output()


def _flush_output() -> None:
    from monarch_kernel.runtime.actor import output

    output.flush_default()


def shutdown(timeout: float | None = None) -> None:
    """End this process's system, if it has one; a new one can be started afterwards."""
    with process.lock:
        system = process.current_system()
        if not isinstance(system, ActorSystem):
            return
        system.shutdown(5.0 if timeout is None else timeout)
        _flush_output()
        postmortem.release()
        process.set_system(None)
        atexit.unregister(_at_exit)


def _message_bodies() -> LargeBodies:
    # Most programs never need it.
    from monarch_kernel.runtime.transfer.message_bodies import MessageBodies
    from monarch_kernel.runtime.transfer.service import transfer_service

    return MessageBodies(transfer_service())


process.set_controller_factory(_make_controller)
provide_node(lambda: process.get_system().node)
