"""The values that a rank holds for the controller, by number: `Values`. Streams of one engine share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch_kernel.runtime.tensor.wire import FailedValue

#: The time for the executors of an engine to start in a process (seconds).
BEGIN = 60.0
#: The maximum number of calls whose values wait for their actors.
LENT = 1024


class Values(dict[int, Any]):
    """Values by number. A missing value was lost with a process that died."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __missing__(self, key: int) -> FailedValue:
        return FailedValue(-1, self.rank, f"value {key} was on a process of rank {self.rank} that has died", lost=True)


class RankStore:
    """The state that the streams of one engine share in a rank.

    Attributes:
        values: the values, by number.
        rank: this rank in the engine's world.
        signals: tokens that a stream has reached and no other has awaited yet; `changed` is notified of them.
        lent: values that actors are about to take, by token; `let_go` is the last token whose values were dropped
            before they were taken.
        closed: whether the engine has ended here.
        report: called with ``(failure, inputs)`` when an operation on sharded values fails here, except because of a
            failed input; None while no reports are wanted.
        at: returns the current record of the main stream.
        extras: the state of parts of the engine on this rank (process groups, modules, snapshots), by name.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values = Values(rank)
        self.signals: set[int] = set()
        self.changed = threading.Condition()
        self.closed = False
        self.lent: dict[int, dict[int, Any]] = {}
        self.let_go = 0
        self.report: Callable[[FailedValue, Sequence[Any]], None] | None = None
        self.at: Callable[[], int] = lambda: 0
        self.extras: dict[str, Any] = {}


class EndedCall(NamedTuple):
    """The end of an endpoint call that operations wait for.

    Attributes:
        result: the result, if it stays here.
        error: the exception, or the reason why the endpoint never ran.
    """

    result: Any = None
    error: BaseException | str | None = None


_stores: dict[str, RankStore] = {}
#: Calls that have ended, by engine and token, until the stream reaches them. They are outside the stores, because an
#: actor may run before the executor creates a store.
_ended: dict[str, dict[int, EndedCall]] = {}
#: Engines that have ended here.
_gone: set[str] = set()
_lock = threading.Lock()
_changed = threading.Condition(_lock)


def store_of(engine: str, rank: int) -> RankStore:
    """Return the state of an engine in this process. It is created on first use."""
    with _lock:
        store = _stores.get(engine)
        if store is None:
            store = _stores[engine] = RankStore(rank)
            _changed.notify_all()
        return store


def awaited_store(engine: str) -> RankStore:
    """Return the state of an engine, for actors that may run before its executors have started.

    Raises:
        RuntimeError: the engine has no executors in this process.
    """
    with _lock:
        if not _changed.wait_for(lambda: engine in _stores or engine in _gone, BEGIN) or engine in _gone:
            raise RuntimeError("no tensors of that mesh are in this process")
        return _stores[engine]


def existing_store(engine: str) -> RankStore | None:
    """Return the state of an engine in this process; None if it has none."""
    return _stores.get(engine)


def end_call(engine: str, token: int, ended: EndedCall) -> None:
    """Note that a call has ended. Only the first note for a call counts."""
    with _lock:
        if engine not in _gone:
            _ended.setdefault(engine, {}).setdefault(token, ended)
            _changed.notify_all()


def awaited_end(engine: str, token: int, keep: bool = False) -> EndedCall:
    """Wait until a call has ended.

    Args:
        keep: keep the result for another query.

    Raises:
        RuntimeError: the engine has ended here.
    """

    def calls() -> dict[int, EndedCall]:
        return _ended.get(engine, {})

    with _lock:
        _changed.wait_for(lambda: token in calls() or engine in _gone)
        if token not in calls():
            raise RuntimeError("the mesh was stopped while a call of an actor ran")
        return calls()[token] if keep else calls().pop(token)


def forget(engine: str) -> None:
    """Release all state of an engine in this process."""
    with _lock:
        store = _stores.pop(engine, None)
        _ended.pop(engine, None)
        _gone.add(engine)
        _changed.notify_all()
    if store is not None:
        with store.changed:
            store.closed = True
            store.changed.notify_all()
