"""Workers that launchers start with the marks of a run: they need no second interpreter, and are like all others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import monarch_kernel.actor
from monarch_kernel.actor import Actor, SupervisionError, attach_to_workers, endpoint
from monarch_kernel.launchers.base import KeyWay, Secret, WorkerCommand
from monarch_kernel.workers import key_text
from tests.conftest import alive, children, wait_until
from tests.workers import PATIENCE, environ_of, run_folder, shared_key

#: How a worker is started: by marks, and what keeps it from being started so.
MARKED, UNMARKED = "marked", "unmarked"


class Started:
    """A worker that has announced itself, and the process that was started for it."""

    def __init__(self, said: dict[str, Any], first: int, marks: Mapping[str, str]) -> None:
        self.url: str = said["url"]
        self.pid: int = said["pid"]
        self.id: str = said["id"]
        self.first = first
        self.marks = marks
        self.folder = run_folder(self.pid)
        self.hosts: Any = None

    def attach(self) -> Any:
        """Its host; what runs there is stopped before the worker ends."""
        key = shared_key() if self.url.startswith("tcp") else None
        self.hosts = attach_to_workers(workers=[self.url], key_file=key)
        return self.hosts


@contextmanager
def started(
    folder: Path, listen: str, way: str = MARKED, background: bool = False, env: dict[str, str] | None = None
) -> Generator[Started]:
    """A worker as a launcher starts it; it and all below it end with the block."""
    tcp = listen.startswith("tcp://")
    command = WorkerCommand("j", Secret(key_text(shared_key())) if tcp else None, env or {})
    key = KeyWay.STDIN if tcp else KeyWay.NONE
    argv = command.argv(listen, key=key, announce=("-",), log=f"{folder}/log", background=background)
    marks = command.marks(0) if way == MARKED else {}
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, env={**os.environ, **marks}, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    if tcp:
        process.stdin.write(command.stdin())
    process.stdin.close()
    worker = Started(json.loads(process.stdout.readline()), process.pid, marks)
    family = {worker.pid, *children(worker.pid)}
    try:
        yield worker
    finally:
        if alive(worker.pid):
            family |= set(children(worker.pid))
            if worker.hosts is not None:
                worker.hosts.stop("the test is over").get(PATIENCE)
            os.kill(worker.pid, signal.SIGTERM)
        wait_until(lambda: not any(map(alive, family - {process.pid})), "the worker's processes have ended")
        process.wait(PATIENCE)
        process.stdout.close()
        wait_until(lambda: not os.path.exists(worker.folder), "its run folder is gone")


@pytest.fixture(params=["ipc", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where it listens."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path_factory.mktemp('w')}/w"


class Looker(Actor):
    """Looks at its own process."""

    @endpoint
    def environ(self) -> dict[str, str]:
        return environ_of(os.getpid())

    @endpoint
    def elsewhere(self) -> int:
        """Start a process that no group and no session connects with this one."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    @endpoint
    def worker(self, folder: Path) -> tuple[str, str, str]:
        """Start a worker, end it, and tell its id and its marks."""
        with started(folder, f"ipc://{folder}/inner", UNMARKED) as inner:
            about = environ_of(inner.pid)
            return inner.id, about["MONARCH_KERNEL_RUN"], about["MONARCH_KERNEL_AGENT"]


@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_it_is_the_interpreter_that_was_started(listen: str, background: bool, tmp_path: Path) -> None:
    with started(tmp_path, listen, background=background) as worker:
        said = Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        assert b"--listen" in said and b"worker_main" not in said
        assert worker.id == worker.marks["MONARCH_KERNEL_AGENT"]
        assert os.stat(worker.folder).st_mode & 0o777 == 0o700
        assert (worker.pid == worker.first) == (not background)
        assert os.getsid(worker.pid) == worker.pid
        ranks = worker.attach().spawn_procs(per_host={"gpus": 2})
        for about in ranks.spawn("l", Looker).environ.call().get(PATIENCE).values():
            assert worker.marks.items() <= about.items()
    text = (tmp_path / "log").read_text()
    assert "ending" in text and "Traceback" not in text


@pytest.mark.parametrize("way", [MARKED, UNMARKED])
def test_no_process_but_the_worker_has_the_key_in_its_memory(way: str, tmp_path: Path) -> None:
    private = json.loads(key_text(shared_key()))["private"].encode()
    with started(tmp_path, "tcp://127.0.0.1:0", way) as worker:
        ranks = worker.attach().spawn_procs()
        ranks.initialized.get(PATIENCE)
        below = children(worker.pid)
        assert len(below) >= 2  # the fork server, and a rank
        assert not any(_holds(pid, private) for pid in below)
        assert not any(private in Path(f"/proc/{pid}/environ").read_bytes() for pid in (worker.pid, *below))
        assert _holds(worker.pid, private)  # or the test would see nothing


def _holds(pid: int, secret: bytes) -> bool:
    """Whether the memory of a process has these bytes."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if found and "[v" not in line:
                start, end = (int(number, 16) for number in found.groups())
                memory.seek(start)
                try:
                    if secret in memory.read(end - start):
                        return True
                except OSError:  # a mapping that cannot be read
                    continue
    return False


def test_nothing_is_left_of_one_that_is_killed(listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_kernel.actor, "unhandled_fault_hook", lambda _failure: None)
    with started(tmp_path, listen) as worker:
        ranks = worker.attach().spawn_procs(per_host={"gpus": 2})
        lookers = ranks.spawn("l", Looker)
        others = set(lookers.elsewhere.call().get(PATIENCE).values())
        family = {*children(worker.pid), *others}
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, family)), "all that it has started is gone")
        with pytest.raises(SupervisionError):
            lookers.environ.call().get(PATIENCE)


def test_a_worker_below_it_does_not_take_its_marks(tmp_path: Path) -> None:
    with started(tmp_path, f"ipc://{tmp_path}/outer") as outer:
        ranks = outer.attach().spawn_procs()
        name, run, agent = ranks.spawn("l", Looker).worker.call_one(tmp_path).get(PATIENCE)
        assert name == agent != outer.id
        assert run != outer.marks["MONARCH_KERNEL_RUN"]


def test_variables_that_an_interpreter_reads_at_its_start_reach_it(tmp_path: Path) -> None:
    with started(tmp_path, "tcp://127.0.0.1:0", env={"PYTHONINTMAXSTRDIGITS": "5000"}) as worker:
        assert environ_of(worker.pid)["PYTHONINTMAXSTRDIGITS"] == "5000"
        assert worker.id != worker.marks["MONARCH_KERNEL_AGENT"]  # of another interpreter


@pytest.mark.parametrize("way", [MARKED, UNMARKED])
@pytest.mark.parametrize(
    "text, why", [(b"", "standard input ended before the key arrived"), (b"x\n", "is not a key file")]
)
def test_one_in_the_background_that_cannot_start_says_so_with_its_status(
    way: str, text: bytes, why: str, tmp_path: Path
) -> None:
    command = WorkerCommand("j", Secret("x"))
    argv = command.argv("tcp://127.0.0.1:0", announce=("-",), background=True)
    marks = command.marks(0) if way == MARKED else {}
    done = subprocess.run(argv, input=text, capture_output=True, timeout=PATIENCE, env={**os.environ, **marks})
    assert why in json.loads(done.stdout)["error"]
    assert why in done.stderr.decode()
    if not text:  # what is no key is found later, when the process that was started has ended
        assert done.returncode in (1, 2)
