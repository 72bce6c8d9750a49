"""Detect when a cell's own code shows output, so that earlier output of ranks can be shown above it.

All output of the cell goes through `sys.stdout` or `sys.stderr`: text is written to them, while displays, results and
tracebacks flush both first. This module therefore wraps `write` and `flush` on the thread that runs the cell.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class OwnOutput:
    """Watches the streams of a shell while a cell runs.

    Args:
        before: called before the cell's own code writes or shows something. Must be fast if there is nothing to do.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._put: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []
        self._thread = 0
        self._pid = 0
        self._busy = False

    def watch(self) -> None:
        """Begin to watch: a cell begins on this thread."""
        self.stop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            for name in ("write", "flush"):
                method = getattr(stream, name)
                watched = self._watched(method)
                with suppress(AttributeError):  # a stream that does not accept attributes is not watched
                    setattr(stream, name, watched)
                    self._put.append((stream, name, watched, method))

    def stop(self) -> None:
        """Stop watching at the end of the cell. A method that has replaced the wrapper, as IPython may do, stays."""
        while self._put:
            stream, name, watched, method = self._put.pop()
            if getattr(stream, name) is watched:
                setattr(stream, name, method)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if threading.get_ident() == self._thread and not self._busy and os.getpid() == self._pid:
                self._busy = True
                try:
                    self._before()
                finally:
                    self._busy = False
            return method(*args)

        return call
