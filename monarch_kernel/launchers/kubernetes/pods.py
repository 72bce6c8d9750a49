"""Build the Pods of a job, and derive the state of hosts from Kubernetes' answers. Plain data, no I/O."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

from monarch_kernel import environment
from monarch_kernel.launchers.base import (
    MARKER,
    HostPhase,
    HostStatus,
    KeyWay,
    LaunchRequest,
    WorkerAnnouncement,
    WorkerCommand,
    find_announcement,
)

#: Labels of the objects of a job: its id, the number of a host, and the user who requested it.
JOB_LABEL, HOST_LABEL, USER_LABEL = "monarch-kernel/job", "monarch-kernel/host", "monarch-kernel/user"
#: An annotation: the container and the announcement of its worker, so that no later poll has to read its log.
ANNOUNCED = "monarch-kernel/announced"
#: The container of a worker.
WORKER = "worker"
#: The ways in which a worker may get its key.
KEYS = {"environment": KeyWay.ENVIRONMENT, "file": KeyWay.FILE}
#: The length of a job's name in the names of its objects. Controllers extend these, up to 63 characters.
_LONGEST = 24
_KEY_FOLDER, _KEY_FILE = "/var/run/monarch-kernel", "key"
#: The time limit for a worker to end in good order (seconds).
GRACE = 10
#: How much longer than its walltime a Pod may live, because its images are fetched and its worker starts (seconds).
_DEADLINE_MARGIN = 300
#: Reasons for which a container waits forever.
_NEVER = {
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
_PULL = {"ErrImagePull", "ImagePullBackOff"}
_NO_IMAGE = re.compile(
    "not found|manifest unknown|denied|unauthorized|does not exist|no match for platform", re.IGNORECASE
)


@dataclass(frozen=True)
class PodPattern:
    """The common settings of all Pods of a mesh; see ``KubernetesLauncher``."""

    image: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    tolerations: Sequence[Mapping[str, object]] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    volumes: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    service_account: str = ""
    port: int = 0
    key: str = "environment"
    tunnel: bool | None = None
    pod: Mapping[str, Any] = field(default_factory=dict[str, object])

    @property
    def listen(self) -> str:
        """Return the URL at which a worker listens.

        A tunnel ends at the loopback address of the Pod, so the worker listens there, too. It does not do so in the
        network of its node, because it would then listen at every address of the node.
        """
        address = f"tcp://$({environment.POD_ADDRESS}):{self.port}"
        if self.tunnel is False or not self.port or self.pod.get("hostNetwork"):
            return address
        return f"{address}@tcp://0.0.0.0:{self.port}"


class MadeMeta(TypedDict):
    """The metadata of an object that is created here."""

    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    ownerReferences: list[dict[str, str]]


class ObjectMeta(TypedDict, total=False):
    """The metadata of an object, as the API server describes it: the fields that are used here, as in what follows."""

    name: Required[str]
    uid: Required[str]
    creationTimestamp: str
    deletionTimestamp: str
    labels: dict[str, str]
    annotations: dict[str, str]


class ObjectCondition(TypedDict, total=False):
    """A condition in the status of an object."""

    type: str
    status: str
    reason: str
    message: str


class StateDetail(TypedDict, total=False):
    """What is known of a state of a container."""

    reason: str
    message: str
    startedAt: str
    exitCode: int
    containerID: str


class ContainerState(TypedDict, total=False):
    """The state of a container; only one of the fields is there."""

    waiting: StateDetail
    running: StateDetail
    terminated: StateDetail


class ContainerStatus(TypedDict, total=False):
    """The status of a container."""

    name: str
    containerID: str
    state: ContainerState
    lastState: ContainerState


class PodStatus(TypedDict, total=False):
    """The status of a Pod."""

    phase: str
    reason: str
    message: str
    startTime: str
    conditions: list[ObjectCondition]
    containerStatuses: list[ContainerStatus]
    initContainerStatuses: list[ContainerStatus]


class PodSpec(TypedDict, total=False):
    """The spec of a Pod."""

    containers: list[dict[str, object]]
    nodeName: str
    restartPolicy: str


class PodObject(TypedDict, total=False):
    """A Pod, as the API server describes it."""

    metadata: Required[ObjectMeta]
    spec: PodSpec
    status: PodStatus


@dataclass(frozen=True)
class MeshPods:
    """The definition of the Pods of a mesh.

    Attributes:
        pattern: the common settings.
        request: the requirements of each host, and the command of its worker.
    """

    pattern: PodPattern
    request: LaunchRequest


def pod_name(request: LaunchRequest, number: int) -> str:
    """Return the name of the Pod of a host."""
    base = re.sub("[^a-z0-9]+", "-", request.name.lower()).strip("-")[:_LONGEST].strip("-") or "monarch"
    if not base[0].isalpha():
        base = f"m{base}"  # the name of a Service must begin with a letter
    return f"{base}-{request.command.job}-{number}"


def secret_name(job: str) -> str:
    """Return the name of the Secret of a job."""
    return f"monarch-{job}"


def secret(command: WorkerCommand, user: str) -> dict[str, object]:
    """Build the Secret of a job: its key, and its environment variables."""
    assert command.key is not None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(command.job),
            "labels": {JOB_LABEL: command.job, USER_LABEL: user},
        },
        "immutable": True,
        "stringData": {**command.env, **command.key_environment()},
    }


def pod(pattern: PodPattern, request: LaunchRequest, number: int, owner: str, user: str) -> dict[str, object]:
    """Build the Pod of a host.

    Args:
        owner: the uid of the Secret of the job. Deleting the Secret deletes the Pods.
    """
    command, needs = request.command, request.resources
    name = pod_name(request, number)
    spec = _spec(pattern, request, name, command.marker(number))
    if needs.walltime:
        spec["activeDeadlineSeconds"] = math.ceil(needs.walltime) + _DEADLINE_MARGIN
    meta = metadata(pattern, command.job, name, owner, user)
    meta["labels"][HOST_LABEL] = str(number)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": _merged(spec, pattern.pod)}


def pod_template(pattern: PodPattern, request: LaunchRequest, *, restart: str = "Never") -> dict[str, object]:
    """Build the template from which a controller of the cluster creates and names Pods.

    Args:
        restart: whether a container is restarted in place: "Never" or "Always".
    """
    name = f"$({environment.POD_NAME})"
    own = {"name": environment.POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    spec = _spec(pattern, request, name, request.command.marker(name), own)
    spec["restartPolicy"] = restart
    return _merged(spec, pattern.pod)


def metadata(pattern: PodPattern, job: str, name: str, owner: str, user: str) -> MadeMeta:
    """Build the metadata of an object of a job; see ``pod``."""
    return {
        "name": name,
        "labels": {
            "app.kubernetes.io/managed-by": "monarch-kernel",
            **pattern.labels,
            JOB_LABEL: job,
            USER_LABEL: user,
        },
        "annotations": dict(pattern.annotations),
        "ownerReferences": [{"apiVersion": "v1", "kind": "Secret", "name": secret_name(job), "uid": owner}],
    }


def _spec(
    pattern: PodPattern, request: LaunchRequest, name: str, marker: str, *more: Mapping[str, object]
) -> dict[str, object]:
    """Build the spec of the Pod of a host, without a deadline; ``more`` are further variables of its environment."""
    command, needs = request.command, request.resources
    way = KEYS[pattern.key]
    by_file = way is KeyWay.FILE
    argv = command.argv(
        pattern.listen,
        key=way,
        key_file=f"{_KEY_FOLDER}/{_KEY_FILE}",
        name=name,
        walltime=needs.walltime,
    )
    (key_variable,) = command.key_environment()
    # by default, a container runtime provides 64 MiB
    mounts = {"/dev/shm": {"emptyDir": {"medium": "Memory"}}, **pattern.volumes}
    given = [each for one in pattern.pod.get("containers", []) for each in one.get("volumeMounts", [])]
    mounts = {path: source for path, source in mounts.items() if path not in {each["mountPath"] for each in given}}
    volumes = [{"name": f"volume-{at}", **source} for at, source in enumerate(mounts.values())]
    mounted: list[dict[str, object]] = [{"name": f"volume-{at}", "mountPath": path} for at, path in enumerate(mounts)]
    variables: list[Mapping[str, object]] = [
        *more,
        {"name": environment.POD_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": MARKER, "value": marker},
    ]
    sources: list[dict[str, object]] = []
    of_job = secret_name(command.job)
    if by_file:
        # Each variable is added by name, so the key is not among them.
        variables += [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": of_job, "key": name}}} for name in command.env
        ]
        items = [{"key": key_variable, "path": _KEY_FILE}]
        volumes.append({"name": "key", "secret": {"secretName": of_job, "items": items, "defaultMode": 0o400}})
        mounted.append({"name": "key", "mountPath": _KEY_FOLDER, "readOnly": True})
    else:
        sources.append({"secretRef": {"name": of_job}})
    asked = {name: str(value) for name, value in needs.options.items()}
    asked |= {pattern.gpu_resource: str(needs.gpus)} if needs.gpus else {}
    asked |= {"memory": _quantity(needs.memory)} if needs.memory else {}
    container: dict[str, object] = {
        "name": WORKER,
        "image": pattern.image,
        "command": argv,
        "env": variables,
        "envFrom": sources,
        # A limit of processors would only slow down a worker. Unrequested processors are shared.
        "resources": {"limits": asked, "requests": asked | ({"cpu": str(needs.cpus)} if needs.cpus else {})},
        "volumeMounts": mounted,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, object] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "enableServiceLinks": False,
        "automountServiceAccountToken": bool(pattern.service_account),
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": dict(pattern.node_selector),
        "tolerations": list(pattern.tolerations),
    }
    if pattern.service_account:
        spec["serviceAccountName"] = pattern.service_account
    return spec


def _quantity(size: int) -> str:
    """Format a number of bytes for Kubernetes."""
    for unit, factor in (("Gi", 2**30), ("Mi", 2**20)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _merged(ours: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, object]:
    """Merge further fields into an object."""
    return {
        key: _merged_value(ours.get(key), theirs[key]) if key in theirs else ours[key] for key in {**ours, **theirs}
    }


def _merged_value(ours: object, theirs: object) -> object:
    """Merge plain data: objects are merged, and lists of named objects by name."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return _merged(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        names = [each.get("name") if isinstance(each, Mapping) else None for each in ours]
        found = list(ours)
        for each in theirs:
            name = each.get("name") if isinstance(each, Mapping) else None
            if name is not None and name in names:
                found[names.index(name)] = _merged_value(ours[names.index(name)], each)
            else:
                found.append(each)
        return found
    return theirs


class SeenPod:
    """A Pod, as described by the API server."""

    def __init__(self, found: PodObject) -> None:
        self._meta = found["metadata"]
        self._spec = found.get("spec") or {}
        self._status = found.get("status") or {}
        self.name = str(self._meta["name"])
        self.labels: Mapping[str, str] = self._meta.get("labels") or {}
        self.annotations: Mapping[str, str] = self._meta.get("annotations") or {}
        self.created = str(self._meta.get("creationTimestamp") or "")
        self.uid = str(self._meta.get("uid", ""))
        self.phase = str(self._status.get("phase", "Pending"))
        containers = self._status.get("containerStatuses") or []
        names = [each["name"] for each in self._spec.get("containers", [])]
        self.container = WORKER if WORKER in names or not names else str(names[0])
        own = next((each for each in containers if each.get("name") == self.container), None)
        self._own = own or {}
        self._state = self._own.get("state") or {}
        self.container_id = str(self._own.get("containerID", ""))
        last = (self._own.get("lastState") or {}).get("terminated") or {}
        #: The previous container in the same Pod.
        self.before_id = str(last.get("containerID", ""))
        self._before = last
        # Between the end of a container and its next start, it waits, and its own end is the last one.
        self._ended = self._state.get("terminated") or (last if last and self.before_id == self.container_id else None)

    @property
    def leaving(self) -> bool:
        """Whether it is being deleted."""
        return bool(self._meta.get("deletionTimestamp"))

    @property
    def has_log(self) -> bool:
        """Whether the container of its worker is running or has run."""
        return "running" in self._state or (self._ended is not None and bool(self.container_id))

    @property
    def over(self) -> bool:
        """Whether the container of its worker has ended, and will not start again."""
        return self.phase in ("Failed", "Succeeded") or (
            self._ended is not None and self._spec.get("restartPolicy", "Always") == "Never"
        )

    @property
    def ended(self) -> bool:
        """Whether the container of its worker has ended, whether or not another one follows."""
        return self.over or self._ended is not None

    @property
    def fails(self) -> bool:
        """Whether its container has been restarted, and no worker has ever announced itself in it."""
        return bool(self.before_id) and ANNOUNCED not in self.annotations

    def announced(self) -> WorkerAnnouncement | None:
        """Return the announcement of its worker, if a poll has recorded it."""
        noted = self.annotations.get(ANNOUNCED, "")
        container, _, line = noted.partition(" ")
        if not self.container_id or container != self.container_id:
            return None  # or it belongs to an earlier container
        return find_announcement(line.encode() + b"\n")

    def note(self, said: WorkerAnnouncement) -> dict[str, object]:
        """Build the patch that records the announcement of its worker."""
        return {"metadata": {"annotations": {ANNOUNCED: f"{self.container_id} {said.line().decode().strip()}"}}}

    def status(self, number: int, said: WorkerAnnouncement | None) -> HostStatus:
        """Return the status of the host.

        Args:
            said: the announcement of its worker.
        """
        terminated = self._ended
        if self.leaving or self.ended:
            code = None if terminated is None else terminated.get("exitCode")
            if said is not None and said.error:
                return HostStatus.announced(number, said, name=self.name, exit_code=code)
            failed = said is None and not self.leaving and bool(code) and not self._status.get("reason")
            reason = self._end(terminated)
            return HostStatus(
                host=number, state=HostPhase.GONE, name=self.name, reason=reason, exit_code=code, failed=failed
            )
        since = _unix((self._state.get("running") or {}).get("startedAt"))
        if said is not None:
            return HostStatus.announced(number, said, name=self.name, since=since)
        if not self._spec.get("nodeName"):
            return HostStatus(host=number, state=HostPhase.QUEUED, name=self.name, reason=self._queued())
        why, never = self._waiting()
        return HostStatus(
            host=number,
            state=HostPhase.GONE if never else HostPhase.STARTING,
            name=self.name,
            reason=why,
            since=since or _unix(self._status.get("startTime")),
            failed=never,
        )

    def before(self, number: int) -> HostStatus:
        """Return the status of the host that was the previous container."""
        code = self._before.get("exitCode")
        # If a worker has announced itself in this Pod, workers can start there.
        failed = bool(code) and self.fails
        reason = _how(self._before)
        return HostStatus(
            host=number, state=HostPhase.GONE, name=self.name, reason=reason, exit_code=code, failed=failed
        )

    def _condition(self, kind: str) -> ObjectCondition:
        conditions = self._status.get("conditions") or []
        return next((each for each in conditions if each.get("type") == kind), {})

    def _queued(self) -> str:
        scheduled = self._condition("PodScheduled")
        return words(scheduled) or "Pending"

    def _waiting(self) -> tuple[str, bool]:
        """Return why its worker has not announced itself, and whether it never will."""
        for each in [*(self._status.get("initContainerStatuses") or []), self._own]:
            state = each.get("state") or {}
            waiting = state.get("waiting") or {}
            reason = waiting.get("reason", "")
            if reason in _NEVER or (reason in _PULL and _NO_IMAGE.search(waiting.get("message") or "")):
                return words(waiting), True
            if reason and reason not in ("ContainerCreating", "PodInitializing"):
                return words(waiting), False
        if "running" in self._state:
            return "its worker is starting", False
        return f"its container is being created on {self._spec.get('nodeName')}", False

    def _end(self, terminated: StateDetail | None) -> str:
        """Return why it is gone."""
        if self._status.get("reason"):  # Evicted, DeadlineExceeded, Preempting, NodeLost
            return words(self._status)
        disrupted = self._condition("DisruptionTarget")
        if disrupted.get("status") == "True":
            return words(disrupted)
        if terminated is None:
            return "its Pod is being deleted" if self.leaving else f"its Pod is {self.phase}"
        return _how(terminated)


def _how(terminated: StateDetail) -> str:
    """Describe how a container has ended."""
    code, reason = terminated.get("exitCode", 0), terminated.get("reason") or ""
    if not code:
        return "its worker has ended"
    how = f"exit {code}" if reason in ("", "Error") else f"{reason} (exit {code})"
    last = [line for line in str(terminated.get("message") or "").splitlines() if line.strip()][-1:]
    return ": ".join([how, *last])


def words(said: Mapping[str, object]) -> str:
    """Return the reason and message of a condition or a state."""
    return ": ".join(str(each) for each in (said.get("reason"), said.get("message")) if each)


def _unix(time: str | None) -> float:
    return datetime.datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() if time else 0.0
