"""What the autoscaler of a Ray cluster says while a placement group waits, whichever of Ray's two it is."""

from __future__ import annotations

import importlib
import json
from typing import Any

#: How long the control store may take to answer (seconds).
_PATIENCE = 2
#: Where the first version notes what it does, and why it has ended.
_STATUS, _ERROR = "__autoscaling_status", "__autoscaling_error"


def autoscaler_says(address: str, group: str) -> str:
    """What it launches, what it could not launch, and whether it can add nodes for a placement group at all.

    "": there is none, it does nothing, or it does not answer: what it would tell is only shown.

    Args:
        address: of the cluster, to which this process is connected.
        group: the id of the placement group.
    """
    parts: list[str] = []
    for ask in (_second_version, _first_version):
        try:
            parts += ask(address, group)
        except Exception:  # of Ray's insides, in whatever version
            continue
    return "; ".join(f"the autoscaler {part}" for part in parts)


def _second_version(address: str, group: str) -> list[str]:
    raylet: Any = importlib.import_module("ray._raylet")
    models: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    said = raylet.GcsClient(address).get_cluster_status(timeout_s=_PATIENCE)
    state = models.GetClusterStatusReply.FromString(said).autoscaling_state
    parts = _listed(
        "launches", [f"{each.count} of {each.ray_node_type_name}" for each in state.pending_instance_requests]
    )
    parts += _listed(
        "starts",
        [f"{each.ray_node_type_name} at {each.ip_address or 'no address yet'}" for each in state.pending_instances],
    )
    parts += _listed(
        "could not launch", [f"{each.ray_node_type_name}: {each.reason}" for each in state.failed_instance_requests]
    )
    # Ray's own words are in its logs only.
    if any(each.details.startswith(group) for each in state.infeasible_gang_resource_requests):
        parts.append("has no available node types that can fulfill it")
    return parts


def _first_version(address: str, group: str) -> list[str]:
    store: Any = importlib.import_module("ray.experimental.internal_kv")
    report = json.loads(store._internal_kv_get(_STATUS) or b"{}").get("autoscaler_report") or {}
    parts = _listed("launches", [f"{count} of {kind}" for kind, count in report.get("pending_launches", {}).items()])
    parts += _listed("starts", [f"{kind} at {ip} ({state})" for ip, kind, state in report.get("pending_nodes", ())])
    known = report.get("node_availability_summary", {}).get("node_availabilities", {})
    refused = [(each["node_type"], each["unavailable_node_information"]) for each in known.values()]
    parts += _listed(
        "could not launch", [f"{kind}: {why['category']}: {why['description']}" for kind, why in refused if why]
    )
    if error := (store._internal_kv_get(_ERROR) or b"").decode(errors="replace").split():
        parts.append(f"has ended: {' '.join(error)}")
    return parts


def _listed(verb: str, what: list[str]) -> list[str]:
    return [f"{verb} {', '.join(what)}"] if what else []
