"""Hosts by ssh, from a real sshd: what every launcher does, and what is ssh's own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import InfeasibleError, LaunchError, StartFailedError
from monarch_kernel.job import SSHJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import Launcher
from monarch_kernel.launchers.ssh import FRESH, SSHLauncher, hostfile, monarch_ssh_job
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, Prober, clean, processes_of
from tests.launchers.sshd import Sshd, sshd
from tests.waiting import patience

__all__ = ["clean", "sshd"]


class SshEngine(Engine):
    """Four names of this machine."""

    most = 4

    def __init__(self, daemon: Sshd) -> None:
        self._daemon = daemon

    def launcher(self) -> Launcher:
        return SSHLauncher([f"node{n}" for n in range(4)], self._daemon.command)


@pytest.fixture
def engine(sshd: Sshd) -> Engine:
    return SshEngine(sshd)


class TestSsh(Conformance):
    pass


def told(job: SSHJob) -> list[int]:
    """The processes of a rank on each host."""
    probers: Any = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    return [pid for pid, _, _ in probers.told.call().get().values()]


def test_closed_ports_and_jump_hosts_are_reached_through_ssh(sshd: Sshd) -> None:
    job = SSHJob(["jumped0", "jumped1"], ssh=sshd.command, tunnel=True, idle=60)
    assert len(told(job)) == 2
    assert job._launcher.route(job._record().ticket, job.status().hosts[0]) != job.status().hosts[0].url  # type: ignore[arg-type]
    job.kill()


def test_a_connection_that_ssh_keeps_is_used_again_and_delays_nothing(sshd: Sshd) -> None:
    job = SSHJob(["kept0", "kept1"], ssh=sshd.command, tunnel=True, idle=60)
    assert len(told(job)) == 2
    try:
        for host in ("kept0", "kept1"):
            assert os.path.exists(f"{sshd.masters}/{host}")
        job.kill()
    finally:
        for host in ("kept0", "kept1"):
            subprocess.run([*sshd.command, "-O", "exit", host], check=True, capture_output=True, timeout=patience(30))


def test_a_host_that_cannot_be_reached_says_what_ssh_said(sshd: Sshd) -> None:
    job = SSHJob(["node0", "closed"], ssh=sshd.command, idle=60)
    with pytest.raises(
        StartFailedError, match=r"closed did not start \(exit code 255\): .*Connection refused"
    ) as caught:
        job.state(cached_path=None)
    assert caught.value.check == "Check that the host is up, and the port"
    assert not registry.records()


def test_a_lost_host_moves_to_a_spare_of_the_list(sshd: Sshd) -> None:
    job = SSHJob(["node0", "node1"], {"hosts": 1}, ssh=sshd.command, idle=60)
    job.state(cached_path=None)
    assert job._record().ticket.data["hosts"] == ["node0"]  # type: ignore[union-attr]
    job.resize(2)
    with pytest.raises(InfeasibleError, match="1 more hosts were asked for, and 0 .* free"):
        job.resize(3)
    assert len(job.status().hosts) == 2
    job.kill()


def test_hosts_that_wait_for_the_last_one_are_not_asked_again_by_ssh(sshd: Sshd, tmp_path: Path) -> None:
    counted, gate = tmp_path / "counted", tmp_path / "gate"
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\nfor last; do host=$before; before=$last; done\necho $host >> {counted}\n"
        f'[ $host = node0 ] || until [ -e {gate} ]; do sleep 0.05; done\nexec {shlex.join(sshd.command)} "$@"\n'
    )
    ssh.chmod(0o700)
    job = SSHJob(["node0", "node1"], ssh=[str(ssh)], idle=60)
    job.apply()
    said = Path(os.path.expanduser(f"~/.local/state/monarch_kernel/workers/{job.job_id}.0.json"))
    wait_until(said.exists, "the first has announced itself")
    announced = time.monotonic()
    wait_until(lambda: time.monotonic() > announced + FRESH, "what it said is old")
    gate.touch()
    job.state(cached_path=None)
    assert sorted(counted.read_text().split()) == ["node0", "node1"]
    job.kill()


def test_files_on_hosts_are_private_and_go_with_the_job(sshd: Sshd) -> None:
    job = SSHJob(["node0"], ssh=sshd.command, idle=60)
    job.state(cached_path=None)
    folder = Path(os.path.expanduser("~/.local/state/monarch_kernel/workers"))
    files = sorted(path.name for path in folder.glob(f"{job.job_id}.*"))
    assert files == [f"{job.job_id}.0.json", f"{job.job_id}.0.log"]
    assert all((folder / name).stat().st_mode & 0o777 == 0o600 for name in files)
    assert "listens at tcp://127.0.0.1:" in job.log(0)
    ended = job.job_id
    job.kill()
    assert not list(folder.glob(f"{ended}.*")) and not processes_of(ended)


def test_meshes_are_added_by_their_hosts(sshd: Sshd) -> None:
    job = monarch_ssh_job(python_exe=sys.executable, ssh_args=sshd.command[1:], transport="tls", idle=60)
    with pytest.raises(ValueError, match="has no mesh: add_mesh"):
        job.apply()
    job.add_mesh("trainers", ["node0"])
    job.add_mesh("generators", ["node1", "node2"])
    for name, hosts, why in (
        ("trainers", ["node3"], "is a mesh"),
        ("none", [], "at least 1"),
        ("x", ["-o"], "is not a"),
    ):
        with pytest.raises(ValueError, match=why):
            job.add_mesh(name, hosts)
    assert job.meshes == {"trainers": 1, "generators": 2}
    state = job.state(cached_path=None)
    assert [state.trainers.size(), state.generators.size()] == [1, 2]
    assert job._launcher.options()["hosts"] == ["node0", "node1", "node2"]
    with pytest.raises(RuntimeError, match="too late"):
        job.add_mesh("more", ["node3"])
    job.kill()
    with pytest.raises(ValueError, match="cannot use the transport 'ipc'"):
        monarch_ssh_job(transport="ipc")


def test_hostfiles_and_names_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# cluster\nnode1 slots=8\n\nada@node2\n")
    assert hostfile(path) == ["node1", "ada@node2"]
    path.write_text("#\n")
    with pytest.raises(ValueError, match="names no host"):
        SSHJob(path)
    with pytest.raises(ValueError, match="is not a host for ssh"):
        SSHJob(["-oProxyCommand=touch x"])
    with pytest.raises(LaunchError, match="there is no command nossh"):
        SSHJob(["node1"], ssh=("nossh",)).apply()
