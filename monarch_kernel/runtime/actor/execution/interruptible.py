"""Awaiting user code so that only its own computation can be interrupted."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Protocol


class Interruptible(Protocol):
    """An actor whose flag says whether a step of user code runs."""

    _interruptible: bool


class InterruptibleSteps:
    """Awaits a coroutine; ``owner._interruptible`` is true while one of its steps runs, and false while it waits.

    A waiting coroutine is interrupted by cancelling its task. A computing coroutine never reaches the cancellation: it
    needs a KeyboardInterrupt in its thread, which must not hit the event loop between two steps.
    """

    __slots__ = ("_coroutine", "_owner")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], owner: Interruptible) -> None:
        self._coroutine = coroutine
        self._owner = owner

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, owner = self._coroutine, self._owner
        value: Any = None
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
