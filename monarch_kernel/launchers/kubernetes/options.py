"""Parse settings of hosts from Kubernetes: options by name, options of single meshes, and the resulting Pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from monarch_kernel.launchers.base import LauncherOption, LaunchRequest, Resources, SubmissionRefusedError
from monarch_kernel.launchers.kubernetes.pods import KEYS, MeshPods, PodPattern
from monarch_kernel.launchers.kubernetes.sets import POD_SETS, PORT

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


def toleration(given: Mapping[str, Any] | str) -> dict[str, Any]:
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
    found: dict[str, Any] = {"key": key, "operator": "Equal" if is_value else "Exists"}
    found |= {"value": value} if is_value else {}
    return found | ({"effect": effect} if effect else {})


def volume(given: Mapping[str, Any] | str) -> dict[str, Any]:
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


def pod_fields(given: Mapping[str, Any]) -> dict[str, Any]:
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


def _same(given: Any) -> Any:
    return given


def mesh_settings(meshes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
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
    meshes: Mapping[str, Mapping[str, Any]],
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
