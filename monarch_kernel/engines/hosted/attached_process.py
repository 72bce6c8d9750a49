"""The tools in a rank of another runtime. Created when the first controller's tools enter the rank."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

from monarch_kernel import engines
from monarch_kernel.actor import ActorMesh, Extent, Point, ProcMesh
from monarch_kernel.engines.hosted import tool_actor, wire
from monarch_kernel.engines.hosted.meshes import HOST, AttachedSystem, HostedActorMesh, HostedProcMesh, set_system
from monarch_kernel.engines.hosted.tool_actor import Answer, ToolActor
from monarch_kernel.engines.interface import NotOffered, ToolRuntime
from monarch_kernel.introspection import Running, keep_failure
from monarch_kernel.output import calling_origin
from monarch_kernel.protocol.faults import capture, encode_fault
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    OK,
    Call,
    Create,
    Interrupt,
    OutputChunk,
    Reply,
    StopActor,
    encode_death,
)
from monarch_kernel.protocol.refs import Death, DeathKind, ProcRef
from monarch_kernel.protocol.serialize import Body, dumps_flat, loads
from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.actor.extensions import rank_debugger
from monarch_kernel.runtime.mesh.shape import SINGLE, Region
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.rank import output_capture
from monarch_kernel.thread_frames import LockGuard, current_frames

log = logging.getLogger(__name__)

#: The interval at which the rank checks whether controllers that hold it are alive (seconds).
LOOK = 0.2
#: The interval at which an interrupt is repeated until it takes effect (seconds). The first one may arrive just before
#: a system call.
REPEAT = 0.1
ATTEMPTS = 20
#: How often an event loop of cells runs between cells (seconds).
TURN = 0.02
_CHUNK = 1 << 16
_NONE = dumps_flat(None)


class CellStream:
    """``sys.stdout`` or ``sys.stderr`` of a rank whose other output belongs to its own job.

    Args:
        cells: receives the output of cells.
        job: receives all other output.
    """

    def __init__(self, cells: object, job: object) -> None:
        self._cells = cells
        self._job = job if job is not None else open(os.devnull, "w")  # noqa: SIM115  # as for `print` in a daemon

    def _now(self) -> Any:
        of_cell = calling_origin() or getattr(threading.current_thread(), "_monarch_cell", None)
        return self._cells if of_cell else self._job

    def end(self) -> None:
        """End the output of cells: from now on, all output belongs to the job."""
        self._cells = self._job

    def write(self, text: str) -> int:
        """Write to the stream of the calling code: the cell's or the job's."""
        return self._now().write(text)

    def flush(self) -> None:
        """Flush the stream of the calling code."""
        self._now().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


class OutputPipes:
    """Pipes that capture the output of this process, as in ranks of this package's runtime, and the thread that reads
    them.

    Args:
        take: called with (stream, data) on that thread; stream is 1 or 2. If it raises, the data is dropped.
        everything: whether to capture output of the job's own code and its subprocesses, too, or only output of cells.
    """

    def __init__(self, take: Callable[[int, bytes], None], everything: bool) -> None:
        self._take = take
        self._job: tuple[Any, Any] | None = None
        self._cells: tuple[Any, Any] | None = None
        if output_capture.installed():
            return
        pipes = {1: os.pipe(), 2: os.pipe()}
        job = sys.stdout, sys.stderr
        if everything:
            for fd, (_, write) in pipes.items():
                os.dup2(write, fd)
            output_capture.install()
        else:  # descriptors 1 and 2 remain the program's
            output_capture.install({fd: write for fd, (_, write) in pipes.items()})
            self._job = job
            self._cells = CellStream(sys.stdout, job[0]), CellStream(sys.stderr, job[1])
            sys.stdout, sys.stderr = self._cells  # type: ignore[assignment]
        for _, write in pipes.values():
            os.close(write)
        self._streams = {read: fd for fd, (read, _) in pipes.items()}
        self._end_read, self._end_write = os.pipe()
        threading.Thread(target=self._pump, name="monarch-output-pump", daemon=True).start()

    def close(self) -> None:
        """Restore the program's own output, and end the thread."""
        if self._job is None:
            return
        self.forget()
        output_capture.uninstall()
        os.write(self._end_write, b"\0")  # closing it is not enough: forks of this process have copies

    def forget(self) -> None:
        """Restore ``sys.stdout`` and ``sys.stderr``, which is all that a fork of this process has to do."""
        if self._job is None or self._cells is None:
            return
        for cells in self._cells:
            cells.end()  # the program may have stored it, for example in a `logging` handler
        if sys.stdout is self._cells[0]:
            sys.stdout = self._job[0]
        if sys.stderr is self._cells[1]:
            sys.stderr = self._job[1]
        self._job = None

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for read in (*self._streams, self._end_read):
                selector.register(read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._end_read:
                        for each in (*self._streams, self._end_read, self._end_write):
                            os.close(each)
                        return
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fd)
                        continue
                    with suppress(Exception):
                        self._take(self._streams[key.fd], data)


class MainThread:
    """Runs actors on the main thread, inside the event loop that the other runtime runs there.

    Signals, and many libraries, work only on that thread. While an actor handles a message, the loop does not run. The
    other runtime uses other threads for its own actors and messages.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._interruptible = False
        self._heard = 0
        self._sent = 0
        self._before: object = None  # the other runtime's SIGINT handler, once ours is installed in front of it
        self._turning = False
        self._locks = LockGuard()

    def drive(self, actor: ToolActor) -> None:
        """Make the main thread handle one message of the actor."""
        self._loop.call_soon_threadsafe(self._step, actor)

    def _step(self, actor: ToolActor) -> None:
        if self._before is None:
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        asyncio.events._set_running_loop(None)
        self._interruptible = True
        try:
            actor.step()
        except BaseException:  # an interrupt that arrived after the endpoint
            pass
        finally:
            self._interruptible = False
            asyncio.events._set_running_loop(self._loop)
        if actor.background is not None and not self._turning:
            self._turning = True
            self._loop.call_later(TURN, self._turn, actor)

    def _turn(self, actor: ToolActor) -> None:
        """Let the tasks of earlier cells run for a moment."""
        loop: asyncio.AbstractEventLoop | None = actor.background
        if loop is None or loop.is_closed():
            self._turning = False
            return
        asyncio.events._set_running_loop(None)
        try:
            loop.call_soon(loop.stop)
            loop.run_forever()
        finally:
            asyncio.events._set_running_loop(self._loop)
        self._loop.call_later(TURN, self._turn, actor)

    # -- interrupts --------------------------------------------------------------------------------

    def interrupt(self, attempts: int = ATTEMPTS) -> None:
        """Raise KeyboardInterrupt in the endpoint on the main thread, if one is running. Thread-safe."""
        if not self._interruptible:
            return
        heard = self._heard
        self._sent += 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        def insist() -> None:
            if self._heard == heard and attempts > 1:
                self.interrupt(attempts - 1)

        timer = threading.Timer(REPEAT, insist)
        timer.daemon = True
        timer.start()

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self._interruptible and self._locks.postpones(signum, frame):
            return
        self._heard += 1
        if self._interruptible:
            self._interruptible = False  # at most once per endpoint
            raise KeyboardInterrupt
        if self._heard > self._sent and callable(self._before):
            self._before(signum, frame)  # not ours, or ours came too late


def main_thread() -> MainThread | None:
    """Return the main thread of this process, if it runs an event loop that can alternate with actors."""
    frame: FrameType | None = current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if isinstance(runner, asyncio.AbstractEventLoop) and runner.is_running():
            return MainThread(runner)
        frame = frame.f_back
    return None


class ProgramActors(Protocol):
    """An engine's knowledge of the other runtime's own actors in a rank."""

    def endpoints_here(self) -> list[Running]:
        """Return the program's endpoints that run in this process."""
        ...

    def actors_here(self) -> dict[str, object]:
        """Return the program's actors in this process."""
        ...

    def interrupt(self, endpoint: Running) -> None:
        """Raise an exception in one of the program's endpoints."""
        ...


class Visitor:
    """A controller whose tools have entered this rank, and the link to it (``runtime.node.interfaces.PeerLink``).

    Args:
        entered: its first message.
        rank: this rank in the controller's mesh.
        send: sends bytes to the controller.
        on_call: called when this process calls the controller and waits for an answer.
    """

    local = attached = closed = False
    ended = ""
    queued = 0

    def __init__(
        self, entered: wire.EnterRank, rank: int, send: Callable[[bytes], None], on_call: Callable[[Visitor], None]
    ) -> None:
        self.peer = entered.controller
        self.ref = ProcRef(self.peer, "", "", self.peer, "")
        self.uid = entered.uid
        self.name = entered.name
        self.extent = Extent(entered.labels, entered.sizes)
        self.point = Point(rank, self.extent)
        self.leash = entered.silence
        self.silence = max(entered.silence, entered.hold)
        self.host = entered.host
        self.pid = entered.pid
        self.takes_output = entered.output
        self.takes_control = entered.drive
        self.looks_on = entered.looks_on
        #: When its last message arrived, and whether messages are expected because this rank waits for it.
        self.heard = time.monotonic()
        self.expected = False
        self._send = send
        self._on_call = on_call

    def tell(self, message: wire.ToolMessage, body: bytes = b"") -> None:
        """Send a message to the controller."""
        self._send(wire.pack(message, body))

    def send(self, header: bytes, body: Body = b"") -> None:
        """Send a call to the controller."""
        message = wire.decode(header)
        if isinstance(message, Call) and message.call:
            self._on_call(self)
        self._send(wire.pack(header, body))

    def drain(self) -> None:
        """Do nothing: no messages are queued here."""

    def close(self) -> None:
        """Do nothing: the connection belongs to the other runtime."""

    abandon = close


class AttachedProcess(ToolRuntime):
    """The tools in this rank, for any number of controllers.

    Args:
        name: the name of the other runtime for users.
        program: the code in this process besides tools.
        of_program: whether the process belongs to a program, so that tools leave its environment, main thread, output
            and process groups unchanged.
    """

    def __init__(self, name: str, program: ProgramActors, *, of_program: bool = False) -> None:
        super().__init__()
        self.NAME = name
        self.OFFERS = frozenset()
        self.OF_PROGRAM = of_program
        proc = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.node = Node(proc, "rank", "", HOST, background=False)  # no thread stays when viewers have left
        self.system = AttachedSystem(self.node)
        self.actors: dict[str, ToolActor] = {}
        self._program = program
        self._visitors: dict[str, Visitor] = {}
        self._main: MainThread | None = None if of_program else main_thread()
        self._main_actor: str | None = None
        self._watching = False
        self._lock = threading.Lock()
        self._hook: object = None
        self._output: OutputPipes | None = None
        self._owners: dict[str, str] = {}  # the controller of each actor
        if not of_program:
            collectives.install()
        set_system(self.system)
        engines.use(self)

    def enter(self, message: wire.EnterRank, rank: int, send: Callable[[bytes], None]) -> None:
        """Let a controller's tools enter.

        Args:
            rank: this rank in the controller's mesh.
            send: carries bytes to the controller; it must drop them if the controller is gone.
        """
        visitor = Visitor(message, rank, send, self._watch)
        self._visitors[visitor.peer] = self.node.links[visitor.peer] = visitor
        self.node.refs[visitor.peer] = visitor.ref
        self.node.carried.add(visitor.peer)
        self.node.deaths.pop(visitor.peer, None)
        self.system.proc_meshes[visitor.uid] = self._procs(visitor)
        if self._hook is None:
            self._hook = sys.breakpointhook
            sys.breakpointhook = _breakpoint
        self._output = self._output or OutputPipes(self._on_output, message.output)
        self._on_visitor(visitor)
        visitor.tell(wire.RankEntered(HOST, os.getpid()))

    def _on_visitor(self, visitor: Visitor) -> None:
        """Handle a controller that has entered, before it is notified."""

    def _procs(self, visitor: Visitor) -> HostedProcMesh:
        count = visitor.extent.nelements
        refs = tuple(ProcRef(f"{visitor.uid}.{rank}", "", "", visitor.uid, "") for rank in range(count))
        region = Region.from_extent(visitor.extent)
        system: Any = self.system
        return HostedProcMesh(system, visitor.uid, visitor.name, refs, region, region)

    # -- messages ----------------------------------------------------------------------------------

    def receive(self, controller: str, data: bytes) -> None:
        """Handle a message of a controller. Thread-safe; its messages arrive in order."""
        message, body = wire.unpack(data)
        visitor = self._visitors.get(controller)
        if visitor is not None:
            visitor.heard = time.monotonic()
            if self.node.deaths.pop(controller, None) is not None:  # it was alive but silent
                self.node.links[controller] = visitor
                self._on_back(visitor)
            self.handle(visitor, message, body)

    def handle(self, visitor: Visitor, message: wire.ToolMessage, body: Body) -> None:
        """Handle a decoded message."""
        match message:
            case Reply():
                self.node._dispatch(visitor, message, body)
            case Call():
                actor = self.actors.get(message.actor)
                answer = self.answer_to(visitor, message)
                if actor is not None:
                    actor.call(message, body, answer)
                else:
                    cause = f"there is no actor {message.actor} in this process"
                    answer(DEAD, encode_death(Death.of(DeathKind.NO_ACTOR, cause)))
            case Create():
                self._create(visitor, message, body)
            case StopActor():
                actor = self.actors.pop(message.actor, None)
                answer = self.answer_to(visitor, message)
                if actor is None:
                    answer(OK, _NONE)
                else:
                    actor.stop(lambda: answer(OK, _NONE))
            case Interrupt():
                self.answer_to(visitor, message)(OK, dumps_flat(self._interrupt(message.cells)))
            case wire.LeaveRank():
                self._leave(visitor.peer)
            case _:
                pass  # a heartbeat, or from a later version

    def _create(self, visitor: Visitor, message: Create, body: Body) -> None:
        """Create an actor. The first actor that requests it gets the main thread."""
        answer = self.answer_to(visitor, message)
        try:
            cls, args, kwargs = loads(body, message.buffers)
        except Exception as error:
            answer(ERROR, encode_fault(capture(error)))
            return
        self._owners[message.actor] = visitor.peer
        drive = None
        if self._main is not None and self._main_actor is None and not cls.__background__:
            self._main_actor = message.actor
            drive = self._main.drive
        actor = self.actors[message.actor] = ToolActor(message.actor, message.name, visitor.point, drive)
        actor.of_driver = getattr(cls, "__of_driver__", frozenset())
        actor.create(lambda: cls(*args, **kwargs), answer)

    def answer_to(self, visitor: Visitor, message: Call | Create | StopActor | Interrupt) -> Answer:
        """Return a function that answers a message of a controller."""

        def answer(status: int, body: bytes) -> None:
            if message.call:
                visitor.tell(Reply(message.call, message.rank, status), body)

        return answer

    def _on_output(self, stream: int, data: bytes) -> None:
        present = self._latest()
        visitor = next((each for each in present if each.takes_output), present[0] if present else None)
        if visitor is not None:
            visitor.tell(OutputChunk("", stream), data)

    # -- controllers that die ------------------------------------------------------------------------

    def _watch(self, visitor: Visitor) -> None:
        """Expect heartbeats of a controller while a call to it is pending."""
        with self._lock:
            if not visitor.expected:
                visitor.expected = True
                visitor.heard = time.monotonic()
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch_controllers, name="monarch-tool-leash", daemon=True).start()

    def _watch_controllers(self) -> None:
        while True:
            time.sleep(LOOK)
            try:
                if not self._look():
                    return
            except Exception:  # without this thread, stops of a dead controller would never be released
                log.exception("a fault of the leash of controllers")

    def _look(self) -> bool:
        """Check for silent controllers. Return whether any controller has to be checked."""
        with self._lock:
            calls: list[Any] = list(self.node.calls.values())
            called = {ref.id for call in calls for ref in call._target.procs}
            for visitor in list(self._visitors.values()):
                visitor.expected = self._expects(visitor, called)
            expected = [visitor for visitor in list(self._visitors.values()) if visitor.expected]
            if not expected:
                self._watching = False
                return False
        now = time.monotonic()
        for visitor in expected:
            if now - visitor.heard > visitor.silence:
                self._on_silence(visitor)
        return True

    def _expects(self, visitor: Visitor, called: set[str]) -> bool:
        """Return whether a controller must send heartbeats.

        ``called``: the controllers that calls of this rank wait for.
        """
        return visitor.expected and visitor.peer in called

    def _on_silence(self, visitor: Visitor) -> None:
        """Handle that a controller that this rank waits for was silent for too long."""
        cause = f"the controller was silent for {visitor.silence:g} s"
        self.node.declare_dead(visitor.peer, Death.of(DeathKind.CONTROLLER_CLOSED, cause, visitor.peer))

    def _on_back(self, visitor: Visitor) -> None:
        """Handle that a silent controller has sent a message again."""

    def _leave(self, controller: str) -> None:
        self.node.declare_dead(controller, Death.of(DeathKind.CONTROLLER_CLOSED, "the controller has left", controller))

    def lose(self, controller: str) -> None:
        """Handle the end of a controller: its stopped threads continue, and its actors end."""
        self._leave(controller)
        visitor = self._visitors.pop(controller, None)
        if visitor is None:
            return
        self.system.proc_meshes.pop(visitor.uid, None)
        for name, owner in list(self._owners.items()):
            if owner == controller:
                del self._owners[name]
                actor = self.actors.pop(name, None)
                if actor is not None:
                    actor.stop(lambda: None)
        if not self._visitors:
            if sys.breakpointhook is _breakpoint:  # otherwise the program has set its own hook
                sys.breakpointhook = self._hook
            self._hook = None

    # -- interrupts ----------------------------------------------------------------------------------

    def _interrupt(self, cells: str) -> list[str]:
        """Interrupt running endpoints. Return their names."""
        stopped: list[str] = []
        if self._main is not None and not cells:
            actor = self.actors.get(self._main_actor or "")
            if actor is not None and actor.running is not None:
                stopped.append(f"{actor.name}.{actor.running}")
                self._main.interrupt()
                self._release(actor)
        for running in self._program.endpoints_here():
            stopped.append(running.label)
            self._program.interrupt(running)
            self._end_waits(running)
        return stopped

    def _release(self, actor: ToolActor) -> None:
        """End a wait in a collective, which no signal can end."""
        message = actor.handled

        def runs() -> bool:
            return actor.running is not None and actor.handled == message

        collectives.release((actor.actor, message), lambda: actor.thread if runs() else 0, runs)

    def _end_waits(self, endpoint: Running) -> None:
        collectives.release(endpoint, lambda: endpoint.thread, lambda: endpoint in self._program.endpoints_here())

    def interrupt_main_thread(self) -> None:
        """See ``ToolRuntime``."""
        if self._main is not None:
            self._main.interrupt()

    # -- what tools ask about the process --------------------------------------------------------------

    def actor_here(self) -> ToolActor:
        """See ``ToolRuntime``."""
        actor = tool_actor.here.get()
        if actor is None:
            raise RuntimeError("this code does not run for an actor of a tool")
        return actor

    def running_here(self) -> tuple[str, str, str]:
        """See ``ToolRuntime``."""
        actor = tool_actor.here.get()
        return ("", "", calling_origin()) if actor is None else (actor.name, actor.running or "", calling_origin())

    def endpoints_here(self) -> list[Running]:
        """See ``ToolRuntime``."""
        of_tools = [
            Running(actor.name, running, actor.thread, None, True, actor.running_for)
            for actor in list(self.actors.values())
            if (running := actor.running) is not None
        ]
        return [*of_tools, *self._program.endpoints_here()]

    def actors_here(self, actor: str = "") -> dict[str, Any]:
        """See ``ToolRuntime``."""
        of_tools = {uid: each.object for uid, each in list(self.actors.items()) if each.object is not None}
        found = {**of_tools, **self._program.actors_here()}
        return {uid: each for uid, each in found.items() if actor in ("", uid)}

    def proc_here(self) -> str:
        """See ``ToolRuntime``."""
        return self.node.id

    def keep_failure(self, error: BaseException, cell: str, running: tuple[str, str] | None = None) -> None:
        """See ``ToolRuntime``. ``running``: an actor and an endpoint of the other runtime."""
        keep_failure(error, cell, running or self.running_here()[:2], _later)

    def not_offered(self, what: str) -> NotOffered:
        """Return the error for a feature that only this package's own runtime has."""
        return NotOffered(f"the engine {self.NAME} cannot {what}")

    def home(self) -> ProcMesh | None:
        """See ``ToolRuntime``."""
        return next((self.system.proc_meshes[visitor.uid] for visitor in self._latest()), None)

    def controller_actor(self, name: str, cls: type[object], timeout: float, mesh: object = None) -> ActorMesh[Any]:
        """See ``ToolRuntime``. Returns the actor of the live controller that entered last."""
        for visitor in self._latest():
            # Spawn it unless it exists.
            visitor.tell(Create(name, name, 0, 0, (), (), "", self.node.ref), dumps_flat((cls, (), {})))
            system: Any = self.system
            return HostedActorMesh(system, name, name, "", cls, (visitor.ref,), SINGLE.region)
        raise RuntimeError("no controller's tools are in this rank")

    def _latest(self) -> list[Visitor]:
        return [each for each in reversed(list(self._visitors.values())) if each.peer not in self.node.deaths]


#: The functions of meshes, output and kept meshes, which only controllers have.
_OF_CONTROLLERS = (
    *("this_host", "list_proc_meshes", "get_mesh", "is_joined", "stacks_from_outside", "driver_of", "joined_jobs"),
    *("shut_down", "logs", "keep", "kept", "attach", "end_kept"),
)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: AttachedProcess, *_args: object, **_kwargs: object) -> NoReturn:
        raise self.not_offered(f"do this in a rank ({name}); its controller can")

    return refuse


for _name in _OF_CONTROLLERS:
    setattr(AttachedProcess, _name, _refusal(_name))


def _breakpoint(*args: object, **kwargs: object) -> object:
    """Stop here for the controller's debugger on `breakpoint()`. PYTHONBREAKPOINT works as usual."""
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **kwargs)
    rank_debugger().stop_here(sys._getframe(1))
    return None


def _later(delay: float, callback: Callable[[], None]) -> None:
    timer = threading.Timer(delay, callback)
    timer.daemon = True
    timer.start()
