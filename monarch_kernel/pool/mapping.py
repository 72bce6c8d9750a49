"""`ProcMesh.map`: call a function on items, and return values in order, as completed, or all at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from monarch_kernel.actor import ProcMesh
from monarch_kernel.output import calling_origin
from monarch_kernel.pool.pool import Pool, TaskFuture, pool_of
from monarch_kernel.pool.pool_executor import ItemFailure
from monarch_kernel.runtime.actor.errors import RankFailure, build_actor_error
from monarch_kernel.subscriptions import Subscribers, Subscription

if TYPE_CHECKING:
    from types import TracebackType


#: How often a waiting thread reports progress (seconds).
TICK = 0.2

#: Notified with a `Mapping` while a thread waits for it, and when it ends.
_progress: Subscribers[[Mapping]] = Subscribers("a callback of on_progress")


def on_progress(listener: Callable[[Mapping], None]) -> Subscription:
    """Call `listener(mapping)` a few times a second while a thread waits for a map, and when the map ends.

    The waiting thread calls it, so it must be quick.

    Returns:
        The subscription; close (or call) it to unsubscribe.
    """
    return _progress.subscribe(listener)


@dataclass(slots=True, eq=False)
class _Chunk:
    first: int
    count: int
    future: TaskFuture


class _Counts:
    def __init__(self) -> None:
        self.done = 0

    def add(self, count: int, future: object) -> None:
        """Count a chunk of `count` items that has ended."""
        if _has_value(future):
            self.done += count


class Mapping(Iterator[Any]):
    """The values of a running map. `ProcMesh.map` creates it, and one consumer uses it.

    It reads at most `ahead` items ahead of its consumer, so that values are often ready when they are requested. Ctrl-C
    while the consumer waits cancels it.
    """

    def __init__(
        self,
        pool: Pool,
        function: Callable[..., Any],
        items: Iterator[tuple[object, ...]],
        total: int | None,
        chunk: int,
        ahead: int,
        return_errors: bool,
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        #: The number of items; None if unknown.
        self.total = total
        self._counts = _Counts()
        #: The number of items that have failed.
        self.failed = 0
        #: The origin that started it, such as a cell.
        self.cell = calling_origin()
        self.started = time.monotonic()
        self.ended = True  # until it has started
        self._pool = pool
        self._items = items
        self._chunk = chunk
        self._ahead = ahead
        self._return_errors = return_errors
        self._key = pool.define(function)
        self._sent = 0
        self._open = 0  # the number of items that were sent and whose values the consumer has not received
        self._exhausted = False
        self._cancelled = False
        self._chunks: deque[_Chunk] = deque()
        self._values: deque[Any] = deque()  # the remaining values of the current chunk
        self.ended = False
        with _Guard(self):
            self._fill()

    @property
    def done(self) -> int:
        """The number of items that have a value, received by the consumer or not."""
        return self._counts.done

    @property
    def ranks(self) -> int:
        """The number of ranks that work on it."""
        return len(self._pool.alive)

    # -- taking values ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        with _Guard(self):
            while not self._values:
                self._fill()
                if not self._chunks:
                    self._end()
                    raise StopIteration
                chunk = self._chunks[0]
                self._wait([chunk])
                self._chunks.popleft()
                self._values.extend(self._taken(chunk))
                self._fill()
            return self._values.popleft()

    def as_completed(self) -> Iterator[tuple[int, object]]:
        """Yield `(number of the item, value)` pairs in the order in which values arrive."""
        while True:
            with _Guard(self):
                self._fill()
                if not self._chunks:
                    self._end()
                    return
                ready = self._wait(list(self._chunks))
                for chunk in ready:
                    self._chunks.remove(chunk)
            for chunk in ready:
                with _Guard(self):
                    values = self._taken(chunk)
                    self._fill()
                yield from enumerate(values, chunk.first)

    def get(self) -> list[Any]:
        """Wait for all values that the consumer has not received. Return them in the order of the items."""
        return list(self)

    def __await__(self) -> Generator[object, None, list[object]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        try:
            return await asyncio.to_thread(self.get)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[object]:
        nothing = object()
        while (value := await asyncio.to_thread(next, self, nothing)) is not nothing:
            yield value

    def cancel(self) -> None:
        """Send no more items, and interrupt running items. Values that have arrived stay available."""
        self._cancelled = self._exhausted = True
        self._pool.interrupt([chunk.future for chunk in list(self._chunks) if not chunk.future.done()])
        self._chunks = deque(chunk for chunk in list(self._chunks) if _has_value(chunk.future))
        if not self._chunks:
            self._end()

    # -- internals -------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Send as many items as `ahead` allows."""
        while not self._exhausted and self._open + min(self._chunk, self._ahead) <= self._ahead:
            items = list(islice(self._items, min(self._chunk, self._ahead)))
            if len(items) < min(self._chunk, self._ahead):
                self._exhausted = True
            if not items:
                return
            future = self._pool.submit_items(self._key, self._sent, items, self._return_errors)
            future.add_done_callback(partial(self._counts.add, len(items)))  # must not keep this map alive
            self._chunks.append(_Chunk(self._sent, len(items), future))
            if self._cancelled:  # another thread has cancelled the map in the meantime
                self._pool.interrupt([future])
            self._sent += len(items)
            self._open += len(items)

    def _wait(self, chunks: list[_Chunk]) -> list[_Chunk]:
        """Wait for any of these chunks, and report progress."""
        while True:
            ready, _ = wait([chunk.future for chunk in chunks], TICK, FIRST_COMPLETED)
            self._tell()
            if ready:
                return [chunk for chunk in chunks if chunk.future in ready]

    def _taken(self, chunk: _Chunk) -> list[object]:
        values: list[object] = chunk.future.result()
        self._open -= chunk.count
        rank = chunk.future.rank or 0
        return [self._error(value, rank) if isinstance(value, ItemFailure) else value for value in values]

    def _error(self, failed: ItemFailure, rank: int) -> BaseException:
        self.failed += 1
        procs, extent = self._pool.procs, self._pool.extent
        failure = RankFailure(rank, dict(extent.point(rank)), "", procs.pids().get(rank), "", failed.fault)
        return build_actor_error(f"in the pool of mesh {procs.name}", extent, [failure], {}, [])

    def _tell(self) -> None:
        _progress.notify(self)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._pool.forget(self._key)
            self._tell()

    def __del__(self) -> None:
        if not getattr(self, "ended", True):
            for chunk in self._chunks:
                chunk.future.cancel()
            self._pool.dropped.append(self._key)

    def __repr__(self) -> str:
        total = "" if self.total is None else f" of {self.total}"
        state = "ended" if self.ended else "running"
        return f"<map of {self.name} on mesh {self._pool.procs.name}: {self.done}{total} items, {state}>"


class _Guard:
    """Cancels a map when its consumer is interrupted, or when an item fails."""

    __slots__ = ("_mapping",)

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, StopIteration):
            mapping = self._mapping
            mapping.cancel()
            mapping._chunks.clear()
            mapping._end()


def _has_value(future: Any) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def start_map(
    procs: ProcMesh,
    function: Callable[..., object],
    iterables: tuple[Iterable[object], ...],
    *,
    chunk: int = 1,
    ahead: int | None = None,
    return_errors: bool = False,
) -> Mapping:
    """See `ProcMesh.map`."""
    if not callable(function):
        raise TypeError(f"map(function, items): {function!r} cannot be called")
    if not iterables:
        raise TypeError("map(function, items): give the items, too")
    for what, number in (("chunk", chunk), ("ahead", ahead)):
        if number is not None and number < 1:
            raise ValueError(f"map(..., {what}={number}): it must be at least 1")
    items = zip(*iterables)
    lengths = [len(each) for each in iterables if hasattr(each, "__len__")]  # type: ignore[arg-type]
    total = min(lengths) if len(lengths) == len(iterables) else None
    if ahead is None:
        ahead = max(256, 16 * len(procs) * chunk)
    return Mapping(pool_of(procs), function, items, total, chunk, ahead, return_errors)
