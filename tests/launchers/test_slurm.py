"""Hosts from a real Slurm: what every launcher does, and what is Slurm's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import (
    InfeasibleError,
    LaunchError,
    StartTimeoutError,
    SubmissionRefusedError,
    SupervisionError,
)
from monarch_kernel.job import EngineJob, SlurmJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import HostPhase, Launcher, LaunchRequest, Secret, WorkerCommand
from monarch_kernel.launchers.slurm import launcher as slurm_launcher
from monarch_kernel.launchers.slurm.launcher import WAYS, SlurmLauncher
from monarch_kernel.launchers.slurm.queue import expand
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.kernel import harness
from tests.kernel.harness import Kernel
from tests.kernel.screen import ever, text
from tests.launchers.conformance import SECRET, Conformance, Engine, Prober, clean
from tests.launchers.slurm import Slurm, slurm
from tests.waiting import patience

__all__ = ["clean", "slurm"]


class SlurmEngine(Engine):
    """Two nodes, which are asked for in one of the ways."""

    most = 2

    def __init__(self, way: str) -> None:
        self._way = way

    def launcher(self) -> Launcher:
        return SlurmLauncher(self._way)

    def queue(self) -> Launcher:
        return SlurmLauncher(self._way, ["--begin=now+1hour"])


@pytest.fixture
def engine(slurm: Slurm, request: pytest.FixtureRequest) -> Engine:
    return SlurmEngine(getattr(request, "param", "salloc"))


@pytest.fixture
def kernel(slurm: Slurm) -> Iterator[Kernel]:
    """A notebook on the login node."""
    started = harness.start_kernel()
    yield started
    harness.stop_kernel(started)


@pytest.fixture(autouse=True)
def idle(slurm: Slurm) -> Iterator[None]:
    """Each test begins with two free nodes, and leaves no job."""
    slurm.wait_until_idle()
    yield
    left = slurm.say("squeue", "-h", "-t", "PD,R", "-o", "%i %j %T")
    assert not left, f"the test left jobs in Slurm: {left}"


class TestSlurm(Conformance):
    pass


class Telling:
    """The tests of all launchers that tell Slurm's other ways from the first one."""

    _private = Conformance._private
    test_hosts_come_up = Conformance.test_hosts_come_up_and_nothing_is_secret_that_others_see
    test_a_start_that_fails = Conformance.test_a_start_that_fails_says_where_and_why_and_gives_the_others_back
    test_a_job_that_is_cancelled_in_the_queue_is_gone = Conformance.test_a_job_that_is_cancelled_in_the_queue_is_gone
    test_a_start_is_cancelled_while_it_goes_on = Conformance.test_a_start_is_cancelled_while_it_goes_on
    test_a_mesh_grows_and_shrinks = Conformance.test_a_mesh_grows_and_shrinks
    test_another_program_finds_and_ends_it = Conformance.test_another_program_finds_and_ends_it


@pytest.mark.parametrize("engine", ["sbatch"], indirect=True)
class TestBatch(Telling):
    """What differs where a batch script keeps the allocation."""

    _lose = Conformance._lose
    test_a_lost_host_is_replaced = Conformance.test_a_lost_host_is_replaced
    test_nothing_is_left_of_a_program_that_is_killed = Conformance.test_nothing_is_left_of_a_program_that_is_killed


@pytest.mark.parametrize("engine", ["array"], indirect=True)
class TestArray(Telling):
    """The same where each host is a job of its own; see ``test_an_array_is_a_job_for_each_host``, too."""


def told(job: EngineJob) -> list[int]:
    """The processes of a rank on each host."""
    probers: Any = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    return [pid for pid, _, _ in probers.told.call().get().values()]


@pytest.fixture
def features(slurm: Slurm) -> Iterator[None]:
    """One node is fast, and reserved; the other is not."""
    slurm.say("scontrol", "update", "NodeName=n2", "AvailableFeatures=fast", "ActiveFeatures=fast")
    reserved = ("ReservationName=research", "Users=root", "StartTime=now", "Duration=60", "Nodes=n2")
    slurm.say("scontrol", "create", "reservation", *reserved)
    yield
    slurm.say("scontrol", "delete", "ReservationName=research")
    slurm.say("scontrol", "update", "NodeName=n2", "AvailableFeatures=", "ActiveFeatures=")


@pytest.mark.parametrize("way", WAYS)
def test_slurm_gets_what_the_user_asked_for_and_never_the_key(slurm: Slurm, features: None, way: str) -> None:
    job = SlurmJob(
        {"hosts": 1},
        way=way,
        job_name="train",
        partition="debug",
        account="vision",
        constraint="fast",
        reservation="research",
        gres="gpu:1",
        cpus_per_task=2,
        mem="1G",
        time_limit="0:30:00",
        exclude="n1",
        exclusive=False,
        slurm_args=["--comment=ours"],
        env={SECRET: "a-secret-value"},
        idle=60,
    )
    job.apply()
    (host,) = job.wait().hosts
    assert (host.name, host.devices) == ("n2", ("0",))
    asked = "Name Partition Account feature Reservation cpus-per-task MinMemory tres-per-node Comment TimeLimit"
    fields = ",".join(f"{field}:.40" for field in asked.split())
    assert slurm.say("squeue", "-h", "-O", fields).split() == [
        *("train", "debug", "vision", "fast", "research", "2", "1G", "gres:gpu:1", "ours", "30:00")
    ]
    folder = Path(job._record().ticket.data["folder"])  # type: ignore[union-attr]
    scripts = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != "secret"}
    shown = slurm.say("scontrol", "show", "job", "-dd") + "".join(scripts.values())
    assert {"keeper.sh", "start.sh"} <= scripts.keys() and (folder / "secret").stat().st_mode & 0o777 == 0o600
    assert TestSlurm()._private(job.job_id) not in shown and "a-secret-value" not in shown
    job.kill()


def test_a_lost_node_is_replaced_in_the_same_allocation(slurm: Slurm) -> None:
    job = SlurmJob({"hosts": 1}, spares=1, gpus_per_node=2, time_limit="0:30:00", idle=60)
    procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    probers: Any = procs.spawn("probers", Prober)
    first = probers.told.call_one().get()[0]
    host = job.status().hosts[0]
    allocation = slurm.say("squeue", "-h", "-o", "%i")
    assert host.devices == ("0", "1") and host.ends_at > host.since > 0
    try:
        with hook(lambda _failure: None), pytest.raises(SupervisionError):
            slurm.lose(host.name)
            while True:
                probers.told.call_one().get()
        wait_until(lambda: "power supply" in job.status().reason, "Slurm tells of it")
        assert f"Slurm has taken {host.name} from job {allocation}: down" in job.status().reason
        procs.heal(hosts=job).get()
        assert probers.told.call_one().get()[0] != first
        (other,) = job.status().hosts
        assert other.state is HostPhase.UP and other.name != host.name and other.devices == ("0", "1")
        assert slurm.say("squeue", "-h", "-o", "%i") == allocation
        job.kill()
    finally:
        slurm.repair(host.name)


def test_an_array_is_a_job_for_each_host(slurm: Slurm) -> None:
    job = SlurmJob({"hosts": 2}, way="array", exclusive=False, idle=60)
    procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    probers: Any = procs.spawn("probers", Prober)
    before = [pid for pid, _, _ in probers.told.call().get().values()]
    jobs = slurm.say("squeue", "-h", "-r", "-o", "%i %D").splitlines()
    assert len(jobs) == 2 and all(line.endswith(" 1") for line in jobs)
    with hook(lambda _failure: None), pytest.raises(SupervisionError):
        TestSlurm()._lose(job, 1)
        while True:
            probers.told.call().get()
    wait_until(lambda: not job.active, "Slurm knows of it")
    procs.heal(hosts=job).get()
    after = [pid for pid, _, _ in probers.told.call().get().values()]
    assert after[0] == before[0] and after[1] != before[1]
    assert slurm.say("squeue", "-h", "-r", "-o", "%i %D").splitlines() == jobs
    job.resize(1)
    wait_until(lambda: len(slurm.say("squeue", "-h", "-r", "-t", "R", "-o", "%i").split()) == 1, "its job has ended")
    job.kill()


def test_without_a_shared_home_the_key_goes_by_munge(slurm: Slurm) -> None:
    job = SlurmJob({"hosts": 1}, shared_home=False, exclusive=False, idle=60)
    assert len(told(job)) == 1
    credential = Path(job._record().ticket.data["folder"], "0.credential")  # type: ignore[union-attr]
    assert credential.read_text().startswith("MUNGE:") and credential.stat().st_mode & 0o777 == 0o600
    job.kill()
    assert not credential.parent.exists()


def test_what_slurm_refuses_raises_its_own_words(slurm: Slurm) -> None:
    for way, said in (("salloc", "salloc: error: invalid partition"), ("sbatch", "sbatch: error: invalid partition")):
        with pytest.raises(LaunchError, match=said):
            SlurmJob({"hosts": 1}, partition="nowhere", way=way).apply()
    with pytest.raises(InfeasibleError, match="Requested node configuration is not available.*debug 2 nodes"):
        SlurmJob({"hosts": 1}, gpus_per_node=5).apply()
    with pytest.raises(InfeasibleError, match=r"PENDING \(Partition(Config|NodeLimit)\)"):
        SlurmJob({"hosts": 3}, way="sbatch").apply()
    with pytest.raises(SubmissionRefusedError, match="unrecognized option '--nonsense'"):
        SlurmJob({"hosts": 1}, slurm_args=["--nonsense"]).apply()
    assert not registry.records()


def test_the_queue_says_why_a_job_waits(slurm: Slurm) -> None:
    first = SlurmJob({"hosts": 2}, time_limit=600.0, idle=60)
    first.apply()
    second = SlurmJob({"hosts": 1}, idle=60, job_start_timeout=0.1, keep_partial=True)
    with pytest.raises(StartTimeoutError, match=r"0 of 1 hosts .* PENDING \("):
        second.state(cached_path=None)

    def expected() -> bool:
        (host,) = second.status().hosts
        return host.state is HostPhase.QUEUED and host.reason == "PENDING (Resources)" and host.expected_start > 0

    wait_until(expected, "Slurm has planned its start")
    first.kill()
    second.timeout = 60
    assert len(second.state(cached_path=None).hosts) == 1
    second.kill()


CLIENT = """
import sys
sys.path.insert(0, {root!r})
from monarch_kernel.job import SlurmJob
job = SlurmJob.here(idle=60) if "here" in sys.argv else SlurmJob({{"hosts": 2}}, idle=60)
procs = job.state().hosts.spawn_procs(per_host={{"gpus": 1}})
procs.initialized.get()
print("ranks", len(procs), [host.name for host in job.status().hosts], flush=True)
job.kill()
"""


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """A script that takes hosts of the allocation that it runs in."""
    path = tmp_path / "client.py"
    path.write_text(CLIENT.format(root=str(Path(__file__).parents[2])))
    return path


def test_a_script_runs_in_the_allocation(slurm: Slurm, client: Path) -> None:
    job = SlurmJob({"hosts": 2}, idle=60)
    job.apply(str(client))
    wait_until(lambda: not job.active, "the script has ended", 100)
    assert "ranks 2 ['n1', 'n2']" in job.log(0)
    assert "COMPLETED" in job.status().reason
    with pytest.raises(FileNotFoundError, match="nothing was submitted"):
        SlurmJob({"hosts": 1}).apply("nowhere.py")
    job.kill()


def test_the_nodes_of_the_allocation_that_a_program_runs_in(slurm: Slurm, client: Path) -> None:
    argv = ["salloc", "--no-bell", "-N2", sys.executable, str(client), "here"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience(100))
    assert "ranks 2 ['n1', 'n2']" in done.stdout, done.stderr
    with pytest.raises(LaunchError, match="runs in no allocation"):
        SlurmJob.here()
    with pytest.raises(SubmissionRefusedError, match="there is no such job of yours"):
        SlurmJob({"hosts": 1}, attach_to=99999).apply()


def test_from_the_command_line(slurm: Slurm) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-P", "-m", "monarch_kernel", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=100)

    refused = run("up", "slurm", "--hosts", "1", "--partition", "nowhere")
    assert refused.returncode == 1 and "invalid partition" in refused.stderr
    made = run("up", "slurm", "--hosts", "2", "--partition", "debug", "--idle", "60", "--json")
    assert made.returncode == 0, made.stderr
    job = json.loads(made.stdout)["job"]
    assert run("exec", "--job", job, "--fold", "--", "echo", "here").stdout == "== 0-1 ==\nhere\n"
    assert run("kill", job).returncode == 0


def test_from_a_notebook(slurm: Slurm, kernel: Kernel) -> None:
    first = SlurmJob({"hosts": 2}, idle=60)
    first.apply()
    cell = kernel.send("%mesh up m --on slurm --hosts 2 --gpus 2 --partition debug")
    cell.until(lambda out: "slurm: 0 of 2 hosts up: 2 queued (PENDING (" in ever(out))
    first.kill()
    out = cell.wait()
    assert "mesh m: 4 ranks (hosts=2, gpus=2) on 2 hosts of slurm (job " in out.stdout, out
    assert text(kernel.ok("%%mesh\nimport os\nos.environ['CUDA_VISIBLE_DEVICES']")) == "[0,2] '0'\n[1,3] '1'"
    held = slurm.say("squeue", "-h", "-o", "%i")
    # Ctrl-C takes the request out of the queue.
    cell = kernel.send("%mesh up other --on slurm --hosts 1 --procs 1")
    cell.until(lambda out: "slurm: 0 of 1 hosts up: 1 queued (PENDING (" in ever(out))
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert slurm.say("squeue", "-h", "-t", "PD,R", "-o", "%i") == held
    refused = kernel.run("%mesh up other --on slurm --hosts 3 --procs 1")
    assert refused.ename == "UsageError" and "cannot give these hosts" in refused.evalue, refused
    kernel.ok("%mesh down m")


@pytest.mark.parametrize(("third", "woken"), [(["salloc"], "True"), ([], "False")], ids=["salloc", "sbatch"])
def test_the_keeper_of_an_allocation_wakes_salloc_as_it_ends(tmp_path: Path, third: list[str], woken: str) -> None:
    command = WorkerCommand("0123456789abcdef", Secret("k"))
    (tmp_path / "keeper.sh").write_text(slurm_launcher.keeper_script(str(tmp_path), LaunchRequest(0, command)))
    parent = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
subprocess.Popen(["sh", "keeper.sh", "0", "0", *sys.argv[1:]])
os.wait()
print(signal.SIGHUP in signal.sigpending())
"""
    line = [sys.executable, "-c", parent, *third]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.strip() == woken, done.stderr


def test_arguments_are_checked() -> None:
    assert expand("n[1-3,07],gpu[01-02]-ib,solo") == ("n1", "n2", "n3", "n07", "gpu01-ib", "gpu02-ib", "solo")
    assert expand("a[1-2]b[3-4]") == ("a1b3", "a1b4", "a2b3", "a2b4")
    limits = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-12": 129600, "1-00:30": 88200, 30.0: 30}
    for limit, seconds in limits.items():
        assert SlurmJob({"hosts": 1}, time_limit=limit)._resources.walltime == seconds
    assert SlurmJob({"hosts": 1}, mem="64G")._resources.memory == 64 * 2**30
    for wrong in ({"time_limit": "soon"}, {"mem": "much"}, {"way": "qsub"}, {"way": "array", "spares": 1}):
        with pytest.raises(ValueError, match="no time limit|no amount of memory|no way|no spares"):
            SlurmJob({"hosts": 1}, **wrong)  # type: ignore[arg-type]
