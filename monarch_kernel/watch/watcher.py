"""Watches: readers of the board, each with its own rate, and the hub that maintains the board while a watch is open."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator

from monarch_kernel.subscriptions import Subscribers, Subscription
from monarch_kernel.watch.board import Board, Fact
from monarch_kernel.watch.model import Delta, RankState, Snapshot
from monarch_kernel.watch.sources import RuntimeSource, Source, follow_debugger, follow_syncs

log = logging.getLogger(__name__)

#: The minimum period of a watch (seconds).
LEAST_PERIOD = 0.05
#: Ranks in these states send no reports.
_SILENT = (RankState.DEAD, RankState.ENDED, RankState.HEALING, RankState.STARTING, RankState.UNRESPONSIVE)
#: How long closing a watch waits for a running callback (seconds).
CLOSE_WAIT = 1.0


class _Hub:
    """The board and its sources, while a watch is open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # protects the open watches; never taken by a source that reports facts
        self._board_lock = threading.Lock()
        self._board = Board()
        self._watches: tuple[Watch, ...] = ()
        self._provided: dict[Source, Callable[[], None] | None] = {follow_debugger: None, follow_syncs: None}
        self._runtime: RuntimeSource | None = None

    # -- facts ------------------------------------------------------------------------------------

    def give(self, *facts: Fact) -> None:
        """Apply facts to the board, and wake its readers."""
        changed = False
        with self._board_lock:
            now = time.time()
            for fact in facts:
                changed |= self._board.apply(fact, now)
        if changed:
            for watch in self._watches:
                watch._wake()

    def snapshot(self) -> Snapshot:
        with self._board_lock:
            return self._board.snapshot()

    def since(self, version: int) -> Delta:
        with self._board_lock:
            return self._board.since(version)

    @property
    def version(self) -> int:
        return self._board.version

    def refresh(self, keys: Collection[str] | None, timeout: float) -> bool:
        """See `Watch.refresh`."""
        with self._lock:
            runtime = self._runtime

        def waits_for() -> list[str]:
            ranks = self.snapshot().ranks
            wanted = ranks if keys is None else keys
            return [view.proc for key in wanted for view in ranks.get(key, ()) if view.state not in _SILENT]

        return runtime is None or runtime.refresh(waits_for, timeout)

    # -- watches and sources ------------------------------------------------------------------------

    def add(self, watch: Watch) -> None:
        with self._lock:
            first = not self._watches
            self._watches = (*self._watches, watch)
            if first:
                with self._board_lock:
                    # continue the versions, so that no reader confuses old and new
                    self._board = Board(self._board.version)
                self._runtime = RuntimeSource(self.give, watch.period)
                self._runtime.observer.open()
                for source in self._provided:
                    self._provided[source] = self._opened(source)
            self.set_period()

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches = tuple(each for each in self._watches if each is not watch)
            if self._watches:
                self.set_period()
                return
            for source, end in self._provided.items():
                self._provided[source] = None
                self._end(source, end)
            if self._runtime is not None:
                self._runtime.observer.close()
                self._runtime = None

    def set_period(self) -> None:
        """Make hosts report at the rate of the fastest watch."""
        with self._lock:
            if self._runtime is not None and self._watches:
                self._runtime.observer.period = min(watch.period for watch in self._watches)

    def provide(self, source: Source) -> Callable[[], None]:
        with self._lock:
            self._provided[source] = self._opened(source) if self._watches else None

        def withdraw() -> None:
            with self._lock:
                self._end(source, self._provided.pop(source, None))

        return withdraw

    def _opened(self, source: Source) -> Callable[[], None] | None:
        try:
            return source(self.give)
        except Exception:
            log.exception("a source of watches failed to begin")
            return None

    def _end(self, source: Source, end: Callable[[], None] | None) -> None:
        try:
            if end is not None:
                end()
        except Exception:
            log.exception("a source of watches failed to end")


_hub = _Hub()


class Watch:
    """A live view of the state, from construction until it is closed. Thread-safe.

    The watches of a process share one board. Hosts and ranks send reports only while a watch is open.

    Args:
        period: the minimum interval between two deltas (seconds).
    """

    def __init__(self, period: float = 0.2) -> None:
        self._period = _valid(period)
        self._closed = False
        self._changed = threading.Condition()
        self._read = 0  # the version of the last snapshot or delta
        self._told = -1  # the version that was last passed to the listeners
        self._listeners: Subscribers[[]] = Subscribers("a callback of a watch")
        self._thread: threading.Thread | None = None
        _hub.add(self)

    @property
    def period(self) -> float:
        """The minimum interval between two deltas (seconds). Hosts report at the rate of the fastest watch.

        Raises:
            ValueError: the new value is less than 0.05, or not a number.
        """
        return self._period

    @period.setter
    def period(self, value: float) -> None:
        self._period = _valid(value)
        _hub.set_period()
        self._wake()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def snapshot(self) -> Snapshot:
        """Return the complete state.

        Raises:
            RuntimeError: the watch is closed.
        """
        self._must_be_open()
        snapshot = _hub.snapshot()
        self._read = snapshot.version
        return snapshot

    def refresh(self, keys: Collection[str] | None = None, timeout: float = 0.6) -> bool:
        """Query hosts and ranks for their current state, and wait for the answers.

        Without this, a state may be up to one period old: a rank that has just ended a call is reported as running.

        Args:
            keys: the keys of the meshes whose ranks to wait for; None for all.
            timeout: the time limit (seconds).

        Returns:
            Whether all ranks have answered. False, for example, if a rank is stopped or blocked.

        Raises:
            RuntimeError: the watch is closed.
        """
        self._must_be_open()
        return _hub.refresh(keys, timeout)

    def since(self, version: int) -> Delta:
        """Return the changes since a version, such as that of a snapshot; everything if the version is too old.

        Raises:
            RuntimeError: the watch is closed.
        """
        self._must_be_open()
        return _hub.since(version)

    def changes(self, timeout: float | None = None) -> Iterator[Delta]:
        """Yield the changes since the last ``snapshot`` or iteration (at first: everything), then each further change.

        The iteration ends when the watch is closed, or after the timeout.

        Args:
            timeout: the time limit (seconds); None: only when the watch is closed.

        Raises:
            RuntimeError: the watch was already closed.
        """
        self._must_be_open()
        return self._changes(None if timeout is None else time.monotonic() + timeout)

    def _changes(self, deadline: float | None) -> Iterator[Delta]:
        told = 0.0
        while self._wait(lambda: _hub.version != self._read, told, deadline):
            delta = _hub.since(self._read)
            self._read = delta.version
            told = time.monotonic()
            yield delta

    def subscribe(self, callback: Callable[[Delta], object], since: int | None = None) -> Subscription:
        """Call ``callback(delta)`` for the changes, on a thread of this watch (``monarch-watch``).

        An exception in a callback is logged. A slow callback delays other callbacks of this watch, but not of other
        watches. Changes that occur meanwhile are combined into one delta.

        Args:
            since: the initial version, such as that of a snapshot; None: now.

        Returns:
            The subscription; close (or call) it to unsubscribe.

        Raises:
            RuntimeError: the watch is closed.
        """
        self._must_be_open()
        version = _hub.version if since is None else since

        def tell() -> None:
            nonlocal version
            if version != _hub.version:
                delta = _hub.since(version)
                version = delta.version
                callback(delta)

        with self._changed:
            subscription = self._listeners.subscribe(tell)
            self._told = -1
            if self._thread is None:
                self._thread = threading.Thread(target=self._tell, name="monarch-watch", daemon=True)
                self._thread.start()
        self._wake()
        return subscription

    def _tell(self) -> None:
        """Pass changes to the listeners until there are none, or the watch is closed."""
        told = 0.0
        while self._wait(self._is_behind, told, None):
            with self._changed:
                if not self._listeners:
                    self._thread = None
                    return
            self._told = _hub.version
            told = time.monotonic()
            self._listeners.notify()

    def _is_behind(self) -> bool:
        """Return whether the listeners have pending changes, or there are none."""
        return self._told != _hub.version or not self._listeners

    def _wait(self, due: Callable[[], bool], told: float, deadline: float | None) -> bool:
        """Wait until something is due and the period is over.

        Return False if the watch is closed, or after the deadline.
        """
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return False
                early = told + self._period - now
                if due() and early <= 0:
                    return True
                waits = [early] if due() else []
                if deadline is not None:
                    waits.append(deadline - now)
                self._changed.wait(min(waits) if waits else None)
        return False

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the watch: iterations end, and callbacks are no longer called. Closing again has no effect."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        self._listeners.clear()
        _hub.remove(self)
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_WAIT)  # a callback that blocks is abandoned

    def _must_be_open(self) -> None:
        if self._closed:
            raise RuntimeError("this watch was closed: open another with watch()")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _valid(period: float) -> float:
    if not LEAST_PERIOD <= period < float("inf"):
        raise ValueError(f"the period of a watch is at least {LEAST_PERIOD} s, not {period!r}")
    return float(period)


def watch(*, period: float = 0.2) -> Watch:
    """Watch all meshes of this controller, including meshes that are created later.

    Use the result in a ``with`` block, or close it. It does not start the runtime, and continues if the runtime
    restarts.

    Args:
        period: the minimum interval between two deltas (seconds), at least 0.05.

    Raises:
        ValueError: the period is too short.
    """
    return Watch(period)


def provide(source: Source) -> Callable[[], None]:
    """Add a source of facts that the runtime does not know, such as the mesh that a notebook uses.

    ``source(give)`` is called when a watch opens (at once if one is open). It calls ``give(*facts)`` (see
    ``monarch_kernel.watch.board``) for the current state and for each change. The function that it returns is called
    when the last watch closes.

    Returns:
        A function that withdraws the source.
    """
    return _hub.provide(source)
