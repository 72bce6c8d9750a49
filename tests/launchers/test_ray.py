"""Hosts from a real Ray: what every launcher does, and what is Ray's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import InfeasibleError, LaunchError, SupervisionError
from monarch_kernel.job import EngineJob, RayJob
from monarch_kernel.launchers.base import HostPhase, Launcher, Resources
from monarch_kernel.launchers.ray import RayLauncher
from monarch_kernel.launchers.ray import cluster as ray_cluster
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, Prober, clean, processes_of
from tests.launchers.ray_nodes import Ray, ray_nodes
from tests.waiting import patience

__all__ = ["clean", "ray_nodes"]


class RayEngine(Engine):
    """Two nodes."""

    most = 2

    def launcher(self) -> Launcher:
        return RayLauncher()

    def queue(self) -> Launcher:
        return RayLauncher(spares=2, autoscaling=True)


@pytest.fixture
def engine(ray_nodes: Ray) -> Engine:
    return RayEngine()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, clean: None) -> Iterator[None]:
    """Each test leaves the cluster without actors and placement groups of ours."""
    yield
    if "ray_nodes" in request.fixturenames:
        assert not _groups(), "placement groups are left"
        wait_until(lambda: not _actors(), "no actor is left")


def _groups() -> list[ray_cluster.RayGroup]:
    return [group for group in ray_cluster.groups(ray_cluster.load()).values() if group.state != "REMOVED"]


def _actors() -> list[str]:
    named = ray_cluster.load().util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == ray_cluster.NAMESPACE]


class TestRay(Conformance):
    pass


def probed(job: EngineJob) -> tuple[Any, Any]:
    """A mesh of a rank on each host, and actors on it."""
    procs = job.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    return procs, procs.spawn("probers", Prober)


def test_ray_moves_a_place_from_a_node_that_is_lost(ray_nodes: Ray) -> None:
    job = RayJob({"hosts": 1}, gpus=2, resources={"slot": 1}, idle=60)
    procs, probers = probed(job)
    first = probers.told.call_one().get()[0]
    (host,) = job.status().hosts
    assert host.devices == ("0", "1") and host.name in ("n1", "n2")
    with hook(lambda _failure: None), pytest.raises(SupervisionError):
        ray_nodes.lose(host.name)
        while True:
            probers.told.call_one().get()
    wait_until(lambda: not job.active, "it is known to be lost")
    assert job.status().reason
    procs.heal(hosts=job).get()
    assert probers.told.call_one().get()[0] != first
    (other,) = job.status().hosts
    assert other.state is HostPhase.UP and {host.name, other.name} == {"n1", "n2"} and other.devices == ("0", "1")
    assert len(_groups()) == 1
    job.kill()
    ray_nodes.add(host.name)


def test_places_are_on_nodes_of_their_own_and_waiting_says_for_what(ray_nodes: Ray) -> None:
    job = RayJob({"hosts": 1}, gpus=1, idle=60)
    job.state(cached_path=None)
    assert len(job.resize(2)) == 2
    assert {host.name for host in job.status().hosts} == {"n1", "n2"}
    waits = RayJob({"hosts": 2}, gpus=2, idle=60)
    waits.apply()
    wait_until(lambda: "NO_RESOURCES" in waits.status().reason, "Ray has looked for nodes")
    reason = waits.status().reason
    assert "2 x (CPU 1, GPU 2), STRICT_SPREAD; free in the cluster: CPU 6 of 8, GPU 2 of 4" in reason
    job.kill()
    assert len(waits.state(cached_path=None).hosts) == 2
    waits.kill()


def test_a_worker_and_its_actor_end_together(ray_nodes: Ray) -> None:
    ray = ray_cluster.load()
    job = RayJob({"hosts": 1}, idle=60)
    job.apply()
    job.wait()
    ray.kill(ray.get_actor(f"{job.job_id}.0", namespace=ray_cluster.NAMESPACE))
    wait_until(lambda: not processes_of(job.job_id), "the worker has ended with its actor")
    wait_until(lambda: not job.active, "Ray knows of it")
    assert "ray.kill" in job.status().reason
    job.kill()
    # Nobody attaches to this one: it ends by itself, and frees what it had of the cluster.
    job = RayJob({"hosts": 1}, idle=1.0)
    job.apply()
    wait_until(lambda: not (_groups() or _actors() or processes_of(job.job_id)), "all of it is free again")
    job.kill()


def test_what_can_never_be_had_says_what_there_is(ray_nodes: Ray) -> None:
    for wish, said in (
        ({"gpus": 3}, "INFEASIBLE"),
        ({"resources": {"TPU": 4}}, "INFEASIBLE"),
        ({"strategy": "STRICT_PACK", "cpus": 3}, ""),
        ({"spares": 1}, "NO_RESOURCES"),
    ):
        has = r"The cluster has 2 nodes with CPU 4, GPU 2, slot 1; 1 node with nothing\."
        with pytest.raises(InfeasibleError, match=f"{said}.*{has}"):
            RayJob({"hosts": 2}, **wish).apply()  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="Ray knows no partition"):
        EngineJob(RayLauncher(), {"hosts": 1}, resources=Resources(options={"partition": "debug"})).apply()


def test_jobs_that_are_in_no_list_are_found_and_ended(ray_nodes: Ray, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        line = [sys.executable, "-P", "-m", "monarch_kernel", *words]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "another")}
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = RayJob({"hosts": 1}, idle=60)
    job.apply()
    job.wait()
    job.resize(2)  # in a placement group of its own
    (found,) = [each for each in json.loads(run("jobs", "--json")) if each["engine"] == "ray"]
    assert found["job"] == job.job_id and found["used_by"] == "not in this list of jobs"
    assert {(host["state"], host["name"]) for host in found["hosts"]} == {("up", "n1"), ("up", "n2")}
    assert run("kill", str(job.job_id)) == f"job {job.job_id} of ray ended\n"
    assert not job.active and not _groups()
    job.kill()


def test_what_the_autoscaler_says_is_told(ray_nodes: Ray) -> None:
    job = RayJob({"hosts": 1}, gpus=3, autoscaling=True, idle=60)
    job.apply()
    said = "the autoscaler has no available node types that can fulfill it"
    wait_until(lambda: said in job.status().reason, "the autoscaler has looked at it", 30)
    job.kill()


def test_addresses_of_rays_client_are_refused() -> None:
    with pytest.raises(ValueError, match="ray://head:10001: hosts cannot be had through Ray's client; run the pro"):
        RayJob({"hosts": 1}, "ray://head:10001")
    with pytest.raises(LaunchError, match="or name the cluster's own address"):  # as RAY_ADDRESS may name it
        ray_cluster._connected(ray_cluster.load(), "ray://head:10001")


def test_one_process_uses_one_cluster(ray_nodes: Ray) -> None:
    with pytest.raises(ConnectionError, match=f"connected to the Ray cluster at {ray_nodes.address}"):
        RayJob({"hosts": 1}, "10.0.0.1:6379").apply()


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no strategy 'ANYHOW'"):
        RayJob({"hosts": 1}, strategy="ANYHOW")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    current = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_cluster, "_CURRENT", str(current))
    with pytest.raises(ConnectionError, match="no Ray cluster on this machine"):
        ray_cluster.local_address()
    current.write_text("127.0.0.1:1234")
    assert ray_cluster.local_address() == "127.0.0.1:1234"
    if os.getuid() == 0:
        os.chown(current, 12345, 12345)
        with pytest.raises(ConnectionError, match="another user's"):
            ray_cluster.local_address()


def test_without_ray_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["ray"] = None
from monarch_kernel.job import RayJob
RayJob({"hosts": 1}).apply()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(100))
    assert "LaunchError: hosts from Ray need its package" in done.stderr and "monarch_kernel[ray]" in done.stderr
