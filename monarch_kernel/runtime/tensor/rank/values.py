"""`Values`: what a rank holds for the controller, by number. Streams of one engine share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch_kernel.runtime.tensor.wire import FailedValue

#: How long the workers of an engine may take to begin in a process (seconds).
BEGIN = 60.0
#: How many calls' values wait for their actors at most.
LENT = 1024


class Values(dict[int, Any]):
    """Values by number. One that is not there was lost: the process that had it has died."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __missing__(self, key: int) -> FailedValue:
        return FailedValue(-1, self.rank, f"value {key} was on a process of rank {self.rank} that has died", lost=True)


class RankStore:
    """What the streams of one engine share in a rank.

    Attributes:
        values: by number.
        rank: this rank in the engine's world.
        signals: tokens that a stream has come to, and no other has waited for yet; `changed` is notified of them.
        lent: values that actors are about to take, by token; `let_go` is the last token whose values were not taken in
            time.
        closed: whether the engine has ended here.
        report: told ``(failure, inputs)`` of an operation on sharded values that failed here and not for a failure of
            its inputs; None while nobody wants to know.
        at: says which record the main stream is at.
        extras: what parts of the engine keep on this rank (process groups, modules, snapshots), by name.
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
    """A call of an endpoint that operations wait for has ended.

    Attributes:
        result: what it gave, if that stays here.
        error: what it raised instead, or why it never ran.
    """

    result: Any = None
    error: BaseException | str | None = None


_stores: dict[str, RankStore] = {}
#: Calls that have ended, by engine and token, until the stream comes to them. Not in the stores: an actor may be faster
#: than the worker that makes one.
_ended: dict[str, dict[int, EndedCall]] = {}
#: Engines that have ended here.
_gone: set[str] = set()
_lock = threading.Lock()
_changed = threading.Condition(_lock)


def store_of(engine: str, rank: int) -> RankStore:
    """The state of an engine in this process, made on first use."""
    with _lock:
        store = _stores.get(engine)
        if store is None:
            store = _stores[engine] = RankStore(rank)
            _changed.notify_all()
        return store


def awaited_store(engine: str) -> RankStore:
    """The state of an engine, for actors beside its workers, which may still be about to begin.

    Raises:
        RuntimeError: the engine has no workers in this process.
    """
    with _lock:
        if not _changed.wait_for(lambda: engine in _stores or engine in _gone, BEGIN) or engine in _gone:
            raise RuntimeError("no tensors of that mesh are in this process")
        return _stores[engine]


def existing_store(engine: str) -> RankStore | None:
    """The state of an engine in this process; None if it has none here."""
    return _stores.get(engine)


def end_call(engine: str, token: int, ended: EndedCall) -> None:
    """Note that a call has ended; what was noted first stays."""
    with _lock:
        if engine not in _gone:
            _ended.setdefault(engine, {}).setdefault(token, ended)
            _changed.notify_all()


def awaited_end(engine: str, token: int, keep: bool = False) -> EndedCall:
    """Wait until a call has ended.

    Args:
        keep: it will be asked for again.

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
    """Let go of all that an engine has here."""
    with _lock:
        store = _stores.pop(engine, None)
        _ended.pop(engine, None)
        _gone.add(engine)
        _changed.notify_all()
    if store is not None:
        with store.changed:
            store.closed = True
            store.changed.notify_all()
