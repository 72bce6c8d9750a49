"""`python -m bench.fleet`: casts to thousands of ranks, on hosts that are simulated in a few processes.

The controller is a real one. Each simulated host has a real host agent's node and relay, and its ranks are connected
to it by a Unix socket each and answer calls as an endpoint does that returns a small value; but many of them share a
process, as so many interpreters would not fit into one machine. What is measured is `mesh.endpoint.call(...).get()`:
the cast and the answers of all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import resource
import signal
import statistics
import sys
import time
from typing import Any

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.protocol.messages import OK, Call, ProcRef, Reply, encode
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.meshes.actor_mesh import ActorMesh
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.system import shutdown
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node import node as node_module
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.node.link import Link, connect_unix
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Poller
from monarch_kernel.runtime.node.relay import Relay
from monarch_kernel.runtime.node.routing import make_hello

SIZES = [8, 64, 512, 1024, 4096]
#: The seconds of measuring for each size.
BUDGET = 3.0
LEAST, MOST = 10, 2000
_TICKS = os.sysconf("SC_CLK_TCK")


class Pong(Actor):
    """The actor that the simulated ranks represent."""

    @endpoint
    def ping(self, _value: object) -> int:
        """Return the rank."""
        return 0


# -- the simulated hosts ------------------------------------------------------------------------------


class Rank:
    """A rank of a simulated host: a connection to its agent, and a reply to each call."""

    def __init__(self, poller: Poller, agent: Node, name: str, number: int) -> None:
        self.number = number
        link = Link(poller, agent.id, self._on_message, lambda _link: None)
        # `make_hello` reads a node's name and site, which this object has.
        self.id, self.kind, self.ref = name, "rank", agent.ref.beside(name, "")
        link.send(make_hello(self))  # type: ignore[arg-type]
        link.attach(connect_unix(agent.ref.address))

    def _on_message(self, link: Link, message: Any, body: Any) -> None:
        if type(message) is Call:
            loads(body, message.buffers)
            value, buffers = dumps(self.number)
            link.send(encode(Reply(message.call, message.rank, OK, buffers)), value)


def url_of(folder: str, host: int) -> str:
    """Return the address at which the agent of a simulated host listens for other agents."""
    return f"ipc://{folder}/host{host}"


def simulate(folder: str, hosts: range, ranks: int, ready: int, kind: type[Rank] = Rank) -> None:
    """Run these hosts until killed; write a byte to ``ready`` when they listen."""
    poller = Poller(background=False)
    node_module.Poller = lambda _background: poller  # type: ignore[assignment,misc]  # one for all nodes
    kept: list[Any] = []
    for host in hosts:
        agent = Node(f"agent-{host}", "agent", folder, f"host{host}", background=False, site=f"host{host}")
        agent.listen()
        agent.listen_at(url_of(folder, host))
        kept.append(Relay(agent))
        kept += [kind(poller, agent, f"rank-{host}-{k}", host * ranks + k) for k in range(ranks)]
    gc.freeze()  # as agents do; otherwise each garbage collection would scan the objects of all hosts
    os.write(ready, b".")
    poller.run(lambda: False)


class Fleet:
    """The processes that simulate the hosts."""

    def __init__(self, folder: str, hosts: int, ranks: int, processes: int, kind: type[Rank] = Rank) -> None:
        self.pids: list[int] = []
        self._folder, self._hosts = folder, hosts
        ready, write = os.pipe()
        for k in range(processes):
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(ready)
                    simulate(folder, range(k, hosts, processes), ranks, write, kind)
                finally:
                    os._exit(1)
            self.pids.append(pid)
        os.close(write)
        for _ in self.pids:
            if not os.read(ready, 1):
                raise RuntimeError("a simulating process ended before its hosts were up")
        os.close(ready)

    def cpu(self) -> float:
        """Return the CPU seconds that the processes have used."""
        total = 0
        for pid in self.pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def close(self) -> None:
        """End the processes, and remove the sockets of their hosts from the run folder."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for host in range(self._hosts):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(url_of(self._folder, host).removeprefix("ipc://"))


# -- measuring ----------------------------------------------------------------------------------------


def attach(folder: str, hosts: int) -> list[ProcRef]:
    """Connect to all agents."""
    node = get_system().node
    dialled: list[Future[ProcRef]] = []
    for host in range(hosts):
        future: Future[Any] = Future(node.poller, f"host {host}")
        node.dial(url_of(folder, host), future._resolve, 30)
        dialled.append(future)
    return [future.get(60) for future in dialled]


def mesh_of(agents: list[ProcRef], ranks: int) -> ActorMesh[Pong]:
    """Create a handle on the actors of these hosts."""
    procs = tuple(ref.beside(f"rank-{h}-{k}", "") for h, ref in enumerate(agents) for k in range(ranks))
    extent = Extent(("hosts", "gpus"), (len(agents), ranks))
    return ActorMesh(get_system(), "pong-1", "pong", "fleet", Pong, procs, Region.from_extent(extent))


def measure(mesh: ActorMesh[Pong], fleet: Fleet, budget: float) -> dict[str, float]:
    """Call all ranks repeatedly."""
    count = mesh.size()
    for _ in range(3):
        values = list(mesh.ping.call(None).get(120).values())
        assert values == list(range(count)), "the answers are not those of the ranks"
    seconds: list[float] = []
    own, others, begin = time.process_time(), fleet.cpu(), time.perf_counter()
    while len(seconds) < MOST and (len(seconds) < LEAST or time.perf_counter() - begin < budget):
        start = time.perf_counter()
        mesh.ping.call(None).get(120)
        seconds.append(time.perf_counter() - start)
    n = len(seconds)
    p50 = statistics.median(seconds)
    own = (time.process_time() - own) / n
    return {
        "casts": n,
        "p50_ms": p50 * 1e3,
        "us_per_rank": p50 * 1e6 / count,
        "controller_ms": own * 1e3,
        "total_ms": (own + (fleet.cpu() - others) / n) * 1e3,
    }


def main(argv: list[str] | None = None) -> int:
    """Print one row for each size."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="how many ranks (default: all of these)")
    parser.add_argument("--per-host", type=int, default=8, help="ranks of a host (8)")
    parser.add_argument("--processes", type=int, default=2, help="that simulate the hosts (2, or what it takes)")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds for each size ({BUDGET:g})")
    args = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hosts = max(args.ranks) // args.per_host
    # These processes are forked first, because the runtime starts threads.
    from monarch_kernel.runtime.host.launch import new_run_dir, remove_run_dir

    folder = new_run_dir()
    # Each rank has a socket at either end in one of the processes, and each host a few more.
    processes = max(args.processes, math.ceil((2 * max(args.ranks) + 8 * hosts) / (hard * 0.9)))
    fleet = Fleet(folder, hosts, args.per_host, processes)
    try:
        agents = attach(folder, hosts)
        titles = ["ranks", "hosts", "p50, all answers (ms)", "per rank (µs)", "controller CPU (ms)", "CPU of all (ms)"]
        print("|", " | ".join(titles), "|")
        print("|", " | ".join("-" * (len(title) - 1) + ":" for title in titles), "|")
        for size in args.ranks:
            row = measure(mesh_of(agents[: size // args.per_host], args.per_host), fleet, args.budget)
            figures = [
                f"{size:,}",
                str(size // args.per_host),
                f"{row['p50_ms']:.2f}",
                f"{row['us_per_rank']:.1f}",
                f"{row['controller_ms']:.2f}",
                f"{row['total_ms']:.1f}",
            ]
            cells = [figure.rjust(len(title)) for figure, title in zip(figures, titles, strict=True)]
            print("|", " | ".join(cells), "|", flush=True)
    finally:
        shutdown()
        fleet.close()
        remove_run_dir(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
