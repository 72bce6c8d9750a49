"""Read stacks of ranks that cannot answer, from another process of the same user, with py-spy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from monarch_kernel.runtime.host import py_spy

#: The number of processes that are read in parallel.
_AT_ONCE = 8
_NOTHING = "py-spy has read nothing"


class OutsideRead(NamedTuple):
    """The result of reading a process.

    Attributes:
        why: why it cannot answer, by its state in the operating system; "" if the state does not explain it.
        dump: py-spy's JSON; "" if there is none.
        error: why there is no dump.
    """

    why: str
    dump: str
    error: str


def read_stacks(pids: Iterable[int], native: bool, timeout: float) -> dict[int, OutsideRead]:
    """Read the stacks of processes of this machine within ``timeout`` seconds in total."""
    deadline = time.monotonic() + timeout

    def read(pid: int) -> OutsideRead:
        why = py_spy.state_of(pid)
        found = py_spy.read(pid, native, bool(why), max(0.0, deadline - time.monotonic()))
        return OutsideRead(why, found.dump, "" if found.dump else found.trouble or found.said or _NOTHING)

    pids = list(pids)
    with ThreadPoolExecutor(_AT_ONCE, "monarch-join-read") as pool:
        return dict(zip(pids, pool.map(read, pids), strict=True))
