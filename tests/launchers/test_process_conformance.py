"""The launcher of processes of this machine does what every launcher does."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.errors import StartFailedError, StartTimeoutError, SupervisionError
from monarch_kernel.job import EngineJob
from monarch_kernel.launchers import engine_job, process, registry
from monarch_kernel.launchers.base import (
    HostPhase,
    HostStatus,
    JobStatus,
    Launcher,
    LaunchRequest,
    Resources,
    Ticket,
)
from monarch_kernel.launchers.process import ProcessLauncher
from monarch_kernel.launchers.walltime import WalltimeNotice
from monarch_kernel.runtime.host.worker_agent import WALLTIME_MARGIN
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, clean, processes_of
from tests.waiting import patience

__all__ = ["clean"]


class ProcessEngine(Engine):
    """This machine, which gives any number of hosts at once."""

    def launcher(self) -> Launcher:
        return ProcessLauncher()


@pytest.fixture
def engine() -> Engine:
    return ProcessEngine()


class TestProcess(Conformance):
    pass


class Saver(Actor):
    """Leaves a file behind when it is ended in good order."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __cleanup__(self, _exc: Exception | None) -> None:
        Path(f"saved-{os.getpid()}").touch()


class CrowdedLauncher(ProcessLauncher):
    """Has one host to give; others wait in its queue."""

    name = "crowded"

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        return msgspec.structs.replace(ticket, hosts=ticket.hosts + count)

    def poll(self, ticket: Ticket) -> JobStatus:
        given = super().poll(msgspec.structs.replace(ticket, hosts=1)).hosts
        queued = [HostStatus(host=n, state=HostPhase.QUEUED, reason="Resources") for n in range(1, ticket.hosts)]
        return JobStatus((*given, *queued))


@pytest.mark.parametrize("keep", [True, False])
def test_hosts_that_are_up_stay_or_end_when_others_do_not_come(keep: bool) -> None:
    job = EngineJob(CrowdedLauncher(), {"hosts": 2}, idle=60, keep_partial=keep, timeout=0.1)
    job.apply()
    record = registry.read(job.job_id)
    assert record is not None and record.ticket is not None
    wait_until(lambda: job.status().of(HostPhase.UP), "one host is up")
    with pytest.raises(StartTimeoutError, match=r"1 of 2 hosts were up after 0.1 s; the others: Resources\.") as caught:
        job.state(cached_path=None)
    assert (caught.value.up, caught.value.wanted, caught.value.reason) == (1, 2, "Resources")
    assert bool(processes_of(record.job)) is bool(registry.records()) is keep
    if keep:
        assert [host.state for host in job.status().hosts] == [HostPhase.UP, HostPhase.QUEUED]
        job.kill()
        assert not processes_of(record.job)


def test_the_warning_does_not_wait_for_hosts_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_job, "_RENEWAL", 0.1)
    notices: list[WalltimeNotice] = []
    job = EngineJob(
        CrowdedLauncher(),
        {"hosts": 1},
        resources=Resources(walltime=600),
        idle=60,
        warn_before=599,
        renew=True,
        on_walltime=notices.append,
    )
    job.state(cached_path=None)
    wait_until(lambda: notices, "the end is warned of")
    assert "there are no other hosts: they are asked for, and are not up yet" in str(notices[0])
    job.kill()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "walltime-renewal"], "nobody asks")


class LimitedFirst(ProcessLauncher):
    """Later hosts have no limit."""

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        return super().more(ticket, count, dataclasses.replace(request, resources=Resources()))


def test_the_end_of_the_walltime_is_warned_of_and_other_hosts_take_over(tmp_path: Path) -> None:
    notices: list[WalltimeNotice] = []
    left = patience(6.0)
    job = EngineJob(
        LimitedFirst(),
        {"hosts": 1},
        resources=Resources(walltime=WALLTIME_MARGIN + left),
        idle=60,
        warn_before=WALLTIME_MARGIN + left - 1.0,
        renew=True,
        on_walltime=notices.append,
    )
    hosts = job.state(cached_path=None).hosts
    assert "; the walltime ends in " in str(job.status())
    procs = hosts.spawn_procs(per_host={"gpus": 1}, restart="on_failure", spares=job)
    savers: Any = procs.spawn("savers", Saver)
    before = savers.pid.call_one().get()
    wait_until(lambda: notices, "the end is warned of")
    assert notices[0].renewed and [host.host for host in notices[0].hosts] == [0]
    assert "ends in" in str(notices[0]) and "other hosts are up" in str(notices[0])
    assert savers.pid.call_one().get() == before
    wait_until(lambda: (tmp_path / f"saved-{before}").exists(), "the actor has cleaned up")
    after = before

    def moved() -> bool:
        nonlocal after
        try:
            after = savers.pid.call_one().get()
        except SupervisionError:
            return False
        return after != before

    wait_until(moved, "the actor is on another host")
    assert [host.host for host in job.status().hosts] == [1]
    job.kill()


def test_the_exit_code_is_told_before_the_command_is_reaped(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_reap", lambda started: None)
    job = engine.job(1, python=engine.python(broken=True, folder=tmp_path))
    with pytest.raises(StartFailedError) as caught:
        job.state(cached_path=None)
    assert caught.value.exit_code == 3
