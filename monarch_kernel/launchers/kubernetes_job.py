"""``KubernetesJob``: hosts from Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from monarch_kernel.launchers.asking import memory_size
from monarch_kernel.launchers.base import LaunchError, Resources
from monarch_kernel.launchers.engine_job import TIMEOUT, EngineJob
from monarch_kernel.launchers.job import checked_meshes
from monarch_kernel.launchers.kubernetes import KubernetesLauncher
from monarch_kernel.launchers.kubernetes_options import AUTO, DIRECTLY
from monarch_kernel.launchers.kubernetes_sets import MESH_LABEL, ORDER, PORT
from monarch_kernel.launchers.kubernetes_specs import ImageSpec, given_pods


class KubernetesJob(EngineJob):
    """Hosts from Kubernetes: Pods with a worker in each, which need no operator there (``docs/kubernetes.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name. Without it, ``add_mesh`` says what they are, as with
            Monarch.
        image: of the Pods, with monarch_kernel in it; "": that of the Pod in which this program runs.
        namespace: where; "": that of the context.
        timeout: how long ``state`` waits for hosts (seconds).
        kubeconfig: a file; None: as ``kubectl`` does, else the account of this Pod.
        context: of that file; "": its current one.
        gpus: devices of each host.
        gpu_resource: what the cluster calls them.
        cpus: processors of each host.
        memory: of each host: bytes, or such as "64GiB".
        resources: further resources of each host, such as ``{"rdma/hca": 1}``.
        walltime: after which hosts end (seconds); None: none.
        python: the interpreter in the image; by default ``python3``, in this program's own image the path of this one.
        attach_to: labels of Pods that others have made and that run workers, such as "app=trainer"; they are not
            ended. Needs ``key_file=``, the key of these workers.
        through: what makes the Pods: "pods", this program; "monarchmesh", Monarch's operator; "jobset", JobSet;
            "auto", Monarch's operator where the cluster has it, else this program. By default that if ``add_mesh``
            says what they are, else "pods".
        tunnel: whether workers are reached through the API server, as this program is outside the network of the
            Pods; None: where no direct connection succeeds.
        options: ``node_selector``, ``tolerations``, ``labels``, ``annotations``, ``volumes``, ``service_account``,
            ``port``, ``key``, ``pod`` and ``order_label`` of ``KubernetesLauncher``, and those of ``EngineJob``.

    Raises:
        ValueError: a value is not possible; the message says which.
    """

    _adds_meshes = True
    #: What the last mesh that was added asks of its Pods, and what the job itself does.
    _added: tuple[dict[str, Any], Resources] | None = None
    _own: tuple[dict[str, Any], Resources]

    def __init__(
        self,
        meshes: Mapping[str, int] | None = None,
        image: str = "",
        namespace: str = "",
        timeout: float | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
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
        if attach_to and options.get("key_file") is None:
            raise ValueError(_keyless(attach_to))
        launcher = KubernetesLauncher(
            image,
            namespace=namespace,
            kubeconfig="" if kubeconfig is None else os.fspath(kubeconfig),
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
            memory=memory_size(memory) if isinstance(memory, str) else memory,
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
        port: int = PORT,
        pod_spec: Any = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        pod_template: Any = None,
    ) -> None:
        """Add a mesh, before the job is applied; as Monarch's method of this name.

        With an image or a spec its Pods are made, and are the same as those of all other meshes of this job. Without,
        Pods of others are taken by their labels.

        Args:
            name: of the mesh.
            num_replicas: its hosts.
            label_selector: the labels of Pods of others; None: those of Monarch's operator, for a MonarchMesh of this
                name.
            pod_rank_label: the label by which those are numbered.
            image_spec: the image of the Pods, or an ``ImageSpec``.
            port: where their workers listen.
            pod_spec: of the Pods: an object of the API, or a ``V1PodSpec``. The command of its only container, or of
                the one that is called "worker", becomes that of a worker.
            labels: of what is made.
            annotations: of what is made.
            pod_template: as ``pod_spec``, with labels and annotations in its metadata.

        Raises:
            ValueError: the arguments do not fit each other, or those of a mesh before.
            LaunchError: the job is applied already.
        """
        if self._id:
            raise LaunchError(f"{self!r} is applied: its meshes are what they are; kill() it before, or resize() them")
        if name in self._requested:
            raise ValueError(f"this job has a mesh {name} already")
        meshes = checked_meshes(type(self).__name__, {**self._requested, name: num_replicas})
        if self._added is None:
            self._own = self._launcher.options(), self._resources
        options, resources = self._own
        made = image_spec is not None or pod_spec is not None or pod_template is not None
        others = ", ".join(self._requested)
        before = self._launcher.options()
        if others and made == bool(before["attach_to"]):
            raise ValueError(f"the Pods of {others} and of {name} are not all made, or all attached to")
        if not made:
            if labels or annotations:
                raise ValueError(f"the Pods of {name} are made by others: leave out labels= and annotations=")
            wanted = label_selector or f"app.kubernetes.io/name=monarch-worker,{MESH_LABEL}={name}"
            if self._key_file is None:
                raise ValueError(_keyless(wanted))
            if others and pod_rank_label != before["order_label"]:
                raise ValueError(f"those of {others} are numbered by {before['order_label']}, so that {name} has to be")
            known = before["attach_to"] if others else {}
            changed = {"attach_to": {**known, name: wanted}, "order_label": pod_rank_label}
        else:
            if label_selector is not None or pod_rank_label != ORDER:
                raise ValueError(f"the Pods of {name} are made: leave out label_selector= and pod_rank_label=")
            found = given_pods(image_spec, pod_spec, pod_template)
            resources = msgspec.structs.replace(resources, options={**resources.options, **found.resources})
            changed = {
                "image": found.image or options["image"],
                "port": port,
                "pod": found.spec or options["pod"],
                "labels": found.labels | dict(labels or {}) or options["labels"],
                "annotations": found.annotations | dict(annotations or {}) or options["annotations"],
            }
            if found.shared_memory:
                size = {"emptyDir": {"medium": "Memory", "sizeLimit": found.shared_memory}}
                changed["volumes"] = {**options["volumes"], "/dev/shm": size}
        asked = (changed, resources)
        if others and made and self._added != asked:
            raise ValueError(
                f"the Pods of {name} are not as those of {others}: take a job for each, as all Pods of one are the same"
            )
        self._added, self._resources = asked, resources
        self._launcher = KubernetesLauncher.of(options | changed)
        self._requested = meshes


def _keyless(labels: str) -> str:
    return (
        f"the Pods with the labels {labels} have a key already: name its file with key_file=, as only who has it can "
        "use their workers"
    )
