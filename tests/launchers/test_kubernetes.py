"""Hosts from a real API server of Kubernetes: what every launcher does, and what is Kubernetes' own."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.errors import (
    InfeasibleError,
    LaunchError,
    StartFailedError,
    StartTimeoutError,
    SubmissionRefusedError,
    SupervisionError,
)
from monarch_kernel.job import EngineJob
from monarch_kernel.job.kubernetes import KubeConfig, KubernetesJob
from monarch_kernel.launchers import registry
from monarch_kernel.launchers.base import HostPhase, Launcher, LaunchRequest, Resources, Secret, WorkerCommand
from monarch_kernel.launchers.kubernetes import KubernetesLauncher
from monarch_kernel.launchers.kubernetes import api as kubernetes_api
from monarch_kernel.launchers.kubernetes.pods import JOB_LABEL, PodPattern, SeenPod, pod
from monarch_kernel.launchers.listing import list_jobs
from monarch_kernel.workers import new_key_text
from tests.actor.actors import hook
from tests.conftest import wait_until
from tests.launchers.conformance import Conformance, Engine, Prober, clean, processes_of
from tests.launchers.kubernetes import Cluster, cluster, one_cluster

__all__ = ["clean", "cluster", "one_cluster"]

IMAGE = "test/worker"


class KubernetesEngine(Engine):
    """A cluster that gives any number of Pods. What limits it is tested below."""

    def launcher(self) -> Launcher:
        return KubernetesLauncher(IMAGE)

    def queue(self) -> Launcher:
        return KubernetesLauncher(IMAGE, node_selector={"nowhere": "yes"})


@pytest.fixture
def engine(cluster: Cluster) -> Engine:
    return KubernetesEngine()


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves no Pod and no Secret."""
    yield
    if "cluster" in request.fixturenames:
        running: Cluster = request.getfixturevalue("cluster")
        left = [each["metadata"]["name"] for each in running.pods()] + running.secrets()
        assert not left, f"the test left {left}"


class TestKubernetes(Conformance):
    pass


def job(hosts: int = 1, **options: Any) -> KubernetesJob:
    return KubernetesJob({"hosts": hosts}, options.pop("image", IMAGE), idle=60, **options)


def told(made: EngineJob) -> list[int]:
    """The processes of a rank on each host."""
    probers: Any = made.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1}).spawn("probers", Prober)
    return [pid for pid, _, _ in probers.told.call().get().values()]


def test_pods_are_as_asked_for(cluster: Cluster) -> None:
    made = job(
        labels={"kueue.x-k8s.io/queue-name": "research"},
        annotations={"team": "vision"},
        tolerations=["nvidia.com/gpu:NoSchedule", {"key": "spot", "operator": "Exists"}],
        node_selector={"kubernetes.io/hostname": "n1"},
        volumes={"/data": "datasets", "/scratch": {"emptyDir": {}}},
        service_account="trainer",
        gpus=2,
        memory="1GiB",
        walltime=600.0,
        key="file",
        pod={"priorityClassName": "", "containers": [{"name": "worker", "securityContext": {"runAsUser": 0}}]},
    )
    assert len(told(made)) == 1
    (found,) = cluster.pods()
    spec, container = found["spec"], found["spec"]["containers"][0]
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert found["metadata"]["labels"][JOB_LABEL] == made.job_id
    assert found["metadata"]["annotations"]["team"] == "vision"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "1Gi"}
    assert container["securityContext"] == {"runAsUser": 0} and container["image"] == IMAGE
    assert {each["mountPath"] for each in container["volumeMounts"]} >= {"/dev/shm", "/data", "/scratch"}
    assert spec["serviceAccountName"] == "trainer" and spec["restartPolicy"] == "Never"
    assert spec["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert spec["activeDeadlineSeconds"] > 600 and made.status().hosts[0].ends_at
    (named,) = cluster.secrets()
    assert found["metadata"]["ownerReferences"][0]["name"] == named
    made.kill()


def test_what_is_refused_raises_the_servers_own_words(cluster: Cluster) -> None:
    with pytest.raises(SubmissionRefusedError, match=r'Invalid value: "not valid".*check the arguments'):
        job(labels={"team": "not valid"}).apply()
    with pytest.raises(SubmissionRefusedError, match='namespaces "nowhere" not found'):
        job(namespace="nowhere").apply()
    with pytest.raises(
        SubmissionRefusedError, match=r'User "nobody" cannot create resource "secrets".*docs/kubernetes'
    ):
        job(context="nobody").apply()
    with pytest.raises(LaunchError, match="has no context 'other' .it has: admin, nobody"):
        job(context="other").apply()
    with pytest.raises(SubmissionRefusedError, match="a Pod needs an image"):
        job(image="").apply()
    assert not registry.records()


def test_a_quota_and_limits_of_a_namespace_leave_nothing_behind(cluster: Cluster) -> None:
    cluster.api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "small"}})
    path = "/api/v1/namespaces/small"
    limit = {"type": "Container", "max": {"memory": "1Gi"}}
    cluster.api.request("POST", f"{path}/limitranges", {"metadata": {"name": "limits"}, "spec": {"limits": [limit]}})
    quota = {"metadata": {"name": "quota"}, "spec": {"hard": {"pods": "2"}}}
    cluster.api.request("POST", f"{path}/resourcequotas", quota)
    # As the controller would.
    status = {"status": {"hard": {"pods": "2"}, "used": {"pods": "0"}}}
    cluster.api.request("PATCH", f"{path}/resourcequotas/quota/status", status, kind="application/merge-patch+json")
    with pytest.raises(InfeasibleError, match="maximum memory usage per Container is 1Gi, but limit is 2Gi"):
        job(namespace="small", memory="2GiB").apply()
    with pytest.raises(SubmissionRefusedError, match=r"exceeded quota: quota, requested: pods=1, used: pods=2"):
        job(3, namespace="small", memory="1GiB").apply()
    assert not registry.records() and not cluster.secrets("small")
    wait_until(lambda: not cluster.pods("small"), "no Pod is left")


def test_the_queue_says_why_a_job_waits(cluster: Cluster) -> None:
    made = job(gpus=3, timeout=0.3, keep_partial=True)
    with pytest.raises(
        StartTimeoutError, match="Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
    ):
        made.state(cached_path=None)
        made.wait(2.0)
    assert made.status().hosts[0].state is HostPhase.QUEUED
    made.kill()


def test_an_image_that_is_not_there_is_a_failed_start(cluster: Cluster) -> None:
    with pytest.raises(StartFailedError, match='"missing/worker": manifest unknown. Check the name of the image'):
        job(image="missing/worker").state(cached_path=None)


def test_an_evicted_pod_is_replaced(cluster: Cluster) -> None:
    made = job()
    procs = made.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 1})
    probers: Any = procs.spawn("probers", Prober)
    before = probers.told.call_one().get()[0]
    with hook(lambda _failure: None), pytest.raises(SupervisionError):
        cluster.kubelet.evict("default", made.status().hosts[0].name, "The node was low on resource: memory.")
        TestKubernetes()._lose(made, 0)
        while True:
            probers.told.call_one().get()
    wait_until(lambda: not made.active, "Kubernetes knows of it")
    assert made.status().reason == "Evicted: The node was low on resource: memory."
    procs.heal(hosts=made).get()
    assert probers.told.call_one().get()[0] != before
    assert [host.host for host in made.status().hosts] == [1]
    made.kill()


def test_pods_of_others_are_attached_to_by_their_labels(cluster: Cluster, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(new_key_text("others"))
    secret = {"metadata": {"name": "others"}, "stringData": {"key": key.read_text()}}
    pods = "/api/v1/namespaces/default/pods"
    cluster.api.request("POST", "/api/v1/namespaces/default/secrets", secret)
    for number in (1, 0):
        worker = ["python3", "-P", "-m", "monarch_kernel", "worker", "--listen", "tcp://$(IP):26600"]
        container = {
            "name": "main",
            "image": IMAGE,
            "command": [*worker, "--announce", "-", "--key-env", "KEY", "--idle", "60"],
            "env": [
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "others", "key": "key"}}},
            ],
        }
        labels = {"app": "trainer", "apps.kubernetes.io/pod-index": str(number)}
        meta = {"name": f"trainer-{number}", "labels": labels}
        cluster.api.request("POST", pods, {"metadata": meta, "spec": {"containers": [container]}})
    made = KubernetesJob({"hosts": 2}, attach_to="app=trainer", key_file=key)
    assert len(told(made)) == 2
    assert [host.name for host in made.status().hosts] == ["trainer-0", "trainer-1"]
    with pytest.raises(InfeasibleError, match="1 hosts were asked for, and 0 Pods .* have the labels app=trainer"):
        made.resize(3)
    made.kill()
    assert len(cluster.pods()) == 2  # their worker ends, and what has started them starts it again
    again = KubernetesJob({"hosts": 1}, attach_to="app=trainer", key_file=key)
    wait_until(
        lambda: all(each["status"]["containerStatuses"][0]["restartCount"] for each in cluster.pods()), "they restarted"
    )
    assert len(told(again)) == 1
    again.kill()
    for number in range(2):
        cluster.api.request("DELETE", f"{pods}/trainer-{number}", {"gracePeriodSeconds": 5})
    cluster.api.request("DELETE", "/api/v1/namespaces/default/secrets/others")
    wait_until(lambda: not cluster.pods(), "they have gone")
    with pytest.raises(ValueError, match="key_file="):
        KubernetesJob({"hosts": 1}, attach_to="app=trainer")


class Echo(Actor):
    @endpoint
    def back(self, data: bytes) -> bytes:
        """The same."""
        return data


@pytest.fixture
def apart(cluster: Cluster) -> Iterator[None]:
    """Pods whose addresses cannot be reached from here."""
    cluster.kubelet.apart = True
    yield
    cluster.kubelet.apart = False


def way_to(made: EngineJob, launcher: Launcher, **data: str) -> str:
    record = registry.read(made.job_id)
    assert record is not None and record.ticket is not None
    ticket = replace(record.ticket, data={**record.ticket.data, **data})
    return launcher.route(ticket, made.status().hosts[0])


def test_a_tunnel_leads_through_the_api_server(cluster: Cluster, apart: None) -> None:
    made = job()
    procs = made.state(cached_path=None).hosts.spawn_procs(per_host={"gpus": 2})
    assert made.status().hosts[0].url.startswith("tcp://192.0.2.")
    echoes: Any = procs.spawn("echoes", Echo)
    piece = bytes(range(256)) * (16 << 12)
    assert list(echoes.back.call(piece).get().values()) == [piece] * 2
    with pytest.raises(LaunchError, match=r'User "nobody" cannot get resource "pods/portforward".*docs/kubernetes.md'):
        way_to(made, KubernetesLauncher(tunnel=True), context="nobody")
    made.kill()


def test_a_worker_that_no_tunnel_reaches_says_so(cluster: Cluster) -> None:
    made = job(tunnel=False)
    made.apply()
    made.wait()
    with pytest.raises(LaunchError, match="no way to port 26600 of the Pod .*Connection refused; a worker that is"):
        way_to(made, KubernetesLauncher(tunnel=True))
    made.kill()


def test_a_job_that_is_in_no_list_is_found_and_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    made.apply()
    made.wait()
    known = made.job_id
    with monkeypatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(Path.cwd() / "other"))
        # Others of this machine may run jobs, too.
        (listed,) = (each for each in list_jobs().jobs if each.job == known)
        assert (listed.engine, listed.used_by) == ("kubernetes", "not in this list of jobs")
        assert "listens at tcp://127.0.1." in listed.log(None, 10)
        listed.end()
    assert not processes_of(known) and not made.active
    made.kill()


def test_from_the_command_line(cluster: Cluster) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-P", "-m", "monarch_kernel", *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=100)

    asked = ("up", "kubernetes", "--hosts", "1", "--image", IMAGE, "--labels", "team=vision", "--idle", "60", "--json")
    made = run(*asked)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)["job"]
    assert cluster.pods()[0]["metadata"]["labels"]["team"] == "vision"
    assert run("kill", found).returncode == 0


@pytest.fixture
def account(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Pod finds of its account is in files of this test; the API server is the real one."""
    account = importlib.import_module("kubernetes.config.incluster_config")
    settings = cluster.api.settings
    certificate = tmp_path / "ca.crt"
    certificate.write_bytes(Path(settings.ssl_ca_cert).read_bytes())
    (tmp_path / "token").write_text(settings.api_key["BearerToken"].removeprefix("Bearer "))
    (tmp_path / "namespace").write_text("default\n")
    monkeypatch.setattr(account, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(account, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setattr(kubernetes_api, "_OWN_NAMESPACE", str(tmp_path / "namespace"))
    host, _, port = settings.host.removeprefix("https://").partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(socket, "gethostname", lambda: "notebook")


def test_in_a_pod_its_own_account_asks_and_its_image_is_taken(
    cluster: Cluster, account: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("KUBERNETES_SERVICE_HOST")
        with pytest.raises(LaunchError, match="there is no Kubernetes here"):
            KubernetesLauncher()._api("")
    own = {"metadata": {"name": "notebook"}, "spec": {"containers": [{"name": "main", "image": "missing/notebook"}]}}
    cluster.api.request("POST", "/api/v1/namespaces/default/pods", own)
    made = job(image="", keep_partial=True)
    made.apply()
    images = [each["spec"]["containers"][0]["image"] for each in cluster.pods()]
    assert images == ["missing/notebook"] * 2
    made.kill()
    cluster.api.request("DELETE", "/api/v1/namespaces/default/pods/notebook", {"gracePeriodSeconds": 0})
    wait_until(lambda: not cluster.pods(), "it has gone")


def test_a_program_may_insist_on_the_account_of_its_pod(
    cluster: Cluster, account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "nowhere/config")
    made = job(kubeconfig=KubeConfig())
    assert len(told(made)) == 1
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(LaunchError, match="runs in no Pod, so it has no service account: name a file with KubeConfig"):
        made.find(made.job_id).status()
    made.kill()


def test_a_kubeconfig_file_may_be_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = importlib.import_module("kubernetes.client")
    monkeypatch.setattr(client.Configuration, "_default", None)
    monkeypatch.setenv("KUBECONFIG", "nowhere/config")
    monkeypatch.setenv("HOME", str(cluster.kubeconfig.parent))
    given = KubeConfig.from_path(f"~/{cluster.kubeconfig.name}")
    assert given.out_of_cluster and given.local == cluster.kubeconfig
    made = KubernetesJob("default", kubeconfig=given, idle=60, attach_to="tcp://127.0.0.1:26600")
    made.add_mesh("hosts", 1, image_spec=IMAGE)
    assert len(told(made)) == 1
    # The address is of a forwarded port; each worker has a way of its own instead.
    assert made._launcher.options()["tunnel"] is True and not made._launcher.options()["attach_to"]
    made.kill()
    given.load()
    assert client.Configuration.get_default_copy().host == cluster.api.settings.host
    with pytest.raises(LaunchError, match=r"nowhere/config.* cannot be used"):
        KubeConfig.from_path("nowhere/config").load()


def test_a_configuration_of_the_program_stays_in_its_memory(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "nowhere/config")
    monkeypatch.setattr(kubernetes_api, "_kept", {})

    def asked(**options: Any) -> KubernetesJob:
        return job(kubeconfig=KubeConfig.from_config(cluster.api.settings), **options)

    made = asked(namespace="default")
    made.state("state.json")
    token = cluster.api.settings.api_key["BearerToken"].removeprefix("Bearer ")
    kept = [path for path in Path.cwd().rglob("*") if path.is_file()]
    assert kept and not any(token.encode() in path.read_bytes() for path in kept)
    assert made.find(made.job_id).active
    # As another program, which has no such configuration yet.
    kubernetes_api._kept.clear()
    with pytest.raises(LaunchError, match="for https://127.0.0.1:.* was in the memory of the program that applied"):
        made.find(made.job_id).status()
    again = asked(namespace="default")
    again.state("state.json")
    assert again.job_id == made.job_id
    with pytest.raises(LaunchError, match="context='other' names no context: only a kubeconfig file has contexts"):
        asked(context="other").apply()
    made.kill()
    for wrong in ({"host": "x"}, KubeConfig.from_config("nowhere/config")):
        with pytest.raises(ValueError, match="is no configuration: name|is no kubernetes.client.Conf"):
            job(kubeconfig=wrong)


def test_a_configuration_that_cannot_be_used_says_so(cluster: Cluster) -> None:
    with pytest.raises(LaunchError, match=r"nowhere/config.* cannot be used"):
        KubernetesLauncher(kubeconfig="nowhere/config")._api("")


def request(**command: Any) -> LaunchRequest:
    return LaunchRequest(1, WorkerCommand("0123456789abcdef", Secret("k"), **command), Resources(), "My job!")


def test_arguments_are_checked() -> None:
    found = pod(PodPattern(image=IMAGE), request(env={"TOKEN": "t"}), 7, "uid", "me")
    assert found["metadata"]["name"] == "my-job-0123456789abcdef-7"
    assert "'k'" not in str(found) and "'t'" not in str(found)
    same = KubernetesLauncher.configured({"image": IMAGE, "labels": ["a=b"], "tolerations": ["k=v:NoExecute"]})
    assert KubernetesLauncher.of(same.options()).options() == same.options()
    assert same.options()["labels"] == {"a": "b"}
    assert same.options()["tolerations"] == [{"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute"}]
    for wrong in ({"labels": ["a"]}, {"tolerations": [":NoExecute"]}, {"key": "argv"}):
        with pytest.raises(ValueError, match="no KEY=VALUE|no toleration|no way"):
            KubernetesLauncher.configured(wrong)


@pytest.mark.parametrize(
    ("status", "phase", "reason"),
    [
        ({}, HostPhase.QUEUED, "Pending"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "m"}]},
            HostPhase.QUEUED,
            "SchedulingGated: m",
        ),
        (
            {
                "phase": "Failed",
                "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Preempted", "message": "m"}],
            },
            HostPhase.GONE,
            "Preempted: m",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ],
            },
            HostPhase.GONE,
            "OOMKilled (exit 137)",
        ),
    ],
)
def test_what_kubernetes_says_is_the_reason(status: dict[str, Any], phase: HostPhase, reason: str) -> None:
    found = SeenPod({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "worker"}]}, "status": status})
    host = found.status(0, None)
    assert (host.state, host.reason) == (phase, reason)
