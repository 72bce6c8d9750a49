"""What the meshes of a job have of their own, and what their Pods are made of. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from monarch_kernel.launchers.base import LaunchRequest, Resources, SubmissionRefusedError
from monarch_kernel.launchers.kubernetes_options import toleration, volume
from monarch_kernel.launchers.kubernetes_pods import MeshPods, PodPattern

#: What Pods of one mesh may have of their own, by the names of arguments of ``KubernetesLauncher``, and more: the
#: resources of each host, as plain data, and the interpreter in the image.
OF_POD = ("image", "node_selector", "tolerations", "labels", "annotations", "volumes", "service_account", "port", "pod")
OF_MESH = (*OF_POD, "resources", "python")


def pod_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``OF_POD`` that are given, as ``PodPattern`` has them."""
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
    """The settings of each mesh, as plain data.

    Raises:
        ValueError: a mesh cannot have one of them for itself.
    """
    for mesh, given in meshes.items():
        if wrong := [name for name in given if name not in OF_MESH]:
            raise ValueError(
                f"the mesh {mesh} cannot have {', '.join(wrong)} for itself, only any of {', '.join(OF_MESH)}: set it "
                "for the whole job"
            )
    return {mesh: {**given, **pod_fields(given)} for mesh, given in meshes.items()}


def host_meshes(request: LaunchRequest) -> tuple[str, ...]:
    """The mesh of each host of a request; "" where it names none."""
    return request.meshes or ("",) * request.hosts


def mesh_pods(
    pattern: PodPattern,
    meshes: Mapping[str, Mapping[str, Any]],
    request: LaunchRequest,
    made: Iterable[str],
    own_image: Callable[[], str],
) -> dict[str, MeshPods]:
    """What the Pods of meshes of a request are made of.

    Args:
        pattern: of the job.
        meshes: the settings of each mesh that has any.
        request: for hosts of one or more meshes.
        made: those of them whose Pods are made.
        own_image: the image of the Pod in which this process runs; "" elsewhere.

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
            # The path of this process's interpreter says nothing of another image.
            command = replace(command, python="python3")
        if "resources" in settings:
            wanted = msgspec.convert(settings["resources"], Resources)
            resources = msgspec.structs.replace(wanted, walltime=resources.walltime)
        found[mesh] = MeshPods(own, replace(request, command=command, resources=resources))
    return found
