"""Describe how a process ended. This module imports little, because controllers load it, too."""

from __future__ import annotations

import signal

_SIGNAL_NAMES = {
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGABRT: "aborted (SIGABRT)",
    signal.SIGBUS: "bus error (SIGBUS)",
    signal.SIGFPE: "arithmetic error (SIGFPE)",
    signal.SIGILL: "illegal instruction (SIGILL)",
}


def describe_exit(status: int, out_of_memory: str = "", max_rss_bytes: int = 0) -> str:
    """Describe in one phrase how a process ended.

    Args:
        status: the exit code, or minus the signal.
        out_of_memory: where memory ran out, see ``OomMonitor``; "" if it did not.
        max_rss_bytes: the process's peak memory.
    """
    if status >= 0:
        return f"exited with code {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"killed by signal {-status}"
    text = _SIGNAL_NAMES.get(number, f"killed by {number.name}")
    if number is signal.SIGKILL and out_of_memory:
        used = f"; it had used {max_rss_bytes / 1e9:.2f} GB" if max_rss_bytes else ""
        text += f", out of memory ({out_of_memory}{used})"
    return text
