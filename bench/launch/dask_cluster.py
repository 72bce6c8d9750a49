"""dask-jobqueue: ``SLURMCluster`` with a Dask worker in each of two Slurm jobs."""

# The peer is installed in a separate environment, which no checker sees.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import tempfile
import time

import dask_jobqueue
import distributed

from bench.measure import QUICK, emit, percentile, run, version

REPEATS = 1 if QUICK else 3
PATIENCE = 120


def once() -> tuple[float, float]:
    """Measure the seconds until both workers are there, and until both have answered."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        began = time.perf_counter()
        with (
            dask_jobqueue.SLURMCluster(
                cores=4,
                processes=1,
                memory="1GB",
                walltime="00:10:00",
                job_extra_directives=["--exclusive", "--nodes=1"],
                log_directory=folder,
                local_directory=folder,
                scheduler_options={"host": "127.0.0.1", "dashboard_address": None},
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            cluster.scale(jobs=2)
            client.wait_for_workers(2, timeout=PATIENCE)
            attached = time.perf_counter()
            if len(set(client.run(os.getpid).values())) != 2:
                raise AssertionError("not two workers have answered")
            answered = time.perf_counter()
    return attached - began, answered - began


def slurm() -> None:
    """Start one cluster after the other."""
    attached, answered = zip(*(once() for _ in range(REPEATS)))
    emit("slurm_attached_s", round(percentile(attached, 0.5), 3), n=REPEATS)
    emit("slurm_s", round(percentile(answered, 0.5), 3), n=REPEATS)


if __name__ == "__main__":
    version(dask_jobqueue=dask_jobqueue.__version__, distributed=distributed.__version__)
    run({"slurm": slurm})
