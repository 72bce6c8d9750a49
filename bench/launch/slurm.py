"""Hosts from a real Slurm of this machine, and Slurm's own time: ``python -m bench.launch.slurm GROUP``.

``slurm``: from ``SlurmJob(...)`` to the first answer of a rank on each of two nodes; the limit is an allocation of two
nodes in which a step on each writes the time. ``replace``: all processes of a node are killed, and the node is reported
to Slurm as down. Measured until the replacement of its rank, on the spare node of the same allocation, answers a call.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import monarch_kernel.actor as actors
from bench.launch.hosts import PATIENCE, Probe, engine, first_answer
from bench.launch.rows import LIMIT
from bench.measure import PEER, QUICK, emit, percentile, run, version
from monarch_kernel._version import __version__
from monarch_kernel.job import SlurmJob
from tests.launchers.slurm import Slurm, running

REPEATS = 1 if QUICK else 3
#: The program that writes the time on each node.
STAMP = ("srun", "--ntasks-per-node=1", "date", "+%s.%N")
NODES = ("-N2", "--exclusive")


def stamped(command: list[str], out: Path | None = None) -> float:
    """Measure the seconds from a command until the later of two nodes has written the time, to a file or to stdout."""
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    end = time.monotonic() + PATIENCE
    while len(times := (done.stdout if out is None else out.read_text()).split()) < 2:
        if out is None or time.monotonic() > end:
            raise RuntimeError(f"{command[0]} wrote {times}, and not the time of two nodes")
        time.sleep(0.01)
    return max(map(float, times)) - began


def slurms_own(slurm: Slurm) -> None:
    """Start steps on two nodes, by salloc as ours, and by a batch script."""
    taken: dict[str, list[float]] = {"slurm_s": [], "sbatch_s": []}
    with tempfile.TemporaryDirectory(dir=slurm.folder) as folder:
        script, out = Path(folder, "stamp.sh"), Path(folder, "out")
        script.write_text(f"#!/bin/sh\n{' '.join(STAMP)}\n")
        for _ in range(REPEATS):
            taken["slurm_s"].append(stamped(["salloc", "--quiet", "--no-bell", *NODES, *STAMP]))
            slurm.wait_until_idle()
            out.write_text("")
            taken["sbatch_s"].append(stamped(["sbatch", *NODES, f"--output={out}", str(script)], out))
            slurm.wait_until_idle()
    for metric, times in taken.items():
        emit(metric, round(percentile(times, 0.5), 3), n=REPEATS)


def ours(slurm: Slurm) -> None:
    """Start a job for two nodes repeatedly."""
    taken: dict[str, list[float]] = {"slurm_attached_s": [], "slurm_s": []}
    for _ in range(REPEATS):
        began = time.perf_counter()
        job = SlurmJob({"hosts": 2}, time_limit="0:10:00", idle=60)
        hosts = job.state(cached_path=None).hosts
        taken["slurm_attached_s"].append(time.perf_counter() - began)
        first_answer(hosts)
        taken["slurm_s"].append(time.perf_counter() - began)
        job.kill()
        slurm.wait_until_idle()
    for metric, times in taken.items():
        emit(metric, round(percentile(times, 0.5), 3), n=REPEATS, most=round(max(times), 3))


def replaced(slurm: Slurm) -> tuple[float, float]:
    """Measure the seconds from the loss of a node until a call fails, and until one on its replacement is answered."""
    job = SlurmJob({"hosts": 1}, spares=1, time_limit="0:10:00", idle=60)
    hosts = job.state(cached_path=None).hosts
    procs: Any = hosts.spawn_procs(per_host={"gpus": 1})
    probes = procs.spawn("probe", Probe)
    before = probes.here.call_one().get(PATIENCE)
    (lost,) = job.status().hosts
    allocation = slurm.say("squeue", "-h", "-o", "%i")
    began = time.perf_counter()
    slurm.lose(lost.name)
    try:
        while True:
            probes.here.call_one().get(PATIENCE)
    except actors.SupervisionError:
        told = time.perf_counter() - began
    procs.heal(hosts=job).get(PATIENCE)
    after = probes.here.call_one().get(PATIENCE)
    taken = time.perf_counter() - began
    (other,) = job.status().hosts
    same = slurm.say("squeue", "-h", "-o", "%i")
    if after == before or other.name == lost.name or same != allocation:
        raise AssertionError(f"{lost.name} of job {allocation} was replaced by {other.name} of {same}")
    job.kill()
    slurm.repair(lost.name)
    return told, taken


def replace(slurm: Slurm) -> None:
    """Lose a node repeatedly."""
    told, taken = zip(*(replaced(slurm) for _ in range(REPEATS)))
    emit("replace_told_s", round(percentile(told, 0.5), 3), n=REPEATS)
    emit("replace_s", round(percentile(taken, 0.5), 3), n=REPEATS, most=round(max(taken), 3))


def main() -> None:
    """Run the group named on the command line."""
    with engine(running) as slurm:
        said = slurm.say("sinfo", "--version")
        if PEER == LIMIT:
            version(salloc=said)
            run({"slurm": lambda: slurms_own(slurm)})
        else:
            version(monarch_kernel=__version__, on=said)
            actors.unhandled_fault_hook = lambda failure: None  # the loss is healed here
            run({"slurm": lambda: ours(slurm), "replace": lambda: replace(slurm)})
            actors.shutdown_context().get(PATIENCE)


if __name__ == "__main__":
    main()
