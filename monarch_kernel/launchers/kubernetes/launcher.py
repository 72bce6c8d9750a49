"""Get hosts from Kubernetes: Pods with a worker each, created by this launcher, a MonarchMesh, a JobSet or others."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from monarch_kernel.launchers.base import (
    HostPhase,
    HostStatus,
    InfeasibleError,
    JobStatus,
    Launcher,
    LaunchError,
    LaunchRequest,
    SubmissionRefusedError,
    Ticket,
    WorkerAnnouncement,
    find_announcement,
)
from monarch_kernel.launchers.engine_job import each_at_once
from monarch_kernel.launchers.kubernetes import api as kubernetes_api
from monarch_kernel.launchers.kubernetes import pods as kubernetes_pods
from monarch_kernel.launchers.kubernetes.api import ApiRefusedError, KubernetesApi, PodForward, PodWay, check_way
from monarch_kernel.launchers.kubernetes.options import (
    AUTO,
    DIRECTLY,
    OF_POD,
    OPTIONS,
    HostPlacements,
    host_meshes,
    mesh_pods,
    mesh_settings,
    pairs,
    pod_fields,
)
from monarch_kernel.launchers.kubernetes.pods import (
    HOST_LABEL,
    JOB_LABEL,
    KEYS,
    USER_LABEL,
    MeshPods,
    PodPattern,
    SeenPod,
)
from monarch_kernel.launchers.kubernetes.sets import ORDER, POD_SETS, PORT, AttachedLabels, MonarchMesh, TakenPod
from monarch_kernel.launchers.registry import this_user
from monarch_kernel.launchers.tunnel import Tunnels, reaches

#: The number of parallel requests.
_PARALLEL = 16
#: The size of the part of a log that is read for the announcement, which is at the beginning (bytes).
_BEGINNING = 1 << 16
#: The interval at which ending Pods are checked (seconds).
_PAUSE = 0.1
#: The time limit for an attempt to connect directly (seconds).
_DIRECT_TIME = 1.5
_GONE, _CONFLICT, _FORBIDDEN, _BAD_REQUEST = 404, 409, 403, 400
#: Words in rejections that no waiting changes, such as those of a LimitRange.
_INFEASIBLE = re.compile(r"(maximum|minimum) \S+ usage per|must be less than or equal to")


class _Data(msgspec.Struct):
    """The data in tickets of this launcher.

    Attributes:
        namespace: the namespace of the Pods.
        context: the context of the kubeconfig.
        pods: the names of the Pods that this launcher itself has created, by the number of the host; "": the host is in
            another Pod.
        taken: hosts in existing Pods.
        through: the creator of all other Pods: "pods", this launcher itself; or a key of ``POD_SETS``. The names of
            their objects and Pods are then recorded in the cluster as they appear.
    """

    namespace: str
    context: str
    pods: list[str]
    taken: list[TakenPod] = []
    through: str = DIRECTLY

    def made(self) -> list[int]:
        """Return the numbers of hosts in Pods that were created for the job."""
        taken = {each.host for each in self.taken}
        return [number for number in range(len(self.pods)) if number not in taken]


class KubernetesLauncher(Launcher):
    """Requests Pods from a Kubernetes cluster, with a worker in each.

    An operator is needed only if it creates the Pods.

    Args:
        image: the image of the Pods, with monarch_kernel in it; "": that of the Pod in which this process runs.
        namespace: the namespace; "": that of the context.
        kubeconfig: a file; "": the one that ``KUBECONFIG`` names, else ``~/.kube/config``, else the account of this
            Pod; "in-cluster": that account. For a configuration in memory, see ``KubeConfig``.
        context: a context of that file; "": its current one.
        gpu_resource: the cluster's name for the devices that ``Resources.gpus`` counts.
        node_selector: labels that nodes must have.
        tolerations: objects of the API, or ``KEY[=VALUE][:EFFECT]``.
        labels: labels of the Pods, such as ``kueue.x-k8s.io/queue-name``.
        annotations: annotations of the Pods.
        volumes: by mount path: objects of the API, or the name of a PersistentVolumeClaim.
        service_account: the service account of the Pods; "": they have no rights in the cluster.
        port: the port at which workers listen; 0: any free port, as Pods in their node's network need.
        key: the way in which workers get their key from the Secret of the job: "environment", or "file".
        pod: further fields of the spec of the Pods. Lists of named objects, such as containers, are merged by name; the
            container of the worker is "worker".
        attach_to: labels of existing Pods that run workers, such as "app=trainer"; or by mesh name, the labels for each
            mesh that has such Pods. They are not ended.
        order_label: the label by which existing Pods are numbered, or by mesh name, that of each mesh; without it, they
            are ordered by name.
        tunnel: whether this process reaches workers through the API server, because it is outside the network of the
            Pods; None: only if no direct connection succeeds.
        through: the creator of the Pods: "pods", this launcher; "monarchmesh", Monarch's operator; "jobset", JobSet,
            which has all of them admitted together; "auto", Monarch's operator if the cluster has it, else this
            launcher.
        meshes: by mesh name, settings of its Pods that replace the other arguments: any of ``image``,
            ``node_selector``, ``tolerations``, ``labels``, ``annotations``, ``volumes``, ``service_account``, ``port``
            and ``pod``; ``resources``, the fields of ``Resources`` except the walltime; and ``python``, the interpreter
            in the image.
    """

    name = "kubernetes"
    OPTIONS = OPTIONS

    def __init__(
        self,
        image: str = "",
        *,
        namespace: str = "",
        kubeconfig: str = "",
        context: str = "",
        gpu_resource: str = "nvidia.com/gpu",
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any] | str] = (),
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        volumes: Mapping[str, Mapping[str, Any] | str] | None = None,
        service_account: str = "",
        port: int = PORT,
        key: str = "environment",
        pod: Mapping[str, Any] | None = None,
        attach_to: str | Mapping[str, str] = "",
        order_label: str | Mapping[str, str] = ORDER,
        tunnel: bool | None = None,
        through: str = DIRECTLY,
        meshes: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if key not in KEYS:
            raise ValueError(f"there is no way {key!r} for a key to come: choose one of {', '.join(KEYS)}")
        if through not in (DIRECTLY, *POD_SETS, AUTO):
            known = ", ".join((DIRECTLY, *POD_SETS, AUTO))
            raise ValueError(f"nothing makes Pods through {through!r}: choose one of {known}")
        if through in POD_SETS and attach_to and isinstance(attach_to, str):
            raise ValueError(f"Pods with the labels {attach_to} are there already: leave out through={through!r}")
        self._namespace = namespace
        is_file = kubernetes_api.is_file(kubeconfig)
        self._kubeconfig = os.path.abspath(os.path.expanduser(kubeconfig)) if is_file else kubeconfig
        self._settings = kubernetes_api.kept(kubeconfig)
        self._context = context
        self._attached = AttachedLabels(attach_to, order_label)
        self._through = through
        self._meshes = mesh_settings(meshes or {})
        given = {
            "image": image,
            "node_selector": node_selector or {},
            "tolerations": tolerations,
            "labels": labels or {},
            "annotations": annotations or {},
            "volumes": volumes or {},
            "service_account": service_account,
            "port": port,
            "pod": pod or {},
        }
        self._pattern = PodPattern(gpu_resource=gpu_resource, key=key, tunnel=tunnel, **pod_fields(given))
        self._tunnels = Tunnels()
        self._apis: dict[str, KubernetesApi] = {}
        # by ended container: its announcement, which is read once
        self._ended: dict[str, WorkerAnnouncement | None] = {}
        self._lock = threading.Lock()

    @classmethod
    def configured(cls, values: Mapping[str, Any]) -> KubernetesLauncher:
        """See ``Launcher``."""
        given = dict(values)
        for name in ("node_selector", "labels", "annotations", "volumes"):
            if name in given:
                given[name] = pairs(name, given[name])
        return cls(**given)

    def options(self) -> dict[str, Any]:
        """See ``Launcher``."""
        pattern = self._pattern
        return {
            "namespace": self._namespace,
            "kubeconfig": self._kubeconfig,
            "context": self._context,
            "gpu_resource": pattern.gpu_resource,
            **{name: getattr(pattern, name) for name in OF_POD},
            "key": pattern.key,
            "attach_to": self._attached.attach_to,
            "order_label": self._attached.order_label,
            "tunnel": pattern.tunnel,
            "through": self._through,
            "meshes": self._meshes,
        }

    def changed(self, **options: Any) -> KubernetesLauncher:
        """Return a launcher with some other options, for the same API server."""
        made = KubernetesLauncher(**{**self.options(), **options})
        made._settings = self._settings
        return made

    def others(self) -> str:
        """See ``Launcher``."""
        return self._attached.words()

    # -- asking for hosts -----------------------------------------------------------------------------

    def submit(self, request: LaunchRequest) -> Ticket:
        """See ``Launcher``."""
        api = self._api(self._context)
        wanted = dict(enumerate(host_meshes(request)))
        data = _Data(self._namespace or api.namespace, api.context, [])
        data = self._taken(data, request.command.job, wanted)
        made = self._to_make(wanted)
        if not made:
            return self._ticket(request.command.job, len(data.pods), data)
        data.through = self._maker(api)
        pods = self._pods_of(api, request, made)
        try:
            path = f"{_of(data.namespace)}/secrets"
            owner = api.request("POST", path, kubernetes_pods.secret(request.command, this_user()))["metadata"]["uid"]
            if data.through in POD_SETS:
                self._places(data, request.command.job).create(pods, made, owner, this_user())
                return self._ticket(request.command.job, len(data.pods), data)
            return self._created(data, request, pods, made, owner)
        except BaseException as e:
            with contextlib.suppress(LaunchError, OSError):
                self._remove_secret(api, data.namespace, request.command.job)
            if isinstance(e, ApiRefusedError):
                raise self._refused(e, data) from None
            raise

    def more(self, ticket: Ticket, count: int, request: LaunchRequest) -> Ticket:
        """See ``Launcher``. Kubernetes itself replaces Pods that are gone."""
        data = ticket.read(_Data)
        api = self._api(data.context)
        wanted = dict(enumerate(host_meshes(request), ticket.hosts))
        data = self._taken(data, ticket.job, wanted)
        made = self._to_make(wanted)
        if not made:
            return self._ticket(ticket.job, len(data.pods), data)
        if data.through in POD_SETS:
            return self._more_placed(data, ticket, request, made)
        try:
            path = f"{_of(data.namespace)}/secrets/{kubernetes_pods.secret_name(ticket.job)}"
            owner = api.request("GET", path)["metadata"]["uid"]
            return self._created(data, request, self._pods_of(api, request, made), made, owner)
        except ApiRefusedError as e:
            raise self._refused(e, data) from None

    def _more_placed(self, data: _Data, ticket: Ticket, request: LaunchRequest, made: Mapping[int, str]) -> Ticket:
        """Put further hosts into free slots of their meshes, and create new objects for the others."""
        api, places = self._api(data.context), self._places(data, ticket.job)
        gone = self.poll(ticket).of(HostPhase.GONE)
        taken: set[int] = set()
        try:
            taken = places.take(gone, made)
            if left := {number: mesh for number, mesh in made.items() if number not in taken}:
                places.create(self._pods_of(api, request, left), left, places.owner(), this_user())
        except BaseException as e:
            with contextlib.suppress(LaunchError, OSError):
                places.untake(taken)
            if isinstance(e, ApiRefusedError):
                raise self._refused(e, data) from None
            raise
        return self._ticket(ticket.job, len(data.pods), data)

    def _to_make(self, wanted: Mapping[int, str]) -> dict[int, str]:
        """Return those further hosts that do not use existing Pods."""
        return {number: mesh for number, mesh in wanted.items() if not self._attached.selector(mesh)}

    def _taken(self, data: _Data, job: str, wanted: Mapping[int, str]) -> _Data:
        """Reserve numbers for further hosts, and assign existing Pods to those that use them."""
        attached = {number: mesh for number, mesh in wanted.items() if self._attached.selector(mesh)}
        pods, taken = [*data.pods, *("" for _ in wanted)], data.taken
        if attached:
            api = self._api(data.context)
            selectors = {self._attached.selector(mesh) for mesh in attached.values()}
            found = {each: self._pods(api, data.namespace, each).values() for each in selectors}
            own = {name for name in data.pods if name}
            if data.through in POD_SETS:
                own |= self._places(data, job).pods()
            taken = [*taken, *self._attached.choose(attached, found, taken, own, data.namespace)]
        return msgspec.structs.replace(data, pods=pods, taken=taken)

    def _pods_of(self, api: KubernetesApi, request: LaunchRequest, made: Mapping[int, str]) -> dict[str, MeshPods]:
        own_image = functools.cache(lambda: self._own_image(api))
        return mesh_pods(self._pattern, self._meshes, request, set(made.values()), own_image)

    def _created(
        self, data: _Data, request: LaunchRequest, pods: Mapping[str, MeshPods], made: Mapping[int, str], owner: str
    ) -> Ticket:
        """Create all of these Pods, or none."""
        api = self._api(data.context)
        names = {number: kubernetes_pods.pod_name(request, number) for number in made}

        def create(number: int) -> None:
            own = pods[made[number]]
            api.request(
                "POST",
                f"{_of(data.namespace)}/pods",
                kubernetes_pods.pod(own.pattern, own.request, number, owner, this_user()),
            )

        try:
            each_at_once(_PARALLEL, create, list(made), self.name)
        except BaseException:
            with contextlib.suppress(LaunchError, OSError):
                self._delete(api, data.namespace, names.values())
            raise
        data.pods = [names.get(number, name) for number, name in enumerate(data.pods)]
        return self._ticket(request.command.job, len(data.pods), data)

    def _maker(self, api: KubernetesApi) -> str:
        """Return the creator of the Pods of a new job."""
        if self._through != AUTO:
            return self._through
        kind = POD_SETS[MonarchMesh.through]
        try:
            api.request("GET", f"/apis/{kind.group}/{kind.version}")
        except ApiRefusedError:
            return DIRECTLY
        return kind.through

    def _own_image(self, api: KubernetesApi) -> str:
        """Return the image of the Pod in which this process runs; "" outside of a Pod."""
        if not kubernetes_api.in_cluster():
            return ""
        try:
            own = api.request("GET", f"{_of(api.namespace)}/pods/{socket.gethostname()}")
        except (LaunchError, OSError):
            return ""
        return str(own["spec"]["containers"][0]["image"])

    def _refused(self, refusal: ApiRefusedError, data: _Data) -> LaunchError:
        if refusal.status == _FORBIDDEN and _INFEASIBLE.search(refusal.said):
            return InfeasibleError(
                f"the namespace {data.namespace} of Kubernetes cannot have these hosts: {refusal.said}. Ask for less, "
                "or in another namespace"
            )
        advice = f"check the arguments of the request, and the namespace {data.namespace}"
        if refusal.status == _GONE and data.through in POD_SETS and "namespaces" not in refusal.said:
            kind = POD_SETS[data.through]
            said = f"there is no {kind.plural}.{kind.group} of version {kind.version} ({refusal.said})"
            return SubmissionRefusedError(
                self.name,
                said,
                f"have {kind.needs} installed in the cluster, or have Pods made with through={DIRECTLY!r}",
            )
        if refusal.status == _FORBIDDEN and "quota" in refusal.said:
            advice = "ask for less, or end other jobs (kubectl describe resourcequota)"
        elif refusal.status == _FORBIDDEN:
            advice = f"the role that docs/kubernetes.md shows must be bound to you in the namespace {data.namespace}"
        return SubmissionRefusedError(self.name, refusal.said, advice)

    # -- asking where they are ------------------------------------------------------------------------

    def _api(self, context: str) -> KubernetesApi:
        with self._lock:
            if context not in self._apis:
                self._apis[context] = KubernetesApi(self._kubeconfig, context, self.PATIENCE, self._settings)
            return self._apis[context]

    def _places(self, data: _Data, job: str) -> HostPlacements:
        return HostPlacements(self._api(data.context), data.namespace, job, POD_SETS[data.through])

    def _pods(self, api: KubernetesApi, namespace: str, selector: str) -> dict[str, SeenPod]:
        found = api.request("GET", f"{_of(namespace)}/pods", labelSelector=selector)
        return {pod.name: pod for pod in map(SeenPod, found.get("items") or [])}

    def poll(self, ticket: Ticket) -> JobStatus:
        """See ``Launcher``. Sends one request for all Pods, and two more for each worker that has come up since."""
        data = ticket.read(_Data)
        api = self._api(data.context)
        made = data.made()
        taken = {each.host: each for each in data.taken}
        selectors = {each.selector for each in data.taken}
        placed: dict[int, HostStatus] = {}
        if data.through in POD_SETS:

            def seen(number: int, pod: SeenPod) -> HostStatus:
                return pod.status(number, self._announced(api, data.namespace, pod))

            placed = {host.host: host for host in self._places(data, ticket.job).statuses(made, seen)}
        elif made:
            selectors.add(f"{JOB_LABEL}={ticket.job}")
        pods: dict[str, SeenPod] = {}
        for selector in selectors:
            pods |= self._pods(api, data.namespace, selector)

        def host(number: int) -> HostStatus:
            own = taken.get(number)
            name = own.pod if own is not None else data.pods[number]
            pod = pods.get(name)
            if pod is None:
                why = "its Pod was deleted" if name else "its Pod was deleted, or others made it"
                return HostStatus(host=number, state=HostPhase.GONE, name=name, reason=why)
            if own is not None and own.container not in ("", pod.container_id):
                why = "its container was started anew"
                return HostStatus(host=number, state=HostPhase.GONE, name=name, reason=why)
            return pod.status(number, self._announced(api, data.namespace, pod))

        others = [number for number in range(ticket.hosts) if number not in placed]
        placed |= zip(others, each_at_once(_PARALLEL, host, others, self.name))
        return JobStatus(tuple(placed[number] for number in range(ticket.hosts)))

    def _announced(self, api: KubernetesApi, namespace: str, pod: SeenPod) -> WorkerAnnouncement | None:
        said = pod.announced()
        if said is not None or not pod.has_log:
            return said
        if pod.container_id in self._ended:
            return self._ended[pod.container_id]
        path = f"{_of(namespace)}/pods/{pod.name}"
        try:
            said = find_announcement(api.text(f"{path}/log", container=pod.container, limitBytes=_BEGINNING))
            if said is not None:
                # A user without this permission reads the log each time.
                with contextlib.suppress(ApiRefusedError):
                    api.request("PATCH", path, pod.note(said), kind="application/merge-patch+json")
        except ApiRefusedError as e:
            if e.status not in (_GONE, _BAD_REQUEST):  # it is gone, or its container does not exist yet
                raise
        if pod.over:
            self._ended[pod.container_id] = said
        return said

    def log(self, ticket: Ticket, host: int, lines: int = 100) -> str:
        """See ``Launcher``. For a Pod without output: the warnings of Kubernetes."""
        data = ticket.read(_Data)
        api = self._api(data.context)
        name, options = f"host {host}", dict[str, str | int](tailLines=lines)
        try:
            taken = next((each.pod for each in data.taken if each.host == host), "")
            if data.through in POD_SETS and not taken:
                places = self._places(data, ticket.job)
                pod, is_before = places.pod(host)
                if pod is None:
                    about = [f"involvedObject.name={each},type=Warning" for each in places.makers(host)]
                    return self._events(api, data.namespace, about, lines)
                options |= {"previous": "true"} if is_before else {}
            else:
                pod = SeenPod(api.request("GET", f"{_of(data.namespace)}/pods/{taken or data.pods[host]}"))
            name = pod.name
            if pod.has_log:
                text = api.text(f"{_of(data.namespace)}/pods/{name}/log", container=pod.container, **options)
                return text.decode(errors="replace").strip()
            return self._events(api, data.namespace, [f"involvedObject.uid={pod.uid},type=Warning"], lines)
        except ApiRefusedError as e:
            return "" if e.status == _GONE else f"the log of {name} cannot be read: {e}"

    def _events(self, api: KubernetesApi, namespace: str, about: Sequence[str], lines: int) -> str:
        """Return the warnings of Kubernetes, each once."""
        found = [
            api.request("GET", f"{_of(namespace)}/events", fieldSelector=each).get("items") or [] for each in about
        ]
        said = [f"{event.get('reason')}: {event.get('message')}" for events in found for event in events]
        return "\n".join(list(dict.fromkeys(said))[-lines:])

    # -- reaching -------------------------------------------------------------------------------------

    def route(self, ticket: Ticket, host: HostStatus) -> str:
        """See ``Launcher``.

        Raises:
            LaunchError: the host cannot be reached through the API server either.
        """
        tunnel = self._pattern.tunnel
        data = ticket.read(_Data)
        api = self._api(data.context)
        if tunnel is False or (tunnel is None and (api.is_own or reaches(host.url, _DIRECT_TIME))):
            return host.url
        port = int(host.url.rpartition(":")[2])
        check_way(api, data.namespace, host.name, port, self.PATIENCE)

        carry = functools.partial(PodWay, lambda: PodForward(api, data.namespace, host.name, port))
        return self._tunnels.carried(f"{host.worker} {host.url}", carry)

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, hosts: Sequence[int] | None = None) -> None:
        """See ``Launcher``. Existing Pods of others stay."""
        data = ticket.read(_Data)
        made = [number for number in data.made() if hosts is None or number in hosts]
        if not made:
            return
        api = self._api(data.context)
        if data.through in POD_SETS:
            places = self._places(data, ticket.job)
            if hosts is None:
                places.end(self.PATIENCE)
            else:
                places.give_back(made, self.PATIENCE)
        else:
            names = {data.pods[number] for number in made}
            limit = time.monotonic() + self.PATIENCE
            # Only Pods with the label of the job were created for it.
            left = self._pods(api, data.namespace, f"{JOB_LABEL}={ticket.job}").keys() & names
            self._delete(api, data.namespace, left)
            while left and time.monotonic() < limit:
                time.sleep(_PAUSE)
                left = self._pods(api, data.namespace, f"{JOB_LABEL}={ticket.job}").keys() & names
        if hosts is None:
            self._remove_secret(api, data.namespace, ticket.job)

    def _delete(self, api: KubernetesApi, namespace: str, names: Collection[str]) -> None:
        def delete(name: str) -> None:
            try:
                api.request("DELETE", f"{_of(namespace)}/pods/{name}")
            except ApiRefusedError as e:
                if e.status not in (_GONE, _CONFLICT):
                    raise

        each_at_once(_PARALLEL, delete, list(names), self.name)

    def _remove_secret(self, api: KubernetesApi, namespace: str, job: str) -> None:
        try:
            api.request("DELETE", f"{_of(namespace)}/secrets/{kubernetes_pods.secret_name(job)}")
        except ApiRefusedError as e:
            if e.status != _GONE:
                raise

    def close(self) -> None:
        """See ``Launcher``."""
        self._tunnels.close()
        with self._lock:
            for api in self._apis.values():
                api.close()

    @classmethod
    def found(cls, *, own_process: bool) -> list[tuple[Launcher, Ticket]]:
        """See ``Launcher``.

        Finds jobs in the namespace of the current context, by the labels of their Pods and objects.
        """
        if importlib.util.find_spec("kubernetes") is None or not kubernetes_api.configured():
            return []
        launcher = cls()
        api = launcher._api("")
        jobs: dict[str, dict[int, str]] = {}
        mine = f"{JOB_LABEL},{USER_LABEL}={this_user()}"
        for pod in launcher._pods(api, api.namespace, mine).values():
            number = pod.labels.get(HOST_LABEL, "")
            if number.isdigit():
                jobs.setdefault(pod.labels[JOB_LABEL], {})[int(number)] = pod.name
        tickets: list[Ticket] = []
        for job, pods in jobs.items():
            filled = [pods.get(number, "") for number in range(max(pods) + 1)]
            tickets.append(launcher._ticket(job, len(filled), _Data(api.namespace, api.context, filled)))
        for kind in POD_SETS.values():
            try:
                items = api.request("GET", kind.path(api.namespace), labelSelector=mine).get("items") or []
            except ApiRefusedError as e:
                if e.status not in (_GONE, _FORBIDDEN):  # it is not installed, or this user has no access
                    raise
                continue
            for job in dict.fromkeys(each["metadata"]["labels"][JOB_LABEL] for each in items):
                data = _Data(api.namespace, api.context, [], through=kind.through)
                data.pods = [""] * launcher._places(data, job).hosts()
                tickets.append(launcher._ticket(job, len(data.pods), data))
        return [(launcher, ticket) for ticket in tickets]


def _of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}"
