"""`python -m bench.views`: what a watch costs the kernel, and how soon it tells.

Hosts are simulated in a few processes (as by `bench.fleet`); each has a real host agent's node and observer, and ranks
that tell what they do over a socket each. A tenth of the ranks changes each second: what they run, their counts and
their memory. The controller is a real one with a watch, whose changes are encoded as a front end gets them. Calls are
measured on real ranks, with a watch and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.fleet import Fleet, Rank, attach
from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.protocol.messages import (
    Death,
    DeathKind,
    ProcRef,
    ProcSpec,
    ReportProcs,
    encode,
)
from monarch_kernel.protocol.observation import ActorActivity, Observe, ObserveRank, ProcFigures, RankActivity
from monarch_kernel.runtime.actor.meshes.proc_mesh import ProcMesh
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.system import shutdown
from monarch_kernel.runtime.host.host_observer import HostObserver
from monarch_kernel.runtime.host.procs import Proc
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.watch import Board, Delta, RankState, Snapshot, watch
from monarch_kernel.watch.board import ActorsFact, Condition, MeshFact
from monarch_kernel.watch.model import ActorView, plain

SIZES = [8, 1000, 4096]
#: The seconds of measuring for each size.
BUDGET = 10.0
#: The share of the ranks that changes each second.
CHANGING = 0.1
#: The number of calls in a turn, and of turns, in the comparison with and without a watch.
CALLS, TURNS = 2000, 30


# -- the simulated hosts ------------------------------------------------------------------------------


class BusyRank(Rank):
    """A rank that begins or ends an endpoint from time to time while it is watched."""

    def __init__(self, poller: Poller, agent: Node, name: str, number: int) -> None:
        super().__init__(poller, agent, name, number)
        self._poller = poller
        self._calls = 0
        self._busy = False
        self._until = 0.0
        self.rss = 200_000_000
        if not hasattr(agent, "simulated"):
            agent.simulated = BusyHost(agent)  # type: ignore[attr-defined]
        agent.simulated.ranks[name] = self  # type: ignore[attr-defined]

    def _on_message(self, link: Any, message: Any, body: Any) -> None:
        if type(message) is ObserveRank:
            begins = self._until < time.monotonic()
            self._until = time.monotonic() + message.lease
            if begins and message.lease:
                self._link = link
                self._tell()
                self._poller.call_later(random.expovariate(CHANGING), self._change)
        else:
            super()._on_message(link, message, body)

    def _change(self) -> None:
        if time.monotonic() < self._until:
            self._busy = not self._busy
            self._calls += self._busy
            self.rss = int(self.rss * random.uniform(0.95, 1.06))
            self._tell()
            self._poller.call_later(random.expovariate(CHANGING), self._change)

    def _tell(self) -> None:
        doing = ("step", time.time()) if self._busy else ("", 0.0)
        actor = ActorActivity("trainer-1", "trainer", "Trainer", *doing, waiting=0, calls=self._calls)
        self._link.send(encode(RankActivity([actor], [], sent=self._calls * 900, received=self._calls * 400)))


class BusyHost(HostObserver):
    """The observer of a simulated host, whose ranks have no separate processes."""

    def __init__(self, agent: Node) -> None:
        self.ranks: dict[str, BusyRank] = {}
        self._all: dict[str, Proc] = {}
        super().__init__(agent, self._all)
        agent.handlers[ReportProcs] = lambda *_: None
        agent.handle(Observe, self._on_observe_all)

    def _on_observe_all(self, link: Any, message: Observe, body: Any) -> None:
        for name in self.ranks.keys() - self._all.keys():
            proc = self._all[name] = Proc(ProcSpec(name, "", 0), "fleet", link.peer, link.peer, "")
            proc.state = "alive"
        for proc in self._all.values():
            proc.root = link.peer
        self._on_observe(link, message, body)

    def _figures(self, proc: Proc) -> ProcFigures:
        rank = self.ranks[proc.id]
        return ProcFigures(proc.id, rank.number + 1000, 1.7e9, True, rank.rss, 100.0 if rank._busy else 0.0)


# -- the controller -----------------------------------------------------------------------------------


def mesh_of(agents: list[ProcRef], ranks: int, per_host: int) -> ProcMesh:
    """Make the controller treat the ranks of these hosts as one of its meshes."""
    system = get_system()
    procs = tuple(ref.beside(f"rank-{h}-{k}", "") for h, ref in enumerate(agents) for k in range(per_host))[:ranks]
    region = Region.from_extent(Extent(("ranks",), (len(procs),)))
    hosts = Region.from_extent(Extent(("hosts",), (len(agents),)))
    mesh = ProcMesh(system, f"fleet-{ranks}", f"fleet-{ranks}", procs, region, hosts)
    system.proc_meshes[mesh._mesh_uid] = mesh
    system.changed()
    return mesh


def changes_message(delta: Delta) -> bytes:
    """Encode changes as sent to a front end (docs/watching.md)."""
    ranks: dict[str, dict[int, Any]] = {}
    for (mesh, rank), view in delta.ranks.items():
        names = delta.fields.get((mesh, rank))
        ranks.setdefault(mesh, {})[rank] = (
            plain(view) if names is None else {name: plain(getattr(view, name)) for name in names}
        )
    message = {
        "kind": "changes",
        "base": delta.base,
        "version": delta.version,
        "time": delta.time,
        "meshes": plain(list(delta.meshes.values())),
        "hosts": plain(list(delta.hosts.values())),
        "ranks": ranks,
        "gone": {"meshes": delta.gone_meshes, "hosts": delta.gone_hosts},
        "failures": plain(delta.failures),
    }
    return json.dumps(message).encode()


def is_whole(snapshot: Snapshot) -> bool:
    """Return whether all ranks have reported."""
    return all(rank.pid and rank.actors for ranks in snapshot.ranks.values() for rank in ranks)


def measure(agents: list[ProcRef], ranks: int, per_host: int, budget: float) -> dict[str, float]:
    """Watch the ranks of these hosts, and measure."""
    system = get_system()
    mesh = mesh_of(agents, ranks, per_host)
    system.node.poller.start_background()
    began = time.perf_counter()
    with watch() as seen:
        snapshot = seen.snapshot()
        first = time.perf_counter() - began
        encoded = time.perf_counter()
        size = len(json.dumps(plain(snapshot)))
        encoded = time.perf_counter() - encoded
        deadline = time.monotonic() + 60
        while not is_whole(snapshot):
            assert time.monotonic() < deadline, "not all ranks have reported"
            time.sleep(0.005)
            snapshot = seen.snapshot()
        whole = time.perf_counter() - began
        time.sleep(1.5)  # skip the first figures of all ranks

        sent: list[int] = []
        changed = 0
        late: list[float] = []

        def tell(delta: Delta) -> None:
            nonlocal changed
            sent.append(len(changes_message(delta)))
            changed += len(delta.ranks)
            now = time.time()
            for key, view in delta.ranks.items():
                if view.state is RankState.RUNNING and "doing_since" in delta.fields.get(key, ()):
                    late.append(now - view.doing_since)

        told = seen.subscribe(tell)
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(budget)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        told.close()
        deaths = [death_latency(seen, mesh, rank) for rank in range(min(8, ranks - 1))]
    mesh._forget()
    system.changed()
    system.node.deaths.clear()  # the same ranks are used for the next size
    late.sort()
    return {
        "first_ms": first * 1e3,
        "whole_ms": whole * 1e3,
        "first_kb": size / 1e3,
        "encode_ms": encoded * 1e3,
        "cpu": 100 * cpu / wall,
        "kb_s": sum(sent) / wall / 1e3,
        "hz": len(sent) / wall,
        "ranks_s": changed / wall,
        "late_p50_ms": 1e3 * statistics.median(late) if late else math.nan,
        "late_p95_ms": 1e3 * late[int(0.95 * len(late))] if late else math.nan,
        "death_ms": 1e3 * max(deaths),
    }


def death_latency(seen: Any, mesh: ProcMesh, rank: int) -> float:
    """Measure the time from the report of a death to the delta that contains it."""
    proc = mesh._target().procs[rank].id
    began = time.perf_counter()
    get_system().node.declare_dead(proc, Death.of(DeathKind.EXITED, "killed by SIGKILL", proc))
    for delta in seen.changes(timeout=10):
        view = delta.ranks.get((mesh._mesh_uid, rank))
        if view is not None and view.state is RankState.DEAD:
            return time.perf_counter() - began
    raise AssertionError("the death was not told")


# -- the board alone ----------------------------------------------------------------------------------


def board_times(ranks: int) -> dict[str, float]:
    """Measure the milliseconds of a board with this many ranks (the best of several runs)."""
    board = Board()
    procs = tuple(f"p{k}" for k in range(ranks))
    hosts = tuple(f"h{k // 8}" for k in range(ranks))
    board.apply(MeshFact("m", "m", ("ranks",), (ranks,), procs, hosts, {}), 1.0)
    for proc in procs:
        board.apply(Condition(proc, RankState.STARTING, False), 1.0)

    def changed(share: float) -> Callable[[], object]:
        count[0] += 1
        for proc in procs[: int(ranks * share)]:
            board.apply(ActorsFact(proc, {"a": ActorView("trainer", "T", "step", 2.0, calls=count[0])}), 2.0)
        version = board.version - int(ranks * share)
        return lambda: board.since(version)

    count = [0]
    found: dict[str, float] = {}
    for name, share in (("delta of a tenth", 0.1), ("delta of all", 1.0)):
        found[name] = min(timed(changed(share)) for _ in range(7))
    begin = time.perf_counter()
    changed(1.0)
    found["a fact (µs)"] = (time.perf_counter() - begin) / ranks * 1e6
    found["snapshot"] = timed(board.snapshot)
    return found


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


# -- calls --------------------------------------------------------------------------------------------


class Echo(Actor):
    """An actor on real ranks that is called."""

    @endpoint
    def echo(self, value: int) -> int:
        """Return the value."""
        return value


def call_times(ranks: int, turns: int) -> tuple[float, float, float]:
    """Measure the microseconds of a call without and with a watch, and the median ratio of neighbouring turns.

    Each turn counts with its lower quartile, which other work of the machine affects least.
    """
    procs = this_host().spawn_procs({"gpus": ranks})
    echo = procs.spawn("echo", Echo)
    echo.echo.call(0).get(60)
    without: list[float] = []
    within: list[float] = []

    def turn() -> float:
        seconds: list[float] = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            echo.echo.call(0).get(60)
            seconds.append(time.perf_counter() - begin)
        return statistics.quantiles(seconds, n=4)[0] * 1e6

    turn()
    for number in range(turns):
        for watched in (False, True) if number % 2 else (True, False):
            if watched:
                with watch() as seen, seen.subscribe(changes_message):
                    time.sleep(0.3)  # the first reports
                    within.append(turn())
            else:
                time.sleep(0.3)
                without.append(turn())
    ratio = statistics.median(b / a for a, b in zip(without, within, strict=True))
    procs.stop().get(60)
    return statistics.median(without), statistics.median(within), ratio


def show_page_times() -> None:
    """Print the costs of the views in a browser, or the reason why there is no browser."""
    try:
        from bench.views_page.browser import measure as page_times

        for ranks in (1000, 4096):
            figures = ", ".join(f"{name} {value:.2f}" for name, value in page_times(ranks).items())
            print(f"a page with {ranks:,} ranks (ms; frames_late is a share): {figures}", flush=True)
    except (ImportError, LookupError) as error:
        print(f"no page was measured: {error}")


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.views", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="how many simulated ranks")
    parser.add_argument("--per-host", type=int, default=8, help="ranks of a host (8)")
    parser.add_argument("--processes", type=int, default=2, help="that simulate the hosts (2, or what it takes)")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds for each size ({BUDGET:g})")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of the comparison of calls ({TURNS}); 0: none")
    parser.add_argument("--no-page", dest="page", action="store_false", help="leave the browser out")
    args = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    for ranks in (1000, 4096):
        figures = ", ".join(f"{name} {value:.2f}" for name, value in board_times(ranks).items())
        print(f"a board of {ranks:,} ranks (ms): {figures}", flush=True)
    if args.page:
        show_page_times()
    if args.turns:
        without, within, ratio = call_times(4, args.turns)
        print(f"\na call on 4 ranks: {without:.1f} µs, watched {within:.1f} µs; median of the ratios {ratio:.4f}")
        shutdown()
    from monarch_kernel.runtime.host.launch import new_run_dir, remove_run_dir

    hosts = math.ceil(max(args.ranks) / args.per_host)
    processes = max(args.processes, math.ceil((2 * max(args.ranks) + 8 * hosts) / (hard * 0.9)))
    folder = new_run_dir()
    fleet = Fleet(folder, hosts, args.per_host, processes, BusyRank)
    try:
        agents = attach(folder, hosts)
        for ranks in args.ranks:
            row = measure(agents[: math.ceil(ranks / args.per_host)], ranks, args.per_host, args.budget)
            print(f"\n{ranks:,} ranks, {CHANGING:.0%} of them change each second")
            size = f"JSON {row['first_kb']:.0f} KB in {row['encode_ms']:.1f} ms"
            print(f"  first snapshot {row['first_ms']:.1f} ms, {size};")
            print(f"  all ranks have reported after {row['whole_ms']:.0f} ms")
            print(f"  the kernel's processor {row['cpu']:.2f} %, to a front end {row['kb_s']:.1f} KB/s", end=" ")
            print(f"in {row['hz']:.1f} messages/s of {row['ranks_s']:.0f} ranks/s")
            print(
                f"  a rank begins to run → delta: p50 {row['late_p50_ms']:.0f} ms, p95 {row['late_p95_ms']:.0f} ms;",
                end=" ",
            )
            print(f"a death → delta: at most {row['death_ms']:.0f} ms", flush=True)
    finally:
        shutdown()
        fleet.close()
        remove_run_dir(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
