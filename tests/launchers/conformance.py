"""What every launcher does, as tests: a class of them for an ``Engine``, which says how to bring each situation about.

For a launcher of your own: a subclass of ``Engine``, a fixture ``engine`` that gives one, and
``from tests.launchers.conformance import *`` (docs/launchers.md).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.actor import Actor, endpoint, shutdown_context
from monarch_kernel.errors import (
    InfeasibleError,
    LaunchError,
    StartFailedError,
    StartTimeoutError,
    SubmissionRefusedError,
    SupervisionError,
)
from monarch_kernel.job import EngineJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import MARKER, HostPhase, Launcher, Ticket
from tests.actor.actors import hook
from tests.conftest import alive, wait_until

__all__ = ["Conformance", "Engine", "Prober", "clean", "processes_of"]

#: An environment variable whose value no other process may show.
SECRET = "TEST_OF_LAUNCHERS"


class Engine(ABC):
    """Brings about what the tests need of one engine. What it cannot do is None, and skips the test visibly."""

    @abstractmethod
    def launcher(self) -> Launcher:
        """A launcher for some hosts, a new object each time."""

    #: The most hosts that it can give; 0: no limit, so that no request is infeasible.
    most = 0

    def python(self, *, broken: bool = False, gate: Path | None = None, folder: Path) -> str:
        """An interpreter for the hosts that fails, or waits until a file is there."""
        path = folder / "python"
        wait = f"while [ ! -e {gate} ]; do sleep 0.02; done\n" if gate is not None else ""
        fail = "echo 'No module named monarch_kernel' >&2; exit 3\n" if broken else ""
        path.write_text(f'#!/bin/sh\n{wait}{fail}exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def queue(self) -> Launcher | None:
        """A launcher whose requests wait in the queue of the engine, and are never given; None: it has no queue."""
        return None

    def job(self, hosts: int, **options: Any) -> EngineJob:
        """A job with a mesh ``hosts``."""
        options.setdefault("idle", 60.0)
        return EngineJob(options.pop("launcher", None) or self.launcher(), {"hosts": hosts}, **options)


class Prober(Actor):
    """Tells of its process."""

    @endpoint
    def told(self) -> tuple[int, str | None, list[str]]:
        """Its process, and what its environment says of the test and of keys."""
        keys = [name for name in os.environ if "KEY" in name and name.startswith("MONARCH")]
        return os.getpid(), os.environ.get(SECRET), keys


def processes_of(job: str) -> set[int]:
    """The living processes of a job on this machine."""
    mark = f"{MARKER}={job}.".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if any(item.startswith(mark) for item in (entry / "environ").read_bytes().split(b"\0")):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A list of jobs of this test's own, which is empty at its end, with no process left of those that were in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    made: set[str] = set()
    add = registry.add

    def noted(record: registry.JobRecord, key: str | None, env: dict[str, str]) -> None:
        made.add(record.job)
        add(record, key, env)

    monkeypatch.setattr(registry, "add", noted)
    yield
    shutdown_context().get()
    left = [record.job for record in registry.records()]
    for job in left:
        EngineJob.find(job).kill()
    for job in made:
        wait_until(lambda job=job: not processes_of(job), f"nothing is left of job {job}")
    assert not left, f"jobs are left in the list: {left}"


def script(code: str, **variables: str) -> str:
    """What another program prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Conformance:
    """The tests. A test module makes a subclass of it, beside a fixture ``engine``."""

    def test_hosts_come_up_and_nothing_is_secret_that_others_see(self, engine: Engine) -> None:
        job = engine.job(2, env={SECRET: "a-secret-value"})
        seen: list[str] = []
        job.on_progress = lambda status: seen.append(str(status))
        hosts = job.state(cached_path=None).hosts
        assert len(hosts) == 2 and len(seen) >= 1
        status = job.status()
        assert [host.state for host in status.hosts] == [HostPhase.UP] * 2
        assert str(status).startswith("2 of 2 hosts up")
        assert all(host.url and host.worker and host.name for host in status.hosts)
        probers: Any = hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
        told = list(probers.told.call().get().values())
        assert [value for _, value, _ in told] == ["a-secret-value"] * 2
        assert all(not keys for _, _, keys in told)
        record = registry.read(job.job_id)
        assert record is not None and record.ticket is not None
        private = "" if not job._launcher.needs_key else self._private(job.job_id)
        public = [msgspec.json.encode(record).decode(), job.dumps().decode(), job.log(), repr(job), repr(record)]
        public += [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in processes_of(job.job_id)]
        environs = [Path(f"/proc/{pid}/environ").read_bytes().decode() for pid in processes_of(job.job_id)]
        for text in public:
            assert "a-secret-value" not in text
        for text in [*public, *environs]:
            assert not private or private not in text
        again = pickle.loads(pickle.dumps(record.ticket))
        assert again == record.ticket == msgspec.json.decode(msgspec.json.encode(again), type=Ticket)
        job.kill()
        assert not job.active and registry.read(record.job) is None
        assert not processes_of(record.job)

    def _private(self, job: str) -> str:
        path = Path(registry.key_path(job))
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        return str(msgspec.json.decode(path.read_bytes())["private"])

    def test_what_can_never_be_had_is_refused_at_once(self, engine: Engine) -> None:
        if not engine.most:
            pytest.skip("this engine has no limit")
        job = engine.job(engine.most + 1)
        with pytest.raises((InfeasibleError, SubmissionRefusedError), match=str(engine.most)):
            job.apply()
        assert not job.active and not registry.records()

    def test_a_start_that_fails_says_where_and_why_and_gives_the_others_back(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        job = engine.job(2, python=engine.python(broken=True, folder=tmp_path))
        with pytest.raises(StartFailedError, match=r"exit code 3.*No module named monarch_kernel") as caught:
            job.state(cached_path=None)
        assert "Install monarch_kernel" in str(caught.value) and caught.value.host
        assert not job.active and not registry.records()

    def test_a_slow_start_is_waited_for_up_to_a_limit(self, engine: Engine, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        job = engine.job(1, python=engine.python(gate=gate, folder=tmp_path), timeout=0.2, keep_partial=True)
        with pytest.raises(StartTimeoutError, match="0 of 1 hosts were up after 0.2 s; the others: .") as caught:
            job.state(cached_path=None)
        assert (caught.value.up, caught.value.wanted) == (0, 1)
        gate.touch()
        job.timeout = 60
        assert len(job.state(cached_path=None).hosts) == 1
        job.kill()

    def test_a_job_that_is_cancelled_in_the_queue_is_gone(self, engine: Engine) -> None:
        launcher = engine.queue()
        if launcher is None:
            pytest.skip("this engine has no queue")
        job = engine.job(1, launcher=launcher, keep_partial=True)
        with pytest.raises(StartTimeoutError, match="0 of 1 hosts"):
            job.apply()
            job.wait(1.0)
        status = job.status()
        assert status.hosts[0].state is HostPhase.QUEUED and status.reason
        EngineJob.find(job.job_id).kill()
        assert not job.active
        with pytest.raises(LaunchError, match="not applied, or was ended"):
            job.wait()

    def test_a_start_is_cancelled_while_it_goes_on(self, engine: Engine, tmp_path: Path) -> None:
        job = engine.job(1, python=engine.python(gate=tmp_path / "never", folder=tmp_path))
        job.apply()
        assert job.active
        job.kill()
        assert not job.active and not registry.records()

    def test_a_lost_host_is_replaced(self, engine: Engine) -> None:
        job = engine.job(2)
        procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
        probers: Any = procs.spawn("probers", Prober)
        before = [pid for pid, _, _ in probers.told.call().get().values()]
        with hook(lambda _failure: None):  # the loss may be noticed between two calls
            self._lose(job, 1)
            with pytest.raises(SupervisionError):
                while True:
                    probers.told.call().get()
        wait_until(lambda: not job.active, "the engine knows of it")
        healed = procs.heal(hosts=job).get()
        assert [one.rank for one in healed.replaced] == [1]
        after = [pid for pid, _, _ in probers.told.call().get().values()]
        assert after[0] == before[0] and after[1] != before[1]
        assert job.active and [host.state for host in job.status().hosts] == [HostPhase.UP] * 2
        assert len(job.state(cached_path=None).hosts) == 2
        job.kill()

    def _lose(self, job: EngineJob, host: int) -> None:
        """Kill all processes of a host at once, as its loss does."""
        mark = f"{MARKER}={job.job_id}.{host}".encode()
        for pid in processes_of(job.job_id):
            with contextlib.suppress(OSError):  # it has ended with another one
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, 9)

    def test_a_mesh_grows_and_shrinks(self, engine: Engine) -> None:
        job = engine.job(1)
        procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
        first: Any = procs.spawn("probers", Prober)
        pid = first.told.call_one().get()[0]
        grown = job.resize(2)
        assert len(grown) == 2 and len(job.state(cached_path=None).hosts) == 2
        probers: Any = grown.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
        assert len({pid for pid, _, _ in probers.told.call().get().values()}) == 2
        assert len(job.resize(1)) == 1
        wait_until(lambda: len(job.status().hosts) == 1, "one host is left")
        assert first.told.call_one().get()[0] == pid
        job.kill()

    def test_another_program_finds_and_ends_it(self, engine: Engine) -> None:
        job = engine.job(1)
        job.state("state.json")
        same = engine.job(1)
        same.state("state.json")
        assert same.job_id == job.job_id
        told = script(
            """
            import sys
            from monarch_kernel.job import EngineJob, job_load
            job = job_load("state.json")
            hosts = job.state(cached_path=None).hosts
            print(job.job_id, len(hosts), str(EngineJob.find(job.job_id).status()).split(":")[0])
            job.kill()
            """
        )
        assert told == f"{job.job_id} 1 1 of 1 hosts up"
        wait_until(lambda: not job.active, "it has ended")
        job.kill()
        job.kill()

    def test_nothing_is_left_of_a_program_that_is_killed(self, engine: Engine) -> None:
        launcher = engine.launcher()
        code = """
            import json, os, signal
            from monarch_kernel.job import EngineJob
            from monarch_kernel.launchers.base import launcher_class
            options = json.loads(os.environ["OPTIONS"])
            launcher = launcher_class(os.environ["LAUNCHER"]).of(options)
            job = EngineJob(launcher, {"hosts": 1}, idle=2.0)
            hosts = job.state(cached_path=None).hosts
            hosts.spawn_procs(per_host={"gpus": 1}).initialized.get()
            print(job.job_id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            env={**os.environ, "LAUNCHER": launcher.name, "OPTIONS": msgspec.json.encode(launcher.options()).decode()},
        )
        job = done.stdout.strip()
        assert done.returncode == -9 and job
        wait_until(lambda: not processes_of(job), "its host has ended after the idle time")
        found = EngineJob.find(job)
        wait_until(lambda: not found.active, "the engine knows of it")
        assert found.status().hosts[0].state is HostPhase.GONE
        found.kill()

    def test_two_jobs_at_once(self, engine: Engine) -> None:
        one, two = engine.job(1), engine.job(1)
        told: list[Any] = []
        for job in (one, two):
            procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
            told.append(procs.spawn("probers", Prober))
        pids = {prober.told.call_one().get()[0] for prober in told}
        assert len(pids) == 2 and one.job_id != two.job_id
        one.kill()
        assert two.active and told[1].told.call_one().get()[0] in pids
        two.kill()
