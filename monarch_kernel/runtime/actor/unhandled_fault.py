"""Handle faults that no actor handles: the ``unhandled_fault_hook``, and the end of a script.

The default hook ends a script like an uncaught exception: with a report on stderr and exit code 1. The polling thread
notices the fault, but ``UnhandledFault`` must be raised in the main thread, and must interrupt its system call. This
module therefore sends a real-time signal, which is otherwise unused, to the main thread, and its handler raises the
exception.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

_pending: list[UnhandledFault] = []
_installed = False


class UnhandledFault(SystemExit, KeyboardInterrupt):
    """Raised in the main thread of a script: a ``KeyboardInterrupt``, as in Monarch, with an exit code."""


def default_hook(failure: object) -> None:
    """End the script with exit code 1."""
    sys.exit(1)


_registry: dict[str, Callable[[object], None]] = {"hook": default_hook}
_FACADE = "monarch_kernel.actor"


def hook() -> Callable[[object], None]:
    """Return the current ``unhandled_fault_hook``, which users reassign on the façade module."""
    facade = sys.modules.get(_FACADE)
    return getattr(facade, "unhandled_fault_hook", default_hook) if facade is not None else default_hook


def is_default(candidate: object) -> bool:
    """Return whether this hook is the default hook, not the user's."""
    return candidate is default_hook


def install() -> None:
    """Install the signal handler. Does nothing outside the main thread."""
    global _installed
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(SIGNAL, _handle)
    _installed = True


def _handle(_signum: int, _frame: FrameType | None) -> None:
    if _pending:
        raise _pending.pop()


def call_hook(chosen: Callable[[object], None], failure: object) -> None:
    """Call the user's hook. If it raises anything, the fault is not handled, and the script ends."""
    try:
        chosen(failure)
    except SystemExit as e:
        end_script(failure, e.code)
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
        end_script(failure)


def end_script(failure: Any, code: object = 1) -> None:
    """Print the report and end the script."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    head = (
        f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, PID={os.getpid()} at time {when}:"
    )
    print(f"{head}\n{failure.report()}", file=sys.stderr, flush=True)
    _pending.append(UnhandledFault(code))
    ident = threading.main_thread().ident
    if _installed and ident is not None:
        signal.pthread_kill(ident, SIGNAL)
    else:  # another thread started the runtime, so no handler is installed
        os._exit(1)
