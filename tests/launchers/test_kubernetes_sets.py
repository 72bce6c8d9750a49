"""Hosts in MonarchMeshes and JobSets: the API server is real, and their controllers are those of ``controllers.py``."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
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
from monarch_kernel.job import EngineJob
from monarch_kernel.job.kubernetes import ImageSpec, KubernetesJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import MARKER, HostPhase, Launcher
from monarch_kernel.launchers.kubernetes import KubernetesLauncher
from monarch_kernel.launchers.kubernetes.options import HostPlacement, held
from monarch_kernel.launchers.kubernetes.pods import HOST_LABEL, SeenPod
from monarch_kernel.launchers.kubernetes.sets import POD_SETS, PodSlot, admission
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.workers import new_key_text
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, Prober, clean, processes_of
from tests.launchers.controllers import Controllers, controllers
from tests.launchers.kubelet import GPU
from tests.launchers.kubernetes import Cluster, cluster, one_cluster
from tests.launchers.test_kubernetes import IMAGE, empty, job, told
from tests.waiting import patience

__all__ = ["clean", "cluster", "controllers", "empty", "one_cluster"]

PATCH = "application/merge-patch+json"


def test_a_cluster_without_the_operator_says_so(cluster: Cluster) -> None:
    for through, said in (("monarchmesh", "monarchmeshes.monarch.pytorch.org"), ("jobset", "jobsets.jobset.x-k8s.io")):
        with pytest.raises(SubmissionRefusedError, match=rf"no {said} of version .*404 page.*through='pods'"):
            job(through=through).apply()
    assert not registry.records() and not cluster.secrets()


def test_pods_are_made_where_the_cluster_has_no_operator(cluster: Cluster) -> None:
    """As Monarch's programs ask for them; their spec is of the package, with a worker of Monarch in it."""
    client = importlib.import_module("kubernetes.client")
    memory = client.V1EmptyDirVolumeSource(medium="Memory", size_limit="1Gi")
    container = client.V1Container(
        name="main",
        image=IMAGE,
        command=["python", "-c", "from monarch.actor import run_worker_loop_forever"],
        env=[client.V1EnvVar(name="TEAM", value="vision")],
        resources=client.V1ResourceRequirements(limits={"nvidia.com/gpu": "1"}),
        volume_mounts=[client.V1VolumeMount(name="dshm", mount_path="/dev/shm")],
    )
    spec = client.V1PodSpec(containers=[container], volumes=[client.V1Volume(name="dshm", empty_dir=memory)])
    made = KubernetesJob(namespace="default", idle=60)
    made.add_mesh("trainers", num_replicas=1, pod_spec=spec, labels={"team": "vision"})
    made.add_mesh("generators", num_replicas=1, pod_spec=spec, labels={"team": "vision"})
    with pytest.raises(ValueError, match="this job has a mesh trainers already"):
        made.add_mesh("trainers", num_replicas=1, pod_spec=spec)
    with pytest.raises(ValueError, match="mesh-name=others have a key already: name its file with key_file="):
        made.add_mesh("others", num_replicas=1)
    state: Any = made.state(cached_path=None)
    assert (len(state.trainers), len(state.generators)) == (1, 1)
    (pod, _) = cluster.pods()
    assert pod["metadata"]["labels"]["team"] == "vision" and pod["metadata"]["labels"][HOST_LABEL] in "01"
    (worker,) = pod["spec"]["containers"]
    assert (worker["name"], worker["image"], worker["resources"]["limits"]) == ("worker", IMAGE, {GPU: "1"})
    assert "monarch_kernel" in worker["command"] and {"name": "TEAM", "value": "vision"} in worker["env"]
    assert [each["name"] for each in worker["volumeMounts"]] == ["dshm"]
    with pytest.raises(LaunchError, match="is applied: its meshes are what they are"):
        made.add_mesh("others", num_replicas=1, image_spec=IMAGE)
    made.kill()


def test_each_mesh_takes_the_pods_of_others_by_labels_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(new_key_text("others"))
    theirs = [job(labels={"app": app}, key_file=key) for app in ("one", "two")]
    for each in theirs:
        each.apply()
        each.wait()
    made = KubernetesJob(namespace="default", key_file=key)
    made.add_mesh("mesh1", num_replicas=1, label_selector="app=one", pod_rank_label=HOST_LABEL)
    made.add_mesh("mesh2", num_replicas=1, label_selector="app=two", pod_rank_label="numbered-otherwise")
    state: Any = made.state(cached_path=None)
    assert (len(state.mesh1), len(state.mesh2)) == (1, 1)
    assert [host.name for host in made.status().hosts] == [each.status().hosts[0].name for each in theirs]
    with pytest.raises(InfeasibleError, match="0 Pods .* have the labels app=two and are free"):
        made.resize(2, "mesh2")
    made.kill()
    for each in theirs:
        each.kill()
    with pytest.raises(ValueError, match=r"app.kubernetes.io/name=monarch-worker,.*mesh-name=mesh1 have a key already"):
        KubernetesJob(namespace="default").add_mesh("mesh1", num_replicas=1)
    with pytest.raises(ValueError, match="has no mesh: add_mesh"):
        KubernetesJob(namespace="default").apply()


class SetEngine(Engine):
    def __init__(self, through: str) -> None:
        self.through = through

    def launcher(self) -> Launcher:
        return KubernetesLauncher(IMAGE, through=self.through)

    def queue(self) -> Launcher:
        return KubernetesLauncher(IMAGE, through=self.through, node_selector={"nowhere": "yes"})


class TestJobSets(Conformance):
    @pytest.fixture
    def engine(self, controllers: Controllers) -> Engine:
        """JobSets only."""
        return SetEngine("jobset")

    def _lose(self, job: EngineJob, host: int) -> None:
        lose(job, job.status().hosts[host].name)


class TestMonarchMeshes:
    """Where a MonarchMesh does something else than a JobSet: containers start again in their Pods."""

    @pytest.fixture
    def engine(self, controllers: Controllers) -> Engine:
        """MonarchMeshes only."""
        return SetEngine("monarchmesh")

    _lose = TestJobSets._lose
    _private = Conformance._private
    test_hosts_come_up = Conformance.test_hosts_come_up_and_nothing_is_secret_that_others_see
    test_a_start_that_fails = Conformance.test_a_start_that_fails_says_where_and_why_and_gives_the_others_back
    test_a_lost_host_is_replaced = Conformance.test_a_lost_host_is_replaced
    test_a_mesh_grows_and_shrinks = Conformance.test_a_mesh_grows_and_shrinks


def lose(made: EngineJob, pod: str) -> None:
    """Kill all processes of a Pod."""
    mark = f"{MARKER}={made.job_id}.{pod}".encode()
    for pid in processes_of(made.job_id):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def objects(cluster: Cluster, through: str, namespace: str = "default") -> list[dict[str, Any]]:
    return cluster.api.request("GET", POD_SETS[through].path(namespace))["items"]


def test_a_monarchmesh_is_as_asked_for_and_shrinks(cluster: Cluster, controllers: Controllers) -> None:
    queue = {"kueue.x-k8s.io/queue-name": "research"}
    made = job(2, through="monarchmesh", labels=queue, gpus=1, walltime=600, key="file")
    assert len(told(made)) == 2
    (mesh,) = objects(cluster, "monarchmesh")
    assert mesh["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert (mesh["spec"]["replicas"], mesh["spec"]["port"]) == (2, 26600)
    assert mesh["spec"]["podTemplate"]["restartPolicy"] == "Always"
    assert [host.name for host in made.status().hosts] == [f"{mesh['metadata']['name']}-{at}" for at in range(2)]
    assert len(made.resize(1)) == 1
    wait_until(lambda: len(cluster.pods()) == 1, "the other one has gone")
    made.kill()
    assert not objects(cluster, "monarchmesh")


def test_the_operator_makes_pods_where_the_cluster_has_it(cluster: Cluster, controllers: Controllers) -> None:
    made = KubernetesJob(namespace="default", idle=60)
    image = ImageSpec(IMAGE, {GPU: 1}, enable_fuse=True, shared_memory_size="1Gi")
    made.add_mesh("trainers", num_replicas=2, image_spec=image)
    assert len(made.state(cached_path=None).trainers) == 2
    (mesh,) = objects(cluster, "monarchmesh")
    (worker,) = mesh["spec"]["podTemplate"]["containers"]
    assert worker["securityContext"] == {"privileged": True} and worker["resources"]["limits"] == {GPU: "1"}
    assert mesh["spec"]["podTemplate"]["volumes"] == [
        {"name": "volume-0", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    ]
    made.kill()


def test_what_is_not_valid_is_refused_by_its_schema(cluster: Cluster, controllers: Controllers) -> None:
    with pytest.raises(SubmissionRefusedError, match=r"spec.port: Invalid value: 70000.*less than or equal to 65535"):
        job(through="monarchmesh", port=70000).apply()
    assert not registry.records() and not objects(cluster, "monarchmesh")


def test_a_jobset_is_admitted_as_one_and_says_why_it_waits(cluster: Cluster, controllers: Controllers) -> None:
    made = job(2, through="jobset", labels={"kueue.x-k8s.io/queue-name": "research"}, timeout=0.3, keep_partial=True)
    with pytest.raises(StartTimeoutError):
        made.state(cached_path=None)
    why = "Pending: couldn't assign flavors to pod set w: insufficient unused quota for nvidia.com/gpu, 2 more needed"
    wait_until(lambda: made.status().reason == why, "Kueue has said why")
    assert not cluster.pods() and [host.state for host in made.status().hosts] == [HostPhase.QUEUED] * 2
    controllers.room.set()
    made.wait(patience(60))
    (known,) = (each for each in list_jobs().jobs if each.job == made.job_id)
    assert not known.error and len(known.status.hosts if known.status else ()) == 2
    controllers.room.clear()  # others come first
    wait_until(lambda: made.status().reason == why and not cluster.pods(), "it is preempted")
    assert [host.state for host in made.status().hosts] == [HostPhase.GONE] * 2
    made.kill()
    assert not objects(cluster, "jobset")


def test_a_quota_is_in_the_reason(cluster: Cluster, controllers: Controllers) -> None:
    cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "full"}})
    path = "/api/v1/namespaces/full/resourcequotas"
    cluster.api.request("POST", path, {"metadata": {"name": "quota"}, "spec": {"hard": {"pods": "0"}}})
    status = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    cluster.api.request("PATCH", f"{path}/quota/status", status, kind=PATCH)
    for through in POD_SETS:
        made = job(namespace="full", through=through, timeout=30, keep_partial=True)
        made.apply()
        wait_until(lambda made=made: "exceeded quota: quota, requested: pods=1" in made.log(0), "it is said")
        with pytest.raises(StartTimeoutError, match="exceeded quota: quota, requested: pods=1"):
            made.wait(0.1)
        made.kill()


@pytest.mark.parametrize("through", list(POD_SETS))
def test_an_evicted_pod_comes_again_and_is_another_host(
    cluster: Cluster, controllers: Controllers, through: str
) -> None:
    made = job(through=through)
    procs = made.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    probers: Any = procs.spawn("probers", Prober)
    name = made.status().hosts[0].name
    with hook(lambda _failure: None), pytest.raises(SupervisionError):
        cluster.kubelet.evict("default", name, "The node was low on resource: memory.")
        lose(made, name)
        while True:
            probers.told.call_one().get()
    wait_until(lambda: not made.active, "Kubernetes knows of it")
    procs.heal(hosts=made).get()
    assert [host.host for host in made.status().hosts] == [1]
    assert len(objects(cluster, through)) == 1  # in the place that it has
    made.kill()


@pytest.mark.parametrize("through", list(POD_SETS))
def test_a_job_that_is_in_no_list_is_found_and_ended(
    cluster: Cluster, controllers: Controllers, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(2, through=through)
    made.apply()
    made.wait()
    known = made.job_id
    with monkeypatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(Path.cwd() / "other"))
        (listed,) = (each for each in list_jobs().jobs if each.job == known)
        assert listed.status is not None and len(listed.status.of(HostPhase.UP)) == 2
        assert "listens at tcp://127.0.1." in listed.log(1, 10)
        listed.end()
    assert not processes_of(known) and not made.active and not objects(cluster, through)
    made.kill()


def test_pods_of_monarchs_operator_are_attached_to(cluster: Cluster, controllers: Controllers, tmp_path: Path) -> None:
    """A MonarchMesh that somebody else has made, with workers of ours in it."""
    theirs = job(2, through="monarchmesh")
    theirs.apply()
    theirs.wait()
    (mesh,) = objects(cluster, "monarchmesh")
    labels = f"app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name={mesh['metadata']['name']}"
    made = KubernetesJob({"hosts": 2}, attach_to=labels, key_file=registry.key_path(theirs.job_id))
    assert len(told(made)) == 2
    assert [host.name for host in made.status().hosts] == [f"{mesh['metadata']['name']}-{at}" for at in range(2)]
    made.kill()
    assert objects(cluster, "monarchmesh")
    theirs.kill()


def seen(container: str, at: int = 0, created: str = "1", **more: Any) -> tuple[PodSlot, SeenPod]:
    """A Pod of an object "m"."""
    status = {"containerStatuses": [{"name": "worker", "containerID": container, "state": {"running": {}}} | more]}
    meta = {"name": f"m-{at}", "uid": container, "creationTimestamp": created}
    return PodSlot("m", "", at), SeenPod(
        {"metadata": meta, "spec": {"containers": [{"name": "worker"}]}, "status": status}
    )


def test_which_container_is_which_host() -> None:
    first, second = HostPlacement(PodSlot("m", "", 0)), HostPlacement(PodSlot("m", "", 1), container="c2")
    found, new = held({0: first, 1: second}, [seen("c1"), seen("c2", 1)])
    assert {number: pod.container_id for number, pod in found.items()} == {0: "c1", 1: "c2"}
    assert new == {0: HostPlacement(PodSlot("m", "", 0), container="c1")} and HostPlacement.of(new[0].text()) == new[0]
    # Started anew in its Pod: it is that one no more, and the next host of this place is.
    again = seen("c3", 1, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": "c2"}})
    found, new = held({1: second, 2: HostPlacement(PodSlot("m", "", 1))}, [again])
    assert found.keys() == {1, 2} and new == {2: HostPlacement(PodSlot("m", "", 1), container="c3")}
    gone = found[1].before(1)
    assert (gone.state, gone.reason, gone.exit_code) == (HostPhase.GONE, "OOMKilled (exit 137)", 137)
    # Several have come and gone since, and none has ever announced itself.
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "containerID": "c5"}}
    (again,) = held({1: second}, [seen("c6", 1, lastState=ended)])[0].values()
    assert again.before(1).failed and again.before(1).exit_code == 3
    # One that was never seen waits no longer once another one is asked for in its place.
    found, new = held({0: first, 1: HostPlacement(PodSlot("m", "", 0))}, [seen("c1")])
    assert found.keys() == {1}
    assert held({0: HostPlacement(PodSlot("m", "", 0), returned=True)}, [seen("c1")]) == ({}, {})
    assert HostPlacement.of(HostPlacement(PodSlot("m", "", 0), returned=True).text()) == HostPlacement(
        PodSlot("m", "", 0), returned=True
    )


def test_what_objects_say() -> None:
    mesh, jobs = POD_SETS["monarchmesh"], POD_SETS["jobset"]
    assert "has not made its Pod yet; nothing has acted on it: does Monarch's operator" in mesh.waits({"spec": {}})
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}
    assert jobs.finished({"status": {"conditions": [failed]}}) == "FailedJobs: jobset failed"
    assert jobs.waits({"spec": {"suspend": True}}) == "its JobSet is suspended"
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to accommodate others"}
    assert admission({"status": {"conditions": [evicted]}}) == "Preempted: to accommodate others"
    assert not admission({})
    with pytest.raises(
        ValueError, match="nothing makes Pods through 'helm': choose one of pods, monarchmesh, jobset, auto"
    ):
        KubernetesLauncher(IMAGE, through="helm")
    with pytest.raises(ValueError, match="are there already: leave out through='jobset'"):
        KubernetesLauncher(attach_to="app=x", through="jobset")
