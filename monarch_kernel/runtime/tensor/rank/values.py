"""`Values`: what a rank holds for the controller, by number. Streams of one engine share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.runtime.tensor.wire.failures import FailedValue

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
        self.lent: dict[int, list[Any]] = {}
        self.let_go = 0
        self.report: Callable[[FailedValue, Sequence[Any]], None] | None = None
        self.at: Callable[[], int] = lambda: 0
        self.extras: dict[str, Any] = {}


_stores: dict[str, RankStore] = {}
_lock = threading.Lock()
_made = threading.Condition(_lock)


def store_of(engine: str, rank: int) -> RankStore:
    """The state of an engine in this process, made on first use."""
    with _lock:
        store = _stores.get(engine)
        if store is None:
            store = _stores[engine] = RankStore(rank)
            _made.notify_all()
        return store


def awaited_store(engine: str) -> RankStore:
    """The state of an engine, for actors beside its workers, which may still be about to begin.

    Raises:
        RuntimeError: the engine has no workers in this process.
    """
    with _lock:
        if not _made.wait_for(lambda: engine in _stores, BEGIN):
            raise RuntimeError("no tensors of that mesh are in this process")
        return _stores[engine]


def existing_store(engine: str) -> RankStore | None:
    """The state of an engine in this process; None if it has none here."""
    return _stores.get(engine)


def forget(engine: str) -> None:
    """Let go of all that an engine has here."""
    with _lock:
        store = _stores.pop(engine, None)
    if store is not None:
        with store.changed:
            store.closed = True
            store.changed.notify_all()
