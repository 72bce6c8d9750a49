"""Counts what one call costs its caller and a rank; ``python -m tests.actor.count_calls`` prints it as JSON.

``sys.setprofile`` reports every function that a thread calls. Of those in Python, the ones of this package count; of
those in C, the ones that enter the kernel. Both are the same on every machine, whatever else runs there, if the thread
that is counted does all the work: the caller waits until all answers are there before it takes them, and its background
thread never finds it late. A rank's actor waits on the main thread, and handles what comes itself.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import monarch_kernel
from monarch_kernel.actor import Actor, ActorMesh, Future, endpoint, this_host
from monarch_kernel.runtime.node import poller

RANKS = 8
CALLS = 60
ROOT = os.path.dirname(monarch_kernel.__file__) + os.sep
#: Modules whose functions in C enter the kernel, and those functions of them that do not.
KERNEL = {"_socket", "fcntl", "mmap", "posix", "select", "_signal"}
MEMORY_ONLY = {"getsignal", "fspath", "fileno"}
#: Comprehensions: calls in Python 3.11, but not later.
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}


def _modules(function: Any) -> set[str]:
    """Where a function in C comes from: its module, or those of the classes of its object."""
    module: str | None = getattr(function, "__module__", None)
    if module is not None:
        return {module}
    return {kind.__module__ for kind in type(getattr(function, "__self__", None)).__mro__}


class Counts:
    """The functions that the thread calls which has this as its profile function, call by call."""

    def __init__(self) -> None:
        self._each: list[tuple[int, int]] = []
        self._python = self._kernel = 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            self._python += code.co_filename.startswith(ROOT) and code.co_name not in INLINED
        elif event == "c_call":
            self._kernel += function.__name__ not in MEMORY_ONLY and not KERNEL.isdisjoint(_modules(function))

    def next(self) -> None:
        """End the counts of one call, and begin those of the next."""
        self._each.append((self._python, self._kernel))
        self._python = self._kernel = 0

    def usual(self) -> tuple[int, int]:
        """Python functions and system calls of most calls; what interrupts one of them does not count."""
        return Counter(self._each[1:]).most_common(1)[0][0]


class Counted(Actor):
    """An actor that counts, from one message to the next, what its rank does for it."""

    def __init__(self) -> None:
        self.counts: Counts | None = None

    @endpoint
    def echo(self, value: str) -> str:
        if self.counts is not None:
            self.counts.next()
        return value

    @endpoint
    def begin(self) -> None:
        self.counts = Counts()
        sys.setprofile(self.counts)

    @endpoint
    def end(self) -> tuple[int, int]:
        sys.setprofile(None)
        assert self.counts is not None
        found, self.counts = self.counts.usual(), None
        return found


def answers_of(mesh: ActorMesh[Counted]) -> select.poll:
    """Tells when the ranks of a mesh have answered, without taking their answers."""
    links = mesh._system.node.links
    poll = select.poll()
    for ref in mesh._target().procs:
        poll.register(links[ref.id]._sock.fileno(), select.POLLIN)  # type: ignore[attr-defined]
    return poll


def counted(mesh: ActorMesh[Counted], send: Callable[[str], Future[Any]]) -> dict[str, tuple[int, int]]:
    """Python functions and system calls of a call of a mesh, at the caller and at its first rank."""
    first = mesh.flatten("rank").slice(rank=0)
    for _ in range(20):
        send("warm").get()
    arrived, ranks = answers_of(mesh), len(mesh)
    first.begin.call_one().get()
    counts = Counts()
    for _ in range(CALLS):
        sys.setprofile(counts)
        future = send("w")
        sys.setprofile(None)
        while len(arrived.poll()) < ranks:
            pass
        sys.setprofile(counts)
        future.get()
        sys.setprofile(None)
        counts.next()
    return {"caller": counts.usual(), "rank": first.end.call_one().get()}


def main() -> None:
    poller.TICK = 600.0  # the background thread leaves everything to this one
    with_all = this_host().spawn_procs({"gpus": RANKS}).spawn("counted", Counted)
    one = with_all.slice(gpus=0)
    found = {"call_one": counted(one, one.echo.call_one), "call": counted(with_all, with_all.echo.call)}
    print(json.dumps(found))


if __name__ == "__main__":
    from tests.actor.count_calls import main as as_module  # so that the actors are of a module, as users' are

    as_module()
