"""Parse settings of hosts from Kubernetes: options by name, options of single meshes, and the resulting Pods."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from monarch_kernel.launchers.base import (
    HostPhase,
    HostStatus,
    LauncherOption,
    LaunchError,
    LaunchRequest,
    Resources,
    SubmissionRefusedError,
)
from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi
from monarch_kernel.launchers.kubernetes.pods import (
    JOB_LABEL,
    KEYS,
    MeshPods,
    ObjectMeta,
    PodPattern,
    SeenPod,
    pod_name,
    secret_name,
)
from monarch_kernel.launchers.kubernetes.sets import POD_SETS, PORT, PodGroup, PodSet, PodSlot, SetObject, admission

# Assign the Pods of a MonarchMesh or a JobSet to the hosts of a job.
#
# Their controllers replace a lost Pod or container by a new one in the same slot. For a job, that is another host,
# because the processes of the old one are gone. A host is therefore the first container that is seen in its slot and
# does not belong to another host. Annotations of the Secret of the job record this container, so that every program of
# its user finds it: ``monarch-kernel/host-NUMBER: OBJECT/GROUP INDEX MESH CONTAINER STATE``.

_HOST = "monarch-kernel/host-"
_NONE, _RETURNED = "-", "returned"
#: Requests only names, labels and annotations of objects, so that the key of a job is not transferred.
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PATCH = "application/merge-patch+json"
_GONE, _FORBIDDEN = 404, 403
_PAUSE = 0.1


@dataclass(frozen=True)
class HostPlacement:
    """The placement of a host.

    Attributes:
        slot: the slot of its Pod in a MonarchMesh or JobSet.
        mesh: the mesh of the job whose hosts use the slot.
        container: the container of the host; "": none has been seen yet.
        returned: whether the host was released.
    """

    slot: PodSlot
    mesh: str = ""
    container: str = ""
    returned: bool = False

    @property
    def object(self) -> str:
        """The name of its MonarchMesh or JobSet."""
        return self.slot.object

    def text(self) -> str:
        """Format it as an annotation."""
        where = f"{self.slot.object}/{self.slot.group}"
        words = [where, str(self.slot.index), self.mesh or _NONE, self.container or _NONE]
        return " ".join([*words, *([_RETURNED] if self.returned else [])])

    @classmethod
    def of(cls, text: str) -> HostPlacement:
        """Parse an annotation."""
        where, index, mesh, container, *state = text.split()
        name, _, group = where.partition("/")
        mesh, container = ("" if word == _NONE else word for word in (mesh, container))
        return cls(PodSlot(name, group, int(index)), mesh, container, _RETURNED in state)


def held(
    places: Mapping[int, HostPlacement], pods: Sequence[tuple[PodSlot, SeenPod]]
) -> tuple[dict[int, SeenPod], dict[int, HostPlacement]]:
    """Return the Pods of hosts, by their numbers, and the placements whose container was seen for the first time.

    Args:
        places: the placements of all hosts.
        pods: the Pods with their slots; those that have ended first, then the older ones.
    """
    newest = {place.slot: number for number, place in sorted(places.items())}
    known = {place.container for place in places.values()}
    found: dict[int, SeenPod] = {}
    seen: dict[int, HostPlacement] = {}
    for number, place in places.items():
        own = [pod for at, pod in pods if at == place.slot]
        if place.container:
            newer = newest[place.slot] != number
            # If no container starts, several may have come and gone since the last query. The end of the last one shows
            # why.
            own = [
                pod for pod in own if place.container in (pod.container_id, pod.before_id) or (pod.fails and not newer)
            ]
        elif place.returned or newest[place.slot] != number:
            continue  # no container was ever seen, and none is expected any more
        else:
            own = [pod for pod in own if not pod.leaving and (not pod.container_id or pod.container_id not in known)]
        if own:
            found[number] = own[-1]
            if own[-1].container_id and not place.container:
                seen[number] = replace(place, container=own[-1].container_id)
    return found, seen


def _is_before(place: HostPlacement | None, pod: SeenPod) -> bool:
    return place is not None and bool(place.container) and place.container != pod.container_id


class HostPlacements:
    """The hosts of a job in MonarchMeshes or JobSets.

    Args:
        api: the API server of the cluster.
        namespace: the namespace of the job.
        job: its id.
        kind: the kind of its objects.
    """

    def __init__(self, api: KubernetesApi, namespace: str, job: str, kind: PodSet) -> None:
        self._api = api
        self._namespace = namespace
        self._job = job
        self._kind = kind
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{secret_name(job)}"

    def create(self, pods: Mapping[str, MeshPods], wanted: Mapping[int, str], owner: str, user: str) -> None:
        """Request further hosts, in new objects: all of them, or none.

        Args:
            pods: the definition of the Pods of each mesh.
            wanted: the mesh of each host, by its number.
        """
        meshes = {mesh: [number for number in wanted if wanted[number] == mesh] for mesh in wanted.values()}
        several = [meshes] if self._kind.holds_meshes else [{mesh: numbers} for mesh, numbers in meshes.items()]
        created: list[str] = []
        try:
            places: dict[int, HostPlacement] = {}
            for each in several:
                first = min(number for numbers in each.values() for number in numbers)
                name = pod_name(pods[wanted[first]].request, first)
                groups = dict(zip(each, self._kind.groups(name, list(each))))
                asked = [PodGroup(groups[mesh], pods[mesh], len(numbers)) for mesh, numbers in each.items()]
                made = self._kind.made(name, asked, owner, user)
                self._api.request("POST", self._kind.path(self._namespace), made)
                created.append(name)
                for mesh, numbers in each.items():
                    slots = (PodSlot(name, groups[mesh], index) for index in range(len(numbers)))
                    places |= {number: HostPlacement(slot, mesh) for number, slot in zip(numbers, slots)}
            self._note(places)
        except BaseException:
            for name in created:
                with contextlib.suppress(LaunchError, OSError):
                    self._delete(name)
            raise

    def owner(self) -> str:
        """Return the uid of the Secret of the job."""
        return str(self._meta()["uid"])

    def hosts(self) -> int:
        """Return the number of hosts requested so far."""
        return max(self._places(), default=-1) + 1

    def statuses(self, numbers: Sequence[int], status: Callable[[int, SeenPod], HostStatus]) -> list[HostStatus]:
        """Return the status of each of these hosts.

        Args:
            numbers: the numbers of the hosts.
            status: returns the status of a host that has a Pod.
        """
        places, objects, pods = self._look()
        found, seen = held(places, pods)
        self._note(seen)
        waits: dict[str, str] = {}
        hosts: list[HostStatus] = []
        for number in numbers:
            place = places.get(number)
            if (pod := found.get(number)) is not None:
                hosts.append(pod.before(number) if _is_before(place, pod) else status(number, pod))
                continue
            state, reason = self._without_pod(place, objects, waits)
            name = "" if place is None else place.object
            hosts.append(HostStatus(host=number, state=state, name=name, reason=reason))
        return hosts

    def pods(self) -> set[str]:
        """Return the names of all Pods in its objects."""
        return {pod.name for _, pod in self._pods(self._objects())}

    def pod(self, number: int) -> tuple[SeenPod | None, bool]:
        """Return the Pod of a host, and whether the host is the container before the current one."""
        places, _, pods = self._look()
        pod = held(places, pods)[0].get(number)
        return pod, pod is not None and _is_before(places.get(number), pod)

    def makers(self, number: int) -> tuple[str, ...]:
        """Return the names of the objects whose events explain why a host has no Pod."""
        place = self._places().get(number)
        return () if place is None else self._kind.makers(place.slot)

    def _without_pod(
        self, place: HostPlacement | None, objects: Mapping[str, SetObject], waits: dict[str, str]
    ) -> tuple[HostPhase, str]:
        kind = self._kind
        if place is None:
            return HostPhase.GONE, "the Secret of its job was deleted or changed, or others made its Pod"
        if place.returned:
            return HostPhase.GONE, "it was given back"
        made = objects.get(place.object)
        if made is None:
            return HostPhase.GONE, f"its {kind.kind} {place.object} was deleted"
        if place.object not in waits:
            waits[place.object] = kind.finished(made) or self._admission(made)
        if said := kind.finished(made):
            return HostPhase.GONE, said
        if place.container:
            return HostPhase.GONE, waits[place.object] or "its Pod was deleted, or its container was started anew"
        return HostPhase.QUEUED, waits[place.object] or kind.waits(made)

    def take(self, gone: Sequence[HostStatus], wanted: Mapping[int, str]) -> set[int]:
        """Put further hosts into slots that the job has for their meshes, and that no host uses any more.

        Args:
            gone: the hosts that are gone.
            wanted: the mesh of each further host, by its number.

        Returns:
            The numbers of the hosts for which there was a slot.
        """
        places, objects, pods = self._look()
        ended = {host.host: host for host in gone}
        users = {place.slot: number for number, place in sorted(places.items()) if number not in wanted}
        free: dict[str, list[PodSlot]] = {}
        for slot, number in users.items():
            made = objects.get(slot.object)
            if made is None or slot.index >= self._kind.size(made, slot.group) or self._kind.finished(made):
                continue
            if not self._kind.refills([pod for at, pod in pods if at == slot]):
                continue
            if places[number].returned or (number in ended and self._kind.replaces(ended[number])):
                free.setdefault(places[number].mesh, []).append(slot)
        taken: dict[int, HostPlacement] = {}
        for number, mesh in wanted.items():
            if free.get(mesh):
                taken[number] = HostPlacement(free[mesh].pop(0), mesh)
        self._note(taken)
        return set(taken)

    def untake(self, numbers: Set[int]) -> None:
        """Remove the placements of hosts with these numbers."""
        if numbers:
            noted = {f"{_HOST}{number}": None for number in numbers}
            self._api.request("PATCH", self._secret, {"metadata": {"annotations": noted}}, kind=_PATCH)

    def give_back(self, numbers: Sequence[int], patience: float) -> None:
        """End these hosts. Delete objects without other hosts; of the others, delete the last Pods if possible."""
        places, objects, pods = self._look()
        found, _ = held(places, pods)
        ending = {number: replace(places[number], returned=True) for number in numbers if number in places}
        self._note(ending)
        places |= ending
        going = {pod.uid: pod for number, pod in found.items() if number in ending}
        for name, made in objects.items():
            used = {place.slot for place in places.values() if place.object == name and not place.returned}
            if not used:
                self._delete(name)
                continue
            size = max(slot.index for slot in used) + 1
            smaller = self._kind.sized(size)
            if smaller is not None and size < self._kind.size(made, ""):
                self._api.request("PATCH", self._kind.path(self._namespace, name), smaller, kind=_PATCH)
            for slot, pod in pods:
                if slot.object == name and slot not in used and pod.uid in going and not pod.over:
                    self._gone(f"/api/v1/namespaces/{self._namespace}/pods/{pod.name}")
        self._wait(patience, objects, lambda left: not any(pod.uid in going and not pod.over for _, pod in left))

    def end(self, patience: float) -> None:
        """End all hosts."""
        objects = self._objects()
        for name in objects:
            self._delete(name)
        self._wait(patience, objects, lambda left: not left)

    # -- asking the API server ------------------------------------------------------------------------

    def _meta(self) -> ObjectMeta:
        return self._api.request("GET", self._secret, accept=_METADATA)["metadata"]

    def _places(self) -> dict[int, HostPlacement]:
        try:
            noted = self._meta().get("annotations") or {}
        except ApiRefusedError as e:
            if e.status != _GONE:
                raise
            return {}
        return {
            int(key.removeprefix(_HOST)): HostPlacement.of(text) for key, text in noted.items() if key.startswith(_HOST)
        }

    def _note(self, places: Mapping[int, HostPlacement]) -> None:
        if places:
            noted = {f"{_HOST}{number}": place.text() for number, place in places.items()}
            self._api.request("PATCH", self._secret, {"metadata": {"annotations": noted}}, kind=_PATCH)

    def _look(self) -> tuple[dict[int, HostPlacement], dict[str, SetObject], list[tuple[PodSlot, SeenPod]]]:
        objects = self._objects()
        return self._places(), objects, self._pods(objects)

    def _objects(self) -> dict[str, SetObject]:
        path = self._kind.path(self._namespace)
        found = self._api.request("GET", path, labelSelector=f"{JOB_LABEL}={self._job}").get("items") or []
        return {each["metadata"]["name"]: each for each in found}

    def _pods(self, objects: Mapping[str, object]) -> list[tuple[PodSlot, SeenPod]]:
        if not objects:
            return []
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        found = self._api.request("GET", path, labelSelector=self._kind.selector(self._job, objects)).get("items")
        pods = sorted(map(SeenPod, found or []), key=lambda pod: (not pod.over, pod.created, pod.name))
        return [(self._kind.slot(pod), pod) for pod in pods]

    def _admission(self, made: SetObject) -> str:
        """Return Kueue's message about a suspended object."""
        if not self._kind.suspended(made):
            return ""
        label = f"kueue.x-k8s.io/job-uid={made['metadata']['uid']}"
        try:
            version = self._api.request("GET", "/apis/kueue.x-k8s.io")["preferredVersion"]["groupVersion"]
            path = f"/apis/{version}/namespaces/{self._namespace}/workloads"
            found = self._api.request("GET", path, labelSelector=label).get("items") or []
        except ApiRefusedError as e:
            if e.status not in (_GONE, _FORBIDDEN):  # Kueue is not installed, or this user may not read this
                raise
            return ""
        return next(filter(None, map(admission, found)), "")

    def _delete(self, name: str) -> None:
        self._gone(self._kind.path(self._namespace, name))

    def _gone(self, path: str) -> None:
        try:
            self._api.request("DELETE", path)
        except ApiRefusedError as e:
            if e.status != _GONE:
                raise

    def _wait(
        self,
        patience: float,
        objects: Mapping[str, object],
        over: Callable[[list[tuple[PodSlot, SeenPod]]], bool],
    ) -> None:
        """Wait until the Pods of objects, which may be deleted, satisfy a condition."""
        limit = time.monotonic() + patience
        while not over(self._pods(objects)) and time.monotonic() < limit:
            time.sleep(_PAUSE)


#: The launcher itself creates the Pods.
DIRECTLY = "pods"
#: Monarch's operator creates the Pods if the cluster has it, else the launcher itself.
AUTO = "auto"
OPTIONS = (
    LauncherOption(name="image", metavar="IMAGE", help="of the Pods (default: that of this Pod)"),
    LauncherOption(
        name="namespace",
        metavar="NAME",
        help="where (default: the context's)",
        plain=True,
        pattern=r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?",
    ),
    LauncherOption(name="kubeconfig", metavar="FILE", help="how the cluster is reached (default: as kubectl)"),
    LauncherOption(name="context", metavar="NAME", help="of that file (default: its current one)"),
    LauncherOption(name="gpu_resource", metavar="NAME", help="GPUs (default: nvidia.com/gpu)", plain=True),
    LauncherOption(
        name="node_selector", type=list, metavar="KEY=VALUE,...", help="labels that nodes must have", plain=True
    ),
    LauncherOption(
        name="tolerations", type=list, metavar="KEY=VALUE:EFFECT,...", help="taints of nodes to bear", plain=True
    ),
    LauncherOption(name="labels", type=list, metavar="KEY=VALUE,...", help="of the Pods", plain=True),
    LauncherOption(name="annotations", type=list, metavar="KEY=VALUE,...", help="of the Pods"),
    LauncherOption(name="volumes", type=list, metavar="PATH=CLAIM,...", help="claims, and where they are mounted"),
    LauncherOption(name="service_account", metavar="NAME", help="of the Pods (default: they have no rights)"),
    LauncherOption(name="port", type=int, metavar="PORT", help=f"where workers listen (default: {PORT})", plain=True),
    LauncherOption(name="key", choices=tuple(KEYS), help="how workers get their key", plain=True),
    LauncherOption(name="attach_to", metavar="LABELS", help="Pods of others that run workers"),
    LauncherOption(name="through", choices=(DIRECTLY, *POD_SETS, AUTO), help="what makes the Pods", plain=True),
    LauncherOption(
        name="tunnel", type=bool, help="reach workers through the API server (default: where needed)", plain=True
    ),
)


#: Settings that Pods of one mesh may have, by the names of arguments of ``KubernetesLauncher``; and in addition the
#: resources of each host, as plain data, and the interpreter in the image.
OF_POD = ("image", "node_selector", "tolerations", "labels", "annotations", "volumes", "service_account", "port", "pod")


OF_MESH = (*OF_POD, "resources", "python")


def toleration(given: Mapping[str, object] | str) -> dict[str, object]:
    """Parse a toleration, from an object of the API or ``KEY[=VALUE][:EFFECT]``.

    Raises:
        ValueError: the toleration has no key.
    """
    if not isinstance(given, str):
        return dict(given)
    taint, _, effect = given.partition(":")
    key, is_value, value = taint.partition("=")
    if not key:
        raise ValueError(f"{given!r} is no toleration: write KEY, KEY:EFFECT or KEY=VALUE:EFFECT")
    found: dict[str, object] = {"key": key, "operator": "Equal" if is_value else "Exists"}
    found |= {"value": value} if is_value else {}
    return found | ({"effect": effect} if effect else {})


def volume(given: Mapping[str, object] | str) -> dict[str, object]:
    """Parse a volume, from an object of the API or the name of a PersistentVolumeClaim."""
    return {"persistentVolumeClaim": {"claimName": given}} if isinstance(given, str) else dict(given)


def pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` pairs.

    Raises:
        ValueError: a word is not such a pair; the message names the option.
    """
    found = [word.partition("=") for word in words]
    if wrong := [word for word, (key, equals, _) in zip(words, found) if not key or not equals]:
        raise ValueError(f"{option}: {wrong[0]!r} is no KEY=VALUE")
    return {key: value for key, _, value in found}


def pod_fields(given: Mapping[str, object]) -> dict[str, Any]:
    """Return the given settings among ``OF_POD``, in the form of ``PodPattern``."""
    how: dict[str, Callable[[Any], Any]] = {
        "node_selector": dict,
        "tolerations": lambda each: [toleration(one) for one in each],
        "labels": dict,
        "annotations": dict,
        "volumes": lambda each: {path: volume(source) for path, source in each.items()},
        "pod": dict,
    }
    return {name: how.get(name, _same)(value) for name, value in given.items() if name in OF_POD}


def _same(given: object) -> object:
    return given


def mesh_settings(meshes: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """Return the settings of each mesh, as plain data.

    Raises:
        ValueError: one of them cannot be set for a single mesh.
    """
    for mesh, given in meshes.items():
        if wrong := [name for name in given if name not in OF_MESH]:
            raise ValueError(
                f"the mesh {mesh} cannot have {', '.join(wrong)} for itself, only any of {', '.join(OF_MESH)}: set it "
                "for the whole job"
            )
    return {mesh: {**given, **pod_fields(given)} for mesh, given in meshes.items()}


def host_meshes(request: LaunchRequest) -> tuple[str, ...]:
    """Return the mesh of each host of a request; "" if it has none."""
    return request.meshes or ("",) * request.hosts


def mesh_pods(
    pattern: PodPattern,
    meshes: Mapping[str, Mapping[str, object]],
    request: LaunchRequest,
    made: Iterable[str],
    own_image: Callable[[], str],
) -> dict[str, MeshPods]:
    """Determine the Pods of meshes of a request.

    Args:
        pattern: the pattern of the job.
        meshes: the settings of each mesh that has any.
        request: a request for hosts of one or several meshes.
        made: the meshes whose Pods are created.
        own_image: returns the image of the Pod in which this process runs; "" outside of a Pod.

    Raises:
        SubmissionRefusedError: a mesh has no image.
    """
    found: dict[str, MeshPods] = {}
    for mesh in made:
        settings = meshes.get(mesh, {})
        own = replace(pattern, **{name: settings[name] for name in OF_POD if name in settings})
        own = replace(own, image=own.image or own_image())
        if not own.image:
            raise SubmissionRefusedError(
                "kubernetes", "a Pod needs an image", "name one that has monarch_kernel, with image="
            )
        command, resources = request.command, request.resources
        if python := settings.get("python"):
            command = replace(command, python=python)
        elif not command.python and own.image != own_image():
            # The path of this process's interpreter need not exist in another image.
            command = replace(command, python="python3")
        if "resources" in settings:
            wanted = msgspec.convert(settings["resources"], Resources)
            resources = msgspec.structs.replace(wanted, walltime=resources.walltime)
        found[mesh] = MeshPods(own, replace(request, command=command, resources=resources))
    return found
