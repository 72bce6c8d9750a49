"""What users may set of hosts from Kubernetes by name, and how they write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.launchers.base import LauncherOption
from monarch_kernel.launchers.kubernetes_pods import KEYS
from monarch_kernel.launchers.kubernetes_sets import POD_SETS, PORT

#: Pods are made by the launcher itself.
DIRECTLY = "pods"
#: By Monarch's operator where the cluster has it, else by the launcher itself.
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


def toleration(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """A toleration, from an object of the API or ``KEY[=VALUE][:EFFECT]``.

    Raises:
        ValueError: it has no key.
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
    """A volume, from an object of the API or the name of a PersistentVolumeClaim."""
    return {"persistentVolumeClaim": {"claimName": given}} if isinstance(given, str) else dict(given)


def pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` each.

    Raises:
        ValueError: one is not; the message names the option.
    """
    found = [word.partition("=") for word in words]
    if wrong := [word for word, (key, equals, _) in zip(words, found) if not key or not equals]:
        raise ValueError(f"{option}: {wrong[0]!r} is no KEY=VALUE")
    return {key: value for key, _, value in found}
