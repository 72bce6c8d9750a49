"""Let ``init_process_group()`` of a program that runs on all ranks of a mesh find the other ranks.

torch's own rendezvous expects that a process joins only once. Here ranks keep running: a second program, or a second
run, meets at the same address, and may find the store of the first one with stale contents (addresses of closed
connections). A rank that never joins, because it raised, leaves the others in an endless wait. Ranks that join with
torchrun's environment therefore count their meetings, use separate keys in the store for each, and wait for rank 0's
store in Python, where they can be released. The store does not listen on MASTER_PORT, unless the program has set it.
This leaves the port free for the store of a program that the ranks start as a separate process.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.actor.execution.postmortem import let_go_of_groups
from monarch_kernel.runtime.spmd.member import Meeting

#: The first and the longest pause between attempts to reach rank 0's store (seconds).
RETRY, RETRY_LATER = 0.01, 0.25
#: The time limit of one attempt (seconds).
CONNECT = 5.0


class _Meetings:
    """The meetings of this process since the ranks started to count."""

    def __init__(self) -> None:
        self.begun: Meeting | None = None
        self.count = 0
        # The latest store, and its address. It stays open while the program runs, because other ranks may still leave a
        # meeting.
        self.store: Any = None
        self.place: object = None


_meetings = _Meetings()


def count_meetings(begun: Meeting) -> None:
    """Start to count. All ranks of a mesh call this together, with the meeting that was reserved for the mesh."""
    _meetings.begun, _meetings.count, _meetings.store = begun, 0, None
    collectives.find_others = _find_others


@contextmanager
def counting_apart(begun: Meeting) -> Generator[None]:
    """Count the meetings of a program separately, which starts now on all ranks.

    Afterwards, continue the earlier count.

    A rank that replaced another has joined fewer meetings than the rest, and would not find them.

    Args:
        begun: the meeting of the program's first group; rank 0's store listens at its port.
    """
    before = _meetings.begun, _meetings.count, _meetings.store, _meetings.place
    finder = collectives.find_others
    count_meetings(begun)
    try:
        yield
    finally:
        _meetings.begun, _meetings.count, _meetings.store, _meetings.place = before
        collectives.find_others = finder


def meetings() -> int:
    """Return the number of process groups that this rank has joined since.

    Ranks with another count would not meet it.
    """
    return _meetings.count


def tidy_up() -> None:
    """Close leftover connections and listeners of a program that has ended and has left its process group."""
    c10d = sys.modules.get(collectives.C10D)
    if c10d is None or collectives.in_process_group():
        return
    # torch names groups by this count, and a failed attempt leaves it incremented on the ranks that tried.
    c10d._world.group_count = 0
    if _meetings.store is not None:
        _meetings.store = None
        let_go_of_groups()
        gc.collect()


def _find_others(
    original: Callable[..., Iterator[object]], url: Any, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[object]:
    """Replace torch's ``rendezvous``: yield the store, the rank and the world size."""
    place = _place(url, rank, world_size)
    if place is None:  # not torchrun's environment: torch handles it
        yield from original(url, rank, world_size, **options)
        return
    host, port, rank, world_size = place
    _meetings.count += 1
    timeout = options.get("timeout") or timedelta(minutes=30)
    here = host, port, collectives.endings()
    if _meetings.store is None or _meetings.place != here:
        _meetings.store, _meetings.place = _store(host, port, rank, world_size, timeout), here
    store = _meetings.store
    store.set_timeout(timeout)
    begun = _meetings.begun.port if _meetings.begun is not None else 0
    c10d = importlib.import_module("torch.distributed")
    yield c10d.PrefixStore(f"{begun}/{_meetings.count}", store), rank, world_size
    raise RuntimeError(f"Unable to perform re-rendezvous using {urlparse(url).scheme}:// method")  # torch's message


def _place(url: Any, rank: int, world_size: int) -> tuple[str, int, int, int] | None:
    """Return the host and port where the ranks meet, this rank and the world size; None for any other rendezvous."""
    env = os.environ
    try:
        found = urlparse(url)
        own, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        if rank not in (-1, own) or world_size not in (-1, world) or found.query:
            return None
        if "TORCHELASTIC_USE_AGENT_STORE" in env or env.get("USE_LIBUV", "1") != "1":
            return None
        if found.scheme == "env":
            host, port, begun = env["MASTER_ADDR"], int(env["MASTER_PORT"]), _meetings.begun
            if begun is not None and (host, port) == (begun.address, begun.port):
                port = begun.store_port or port
            return host, port, own, world
        if found.scheme == "tcp" and found.hostname and found.port and rank >= 0 and world_size >= 0:
            return found.hostname, found.port, own, world
    except (KeyError, ValueError, TypeError, AttributeError):
        pass
    return None


def _store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Any:
    if rank != 0:
        _await(host, port, timeout.total_seconds())
    c10d = importlib.import_module("torch.distributed")
    # multi_tenant: reuse a store that a group of this process still holds.
    return c10d.TCPStore(host, port, world_size, rank == 0, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _await(host: str, port: int, timeout: float) -> None:
    """Wait until rank 0 listens."""
    deadline = time.monotonic() + timeout
    pause = RETRY
    with collectives.waiting() as check:
        while True:
            try:
                socket.create_connection((host, port), CONNECT).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"timed out after {timeout:g} s: rank 0 did not open its store at {host}:{port} ({error}); "
                        "all ranks must call init_process_group()"
                    ) from None
            check()
            time.sleep(pause)
            check()
            pause = min(pause * 1.5, RETRY_LATER)
