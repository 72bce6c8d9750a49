"""Jobs over any launcher: queues, errors, the list of jobs, and how workers get keys and announce themselves."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import attach_to_workers
from monarch_kernel.errors import (
    InfeasibleError,
    LaunchError,
    StartFailedError,
    StartTimeoutError,
    SubmissionRefusedError,
)
from monarch_kernel.job import EngineJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import (
    KEY_VARIABLE,
    HostPhase,
    HostStatus,
    JobStatus,
    KeyWay,
    Launcher,
    LaunchRequest,
    Resources,
    Secret,
    Ticket,
    WorkerCommand,
    find_announcement,
    launcher_class,
    launcher_names,
)
from monarch_kernel.workers import make_key_file, new_key_text
from tests.launchers.conformance import Prober, clean
from tests.waiting import patience

__all__ = ["clean"]


class FullCluster(Launcher):
    """An engine without a free host, and with a limit."""

    name = "full"
    needs_key = False

    def submit(self, request: LaunchRequest) -> Ticket:
        if request.hosts > 4:
            raise InfeasibleError("5 hosts were asked for, and this cluster has 4")
        if request.resources.gpus:
            raise SubmissionRefusedError(self.name, "error: Invalid gres specification\n", "name a partition with GPUs")
        return Ticket(launcher=self.name, job=request.command.job, hosts=request.hosts, data={})

    def poll(self, ticket: Ticket) -> JobStatus:
        waiting = [
            HostStatus(host=n, state=HostPhase.QUEUED, reason="Resources", expected_start=time.time() + 60)
            for n in range(ticket.hosts)
        ]
        return JobStatus(tuple(waiting))

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        raise InfeasibleError("this cluster is full")

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        return ""

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        pass

    def options(self) -> dict[str, Any]:
        return {}


def test_a_job_in_the_queue_says_why_it_waits_and_is_ended_by_others() -> None:
    job = EngineJob(FullCluster(), {"hosts": 2}, timeout=0.1, keep_partial=True)
    shown: list[str] = []
    job.on_progress = lambda status: shown.append(str(status))
    with pytest.raises(StartTimeoutError, match="0 of 2 hosts were up after 0.1 s; the others: Resources. Wait longer"):
        job.state(cached_path=None)
    assert shown == ["0 of 2 hosts up: 2 queued (Resources)"] and job.active
    assert [record.job for record in registry.records()] == [job.job_id]
    EngineJob.find(job.job_id).kill()
    assert not job.active and not registry.records()
    with pytest.raises(LaunchError, match="not applied, or was ended"):
        job.status()


def test_a_job_that_is_not_kept_is_given_back_after_the_limit() -> None:
    with pytest.raises(StartTimeoutError):
        EngineJob(FullCluster(), {"hosts": 1}, timeout=0.0).state(cached_path=None)
    assert not registry.records()


def test_refusals_are_in_the_engines_own_words() -> None:
    with pytest.raises(InfeasibleError, match="this cluster has 4"):
        EngineJob(FullCluster(), {"hosts": 5}).apply()
    refused = EngineJob(FullCluster(), {"hosts": 1}, resources=Resources(gpus=8))
    with pytest.raises(SubmissionRefusedError, match="^full refused the job: error: Invalid gres .*; name a partition"):
        refused.apply()
    assert not registry.records()


def test_launchers_are_found_by_their_names() -> None:
    assert {"process", "ssh", "full"} <= set(launcher_names())
    assert launcher_class("full") is FullCluster
    with pytest.raises(LaunchError, match="there is no launcher 'grid' .known: .*ssh"):
        launcher_class("grid")
    with pytest.raises(LaunchError, match="there is no job 00 of yours"):
        EngineJob.find("00")


@pytest.mark.parametrize(
    ("said", "check"),
    [
        ("/usr/bin/python3: No module named torch", "Install that module in the interpreter of the hosts"),
        ("sh: 1: /opt/python: not found", "Check that this interpreter exists on the host"),
        ("it cannot listen at tcp://n1:22: Address already in use", "Choose another port, or 0 for any free one"),
        ("ada@n1: Permission denied (publickey).", "The host refused the login: check the user, and that your key"),
        ("unmunge: Error: Expired credential", "Compare the clocks of this machine and of the host"),
    ],
)
def test_a_start_that_fails_says_what_to_check(said: str, check: str) -> None:
    failure = StartFailedError("n1", "exit 1", 1, said)
    assert failure.check.startswith(check)
    assert (
        str(failure)
        == f"the worker on n1 did not start (exit code 1): exit 1. {failure.check}\nThe end of its log:\n{said}"
    )


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    command = WorkerCommand("j", Secret("the-key"), {"TOKEN": "the-token"})
    assert "the-" not in repr(command)
    for way in KeyWay:
        assert "the-" not in " ".join(command.argv("tcp://h:0", key=way, key_file="f"))
    with pytest.raises(TypeError, match="a secret is not pickled"):
        pickle.dumps(command)
    assert command.stdin() == b'the-key\n{"TOKEN":"the-token"}\n'
    assert WorkerCommand("j", Secret("the-key")).stdin() == b"the-key\n"


@pytest.mark.parametrize("way", [KeyWay.ENVIRONMENT, KeyWay.FILE])
def test_a_worker_takes_its_key_from_a_variable_or_a_file(way: KeyWay, tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    command = WorkerCommand("j", Secret(json.dumps(json.loads(path.read_bytes()))), idle=30)
    environ = {**os.environ, **(command.key_environment() if way is KeyWay.ENVIRONMENT else {})}
    argv = command.argv("tcp://127.0.0.1:0", key=way, key_file=str(path), announce=("-", str(tmp_path / "said")))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        said = find_announcement([process.stdout.readline()])
        assert said is not None and said.pid == process.pid
        assert find_announcement((tmp_path / "said").read_bytes()) == said
        hosts = attach_to_workers(workers=[said.url], key_file=path)
        prober: Any = hosts.spawn_procs(per_host={"gpus": 1}).spawn("prober", Prober)
        pid, _, keys = prober.told.call_one().get()
        assert keys == []
        for each in (pid, process.pid):
            assert KEY_VARIABLE.encode() not in Path(f"/proc/{each}/environ").read_bytes()
        hosts.shutdown().get()
        assert process.wait(patience(30)) == 0


def test_a_worker_that_cannot_start_announces_why() -> None:
    command = WorkerCommand("j", Secret("no key"))
    done = subprocess.run(
        command.argv("tcp://127.0.0.1:0"), input=command.stdin(), capture_output=True, timeout=patience(60)
    )
    said = find_announcement(b"Welcome to node1\n" + done.stdout)
    assert done.returncode != 0 and said is not None and not said.url
    assert said.error.startswith("standard input is not a key file")
    assert find_announcement(done.stdout[:-2]) is None


def test_a_secret_that_kubernetes_mounts_is_a_key_file(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make files of root")
    path = tmp_path / "key"
    path.write_text(new_key_text("pod"))
    code = "import sys; from monarch_kernel.workers import load_keys; print(load_keys(sys.argv[1]).name)"

    def read(mode: int, group: int) -> subprocess.CompletedProcess[str]:
        os.chown(path, 0, group)
        path.chmod(mode)
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, extra_groups=[54321], capture_output=True, text=True, timeout=60)

    assert read(0o440, 54321).stdout == "pod\n"
    for mode, group in ((0o444, 54321), (0o460, 54321), (0o440, 54322), (0o440, 0)):
        assert "others than its owner may use" in read(mode, group).stderr
