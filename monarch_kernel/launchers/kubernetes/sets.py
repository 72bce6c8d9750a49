"""Describe Pods created by controllers from MonarchMesh or JobSet objects, or by users, who name them by labels.

This covers the contents of these objects, the Pods that belong to them, their messages about missing Pods, and the
choice of free existing Pods. Plain data, no I/O.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Required, TypedDict

import msgspec

from monarch_kernel.launchers.base import HostStatus, InfeasibleError, SubmissionRefusedError
from monarch_kernel.launchers.kubernetes.pods import (
    JOB_LABEL,
    MeshPods,
    ObjectCondition,
    ObjectMeta,
    PodPattern,
    SeenPod,
    metadata,
    pod_template,
    words,
)

#: The port at which Monarch's workers listen, and the label by which its Pods are numbered.
PORT, ORDER = 26600, "apps.kubernetes.io/pod-index"
#: The maximum number of replacements of a Pod in a JobSet, over all its Pods.
_REPLACED = 1000
_KUEUE = "kueue.x-k8s.io/"
#: The maximum length of the name of a Pod of a JobSet, and of the part that controllers add to that of the group.
_LONGEST_NAME, _ADDED = 63, len("-0-0000-abcde")


class _JobSpec(TypedDict, total=False):
    completions: int


class _JobTemplate(TypedDict):
    spec: _JobSpec


class _ReplicatedJob(TypedDict):
    name: str
    template: _JobTemplate


class SetSpec(TypedDict, total=False):
    """The spec of an object that creates Pods: the fields that are used here, of all kinds of such objects."""

    replicas: int
    suspend: bool
    replicatedJobs: list[_ReplicatedJob]


class SetStatus(TypedDict, total=False):
    """The status of such an object."""

    conditions: list[ObjectCondition]


class SetObject(TypedDict, total=False):
    """An object that creates Pods, as the API server describes it."""

    metadata: Required[ObjectMeta]
    spec: Required[SetSpec]
    status: SetStatus


@dataclass(frozen=True)
class PodSlot:
    """The slot of one Pod in such an object.

    Attributes:
        object: the name of the object.
        group: the group of equal Pods in it; "" if all Pods of the object are equal.
        index: the index of the Pod in the group; -1: it has none.
    """

    object: str
    group: str
    index: int


@dataclass(frozen=True)
class PodGroup:
    """A number of Pods of one mesh in an object, in a group with this name."""

    name: str
    pods: MeshPods
    count: int


class PodSet(ABC):
    """A kind of such objects."""

    #: The name of the kind in ``KubernetesLauncher`` and in its answers.
    through: ClassVar[str]
    kind: ClassVar[str]
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    #: The software that the cluster needs for it.
    needs: ClassVar[str]

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of these objects, or of one of them, at the API server."""
        found = f"/apis/{self.group}/{self.version}/namespaces/{namespace}/{self.plural}"
        return f"{found}/{name}" if name else found

    #: Whether an object can have Pods of several meshes.
    holds_meshes: ClassVar[bool] = False

    def groups(self, name: str, meshes: Sequence[str]) -> list[str]:
        """Return the names of the groups of these meshes in an object of this name."""
        del name
        return [""] * len(meshes)

    def made(self, name: str, groups: Sequence[PodGroup], owner: str, user: str) -> dict[str, object]:
        """Build the object for these Pods; see ``pods.pod``.

        Raises:
            SubmissionRefusedError: a single object cannot have all of them.
        """
        pattern, job = self._common([group.pods.pattern for group in groups]), groups[0].pods.request.command.job
        return {
            "apiVersion": f"{self.group}/{self.version}",
            "kind": self.kind,
            "metadata": metadata(pattern, job, name, owner, user),
            "spec": self._spec(groups),
        }

    def _common(self, patterns: Sequence[PodPattern]) -> PodPattern:
        """Return the settings that the object itself takes from its Pods."""
        (pattern,) = patterns
        return pattern

    @abstractmethod
    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, object]: ...

    @abstractmethod
    def selector(self, job: str, names: Collection[str]) -> str:
        """Return the labels of the Pods of these objects."""

    @abstractmethod
    def slot(self, pod: SeenPod) -> PodSlot:
        """Return the slot of a Pod."""

    @abstractmethod
    def makers(self, slot: PodSlot) -> tuple[str, ...]:
        """Return the names of objects whose events explain a missing Pod."""

    @abstractmethod
    def size(self, found: SetObject, group: str) -> int:
        """Return how many Pods a group of an object has."""

    @abstractmethod
    def sized(self, count: int) -> dict[str, object] | None:
        """Build the patch that keeps only this many Pods, the first ones; None: all Pods stay."""

    @abstractmethod
    def replaces(self, gone: HostStatus) -> bool:
        """Return whether a Pod replaces one that is gone in this way."""

    def refills(self, pods: Sequence[SeenPod]) -> bool:
        """Return whether a Pod comes, or has come, into a slot that these Pods have used."""
        del pods
        return True

    def finished(self, found: SetObject) -> str:
        """Return why it creates no more Pods; "" if it does."""
        return next((words(each) or kind for kind in ("Failed", "Completed") if (each := _is(found, kind))), "")

    def suspended(self, found: SetObject) -> bool:
        """Return whether it waits for its admission."""
        return bool((found.get("spec") or {}).get("suspend"))

    def waits(self, found: SetObject) -> str:
        """Return the reported reason why it has not created a Pod."""
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
    """An object of Monarch's operator, which creates a StatefulSet from it.

    A container that has ended is restarted in its Pod, and a lost Pod is recreated under the same name. The Pods have
    only the operator's labels.
    """

    through, kind, plural = "monarchmesh", "MonarchMesh", "monarchmeshes"
    group, version = "monarch.pytorch.org", "v1alpha1"
    needs = "Monarch's operator (https://github.com/meta-pytorch/monarch-kubernetes)"

    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, object]:
        (mesh,) = groups
        template = pod_template(mesh.pods.pattern, mesh.pods.request, restart="Always")
        return {"replicas": mesh.count, "port": mesh.pods.pattern.port or PORT, "podTemplate": template}

    def selector(self, job: str, names: Collection[str]) -> str:
        """See ``PodSet``."""
        return f"{MESH_LABEL} in ({','.join(sorted(names))})"

    def slot(self, pod: SeenPod) -> PodSlot:
        """See ``PodSet``. Before 1.28, clusters do not label the Pods of StatefulSets; names end with the index."""
        index = _number(pod.labels.get(ORDER) or pod.name.rpartition("-")[2])
        return PodSlot(pod.labels.get(MESH_LABEL, ""), "", index)

    def makers(self, slot: PodSlot) -> tuple[str, ...]:
        """See ``PodSet``."""
        return (slot.object,)

    def size(self, found: SetObject, group: str) -> int:
        """See ``PodSet``."""
        return int(found["spec"].get("replicas") or 0)

    def sized(self, count: int) -> dict[str, object] | None:
        """See ``PodSet``."""
        return {"spec": {"replicas": count}}

    def replaces(self, gone: HostStatus) -> bool:
        """See ``PodSet``."""
        return True


class JobSet(PodSet):
    """An object of the JobSet API, whose Pods are all admitted together.

    Its Job replaces a Pod that fails. A Pod whose worker has ended in good order is not replaced, and uses no more
    resources.
    """

    through, kind, plural = "jobset", "JobSet", "jobsets"
    group, version = "jobset.x-k8s.io", "v1alpha2"
    needs = "JobSet (https://jobset.sigs.k8s.io)"

    holds_meshes = True

    def groups(self, name: str, meshes: Sequence[str]) -> list[str]:
        """See ``PodSet``. Groups are named like the meshes, as far as the length of Pod names allows."""
        room = _LONGEST_NAME - len(name) - 1 - _ADDED
        found: list[str] = []
        for at, mesh in enumerate(meshes):
            plain = re.sub("[^a-z0-9]+", "-", mesh.lower()).strip("-")
            plain = plain if plain[:1].isalpha() else f"m{plain}"
            cut = plain[:room].strip("-")
            while cut in found:
                cut = f"{plain[: room - len(str(at))]}{at}"
                at += 1
            found.append(cut)
        return found

    def _common(self, patterns: Sequence[PodPattern]) -> PodPattern:
        """See ``PodSet``. Kueue admits the JobSet as one object, so its labels apply to all of it."""
        labels: dict[str, set[str]] = {}
        annotations: dict[str, set[str]] = {}
        for pattern in patterns:
            for known, own in ((labels, pattern.labels), (annotations, pattern.annotations)):
                for key, value in own.items():
                    known.setdefault(key, set()).add(value)
        if several := {key: sorted(each) for key, each in labels.items() if key.startswith(_KUEUE) and len(each) > 1}:
            raise SubmissionRefusedError(
                "kubernetes",
                f"a JobSet is admitted as one, and its meshes have several values of {', '.join(several)}: "
                f"{', '.join(value for each in several.values() for value in each)}",
                "give all meshes the same, or take a job for each",
            )
        agreed = [{key: each for key, (each, *more) in known.items() if not more} for known in (labels, annotations)]
        return replace(patterns[0], labels=agreed[0], annotations=agreed[1])

    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, object]:
        return {
            # Workers are reached by their addresses, so no Service is needed.
            "network": {"enableDNSHostnames": False},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": group.name, "replicas": 1, "template": {"spec": self._job(group)}} for group in groups
            ],
        }

    def _job(self, group: PodGroup) -> dict[str, object]:
        pattern, request = group.pods.pattern, group.pods.request
        meta = metadata(pattern, request.command.job, "", "", "")
        # Kueue admits the JobSet, so its labels do not belong on the Pods.
        labels = {key: value for key, value in meta["labels"].items() if value and not key.startswith(_KUEUE)}
        template = {
            "metadata": {"labels": labels, "annotations": meta["annotations"]},
            "spec": pod_template(pattern, request),
        }
        return {
            "completionMode": "Indexed",
            "completions": group.count,
            "parallelism": group.count,
            "backoffLimit": _REPLACED,
            "template": template,
        }

    def selector(self, job: str, names: Collection[str]) -> str:
        """See ``PodSet``."""
        return f"{JOB_LABEL}={job}"

    def slot(self, pod: SeenPod) -> PodSlot:
        """See ``PodSet``."""
        index = pod.labels.get(_INDEX) or pod.annotations.get(_INDEX, "")
        return PodSlot(pod.labels.get(_JOBSET_LABEL, ""), pod.labels.get(_GROUP_LABEL, ""), _number(index))

    def makers(self, slot: PodSlot) -> tuple[str, ...]:
        """See ``PodSet``. The only Job of a group is created after its JobSet."""
        return slot.object, f"{slot.object}-{slot.group}-0"

    def size(self, found: SetObject, group: str) -> int:
        """See ``PodSet``."""
        jobs = {each["name"]: each["template"]["spec"] for each in found["spec"].get("replicatedJobs", [])}
        return int(jobs[group].get("completions") or 0) if group in jobs else 0

    def sized(self, count: int) -> dict[str, object] | None:
        """See ``PodSet``."""
        return None

    def replaces(self, gone: HostStatus) -> bool:
        """See ``PodSet``."""
        return gone.exit_code != 0

    def refills(self, pods: Sequence[SeenPod]) -> bool:
        """See ``PodSet``. When the first Pod of an index ends in good order, its Job has completed that index."""
        return not any(pod.phase == "Succeeded" for pod in pods)


#: A label of the Pods of a MonarchMesh: its name.
MESH_LABEL = "monarch.pytorch.org/mesh-name"
_JOBSET_LABEL, _GROUP_LABEL = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "batch.kubernetes.io/job-completion-index"
#: The kinds by their names in ``KubernetesLauncher``.
POD_SETS: Mapping[str, PodSet] = {each.through: each for each in (MonarchMesh(), JobSet())}


def admission(workload: SetObject) -> str:
    """Return Kueue's reason in a Workload why it is not, or no longer, admitted; "" if there is none."""
    for kind, status in (("Evicted", "True"), ("QuotaReserved", "False"), ("Admitted", "False")):
        said = next((each for each in _conditions(workload) if each.get("type") == kind), {})
        if said.get("status") == status and said.get("message"):
            return words(said)
    return ""


def _conditions(found: SetObject) -> Sequence[ObjectCondition]:
    return (found.get("status") or {}).get("conditions") or []


def _is(found: SetObject, kind: str) -> ObjectCondition:
    """Return a condition of an object, if it is true."""
    wanted = (each for each in _conditions(found) if each.get("type") == kind and each.get("status") == "True")
    return next(wanted, {})


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


class TakenPod(msgspec.Struct, frozen=True):
    """A host in an existing Pod.

    Attributes:
        host: its number.
        pod: its name.
        selector: the labels by which the Pod was found.
        container: the container of the host; "": none has run yet.
    """

    host: int
    pod: str
    selector: str
    container: str = ""


class AttachedLabels:
    """The labels of existing Pods, and the labels by which these are numbered: for all meshes, or by mesh name.

    Args:
        attach_to: as in ``KubernetesLauncher``.
        order_label: as in ``KubernetesLauncher``.
    """

    def __init__(self, attach_to: str | Mapping[str, str], order_label: str | Mapping[str, str]) -> None:
        self.attach_to = attach_to if isinstance(attach_to, str) else dict(attach_to)
        self.order_label = order_label if isinstance(order_label, str) else dict(order_label)

    def words(self) -> str:
        """Describe all of them; "": the Pods of all meshes are created."""
        found = [self.attach_to] if isinstance(self.attach_to, str) else list(self.attach_to.values())
        return "; ".join(f"Pods with the labels {each}" for each in found if each)

    def selector(self, mesh: str) -> str:
        """Return the labels of the existing Pods of a mesh; "": its Pods are created."""
        return self.attach_to if isinstance(self.attach_to, str) else self.attach_to.get(mesh, "")

    def order(self, mesh: str) -> str:
        """Return the label by which these are numbered."""
        return self.order_label if isinstance(self.order_label, str) else self.order_label.get(mesh, ORDER)

    def choose(
        self,
        wanted: Mapping[int, str],
        found: Mapping[str, Iterable[SeenPod]],
        before: Sequence[TakenPod],
        own: Collection[str],
        namespace: str,
    ) -> list[TakenPod]:
        """Choose Pods in which no host of the job runs.

        Args:
            wanted: the mesh of each further host, by its number.
            found: by mesh, the Pods with its labels.
            before: the Pods that the job has taken so far.
            own: the names of Pods that were created for the job.
            namespace: the namespace of all of them.

        Raises:
            InfeasibleError: there are not enough Pods.
        """
        used = {(each.pod, each.container) for each in before}
        taken = {*own, *(each.pod for each in before if not each.container)}
        chosen: list[TakenPod] = []
        for mesh in dict.fromkeys(wanted.values()):
            selector, order = self.selector(mesh), self.order(mesh)
            free = [pod for pod in found[selector] if not pod.leaving and not pod.over and pod.name not in taken]
            free = sorted(
                (pod for pod in free if (pod.name, pod.container_id) not in used), key=lambda pod: _order_of(pod, order)
            )
            numbers = [number for number in wanted if wanted[number] == mesh]
            if len(free) < len(numbers):
                raise InfeasibleError(
                    f"{len(numbers)} hosts were asked for, and {len(free)} Pods in the namespace {namespace} have the "
                    f"labels {selector} and are free: ask for fewer, or have more Pods started"
                )
            for number, pod in zip(numbers, free):
                # The host is the container that follows one that has ended.
                chosen.append(TakenPod(number, pod.name, selector, "" if pod.ended else pod.container_id))
                taken.add(pod.name)
        return chosen


def _order_of(pod: SeenPod, label: str) -> tuple[float, str]:
    number = pod.labels.get(label, "")
    return (float(number) if number.isdigit() else float("inf"), pod.name)
