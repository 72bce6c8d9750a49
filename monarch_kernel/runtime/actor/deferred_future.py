"""``returns_future``: async functions that return a ``Future``, whose body runs when its result is first needed."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from monarch_kernel.runtime.actor.context import context
from monarch_kernel.runtime.actor.definition import is_coroutine_function
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.node.future import Future

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")


def returns_future(function: Callable[P, Coroutine[object, object, T]]) -> Callable[P, Future[T]]:
    """Make an async function return a ``Future`` instead of a coroutine.

    A call only captures the caller's context variables, which include the running actor. The first ``await`` runs the
    body on the caller's event loop; cancelling that ``await`` does not cancel the body. The first ``get()`` runs the
    body on the calling thread, like ``asyncio.run``, or on a helper thread if an event loop runs on the calling one. If
    that ``get()`` times out, or Ctrl-C interrupts the calling thread in the body, the body is cancelled and the future
    fails. Every later ``get()`` and ``await`` has the same outcome. ``done()`` and callbacks do not start the body.

    Raises:
        TypeError: ``function`` is not an async function.
    """
    if not is_coroutine_function(function):
        raise TypeError(f"returns_future requires an async function, got {function!r}")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        context()  # starts the runtime if necessary
        return _Deferred(function(*args, **kwargs), function.__qualname__)

    return call


class _Deferred(Future[Any]):
    __slots__ = ("_body", "_context", "_lock", "_task")

    def __init__(self, body: Coroutine[object, object, object], what: str) -> None:
        super().__init__(get_system().node.poller, what)
        self._body: Coroutine[object, object, object] | None = body
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._task: asyncio.Task[object] | None = None  # the loop holds only weak references to its tasks

    def _claim(self) -> Coroutine[object, object, object] | None:
        """Return the body, for the first caller that needs its result; None for later callers."""
        with self._lock:
            body, self._body = self._body, None
        return body

    def _wait(self, timeout: float | None) -> None:
        """Run the body if this is the first wait."""
        __tracebackhide__ = True
        body = self._claim()
        if body is None:
            super()._wait(timeout)
        elif _loop_runs_here():
            helper = threading.Thread(target=self._drive, args=(body, timeout), name=f"monarch-{self.what}")
            helper.start()
            helper.join()
        else:
            self._drive(body, timeout)

    def _drive(self, body: Coroutine[object, object, object], timeout: float | None) -> None:
        import asyncio

        async def limited() -> object:
            task = asyncio.get_running_loop().create_task(body, context=self._context)
            try:
                done, _ = await asyncio.wait((task,), timeout=timeout)
            except asyncio.CancelledError:  # Ctrl-C
                task.cancel()
                raise
            if not done:
                task.cancel()
                await asyncio.wait((task,))
                raise TimeoutError(f"{self.what} did not finish within {timeout} s and was cancelled")
            return task.result()

        try:
            self._resolve(asyncio.run(limited()))
        except KeyboardInterrupt:
            self._reject(asyncio.CancelledError(f"{self.what} was interrupted"))
            raise
        except BaseException as error:  # raised by get() and await
            self._reject(error)

    def __await__(self) -> Generator[object, None, object]:
        body = self._claim()
        if body is not None:
            import asyncio

            self._task = asyncio.get_running_loop().create_task(body, context=self._context)
            self._task.add_done_callback(self._settle)
        return (yield from super().__await__())

    def _settle(self, task: asyncio.Task[object]) -> None:
        self._task = None
        if task.cancelled():
            import asyncio

            self._reject(asyncio.CancelledError(f"{self.what} was cancelled"))
        elif (error := task.exception()) is not None:
            self._reject(error)
        else:
            self._resolve(task.result())

    def then(self, convert: Callable[[object], object]) -> Future[Any]:
        """Return a future of ``convert(result)``; waiting for it starts the body, too."""

        async def converted() -> object:
            return convert(await self)

        return _Deferred(converted(), self.what)

    def __del__(self) -> None:
        body = getattr(self, "_body", None)
        if body is not None:
            body.close()  # its result was never needed; without this, Python warns that it was never awaited


def _loop_runs_here() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
