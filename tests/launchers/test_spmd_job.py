"""Programs written for torchrun as jobs, by Monarch's names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch_kernel.errors import ActorError
from monarch_kernel.job import job_loads
from monarch_kernel.job.spmd import SPMDJob, serve
from monarch_kernel.launchers.spmd_job import TorchrunCommand, app_command, torchrun_command
from tests.otheruser import shared as shared
from tests.waiting import patience

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


MET = """
import os, sys, torch.distributed as dist
from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.job.spmd import StoreJob

class Named(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

# The ranks are forked from one process, which has loaded torch: that is most of what each would compute.
here, how, *numbers = sys.argv[1:]
pids = []
for rank in map(int, numbers):
    pids.append(os.fork())
    if pids[-1] == 0:
        break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])]
    for pid in pids[1:]:
        if how == "keyless":
            os.kill(pid, 9)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(*codes)
    sys.exit()
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 2))
for stream, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(os.path.join(here, f"{name}{rank}"), os.O_CREAT | os.O_WRONLY, 0o600), stream)
store = dist.FileStore(os.path.join(here, "store"), 4)
job = StoreJob.from_store(store, name="boxes", **({"transport": "tcp"} if how == "keyless" else {}))
assert (job is None) == (rank != 0)
if job is not None:
    assert not job.active
    hosts = job.state().boxes
    pids = hosts.spawn_procs({"gpus": 2}).spawn("named", Named).pid.call().get()
    print(pids.extent, len(set(pids.values())), job.active, job.can_run(job))
    job.kill()
    print(len(job.state().boxes.spawn_procs().spawn("named", Named).pid.call().get()))
store.set(f"done{rank}", "1")
store.wait([f"done{other}" for other in range(4)])
"""


def met(folder: Path, how: str, *ranks: int) -> list[tuple[int, str, str]]:
    """Exit code and output of these ranks of a program on two hosts, which has two on each."""
    (folder / "met.py").write_text(MET)
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MONARCH_KERNEL_KEY_FILE": str(folder / "no.key")}
    program = subprocess.Popen(
        [sys.executable, str(folder / "met.py"), str(folder), how, *map(str, ranks)],
        env={**os.environ, **sizes},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        codes, _ = program.communicate(timeout=patience(60))
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        raise
    written = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in ranks]
    return [(int(code), out, err) for code, (out, err) in zip(codes.split(), written, strict=True)]


def test_the_hosts_of_a_program_that_torchrun_has_started(tmp_path: Path, shared: Path) -> None:
    ended = met(tmp_path, "met", 0, 1, 2, 3)
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert ended[0][1].startswith("{hosts: 2, gpus: 2} 4 True False") and ended[0][1].endswith("2\n")
    assert os.listdir(shared) == []


def test_a_worker_that_cannot_start_is_told_by_the_first_rank(tmp_path: Path) -> None:
    (code, _, said), _other = met(tmp_path, "keyless", 0, 2)  # the first rank of each host
    assert code == 1 and "2 of 2 workers could not start" in said and "no.key" in said


def test_a_job_for_torchrun_is_found_again(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node=2", "train.py"]
    job = serve(command, "local_cwd")
    assert job.apply_id is None and not job.active
    assert len(job.state().hosts) == 1 and job.active
    again = job_loads(job.dumps())
    assert isinstance(again, SPMDJob) and again.can_run(serve(command)) and again.apply_id == job.apply_id
    assert not again.can_run(serve(["torchrun", "other.py"]))
    job.kill()
    with pytest.raises(ValueError, match="without options"):
        serve(command, "local_cwd", {"log_dir": "/tmp"})


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
