"""The output of a rank: captured as in a rank of this package's own runtime, and sent on in chunks."""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections.abc import Callable
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
        self._job = job

    def _now(self) -> Any:
        of_cell = calling_origin() or getattr(threading.current_thread(), "_monarch_cell", None)
        return self._cells if of_cell else self._job

    def write(self, text: str) -> int:
        """Write to the stream that the calling code belongs to."""
        return self._now().write(text)

    def flush(self) -> None:
        """Flush that stream."""
        self._now().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


def capture_output(take: Callable[[int, bytes], None], everything: bool) -> None:
    """Send the output of this process to ``take(stream, data)``, on a thread of its own. A second call does nothing.

    Args:
        take: stream is 1 or 2.
        everything: also what the job's own code and its subprocesses write; otherwise only what cells print.
    """
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
        sys.stdout = CellStream(sys.stdout, job[0])  # type: ignore[assignment]
        sys.stderr = CellStream(sys.stderr, job[1])  # type: ignore[assignment]
    for _, write in pipes.values():
        os.close(write)
    threading.Thread(
        target=_pump,
        args=({read: fd for fd, (read, _) in pipes.items()}, take),
        name="monarch-output-pump",
        daemon=True,
    ).start()


def _pump(streams: dict[int, int], take: Callable[[int, bytes], None]) -> None:
    with selectors.DefaultSelector() as selector:
        for read in streams:
            selector.register(read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, _CHUNK)
                if not data:
                    return
                take(streams[key.fd], data)
