"""Hosts from SkyPilot: its client is real, its API server is played, and workers are started by a real sshd."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from monarch_kernel.errors import InfeasibleError, LaunchError, StartFailedError, StartTimeoutError
from monarch_kernel.job import EngineJob, SkyPilotJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import MARKER, HostPhase, Launcher, Resources
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.launchers.sky import SkyLauncher
from monarch_kernel.launchers.sky import launcher as sky_launcher
from tests.conftest import wait_until
from tests.launchers.conformance import SECRET, Conformance, Engine, Prober, clean, processes_of, script
from tests.launchers.sky_engine import MOST, NEVER, REFUSED, SkyPilot, skypilot
from tests.launchers.sshd import sshd
from tests.waiting import patience

__all__ = ["clean", "skypilot", "sshd"]


class SkyEngine(Engine):
    """Clusters of at most four nodes."""

    most = MOST

    def launcher(self) -> Launcher:
        return SkyLauncher(python="")

    def queue(self) -> Launcher:
        return SkyLauncher(NEVER, python="")


@pytest.fixture
def engine(skypilot: SkyPilot) -> Engine:
    return SkyEngine()


class TestSky(Conformance):
    pass


def workers_folder() -> Path:
    """Where workers and their environments are noted on this machine."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/monarch_kernel/workers"


def told(hosts: Any) -> list[int]:
    """The processes of a rank on each host."""
    probers: Any = hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    return [pid for pid, _, _ in probers.told.call().get().values()]


def test_skypilot_gets_what_the_user_asked_for_and_never_the_key(skypilot: SkyPilot) -> None:
    resources = {"infra": "lambda", "use_spot": True, "disk_size": 300}
    job = skypilot.job(2, resources, setup_commands="true", env={SECRET: "a-secret-value"}, tunnel=True)
    hosts = job.state(cached_path=None).hosts
    assert len(told(hosts)) == 2  # through ssh, by the names that SkyPilot has written
    asked = skypilot.asked("/launch")[-1]
    *_, task = yaml.safe_load_all(asked["task"])
    assert (task["num_nodes"], task["setup"], asked["cluster_name"]) == (2, "true", f"monarch-kernel-{job.job_id}-0")
    wanted = task["resources"]
    assert wanted["use_spot"] and wanted["disk_size"] == 300 and wanted["infra"] == "lambda"
    assert wanted["autostop"] == {"idle_minutes": 1, "down": True} or wanted["autostop"]["down"]
    private = json.loads(Path(registry.key_path(job.job_id)).read_text())["private"]
    kept = [path.read_bytes() for path in skypilot.home.rglob("*") if path.is_file()]
    kept += [body.encode() for body in map(json.dumps, skypilot.asked("/launch"))]
    kept += [path.read_bytes() for path in workers_folder().glob(f"{job.job_id}*")]
    assert len(kept) > 5
    for text in kept:
        assert private.encode() not in text and b"a-secret-value" not in text
    assert job.status().hosts[0].url.startswith("tcp://127.0.0.1:")  # as SkyPilot has the address of the node
    job.kill()
    assert skypilot.asked("/down")[-1]["cluster_name"] == asked["cluster_name"]
    assert not list((skypilot.home / ".sky/generated/ssh").iterdir())


def test_a_program_that_ends_at_once_leaves_the_start_of_workers_to_the_next_one(skypilot: SkyPilot) -> None:
    job = script(
        """
        import sys
        from monarch_kernel.job import SkyPilotJob
        job = SkyPilotJob({"hosts": 2}, python_exe=sys.executable)
        job.apply()
        print(job.job_id)
        """
    )
    assert not processes_of(job)
    found = EngineJob.find(job)
    assert isinstance(found, SkyPilotJob)
    assert len(told(found.attached().hosts)) == 2
    assert registry.started(job) == {0, 1}
    found.kill()


def test_refusals_and_failures_have_skypilots_words(skypilot: SkyPilot) -> None:
    with pytest.raises(InfeasibleError, match=r"5 x \(.*disk_size=300\): No cloud has more than 4 nodes"):
        skypilot.job(MOST + 1, {"disk_size": 300}).apply()
    with pytest.raises(StartFailedError, match="ResourcesUnavailableError: .*InsufficientInstanceCapacity"):
        skypilot.job(1, REFUSED).state(cached_path=None)
    with pytest.raises(StartFailedError, match="FAILED_SETUP") as caught:
        skypilot.job(1, setup_commands="echo no such wheel; exit 1").state(cached_path=None)
    assert "no such wheel" in caught.value.log
    job = skypilot.job(1, NEVER, timeout=0.5)
    with pytest.raises(StartTimeoutError, match="Provisioning: waiting for capacity"):
        job.state(cached_path=None)
    assert not registry.records() and skypilot.asked("/api/cancel")


def test_a_cluster_that_is_taken_away_is_replaced_by_another(skypilot: SkyPilot) -> None:
    job = skypilot.job(1)
    assert len(job.state(cached_path=None).hosts) == 1
    (worker,) = [host.worker for host in job.status().hosts]
    skypilot.take(f"monarch-kernel-{job.job_id}-0")
    for pid in processes_of(job.job_id):
        if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, 9)
    wait_until(lambda: job.status().hosts[0].state is HostPhase.GONE, "the loss is seen")
    assert "it was ended, or taken away" in job.status().reason
    assert len(job.replacements([worker], 60)) == 1
    second = f"monarch-kernel-{job.job_id}-1"
    assert skypilot.asked("/launch")[-1]["cluster_name"] == second
    job.kill()
    assert skypilot.asked("/down")[-1]["cluster_name"] == second


def test_a_cluster_of_the_users_own_stays(skypilot: SkyPilot) -> None:
    first = skypilot.job(1, cluster_name="dev")
    first.apply()
    second = skypilot.job(1, cluster_name="dev")
    assert len(told(second.state(cached_path=None).hosts)) == 1
    second.kill()
    assert skypilot.asked("/cancel")[-1]["cluster_name"] == "dev"
    assert "dev" not in {body["cluster_name"] for body in skypilot.asked("/down")}
    first.wait(patience(60))  # the cluster that it made is there
    first.kill()
    assert skypilot.asked("/down")[-1]["cluster_name"] == "dev"


def test_a_job_whose_record_is_lost_is_found_by_the_name_of_its_cluster(
    skypilot: SkyPilot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = skypilot.job(2)
    job.apply()
    job.wait(patience(60))
    ended = job.job_id
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        (found,) = [each for each in list_jobs().jobs if each.job == job.job_id]
        assert found.engine == "sky" and [host.state for host in found.status.hosts] == [HostPhase.UP] * 2  # type: ignore[union-attr]
        found.end()
    wait_until(lambda: not processes_of(ended), "its workers have ended")
    job.kill()


def test_what_skypilot_cannot_be_asked_for_is_refused_before() -> None:
    launcher = SkyLauncher()
    assert sky_launcher.resource_fields({"accelerators": "H100"}, Resources(gpus=8, cpus=4, memory=64 * 10**9)) == {
        "accelerators": "H100:8",
        "cpus": "4+",
        "memory": "64+",
    }
    with pytest.raises(InfeasibleError, match="accelerators=NAME:8"):
        sky_launcher.resource_fields({}, Resources(gpus=8))
    with pytest.raises(InfeasibleError, match="differ: leave out one"):
        sky_launcher.resource_fields({"accelerators": "H100:4"}, Resources(gpus=8))
    with pytest.raises(ValueError, match="is the name of a job's own cluster"):
        SkyLauncher(cluster="monarch-kernel-0123456789abcdef-0")
    with pytest.raises(TypeError, match=r"give a sky.Resources"):
        SkyPilotJob({"hosts": 1}, "H100:8")
    assert SkyLauncher.of(launcher.options()).options() == launcher.options()
    made = SkyLauncher.configured({"infra": "k8s", "use_spot": True, "retry": True, "idle_minutes": -1}).options()
    assert made["resources"] == {"infra": "k8s", "use_spot": True}
    assert made["retry"] is True and made["idle_minutes"] is None


def test_the_interpreter_of_skypilots_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"not installed here: pip install 'monarch_kernel\[sky\]'.*uv tool install"):
        sky_launcher.interpreter("")
    command = tmp_path / "sky"
    for text in ("#!/opt/sky/bin/python3\nimport sky\n", '#!/bin/sh\n\'\'\'exec\' "/opt/sky/bin/python3" "$0" "$@"\n'):
        command.write_text(text)
        command.chmod(0o755)
        assert sky_launcher.interpreter("") == sky_launcher.interpreter(str(command)) == "/opt/sky/bin/python3"
    command.write_text("#!/bin/sh\nexec pyenv exec sky\n")
    with pytest.raises(LaunchError, match="does not say which Python runs it"):
        sky_launcher.interpreter("")
    assert sky_launcher.interpreter(sys.executable) == sys.executable


def test_the_command_holds_a_node_while_a_worker_lives_and_notes_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky_launcher, "_GRACE", 1)
    monkeypatch.setattr(sky_launcher, "_STEP", 1)
    task = sky_launcher.task_config("a1", "monarch", 1, {}, setup="", workdir="", file_mounts={}, idle=30)
    worker = subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: "a1.0"})
    odd = "10.0.0.1\n10.0.0.2 it's"
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": odd, "SKYPILOT_NODE_RANK": "1"}
    hold = subprocess.Popen(["bash", "-c", task["run"]], env={**env, "TOKEN": "a-secret-value"})
    note = workers_folder() / f"a1.{os.uname().nodename}.env"  # in the home of the account, whatever HOME says
    wait_until(note.exists, "it notes its environment")
    assert note.stat().st_mode & 0o777 == 0o600 and note.parent.stat().st_mode & 0o777 == 0o700
    start = sky_launcher.preparation("a1") + ' printf "%s" "$a|$SKYPILOT_NODE_IPS|$PATH"'
    bare = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", start], env=bare, capture_output=True, text=True, check=True)
    assert done.stdout == f"10.0.0.2 it's|{odd}|{os.environ['PATH']}"
    assert "a-secret-value" not in note.read_text() and hold.poll() is None
    wait_until(lambda: "sleep" in [one.name() for one in psutil.Process(hold.pid).children()], "it has looked once")
    worker.kill()
    worker.wait()
    assert hold.wait(patience(30)) == 0 and not note.exists()
