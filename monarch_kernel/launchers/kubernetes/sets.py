"""Pods made by controllers, from MonarchMesh or JobSet objects, or by users, who name them by labels.

What these objects are made of, which Pods are theirs, what they say of absent Pods, and which given Pods are free.
Plain data, no I/O.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from monarch_kernel.launchers.base import HostStatus, InfeasibleError, SubmissionRefusedError
from monarch_kernel.launchers.kubernetes.pods import (
    JOB_LABEL,
    MeshPods,
    PodPattern,
    SeenPod,
    metadata,
    pod_template,
    words,
)

#: Where the workers of Monarch listen, and by which its Pods are numbered.
PORT, ORDER = 26600, "apps.kubernetes.io/pod-index"
#: How often the Pods of a JobSet are replaced, all of them together.
_REPLACED = 1000
_KUEUE = "kueue.x-k8s.io/"
#: How long the name of a Pod of a JobSet may be, and how much of it the controllers add behind that of the group.
_LONGEST_NAME, _ADDED = 63, len("-0-0000-abcde")


@dataclass(frozen=True)
class PodSlot:
    """Where one Pod of such an object is.

    Attributes:
        object: its name.
        group: of the Pods there that are alike; "" where all of the object are.
        index: of the Pod in that group; -1: it has none.
    """

    object: str
    group: str
    index: int


@dataclass(frozen=True)
class PodGroup:
    """So many Pods of one mesh in an object, in a group of this name."""

    name: str
    pods: MeshPods
    count: int


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

    #: Whether an object can have Pods of several meshes.
    holds_meshes: ClassVar[bool] = False

    def groups(self, name: str, meshes: Sequence[str]) -> list[str]:
        """What the groups of these meshes are called in an object of this name."""
        del name
        return [""] * len(meshes)

    def made(self, name: str, groups: Sequence[PodGroup], owner: str, user: str) -> dict[str, Any]:
        """The object for these Pods; see ``pods.pod``.

        Raises:
            SubmissionRefusedError: no one object can have all of them.
        """
        pattern, job = self._common([group.pods.pattern for group in groups]), groups[0].pods.request.command.job
        return {
            "apiVersion": f"{self.group}/{self.version}",
            "kind": self.kind,
            "metadata": metadata(pattern, job, name, owner, user),
            "spec": self._spec(groups),
        }

    def _common(self, patterns: Sequence[PodPattern]) -> PodPattern:
        """What the object itself has of the Pods in it."""
        (pattern,) = patterns
        return pattern

    @abstractmethod
    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, Any]: ...

    @abstractmethod
    def selector(self, job: str, names: Collection[str]) -> str:
        """The labels of the Pods of these objects."""

    @abstractmethod
    def slot(self, pod: SeenPod) -> PodSlot:
        """Where a Pod is."""

    @abstractmethod
    def makers(self, slot: PodSlot) -> tuple[str, ...]:
        """The names of objects whose events explain a missing Pod."""

    @abstractmethod
    def size(self, found: Mapping[str, Any], group: str) -> int:
        """How many Pods a group of an object has, as found."""

    @abstractmethod
    def sized(self, count: int) -> dict[str, Any] | None:
        """The patch for its first so many Pods; None: it keeps all that it began with."""

    @abstractmethod
    def replaces(self, gone: HostStatus) -> bool:
        """Whether a Pod comes in the place of one that has gone so."""

    def refills(self, pods: Sequence[SeenPod]) -> bool:
        """Whether a Pod comes, or has come, into a slot in which these are."""
        del pods
        return True

    def finished(self, found: Mapping[str, Any]) -> str:
        """Why it makes no Pods any more; "": it does."""
        return next((words(each) or kind for kind in ("Failed", "Completed") if (each := _is(found, kind))), "")

    def suspended(self, found: Mapping[str, Any]) -> bool:
        """Whether it waits for its admission."""
        return bool((found.get("spec") or {}).get("suspend"))

    def waits(self, found: Mapping[str, Any]) -> str:
        """The reported reason why it has not made a Pod."""
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

    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, Any]:
        (mesh,) = groups
        template = pod_template(mesh.pods.pattern, mesh.pods.request, restart="Always")
        return {"replicas": mesh.count, "port": mesh.pods.pattern.port or PORT, "podTemplate": template}

    def selector(self, job: str, names: Collection[str]) -> str:
        """See ``PodSet``."""
        return f"{MESH_LABEL} in ({','.join(sorted(names))})"

    def slot(self, pod: SeenPod) -> PodSlot:
        """See ``PodSet``. Clusters before 1.28 do not label the Pods of StatefulSets; their names end so."""
        index = _number(pod.labels.get(ORDER) or pod.name.rpartition("-")[2])
        return PodSlot(pod.labels.get(MESH_LABEL, ""), "", index)

    def makers(self, slot: PodSlot) -> tuple[str, ...]:
        """See ``PodSet``."""
        return (slot.object,)

    def size(self, found: Mapping[str, Any], group: str) -> int:
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

    holds_meshes = True

    def groups(self, name: str, meshes: Sequence[str]) -> list[str]:
        """See ``PodSet``. They are called as the meshes are, as far as the names of Pods allow."""
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
        """See ``PodSet``. Kueue admits the JobSet as one, so its labels are for all of it."""
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

    def _spec(self, groups: Sequence[PodGroup]) -> dict[str, Any]:
        return {
            # Workers are reached by their addresses: no Service is needed.
            "network": {"enableDNSHostnames": False},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": group.name, "replicas": 1, "template": {"spec": self._job(group)}} for group in groups
            ],
        }

    def _job(self, group: PodGroup) -> dict[str, Any]:
        pattern, request = group.pods.pattern, group.pods.request
        meta = metadata(pattern, request.command.job, "", "", "")
        # Kueue admits the JobSet: that it is to wait for is no matter of its Pods.
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
        """See ``PodSet``. The only Job of a group comes after its JobSet."""
        return slot.object, f"{slot.object}-{slot.group}-0"

    def size(self, found: Mapping[str, Any], group: str) -> int:
        """See ``PodSet``."""
        jobs = {each["name"]: each["template"]["spec"] for each in found["spec"]["replicatedJobs"]}
        return int(jobs[group].get("completions") or 0) if group in jobs else 0

    def sized(self, count: int) -> dict[str, Any] | None:
        """See ``PodSet``."""
        return None

    def replaces(self, gone: HostStatus) -> bool:
        """See ``PodSet``."""
        return gone.exit_code != 0

    def refills(self, pods: Sequence[SeenPod]) -> bool:
        """See ``PodSet``. With the first Pod that ends in good order, its Job is done with an index."""
        return not any(pod.phase == "Succeeded" for pod in pods)


#: On the Pods of a MonarchMesh: its name.
MESH_LABEL = "monarch.pytorch.org/mesh-name"
_JOBSET_LABEL, _GROUP_LABEL = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "batch.kubernetes.io/job-completion-index"
#: Kinds by what ``KubernetesLauncher`` calls them.
POD_SETS: Mapping[str, PodSet] = {each.through: each for each in (MonarchMesh(), JobSet())}


def admission(workload: Mapping[str, Any]) -> str:
    """The reason in a Workload of Kueue why it is not, or no longer, admitted; "" if there is none."""
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


class TakenPod(msgspec.Struct, frozen=True):
    """A host in a Pod of others.

    Attributes:
        host: its number.
        pod: its name.
        selector: the labels by which it was found.
        container: that it is; "": none ran yet.
    """

    host: int
    pod: str
    selector: str
    container: str = ""


class AttachedLabels:
    """The labels of Pods of others, and the label by which those are numbered: for all meshes, or by their names.

    Args:
        attach_to: as ``KubernetesLauncher`` has it.
        order_label: the same.
    """

    def __init__(self, attach_to: str | Mapping[str, str], order_label: str | Mapping[str, str]) -> None:
        self.attach_to = attach_to if isinstance(attach_to, str) else dict(attach_to)
        self.order_label = order_label if isinstance(order_label, str) else dict(order_label)

    def words(self) -> str:
        """All of them; "": the Pods of all meshes are made."""
        found = [self.attach_to] if isinstance(self.attach_to, str) else list(self.attach_to.values())
        return "; ".join(f"Pods with the labels {each}" for each in found if each)

    def selector(self, mesh: str) -> str:
        """The labels of the Pods of a mesh; "": its Pods are made."""
        return self.attach_to if isinstance(self.attach_to, str) else self.attach_to.get(mesh, "")

    def order(self, mesh: str) -> str:
        """The label by which these are numbered."""
        return self.order_label if isinstance(self.order_label, str) else self.order_label.get(mesh, ORDER)

    def choose(
        self,
        wanted: Mapping[int, str],
        found: Mapping[str, Iterable[SeenPod]],
        before: Sequence[TakenPod],
        own: Collection[str],
        namespace: str,
    ) -> list[TakenPod]:
        """Pods in which no host of the job lives.

        Args:
            wanted: the mesh of each further host, by its number.
            found: the Pods with the labels of these meshes, by these.
            before: those that the job has taken so far.
            own: the names of Pods that were made for the job.
            namespace: of all of them.

        Raises:
            InfeasibleError: there are too few.
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
                # The container after one that has ended is the one that comes.
                chosen.append(TakenPod(number, pod.name, selector, "" if pod.ended else pod.container_id))
                taken.add(pod.name)
        return chosen


def _order_of(pod: SeenPod, label: str) -> tuple[float, str]:
    number = pod.labels.get(label, "")
    return (float(number) if number.isdigit() else float("inf"), pod.name)
