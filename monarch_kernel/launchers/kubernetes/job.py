"""``KubernetesJob``: hosts from Kubernetes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from monarch_kernel.launchers.base import LaunchError, Resources, keyless
from monarch_kernel.launchers.engine_job import TIMEOUT, EngineJob
from monarch_kernel.launchers.host_request import memory_size
from monarch_kernel.launchers.job import checked_meshes
from monarch_kernel.launchers.kubernetes.api import KubeConfig, kubeconfig_text
from monarch_kernel.launchers.kubernetes.launcher import KubernetesLauncher
from monarch_kernel.launchers.kubernetes.options import AUTO, DIRECTLY
from monarch_kernel.launchers.kubernetes.pods import WORKER
from monarch_kernel.launchers.kubernetes.sets import MESH_LABEL, ORDER, PORT

# Parse the Pods of a mesh as Monarch's programs define them: an image with requirements, or the spec of a Pod.

#: The script with which a Pod of Monarch's programs runs a worker. ``KubernetesJob`` starts its own worker instead.
WORKER_BOOTSTRAP_SCRIPT = """\
import os
import socket

from monarch_kernel.actor import run_worker_loop_forever
from monarch_kernel.job import ranked_service_proc_id_from_env, service_proc_addr

port = os.environ.get("MONARCH_PORT", "26600")
address = f"tcp://{socket.getfqdn()}:{port}@tcp://0.0.0.0:{port}"
run_worker_loop_forever(
    address=service_proc_addr(address, ranked_service_proc_id_from_env()), ca="trust_all_connections"
)
"""


@dataclass(frozen=True)
class ImageSpec:
    """An image, and the resources of its Pods; like Monarch's class of this name.

    Args:
        image: the image, with monarch_kernel in it.
        resources: the resources of each host, such as ``{"nvidia.com/gpu": 4}``.
        enable_fuse: whether workers can mount folders of other hosts; they are then privileged, as FUSE requires.
        shared_memory_size: the size of ``/dev/shm``, such as "16Gi"; None: limited only by the Pod's memory.
    """

    image: str
    resources: Mapping[str, str | int] | None = None
    enable_fuse: bool = False
    shared_memory_size: str | None = None


@dataclass(frozen=True)
class GivenPods:
    """The requested settings of the Pods of a mesh, as ``KubernetesLauncher`` accepts them.

    Attributes:
        image: the image of the worker's container; "": none is named.
        spec: further fields of the spec of the Pods.
        resources: resources, with the cluster's names.
        shared_memory: the size of ``/dev/shm``; "": not limited.
        labels, annotations: labels and annotations of the Pods.
    """

    image: str = ""
    spec: dict[str, Any] = field(default_factory=dict[str, object])
    resources: dict[str, object] = field(default_factory=dict[str, object])
    shared_memory: str = ""
    labels: dict[str, str] = field(default_factory=dict[str, str])
    annotations: dict[str, str] = field(default_factory=dict[str, str])


def given_pods(image_spec: ImageSpec | str | None, pod_spec: Any, pod_template: Any) -> GivenPods:
    """Parse the Pods that one of these arguments defines; see ``KubernetesJob.add_mesh``.

    Raises:
        ValueError: not exactly one argument is given, or no container is the worker's.
    """
    if sum(each is not None for each in (image_spec, pod_spec, pod_template)) != 1:
        raise ValueError("name one of image_spec=, pod_spec= and pod_template=")
    if isinstance(image_spec, str):
        return GivenPods(image_spec)
    if image_spec is not None:
        privileged = {"containers": [{"name": WORKER, "securityContext": {"privileged": True}}]}
        return GivenPods(
            image_spec.image,
            privileged if image_spec.enable_fuse else {},
            dict(image_spec.resources or {}),
            image_spec.shared_memory_size or "",
        )
    template = _plain(pod_template) if pod_template is not None else {"spec": _plain(pod_spec)}
    spec, meta = dict(template.get("spec") or {}), template.get("metadata") or {}
    containers = list(spec.get("containers") or [])
    worker = next((each for each in containers if each.get("name") == WORKER or len(containers) == 1), None)
    if worker is None:
        raise ValueError(f"no container is called {WORKER!r}: so the one of the worker has to be called")
    # Its command runs another kind of worker, and is dropped.
    own = {key: value for key, value in worker.items() if key not in ("image", "command", "args")} | {"name": WORKER}
    spec["containers"] = [own if each is worker else each for each in containers]
    return GivenPods(
        worker.get("image", ""),
        spec,
        labels=dict(meta.get("labels") or {}),
        annotations=dict(meta.get("annotations") or {}),
    )


def _plain(given: object) -> dict[str, Any]:
    """Convert an object of the API, of the package ``kubernetes`` or already plain, to plain data."""
    if isinstance(given, Mapping):
        return dict(given)
    client = importlib.import_module("kubernetes.client")
    return client.ApiClient(client.Configuration()).sanitize_for_serialization(given)


class KubernetesJob(EngineJob):
    """Hosts from Kubernetes: Pods with a worker in each, without an operator in the cluster (``docs/kubernetes.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. Without it, call ``add_mesh`` to define the meshes, as
            with Monarch. A string is the namespace, which is Monarch's first argument.
        image: the image of the Pods, with monarch_kernel in it; "": that of the Pod in which this program runs.
        namespace: the namespace; "": that of the context.
        timeout: the time that ``state`` waits for hosts (seconds).
        kubeconfig: a file, or a ``KubeConfig``; None: as ``kubectl`` does, else the account of this Pod.
        context: a context of that file; "": its current one.
        gpus: the devices of each host.
        gpu_resource: the cluster's name for these devices.
        cpus: the processors of each host.
        memory: the memory of each host: bytes, or a text such as "64GiB".
        resources: further resources of each host, such as ``{"rdma/hca": 1}``.
        walltime: the time after which hosts end (seconds); None: no limit.
        python: the interpreter in the image; by default ``python3``, or in this program's own image the path of its
            interpreter.
        attach_to: labels of existing Pods that run workers, such as "app=trainer", for all meshes that ``add_mesh``
            does not define otherwise. These Pods are not ended. Needs ``key_file=``, the key of these workers.
            Monarch's programs pass the address of a forwarded port here ("tcp://127.0.0.1:26600"); it is not used, and
            means ``tunnel=True``.
        through: the creator of the Pods: "pods", this program; "monarchmesh", Monarch's operator; "jobset", JobSet;
            "auto", Monarch's operator if the cluster has it, else this program. The default is "auto" if ``add_mesh``
            defines the Pods, else "pods".
        tunnel: whether workers are reached through the API server, because this program is outside the network of the
            Pods; None: only if no direct connection succeeds.
        options: ``node_selector``, ``tolerations``, ``labels``, ``annotations``, ``volumes``, ``service_account``,
            ``port``, ``key``, ``pod`` and ``order_label`` of ``KubernetesLauncher``, and those of ``EngineJob``.

    Raises:
        ValueError: a value is invalid; the message names it.
    """

    _adds_meshes = True
    _launcher: KubernetesLauncher
    #: Labels of existing Pods, for meshes that have none of their own.
    _attach_to = ""

    def __init__(
        self,
        meshes: Mapping[str, int] | str | None = None,
        image: str = "",
        namespace: str = "",
        timeout: float | None = None,
        kubeconfig: str | os.PathLike[str] | KubeConfig | None = None,
        *,
        context: str = "",
        gpus: int = 0,
        gpu_resource: str = "nvidia.com/gpu",
        cpus: int = 0,
        memory: str | int = 0,
        resources: Mapping[str, str | int] | None = None,
        walltime: float | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any] | str] = (),
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        volumes: Mapping[str, Mapping[str, Any] | str] | None = None,
        service_account: str = "",
        port: int = PORT,
        key: str = "environment",
        pod: Mapping[str, Any] | None = None,
        attach_to: str = "",
        order_label: str = ORDER,
        tunnel: bool | None = None,
        through: str = "",
        **options: Any,
    ) -> None:
        if isinstance(meshes, str):
            meshes, namespace = None, namespace or meshes
        if "://" in attach_to:  # labels never contain this
            attach_to, tunnel = "", True if tunnel is None else tunnel
        self._attach_to = attach_to
        launcher = KubernetesLauncher(
            image,
            namespace=namespace,
            kubeconfig=kubeconfig_text(kubeconfig),
            context=context,
            gpu_resource=gpu_resource,
            node_selector=node_selector,
            tolerations=tolerations,
            labels=labels,
            annotations=annotations,
            volumes=volumes,
            service_account=service_account,
            port=port,
            key=key,
            pod=pod,
            attach_to=attach_to,
            order_label=order_label,
            tunnel=tunnel,
            through=through or (AUTO if meshes is None else DIRECTLY),
        )
        needs = Resources(
            gpus=gpus,
            cpus=cpus,
            memory=_bytes(memory),
            walltime=walltime or 0.0,
            options=dict(resources or {}),
        )
        super().__init__(
            launcher, meshes or {}, resources=needs, timeout=TIMEOUT if timeout is None else timeout, **options
        )

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = ORDER,
        image_spec: ImageSpec | str | None = None,
        port: int | None = None,
        pod_template: object = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        pod_spec: object = None,
        *,
        gpus: int | None = None,
        cpus: int | None = None,
        memory: str | int | None = None,
        resources: Mapping[str, str | int] | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, object] | str] | None = None,
        volumes: Mapping[str, Mapping[str, Any] | str] | None = None,
        service_account: str | None = None,
        python: str = "",
    ) -> None:
        """Add a mesh before the job is applied; like Monarch's method of this name.

        With an image or a spec, its Pods are created; otherwise, existing Pods are used by their labels. The job's
        settings apply to everything that the mesh does not define.

        Args:
            name: the name of the mesh.
            num_replicas: the number of its hosts.
            label_selector: the labels of existing Pods; None: those of ``attach_to=``, else those of Monarch's
                operator, for a MonarchMesh of this name.
            pod_rank_label: the label by which existing Pods are numbered.
            image_spec: the image of the Pods, or an ``ImageSpec``.
            port: the port at which the workers of created Pods listen; None: that of the job, by default 26600. Workers
                in existing Pods announce theirs.
            pod_template: the template of the Pods: an object of the API, or a ``V1PodTemplateSpec``. The command of its
                only container, or of the one called "worker", is replaced by that of a worker.
            labels: labels of created objects.
            annotations: annotations of created objects.
            pod_spec: only the spec of such a template, or a ``V1PodSpec``.
            gpus, cpus, memory, resources: requirements of each host of this mesh; those of ``image_spec`` take
                precedence.
            node_selector, tolerations, volumes, service_account: settings of the Pods of this mesh.
            python: the interpreter in its image.

        Raises:
            ValueError: the arguments contradict each other or those of an earlier mesh.
            LaunchError: the job is already applied.
        """
        if self._id:
            raise LaunchError(f"{self!r} is applied: its meshes are what they are; kill() it before, or resize() them")
        if name in self._requested:
            raise ValueError(f"this job has a mesh {name} already")
        meshes = checked_meshes(type(self).__name__, {**self._requested, name: num_replicas})
        own: dict[str, Any] = {
            "node_selector": node_selector,
            "tolerations": tolerations,
            "volumes": volumes,
            "service_account": service_account,
            "python": python or None,
        }
        own = {option: value for option, value in own.items() if value is not None}
        wishes = {"gpus": gpus, "cpus": cpus, "memory": None if memory is None else _bytes(memory)}
        wishes = {wish: value for wish, value in wishes.items() if value is not None}
        if image_spec is None and pod_spec is None and pod_template is None:
            if labels or annotations or own or wishes or resources:
                given = [*(["labels"] if labels else []), *(["annotations"] if annotations else [])]
                given += [*own, *wishes, *(["resources"] if resources else [])]
                raise ValueError(
                    f"the Pods of {name} are made by others: leave out {', '.join(f'{each}=' for each in given)}, or "
                    "name an image_spec="
                )
            self._attach_mesh(name, label_selector, pod_rank_label)
        else:
            if label_selector is not None or pod_rank_label != ORDER:
                raise ValueError(f"the Pods of {name} are made: leave out label_selector= and pod_rank_label=")
            found = given_pods(image_spec, pod_spec, pod_template)
            own |= {} if port is None else {"port": port}
            own |= {"resources": self._needs(wishes, {**(resources or {}), **found.resources})}
            own |= {"image": found.image} if found.image else {}
            own |= {"pod": found.spec} if found.spec else {}
            own |= {"labels": each} if (each := found.labels | dict(labels or {})) else {}
            own |= {"annotations": each} if (each := found.annotations | dict(annotations or {})) else {}
            if found.shared_memory:
                size = {"emptyDir": {"medium": "Memory", "sizeLimit": found.shared_memory}}
                own["volumes"] = {**own.get("volumes", self._launcher.options()["volumes"]), "/dev/shm": size}
            self._make_mesh(name, own)
        self._requested = meshes

    def _attach_mesh(self, name: str, selector: str | None, order_label: str) -> None:
        """Add a mesh of existing Pods."""
        selector = selector or self._attach_to or f"app.kubernetes.io/name=monarch-worker,{MESH_LABEL}={name}"
        if self._key_file is None:
            raise ValueError(keyless(f"Pods with the labels {selector}"))
        attached, orders = self._labels()
        self._launcher = self._launcher.changed(
            attach_to={**attached, name: selector}, order_label={**orders, name: order_label}
        )

    def _make_mesh(self, name: str, settings: dict[str, object]) -> None:
        """Add a mesh whose Pods are created."""
        attached, orders = self._labels()
        meshes = {**self._launcher.options()["meshes"], name: settings}
        self._launcher = self._launcher.changed(attach_to=attached, order_label=orders, meshes=meshes)

    def _labels(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the labels of existing Pods, and of their numbers, for each mesh that has such Pods."""
        options = self._launcher.options()
        attached, orders = options["attach_to"], options["order_label"]
        if isinstance(attached, str):  # it applies to all meshes so far
            attached = dict.fromkeys(self._requested, attached) if attached else {}
        if isinstance(orders, str):
            orders = dict.fromkeys(attached, orders)
        return attached, orders

    def _needs(self, wishes: Mapping[str, int], named: Mapping[str, object]) -> dict[str, object]:
        """Return the requirements of each host of a mesh for ``KubernetesLauncher``; ``named`` takes precedence."""
        found = msgspec.structs.replace(self._resources, **wishes)
        known = {self._launcher.options()["gpu_resource"]: "gpus", "cpu": "cpus", "memory": "memory"}
        stated = {field: 0 for key, field in known.items() if key in named}
        found = msgspec.structs.replace(found, options={**found.options, **named}, **stated)
        return {field: value for field, value in msgspec.to_builtins(found).items() if field != "walltime"}


def _bytes(size: str | int) -> int:
    return memory_size(size) if isinstance(size, str) else size
