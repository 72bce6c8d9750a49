"""Jobs of Accelerate, DeepSpeed and Lightning, whose own launchers start the ranks, in a notebook."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.environments import EnvironmentFailed, python_above
from tests.conftest import wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import Job, listed, needs, wait_for_ranks
from tests.join.test_install import python
from tests.kernel.harness import Kernel
from tests.ports import free_port

__all__ = ["python"]
pytestmark = pytest.mark.torch
ACCELERATE = Path(__file__).parent / "accelerate_train.py"
DEEPSPEED = Path(__file__).parent / "deepspeed_train.py"
LIGHTNING = Path(__file__).parent / "lightning_train.py"


def look_stop_and_leave(notebook: Kernel, job: Job, program: Path, line: str) -> None:
    """What a notebook does in a job; at that line of its program, ``loss`` is there."""
    assert "2 ranks (ranks=2)" in shown(notebook.ok(f"%mesh join {job.name}"))
    wait_until(lambda: notebook.run("%%mesh\nassert losses").status == "ok", "it trains", 60)
    notebook.ok("%%mesh -o seen\nimport torch, torch.distributed as dist\n(dist.get_rank(), len(losses) > 0)")
    assert "[(0, True), (1, True)]" in shown(notebook.ok("list(seen.values())"))
    out = notebook.ok("%%mesh --at-step\nhow_many = torch.ones(1)\ndist.all_reduce(how_many)\nprint(how_many.item())")
    assert "[0-1] 2.0" in shown(out)
    number = next(at for at, text in enumerate(program.read_text().split("\n"), 1) if text.strip() == line)
    notebook.ok(f"%mesh break {program}:{number}")
    until(notebook, "%mesh debug list", "0-1")
    assert f"{program.name}:{number}" in shown(notebook.ok("%mesh debug where"))
    assert "loss = tensor" in shown(notebook.ok("%mesh debug print loss"))
    # Both have stopped in the same step, where what they train is equal, though each has data of its own.
    assert "2 distinct values" not in shown(notebook.ok("%mesh diff model"))
    assert "2 distinct values" in shown(notebook.ok("%mesh diff losses"))
    notebook.ok("%mesh clear\n%mesh debug continue")
    assert "goes on" in shown(notebook.ok("%mesh leave"))


@contextmanager
def running(name: str, command: list[str], folder: Path) -> Generator[Job]:
    """A job of two ranks, which must come to a good end."""
    job = Job(name, command, folder, 2)
    try:
        wait_for_ranks(name)
        yield job
        assert job.end().count("ends after") == 2
    finally:
        job.kill()


def test_accelerate_launch(notebook: Kernel, tmp_path: Path) -> None:
    needs("accelerate")
    # Its launcher for GPUs; the program asks for the CPU itself.
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu", "--num_processes", "2"]
    command = [*accelerate, "--main_process_port", "0", "-m", "monarch_kernel.join", str(ACCELERATE)]
    with running("accelerated", [*command, str(tmp_path / "accelerated.ends")], tmp_path) as job:
        look_stop_and_leave(notebook, job, ACCELERATE, "optimizer.zero_grad()")


def test_accelerate_launch_by_mpirun_on_cpus(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("accelerate")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (tests/prepare.sh)")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    accelerate = [str(python), "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command = [*accelerate, "--mpirun_hostfile", str(tmp_path / "hosts"), str(ACCELERATE)]
    with running("by-mpi", [*command, str(tmp_path / "by-mpi.ends")], tmp_path):
        assert listed("by-mpi")[0].engine == "MPI"


def test_deepspeed(notebook: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        python = python_above("deepspeed")
    except EnvironmentFailed as why:
        pytest.skip(str(why))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = [str(python), "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    deepspeed += ["--master_port", str(free_port())]
    command = [*deepspeed, "--module", "monarch_kernel.join", str(DEEPSPEED), str(tmp_path / "sped.ends")]
    with running("sped", command, tmp_path) as job:
        look_stop_and_leave(notebook, job, DEEPSPEED, "model.backward(loss)")


def test_lightning_starts_rank_1_from_rank_0(notebook: Kernel, tmp_path: Path) -> None:
    needs("pytorch_lightning")
    gate = str(tmp_path / "lightning.ends")
    command = [sys.executable, "-m", "monarch_kernel.join", "--name", "lightning", str(LIGHTNING), gate]
    with running("lightning", command, tmp_path) as job:
        look_stop_and_leave(notebook, job, LIGHTNING, "return loss")


def test_lightning_by_the_variable_alone(python: Path, tmp_path: Path) -> None:
    needs("pytorch_lightning")
    with running("light", [str(python), str(LIGHTNING), str(tmp_path / "light.ends")], tmp_path):
        assert len(listed("light")) == 1
