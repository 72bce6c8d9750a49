"""Manage the queue of tasks for the ranks of a mesh, in the process that submits them.

A task waits in the queue until a rank is idle, so a slow task does not delay others. While tasks are short, the pool
sends each rank a second task ahead of time, which saves the round trip between two tasks. If the first turns out slow,
an idle rank gets the second.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import msgspec

from monarch_kernel.actor import ActorError, Future, ProcMesh, SupervisionError, ValueMesh
from monarch_kernel.meshes import format_ranks
from monarch_kernel.output import calling_origin, on_behalf_of
from monarch_kernel.pool.pool_executor import Control, PoolExecutor, TaskInterrupted
from monarch_kernel.runtime.actor.errors import build_actor_error

#: While tasks take less than this on average (seconds), they are sent before the rank is idle.
SHORT = 0.01
#: How long a task waits behind another on its rank before an idle rank gets it (seconds).
HELD_UP = 0.05
#: A task that was running on this many ranks when they died counts as the cause.
MOST_DEATHS = 2

_numbers = itertools.count(1)


class TaskFuture(ThreadFuture[Any]):
    """The result of a task: a `concurrent.futures.Future` that can also be awaited.

    `concurrent.futures.wait` and `as_completed` accept it. `cancel` works while the task is in the queue; `interrupt`
    also works while it runs.
    """

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__()
        self._pool = pool
        self.number = number
        #: The rank to which it was last sent.
        self.rank: int | None = None
        #: Whether it was interrupted: it is not sent again then.
        self.interrupted = False
        #: The name of the task in messages.
        self.title = f"task {number}"

    def get(self, timeout: float | None = None) -> Any:
        """Same as `result`."""
        return self.result(timeout)

    def interrupt(self) -> None:
        """Cancel it; if it is running, raise KeyboardInterrupt in it."""
        self._pool.interrupt([self])

    def __await__(self) -> Generator[object, None, object]:
        return asyncio.wrap_future(self).__await__()


@dataclass(slots=True)
class _Task:
    future: TaskFuture
    send: Callable[[Any, int], Future[object]]  # (the rank's worker, the task's number) -> a Future
    cell: str
    since: float = 0.0  # the time at which it was sent
    sent: bool = False  # whether it was sent before, to a rank that died or that it was withdrawn from
    call: Future[object] | None = None  # of the latest rank; an answer to an earlier one is ignored
    withdrawing: bool = False
    died: list[int] = field(default_factory=list[int])


class Pool:
    """The ranks of a mesh as workers. `pool_of` creates one pool for each mesh and slice of a mesh.

    Args:
        procs: the mesh.
    """

    def __init__(self, procs: ProcMesh) -> None:
        self.procs = procs
        self.extent = procs.extent
        whole = procs.spawn("pool", PoolExecutor).flatten("ranks")
        self._whole = whole
        self._workers = [whole.slice(ranks=rank) for rank in range(len(procs))]
        control = procs.spawn("pool_control", Control).flatten("ranks")
        self._controls = [control.slice(ranks=rank) for rank in range(len(procs))]
        self._lock = threading.Lock()
        self._queue: deque[_Task] = deque()
        self._running: dict[int, dict[int, _Task]] = {rank: {} for rank in range(len(procs))}
        self._dead: dict[int, SupervisionError] = {}
        self._mean = SHORT  # mean duration of tasks, measured in this process (seconds)
        self._last_task: dict[int, int] = {}  # the task that each dead rank ran last
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Keys of maps that were garbage-collected: a finalizer must not send messages, so the next map drops them.
        self.dropped: list[int] = []

    @property
    def alive(self) -> list[int]:
        """The ranks that can take tasks."""
        return [rank for rank in self._running if rank not in self._dead]

    # -- tasks -----------------------------------------------------------------------------------

    def define(self, function: Callable[..., object]) -> int:
        """Send a function to all ranks. Return its key for `submit_items`."""
        while self.dropped:
            self.forget(self.dropped.pop())
        key = next(_numbers)
        dead = self.procs.dead()
        for rank in [rank for rank in self._dead if rank not in dead]:  # the rank was healed
            del self._dead[rank], self._last_task[rank]
        for rank in range(len(self._workers)):
            if rank not in dead:
                self._workers[rank].define.call_one(key, function)
        return key

    def forget(self, key: int) -> None:
        """Tell all ranks to drop a function."""
        for rank in self.alive:
            self._workers[rank].forget.call_one(key)

    def submit(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> TaskFuture:
        """Queue one call."""
        return self._put(lambda worker, number: worker.run.call_one(number, function, args, kwargs))

    def submit_items(self, key: int, first: int, items: list[tuple[object, ...]], keep: bool) -> TaskFuture:
        """Queue a chunk of items of a map."""
        last = first + len(items) - 1
        title = f"item {first} of the map" if last == first else f"items {first}-{last} of the map"
        return self._put(lambda worker, number: worker.run_items.call_one(number, key, first, items, keep), title)

    def interrupt(self, futures: Iterable[TaskFuture]) -> None:
        """Cancel tasks; raise KeyboardInterrupt in running ones."""
        started = [future for future in futures if not future.cancel()]
        wanted = {future.number for future in started}
        with self._lock:
            for future in started:
                future.interrupted = True
            running = {rank: [n for n in tasks if n in wanted] for rank, tasks in self._running.items()}
        for rank, numbers in running.items():
            if numbers and rank not in self._dead:
                self._controls[rank].cancel.call_one(numbers)

    def _put(self, send: Callable[[Any, int], Future[object]], title: str = "") -> TaskFuture:
        future = TaskFuture(self, next(_numbers))
        future.title = title or future.title
        with self._lock:
            self._queue.append(_Task(future, send, calling_origin()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="monarch-pool", daemon=True)
                self._thread.start()
        self._events.put(None)
        return future

    # -- the thread that sends and receives --------------------------------------------------------

    def _drive(self) -> None:
        while True:
            self._send_what_can_be_sent()
            with self._lock:
                if not self._queue and not any(self._running.values()):
                    self._thread = None
                    return
            try:
                event = self._events.get(timeout=self._withdraw())
            except queue.Empty:
                continue
            if event is not None:
                event()

    def _withdraw(self) -> float | None:
        """Withdraw tasks that wait behind a slow one while other ranks are idle, so that these run them.

        Returns:
            The time until one has waited long enough (seconds); None if none waits.
        """
        with self._lock:
            idle = sum(not self._running[rank] for rank in self.alive)
            idle -= sum(task.withdrawing for tasks in self._running.values() for task in list(tasks.values())[1:])
            if self._queue or idle <= 0:
                return None
            held_up = [
                (rank, next(iter(tasks.values())).since, task)
                for rank, tasks in self._running.items()
                for task in list(tasks.values())[1:]
                if rank not in self._dead and not task.withdrawing
            ]
        soonest: float | None = None
        for rank, since, task in held_up[:idle]:
            left = since + HELD_UP - time.monotonic()
            if left > 0:
                soonest = min(left, soonest or left)
                continue
            task.withdrawing = True
            call = self._controls[rank].withdraw.call_one(task.future.number)
            call.add_done_callback(
                lambda call, rank=rank, task=task: self._events.put(partial(self._withdrawn, rank, task, call))
            )
        return soonest

    def _withdrawn(self, rank: int, task: _Task, call: Future[object]) -> None:
        try:
            dropped = call.get()
        except Exception:  # the rank has died, which ends the task's call, too, if that has not ended
            dropped = _dropped(task.call)
        with self._lock:
            if dropped and self._running[rank].pop(task.future.number, None) is not None:
                task.call, task.sent = None, True
                self._queue.appendleft(task)

    def _send_what_can_be_sent(self) -> None:
        while True:
            with self._lock:
                rank = min(self.alive, key=lambda rank: len(self._running[rank]), default=None)
                depth = 2 if self._mean < SHORT else 1
                if not self._queue or (rank is not None and len(self._running[rank]) >= depth):
                    return
                task = self._queue.popleft()
                future = task.future
                # The lock is held because `interrupt` expects a task that it cannot cancel among the running ones.
                if not task.sent and not future.set_running_or_notify_cancel():
                    continue
                interrupted = future.interrupted  # later ones find it among the running ones
                if rank is not None and not interrupted:
                    self._running[rank][future.number] = task
            if interrupted:
                future.set_exception(TaskInterrupted("the task was interrupted"))
                continue
            if rank is None:
                future.set_exception(self._no_rank_left(task))
                continue
            future.rank = rank
            task.since, task.withdrawing = time.monotonic(), False
            try:
                with on_behalf_of(task.cell):
                    call = task.send(self._workers[rank], future.number)
            except Exception as error:  # the task cannot be pickled, or the mesh is stopped
                with self._lock:
                    del self._running[rank][future.number]
                future.set_exception(error)
                continue
            task.call = call
            call.add_done_callback(
                lambda call, rank=rank, task=task: self._events.put(partial(self._ended, rank, task, call))
            )

    def _ended(self, rank: int, task: _Task, call: Future[object]) -> None:
        # It was withdrawn; or just now, and the answer to that comes next.
        if task.call is not call or (task.withdrawing and not task.future.interrupted and _dropped(call)):
            return
        with self._lock:
            oldest = next(iter(self._running[rank]), 0)  # the task that ran; any other was waiting on the rank
            self._running[rank].pop(task.future.number, None)
        try:
            value = call.get()
        except SupervisionError as error:
            self._last_task.setdefault(rank, oldest)
            self._lost(rank, task, error)
        except ActorError as error:
            task.future.set_exception(self._of_rank(error, rank))
        except BaseException as error:  # unpickling the value runs user code
            task.future.set_exception(error)
        else:
            self._mean += 0.2 * (time.monotonic() - task.since - self._mean)
            task.future.set_result(value)

    def _of_rank(self, error: ActorError, rank: int) -> BaseException:
        """Convert the error of a call to one worker to an error of a call on the mesh, which names the rank."""
        failures = [
            msgspec.structs.replace(failure, rank=rank, coords=dict(self.extent.point(rank)), proc=failure.proc)
            for failure in error.failures[:1]
        ]
        if not failures:
            return error
        return build_actor_error(f"in the pool of mesh {self.procs.name}", self.extent, failures, {}, [])

    def _lost(self, rank: int, task: _Task, error: SupervisionError) -> None:
        """Requeue a task of a dead rank for other ranks, unless too many ranks have died while they ran it."""
        self._dead[rank] = error
        if task.future.number == self._last_task[rank]:
            task.died.append(rank)
        task.sent = True
        if len(task.died) >= MOST_DEATHS:
            ranks = format_ranks(task.died)
            error.add_note(f"ranks {ranks} of mesh {self.procs.name} died while they ran {task.future.title}")
            task.future.set_exception(error)
            return
        with self._lock:
            self._queue.appendleft(task)

    def _no_rank_left(self, task: _Task) -> BaseException:
        error = SupervisionError(
            f"no rank of mesh {self.procs.name} is left for {task.future.title}: "
            + "; ".join(f"rank {rank}: {error.cause}" for rank, error in sorted(self._dead.items())),
            mesh_name=self.procs.name,
            ranks=sorted(self._dead),
            extent=self.extent,
            cause=next((error.cause for error in self._dead.values()), ""),
        )
        error.__cause__ = next(iter(self._dead.values()), None)
        return error


def _dropped(call: Future[object] | None) -> bool:
    """Return whether the call of a task has ended before the task began, or was interrupted."""
    if call is None or not call.done():
        return False
    try:
        call.get()
    except TaskInterrupted:
        return True
    except BaseException:
        pass
    return False


_pools_lock = threading.Lock()


def pool_of(procs: ProcMesh) -> Pool:
    """Return the pool of a mesh (or slice). The first call creates it."""
    with _pools_lock:
        pools: dict[object, Pool] = procs._shared.setdefault("pools", {})
        key = (tuple(procs.extent.labels), tuple(procs._region.ranks()))
        pool = pools.get(key)
        if pool is None:
            pool = pools[key] = Pool(procs)
        return pool


# Split sequences and arrays into one piece per rank, and join the pieces again.


def scatter(procs: ProcMesh, name: str, values: Any) -> ValueMesh[int]:
    """See `ProcMesh.scatter`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"scatter(name, values): {name!r} cannot name a variable")
    try:
        total = len(values)
        values[0:0]
    except (TypeError, KeyError):
        kind = type(values).__name__
        raise TypeError(
            f"a {kind} cannot be cut into pieces: give a list, a tuple, a string, an array or a tensor"
        ) from None
    workers = pool_of(procs)._workers
    calls = [worker.put.call_one(name, values[part]) for worker, part in zip(workers, parts(total, len(workers)))]
    return ValueMesh(procs.extent, [call.get() for call in calls])


def gather(procs: ProcMesh, name: str) -> Any:
    """See `ProcMesh.gather`."""
    values = list(pool_of(procs)._whole.take.call(name).get().values())
    try:
        return concatenated(values)
    except TypeError as error:
        raise TypeError(f"gather({name!r}): {error}") from None


def parts(total: int, count: int) -> list[slice]:
    """Return `count` slices of `total` elements, as equal as possible, the longer slices first."""
    size, longer = divmod(total, count)
    ends = [size * k + min(k, longer) for k in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def concatenated(values: Sequence[Any]) -> object:
    """Join pieces of one type."""
    kinds = {type(value) for value in values}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    first = values[0]
    if torch is not None and all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat([value.cpu() for value in values])
    if numpy is not None and all(isinstance(value, numpy.ndarray) for value in values):
        return numpy.concatenate(values)
    if kinds == {list}:
        return list(chain.from_iterable(values))
    if kinds == {tuple}:
        return tuple(chain.from_iterable(values))
    if kinds == {str} or kinds == {bytes}:
        return type(first)().join(values)
    if kinds == {range}:
        return list(chain.from_iterable(values))
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise TypeError(f"values of type {names} cannot be joined; %mesh pull gives them as a ValueMesh")
