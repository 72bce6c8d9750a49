"""Processes of Python 3.14 that nobody has prepared become a mesh while they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from monarch_kernel.debugger.outside.outside_report import LookRequest, chosen_here, look
from monarch_kernel.debugger.outside.processes import OutsideError
from monarch_kernel.debugger.outside.remote_exec import prepare_running
from monarch_kernel.engines.join.announcements import join_folder
from tests.conftest import children, wait_until
from tests.engines.test_tools import shown, until
from tests.join.conftest import ROOT, listed
from tests.kernel.harness import Kernel
from tests.launchers.slurm import Slurm, slurm
from tests.waiting import patience

__all__ = ["slurm"]
HERE = Path(__file__).parent
LOOP = HERE / "plain_loop.py"
LINE = LOOP.read_text().split("\n").index("    time.sleep(0.02)") + 1
AGENT = """
import os, subprocess, sys
told = {"TORCHELASTIC_RUN_ID": "agent", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(2)
]
sys.exit(any([each.wait() for each in ranks]))
"""


class Plain:
    """Programs that are started as anybody would.

    Args:
        folder: for their output and for the file that ends them.
        commands: with their variables.
    """

    def __init__(self, folder: Path, commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
        self.gate = folder / "ends"
        self._logs = [folder / f"{index}.log" for index in range(len(commands))]
        self.processes: list[subprocess.Popen[bytes]] = []
        for (command, variables), log in zip(commands, self._logs, strict=True):
            with log.open("wb") as file:
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}
                environment = {name: value for name, value in environment.items() if value}
                self.processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))

    @property
    def pids(self) -> str:
        """As a line names them."""
        return ",".join(str(each.pid) for each in self.processes)

    def log(self, index: int = 0) -> str:
        """What one has written."""
        return self._logs[index].read_text()

    def end(self) -> list[str]:
        """Let all come to their ends; what they have written."""
        self.gate.touch()
        codes = [each.wait(patience(60)) for each in self.processes]
        logs = [self.log(index) for index in range(len(codes))]
        assert not any(codes), logs
        return logs


@pytest.fixture(scope="session")
def python() -> str:
    """A Python 3.14."""
    done = subprocess.run([HERE / "python314.sh"], capture_output=True, text=True, timeout=patience(300))
    if done.returncode:
        pytest.skip(f"there is no Python 3.14: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.stdout.split()[-1]


@pytest.fixture
def start(python: str, tmp_path: Path) -> Iterator[Callable[..., Plain]]:
    """Start programs, by default two ranks; they are ended."""
    started: list[Plain] = []

    def started_with(*commands: tuple[list[str], dict[str, str]]) -> Plain:
        loop = [python, str(LOOP), str(tmp_path / "ends")]
        ranks = [(loop, {"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
        started.append(Plain(tmp_path, commands or ranks))
        return started[-1]

    yield started_with
    for each in started:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            each.end()
        for process in each.processes:
            process.kill()
            process.wait()


def runs(programs: Plain) -> None:
    """Wait until the programs are in their own code: before, Python itself has just begun."""

    def there() -> bool:
        with suppress(OutsideError):
            return "plain_loop.py" in look(LookRequest(pids=programs.pids, apart=0.0)).stacks.text()
        return False

    wait_until(there, "they run", 30)


def test_they_are_joined_looked_into_stopped_stepped_and_left(start: Callable[..., Plain], notebook: Kernel) -> None:
    programs = start()
    runs(programs)
    said = shown(notebook.ok(f"%mesh look --pids {programs.pids} --apart 0"))
    assert "run Python 3.14" in said and f"%mesh join NAME --pids {programs.pids} makes them a mesh" in said
    assert "2 ranks (ranks=2)" in shown(notebook.ok(f"%mesh join plain --pids {programs.pids}"))
    assert "plain_loop.py" in until(notebook, "%mesh stacks", r"\[0-1\].*\n.*plain_loop\.py")
    assert "[0-1] (3, 14)" in shown(notebook.ok("%%mesh\n__import__('sys').version_info[:2]"))
    notebook.ok(f"%mesh break {LOOP}:{LINE}")
    until(notebook, "%mesh debug list", "0-1")
    assert "double = " in shown(notebook.ok("%mesh debug print double"))
    assert f"plain_loop.py:{LINE + 1}" in shown(notebook.ok("%mesh debug next"))
    assert "double: " in shown(notebook.ok("%mesh diff double"))
    notebook.ok("%mesh clear\n%mesh debug continue")
    assert "goes on" in shown(notebook.ok("%mesh leave"))
    assert all("ends after" in log for log in programs.end())


def test_one_that_has_only_just_been_started_is_waited_for(
    start: Callable[..., Plain], python: str, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    # Its loader waits for a library to be written, before its Python has an interpreter; it does without an empty one.
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LD_PRELOAD": str(held)}
    programs = start(([python, str(LOOP), str(tmp_path / "ends")], environment))
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(prepare_running, "young", chosen_here(programs.pids, None))
        wait_until(lambda: preparing.done() or any(map(_retries, children())), "it was not found, and is tried again")
        assert not preparing.done()
        held.write_bytes(b"")
        assert preparing.result(patience(60)).refused == []


def _retries(pid: int) -> bool:
    """Whether a process is the one that calls ``sys.remote_exec``, and waits until it does so again."""
    with suppress(OSError):
        if "remote_exec" in Path(f"/proc/{pid}/cmdline").read_text():
            return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()
    return False


def test_a_program_gets_no_name_and_no_word_of_ours(start: Callable[..., Plain]) -> None:
    programs = start()
    runs(programs)
    assert prepare_running("untouched", chosen_here(programs.pids, None)).refused == []
    assert all(log.startswith("ends after") and log.endswith(" []\n") for log in programs.end())
    with join_folder() as folder:
        assert not [name for name in folder.names() for pid in programs.pids.split(",") if name.startswith(f"{pid}-")]


def test_one_that_is_in_the_kernel_is_joined_when_it_comes_back(
    start: Callable[..., Plain], notebook: Kernel, python: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    loop = [python, str(LOOP), str(tmp_path / "ends")]
    ranks = [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}]
    programs = start((loop, ranks[0]), ([*loop, str(tmp_path / "fifo")], ranks[1]))
    waiting = programs.processes[1].pid
    runs(programs)
    wait_until(lambda: "waits" in programs.log(1), "it waits", 30)
    said = shown(notebook.ok(f"%mesh join waits --pids {programs.pids}"))
    assert (
        f"Rank 1 (process {waiting}) cannot be joined: its main thread has not come back to Python within 5 s" in said
    )
    assert "2 ranks (ranks=2)" in said and "not there: 1" in said
    (tmp_path / "fifo").write_text("go")
    until(notebook, "%mesh stacks", r"\[0-1\]")
    notebook.ok("%mesh leave")
    programs.end()


def test_workers_of_an_agent_by_the_command(start: Callable[..., Plain], python: str, tmp_path: Path) -> None:
    agent = start(([sys.executable, "-c", AGENT, python, str(LOOP), str(tmp_path / "ends")], {}))
    line = [sys.executable, "-m", "monarch_kernel", "join", "prepare", "agents", "--torchrun", agent.pids, "--json"]

    def prepared() -> bool:
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        return done.returncode == 0 and len(json.loads(done.stdout)["prepared"]) == 2

    wait_until(prepared, "both ranks are there and prepared", 60)
    (job,) = listed("agents")
    assert sorted((each.identity.rank, each.identity.world) for each in job.ranks) == [(0, 2), (1, 2)]
    agent.end()


def test_ranks_that_no_environment_tells_are_numbered(start: Callable[..., Plain], python: str, tmp_path: Path) -> None:
    loop = [python, str(LOOP), str(tmp_path / "ends")]
    programs = start((loop, {}), (loop, {}))
    runs(programs)
    assert len(prepare_running("numbered", chosen_here(programs.pids, None)).prepared) == 2
    (job,) = listed("numbered")
    told = {each.pid: (each.identity.rank, each.identity.world) for each in job.ranks}
    assert [told[each.pid] for each in programs.processes] == [(0, 2), (1, 2)]


def test_the_package_is_installed_while_the_process_runs(
    start: Callable[..., Plain], python: str, tmp_path: Path
) -> None:
    subprocess.run([python, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=patience(60))
    packages = tmp_path / "bare/lib/python3.14/site-packages"
    loop = [str(tmp_path / "bare/bin/python"), str(LOOP), str(tmp_path / "ends")]
    programs = start((loop, {"PYTHONPATH": ""}))
    runs(programs)
    chosen = chosen_here(programs.pids, None)
    (refused,) = prepare_running("late", chosen).refused
    assert "No module named 'monarch_kernel'" in refused and f"into its environment ({tmp_path / 'bare'})" in refused
    for each in (ROOT / "monarch_kernel", *Path(python).parent.parent.glob("lib/python3.14/site-packages/*")):
        (packages / each.name).symlink_to(each)
    assert prepare_running("late", chosen).prepared == [programs.processes[0].pid]


def test_what_cannot_be_joined_says_why(start: Callable[..., Plain], python: str, tmp_path: Path) -> None:
    gate = str(tmp_path / "ends")
    programs = start(
        ([python, "-X", "disable-remote-debug", str(LOOP), gate], {}), ([sys.executable, str(LOOP), gate], {})
    )
    runs(programs)
    closed, old = prepare_running("why", chosen_here(programs.pids, None)).refused
    assert "it was started with -X disable-remote-debug" in closed
    assert "Python lets a debugger into a running process from 3.14 on; %mesh look" in old
    with join_folder() as folder:
        assert not [name for name in folder.names() for pid in programs.pids.split(",") if name.startswith(f"{pid}-")]


def test_a_job_has_one_name(start: Callable[..., Plain]) -> None:
    programs = start()
    runs(programs)
    chosen = chosen_here(programs.pids, None)
    prepare_running("first", chosen)
    assert prepare_running("first", chosen).refused == []
    with pytest.raises(OutsideError, match="can be joined already, as first: %mesh join first"):
        prepare_running("second", chosen)


def test_lines_of_magics_that_ask_for_too_little(notebook: Kernel) -> None:
    assert "--prepare goes with --slurm" in notebook.run("%mesh join x --prepare").stderr
    assert "there is no process 999999999" in notebook.run("%mesh join x --pids 999999999").stderr
    assert "is no name of a job" in notebook.run(f"%mesh join a/b --pids {os.getpid()}").stderr


def test_ranks_of_a_slurm_job(
    slurm: Slurm, start: Callable[..., Plain], start_kernel: Callable[..., Kernel], python: str, tmp_path: Path
) -> None:
    srun = ["srun", "--nodes=2", "--ntasks=2", "--job-name=unprepared", python, str(LOOP), str(tmp_path / "ends")]
    programs = start((srun, {}))

    def number() -> str:
        return slurm.say("squeue", "-h", "-t", "R", "-n", "unprepared", "-o", "%i")

    def there() -> bool:
        with suppress(OutsideError):
            return len(look(LookRequest(slurm=number(), apart=0.0)).stacks.snapshots) == 2
        return False

    wait_until(lambda: bool(number()), "it runs", 60)
    wait_until(there, "its ranks run", 60)
    notebook = start_kernel()
    assert "2 ranks (ranks=2)" in shown(notebook.ok(f"%mesh join by-slurm --slurm {number()} --prepare"))
    assert "[0-1] (3, 14)" in shown(notebook.ok("%%mesh\n__import__('sys').version_info[:2]"))
    notebook.ok("%mesh leave")
    programs.end()
    slurm.wait_until_idle()
