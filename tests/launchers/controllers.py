"""The controllers of a cluster under test: of MonarchMesh, StatefulSet, JobSet and Job, and of owned objects.

What operators make of their objects goes through the API server, which checks it: a StatefulSet for a MonarchMesh,
a Job for each replica of a group of a JobSet, and their Pods. Assumed from their documentation, as they are not here:

* Monarch's operator makes a StatefulSet of the name of the MonarchMesh, with a headless Service, and labels Pods with
  ``app.kubernetes.io/name=monarch-worker`` and ``monarch.pytorch.org/mesh-name``; StatefulSets number theirs by
  ``apps.kubernetes.io/pod-index``. It follows a change of ``replicas``.
* Kueue suspends a JobSet that is in a queue until it has room for all of it, and says so in a Workload.
* JobSet makes no Job while ``suspend`` is set, and names them ``JOBSET-GROUP-NUMBER``. A Job whose completions are
  indexed gives each index a Pod, and another one if it failed.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi
from tests.launchers.crds import install, uninstall
from tests.launchers.kubelet import Watch
from tests.launchers.kubernetes import Cluster

PERIOD = 0.1
PATCH = "application/merge-patch+json"
MONARCH, JOBSET = "/apis/monarch.pytorch.org/v1alpha1", "/apis/jobset.x-k8s.io/v1alpha2"
WORKER = {"app.kubernetes.io/name": "monarch-worker"}
KUEUE = "/apis/kueue.x-k8s.io/v1beta1", "workloads"
INDEX = "batch.kubernetes.io/job-completion-index"
KINDS = {
    "Secret": ("/api/v1", "secrets"),
    "MonarchMesh": (MONARCH, "monarchmeshes"),
    "JobSet": (JOBSET, "jobsets"),
    "Workload": KUEUE,
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Pod": ("/api/v1", "pods"),
}
Thing = dict[str, Any]


class Controllers:
    """Run until ``close``.

    Args:
        api: as an administrator.
    """

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._over = threading.Event()
        #: Whether the queues have room.
        self.room = threading.Event()
        self._watch = Watch(api, *(f"{path}/{plural}" for path, plural in KINDS.values()))
        self._thread = threading.Thread(target=self._run, name="controllers")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()
        self._watch.close()

    def _run(self) -> None:
        had_room = False
        while not self._over.wait(PERIOD):
            before, had_room = had_room, self.room.is_set()
            if not self._watch.changed() and had_room == before:
                continue
            # Owners last: what is seen without its owner has lost it.
            kinds = reversed(KINDS.items())
            seen = {kind: self._api.request("GET", f"{path}/{plural}")["items"] for kind, (path, plural) in kinds}
            uids = {thing["metadata"]["uid"] for things in seen.values() for thing in things}
            for kind, things in seen.items():
                for thing in things:
                    try:
                        self._step(kind, thing, seen, uids)
                    except ApiRefusedError as e:
                        self._watch.again()
                        if e.status not in (404, 409):  # it was changed or deleted meanwhile
                            self._warn(kind, thing, e)

    def _step(self, kind: str, thing: Thing, seen: dict[str, list[Thing]], uids: set[str]) -> None:
        owners = thing["metadata"].get("ownerReferences", [])
        if thing["metadata"].get("deletionTimestamp"):
            return
        if owners and not any(each["uid"] in uids for each in owners):
            self._delete(kind, thing)
        elif kind == "MonarchMesh":
            self._mesh(thing, _of(seen["StatefulSet"], thing))
        elif kind == "JobSet":
            self._jobset(thing, _of(seen["Job"], thing))
        elif kind == "StatefulSet":
            self._stateful(thing, _of(seen["Pod"], thing))
        elif kind == "Job":
            self._job(thing, _of(seen["Pod"], thing))

    def _mesh(self, mesh: Thing, sets: list[Thing]) -> None:
        spec, name = mesh["spec"], mesh["metadata"]["name"]
        if sets:
            if sets[0]["spec"]["replicas"] != spec["replicas"]:
                patch = {"spec": {"replicas": spec["replicas"]}}
                self._api.request("PATCH", _at("StatefulSet", sets[0]), patch, kind=PATCH)
            return
        labels = {**WORKER, "monarch.pytorch.org/mesh-name": name}
        made = {
            "replicas": spec["replicas"],
            "serviceName": f"{name}-svc",
            "selector": {"matchLabels": labels},
            "podManagementPolicy": "Parallel",
            "template": {"metadata": {"labels": labels}, "spec": spec["podTemplate"]},
        }
        self._create("StatefulSet", mesh, "MonarchMesh", name, made)
        self._says("MonarchMesh", mesh, "Available", "False", "Progressing", "waiting for Pods")

    def _stateful(self, owner: Thing, pods: list[Thing]) -> None:
        name, count = owner["metadata"]["name"], owner["spec"]["replicas"]
        names = {f"{name}-{index}": index for index in range(count)}
        for pod in pods:
            ended = pod.get("status", {}).get("phase") in ("Failed", "Succeeded")
            if pod["metadata"]["name"] not in names or ended:
                self._delete("Pod", pod)
        for each in names.keys() - {pod["metadata"]["name"] for pod in pods}:
            labels = {"apps.kubernetes.io/pod-index": str(names[each])}
            self._pod(owner, "StatefulSet", each, labels)

    def _jobset(self, owner: Thing, jobs: list[Thing]) -> None:
        name = owner["metadata"]["name"]
        if "kueue.x-k8s.io/queue-name" in owner["metadata"]["labels"]:
            owner = self._queued(owner)
        if owner["spec"].get("suspend"):
            for job in jobs:
                self._delete("Job", job)
            self._says("JobSet", owner, "Suspended", "True", "SuspendedJobs", "jobset is suspended")
            return
        self._says("JobSet", owner, "Suspended", "False", "ResumeJobs", "jobset is resumed")
        known = {job["metadata"]["name"] for job in jobs}
        for group in owner["spec"]["replicatedJobs"]:
            for number in range(group["replicas"]):
                if (own := f"{name}-{group['name']}-{number}") not in known:
                    spec = group["template"]["spec"]
                    labels = {
                        "jobset.sigs.k8s.io/jobset-name": name,
                        "jobset.sigs.k8s.io/replicatedjob-name": group["name"],
                        "jobset.sigs.k8s.io/job-index": str(number),
                    }
                    meta = spec["template"].get("metadata", {})
                    meta = {**meta, "labels": {**meta.get("labels", {}), **labels}}
                    spec = {**spec, "template": {**spec["template"], "metadata": meta}}
                    self._create("Job", owner, "JobSet", own, spec, completions=str(spec["completions"]))

    def _queued(self, owner: Thing) -> Thing:
        """As Kueue does."""
        uid = owner["metadata"]["uid"]
        waits = not self.room.is_set()
        if bool(owner["spec"].get("suspend")) != waits:
            owner = self._api.request("PATCH", _at("JobSet", owner), {"spec": {"suspend": waits}}, kind=PATCH)
        where = f"{KUEUE[0]}/namespaces/{owner['metadata']['namespace']}/workloads"
        known = self._api.request("GET", where, labelSelector=f"kueue.x-k8s.io/job-uid={uid}")["items"]
        if not known:
            name = f"jobset-{owner['metadata']['name']}"
            labels = {"kueue.x-k8s.io/job-uid": uid}
            self._create("Workload", owner, "JobSet", name, {"queueName": "research"}, labels)
        elif waits:
            why = "couldn't assign flavors to pod set w: insufficient unused quota for nvidia.com/gpu, 2 more needed"
            self._says("Workload", known[0], "QuotaReserved", "False", "Pending", why)
        else:
            self._says("Workload", known[0], "QuotaReserved", "True", "QuotaReserved", "Quota reserved in research")
        return owner

    def _job(self, owner: Thing, pods: list[Thing]) -> None:
        """The API server of the tests does not know indexes yet, and keeps their number only as it is noted."""
        settled = [pod for pod in pods if pod.get("status", {}).get("phase") != "Failed"]
        known = {int(pod["metadata"]["annotations"][INDEX]) for pod in settled}
        for index in set(range(int(owner["metadata"]["annotations"]["completions"]))) - known:
            name = f"{owner['metadata']['name']}-{index}-{secrets.token_hex(3)[:5]}"
            self._pod(owner, "Job", name, {INDEX: str(index)}, {INDEX: str(index)})

    def _pod(
        self, owner: Thing, kind: str, name: str, labels: dict[str, str], annotations: dict[str, str] | None = None
    ) -> None:
        template = owner["spec"]["template"]
        meta = template.get("metadata", {})
        known = meta.get("labels", {})
        self._create(
            "Pod",
            owner,
            kind,
            name,
            template["spec"],
            labels={**known, **labels},
            annotations={**meta.get("annotations", {}), **(annotations or {})},
        )

    # -- asking the API server ------------------------------------------------------------------------

    def _create(
        self,
        kind: str,
        owner: Thing,
        owned_by: str,
        name: str,
        spec: Thing,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        completions: str = "",
    ) -> None:
        path, plural = KINDS[kind]
        meta = {
            "name": name,
            "labels": labels or {},
            "annotations": {**(annotations or {}), **({"completions": completions} if completions else {})},
            "ownerReferences": [
                {
                    "apiVersion": owner.get("apiVersion") or KINDS[owned_by][0].removeprefix("/apis/"),
                    "kind": owned_by,
                    "name": owner["metadata"]["name"],
                    "uid": owner["metadata"]["uid"],
                    "controller": True,
                }
            ],
        }
        where = f"{path}/namespaces/{owner['metadata']['namespace']}/{plural}"
        about = {"apiVersion": path.removeprefix("/apis/").removeprefix("/api/"), "kind": kind}
        self._api.request("POST", where, {**about, "metadata": meta, "spec": spec})

    def _delete(self, kind: str, thing: Thing) -> None:
        body = {"propagationPolicy": "Background", "preconditions": {"uid": thing["metadata"]["uid"]}}
        self._api.request("DELETE", _at(kind, thing), body)

    def _says(self, kind: str, thing: Thing, condition: str, status: str, reason: str, message: str) -> None:
        known = thing.get("status", {}).get("conditions", [])
        if not known or (known[0]["type"], known[0]["status"]) != (condition, status):
            said = {"type": condition, "status": status, "reason": reason, "message": message}
            said["lastTransitionTime"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            patch = {"status": {"conditions": [said]}}
            self._api.request("PATCH", f"{_at(kind, thing)}/status", patch, kind=PATCH)

    def _warn(self, kind: str, thing: Thing, refusal: ApiRefusedError) -> None:
        """As controllers do of a Pod that they may not make, once."""
        meta = thing["metadata"]
        event = {
            "metadata": {"name": f"{meta['name']}.{kind.lower()}"},
            "involvedObject": {"kind": kind, "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "type": "Warning",
            "reason": "FailedCreate",
            "message": refusal.said,
        }
        with contextlib.suppress(ApiRefusedError):
            self._api.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", event)


@pytest.fixture(scope="module")
def controllers(cluster: Cluster) -> Iterator[Controllers]:
    """The cluster with the operators in it, for the tests of a module; others find it as it was."""
    install(cluster.api)
    running = Controllers(cluster.api)
    yield running
    running.close()
    uninstall(cluster.api)


def _of(things: list[Thing], owner: Thing) -> list[Thing]:
    uid = owner["metadata"]["uid"]
    return [one for one in things if any(each["uid"] == uid for each in one["metadata"].get("ownerReferences", []))]


def _at(kind: str, thing: Thing) -> str:
    path, plural = KINDS[kind]
    return f"{path}/namespaces/{thing['metadata']['namespace']}/{plural}/{thing['metadata']['name']}"
