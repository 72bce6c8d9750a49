"""Stacks of ranks that cannot answer: another process of the same user reads them, with py-spy."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from monarch_kernel.runtime.host import py_spy

#: How many processes are read at once.
_AT_ONCE = 8


class OutsideRead(NamedTuple):
    """What was read of a process.

    Attributes:
        why: why it cannot answer, by its state in the kernel; "" if that does not explain it.
        dump: py-spy's JSON; "" if there is none.
        error: why there is none.
    """

    why: str
    dump: str
    error: str


def read_stacks(pids: Iterable[int], native: bool, timeout: float) -> dict[int, OutsideRead]:
    """Read the stacks of processes of this machine, within so many seconds for all of them."""
    deadline = time.monotonic() + timeout
    found: dict[int, OutsideRead] = {}
    turn = threading.Semaphore(_AT_ONCE)

    def read(pid: int) -> None:
        if turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                found[pid] = _read(pid, native, deadline)
            finally:
                turn.release()

    threads = [threading.Thread(target=read, args=(pid,), name="monarch-join-read") for pid in pids]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def _read(pid: int, native: bool, deadline: float) -> OutsideRead:
    why = py_spy.state_of(pid)
    program = py_spy.program()
    if program is None:
        return OutsideRead(why, "", py_spy.MISSING)
    said = "there was no time left"
    for options in py_spy.ways(native, bool(why)):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        command = [program, "dump", *py_spy.JSON, *options, "--pid", str(pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
            try:
                dump, errors = reader.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                reader.kill()
                if not why:
                    os.kill(pid, signal.SIGCONT)  # py-spy may have left it paused
                break
        text = dump.decode(errors="replace")
        if reader.returncode == 0 and py_spy.is_whole(text):
            return OutsideRead(why, text, "")
        said = py_spy.plain_error(errors.decode(errors="replace")) or f"py-spy ended with {reader.returncode}"
    return OutsideRead(why, "", said)
