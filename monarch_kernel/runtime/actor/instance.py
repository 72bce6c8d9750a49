"""An actor in its proc: its mailbox, the thread that drives it, and how it ends.

Each actor has one thread, its *driver*. A sync actor's driver takes one message after the other, and polls for the
whole process while its mailbox is empty. An async actor's driver runs an event loop of its own; messages are still
handled one at a time, except for concurrent endpoints, which become tasks. One actor per proc can be driven by the
main thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_kernel.protocol.faults import capture
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    OK,
    ActorFailed,
    Call,
    Create,
    Death,
    ProcRef,
    Reply,
    StopActor,
    encode_death,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.base import ActorSpec, EndpointSpec
from monarch_kernel.runtime.actor.calls import fault_body
from monarch_kernel.runtime.actor.context import Context, cell, current, shared
from monarch_kernel.runtime.actor.errors import MeshFailure
from monarch_kernel.runtime.actor.stepping import Steps
from monarch_kernel.runtime.mesh.shape import Extent, Point
from monarch_kernel.runtime.node.loop import new_loop

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.ports import ReplyPort
    from monarch_kernel.runtime.actor.system import System

log = logging.getLogger(__name__)

#: How long ``__cleanup__`` and the end of owned meshes may take (seconds).
CLEANUP_TIMEOUT = 10.0


class Aborted(BaseException):
    """Raised inside an actor that ends itself by ``context().actor_instance.abort()``."""


class Instance:
    """What ``context().actor_instance`` gives; the client's has no mailbox of its own.

    Attributes:
        actor_id: unique name of the mesh this actor belongs to.
        name: the name it was spawned under.
        class_name: its class.
        rank: position in the mesh as spawned.
        creator: actor id of who spawned it.
    """

    def __init__(self, system: System, actor_id: str, name: str, class_name: str, rank: Point, creator: str) -> None:
        self._system = system
        self.actor_id = actor_id
        self.name = name
        self.class_name = class_name
        self.rank = rank
        self.creator = creator
        self.proc_mesh: Any = None
        self.owned: list[Any] = []  # meshes this one spawned, in order
        self.ended = False

    @property
    def proc_id(self) -> str:
        """Unique name of the proc this actor runs in."""
        return self._system.node.id

    @property
    def proc(self) -> Any:
        """The proc this actor runs in, as a mesh of one."""
        return self._system.this_proc()

    def supervise(self, failure: MeshFailure) -> None:
        """A mesh that this one owns failed. The client of a process hands it to the root."""
        self._system.fault_at_root(failure)

    def stop_owned(self, reason: str) -> None:
        """Stop the meshes this one spawned, last first, and wait for them."""
        from monarch_kernel.runtime.actor.meshes import ProcMesh

        own = {ref.id for mesh in self.owned if isinstance(mesh, ProcMesh) for ref in mesh._procs}
        while self.owned:
            mesh = self.owned.pop()
            if not isinstance(mesh, ProcMesh) and all(ref.id in own for ref in mesh._procs):
                continue  # ends with its procs, which give actors time for their cleanup, but not for ever
            try:
                mesh._stop(reason).get(CLEANUP_TIMEOUT)
            except Exception as e:
                log.debug("while stopping %s: %s", mesh, e)

    def abort(self, reason: str = "") -> None:
        """End this actor at once as failed."""
        raise Aborted(reason or "abort() was called")

    kill = abort

    def stop(self, reason: str = "") -> None:
        """End this actor normally after the current message."""
        raise RuntimeError("the client cannot stop itself: use shutdown_context()")

    def __repr__(self) -> str:
        return f"<{self.class_name} {self.actor_id} at rank {self.rank.rank}>"


class ActorInstance(Instance):
    """One actor, from its Create message to its end."""

    def __init__(
        self,
        system: System,
        create: Create,
        spec: ActorSpec,
        build: Callable[[], Any],
        link: Any,
        proc_mesh: Any,
    ) -> None:
        rank = Point(create.rank, shared(create.labels, create.sizes))
        super().__init__(system, create.actor, create.name, spec.cls.__name__, rank, create.owner)
        self.proc_mesh = proc_mesh
        self.owner_proc: ProcRef = create.owner_proc
        self._spec = spec
        self._build = build
        self._create = (link, create.call, create.rank)
        self._born_for = create.cell or None
        self._object: Any = None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._queue: deque[Any] = deque()
        self._done = False  # the mailbox as a waitable: something is in it
        self._parked: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._tasks: dict[asyncio.Task[Any], str] = {}  # concurrent endpoints that run
        self._hooks: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()  # by an interrupt
        self._raised: set[asyncio.Task[Any] | None] = set()  # an interrupt raised KeyboardInterrupt in them
        self.open_ports: set[ReplyPort[Any]] = set()  # not answered yet, and not handed to anybody
        self._thread = 0
        self._stopping: tuple[str, list[tuple[Any, int, int]]] | None = None
        self.death: Death | None = None
        self.running: str | None = None  # the endpoint that runs now
        self._running_task: asyncio.Task[Any] | None = None
        self._interruptible = False

    # -- mailbox (any thread) ---------------------------------------------------------------------

    def deliver(self, link: Any, message: Any, body: Any) -> None:
        """Put a message into the mailbox."""
        if self.death is not None:
            self.refuse(link, message)
            return
        self._queue.append((link, message, body))
        loop = self._loop
        if loop is None:
            if not self._done:
                self._done = True
                self._system.node.poller.notify(self)
        elif threading.get_ident() == self._thread:
            assert self._wake is not None
            self._wake.set()
        else:
            try:
                loop.call_soon_threadsafe(self._wake_up)
            except RuntimeError:  # the loop ended in the meantime; its end answers the mailbox
                pass
        if self.death is not None:
            self._refuse_queue()

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def refuse(self, link: Any, message: Any) -> None:
        """Answer a message that came too late."""
        assert self.death is not None
        if isinstance(message, Call) and message.call:
            self._system.reply(link, message, DEAD, encode_death(self.death))
        elif isinstance(message, StopActor):
            link.send(encode_header(Reply(message.call, message.rank, OK)), dumps(None)[0])

    def _refuse_queue(self) -> None:
        while self._queue:
            try:
                link, message, _ = self._queue.popleft()
            except IndexError:
                return
            if message is not None:
                self.refuse(link, message)

    # -- driving ----------------------------------------------------------------------------------

    def drive(self) -> None:
        """The actor's whole life; runs in its thread."""
        self._thread = threading.get_ident()
        current.set(Context(self, self.rank.rank, self.rank.extent))
        cell.set(self._born_for)
        error: BaseException | None = None
        try:
            if self._spec.is_async:
                error = self._drive_async()
            else:
                error = self._construct()
                while error is None and not self._stopped_quietly:
                    try:
                        error = self._drive_sync()
                    except KeyboardInterrupt:  # meant for an endpoint that had just returned
                        continue
        except BaseException as e:  # a bug of ours, or an interrupt outside any endpoint
            error = e
        self._finish(error)

    def _construct(self) -> BaseException | None:
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
        for name, endpoint in self._spec.endpoints.items():
            self._functions[name] = endpoint.function.__get__(self._object)
        self._answer_create(OK, dumps(None)[0])
        return None

    def _answer_create(self, status: int, body: Any) -> None:
        link, call, rank = self._create
        if call:
            link.send(encode_header(Reply(call, rank, status)), body)

    @property
    def _stopped_quietly(self) -> bool:
        return self._stopping is not None

    def _drive_sync(self) -> BaseException | None:
        poller = self._system.node.poller
        queue = self._queue
        while True:
            while not queue:
                self._done = False
                if queue:
                    break
                if self._stopping is not None:
                    return None
                poller.wait(self)
            link, message, body = queue.popleft()
            kind = type(message)
            if kind is Call:
                error = self._handle(link, message, body)
                if error is not None:
                    return error
            elif kind is StopActor:
                self._note_stop(link, message)
            elif isinstance(message, MeshFailure):
                error = self._supervise_sync(message)
                if error is not None:
                    return error
            if self._stopping is not None:
                return None

    def _handle(self, link: Any, message: Call, body: Any) -> BaseException | None:
        """Run one endpoint. Returns the exception that ends the actor, if there is one."""
        extent = shared(message.labels, message.sizes)
        endpoint = self._spec.endpoints.get(message.endpoint)
        current.set(Context(self, message.rank, extent))
        cell.set(message.cell or None)
        if endpoint is None:
            endpoint = self._undecorated(message.endpoint)
        function = self._functions.get(message.endpoint)
        try:
            args, kwargs = loads(body, message.buffers)
            if function is None:
                function = getattr(self._object, message.endpoint.removesuffix("!port"))
            if endpoint.explicit_port:
                args = (self._system.reply_port(link, message, self), *args)
            self.running = message.endpoint
            self._interruptible = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._interruptible = False
                self.running = None
            if endpoint.explicit_port or not message.call:
                return None
            reply, buffers = dumps(result)
        except BaseException as e:
            return self._failed(link, message, endpoint, e)
        self._system.reply(link, message, OK, reply, buffers)
        return None

    def _undecorated(self, name: str) -> Any:
        return _Undecorated(name.endswith("!port"))

    def _failed(
        self,
        link: Any,
        message: Call,
        endpoint: EndpointSpec,
        error: BaseException,
        task: asyncio.Task[Any] | None = None,
    ) -> BaseException | None:
        """Answer for an endpoint that raised; returns the error if it is fatal to the actor."""
        if self.death is not None:  # a concurrent endpoint that was cancelled because the actor ends
            if message.call:
                self._system.reply(link, message, DEAD, encode_death(self.death))
            return None
        interrupted = False
        if isinstance(error, KeyboardInterrupt):
            interrupted = self._system.was_interrupted(self)
        elif isinstance(error, asyncio.CancelledError) and task in self._cancelled:
            # Told in the same way to the caller, whatever the endpoint was doing.
            interrupted = True
            error = KeyboardInterrupt().with_traceback(error.__traceback__)
        fatal = endpoint.explicit_port or not message.call or not isinstance(error, Exception)
        if fatal and not interrupted:
            death = self._death_of(error)
            self.death = death
            if message.call:
                self._system.reply(link, message, DEAD, encode_death(death))
            return error
        if message.call:
            self._system.reply(link, message, ERROR, fault_body(error))
        return None

    def _death_of(self, error: BaseException) -> Death:
        text = capture(error).text
        cause = f"actor explicitly aborted due to: {type(error).__name__}: {error}"
        if isinstance(error, Aborted):
            cause = f"actor explicitly aborted due to: {error}"
        return Death(cause, "actor", self.proc_id, self._system.node.ref.host, self._system.pid, text)

    # -- async ------------------------------------------------------------------------------------

    def _drive_async(self) -> BaseException | None:
        loop = new_loop(self._system.node.poller)
        asyncio.set_event_loop(loop)
        serving = loop.create_task(self._serve(loop))
        try:
            while True:
                try:
                    return loop.run_until_complete(serving)
                except KeyboardInterrupt:  # meant for a step of an endpoint that had just ended
                    if serving.done():
                        raise
        finally:
            try:
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                # From here on deliver() must not use the loop.
                self._loop = None
                asyncio.set_event_loop(None)
                loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> BaseException | None:
        error = self._construct()
        if error is not None:
            return error
        self._wake = asyncio.Event()
        self._loop = loop
        fatal: asyncio.Future[BaseException] = loop.create_future()
        while True:
            try:
                return await self._take_messages(loop, self._wake, fatal)
            except KeyboardInterrupt:  # the same
                continue

    async def _take_messages(
        self, loop: asyncio.AbstractEventLoop, wake: asyncio.Event, fatal: asyncio.Future[BaseException]
    ) -> BaseException | None:
        queue = self._queue
        handled = 0
        while True:
            while not queue:
                wake.clear()
                if queue:
                    break
                if self._stopping is not None or fatal.done():
                    break
                await wake.wait()
            if fatal.done():
                return await self._end_tasks(fatal.result())
            if not queue:
                return await self._end_tasks(None)
            link, message, body = queue.popleft()
            kind = type(message)
            if kind is Call:
                endpoint = self._spec.endpoints.get(message.endpoint)
                if endpoint is not None and endpoint.concurrent:
                    task = loop.create_task(self._handle_async(link, message, body))
                    self._tasks[task] = message.endpoint
                    task.add_done_callback(partial(self._task_done, fatal, link, message, endpoint))
                else:
                    # A task of its own, so that an interrupt can cancel it and nothing else.
                    task = self._running_task = loop.create_task(self._handle_async(link, message, body))
                    try:
                        error = await task
                    finally:
                        self._running_task = None
                    if error is not None:
                        return await self._end_tasks(error)
            elif kind is StopActor:
                self._note_stop(link, message)
            if self._stopping is not None:
                return await self._end_tasks(None)
            handled += 1
            if handled % 64 == 0:
                await asyncio.sleep(0)

    def _task_done(
        self,
        fatal: asyncio.Future[BaseException],
        link: Any,
        message: Call,
        endpoint: EndpointSpec,
        task: asyncio.Task[BaseException | None],
    ) -> None:
        """A concurrent endpoint has ended."""
        self._tasks.pop(task, None)
        if task.cancelled():  # before its first step, so it has not answered
            error = self._failed(link, message, endpoint, asyncio.CancelledError(), task)
        else:
            error = task.result()
        if error is not None and not fatal.done():
            fatal.set_result(error)
            self._wake_up()

    async def _end_tasks(self, error: BaseException | None) -> BaseException | None:
        error = error or self._fatal
        self._note_death(error)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLEANUP_TIMEOUT)
        cleanup = getattr(self._object, "__cleanup__", None)
        if cleanup is not None:
            await asyncio.to_thread(self.stop_owned, "its owner ended")
            try:
                await asyncio.wait_for(cleanup(error), CLEANUP_TIMEOUT)
            except Exception:
                log.exception("%s.__cleanup__ failed", self.class_name)
        return error

    async def _handle_async(self, link: Any, message: Call, body: Any) -> BaseException | None:
        current.set(Context(self, message.rank, shared(message.labels, message.sizes)))
        cell.set(message.cell or None)
        endpoint = self._spec.endpoints.get(message.endpoint) or self._undecorated(message.endpoint)
        try:
            args, kwargs = loads(body, message.buffers)
            function = self._functions.get(message.endpoint)
            if function is None:
                function = getattr(self._object, message.endpoint.removesuffix("!port"))
            if endpoint.explicit_port:
                args = (self._system.reply_port(link, message, self), *args)
            if not endpoint.concurrent:
                self.running = message.endpoint
            self._interruptible = True
            try:
                result = function(*args, **kwargs)
                if asyncio.iscoroutine(result):
                    result = await Steps(result, self)
            finally:
                self._interruptible = False
                if not endpoint.concurrent:
                    self.running = None
            if endpoint.explicit_port or not message.call:
                return None
            reply, buffers = dumps(result)
        except BaseException as e:
            return self._failed(link, message, endpoint, e, asyncio.current_task())
        self._system.reply(link, message, OK, reply, buffers)
        return None

    # -- supervision --------------------------------------------------------------------------------

    def supervise(self, failure: MeshFailure) -> None:
        """A mesh of ours failed: ask ``__supervise__``, between messages (sync) or at the next await (async)."""
        if self.death is not None or self.ended:
            self._system.pass_up(self, failure)
            return
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._start_hook, loop, failure)
        else:
            self.deliver(None, failure, None)

    def _start_hook(self, loop: asyncio.AbstractEventLoop, failure: MeshFailure) -> None:
        hook = loop.create_task(self._supervise_async(failure))
        self._hooks.add(hook)  # the loop itself does not keep it alive
        hook.add_done_callback(self._hooks.discard)

    def _supervise_sync(self, failure: MeshFailure) -> BaseException | None:
        hook = getattr(self._object, "__supervise__", None)
        if hook is not None:
            try:
                if hook(failure):
                    return None
            except BaseException as e:
                e.__cause__ = failure
                return e
        return failure

    async def _supervise_async(self, failure: MeshFailure) -> None:
        current.set(Context(self, self.rank.rank, self.rank.extent))
        hook = getattr(self._object, "__supervise__", None)
        error: BaseException = failure
        if hook is not None:
            try:
                if await hook(failure):
                    return
            except BaseException as e:
                e.__cause__ = failure
                error = e
        self.death = self._death_of(error)
        self._fatal = error
        self._stopping = (str(error), [])
        if self._running_task is not None:
            self._running_task.cancel()
        self._wake_up()

    _fatal: BaseException | None = None

    # -- ending ------------------------------------------------------------------------------------

    def _note_stop(self, link: Any, message: StopActor) -> None:
        if self._stopping is None:
            self._stopping = (message.reason, [])
        self._stopping[1].append((link, message.call, message.rank))

    def stop(self, reason: str = "") -> None:
        """End this actor normally after the current message."""
        if self._stopping is None:
            self._stopping = (reason or "stop() was called", [])

    def _note_death(self, error: BaseException | None) -> None:
        """From now on messages are refused, with this as the cause."""
        if self.death is not None:
            return
        if error is not None:
            self.death = self._death_of(error)
        else:
            reason = self._stopping[0] if self._stopping is not None else ""
            self.death = Death(
                f"stopped: {reason}", "stopped", self.proc_id, self._system.node.ref.host, self._system.pid
            )

    def _finish(self, error: BaseException | None) -> None:
        """The actor has ended: clean up, answer what waits, tell the owner."""
        error = error or self._fatal
        self._note_death(error)
        assert self.death is not None
        _, askers = self._stopping or ("", [])
        self.stop_owned("its owner ended")
        if not self._spec.is_async and self._object is not None:
            cleanup = getattr(self._object, "__cleanup__", None)
            if cleanup is not None:
                try:
                    cleanup(error)
                except BaseException:
                    log.exception("%s.__cleanup__ failed", self.class_name)
        self._object = None
        self._functions = {}
        self.ended = True
        for link, call, rank in askers:
            if call:
                link.send(encode_header(Reply(call, rank, OK)), dumps(None)[0])
        self._refuse_queue()
        while self.open_ports:
            self.open_ports.pop().abandon(self.death)
        self._system.actor_ended(self)
        if error is not None:
            failed = ActorFailed(self.actor_id, self.rank.rank, self.creator)
            self._system.node.learn(self.owner_proc)
            self._system.node.send(self.owner_proc.id, failed, encode_death(self.death))

    # -- interrupts ----------------------------------------------------------------------------------

    def interrupt(self) -> list[str]:
        """Raise KeyboardInterrupt (async: or cancel) in the endpoints that run now. Returns their names."""
        running = [*self._tasks.values()] if self._tasks else []
        if self.running is not None:
            running.append(self.running)
        if not running:
            return []
        loop = self._loop
        if loop is not None:
            for task in (self._running_task, *self._tasks):
                if task is not None:
                    loop.call_soon_threadsafe(self._cancel, task)
        if self._thread == threading.main_thread().ident:
            self._system.signal_main_thread()
        elif self._interruptible:
            if loop is not None:
                self._raised.add(asyncio.current_task(loop))
            self._system.note_interrupt(self)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
            )
        return [f"{self.name}.{name}" for name in running]

    def interrupted_here(self) -> None:
        """The main thread is about to raise KeyboardInterrupt in user code of this actor."""
        self._system.note_interrupt(self)
        if self._loop is not None:
            self._raised.add(asyncio.current_task(self._loop))

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        """Interrupt a task that waits; one that computed has been interrupted already."""
        if task in self._raised:
            self._raised.discard(task)
        elif not task.done():
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()


class _Undecorated:
    """Stands for the spec of a plain method that is called through ``as_endpoint``."""

    __slots__ = ("concurrent", "explicit_port")

    def __init__(self, explicit_port: bool) -> None:
        self.explicit_port = explicit_port
        self.concurrent = False


class Client(Instance):
    """Code outside any actor: the root client in the controller, a nameless client in other procs."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system, name, name, "client", Point(0, Extent((), ())), "")
