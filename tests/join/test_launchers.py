"""Ranks of mpirun and srun: each knows which of which job it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_kernel.engines.join.jobs import JoinableJob, jobs_of
from monarch_kernel.engines.join.rank_machines import refreshed
from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import ROOT
from tests.join.test_remote import elsewhere, far_notebook
from tests.kernel.harness import Kernel
from tests.launchers.slurm import Slurm, slurm
from tests.waiting import patience

__all__ = ["far_notebook", "slurm"]
HERE = Path(__file__).parent


@contextmanager
def running(folder: Path, name: str, ranks: int, command: Sequence[str]) -> Generator[JoinableJob]:
    """A job while it runs; its program ends when the file ``ends`` is in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONARCH_KERNEL_JOIN": name}
    found: list[JoinableJob] = []

    def there() -> bool:
        found[:] = [job for job in jobs_of(refreshed()) if job.name == name and len(job.ranks) == ranks]
        return bool(found) or process.poll() is not None

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until(there, "the ranks are there", 60)
            assert found, (folder / "log").read_text()
            yield found[0]
            (folder / "ends").touch()
            assert process.wait(patience(60)) == 0, (folder / "log").read_text()
        finally:
            (folder / "ends").touch()
            if process.poll() is None:
                process.terminate()
                process.wait(patience(30))


def waiting(folder: Path) -> list[str]:
    return [sys.executable, "-m", "monarch_kernel.join", str(HERE / "waiting.py"), str(folder / "ends")]


def test_mpirun(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (tests/prepare.sh)")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    with running(tmp_path, "by-mpirun", 2, [*mpirun, *waiting(tmp_path)]) as job:
        assert [(each.identity.rank, each.identity.world, each.identity.local_rank) for each in job.ranks] == [
            (0, 2, 0),
            (1, 2, 1),
        ]
        assert job.engine == "MPI" and job.world == 2


def test_srun_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    with running(tmp_path, "by-srun", 2, ["srun", "-N", "2", "-n", "2", *waiting(tmp_path)]) as job:
        assert [(each.identity.rank, each.identity.world, each.identity.local_rank) for each in job.ranks] == [
            (0, 2, 0),
            (1, 2, 0),
        ]
        assert job.engine == "Slurm" and job.launch.endswith(".0")


def test_a_notebook_joins_the_nodes_of_a_slurm_job(slurm: Slurm, far_notebook: Kernel, tmp_path: Path) -> None:
    with running(tmp_path, "on-nodes", 2, ["srun", "-N", "2", "-n", "2", *waiting(tmp_path)]):
        number = slurm.say("squeue", "-h", "-t", "R", "-o", "%i")
        assert "'on-nodes'" in far_notebook.run("%mesh join on-nodes").evalue  # not on this machine
        assert "ranks=2" in shown(far_notebook.ok(f"%mesh jobs --slurm {number}"))
        assert "2 ranks (ranks=2)" in shown(far_notebook.ok(f"%mesh join on-nodes --slurm {number}"))
        assert "[0-1] 2" in shown(far_notebook.ok("%%mesh\n1 + 1"))
        assert "waiting.py" in until(far_notebook, "%mesh stacks", r"\[0-1\].*\n.*waiting\.py")
        far_notebook.ok("%mesh leave")
        command = [
            *elsewhere(),
            sys.executable,
            "-m",
            "monarch_kernel",
            "report",
            "on-nodes",
            "--slurm",
            number,
            "--json",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patience(90)
        )
        assert done.returncode == 0, done.stderr
        assert [each["rank"] for each in json.loads(done.stdout)["job"]["ranks"]] == [0, 1]
    slurm.wait_until_idle()
