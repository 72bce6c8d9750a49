"""Registries of callbacks, used wherever one part of the program notifies another.

Any package of this project may import this module; of all of them, it imports only ``logs``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec

from monarch_kernel import logs

P = ParamSpec("P")

log = logs.logger(__name__)


class Subscription:
    """A callback in a registry, until it is closed. Calling the subscription or leaving its ``with`` block also closes
    it.
    """

    __slots__ = ("_registry", "callback")

    def __init__(self, registry: Subscribers[...], callback: Callable[..., object]) -> None:
        self._registry = registry
        self.callback = callback

    def close(self) -> None:
        """Stop calling the callback. A call in progress completes. Closing again has no effect."""
        self._registry.remove(self)

    def __call__(self) -> None:
        self.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Subscribers(Generic[P]):
    """A registry of callbacks that take the same parameters. It is thread-safe.

    An exception in a callback is logged; it affects neither the other callbacks nor the notifying code.

    Args:
        what: the name of the callbacks in log messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._current: tuple[Subscription, ...] = ()  # replaced as a whole, so that notify() needs no lock
        self._lock = threading.Lock()

    def subscribe(self, callback: Callable[P, object]) -> Subscription:
        """Call ``callback`` at each notification, after the callbacks that were subscribed earlier."""
        subscription = Subscription(self, callback)
        with self._lock:
            self._current = (*self._current, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription; ``Subscription.close`` calls this."""
        with self._lock:
            self._current = tuple(each for each in self._current if each is not subscription)

    def clear(self) -> None:
        """Close all subscriptions."""
        with self._lock:
            self._current = ()

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all callbacks on this thread, in the order of their subscription."""
        for subscription in self._current:
            try:
                subscription.callback(*args, **kwargs)
            except Exception:
                log.exception("%s failed", self._what)

    def __bool__(self) -> bool:
        return bool(self._current)
