"""The event loop of a rank's cells: the one that `await` uses, and that code finds which asks for the running one.

In a notebook's kernel every cell runs inside a running loop, so that `asyncio.create_task(f())` works in any of them.
On a rank, a cell that awaits nothing runs outside: tracebacks and debuggers see no frames of asyncio, and
`asyncio.run()` works there, too. So while a cell runs, `asyncio.get_running_loop()` falls back to this loop. The tasks
that it gets go on whenever a cell awaits, and between cells, where the executor waits in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

_offered = threading.local()  # `loop`: the CellLoop of the cell that this thread runs
_running_loop = asyncio.get_running_loop


def _running_or_offered() -> asyncio.AbstractEventLoop:
    """Return the running event loop; in a cell that runs in none, the loop of its cells."""
    try:
        return _running_loop()
    except RuntimeError:
        offered: CellLoop | None = getattr(_offered, "loop", None)
        if offered is None:
            raise
        return offered.get()


class CellLoop:
    """An event loop that is made when a cell first needs one. Used on one thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    @contextmanager
    def offered(self) -> Generator[None]:
        """While a cell runs on this thread, who asks for the running loop gets this one."""
        if asyncio.get_running_loop is not _running_or_offered:
            # `asyncio` itself, `create_task` for one, looks it up in `asyncio.events`.
            asyncio.get_running_loop = asyncio.events.get_running_loop = _running_or_offered
        _offered.loop = self
        try:
            yield
        finally:
            _offered.loop = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, and with it the tasks that cells have left here."""
        loop = self.get()
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if not task.done():  # KeyboardInterrupt left the loop; the next cell must not resume this one
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException as ended:
                    error.__traceback__ = ended.__traceback__  # where the cell waited, not where the loop did
            raise

    @property
    def existing(self) -> asyncio.AbstractEventLoop | None:
        """The loop, if it was needed: tasks, servers and timers of earlier cells may have to go on in it."""
        return self._loop

    def close(self) -> None:
        """End what cells left behind here."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.close()
            asyncio.set_event_loop(None)
