"""Processes that others have started, read from outside: real ones of torchrun, and what is not to be read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.debugger.controller.hang import verdict
from monarch_kernel.debugger.outside.outside_report import Look, LookRequest, look, parse_pids
from monarch_kernel.debugger.outside.processes import (
    OutsideError,
    _refusal,
    as_json,
    check_ours,
    figures,
    from_json,
    launched_rank_in,
    named,
    permission_remedy,
    read_processes,
)
from monarch_kernel.debugger.outside.remote_exec import remote_exec_note
from tests.conftest import alive, children, needs, wait_until
from tests.waiting import patience

# Rank 1 never comes to the second collective.
PROGRAM = """\
import time
import torch
import torch.distributed as dist

def load():
    time.sleep(1000)

def step(tensor):
    dist.all_reduce(tensor)

dist.init_process_group("gloo")
step(torch.ones(2))
if dist.get_rank() == 1:
    load()
step(torch.ones(2))
"""
LOAD, STEP = 6, 9


def hangs(seen: Look) -> bool:
    """Whether each rank of the program is where it stays, and was there at the first reading, too."""
    places = [found.place for found in seen.evidence.values()]
    stays = seen.verdict.decided and [place and place.line for place in places] == [STEP, LOAD, STEP]
    return stays and "makes no progress" in seen.verdict.sentence


def until(request: LookRequest, good: Callable[[Look], bool], deadline: float = 60.0) -> Look:
    """Look again and again, until what is seen is what the processes are about to do."""
    end = time.monotonic() + patience(deadline)
    while True:
        try:
            found: Look | None = look(request)
        except OutsideError as error:  # torchrun has not started its workers yet
            found, why = None, str(error)
        else:
            why = found.text()
        if found is not None and good(found):
            return found
        assert time.monotonic() < end, why


@pytest.fixture(scope="module")
def torchrun(runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A job of three ranks that hangs. It ends before what ``runtime`` checks for leaks."""
    needs("torch")
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "train.py"]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield job
        finally:
            below = children(job.pid)
            for pid in below:
                os.kill(pid, signal.SIGKILL)
            job.kill()
            job.wait()
            wait_until(lambda: not any(map(alive, below)), "the job is gone")


def test_a_hang_under_torchrun_is_explained_from_outside(torchrun: subprocess.Popen[bytes]) -> None:
    found = until(LookRequest(torchrun=torchrun.pid, apart=0.3), hangs)
    said = found.verdict
    assert said.ranks == (1,) and said.likely
    assert said.sentence == (
        f"It seems that ranks 0, 2 wait in all_reduce of the default group at train.py:{STEP}; rank 1 has not entered "
        f"it: it makes no progress at train.py:{LOAD} in load."
    )
    apart = re.search(r"two readings, (\d+\.\d) s apart", said.notes[0])
    assert "from outside (py-spy)" in said.notes[0] and apart is not None and float(apart[1]) >= 0.3
    assert [each.place.rank for each in found.processes.values()] == [0, 1, 2] and found.world == 3
    assert "3 ranks of torchrun" in found.stacks.text() and "[0,2]" in found.stacks.text()
    assert f"train.py:{LOAD}" in found._repr_html_()
    # What travels between nodes is what was read, and of variables only those of calls of torch.distributed.
    read = list(found.processes.values())
    assert from_json(as_json(read)) == read
    kept = {
        local["name"]
        for thread in json.loads(read[0].second.dump)
        for frame in thread["frames"]
        for local in frame["locals"]
    }
    assert kept <= {"args", "kwargs", "src", "dst"}


def test_a_command_prints_it_as_data(torchrun: subprocess.Popen[bytes]) -> None:
    until(LookRequest(torchrun=torchrun.pid, apart=0.3), hangs)
    line = [sys.executable, "-m", "monarch_kernel", "look", "--torchrun", str(torchrun.pid), "--json", "--apart", "0.3"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patience(60), check=True)
    found = json.loads(done.stdout)
    assert found["verdict"]["ranks"] == [1] and found["world"] == 3
    assert [(each["rank"], each["line"]) for each in found["processes"]] == [(0, STEP), (1, LOAD), (2, STEP)]
    assert {each["pid"] for each in found["processes"]} == children(torchrun.pid)


def test_a_stopped_rank_and_native_frames(torchrun: subprocess.Popen[bytes]) -> None:
    found = until(LookRequest(torchrun=torchrun.pid, apart=0.1), hangs)
    stopped = found.processes[1].pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_until(lambda: (now := figures(stopped)) is not None and now.state == "T", "it is stopped")
        pids = ",".join(str(each.pid) for each in found.processes.values())
        again = look(LookRequest(pids=pids, native=True, apart=0.1))
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert again.verdict.kind == verdict.SILENT and again.verdict.ranks == (1,)
    assert "rank 1 is not running (it is stopped (SIGSTOP))" in again.verdict.sentence
    assert "native:" in again.stacks.text()


def test_what_is_not_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(OutsideError, match=r"^give one of --pids 123,456, --torchrun \[PID\] and --slurm JOB$"):
        look(LookRequest())
    with pytest.raises(OutsideError, match="give one of"):
        look(LookRequest(pids="1", slurm="2"))
    with pytest.raises(OutsideError, match=r"^--pids takes numbers of processes, such as 123,456, not 'x'$"):
        parse_pids("12,x")
    with pytest.raises(OutsideError, match=r"^there is no process 4194999 on this machine$"):
        check_ours(4194999)
    sleeping = subprocess.Popen(["sleep", "1000"])
    try:
        with pytest.raises(OutsideError, match=rf"process {sleeping.pid} does not run Python"):
            wait_until(lambda: named([sleeping.pid]), "it runs")
        with pytest.raises(OutsideError, match=rf"process {sleeping.pid} has no workers of torchrun"):
            look(LookRequest(torchrun=sleeping.pid))
    finally:
        sleeping.kill()
        sleeping.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_processes_of_others_are_not_read() -> None:
    other = subprocess.Popen(["sleep", "1000"], user=65534)
    try:
        with pytest.raises(OutsideError, match=rf"process {other.pid} belongs to user \w+; only processes of your own"):
            look(LookRequest(pids=str(other.pid)))
    finally:
        other.kill()
        other.wait()


def test_a_single_process_and_one_that_ends() -> None:
    waiting = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        found = until(
            LookRequest(pids=str(waiting.pid), apart=0.0), lambda seen: seen.verdict.kind == verdict.NOTHING, 20
        )
        assert found.verdict.sentence.startswith("No rank is seen to wait for another")
        assert "numbered in the order of their pids" in found.notes[0]
        places = named([waiting.pid])
    finally:
        waiting.kill()
        waiting.communicate()
    gone = Look("it", read_processes(places, apart=0.0))
    assert gone.verdict.kind == verdict.DEAD and "it has ended" in gone.verdict.sentence


def test_a_refusal_says_what_to_do() -> None:
    denied = "Error: Permission Denied: Try running again with elevated permissions"
    assert _refusal(denied) == permission_remedy("py-spy", "read")
    assert _refusal("Error: No such process") == "py-spy said: No such process"
    limited = permission_remedy("py-spy", "read", "1")
    assert "kernel.yama.ptrace_scope is 1" in limited and "kernel.yama.ptrace_scope=0" in limited
    assert all("SYS_PTRACE" in permission_remedy("py-spy", "read", scope) for scope in ("", "0"))


def test_places_by_the_variables_of_launchers() -> None:
    place = launched_rank_in(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "j",
            "KEY": "s",
        }
    )
    assert (place.rank, place.world, place.local, place.elastic) == (5, 8, (4, 5, 6, 7), True)
    assert "s" not in place
    place = launched_rank_in({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    assert (place.rank, place.world, place.step, place.elastic) == (3, 4, "0", False)
    assert launched_rank_in({"OMPI_COMM_WORLD_RANK": "2"}).rank == 2 and launched_rank_in({}).rank == -1


def test_remote_exec_is_named_where_both_sides_have_it() -> None:
    pid = os.getpid()
    read = read_processes(named([pid]), apart=0.0)
    own = read[0].python
    assert own == sys.version_info[:2]
    assert remote_exec_note(read, (3, 13)) == ()
    assert bool(remote_exec_note(read, (3, 14))) == (own == (3, 14))
