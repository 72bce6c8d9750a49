"""The output of a rank: captured as in a rank of this package's own runtime, and sent on in chunks."""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from monarch_kernel.output import calling_origin
from monarch_kernel.runtime.rank import output_capture

_CHUNK = 1 << 16


class CellStream:
    """``sys.stdout`` or ``sys.stderr`` of a rank whose other output belongs to its own job.

    Args:
        cells: takes what cells write.
        job: takes everything else.
    """

    def __init__(self, cells: Any, job: Any) -> None:
        self._cells = cells
        self._job = job if job is not None else open(os.devnull, "w")  # noqa: SIM115  # as for `print` in a daemon

    def _now(self) -> Any:
        of_cell = calling_origin() or getattr(threading.current_thread(), "_monarch_cell", None)
        return self._cells if of_cell else self._job

    def end(self) -> None:
        """There are no cells any more: all output is the job's."""
        self._cells = self._job

    def write(self, text: str) -> int:
        """Write to the stream that the calling code belongs to."""
        return self._now().write(text)

    def flush(self) -> None:
        """Flush that stream."""
        self._now().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


class OutputPipes:
    """The pipes that the output of this process goes through, and the thread that reads them.

    Args:
        take: is given (stream, data) on that thread; stream is 1 or 2. An exception of it drops the data.
        everything: also what the job's own code and its subprocesses write; otherwise only what cells print.
    """

    def __init__(self, take: Callable[[int, bytes], None], everything: bool) -> None:
        self._take = take
        self._job: tuple[Any, Any] | None = None
        self._cells: tuple[Any, Any] | None = None
        if output_capture.installed():
            return
        pipes = {1: os.pipe(), 2: os.pipe()}
        job = sys.stdout, sys.stderr
        if everything:
            for fd, (_, write) in pipes.items():
                os.dup2(write, fd)
            output_capture.install()
        else:  # the descriptors 1 and 2 stay the program's
            output_capture.install({fd: write for fd, (_, write) in pipes.items()})
            self._job = job
            self._cells = CellStream(sys.stdout, job[0]), CellStream(sys.stderr, job[1])
            sys.stdout, sys.stderr = self._cells  # type: ignore[assignment]
        for _, write in pipes.values():
            os.close(write)
        self._streams = {read: fd for fd, (read, _) in pipes.items()}
        self._end_read, self._end_write = os.pipe()
        threading.Thread(target=self._pump, name="monarch-output-pump", daemon=True).start()

    def close(self) -> None:
        """Undo it all: the output of the program's own code is its own again, and the thread ends."""
        if self._job is None:
            return
        self.forget()
        output_capture.uninstall()
        os.write(self._end_write, b"\0")  # closing it is not enough: forks of this process have copies

    def forget(self) -> None:
        """Give ``sys.stdout`` and ``sys.stderr`` back; all that a fork of this process has to do."""
        if self._job is None or self._cells is None:
            return
        for cells in self._cells:
            cells.end()  # the program may have kept it, as a handler of `logging` does
        if sys.stdout is self._cells[0]:
            sys.stdout = self._job[0]
        if sys.stderr is self._cells[1]:
            sys.stderr = self._job[1]
        self._job = None

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for read in (*self._streams, self._end_read):
                selector.register(read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._end_read:
                        for each in (*self._streams, self._end_read, self._end_write):
                            os.close(each)
                        return
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fd)
                        continue
                    with suppress(Exception):
                        self._take(self._streams[key.fd], data)
