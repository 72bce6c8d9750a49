"""`python -m bench.recovery`: how long a training run is interrupted when ranks or a whole host are killed.

Data-parallel training over gloo, in a process group that is formed again after each kill, with the state of a healthy
rank. Measured from the signal to the end of the next step, with these parts:

    notice    the signal until the step's call fails
    release   the survivors come out of the collectives they wait in
    heal      new processes in the places of the dead, with their actors
    meet      agreeing on where the next group meets
    join      the process group (all ranks), then the state from the rank that has come furthest
    step      the next step

`--hosts N` runs on N workers of this machine and a spare one, and kills a whole worker with its ranks.

`--namespaces N` does the same over TCP between hosts that are network namespaces of this machine (see `tests/network`;
needs root), and loses a host as in a power failure: its cable is cut, then all its processes are killed. Without a
reset or an end of a connection, only heartbeats can detect this. Before that, it kills ranks there.

`--attach` names workers elsewhere, the last one being the spare; `--lose` is the command that makes the first one
vanish.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import monarch_kernel.actor as actors
from monarch_kernel.actor import Actor, ActorError, MeshFailure, ProcMesh, current_rank, endpoint, this_host
from monarch_kernel.spmd import Group, ProcessGroups, share_state

PARTS = ("notice", "release", "heal", "meet", "join", "step")
#: The number of steps between two kills.
BETWEEN = 10
#: A step that takes longer counts as hung (seconds).
DEADLINE = 60.0
#: The largest allowed time from the signal to the end of the next step (seconds).
BARS = {"rank": 3.0, "host": 8.0}


class Trainer(Actor):
    """A small convolutional network trained on random images, identical on all ranks."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        nn = torch.nn
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.001)
        self.model: Any = None
        self.steps = 0

    @endpoint
    def join(self, group: Group) -> int:
        """Join a new process group, and take the state of the most advanced rank."""
        from torch.nn.parallel import DistributedDataParallel

        group.join()
        self.steps = share_state(self.steps, self.net, self.optimizer)
        self.model = DistributedDataParallel(self.net)
        return self.steps

    @endpoint
    def step(self) -> int:
        """Run one step of training."""
        import torch

        generator = torch.Generator().manual_seed(self.steps * 1000 + current_rank().rank)
        images = torch.rand(16, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return self.steps


def recover(groups: ProcessGroups, trainers: Any, parts: dict[str, float]) -> None:
    """Form a new group that all ranks join; repeat if more ranks die meanwhile."""
    while True:
        try:
            group = groups.form(patience=1.0).get(DEADLINE)
            began = time.monotonic()
            trainers.join.call(group).get(DEADLINE)
        except (MeshFailure, ActorError) as error:
            print(f"once more: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        parts.update(group.seconds, join=time.monotonic() - began)
        return


def measure(procs: ProcMesh, kills: int, kill: Callable[[int], None]) -> list[dict[str, float]]:
    """Train, and kill ranks in the middle of a step, repeatedly; return the phases of every recovery."""
    trainers = procs.spawn("trainer", Trainer)
    groups = ProcessGroups(procs)
    recover(groups, trainers, {})
    found: list[dict[str, float]] = []
    for number in range(kills):
        for _ in range(BETWEEN):
            trainers.step.call().get(DEADLINE)
        struck: list[float] = []

        def strike(number: int = number, struck: list[float] = struck) -> None:
            struck.append(time.monotonic())
            kill(number)

        timer = threading.Timer(0.01, strike)
        timer.start()
        try:
            while True:
                trainers.step.call().get(DEADLINE)
        except MeshFailure:
            noticed = time.monotonic()
        timer.join()
        parts = {"notice": noticed - struck[0]}
        recover(groups, trainers, parts)
        began = time.monotonic()
        trainers.step.call().get(DEADLINE)
        parts["step"] = time.monotonic() - began
        parts["all"] = time.monotonic() - struck[0]
        found.append(parts)
    return found


def ranks_of_one_host(ranks: int, kills: int, at_once: int) -> list[dict[str, float]]:
    """SIGKILL ranks of this host, different ones each time."""
    procs = this_host().spawn_procs({"gpus": ranks}, name="trainers", preload=("torch", "torch._dynamo"))

    def kill(number: int) -> None:
        pids = list(procs.pids().values())
        for k in range(at_once):
            os.kill(pids[(number * at_once + k) % ranks], signal.SIGKILL)

    try:
        return measure(procs, kills, kill)
    finally:
        procs.kill().get(DEADLINE)


def a_host(
    urls: list[str], ranks: int, lose: Callable[[], None], kills: int = 0, kill: Callable[[int], None] | None = None
) -> list[dict[str, float]]:
    """Lose the first host after this many kills of ranks; the last host is the spare."""
    hosts = actors.attach_to_workers(ca=None, workers=urls)
    count = len(urls) - 1
    procs = hosts.slice(hosts=slice(0, count)).spawn_procs(
        {"gpus": ranks // count},
        name="trainers",
        preload=("torch", "torch._dynamo"),
        spares=hosts.slice(hosts=slice(count, count + 1)),
    )

    def strike(number: int) -> None:
        if kill is not None and number < kills:
            kill(number)
        else:
            lose()

    try:
        return measure(procs, kills + 1, strike)
    finally:
        procs.kill().get(DEADLINE)


def namespaces(count: int, ranks: int, kills: int) -> list[dict[str, float]]:
    """Kill single ranks, then lose the first host; the hosts are this many network namespaces."""
    from tests.network.cluster import Cluster
    from tests.network.cluster import ranks as ranks_on
    from tests.network.hosts import make_network

    network = make_network(["controller", *(f"host{k}" for k in range(count + 1))])
    try:
        network["controller"].enter_network()
        with tempfile.TemporaryDirectory(prefix="mk") as folder:
            # torch warns about every peer whose name it cannot resolve.
            cluster = Cluster(network, Path(folder), {"TORCH_CPP_LOG_LEVEL": "ERROR"})
            os.environ["MONARCH_KERNEL_KEY_FILE"] = str(cluster.key_file)
            victims = cluster.hosts[:count]

            def kill(number: int) -> None:
                os.kill(min(ranks_on(victims[number % count])), signal.SIGKILL)

            try:
                return a_host(cluster.urls, ranks, lambda: network.vanish(victims[0]), kills, kill)
            finally:
                actors.shutdown_context().get(DEADLINE)
    finally:
        network.close()


@contextmanager
def workers(count: int) -> Generator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Start workers on this machine, each with separate processes, as if it were a host."""
    with tempfile.TemporaryDirectory(prefix="mk") as folder:
        urls = [f"ipc://{folder}/{k}" for k in range(count)]
        command = [sys.executable, "-m", "monarch_kernel", "worker", "--listen"]
        started: list[subprocess.Popen[bytes]] = []
        with open(f"{folder}/log", "wb") as log:
            for url in urls:
                started.append(subprocess.Popen([*command, url], stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        try:
            deadline = time.monotonic() + DEADLINE
            while not all(os.path.exists(url.removeprefix("ipc://")) for url in urls):
                if time.monotonic() > deadline or any(each.poll() is not None for each in started):
                    with open(f"{folder}/log", encoding="utf-8", errors="replace") as log:
                        raise RuntimeError(f"the workers did not start; they said:\n{log.read()[-2000:]}")
                time.sleep(0.01)
            yield urls, started
        finally:
            for each in started:
                each.terminate()
            for each in started:
                each.wait(DEADLINE)


def show(what: str, found: list[dict[str, float]], bar: float) -> bool:
    """Print the medians in milliseconds; return whether the bar is met."""
    middle = {part: statistics.median(each[part] for each in found) for part in (*PARTS, "all")}
    worst = max(each["all"] for each in found)
    parts = "  ".join(f"{part} {middle[part] * 1000:.0f}" for part in PARTS)
    verdict = "ok" if worst <= bar else "MISSED"
    print(
        f"{what}: {middle['all'] * 1000:.0f} ms, worst of {len(found)} {worst * 1000:.0f} (bar {bar:.0f} s {verdict})"
    )
    print(f"    {parts}", flush=True)
    return worst <= bar


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description="Time until the next training step.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=7, help="how often, for the medians")
    parser.add_argument("--hosts", type=int, help="lose one of so many hosts of this machine, with one spare")
    parser.add_argument(
        "--namespaces", type=int, help="the same with this many hosts that are network namespaces (needs root)"
    )
    parser.add_argument("--losses", type=int, default=3, help="how often a host of --namespaces is lost (3)")
    parser.add_argument("--attach", nargs="+", metavar="URL", help="lose one of these workers; the last is the spare")
    parser.add_argument("--lose", metavar="COMMAND", help="what makes the first worker of --attach vanish")
    args = parser.parse_args(argv)
    if (args.attach is None) != (args.lose is None):
        parser.error("--attach and --lose go together")
    # Failures are handled here, and must not end the script.
    actors.unhandled_fault_hook = lambda failure: None
    load = os.getloadavg()[0]
    print(f"{args.ranks} ranks on {os.cpu_count()} CPUs, load {load:.1f} before; medians in milliseconds", flush=True)
    met: list[bool] = []
    if args.attach:
        found = a_host(args.attach, args.ranks, lambda: subprocess.run(shlex.split(args.lose), check=True) and None)
        met.append(show(f"loss of one of {len(args.attach) - 1} hosts", found, BARS["host"]))
    elif args.namespaces:
        killed: list[dict[str, float]] = []
        lost: list[dict[str, float]] = []
        for number in range(args.losses):
            *kills, loss = namespaces(args.namespaces, args.ranks, 0 if number else args.kills)
            killed += kills
            lost.append(loss)
        where = f"in {args.namespaces} network namespaces"
        if killed:
            met.append(show(f"SIGKILL of 1 of {args.ranks} ranks {where}", killed, BARS["rank"]))
        met.append(show(f"loss of 1 of {args.namespaces} hosts {where}", lost, BARS["host"]))
    elif args.hosts:
        with workers(args.hosts + 1) as (urls, started):
            found = a_host(urls, args.ranks, lambda: started[0].kill())
        met.append(show(f"loss of one of {args.hosts} hosts", found, BARS["host"]))
    else:
        for at_once in (1, 2):
            found = ranks_of_one_host(args.ranks, args.kills, at_once)
            met.append(show(f"SIGKILL of {at_once} of {args.ranks} ranks", found, BARS["rank"]))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
