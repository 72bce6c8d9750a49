"""Meshes of one job whose Pods differ: made by the launcher, by MonarchMeshes, by JobSets, and by others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import InfeasibleError, SubmissionRefusedError, SupervisionError
from monarch_kernel.job.kubernetes import ImageSpec, KubernetesJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import HostPhase, LaunchRequest, Secret, WorkerCommand
from monarch_kernel.launchers.kubernetes import KubernetesLauncher
from monarch_kernel.launchers.kubernetes.options import HostPlacement
from monarch_kernel.launchers.kubernetes.pods import HOST_LABEL, MeshPods, PodPattern, SeenPod
from monarch_kernel.launchers.kubernetes.sets import ORDER, POD_SETS, PodGroup, PodSlot
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.workers import new_key_text
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.launchers.conformance import Prober, clean, processes_of, script
from tests.launchers.controllers import Controllers, controllers
from tests.launchers.kubelet import GPU, NODE
from tests.launchers.kubernetes import Cluster, cluster, one_cluster
from tests.launchers.test_kubernetes import IMAGE, empty, job
from tests.launchers.test_kubernetes_sets import lose, objects

__all__ = ["clean", "cluster", "controllers", "empty", "one_cluster"]

OTHER = "test/other"
QUEUE = "kueue.x-k8s.io/queue-name"
through_all = pytest.mark.parametrize("through", ["pods", *POD_SETS])


def two_kinds(through: str, trainers: int = 1, **of_generators: Any) -> KubernetesJob:
    """Trainers with a GPU each, and one generator of another image in another place."""
    made = KubernetesJob(namespace="default", idle=60, through=through)
    made.add_mesh("trainers", trainers, image_spec=ImageSpec(IMAGE, {GPU: 1}), labels={"role": "train"})
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": NODE},
        "containers": [{"name": "main", "image": OTHER, "env": [{"name": "ROLE", "value": "generate"}]}],
    }
    template = {"metadata": {"annotations": {"team": "vision"}}, "spec": spec}
    made.add_mesh("generators", 1, pod_template=template, port=26601, python=sys.executable, **of_generators)
    return made


def kinds(cluster: Cluster, made: KubernetesJob) -> dict[str, list[str]]:
    """The images of the hosts of each mesh."""
    record = registry.read(made.job_id)
    assert record is not None
    images = {each["metadata"]["name"]: each["spec"]["containers"][0]["image"] for each in cluster.pods()}
    names = {host.host: host.name for host in made.status().hosts}
    return {mesh: [images[names[number]] for number in numbers] for mesh, numbers in record.meshes.items()}


@through_all
def test_pods_are_as_their_mesh_asks(cluster: Cluster, controllers: Controllers, through: str) -> None:
    made = two_kinds(through, trainers=2)
    state: Any = made.state(cached_path=None)
    assert (len(state.trainers), len(state.generators)) == (2, 1)
    assert kinds(cluster, made) == {"trainers": [IMAGE] * 2, "generators": [OTHER]}
    assert [host.url.rpartition(":")[2] for host in made.status().hosts] == ["26600", "26600", "26601"]
    for pod in cluster.pods():
        spec, (worker,) = pod["spec"], pod["spec"]["containers"]
        is_trainer = worker["image"] == IMAGE
        assert worker["resources"].get("limits", {}) == ({GPU: "1"} if is_trainer else {})
        assert spec.get("nodeSelector", {}) == ({} if is_trainer else {"kubernetes.io/hostname": NODE})
        assert worker["command"][0] == ("python3" if is_trainer else sys.executable)
        assert ({"name": "ROLE", "value": "generate"} in worker["env"]) is not is_trainer
        if through != "monarchmesh":  # the operator decides on the labels of its Pods
            assert pod["metadata"]["labels"].get("role") == ("train" if is_trainer else None)
    if through == "monarchmesh":
        found = {each["metadata"]["labels"].get("role", ""): each["spec"] for each in objects(cluster, through)}
        assert {role: (spec["replicas"], spec["port"]) for role, spec in found.items()} == {
            "train": (2, 26600),
            "": (1, 26601),
        }
    elif through == "jobset":
        (made_set,) = objects(cluster, through)
        groups = {each["name"]: each["template"]["spec"]["completions"] for each in made_set["spec"]["replicatedJobs"]}
        assert groups == {"trainers": 2, "generators": 1}
    assert "listens at tcp://127.0.1." in made.log(2, 10)
    (known,) = (each for each in list_jobs().jobs if each.job == made.job_id)
    assert known.plain()["meshes"] == {"trainers": 2, "generators": 1}
    assert known.status is not None and len(known.status.of(HostPhase.UP)) == 3
    made.kill()
    assert not processes_of(made.job_id) and (through == "pods" or not objects(cluster, through))


@through_all
def test_a_lost_host_is_replaced_by_one_of_its_mesh(cluster: Cluster, controllers: Controllers, through: str) -> None:
    made = two_kinds(through)
    state: Any = made.state(cached_path=None)
    procs = state.generators.spawn_procs(per_host={"gpus": 1})
    probers: Any = procs.spawn("probers", Prober)
    trainers: Any = state.trainers.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    before, kept = probers.told.call_one().get()[0], trainers.told.call_one().get()[0]
    name = made.status().hosts[1].name
    with hook(lambda _failure: None), pytest.raises(SupervisionError):
        cluster.kubelet.evict("default", name, "The node was low on resource: memory.")
        lose(made, name if through != "pods" else "1")
        while True:
            probers.told.call_one().get()
    wait_until(lambda: not made.active, "Kubernetes knows of it")
    procs.heal(hosts=made).get()
    assert probers.told.call_one().get()[0] != before and trainers.told.call_one().get()[0] == kept
    assert kinds(cluster, made) == {"trainers": [IMAGE], "generators": [OTHER]}
    assert [host.host for host in made.status().hosts] == [0, 2]
    made.kill()


@through_all
def test_one_mesh_grows_and_shrinks(cluster: Cluster, controllers: Controllers, through: str) -> None:
    made = two_kinds(through, trainers=2)
    state: Any = made.state(cached_path=None)
    probers: Any = state.trainers.slice(hosts=0).spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    kept = probers.told.call_one().get()[0]
    # What trainers give back is of no use to generators.
    assert len(made.resize(1, "trainers")) == 1
    assert len(made.resize(2, "generators")) == 2
    assert kinds(cluster, made) == {"trainers": [IMAGE], "generators": [OTHER] * 2}
    assert len(made.resize(2, "trainers")) == 2
    assert kinds(cluster, made) == {"trainers": [IMAGE] * 2, "generators": [OTHER] * 2}
    assert len(made.resize(1, "generators")) == 1
    assert kinds(cluster, made) == {"trainers": [IMAGE] * 2, "generators": [OTHER]}
    assert probers.told.call_one().get()[0] == kept
    with pytest.raises(ValueError, match="no mesh None: name one of trainers, generators"):
        made.resize(2)
    made.kill()
    assert through == "pods" or not objects(cluster, through)


@through_all
def test_a_mesh_that_is_refused_leaves_nothing_of_the_others(
    cluster: Cluster, controllers: Controllers, through: str
) -> None:
    made = two_kinds(through, labels={"team": "not valid"})
    with pytest.raises(SubmissionRefusedError, match=r'Invalid value: "not valid"'):
        made.apply()
    assert not registry.records() and (through == "pods" or not objects(cluster, through))
    wait_until(lambda: not cluster.pods(), "the Pods that were made have gone")


def test_further_hosts_that_are_refused_take_no_place(cluster: Cluster, controllers: Controllers) -> None:
    made = two_kinds("jobset")
    made.apply()
    made.wait()
    cluster.kubelet.evict("default", made.status().hosts[0].name, "The node was low on resource: memory.")
    wait_until(lambda: not made.active, "Kubernetes knows of it")
    usual = made._launcher
    settings = usual.options()["meshes"]
    wrong = {**settings, "trainers": {**settings["trainers"], "labels": {"team": "not valid"}}}
    made._launcher = usual.changed(meshes=wrong)
    with pytest.raises(SubmissionRefusedError, match=r'Invalid value: "not valid"'):
        made.resize(3, "trainers")  # one in the place of the lost one, and one in a JobSet of its own
    made._launcher = usual
    (name,) = cluster.secrets()
    secret = cluster.api.request("GET", f"/api/v1/namespaces/default/secrets/{name}")
    assert secret["metadata"]["annotations"].keys() == {f"monarch-kernel/host-{number}" for number in range(2)}
    assert len(objects(cluster, "jobset")) == 1
    made.kill()


def test_a_jobset_waits_in_one_queue(cluster: Cluster, controllers: Controllers) -> None:
    made = two_kinds("jobset", labels={QUEUE: "research"})
    made.add_mesh("others", 1, image_spec=OTHER, labels={QUEUE: "teaching"})
    with pytest.raises(SubmissionRefusedError, match=f"several values of {QUEUE}: research, teaching; give all meshes"):
        made.apply()
    assert not registry.records()


def test_a_mesh_of_the_job_itself_and_one_that_differs(cluster: Cluster, controllers: Controllers) -> None:
    made = KubernetesJob({"hosts": 1}, IMAGE, gpus=1, idle=60, labels={"team": "vision"})
    made.add_mesh("others", 1, image_spec=OTHER, gpus=0, memory="1GiB")
    state: Any = made.state("state.json")
    assert (len(state.hosts), len(state.others)) == (1, 1)
    assert kinds(cluster, made) == {"hosts": [IMAGE], "others": [OTHER]}
    limits = [each["spec"]["containers"][0]["resources"].get("limits", {}) for each in cluster.pods()]
    assert sorted(limits, key=str) == [{"memory": "1Gi"}, {GPU: "1"}]
    assert all(each["metadata"]["labels"]["team"] == "vision" for each in cluster.pods())
    # Another program that asks for the same finds it; one that asks for another kind does not.
    again = KubernetesJob({"hosts": 1}, IMAGE, gpus=1, idle=60, labels={"team": "vision"})
    again.add_mesh("others", 1, image_spec=OTHER, gpus=0, memory="1GiB")
    again.find_or_apply("state.json")
    assert again.job_id == made.job_id
    other = KubernetesJob({"hosts": 1}, IMAGE, gpus=1, idle=60, labels={"team": "vision"})
    other.add_mesh("others", 1, image_spec=OTHER, gpus=0, memory="2GiB")
    assert other.find_or_apply("state.json")
    other.kill()
    made.kill()


@pytest.fixture
def theirs(cluster: Cluster, tmp_path: Path) -> Iterator[KubernetesJob]:
    """Two Pods of others, and their key."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(new_key_text("others"))
    made = job(2, labels={"app": "serve"}, key_file=key)
    made.apply()
    made.wait()
    yield made
    made.kill()


def partly_attached(theirs: KubernetesJob, through: str, **of_trainers: Any) -> KubernetesJob:
    """A trainer whose Pod is made, and a generator in a Pod of others."""
    made = KubernetesJob(namespace="default", idle=60, through=through, key_file=theirs._key_file)
    made.add_mesh("generators", 1, label_selector="app=serve", pod_rank_label=HOST_LABEL)
    made.add_mesh("trainers", 1, image_spec=IMAGE, **of_trainers)
    return made


@through_all
def test_one_mesh_is_made_and_another_attached_to(
    cluster: Cluster, controllers: Controllers, theirs: KubernetesJob, through: str
) -> None:
    others = [host.name for host in theirs.status().hosts]
    made = partly_attached(theirs, through)
    state: Any = made.state("state.json")
    names = [host.name for host in made.status().hosts]
    assert names[0] == others[0] and names[1] not in others
    assert all("listens at tcp://127.0.1." in made.log(host, 10) for host in range(2))
    probers = {
        mesh: hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
        for mesh, hosts in (("trainers", state.trainers), ("generators", state.generators))
    }
    told = {mesh: prober.told.call_one().get()[0] for mesh, prober in probers.items()}
    assert told["trainers"] in processes_of(made.job_id) and told["generators"] in processes_of(theirs.job_id)
    assert len(made.resize(2, "trainers")) == 2
    with pytest.raises(InfeasibleError, match="2 hosts were asked for, and 1 Pods .* have the labels app=serve"):
        made.resize(3, "generators")
    assert len(made.resize(2, "generators")) == 2
    assert [host.name for host in made.status().hosts if host.name in others] == others
    assert len(made.resize(1, "trainers")) == 1
    # A Pod of others that is given back stays.
    assert len(made.resize(1, "generators")) == 1
    assert {mesh: prober.told.call_one().get()[0] for mesh, prober in probers.items()} == told
    (known,) = (each for each in list_jobs().jobs if each.job == made.job_id)
    assert known.plain()["meshes"] == {"generators": 1, "trainers": 1}
    made.kill()
    assert not processes_of(known.job) and len(cluster.secrets()) == 1
    left = {each["metadata"]["name"] for each in cluster.pods() if not each["metadata"].get("deletionTimestamp")}
    assert left == set(others)


@through_all
def test_a_lost_host_of_a_job_that_is_partly_attached(
    cluster: Cluster, controllers: Controllers, theirs: KubernetesJob, through: str
) -> None:
    others = [host.name for host in theirs.status().hosts]
    made = partly_attached(theirs, through)
    state: Any = made.state(cached_path=None)
    meshes = {
        mesh: hosts.spawn_procs(per_host={"gpus": 1})
        for mesh, hosts in (("trainers", state.trainers), ("generators", state.generators))
    }
    probers: dict[str, Any] = {mesh: procs.spawn("probers", Prober) for mesh, procs in meshes.items()}
    before = {mesh: prober.told.call_one().get()[0] for mesh, prober in probers.items()}
    names = {"generators": others[0], "trainers": made.status().hosts[1].name}
    with hook(lambda _failure: None):
        for mesh, name in names.items():
            cluster.kubelet.evict("default", name, "The node was low on resource: memory.")
            lose(theirs, "0")
            lose(made, name if through != "pods" else "1")
            with pytest.raises(SupervisionError):
                while True:
                    probers[mesh].told.call_one().get()
            wait_until(lambda: not made.active, "Kubernetes knows of it")
            meshes[mesh].heal(hosts=made).get()
    after = {mesh: prober.told.call_one().get()[0] for mesh, prober in probers.items()}
    assert after["generators"] in processes_of(theirs.job_id) and after["generators"] != before["generators"]
    assert after["trainers"] in processes_of(made.job_id) and after["trainers"] != before["trainers"]
    assert others[1] in [host.name for host in made.status().hosts]
    made.kill()


@through_all
def test_the_next_program_finds_a_job_that_is_partly_attached(
    cluster: Cluster, controllers: Controllers, theirs: KubernetesJob, through: str
) -> None:
    made = partly_attached(theirs, through)
    made.state("state.json")
    program = """
        import os
        from monarch_kernel.job.kubernetes import KubernetesJob

        through, key = os.environ["THROUGH"], os.environ["KEY_FILE"]
        job = KubernetesJob(namespace="default", idle=60, through=through, key_file=key)
        job.add_mesh("generators", 1, label_selector="app=serve", pod_rank_label="monarch-kernel/host")
        job.add_mesh("trainers", 1, image_spec="test/worker")
        state = job.state("state.json")
        assert (len(state.trainers), len(state.generators)) == (1, 1)
        print(job.job_id)
        """
    found = script(program, THROUGH=through, KEY_FILE=theirs._key_file or "")
    assert found == made.job_id
    listed = made.find(made.job_id)
    listed.kill()
    assert not made.active and not processes_of(made.job_id)
    left = {each["metadata"]["name"] for each in cluster.pods() if not each["metadata"].get("deletionTimestamp")}
    assert left == {host.name for host in theirs.status().hosts}


@through_all
def test_a_job_that_cannot_have_all_its_meshes_makes_and_takes_nothing(
    cluster: Cluster, controllers: Controllers, theirs: KubernetesJob, through: str
) -> None:
    made = partly_attached(theirs, through)
    made.add_mesh("others", 2, label_selector="app=serve")
    with pytest.raises(InfeasibleError, match="2 hosts were asked for, and 1 Pods .* have the labels app=serve"):
        made.apply()
    made = partly_attached(theirs, through, labels={"team": "not valid"})
    with pytest.raises(SubmissionRefusedError, match=r'Invalid value: "not valid"'):
        made.apply()
    assert len(registry.records()) == 1 and len(cluster.secrets()) == 1 and theirs.active
    assert len(cluster.pods()) == 2 and (through == "pods" or not objects(cluster, through))


def test_pods_of_others_from_the_command_line(cluster: Cluster, theirs: KubernetesJob) -> None:
    def run(*words: str) -> str:
        line = [sys.executable, "-P", "-m", "monarch_kernel", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = ("up", "kubernetes", "--attach-to", "app=serve", "--key-file", theirs._key_file or "", "--json")
    made = json.loads(run(*asked))
    others = {host.name for host in theirs.status().hosts}
    assert made["hosts"][0]["name"] in others
    assert run("exec", "--job", made["job"], "--", "echo", "there") == "there\n"
    run("kill", made["job"])
    assert {each["metadata"]["name"] for each in cluster.pods()} == others


def test_labels_of_the_job_are_for_meshes_without_their_own() -> None:
    made = KubernetesJob({"one": 1}, attach_to="app=a", key_file="nowhere")
    made.add_mesh("made", 1, image_spec=IMAGE)
    made.add_mesh("two", 1, pod_rank_label="number")
    made.add_mesh("three", 1, label_selector="app=b")
    options = made._launcher.options()
    assert options["attach_to"] == {"one": "app=a", "two": "app=a", "three": "app=b"}
    assert options["order_label"] == {"one": ORDER, "two": "number", "three": ORDER}
    assert options["meshes"].keys() == {"made"}
    assert KubernetesLauncher.of(options).options() == options


def pods(**pattern: Any) -> MeshPods:
    command = WorkerCommand("0123456789abcdef", Secret("k"))
    return MeshPods(PodPattern(image=IMAGE, **pattern), LaunchRequest(1, command))


def test_what_a_jobset_of_several_meshes_is_made_of() -> None:
    jobs = POD_SETS["jobset"]
    name = "a" * 24 + "-0123456789abcdef-0"
    assert jobs.groups("m", ["Train_ers", "train__ers", "_x", "ä", "_1"]) == ["train-ers", "train-ers1", "x", "m", "m1"]
    long = jobs.groups(name, ["generators", "generators_too"])
    assert len(set(long)) == 2 and all(len(f"{name}-{group}-0-9999-abcde") <= 63 for group in long)
    one, two = pods(labels={"a": "1", "b": "1"}), pods(labels={"a": "2", "b": "1", QUEUE: "research"})
    made = jobs.made(name, [PodGroup("one", one, 2), PodGroup("two", two, 3)], "uid", "me")
    labels = made["metadata"]["labels"]
    assert "a" not in labels and (labels["b"], labels[QUEUE]) == ("1", "research")
    assert [jobs.size(made, group) for group in ("one", "two", "three")] == [2, 3, 0]
    templates = [each["template"]["spec"]["template"] for each in made["spec"]["replicatedJobs"]]
    assert [each["metadata"]["labels"]["a"] for each in templates] == ["1", "2"]
    assert jobs.makers(PodSlot(name, "two", 1)) == (name, f"{name}-two-0")
    ended = SeenPod({"metadata": {"name": "p"}, "status": {"phase": "Succeeded"}})
    assert not jobs.refills([ended]) and POD_SETS["monarchmesh"].refills([ended])
    place = HostPlacement(PodSlot(name, "two", 1), "two", "c1", returned=True)
    assert HostPlacement.of(place.text()) == place


def test_what_meshes_may_ask_for_is_checked() -> None:
    with pytest.raises(ValueError, match="the mesh hosts cannot have namespace for itself, only any of image"):
        KubernetesLauncher(IMAGE, meshes={"hosts": {"namespace": "other"}})
    made = KubernetesJob("training", port=0)
    with pytest.raises(ValueError, match="the Pods of others are made by others: leave out node_selector=, gpus=, or"):
        made.add_mesh("others", 1, node_selector={"a": "b"}, gpus=1)
    made.add_mesh("trainers", 1, image_spec=ImageSpec(IMAGE, {GPU: 2, "cpu": 4}), gpus=1, cpus=2, tolerations=["spot"])
    options = made._launcher.options()
    assert options["namespace"] == "training"
    settings = options["meshes"]["trainers"]
    assert options["port"] == 0 and "port" not in settings
    assert settings["resources"] == {"options": {GPU: 2, "cpu": 4}}
    assert settings["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert KubernetesLauncher.of(options).options() == options
