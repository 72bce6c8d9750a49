"""`python -m bench.debugger`: what the mesh debugger costs, and how long its user waits.

First stops are measured from the moment that breakpoints are armed until the debugger knows that every rank has
stopped: on real ranks that are in a loop, and on simulated ones (`bench.fleet`), which speak the same wire and stop as
soon as they are told to. What it costs a rank is the time of a loop of many small calls: with the engine loaded, armed
at a line that is not reached, and after that was cleared, over that without; on every Python that is there.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from bench import fleet
from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host
from monarch_kernel.debug import diff, get_debugger, stacks
from monarch_kernel.debugger.model.stops import Bound, Breakpoint, Stop, StopFrame
from monarch_kernel.debugger.rank import common_point
from monarch_kernel.debugger.rank.stacks import snapshot
from monarch_kernel.protocol.messages import OK, Call, Create, Introduce, Reply, ReportProcs, Routed, encode
from monarch_kernel.protocol.serialize import dumps, loads
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.system import shutdown
from monarch_kernel.runtime.mesh.shape import Extent, Region
from monarch_kernel.runtime.node.link import Link
from monarch_kernel.runtime.node.poller import Poller

#: The largest allowed values (seconds; ratios have none).
BARS = {"stop 8": 1.0, "stop 64 simulated": 1.5, "stop 1000 simulated": 3.0, "stacks 8": 0.1, "diff 100M": 2.0}
PATIENCE = 60.0


class Worker(Actor):
    """An actor that runs a loop and has a model."""

    def __init__(self) -> None:
        self.go = True
        self.model: Any = None

    @endpoint
    def circle(self, seconds: float) -> int:
        """Make small calls for this long (seconds)."""
        turns = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            turns = turned(turns)
            time.sleep(0.001)
        return turns

    @endpoint
    def build(self, parameters: int, odd: bool) -> int:
        """Create a module with this many parameters in 16 layers; with ``odd``, one parameter is slightly off."""
        import torch

        torch.manual_seed(0)
        side = int(math.sqrt(parameters / 16))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(16)))
        if odd:
            with torch.no_grad():
                self.model[7].weight[3, 5] += 1e-3
        return sum(each.numel() for each in self.model.parameters())


def turned(turns: int) -> int:
    """Run one turn of the loop."""
    return turns + 1


def line_of(function: Any) -> int:
    """Return the first line of a function's body."""
    return int(function.__code__.co_firstlineno) + 2


# -- simulated ranks ------------------------------------------------------------------------------------


class SimulatedRank(fleet.Rank):
    """Replies as a debug agent does, and stops as soon as it is armed."""

    def __init__(self, poller: Poller, agent: Any, name: str, number: int) -> None:
        self._hub: Any = None
        self._uid = ""
        self._stops = 0
        agent.handlers.setdefault(ReportProcs, lambda *_: None)  # no rank dies here
        super().__init__(poller, agent, name, number)

    def _on_message(self, link: Link, message: Any, body: Any) -> None:
        if type(message) is Create:
            value, buffers = dumps(None)
            link.send(encode(Reply(message.call, message.rank, OK, buffers)), value)
        elif type(message) is Call:
            ((request,), _) = loads(body, message.buffers)
            function, args = cloudpickle.loads(request)
            value, buffers = dumps((self.number, self._do(link, function, args)))
            link.send(encode(Reply(message.call, message.rank, OK, buffers)), value)

    def _do(self, link: Link, function: Any, args: tuple[Any, ...]) -> Any:
        if function.__name__ == greet.__name__:
            self._hub, self._uid = args
            link.send(encode(Introduce(self._hub[1])))
            return None
        if function.__name__ == "arm":
            _order, breakpoints, *_ = args
            with common_point.opening([each.together for each in breakpoints]):
                pass
            if breakpoints:
                self._stop(link, breakpoints[0])
            return [Bound(each.id, True, each.line) for each in breakpoints]
        if function.__name__ == "resume":
            return []  # and the debugger considers the stop over
        return function(*args)

    def _stop(self, link: Link, at: Breakpoint) -> None:
        self._stops += 1
        frames = tuple(
            StopFrame(k, f"function_{k}", at.file, at.line + k, k < 8, "some(code, here)") for k in range(20)
        )
        stop = Stop(
            self._stops, "breakpoint", "", at.id, 1, "MainThread", frames, "worker", "circle", "", time.time(), True
        )
        actor, controller = self._hub
        call = encode(Call(actor, "stopped", 0, 0, (), (), ""))
        body, _ = dumps(((self._uid, self.number, os.getpid(), stop), {}))
        routed = encode(Routed(controller.id, self.id, controller.gateway, -1))
        link.send(routed, len(call).to_bytes(4, "little") + call + bytes(body))


def greet(_hub: Any, _uid: str) -> None:
    """Send simulated ranks the address for reports of their stops; a real agent gets it when it is created."""


class Simulated:
    """A proc mesh of simulated ranks."""

    def __init__(self, ranks: int, per_host: int = 8) -> None:
        from monarch_kernel.runtime.host.launch import new_run_dir

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._folder = new_run_dir()
        hosts = ranks // per_host
        self._fleet = fleet.Fleet(self._folder, hosts, per_host, 2, SimulatedRank)
        agents = fleet.attach(self._folder, hosts)
        procs = tuple(ref.beside(f"rank-{h}-{k}", "") for h, ref in enumerate(agents) for k in range(per_host))
        system = get_system()
        for ref in procs:
            system.node.learn(ref)
        region = Region.from_extent(Extent(("hosts", "gpus"), (hosts, per_host)))
        uid = f"fleet-{ranks}"
        self.mesh = ProcMesh(system, uid, uid, procs, region, Region.from_extent(Extent(("hosts",), (hosts,))))
        system.proc_meshes[uid] = self.mesh
        from monarch_kernel.debugger.controller.query import ask

        hub = get_debugger().registry.actor()
        node = system.node
        told = ask(self.mesh, greet, (hub._actor, node.ref), uid, timeout=PATIENCE)
        assert len(told.values) == ranks, "a simulated rank has no agent"

    def close(self) -> None:
        """End the processes."""
        from monarch_kernel.runtime.host.launch import remove_run_dir

        get_system().proc_meshes.pop(self.mesh._mesh_uid, None)
        shutdown()
        self._fleet.close()
        remove_run_dir(self._folder)


# -- measurements -----------------------------------------------------------------------------------------


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    begin = time.perf_counter()
    found = function()
    return time.perf_counter() - begin, found


def first_stop(mesh: ProcMesh) -> float:
    """Return the time from arming to the last rank's stop (seconds)."""
    debugger = get_debugger()
    count = len(mesh)
    done = threading.Event()
    begin = time.perf_counter()
    took = [math.nan]

    def watch() -> None:
        if len(debugger.wait(lambda stops: len(stops) >= count, PATIENCE)) >= count:
            took[0] = time.perf_counter() - begin
        done.set()

    threading.Thread(target=watch, daemon=True).start()
    debugger.break_at(__file__, line_of(turned), mesh=mesh)
    done.wait(PATIENCE)
    stops = debugger.stops()
    debugger.clear()
    debugger.resume(stops)
    debugger.wait(lambda left: not left, PATIENCE)
    return took[0]


def real(rounds: int) -> dict[str, list[float]]:
    """Measure on eight ranks of this machine."""
    found: dict[str, list[float]] = {"stop 8 (first ever)": [], "stop 8": [], "stacks 8": []}
    mesh = this_host().spawn_procs(per_host={"gpus": 8}, name="real")
    workers = mesh.spawn("worker", Worker)
    workers.initialized.get(PATIENCE)
    asked = workers.circle.call(3600)
    found["stop 8 (first ever)"].append(first_stop(mesh))
    stacks(mesh)
    for _ in range(rounds):
        found["stop 8"].append(first_stop(mesh))
        took, seen = timed(lambda: stacks(mesh))
        assert not seen.late, "a rank has not answered"
        found["stacks 8"].append(took)
    mesh.kill().get(PATIENCE)
    asked.exception(PATIENCE)
    shutdown()
    return found


def simulated(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Measure on this many simulated ranks."""
    found: dict[str, list[float]] = {}
    there = Simulated(ranks)
    try:
        found[f"stop {ranks} simulated"] = [first_stop(there.mesh) for _ in range(rounds)]
        found[f"stacks {ranks} simulated"] = [timed(lambda: stacks(there.mesh, timeout=30.0))[0] for _ in range(rounds)]
    finally:
        there.close()
    return found


def differing(parameters: int, rounds: int) -> dict[str, list[float]]:
    """Measure a comparison of a module over four ranks, one of which differs in one parameter."""
    try:
        import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return {}
    mesh = this_host().spawn_procs(per_host={"gpus": 4}, name="models", preload=("torch",))
    workers = mesh.spawn("worker", Worker)
    for rank in range(4):
        workers.slice(gpus=rank).build.call_one(parameters, rank == 3).get(PATIENCE * 2)
    found: list[float] = []
    for _ in range(rounds + 1):
        took, seen = timed(lambda: diff(workers, "self.model", timeout=PATIENCE))
        assert "weight" in str(seen), "the difference was not found"
        found.append(took)
    mesh.kill().get(PATIENCE)
    shutdown()
    return {"diff 100M (first)": found[:1], "diff 100M": found[1:]}


COST = """
import json, sys, time
sys.path.insert(0, {root!r})
def small(x):
    return x + 1
def loop(n):
    x = 0
    for _ in range(n):
        x = small(x)
    return x
def other():
    return 1
def best(n=300_000, rounds=7):
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        loop(n)
        found.append(time.perf_counter() - begin)
    return min(found)
best(rounds=2)
off = best()
from monarch_kernel.debugger.rank.stopping.tracer import StopTracer
from monarch_kernel.debugger.model.stops import Breakpoint
engine = StopTracer(lambda event: None, lambda *a: False, lambda: ("", "", ""))
loaded = best()
begin = time.perf_counter()
engine.arm([Breakpoint(1, __file__, other.__code__.co_firstlineno + 1)])
arm = time.perf_counter() - begin
armed = best()
engine.arm([Breakpoint(1, __file__, small.__code__.co_firstlineno + 1, condition="x < 0")])
hit = best(20_000) * 15
engine.arm([])
cleared = best()
engine.close()
again = best()
base = min(off, again)
print(json.dumps(dict(loaded=loaded / base, armed=armed / base, condition=hit / base, cleared=cleared / base, arm=arm)))
"""


def pythons() -> dict[str, str]:
    """Return the interpreters of this machine, by version."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for path in sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[123].*/bin/python"))):
        version = Path(path).parent.parent.name
        found.setdefault(".".join(version.split(".")[:2]), path)
    return found


def costs() -> dict[str, dict[str, float]]:
    """Measure code that does not reach an armed breakpoint, as ratios of its time without the debugger."""
    root = str(Path(__file__).resolve().parent.parent)
    found: dict[str, dict[str, float]] = {}
    for version, python in pythons().items():
        script = Path(f"/tmp/monarch-bench-cost-{os.getpid()}.py")
        script.write_text(COST.format(root=root))
        try:
            answers: list[dict[str, float]] = []
            for _ in range(3):
                done = subprocess.run([python, str(script)], capture_output=True, text=True, check=False, timeout=300)
                if done.returncode:
                    print(f"Python {version}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    break
                answers.append(json.loads(done.stdout))
            if answers:
                found[version] = {key: statistics.median(each[key] for each in answers) for key in answers[0]}
        finally:
            script.unlink()
    return found


def merging() -> dict[str, list[float]]:
    """Measure the merge of thousands of stacks, a few of them different, into one tree."""
    from monarch_kernel.debugger.controller.stacks.merge import merge

    mine = snapshot()
    found: dict[str, list[float]] = {}
    for count in (1_000, 10_000):
        many = dict.fromkeys(range(count), mine)
        found[f"merge {count:,}"] = [timed(lambda many=many: merge(many))[0] for _ in range(3)]
    return found


def main(argv: list[str] | None = None) -> int:
    """Print one line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.debugger", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=5, help="of each (5)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1000], help="simulated ranks (64 and 1000)")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of the module (100 million)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args(argv)
    figures = real(args.rounds)
    for ranks in args.ranks:
        figures |= simulated(ranks, args.rounds)
    figures |= merging()
    figures |= differing(args.parameters, args.rounds)
    missed = 0
    print("| what | median (ms) | worst (ms) | bar (ms) |\n|---|--:|--:|--:|")
    for name, found in figures.items():
        bar = BARS.get(name)
        missed += bar is not None and not statistics.median(found) <= bar
        shown = f"{bar * 1e3:,.0f}" if bar is not None else ""
        print(f"| {name} | {statistics.median(found) * 1e3:,.1f} | {max(found) * 1e3:,.1f} | {shown} |")
    print(
        "\n| Python | loaded | armed, not met | condition at the line | cleared | to arm (ms) |\n"
        "|---|--:|--:|--:|--:|--:|"
    )
    for version, cost in sorted(costs().items()):
        ratios = " | ".join(f"{cost[key]:.3f}" for key in ("loaded", "armed", "condition", "cleared"))
        print(f"| {version} | {ratios} | {cost['arm'] * 1e3:.2f} |")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
