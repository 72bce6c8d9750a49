"""The event loop of a rank's cells: `await` uses it, and `asyncio.get_running_loop()` returns it.

In a notebook kernel, every cell runs inside a running loop, so `asyncio.create_task(f())` works in all of them. On a
rank, a cell without `await` runs outside any loop, so that tracebacks and debuggers see no asyncio frames, and
`asyncio.run()` works. While such a cell runs, `asyncio.get_running_loop()` falls back to this loop. Its tasks run
whenever a cell awaits, and between cells, when the executor waits in the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_offered = threading.local()  # `loop`: the CellLoop of the cell on this thread
_running_loop = asyncio.get_running_loop


def _running_or_offered() -> asyncio.AbstractEventLoop:
    """Return the running event loop; inside a cell that runs outside any loop, return the loop of the cells."""
    try:
        return _running_loop()
    except RuntimeError:
        offered: CellLoop | None = getattr(_offered, "loop", None)
        if offered is None:
            raise
        return offered.get()


class CellLoop:
    """An event loop, created when a cell first needs one. Used on one thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, created on first use."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    @contextmanager
    def offered(self) -> Generator[None]:
        """Make this the loop that `asyncio.get_running_loop()` returns while a cell runs on this thread."""
        if asyncio.get_running_loop is not _running_or_offered:
            # `asyncio` itself, for example `create_task`, looks it up in `asyncio.events`.
            asyncio.get_running_loop = asyncio.events.get_running_loop = _running_or_offered
        _offered.loop = self
        try:
            yield
        finally:
            _offered.loop = None

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine to its end, together with the tasks that earlier cells started."""
        loop = self.get()
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if not task.done():  # KeyboardInterrupt left the loop; the next cell must not resume this task
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException as ended:
                    error.__traceback__ = ended.__traceback__  # where the cell waited, instead of where the loop did
            raise

    @property
    def existing(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop if it exists: tasks, servers and timers of earlier cells may need to run in it."""
        return self._loop

    def close(self) -> None:
        """Close the loop, with everything that cells started in it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.close()
            asyncio.set_event_loop(None)
