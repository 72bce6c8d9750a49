"""Jobs: hosts by name, which a later program finds again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import shutdown_context
from monarch_kernel.job import JobTrait, LocalJob, ProcessJob, job_load, job_loads
from monarch_kernel.launchers import registry
from tests.conftest import alive, wait_until
from tests.kept.actors import Counter
from tests.otheruser import OtherUser, other_user, shared
from tests.waiting import patience

__all__ = ["other_user", "shared"]

MARKER = "TEST_OF_JOBS"


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """All processes of this test carry a mark; none of them may outlive it, nor any folder."""
    mark = f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv(MARKER, mark)
    monkeypatch.chdir(tmp_path)
    folders = set(job_folders())
    yield mark
    shutdown_context().get()
    wait_until(lambda: not processes(mark), "all hosts of jobs have ended")
    # Tests that run beside these make and remove such folders, too.
    wait_until(lambda: set(job_folders()) <= folders, "no folder of a job is left")


def job_folders() -> list[Path]:
    return list(Path("/tmp").glob(f"monarch-job-{os.getuid()}-*"))


def processes(mark: str) -> list[int]:
    """Living processes with this mark, but for this one."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                marked = f"{MARKER}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marked and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def script(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_local_job_is_this_host() -> None:
    job = LocalJob(hosts=("trainers", "generators"))
    assert isinstance(job, JobTrait)
    assert not job.active and job.apply_id is None
    state = job.state(cached_path=None)
    assert job.active and job.apply_id
    assert state.trainers is state.generators
    counters: Any = state.trainers.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter)
    assert list(counters.add.call().get().values()) == [1, 1]
    with pytest.raises(AttributeError, match=r"no mesh 'other' \(its meshes: trainers, generators\)"):
        _ = state.other
    job.kill()
    assert not job.active
    assert not os.path.exists(".monarch")


def test_the_hosts_of_a_process_job_outlive_the_script(marked: str) -> None:
    first = """
    from monarch.job import ProcessJob
    from tests.kept.actors import Counter
    job = ProcessJob({"trainers": 2, "generators": 1}, env={"SIDE": "left"})
    state = job.state()
    procs = state.trainers.spawn_procs(per_host={"gpus": 1})
    print(job.apply_id, len(state.trainers), len(state.generators))
    import os
    print(*procs.spawn("counters", Counter).pid.call().get().values())
    """
    first = "import monarch_kernel; monarch_kernel.enable_monarch_imports()\n" + textwrap.dedent(first)
    told = script(first).split()
    assert told[1:3] == ["2", "1"]
    wait_until(lambda: not any(alive(int(pid)) for pid in told[3:]), "what ran on the hosts has ended with the script")
    hosts = processes(marked)
    assert len(hosts) == 6  # three, and their fork servers
    again = script(first).split()
    assert again[0] == told[0] and again[3:] != told[3:]
    assert set(processes(marked)) >= set(hosts)
    job = ProcessJob({"trainers": 2, "generators": 1}, env={"SIDE": "left"})
    state = job.state()
    assert job.apply_id == told[0]
    counters: Any = state.trainers.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter)
    pids = list(counters.pid.call().get().values())
    assert len(set(pids)) == 2
    job.kill()
    assert not job.active
    wait_until(lambda: not processes(marked), "all hosts have ended")


OWN = """
import os, signal, subprocess, sys
import monarch_kernel
monarch_kernel.enable_monarch_imports()
from monarch.actor import attach_to_workers
from monarch.job import JobState, JobTrait, LocalJob

class OneWorker(JobTrait):
    def __init__(self, name):
        super().__init__()
        self.name, self.pid, self.script, self.extra = name, 0, None, None

    def _create(self, client_script):
        self.script = client_script
        line = [sys.executable, "-P", "-m", "monarch_kernel", "worker", "--announce", "-", "--idle", "60"]
        line += ["--listen", f"ipc://{os.getcwd()}/{self.name}.sock"]
        worker = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        worker.stdout.readline()
        worker.stdout.close()
        self.pid, worker.returncode = worker.pid, 0  # it stays when this program ends

    def can_run(self, spec):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return spec.name == self.name

    def _state(self):
        return JobState({"hosts": attach_to_workers(workers=[f"ipc://{os.getcwd()}/{self.name}.sock"], name="hosts")})

    def _kill(self):
        os.kill(self.pid, signal.SIGTERM)
"""


def test_a_program_brings_a_job_of_its_own(marked: str) -> None:
    """Its class is written for Monarch."""
    program = OWN + textwrap.dedent(
        """
        job = OneWorker("w")
        assert isinstance(job, JobTrait) and isinstance(LocalJob(), JobTrait) and not isinstance(1, JobTrait)
        hosts = job.state().hosts
        assert job.active and len(hosts) == 1
        hosts.spawn_procs(per_host={"gpus": 1}).initialized.get()
        print(job.apply_id, job.pid)
        """
    )
    first = script(program)
    assert alive(int(first.split()[1])) and script(program) == first
    other = script(program.replace('OneWorker("w")', 'OneWorker("v")'))
    assert other.split()[0] != first.split()[0]
    os.kill(int(first.split()[1]), 15)
    end = """
        from monarch.job import job_load
        job = job_load(".monarch/job_state.json")
        job.kill()
        assert not job.active
        batch = OneWorker("b")
        batch.apply("train.py")
        assert batch.script == "train.py"
        batch.extra = {1, 2}
        try:
            batch.dumps()
        except ValueError as e:
            print(e)
        batch.kill()
        """
    said = script(OWN + textwrap.dedent(end))
    assert said.startswith("a OneWorker cannot be kept in a file of JSON, as its extra is {1, 2}: keep numbers, text")


def test_a_job_that_is_not_the_same_is_another() -> None:
    one = ProcessJob({"hosts": 1})
    one.state("cache/state.json")
    assert os.stat("cache/state.json").st_mode & 0o777 == 0o600
    two = ProcessJob({"hosts": 2})
    assert len(two.state("cache/state.json").hosts) == 2
    assert one.apply_id != two.apply_id and one.active
    one.kill()
    assert two.active
    two.kill()


def test_a_job_with_a_dead_host_is_applied_anew(marked: str) -> None:
    job = ProcessJob({"hosts": 2})
    job.apply()
    before = job.apply_id
    job.apply()
    assert job.apply_id == before
    found = job_loads(job.dumps())
    assert found.active and found.apply_id == before
    job.dump("job.json")
    assert job_load("job.json").active
    victim = next(pid for pid in processes(marked) if Path(f"/proc/{pid}/comm").read_text() == "monarch-worker\n")
    os.kill(victim, 9)
    wait_until(lambda: not job.active, "it is noticed")
    state = job.state(cached_path=None)
    assert job.apply_id != before and len(state.hosts) == 2
    job.kill()


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    for wrong in ({}, {"a b": 1}, {"hosts": 0}):
        with pytest.raises(ValueError, match="ProcessJob"):
            ProcessJob(wrong)
    with pytest.raises(ValueError, match="list of names"):
        LocalJob(hosts="hosts")
    with pytest.raises(ValueError, match="no batch mode"):
        ProcessJob({"hosts": 1}).apply("train.py")
    ProcessJob({"hosts": 1}).kill()


def test_a_file_that_is_not_a_jobs_is_neither_executed_nor_replaced(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "no"
    for content in (pickle.dumps(Bomb()), b"no job", b'{"format": "else"}', b""):
        path.write_bytes(content)
        path.chmod(0o600)
        for use in (job_load, LocalJob().state, LocalJob().dump):
            with pytest.raises(ValueError, match="no is not the state of a job .*so it is left as it is"):
                use(path)
        with pytest.raises(ValueError, match="not the state of a job"):
            job_loads(content)
        assert path.read_bytes() == content
    assert not (tmp_path / "executed").exists()


def test_a_job_of_another_version_or_kind_is_applied_anew(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    job = LocalJob(["a"])
    job.apply()
    for change in ({"version": 99}, {"kind": "CloudJob"}):
        path.write_text(json.dumps({**json.loads(job.dumps()), **change}))
        path.chmod(0o600)
        with pytest.raises(ValueError, match="version 99|a CloudJob, which is not known here"):
            job_load(path)
        new = LocalJob(["a"])
        new.state(path)
        assert new.apply_id != job.apply_id
        assert job_load(path).apply_id == new.apply_id
    path.write_text(json.dumps({**json.loads(ProcessJob({"a": 1}).dumps()), "fields": {"job": 5}}))
    with pytest.raises(ValueError, match="this ProcessJob cannot be read: .*int"):
        job_load(path)


def test_the_file_of_another_user_is_not_read(other_user: OtherUser, shared: Path) -> None:
    text = LocalJob().dumps().decode()
    other_user.run("Path(sys.argv[1]).write_text(sys.argv[2])", shared / "state.json", text)
    with pytest.raises(PermissionError, match=f"state.json belongs to the user with uid {other_user.uid}"):
        LocalJob().state(shared / "state.json")


def test_a_job_removes_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir(0o700)
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    job = ProcessJob({"a": 1})
    job.apply()
    with registry.changing(job.job_id) as record:
        assert record.ticket is not None
        ours, record.ticket.data["folder"] = record.ticket.data["folder"], str(tmp_path / "thesis")
    with pytest.raises(OSError, match="thesis is no job of monarch_kernel"):
        job.kill()
    assert (tmp_path / "thesis" / "chapter.tex").exists()
    with registry.changing(job.job_id) as record:
        assert record.ticket is not None
        record.ticket.data["folder"] = ours
    job.kill()


def test_forgotten_hosts_end(marked: str) -> None:
    script("from monarch_kernel.job import ProcessJob\nProcessJob({'hosts': 1}, idle=1.0).state()")
    wait_until(lambda: not processes(marked), "it has ended")
    job = job_load(".monarch/job_state.json")
    assert not job.active
    job.kill()
