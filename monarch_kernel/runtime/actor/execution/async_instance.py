"""An actor whose endpoints are coroutines, run in an event loop on its driver thread.

Messages are handled one at a time, except for concurrent endpoints, which run as tasks. While idle, the loop polls for
the whole process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from monarch_kernel.protocol.messages import OK, Call, StopActor
from monarch_kernel.runtime.actor.context import Context, current, origin, shared
from monarch_kernel.runtime.actor.errors import MeshFailure
from monarch_kernel.runtime.actor.execution import instance
from monarch_kernel.runtime.actor.execution.instance import FAILURE, ActorInstance, CalledEndpoint
from monarch_kernel.runtime.actor.execution.message_gate import GATE_PERIOD
from monarch_kernel.runtime.actor.extensions import tensor_functions
from monarch_kernel.runtime.actor.ports.holders import pickled
from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink
from monarch_kernel.runtime.node import recorder
from monarch_kernel.runtime.node.event_loop import new_loop

# Awaiting user code so that only its own computation can be interrupted.


class InterruptibleSteps:
    """Awaits a coroutine; ``owner._interruptible`` is true while one of its steps runs, and false while it waits.

    A waiting coroutine is interrupted by cancelling its task. A computing coroutine never reaches the cancellation: it
    needs a KeyboardInterrupt in its thread, which must not hit the event loop between two steps.
    """

    __slots__ = ("_coroutine", "_owner")

    def __init__(self, coroutine: Coroutine[object, object, object], owner: AsyncActorInstance) -> None:
        self._coroutine = coroutine
        self._owner = owner

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, owner = self._coroutine, self._owner
        value: object = None
        error: BaseException | None = None
        while True:
            owner._interruptible = True
            try:
                yielded = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as e:
                return e.value
            finally:
                owner._interruptible = False
            value = error = None
            try:
                value = yield yielded
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as e:
                error = e


log = logging.getLogger(__name__)


class AsyncActorInstance(ActorInstance):
    """One async actor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loop: asyncio.AbstractEventLoop | None = None  # set while it takes messages
        self._wake = asyncio.Event()
        self._running_task: asyncio.Task[object] | None = None
        self._cells: dict[asyncio.Task[object], str] = {}  # the notebook cell that each task runs for
        self._tasks: dict[asyncio.Task[object], str] = {}  # running concurrent endpoints, with their names
        self._hooks: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[object]] = set()  # tasks that an interrupt cancelled
        self._raised: set[asyncio.Task[object] | None] = set()  # tasks in which an interrupt raised KeyboardInterrupt

    # -- mailbox (any thread) ---------------------------------------------------------------------

    def _notify(self) -> None:
        loop = self._loop
        if loop is None:
            return  # the loop checks the mailbox when it starts
        if threading.get_ident() == self._thread:
            self._wake.set()
            return
        try:
            loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop has ended in the meantime, and the actor refuses what is in the mailbox
            pass

    # -- driving ----------------------------------------------------------------------------------

    def _run(self) -> BaseException | None:
        loop = new_loop(self._system.node.poller)
        asyncio.set_event_loop(loop)
        serving = loop.create_task(self._serve(loop))
        try:
            while True:
                try:
                    return loop.run_until_complete(serving)
                except KeyboardInterrupt:  # meant for a step of an endpoint that has just ended
                    if serving.done():
                        raise
        finally:
            try:
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                # From here on, deliver() must not use the loop.
                self._loop = None
                asyncio.set_event_loop(None)
                loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> BaseException | None:
        error = self._construct()
        if error is not None:
            return error
        self._loop = loop
        fatal: asyncio.Future[BaseException] = loop.create_future()
        while True:
            try:
                error = await self._take_messages_async(loop, fatal)
                break
            except KeyboardInterrupt:  # meant for a step that has just ended
                self.handling = len(self._tasks)
                continue
        return await self._end(error or self._fatal)

    async def _take_messages_async(
        self, loop: asyncio.AbstractEventLoop, fatal: asyncio.Future[BaseException]
    ) -> BaseException | None:
        """Handle messages until the end. Returns the error that ended the actor, if any."""
        queue, wake = self._queue, self._wake
        handled = 0
        while True:
            while not queue and self._stopping is None and not fatal.done():
                wake.clear()
                if not queue:
                    await wake.wait()
            if fatal.done():
                return fatal.result()
            if self._stopping is not None:
                return None
            link, message, body = queue.popleft()
            self.handling += 1
            while self._system.gate.closed:  # running tasks may end meanwhile
                self.handling -= 1
                await asyncio.sleep(GATE_PERIOD)
                self.handling += 1
            if type(message) is Call:
                endpoint = self._spec.endpoints.get(message.endpoint)
                traced = recorder.recording is not None or message.trace
                handle = partial(call_hooks.handle_async, self) if traced else self._handle_async
                task = loop.create_task(handle(link, message, body))
                if endpoint is not None and endpoint.concurrent:
                    self._tasks[task] = message.endpoint
                    self._cells[task] = message.cell
                    task.add_done_callback(partial(self._task_done, fatal, link, message, endpoint))
                else:
                    # A separate task, so that an interrupt can cancel only this endpoint.
                    self._running_task = task
                    try:
                        error = await task
                    finally:
                        self._running_task = None
                        self.handling -= 1
                    if error is not None:
                        return error
            else:
                self.handling -= 1
                if type(message) is StopActor:
                    self._note_stop(link, message)
                elif message is FAILURE:
                    self._start_hook(loop, self._failures.popleft())
            handled += 1
            if handled % 64 == 0:
                await asyncio.sleep(0)

    async def _handle_async(self, link: MessageLink, message: Call, body: Body) -> BaseException | None:
        since = self.calls - (self.latest == message.endpoint)
        current.set(Context(self, message.rank, shared(message.labels, message.sizes), message.endpoint, since))
        origin.set(message.cell or None)
        endpoint = self._spec.endpoints.get(message.endpoint) or self._undecorated(message.endpoint)
        try:
            function, args, kwargs = self._prepare(link, message, endpoint, body)
            if not endpoint.concurrent:
                self.running = message.endpoint
                self.running_for = message.cell
                self.answering = message
            self._interruptible = True
            try:
                result = function(*args, **kwargs)
                if asyncio.iscoroutine(result):
                    result = await InterruptibleSteps(result, self)
            finally:
                self._interruptible = False
                if not endpoint.concurrent:
                    self.running = self.answering = None
            del args, kwargs
            if endpoint.explicit_port or not message.call:
                self._end_of_tensors(message)
                return None
            if message.stays:
                tensor_functions().keep_result(message.tensors, result)
                result = None
            reply, buffers, ports = pickled(result)
        except asyncio.CancelledError as e:
            return self._was_cancelled(link, message, endpoint, e, asyncio.current_task())
        except BaseException as e:
            return self._failed(link, message, endpoint, e)
        if ports or message.tensors or message.endpoint == "checkpoint":
            self._answer(link, message, reply, buffers, ports)
        else:
            self._system.reply(link, message, OK, reply, buffers)
        return None

    def _was_cancelled(
        self,
        link: MessageLink,
        message: Call,
        endpoint: CalledEndpoint,
        error: asyncio.CancelledError,
        task: asyncio.Task[object] | None,
    ) -> BaseException | None:
        if task not in self._cancelled:
            return self._failed(link, message, endpoint, error)
        # The caller gets the same error, whether the endpoint was waiting or computing when it was interrupted.
        interrupt = KeyboardInterrupt().with_traceback(error.__traceback__)
        return self._failed(link, message, endpoint, interrupt, interrupted=True)

    def _task_done(
        self,
        fatal: asyncio.Future[BaseException],
        link: MessageLink,
        message: Call,
        endpoint: CalledEndpoint,
        task: asyncio.Task[BaseException | None],
    ) -> None:
        """Record the end of a concurrent endpoint."""
        self.handling -= 1
        self._tasks.pop(task, None)
        self._cells.pop(task, None)
        if task.cancelled():  # it ended before its first step, so it has not answered
            error = self._was_cancelled(link, message, endpoint, asyncio.CancelledError(), task)
        else:
            error = task.result()
        if error is not None and not fatal.done():
            fatal.set_result(error)
            self._wake.set()

    # -- supervision --------------------------------------------------------------------------------

    def supervise(self, failure: MeshFailure) -> None:
        """Handle the failure of a mesh of this actor: call ``__supervise__``, at the next await."""
        loop = self._loop
        if loop is None or self.death is not None or self.ended:
            super().supervise(failure)
        else:
            loop.call_soon_threadsafe(self._start_hook, loop, failure)

    def _start_hook(self, loop: asyncio.AbstractEventLoop, failure: MeshFailure) -> None:
        hook = loop.create_task(self._supervised_async(failure))
        self._hooks.add(hook)  # the loop itself does not keep the task alive
        hook.add_done_callback(self._hooks.discard)

    async def _supervised_async(self, failure: MeshFailure) -> None:
        if self._is_told_to_stop():
            return
        current.set(Context(self, self.rank.rank, self.rank.extent))
        hook = getattr(self._object, "__supervise__", None)
        error: BaseException = failure
        if hook is not None:
            try:
                handled = hook(failure) if inspect.iscoroutinefunction(hook) else _without_loop(hook, failure)
                if inspect.isawaitable(handled):
                    handled = await handled
                if handled:
                    return
            except BaseException as e:
                e.__cause__ = failure
                error = e
        if self.death is not None:
            return
        self._fatal = error
        self._note_death(error)
        self.stop(str(error))
        if self._running_task is not None:
            self._running_task.cancel()
        self._wake.set()

    # -- ending ------------------------------------------------------------------------------------

    async def _end(self, error: BaseException | None) -> BaseException | None:
        """Cancel running tasks, then clean up while the loop still runs."""
        self._note_death(error)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=instance.CLEANUP_TIMEOUT)
        if self.owned:
            await asyncio.to_thread(self.stop_owned, "its owner ended")
        cleanup = getattr(self._object, "__cleanup__", None)
        if cleanup is not None:
            try:
                await asyncio.wait_for(cleanup(error), instance.CLEANUP_TIMEOUT)
            except Exception:
                log.exception("%s.__cleanup__ failed", self.class_name)
            del cleanup
        left = asyncio.all_tasks() - {asyncio.current_task()}  # those that user code started
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=instance.CLEANUP_TIMEOUT)
        del left, tasks
        self._drop_object()  # while the loop runs, for `__del__`
        return error

    def _clean_up(self, error: BaseException | None) -> None:
        """Do nothing: ``_end`` has cleaned up in the loop."""

    # -- interrupts ----------------------------------------------------------------------------------

    def interrupt(self, cells: str = "") -> list[str]:
        """Cancel waiting endpoints, and raise KeyboardInterrupt in the one that computes."""
        loop = self._loop
        if loop is None:
            return super().interrupt(cells)
        tasks = [task for task in self._tasks if self._runs_for(self._cells.get(task, ""), cells)]
        running = [self._tasks[task] for task in tasks]
        if self.running is not None and self._runs_for(self.running_for, cells):
            running.append(self.running)
            if self._running_task is not None:
                tasks.append(self._running_task)
        for task in tasks:
            loop.call_soon_threadsafe(self._cancel, task)
        if running:
            self._raise_in_driver()
            self._end_waits(frozenset(map(id, tasks)), lambda: not all(task.done() for task in tasks))
        return [f"{self.name}.{name}" for name in running]

    def interrupted_here(self) -> None:
        """Record that KeyboardInterrupt is about to be raised in the running task."""
        super().interrupted_here()
        if self._loop is not None:
            self._raised.add(asyncio.current_task(self._loop))

    def _cancel(self, task: asyncio.Task[object]) -> None:
        """Interrupt a waiting task; a computing one has already been interrupted."""
        if task in self._raised:
            self._raised.discard(task)
        elif not task.done():
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()


def _without_loop(hook: Callable[[MeshFailure], object], failure: MeshFailure) -> object:
    """Call a hook that is a plain ``def``. Like all sync code, it may wait for futures."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return hook(failure)
    finally:
        asyncio._set_running_loop(loop)
