"""Jobs that torchrun and other launchers start, and a notebook that joins them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from monarch_kernel.engines.join.announcements import announcements
from monarch_kernel.engines.join.jobs import JoinableJob, jobs_of
from monarch_kernel.engines.join.rank_machines import refreshed
from tests.conftest import needs as needs
from tests.conftest import wait_until
from tests.join.torchrun import Torchrun, loaded
from tests.kernel import harness
from tests.kernel.conftest import (  # fixtures
    jupyter_folders,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    start_kernel,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
from tests.kernel.harness import Kernel, stop_kernel

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = Path(__file__).parent / "train.py"


class Job:
    """A job of torchrun whose ranks are prepared.

    Args:
        name: of the job.
        command: starts it; or what follows ``python -m monarch_kernel.join``, for a torchrun that is forked.
        folder: where its output goes, and where the file will be that ends it.
        ranks: how many it has.
        forked: whether the torchrun is forked.
    """

    def __init__(self, name: str, command: list[str], folder: Path, ranks: int, forked: bool = False) -> None:
        self.name = name
        self.gate = folder / f"{name}.ends"
        self._log = folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MONARCH_KERNEL_JOIN": name}
        # Else ranks that torchrun starts again read in its store where those before them listened (pytorch#135712).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if forked:
            self.process = Torchrun(ranks, command, self._log, environment)
        else:
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until(lambda: len(self.pids()) == ranks or self.process.poll() is not None, "the ranks are there", 60)
            assert self.process.poll() is None, self.log
        except BaseException:
            self.kill()
            raise

    def pids(self) -> list[int]:
        """The processes of its ranks, by rank."""
        ranks = [each for each in announcements() if each.name == self.name]
        return [each.pid for each in sorted(ranks, key=lambda each: each.identity.rank)]

    def kill(self) -> None:
        """End it with all its ranks, if it has not ended."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def end(self) -> str:
        """Let it come to its end; returns what it has written."""
        self.gate.touch()
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
        assert code == 0, self.log
        return self.log


def listed(name: str) -> list[JoinableJob]:
    """The joinable jobs of this name: one, if all of its ranks are taken for the same job's."""
    return [job for job in jobs_of(refreshed()) if job.name == name]


def wait_for_ranks(name: str) -> None:
    """Wait until a job with two ranks on this machine is listed, and they know their numbers."""

    def there() -> bool:
        ranks = [each.identity for job in listed(name) for each in job.ranks]
        return [(each.rank, each.world, each.local_rank) for each in ranks] == [(0, 2, 0), (1, 2, 1)]

    wait_until(there, "both ranks know which they are", 90)
    assert len(listed(name)) == 1


@pytest.fixture(scope="session")
def torch_loaded() -> Iterator[None]:
    """A process from which torchruns are forked."""
    with loaded():
        yield


@pytest.fixture
def start_job(torch_loaded: None, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs of a torchrun that is forked, or with ``ranks=0`` a single process; those that have not ended by
    themselves are ended, and must end well."""
    with _jobs(tmp_path, forked=True) as start:
        yield start


@pytest.fixture
def start_torchrun(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """The same, started as users do, which takes longer."""
    with _jobs(tmp_path, forked=False) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_job(torch_loaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """As ``start_job``, for jobs of all tests of a file."""
    with _jobs(tmp_path_factory.mktemp("job"), forked=True) as start:
        yield start


@contextmanager
def _jobs(folder: Path, forked: bool) -> Generator[Callable[..., Job]]:
    started: list[Job] = []

    def start(name: str, *args: str, ranks: int = 2, script: Path = TRAIN, options: Sequence[str] = ()) -> Job:
        command = [*options, str(script), str(folder / f"{name}.ends"), *args]
        fork = forked and ranks > 0
        if not fork:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
            command = [sys.executable, *torchrun, "-m", "monarch_kernel.join", *command]
        job = Job(name, command, folder, ranks or 1, fork)
        started.append(job)
        return job

    try:
        yield start
        for job in started:
            if job.process.poll() is None:
                job.end()
    finally:
        for job in started:
            job.kill()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """A notebook, for a file's tests."""
    kernel = harness.start_kernel()
    try:
        yield kernel
    finally:
        stop_kernel(kernel)
