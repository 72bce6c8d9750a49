"""What a worker is started with, and how it announces itself to those that wait for it.

Named tuples, as the process that executes the worker loads as little as it can.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from monarch_kernel._version import __version__
from monarch_kernel.protocol.private_files import write_own_file

if TYPE_CHECKING:
    from monarch_kernel.protocol.announcement import WorkerAnnouncement


class WorkerStart(NamedTuple):
    """The options of a worker.

    Attributes:
        address: where it listens, as ``worker_address`` reads it.
        announce_to: descriptors that get its announcement, and are then closed.
        announce_in: files that get it.
        name: of its host; "": the host's own.
        key_file: None: the user's default.
        key: the key itself, as ``key_line`` writes it, if it did not come by a file.
        key_from: where that came from, for messages.
        allow: the file of its allow-list; None: the default.
        audit: a file; "": only the log records connections.
        lifeline: it ends when this descriptor closes; -1: none.
        keep: the folder of a kept mesh; "": it keeps none.
        idle: how long it may be unused before it ends (seconds); 0: forever.
        ends_at: when the engine ends it (Unix time); 0: not known.
        quiet: whether its standard output is kept for the announcement.
        folder_lock: the lock of the folder of its socket, held until it ends; -1: none.
    """

    address: str
    announce_to: list[int]
    announce_in: list[str]
    name: str = ""
    key_file: str | None = None
    key: str = ""
    key_from: str = ""
    allow: str | None = None
    audit: str = ""
    lifeline: int = -1
    keep: str = ""
    idle: float = 0.0
    ends_at: float = 0.0
    quiet: bool = False
    folder_lock: int = -1


class WorkerConfig(NamedTuple):
    """What a worker reads from the descriptor that its command line names, as lists by ``marshal``."""

    id: str
    run_dir: str
    lock_fd: int  # the run folder's lock, inherited
    python_path: str | None  # the user's PYTHONPATH
    key_fd: int  # the key, for this process alone; -1: it is in a file, or in ``start``
    start: WorkerStart


def announce(start: WorkerStart, said: WorkerAnnouncement) -> None:
    """Tell those that wait for the worker, each once. One that has gone, or cannot be written to, is left out: a
    controller may still connect. Files come first, so that who reads a descriptor finds them."""
    line = said.line()
    for path in start.announce_in:
        with contextlib.suppress(OSError):
            write_own_file(path, line)
    for fd in start.announce_to:
        with contextlib.suppress(OSError):
            os.write(fd, line)
        with contextlib.suppress(OSError):
            os.close(fd)
    start.announce_to.clear()
    start.announce_in.clear()


def report_failure(start: WorkerStart, error: Exception) -> None:
    """Report why the worker cannot start: on stderr, and to those that wait for it, as a log may be full."""
    import socket

    from monarch_kernel.protocol.announcement import WorkerAnnouncement

    announce(start, WorkerAnnouncement(monarch_kernel=__version__, host=socket.gethostname(), error=str(error)))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"monarch-kernel worker: {error}\n")
        sys.stderr.flush()
