"""Keep exceptions that ended an endpoint or a cell, with their frames, for post-mortem debugging.

Their number and lifetime are limited, because frames keep the values of their variables alive. If memory has run out,
the values are dropped at once. A newer failure of the same endpoint replaces the older one. This module costs nothing
until an endpoint fails.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import msgspec

from monarch_kernel import environment
from monarch_kernel.subscriptions import Subscribers

#: How many failures a process keeps.
LIMIT = 4
#: Frames in this part of torch keep collectives alive; objects of these modules keep a group's connections open.
_TORCH = os.path.join("torch", "distributed", "")
_GROUPS = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")


class Failure(msgspec.Struct, frozen=True):
    """One exception that ended an endpoint or a cell.

    Attributes:
        number: grows from 1 in each process.
        error: with its traceback.
        actor: the name of the actor.
        endpoint: the name of the endpoint that failed.
        cell: the id of the notebook cell that it ran for; "" for none.
        when: `time.time()`.
        begun: how many endpoints the actor had begun; -1 if it is not counted.
    """

    number: int
    error: BaseException
    actor: str
    endpoint: str
    cell: str
    when: float
    begun: int = -1


_kept: list[Failure] = []
_lock = threading.Lock()
_count = 0
_scheduled = False
#: Notified of each failure, on its thread, before the failure is reported; a debugger stops there.
failed_here: Subscribers[[BaseException]] = Subscribers("a callback of on_failure")


def failed(
    error: BaseException,
    actor: str,
    endpoint: str,
    cell: str,
    later: Callable[[float, Callable[[], None]], object],
    begun: int = -1,
) -> None:
    """Keep an exception that ended an endpoint or a cell, and notify the debugger if there is one.

    Args:
        later: calls a function after a delay in seconds, so that failures expire even if nothing else happens here.
        begun: see `Failure`.
    """
    global _count
    if isinstance(error, KeyboardInterrupt):
        return
    failed_here.notify(error)
    if not environment.POST_MORTEM.get() or isinstance(error, SystemExit):
        return
    with _lock:
        _count += 1
        _kept[:] = [each for each in _kept if each.actor != actor or each.endpoint != endpoint][1 - LIMIT :]
        _kept.append(Failure(_count, error, actor, endpoint, cell, time.time(), begun))
        _schedule(later)
    no_memory = any(_is_out_of_memory(each) for each in _chain(error))  # the memory that the frames hold is needed
    for frame in _frames(error):
        if no_memory or _TORCH in frame.f_code.co_filename:
            _empty(frame)


def let_go_of_groups() -> None:
    """Release the work of a process group that ends. Otherwise its connections stay open and other ranks wait."""
    for failure in failures():
        for frame in _frames(failure.error):
            if any(type(value).__module__ in _GROUPS for value in list(frame.f_locals.values())):
                _empty(frame)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of this host or, as torch reports it, of a GPU has run out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, its causes and its contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        yield each


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Return the frames of an exception, its causes and its contexts."""
    for each in _chain(error):
        traceback = each.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _empty(frame: FrameType) -> None:
    """Drop the variables of a finished frame."""
    with suppress(RuntimeError):  # the frame still runs, so its variables are in use
        frame.clear()
        # Python before 3.13 caches f_locals as a dictionary; reading it again updates the cache.
        _ = frame.f_locals


def failures() -> list[Failure]:
    """Return the kept failures, oldest first."""
    with _lock:
        _drop_old()
        return list(_kept)


def release() -> None:
    """Drop all failures; called when the runtime ends."""
    with _lock:
        _kept.clear()


def _drop_old() -> None:
    oldest = time.time() - environment.POST_MORTEM.get()
    _kept[:] = [each for each in _kept if each.when > oldest]


def _schedule(later: Callable[[float, Callable[[], None]], object]) -> None:
    global _scheduled
    if _kept and not _scheduled:
        _scheduled = True
        later(max(0.0, _kept[0].when + environment.POST_MORTEM.get() - time.time()) + 0.01, lambda: _expire(later))


def _expire(later: Callable[[float, Callable[[], None]], object]) -> None:
    global _scheduled
    with _lock:
        _scheduled = False
        _drop_old()
        _schedule(later)
