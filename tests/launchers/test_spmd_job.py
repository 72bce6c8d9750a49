"""Programs written for torchrun as jobs, by Monarch's names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch_kernel.errors import ActorError
from monarch_kernel.job.spmd import serve
from monarch_kernel.launchers.spmd_job import TorchrunCommand, app_command, torchrun_command

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = os.environ["RANK"]
with open(os.path.join(sys.argv[1], f"{rank}-{os.getpid()}"), "w") as file:
    file.write(f"{int(total)} {os.environ['LOCAL_RANK']} {os.environ['WORLD_SIZE']}")
if sys.argv[2:] == ["fails"] and rank == "1":
    raise ValueError("of the program")
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is written down in the working folder, as Monarch's are."""
    monkeypatch.chdir(tmp_path)


def test_a_program_runs_again_on_the_hosts_of_the_job(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(PROGRAM)
    (out := tmp_path / "out").mkdir()
    job = serve(["torchrun", "--standalone", "--nproc-per-node=2", str(script), str(out)], scheduler="process")
    try:
        job.run_spmd()
        job.run_spmd()
        written = sorted(out.iterdir())
        assert [each.name.split("-")[0] for each in written] == ["0", "0", "1", "1"]
        assert {each.read_text() for each in written} == {"2 0 2", "2 1 2"}
    finally:
        job.kill()


def test_an_error_of_the_program_names_the_rank(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(PROGRAM)
    job = serve(["torchrun", "--nproc-per-node", "2", str(script), str(tmp_path), "fails"])
    with pytest.raises(ActorError, match="of the program"):
        job.run_spmd()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("torchrun train.py", TorchrunCommand(("train.py",))),
        ("/bin/torchrun --nnodes=2 --nproc_per_node 4 train.py -x 1", TorchrunCommand(("train.py", "-x", "1"), 4, 2)),
        (
            "python -m torch.distributed.run --rdzv-backend c10d --standalone -m pkg.train --nnodes 3",
            TorchrunCommand(("-m", "pkg.train", "--nnodes", "3")),
        ),
    ],
)
def test_command_lines_of_torchrun(words: str, found: TorchrunCommand) -> None:
    assert torchrun_command(words.split()) == found


def test_an_app_of_torchx() -> None:
    role = SimpleNamespace(
        entrypoint="torchrun", args=["--nproc-per-node", "2", "a.py"], num_replicas=3, env={"A": "b"}
    )
    assert app_command(SimpleNamespace(roles=[role])) == TorchrunCommand(("a.py",), 2, 3, {"A": "b"})


@pytest.mark.parametrize(
    ("words", "scheduler", "said"),
    [
        ("python train.py", "local", "begins with torchrun"),
        ("torchrun --nproc-per-node auto train.py", "local", "number"),
        ("torchrun --nproc-per-node 2", "local", "names no program"),
        ("torchrun --nnodes 2 train.py", "local", "one host"),
        ("torchrun train.py", "mast_conda", "no scheduler 'mast_conda'"),
    ],
)
def test_what_cannot_be_served_is_said(words: str, scheduler: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        serve(words.split(), scheduler=scheduler)
