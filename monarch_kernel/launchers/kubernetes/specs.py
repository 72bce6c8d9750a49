"""Parse the Pods of a mesh as Monarch's programs define them: an image with requirements, or the spec of a Pod."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.launchers.kubernetes.pods import WORKER

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
    spec: dict[str, Any] = field(default_factory=dict[str, Any])
    resources: dict[str, Any] = field(default_factory=dict[str, Any])
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


def _plain(given: Any) -> dict[str, Any]:
    """Convert an object of the API, of the package ``kubernetes`` or already plain, to plain data."""
    if isinstance(given, Mapping):
        return dict(given)
    client = importlib.import_module("kubernetes.client")
    return client.ApiClient(client.Configuration()).sanitize_for_serialization(given)
