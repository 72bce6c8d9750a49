"""Programs of torchrun on the ranks of a mesh, which stay when the program ends, fails or loses a rank."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from monarch_kernel import actor as public
from monarch_kernel.actor import ActorError, ActorMesh, MeshFailure, ProcMesh, this_host
from monarch_kernel.spmd import SPMDActor
from tests.waiting import patience

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RANKS = 3
#: Adds ones over all ranks as often as it is told, and writes what it has seen.
PROGRAM = """
import json, os, sys, pathlib
import torch, torch.distributed as dist
from beside import NAME

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
steps_done = 0
while steps_done < steps:
    total = torch.ones(100)
    dist.all_reduce(total)
    steps_done += 1
    (folder / f"at-{rank}").touch()
seen = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME")}
seen |= {"argv": sys.argv[1:], "name": NAME, "main": __name__, "total": total[0].item()}
(folder / f"seen-{rank}").write_text(json.dumps(seen))
if rank == 1 and sys.argv[3:] == ["fails"]:
    sys.exit(3)
if sys.argv[3:] == ["tidy"]:
    dist.destroy_process_group()
    sys.exit(0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script, with a module beside it."""
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def procs() -> ProcMesh:
    return this_host().spawn_procs({"gpus": RANKS}, name="programs", preload=("torch",))


@pytest.fixture
def spmd(procs: ProcMesh) -> ActorMesh[SPMDActor]:
    return procs.spawn("spmd", SPMDActor)


def start(spmd: ActorMesh[SPMDActor], *args: object) -> public.Future[public.ValueMesh[bool]]:
    address, port = spmd.slice(gpus=0).get_host_port.call_one(None).get(patience(20))
    return spmd.main.call(address, port, [str(arg) for arg in args])


def test_a_program_runs_as_under_torchrun_and_again(spmd: ActorMesh[SPMDActor], program: Path, tmp_path: Path) -> None:
    for how in ("tidy", "leaves its group behind"):
        assert set(start(spmd, program, tmp_path, 2, how).get(patience(60)).values()) == {True}
        seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(RANKS)]
        for rank, one in enumerate(seen):
            assert (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) == (str(rank), str(rank), str(RANKS))
            assert (one["LOCAL_WORLD_SIZE"], one["ROLE_NAME"], one["main"]) == (str(RANKS), "rank", "__main__")
            assert (one["name"], one["total"]) == ("beside", RANKS)
            assert one["argv"] == [str(tmp_path), "2", how]


def test_a_program_that_fails_is_told_and_the_ranks_run_the_next_one(
    spmd: ActorMesh[SPMDActor], program: Path, tmp_path: Path
) -> None:
    with pytest.raises(ActorError, match=r"program\.py exited with 3 on rank 1") as raised:
        start(spmd, program, tmp_path, 1, "fails").get(patience(60))
    assert [one.rank for one in raised.value.failures] == [1]
    with pytest.raises(ActorError, match="No script or module specified"):
        start(spmd, "-m").get(patience(20))
    assert all(start(spmd, "-m", "platform").get(patience(20)).values())  # a module that prints a line
    assert all(start(spmd, program, tmp_path, 1, "tidy").get(patience(60)).values())


def test_the_ranks_that_a_death_leaves_run_the_program_again(
    procs: ProcMesh, spmd: ActorMesh[SPMDActor], program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "unhandled_fault_hook", lambda failure: None)
    running = start(spmd, program, tmp_path, 10**9)
    deadline = time.monotonic() + patience(60)
    while not (tmp_path / "at-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(procs.slice(gpus=1).pids().get(0), signal.SIGKILL)
    with pytest.raises(MeshFailure, match="killed by SIGKILL"):
        running.get(patience(60))
    procs.heal().get(patience(60))
    assert all(start(spmd, program, tmp_path, 1, "tidy").get(patience(60)).values())
