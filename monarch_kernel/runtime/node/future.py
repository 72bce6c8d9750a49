"""Futures: the results of calls, for threads and for event loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from monarch_kernel import logs
from monarch_kernel.runtime.node.poller import Poller

if TYPE_CHECKING:  # a fifth of the time that this library takes to load, and many programs never use it
    import asyncio

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

log = logs.logger(__name__)


class Future(Generic[R_co]):
    """The result of a call, now or later.

    ``get()`` blocks and polls meanwhile (also inside a running event loop); ``await`` does not block. Both can be used
    any number of times, from any thread. A future cannot be pickled: send the value instead.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_parked", "_poller", "_value", "what")

    def __init__(self, poller: Poller, what: str = "") -> None:
        self._poller = poller
        self._done = False
        self._parked: list[threading.Lock] = []
        self._callbacks: list[Callable[[Future[R_co]], None]] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.what = what

    # -- for the producer of the result ------------------------------------------------------

    def _resolve(self, value: object) -> None:
        if not self._done:
            self._value = value
            self._finish()

    def _reject(self, error: BaseException) -> None:
        if not self._done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._done = True
        self._poller.notify(self)
        if self._callbacks is not None:
            self._call_back()

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            self._run(callback)

    def _run(self, callback: Callable[[Future[R_co]], None]) -> None:
        try:
            callback(self)
        except Exception:
            log.exception("a callback of a Future failed")

    def _result(self) -> R_co:
        """Return the value or raise; call only when done. Subclasses decode here, on the calling thread."""
        __tracebackhide__ = True
        if self._error is not None:
            raise self._error
        return self._value

    # -- for its users -------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> R_co:
        """Wait for the result.

        Args:
            timeout: the maximum wait (seconds); None waits until there is a result, a failure or a death.

        Raises:
            TimeoutError: there is no result yet; ``get`` can be called again later.
        """
        __tracebackhide__ = True  # a notebook shows the user's line and the remote traceback, not these frames
        if not self._done:
            self._wait(timeout)
        return self._result()

    def _wait(self, timeout: float | None) -> None:
        __tracebackhide__ = True
        if not self._poller.wait(self, timeout):
            raise TimeoutError(
                f"no answer{' to ' + self.what if self.what else ''} within {timeout} s{self._waiting()}"
            )

    def _waiting(self) -> str:
        return ""

    def result(self, timeout: float | None = None) -> R_co:
        """Do the same as ``get``."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like ``get``, and return the exception that ``get`` would raise, or None."""
        self._wait(timeout)  # separately from the result, which may arrive while this raises
        try:
            self._result()
        except BaseException as e:
            return e
        return None

    def done(self) -> bool:
        """Return whether ``get`` would return (or raise) at once."""
        return self._done

    def add_done_callback(self, callback: Callable[[Future[R_co]], None]) -> None:
        """Call ``callback(self)`` when done: at once if it already is, else on the polling thread (it must be fast)."""
        if self._done:
            self._run(callback)
            return
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self._done:  # it became done between the two checks
            self._call_back()

    def then(self, convert: Callable[[R_co], S]) -> Future[S]:
        """Return a future of ``convert(result)``; ``convert`` runs on the first thread that gets the result."""
        return _Converted(self, convert)

    def __await__(self) -> Generator[Any, None, R_co]:
        __tracebackhide__ = True
        if not self._done:
            import asyncio

            loop = asyncio.get_running_loop()
            thread = get_ident()
            waiter: asyncio.Future[None] = loop.create_future()

            def wake(_future: Future[R_co]) -> None:
                try:
                    if get_ident() == thread:  # the loop polls, or its thread does for another wait
                        _settle(waiter)
                    else:
                        loop.call_soon_threadsafe(_settle, waiter)
                except RuntimeError:  # the loop is closed; nothing waits any more
                    pass

            self._poller.start_background()
            Future.add_done_callback(self, wake)  # a subclass may treat user callbacks differently
            yield from waiter
        return self._result()

    def as_asyncio(self) -> asyncio.Future[R_co]:
        """Return an ``asyncio.Future`` of the running loop with the same outcome.

        Raises:
            RuntimeError: no event loop runs on this thread.
        """
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop: use get() outside one") from None

        async def follow() -> R_co:
            return await self

        return loop.create_task(follow())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future cannot be pickled: get() its value and send that")

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error is not None else "done"
        return f"<Future {self.what} {state}>" if self.what else f"<Future {state}>"


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Converted(Future[S], Generic[R, S]):
    __slots__ = ("_convert", "_source")

    def __init__(self, source: Future[R], convert: Callable[[R], S]) -> None:
        super().__init__(source._poller, source.what)
        self._source = source
        self._convert: Callable[[R], S] | None = convert
        source.add_done_callback(lambda _s: self._finish())

    def _result(self) -> S:
        if self._convert is not None:
            convert = self._convert
            try:
                self._value = convert(self._source._result())
            except BaseException as e:
                self._error = e
            self._convert = None
        return super()._result()


class CoroutineFuture(Future[R_co]):
    """A future that is also a coroutine, so that ``asyncio.run`` accepts it. The work has already begun.

    Args:
        source: the future whose outcome it has.
    """

    __slots__ = ("_source", "_steps")

    def __init__(self, source: Future[R_co]) -> None:
        super().__init__(source._poller, source.what)
        self._source = source
        self._steps: Generator[object, None, R_co] | None = None
        source.add_done_callback(lambda _s: self._finish())

    def _result(self) -> R_co:
        return self._source._result()

    def _stepping(self) -> Generator[object, None, R_co]:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps

    def send(self, value: Any) -> Any:
        """Implement the coroutine protocol."""
        return self._stepping().send(value)

    def throw(self, *error: Any) -> object:
        """Implement the coroutine protocol."""
        return self._stepping().throw(*error)

    def close(self) -> None:
        """Implement the coroutine protocol. The work continues."""
        self._stepping().close()


Coroutine.register(CoroutineFuture)  # pyright: ignore[reportAttributeAccessIssue]  # what asyncio.run looks for


def nothing(_value: object) -> None:
    """Return None: a converter for ``then`` if only completion matters."""


def true(_value: object) -> bool:
    """Return True: a converter for ``then`` if only completion matters."""
    return True


def resolved(poller: Poller, what: str = "", value: object = None) -> Future[Any]:
    """Return a future that is already done, by default with None."""
    future: Future[object] = Future(poller, what)
    future._resolve(value)
    return future


def gathered(poller: Poller, futures: Sequence[Future[R]], what: str = "") -> Future[list[R]]:
    """Return a future of all results, in order. It fails with the failure that occurs first."""
    whole: Future[list[R]] = Future(poller, what)
    left = len(futures)
    if not futures:
        whole._resolve([])
        return whole

    def one(future: Future[R]) -> None:
        nonlocal left
        left -= 1
        error = future.exception()
        if error is not None:
            whole._reject(error)
        elif left == 0:
            whole._resolve([f._result() for f in futures])

    for future in futures:
        future.add_done_callback(one)
    return whole
