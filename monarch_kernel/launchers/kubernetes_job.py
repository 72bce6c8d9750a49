"""``KubernetesJob``: hosts from Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.launchers.asking import memory_size
from monarch_kernel.launchers.base import Resources
from monarch_kernel.launchers.engine_job import TIMEOUT, EngineJob
from monarch_kernel.launchers.kubernetes import KubernetesLauncher
from monarch_kernel.launchers.kubernetes_options import DIRECTLY
from monarch_kernel.launchers.kubernetes_sets import ORDER, PORT


class KubernetesJob(EngineJob):
    """Hosts from Kubernetes: Pods with a worker in each, which need no operator there (``docs/kubernetes.md``).

    Args:
        meshes: the number of hosts of each mesh, by its name.
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
        through: what makes the Pods: "pods", this program; "monarchmesh", Monarch's operator; "jobset", JobSet.
        tunnel: whether workers are reached through the API server, as this program is outside the network of the
            Pods; None: where no direct connection succeeds.
        options: ``node_selector``, ``tolerations``, ``labels``, ``annotations``, ``volumes``, ``service_account``,
            ``port``, ``key``, ``pod`` and ``order_label`` of ``KubernetesLauncher``, and those of ``EngineJob``.

    Raises:
        ValueError: a value is not possible; the message says which.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
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
        through: str = DIRECTLY,
        **options: Any,
    ) -> None:
        if attach_to and options.get("key_file") is None:
            raise ValueError(
                f"the Pods with the labels {attach_to} have a key already: name its file with key_file=, as only who "
                "has it can use their workers"
            )
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
            through=through,
        )
        needs = Resources(
            gpus=gpus,
            cpus=cpus,
            memory=memory_size(memory) if isinstance(memory, str) else memory,
            walltime=walltime or 0.0,
            options=dict(resources or {}),
        )
        super().__init__(launcher, meshes, resources=needs, timeout=TIMEOUT if timeout is None else timeout, **options)
