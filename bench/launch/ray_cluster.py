"""Ray, as its documentation starts it on Slurm: ``ray start`` by ``srun`` on each of two nodes of an allocation."""

# The peer is installed in a separate environment, which no checker sees.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bench.measure import QUICK, emit, percentile, run, version

REPEATS = 1 if QUICK else 3
PATIENCE = 120.0
PORT = 6379


class Probe:
    """An actor that answers."""

    def here(self) -> str:
        return ray.get_runtime_context().get_node_id()


def once(folder: Path) -> tuple[float, float]:
    """Measure the seconds until both nodes are in the cluster, and until an actor on each has answered."""
    command = str(Path(sys.executable).with_name("ray"))
    began = time.perf_counter()
    said = subprocess.run(
        ["salloc", "--no-shell", "--no-bell", "-N2", "--exclusive"], capture_output=True, text=True, check=True
    ).stderr
    found = re.search(r"job allocation (\d+)", said)
    if found is None:
        raise RuntimeError(f"salloc said nothing of an allocation: {said}")
    job = found.group(1)
    steps: list[subprocess.Popen[bytes]] = []

    def step(node: str, arguments: Sequence[str]) -> None:
        line = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", node, command, "start", *arguments]
        usual = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        with (folder / f"{node}.log").open("ab") as log:
            steps.append(subprocess.Popen([*line, *usual], stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    try:
        head = ["--head", "--node-ip-address=127.0.0.1", f"--port={PORT}", "--include-dashboard=false"]
        step("n1", [*head, f"--temp-dir={folder}"])
        until_listening(steps[0])
        step("n2", [f"--address=127.0.0.1:{PORT}", "--node-ip-address=127.0.0.1"])
        ray.init(
            address=f"127.0.0.1:{PORT}", _node_ip_address="127.0.0.1", log_to_driver=False, logging_level=logging.ERROR
        )
        end = time.monotonic() + PATIENCE
        while len(nodes := [node["NodeID"] for node in ray.nodes() if node["Alive"]]) < 2:
            if time.monotonic() > end or steps[-1].poll() is not None:
                log = (folder / "n2.log").read_text(errors="replace")
                raise RuntimeError(f"the second node did not come: {log[-200:]}")
            time.sleep(0.02)
        attached = time.perf_counter()
        # Any: the decorator turns the class into handles whose methods have .remote().
        actor: Any = ray.remote(num_cpus=0)(Probe)
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        probes = [actor.options(scheduling_strategy=place).remote() for place in places]
        if set(ray.get([probe.here.remote() for probe in probes], timeout=PATIENCE)) != set(nodes):
            raise AssertionError("the actors are not on both nodes")
        answered = time.perf_counter()
        ray.shutdown()
    finally:
        subprocess.run(["scancel", job], check=False)
        for process in steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
    return attached - began, answered - began


def until_listening(head: subprocess.Popen[bytes]) -> None:
    """Wait until the head's port accepts connections."""
    end = time.monotonic() + PATIENCE
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", PORT)) == 0:
                return
        if head.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the head did not start (exit status {head.poll()})")
        time.sleep(0.02)


def slurm() -> None:
    """Start one cluster after the other."""
    taken: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        try:
            taken.append(once(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        while subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout:
            time.sleep(0.1)
    attached, answered = zip(*taken)
    emit("slurm_attached_s", round(percentile(attached, 0.5), 3), n=REPEATS)
    emit("slurm_s", round(percentile(answered, 0.5), 3), n=REPEATS)


if __name__ == "__main__":
    version(ray=ray.__version__)
    run({"slurm": slurm})
