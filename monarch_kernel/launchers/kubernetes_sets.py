"""Objects of a cluster of which a controller makes several Pods of one pattern: Monarch's MonarchMesh, and JobSet.

What they are made of, which Pods are theirs, and what they say of Pods that are not there. Plain data, no I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from monarch_kernel.launchers.base import HostStatus, LaunchRequest
from monarch_kernel.launchers.kubernetes_pods import JOB_LABEL, PodPattern, SeenPod, metadata, pod_template, words

#: Where the workers of Monarch listen, and by which its Pods are numbered.
PORT, ORDER = 26600, "apps.kubernetes.io/pod-index"
#: How often the Pods of a JobSet are replaced, all of them together.
_REPLACED = 1000
#: The one group of Jobs of a JobSet.
_GROUP = "w"
_KUEUE = "kueue.x-k8s.io/"


class PodSet(ABC):
    """A kind of such objects."""

    #: In ``KubernetesLauncher``, and in its answers.
    through: ClassVar[str]
    kind: ClassVar[str]
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    #: What must be installed in the cluster.
    needs: ClassVar[str]

    def path(self, namespace: str, name: str = "") -> str:
        """Where these objects are at the API server; or one of them."""
        found = f"/apis/{self.group}/{self.version}/namespaces/{namespace}/{self.plural}"
        return f"{found}/{name}" if name else found

    def made(
        self, pattern: PodPattern, request: LaunchRequest, name: str, count: int, owner: str, user: str
    ) -> dict[str, Any]:
        """The object for so many Pods; see ``pod`` of ``kubernetes_pods``."""
        return {
            "apiVersion": f"{self.group}/{self.version}",
            "kind": self.kind,
            "metadata": metadata(pattern, request.command.job, name, owner, user),
            "spec": self._spec(pattern, request, count),
        }

    @abstractmethod
    def _spec(self, pattern: PodPattern, request: LaunchRequest, count: int) -> dict[str, Any]: ...

    @abstractmethod
    def selector(self, job: str, names: Collection[str]) -> str:
        """The labels of the Pods of these objects."""

    @abstractmethod
    def place(self, pod: SeenPod) -> tuple[str, int]:
        """Of which object a Pod is, and its number there; -1: it has none."""

    @abstractmethod
    def makers(self, name: str) -> tuple[str, ...]:
        """The names of objects whose events say why an object of this name has no Pods."""

    @abstractmethod
    def size(self, found: Mapping[str, Any]) -> int:
        """How many Pods an object has, as found."""

    @abstractmethod
    def sized(self, count: int) -> dict[str, Any] | None:
        """The patch for its first so many Pods; None: it keeps all that it began with."""

    @abstractmethod
    def replaces(self, gone: HostStatus) -> bool:
        """Whether a Pod comes in the place of one that has gone so."""

    def finished(self, found: Mapping[str, Any]) -> str:
        """Why it makes no Pods any more; "": it does."""
        return next((words(each) or kind for kind in ("Failed", "Completed") if (each := _is(found, kind))), "")

    def suspended(self, found: Mapping[str, Any]) -> bool:
        """Whether it waits for its admission."""
        return bool((found.get("spec") or {}).get("suspend"))

    def waits(self, found: Mapping[str, Any]) -> str:
        """Why it has not made a Pod, as far as it says."""
        if said := words(_is(found, "Suspended")):
            return said
        if self.suspended(found):
            return f"its {self.kind} is suspended"
        conditions = _conditions(found)
        said = next((words(each) for each in conditions if each.get("status") == "False" and each.get("message")), "")
        if said:
            return said
        acted = "" if found.get("status") else f"; nothing has acted on it: does {self.needs} run?"
        return f"its {self.kind} has not made its Pod yet{acted}"


class MonarchMesh(PodSet):
    """Of Monarch's operator, which makes a StatefulSet of it: a container that has ended starts again in its Pod, and a
    Pod that is lost comes again by the same name. The Pods have the operator's labels only.
    """

    through, kind, plural = "monarchmesh", "MonarchMesh", "monarchmeshes"
    group, version = "monarch.pytorch.org", "v1alpha1"
    needs = "Monarch's operator (https://github.com/meta-pytorch/monarch-kubernetes)"

    def _spec(self, pattern: PodPattern, request: LaunchRequest, count: int) -> dict[str, Any]:
        template = pod_template(pattern, request, restart="Always")
        return {"replicas": count, "port": pattern.port or PORT, "podTemplate": template}

    def selector(self, job: str, names: Collection[str]) -> str:
        """See ``PodSet``."""
        return f"{MESH_LABEL} in ({','.join(sorted(names))})"

    def place(self, pod: SeenPod) -> tuple[str, int]:
        """See ``PodSet``. Clusters before 1.28 do not label the Pods of StatefulSets; their names end so."""
        return pod.labels.get(MESH_LABEL, ""), _number(pod.labels.get(ORDER) or pod.name.rpartition("-")[2])

    def makers(self, name: str) -> tuple[str, ...]:
        """See ``PodSet``."""
        return (name,)

    def size(self, found: Mapping[str, Any]) -> int:
        """See ``PodSet``."""
        return int(found["spec"].get("replicas") or 0)

    def sized(self, count: int) -> dict[str, Any] | None:
        """See ``PodSet``."""
        return {"spec": {"replicas": count}}

    def replaces(self, gone: HostStatus) -> bool:
        """See ``PodSet``."""
        return True


class JobSet(PodSet):
    """Of the JobSet API: all its Pods are admitted together. A Pod that fails is replaced by its Job; one whose worker
    has ended in good order is not, and holds nothing any more.
    """

    through, kind, plural = "jobset", "JobSet", "jobsets"
    group, version = "jobset.x-k8s.io", "v1alpha2"
    needs = "JobSet (https://jobset.sigs.k8s.io)"

    def _spec(self, pattern: PodPattern, request: LaunchRequest, count: int) -> dict[str, Any]:
        meta = metadata(pattern, request.command.job, "", "", "")
        # Kueue admits the JobSet: that it is to wait for is no matter of its Pods.
        labels = {key: value for key, value in meta["labels"].items() if value and not key.startswith(_KUEUE)}
        template = {
            "metadata": {"labels": labels, "annotations": meta["annotations"]},
            "spec": pod_template(pattern, request),
        }
        job = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": _REPLACED,
            "template": template,
        }
        return {
            # Workers are reached by their addresses: no Service is needed.
            "network": {"enableDNSHostnames": False},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
        }

    def selector(self, job: str, names: Collection[str]) -> str:
        """See ``PodSet``."""
        return f"{JOB_LABEL}={job}"

    def place(self, pod: SeenPod) -> tuple[str, int]:
        """See ``PodSet``."""
        index = pod.labels.get(_INDEX) or pod.annotations.get(_INDEX, "")
        return pod.labels.get(_JOBSET_LABEL, ""), _number(index)

    def makers(self, name: str) -> tuple[str, ...]:
        """See ``PodSet``. The Job of its only group comes after it."""
        return name, f"{name}-{_GROUP}-0"

    def size(self, found: Mapping[str, Any]) -> int:
        """See ``PodSet``."""
        return int(found["spec"]["replicatedJobs"][0]["template"]["spec"].get("completions") or 0)

    def sized(self, count: int) -> dict[str, Any] | None:
        """See ``PodSet``."""
        return None

    def replaces(self, gone: HostStatus) -> bool:
        """See ``PodSet``."""
        return gone.exit_code != 0


#: On the Pods of a MonarchMesh: its name.
MESH_LABEL = "monarch.pytorch.org/mesh-name"
_JOBSET_LABEL, _INDEX = "jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-completion-index"
#: Kinds by what ``KubernetesLauncher`` calls them.
POD_SETS: Mapping[str, PodSet] = {each.through: each for each in (MonarchMesh(), JobSet())}


def admission(workload: Mapping[str, Any]) -> str:
    """What a Workload of Kueue says of why it is not admitted, or not any more; "": nothing."""
    for kind, status in (("Evicted", "True"), ("QuotaReserved", "False"), ("Admitted", "False")):
        said = next((each for each in _conditions(workload) if each.get("type") == kind), {})
        if said.get("status") == status and said.get("message"):
            return words(said)
    return ""


def _conditions(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (found.get("status") or {}).get("conditions") or []


def _is(found: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object, if it is true."""
    wanted = (each for each in _conditions(found) if each.get("type") == kind and each.get("status") == "True")
    return next(wanted, {})


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1
