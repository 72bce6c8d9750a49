"""`python -m bench.spent`: what each microsecond of one `call_one` is spent on, in the caller and in the rank.

Both processes record a time stamp at each transition between stages. To do so, they replace functions of the runtime by
wrappers that read the clock (which is common to all processes) before and after. The stamps are part of the measured
time; the untraced round trip is printed beside them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from monarch_kernel.actor import Actor, endpoint, this_host

clock = time.perf_counter
stamps: list[tuple[str, float]] = []


def stamped(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    """Wrap a function with a stamp before and one after it."""
    note = stamps.append

    def call(*args: Any) -> Any:
        note((before, clock()))
        result = function(*args)
        note((after, clock()))
        return result

    return call


class Traced:
    """Wraps a socket or an epoll set: some of its methods record stamps, the others pass through."""

    def __init__(self, thing: Any, **methods: tuple[str, str]) -> None:
        self._thing = thing
        for name, (before, after) in methods.items():
            setattr(self, name, stamped(getattr(thing, name), before, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


def trace(peer: str) -> None:
    """Start recording stamps in this process, on the link to a peer."""
    from monarch_kernel.runtime.actor.calls import endpoint
    from monarch_kernel.runtime.actor.calls import pending as calls
    from monarch_kernel.runtime.actor.execution import instance
    from monarch_kernel.runtime.actor.process import get_system
    from monarch_kernel.runtime.node import link

    node = get_system().node
    connection: Any = node.links[peer]
    connection._sock = Traced(connection._sock, send=("send", "sent"), recv=("recv", "received"))
    poller: Any = node.poller
    poller._epoll = Traced(poller._epoll, poll=("sleep", "awake"))
    link.decode = stamped(link.decode, "decode", "decoded")
    caller: Any = endpoint
    caller.dumps = stamped(caller.dumps, "dumps", "dumped")
    actor: Any = instance
    actor.pickled = stamped(actor.pickled, "dumps", "dumped")
    modules: Any = (calls, instance)
    for module in modules:
        module.loads = stamped(module.loads, "loads", "loaded")
    connection.on_message = stamped(connection.on_message, "dispatch", "dispatched")


class Target(Actor):
    """The called actor."""

    @endpoint
    def echo(self, s: str) -> str:
        stamps.append(("run", clock()))
        return s

    @endpoint
    def trace(self, controller: str) -> None:
        trace(controller)

    @endpoint
    def taken(self) -> list[tuple[str, float]]:
        found = stamps[:]
        stamps.clear()
        return found


#: (stage, from, to): each stamp with its side ("c" the caller, "r" the rank).
STAGES = [
    ("caller: check the target and the arguments", "c begin", "c dumps"),
    ("caller: serialise the arguments", "c dumps", "c dumped"),
    ("caller: future, header, frame", "c dumped", "c send"),
    ("kernel: the send, and the rank wakes up", "c send", "r awake"),
    ("rank: look up the link", "r awake", "r recv"),
    ("rank: recv (system call)", "r recv", "r received"),
    ("rank: unpack the frame, decode the header", "r received", "r dispatch"),
    ("rank: into the mailbox", "r dispatch", "r dispatched"),
    ("rank: out of the poller and the mailbox, context", "r dispatched", "r loads"),
    ("rank: unpickle the arguments", "r loads", "r loaded"),
    ("rank: to the endpoint", "r loaded", "r run"),
    ("rank: run the endpoint, serialise the result", "r run", "r dumped"),
    ("rank: header, frame", "r dumped", "r send"),
    ("kernel: the send, and the caller wakes up", "r send", "c awake"),
    ("caller: look up the link", "c awake", "c recv"),
    ("caller: recv (system call)", "c recv", "c received"),
    ("caller: unpack the frame, decode the header", "c received", "c dispatch"),
    ("caller: find the call, mark it done", "c dispatch", "c dispatched"),
    ("caller: out of the poller", "c dispatched", "c loads"),
    ("caller: unpickle the result", "c loads", "c loaded"),
    ("caller: return", "c loaded", "c end"),
]


def measure(calls: int) -> tuple[list[dict[str, float]], float]:
    """Return the stamps of this many calls (rounded down to hundreds), and the seconds of an untraced round trip."""
    procs = this_host().spawn_procs({"gpus": 1})
    one = procs.spawn("target", Target).slice(gpus=0)
    plain: list[float] = []
    for _ in range(calls):
        start = clock()
        one.echo.call_one("w").get()
        plain.append(clock() - start)
    from monarch_kernel.runtime.actor.process import get_system

    rank = one._target().procs[0].id
    one.trace.call_one(get_system().node.id).get()
    trace(rank)
    for _ in range(200):
        one.echo.call_one("w").get()
    one.taken.call_one().get()
    found: list[dict[str, float]] = []
    for _ in range(calls // 100):
        mine: list[list[tuple[str, float]]] = []
        for _ in range(100):
            stamps.clear()
            stamps.append(("begin", clock()))
            one.echo.call_one("w").get()
            stamps.append(("end", clock()))
            mine.append(stamps[:])
        theirs = one.taken.call_one().get()
        for taken in mine:
            begin, end = taken[0][1], taken[-1][1]
            call = {f"c {name}": at for name, at in taken}
            # The last stamp of a name counts, except for stamps after the reply was sent.
            call |= {f"r {name}": at for name, at in theirs if begin < at < end}
            found.append(call)
    procs.stop().get()
    return found, statistics.median(plain)


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.spent", description="What each microsecond of a call is spent on."
    )
    parser.add_argument("--calls", type=int, default=4000, help="how many to trace (default: 4000)")
    found, plain = measure(parser.parse_args().calls)
    whole = [call for call in found if all(a in call and b in call for _, a, b in STAGES)]
    if not whole:
        print("no call left all stamps: a stage's function is not on the path of a call any more", file=sys.stderr)
        return 1
    total = statistics.median(call["c end"] - call["c begin"] for call in whole)
    # The calls around the median are used, so that the stages add up to it.
    whole.sort(key=lambda call: call["c end"] - call["c begin"])
    middle = whole[int(len(whole) * 0.4) : int(len(whole) * 0.6)]
    print(f"{'stage':68s} {'µs':>6s}")
    added = 0.0
    for label, a, b in STAGES:
        spent = statistics.mean(call[b] - call[a] for call in middle) * 1e6
        added += spent
        print(f"{label:68s} {spent:6.1f}")
    print(f"{'together':68s} {added:6.1f}")
    print(f"{'round trip with stamps, median':68s} {total * 1e6:6.1f}")
    print(f"{'round trip without stamps, median':68s} {plain * 1e6:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
