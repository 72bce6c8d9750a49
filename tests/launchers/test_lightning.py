"""Hosts from Lightning, whose platform is played on the loopback address with the SDK's own models."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import InfeasibleError, LaunchError, StartFailedError, SubmissionRefusedError
from monarch_kernel.job import LightningJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import KEY_VARIABLE, HostPhase, Launcher, Resources
from monarch_kernel.launchers.lightning import LightningLauncher
from monarch_kernel.launchers.listing import list_jobs
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, Prober, clean, processes_of
from tests.launchers.lightning import MOST, NEVER, STUDIO, Machine, Platform, platform, sdk
from tests.waiting import patience

__all__ = ["clean", "platform", "sdk"]


class LightningEngine(Engine):
    """The platform, asked for one multi-machine job."""

    most = MOST

    def launcher(self) -> Launcher:
        return LightningLauncher(teamspace="vision")

    def queue(self) -> Launcher:
        return LightningLauncher(NEVER)


@pytest.fixture
def engine(platform: Platform) -> Engine:
    return LightningEngine()


class TestLightning(Conformance):
    pass


def asked(platform: Platform) -> list[dict[str, Any]]:
    """The bodies of the requests for jobs."""
    return [body for method, path, body in platform.requests if method == "POST" and path.endswith("jobs")]


def test_the_request_has_what_the_user_asked_for_and_the_command_has_no_key(platform: Platform) -> None:
    job = LightningJob({"hosts": 2}, "L4_X_4", interruptible=True, env={"TOKEN": "t"}, idle=60)
    assert len(job.state(cached_path=None).hosts) == 2
    (body,) = asked(platform)
    spec = body["spec"]
    assert body["machines"] == 2 and spec["cloudspaceId"] == STUDIO and spec["image"] == ""
    assert spec["instanceName"] == "lit-l4-4" and spec["spot"] is True
    sent = {item["name"]: item["value"] for item in spec["env"]}
    assert sent.keys() == {KEY_VARIABLE, "TOKEN"}
    private = json.loads(sent[KEY_VARIABLE])["private"]
    assert private not in spec["command"]
    ended = job.job_id
    # No process that runs on has the key in its environment: the shell that had it was replaced.
    for machine in platform.machines.values():
        assert machine.process is not None
        assert private.encode() not in Path(f"/proc/{machine.process.pid}/environ").read_bytes()
        assert private not in machine.log.read_text()
    for pid in processes_of(ended):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert private.encode() not in environ and b"NODE_RANK=" not in environ
    assert {status.name for status in job.status().hosts} == {f"{body['name']}-0", f"{body['name']}-1"}
    job.resize(1)  # one machine of the multi-machine job is stopped
    wait_until(lambda: [one.state == "running" for one in platform.machines.values()] == [True, False], "one is left")
    job.kill()
    wait_until(lambda: not processes_of(ended), "the workers have ended")


def test_no_log_has_the_key(
    platform: Platform,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_sdk.lightning_cloud import env  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(env, "DEBUG", True)  # DEBUG=1, when the SDK is imported
    caplog.set_level(logging.DEBUG)
    job = LightningJob({"hosts": 1}, idle=60)
    job.apply()
    job.wait(patience(60))
    (body,) = asked(platform)
    private = json.loads(body["spec"]["env"][0]["value"])["private"]
    job.kill()
    out, err = capfd.readouterr()
    assert private not in caplog.text and private not in out and private not in err


def test_single_jobs_end_one_by_one_and_the_private_address_is_dialled(platform: Platform) -> None:
    job = LightningJob({"hosts": 2}, way="single", address="private", idle=60)
    probers: Any = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    assert len({pid for pid, _, _ in probers.told.call().get().values()}) == 2
    assert len(asked(platform)) == 2
    job.resize(1)
    first, second = platform.machines.values()
    wait_until(lambda: second.state != "running", "the second one has ended")
    assert first.state == "running"
    job.kill()


def test_an_image_runs_without_a_studio_and_its_walltime_is_kept(platform: Platform) -> None:
    job = LightningJob({"hosts": 1}, image="image", python="", time_limit=3600, idle=60)
    assert job._python == "python"
    job._python = ""  # the interpreter of this test, which is the image here
    job.state(cached_path=None)
    (body,) = asked(platform)
    assert body["spec"]["entrypoint"] == "sh -c" and body["spec"]["cloudspaceId"] == ""
    assert "timeout -k 10 3600 " in body["spec"]["command"]
    assert job.status().hosts[0].ends_at > 0
    job.kill()


def test_refusals_have_the_platforms_words_and_are_not_repeated(platform: Platform) -> None:
    with pytest.raises(SubmissionRefusedError, match="quota exceeded: at most 4 machines") as caught:
        LightningJob({"hosts": MOST + 1}).apply()
    assert "(HTTP 400)" in caught.value.said and len(asked(platform)) == 1
    with pytest.raises(SubmissionRefusedError, match="there is no Studio 'nolab'.*the teamspace has: lab"):
        LightningJob({"hosts": 1}, studio="nolab").apply()
    with pytest.raises(SubmissionRefusedError, match=r"0 teamspaces are called 'no'.*vision \(project-1\)"):
        LightningJob({"hosts": 1}, teamspace="no").apply()
    with pytest.raises(InfeasibleError, match="L4_X_4 of Lightning has 4 GPUs, and 8 were asked for"):
        LightningJob({"hosts": 1}, "L4_X_4", resources=Resources(gpus=8)).apply()
    with pytest.raises(InfeasibleError, match="takes no numbers of processors"):
        LightningJob({"hosts": 1}, resources=Resources(cpus=3)).apply()
    assert not registry.records() and not platform.machines


def test_a_platform_that_is_not_well_is_asked_again_and_a_job_is_not_made_twice(platform: Platform) -> None:
    job = LightningJob({"hosts": 1}, idle=60)
    job.apply()
    platform.unwell = 2
    assert job.status().hosts[0].state is not HostPhase.GONE
    job.kill()
    before = len(platform.requests)
    again = LightningLauncher(teamspace="vision")
    again._cloud.teamspace("vision")
    platform.unwell = 1
    with pytest.raises(SubmissionRefusedError, match="503"):
        again._cloud.submit("project-1", "name", again._cloud.models.V1JobSpec(command="true"), None)
    assert len([one for one in platform.requests[before:] if one[0] == "POST"]) == 1


def test_who_is_not_logged_in_is_told_so_and_no_browser_is_opened(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_API_KEY")
    with pytest.raises(SubmissionRefusedError, match="not logged in; run 'lightning login'"):
        LightningJob({"hosts": 1}).apply()
    assert not platform.requests


def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lightning_sdk", None)
    monkeypatch.setitem(sys.modules, "lightning_sdk.lightning_cloud.openapi", None)
    with pytest.raises(LaunchError, match=r"pip install 'monarch_kernel\[lightning\]'"):
        LightningJob({"hosts": 1}).apply()
    assert not registry.records()


def test_a_job_that_was_deleted_there_is_gone(platform: Platform) -> None:
    job = LightningJob({"hosts": 1}, idle=60)
    job.apply()
    job.wait(patience(60))
    (machine,) = platform.machines.values()
    machine.stop()
    wait_until(lambda: machine.state == "stopped", "its worker has ended")
    platform.machines.clear()
    status = job.status().hosts[0]
    assert status.state is HostPhase.GONE and status.reason == "Lightning has no such job any more"
    job.kill()


def test_jobs_that_are_in_no_list_are_found_and_ended(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group, single = LightningJob({"hosts": 2}, idle=60), LightningJob({"hosts": 2}, way="single", idle=60)
    for job in (group, single):
        job.apply()
        job.wait(patience(60))
    single.resize(1)
    other = platform.models.V1JobSpec(command="sleep 60", image="image", env=[])
    platform.machines["other"] = Machine(platform, "other", f"x-{single.job_id}-7", other)
    assert all(job.record is not None for job in list_jobs().jobs if job.engine == "lightning")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
        found = {job.job: job for job in list_jobs().jobs if job.engine == "lightning"}
        assert {job: str(one.status) for job, one in found.items()} == {
            str(group.job_id): "2 of 2 hosts up: 2 up",
            str(single.job_id): "1 of 1 hosts up: 1 up",
        }
        workers = [pid for job in (group, single) for pid in processes_of(job.job_id)]
        for pid in workers:  # they need their time to end: their jobs are over from the request on
            os.kill(pid, signal.SIGSTOP)
        try:
            for job in found.values():
                assert job.record is None
                job.end()
            assert not LightningLauncher.found(own_process=False)
            assert not group.active and not single.active
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
    assert platform.machines["other"].state == "running"
    for job in (group, single):
        job.kill()


def test_a_worker_without_an_interpreter_says_so(platform: Platform) -> None:
    job = LightningJob({"hosts": 1}, python="no-such-python")
    with pytest.raises(StartFailedError, match=r"exit code 127.*not found") as caught:
        job.state(cached_path=None)
    assert "interpreter" in caught.value.check
