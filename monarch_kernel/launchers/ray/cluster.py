"""Query Ray, with results as values of this package: connection, placement groups, nodes, autoscaler."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_kernel.launchers.base import LaunchError
from monarch_kernel.launchers.tunnel import reaches

if TYPE_CHECKING:
    from types import ModuleType


#: The namespace of this package's actors, whatever namespace a program uses.
NAMESPACE = "monarch_kernel"
#: The strategies by which bundles are placed on nodes.
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
#: The file in which ``ray start`` records the address of the cluster that a machine belongs to.
_CURRENT = "/tmp/ray/ray_current_cluster"
#: The order in which resources are shown, before custom ones.
_ORDER = ("CPU", "GPU", "memory")
#: Resources that Ray assigns to nodes for internal use.
_INTERNAL = ("node:", "object_store_memory", "bundle_group")
_NO_CLIENT = (
    "hosts cannot be had through Ray's client; run the program on a machine of the cluster, as 'ray job submit' does, "
    "or name the cluster's own address (HOST:6379), if this machine reaches it and the nodes"
)
#: The time limit for the port of a cluster to answer, before this process connects to it (seconds).
_DIAL_TIME = 1.0
#: A process can be connected to one cluster only, and only one thread may connect.
_connecting = threading.Lock()


#: The time limit for the control store to answer (seconds).
_AUTOSCALER_TIMEOUT = 2


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster: its id, name, whether it is alive, why not, and its total resources."""

    id: str
    name: str
    alive: bool
    reason: str
    resources: Mapping[str, float]

    def fits(self, bundle: Mapping[str, float]) -> int:
        """Return the number of such bundles that it could hold if it were empty."""
        return min((int(self.resources.get(name, 0.0) / amount) for name, amount in bundle.items()), default=0)


@dataclass(frozen=True)
class RayGroup:
    """A placement group: its id, name and state, scheduling progress, the resources of a bundle, and their nodes.

    "" stands for a node that is not assigned yet.
    """

    id: str
    name: str
    state: str
    scheduling: str
    bundle: Mapping[str, float]
    nodes: tuple[str, ...]


def load() -> ModuleType:
    """Import Ray's package.

    Raises:
        LaunchError: the package is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as e:
        raise LaunchError(
            f"hosts from Ray need its package in this interpreter ({e}): install monarch_kernel[ray], in the version "
            "of the cluster"
        ) from None


def check_address(address: str) -> None:
    """Reject an address of Ray's client.

    Raises:
        ValueError: it is such an address.
    """
    if address.startswith("ray://"):
        raise ValueError(f"{address}: {_NO_CLIENT}")


def connect(address: str) -> ModuleType:
    """Connect to a cluster, and return Ray's package: to the program's cluster if it has one, else to this address.

    Raises:
        ConnectionError: there is no cluster, or this process is connected to another one.
        LaunchError: the package is not installed, or is incompatible with the cluster; or this process is, or would be,
            connected as Ray's client.
    """
    ray = load()
    with _connecting:
        if not ray.is_initialized():
            return _connected(ray, address or local_address())
    if _is_client():
        raise LaunchError(f"this program is connected as a client (ray://): {_NO_CLIENT}")
    here = address_here(ray)
    if address and here and address != here:
        raise ConnectionError(
            f"this program is connected to the Ray cluster at {here}, and the hosts are of the one at {address}: a "
            "process can use one at a time"
        )
    return ray


def _connected(ray: ModuleType, address: str) -> ModuleType:
    try:
        check_address(address)
    except ValueError as e:
        raise LaunchError(str(e)) from None
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        # The output of other programs in Ray's logs is not output of this program.
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, OSError):
        raise
    except Exception as e:
        raise LaunchError(f"Ray at {address} refused: {e}") from e
    finally:
        if main and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)  # Ray's handler would end the program without its clean-up
    return ray


def _is_client() -> bool:
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("ray.util.client").ray.is_connected()
    return False


def connected(*, may_connect: bool) -> ModuleType | None:
    """Return Ray's package if this program is connected, or may connect to a cluster that answers; else None."""
    if importlib.util.find_spec("ray") is None:
        return None
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        if not may_connect:
            return None
        try:
            address = local_address()
        except ConnectionError:
            return None
        # Ray would wait long for a cluster that has ended, and starts a new one for the address "local".
        if not re.fullmatch(r"[^/]+:\d+", address) or not reaches(f"tcp://{address}", _DIAL_TIME):
            return None
    return connect("")


def address_here(ray: ModuleType) -> str:
    """Return the address of the cluster that this process is connected to; "" if Ray does not report it."""
    with contextlib.suppress(Exception):
        return ray.get_runtime_context().gcs_address or ""
    return ""


def local_address() -> str:
    """Return the address of the cluster that ``RAY_ADDRESS`` names, or that this machine belongs to.

    Ray itself would accept a cluster that any user has started here, and therefore untrusted objects. Only a cluster of
    this user or of root is trusted.

    Raises:
        ConnectionError: there is no such cluster.
    """
    if named := os.environ.get("RAY_ADDRESS", ""):
        return named
    how = "name one by address= or RAY_ADDRESS"
    try:
        fd = os.open(_CURRENT, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        raise ConnectionError(f"there is no Ray cluster on this machine: start it with 'ray start', or {how}") from None
    with open(fd) as file:
        owner = os.fstat(fd).st_uid
        if owner not in (0, os.geteuid()):
            raise ConnectionError(f"the Ray cluster of this machine is another user's ({_CURRENT} is): {how}")
        return file.read(200).strip()


def nodes(ray: ModuleType) -> dict[str, RayNode]:
    """Return all nodes by their ids, including dead ones."""
    found: dict[str, RayNode] = {}
    for row in ray.nodes():
        # Ray names a node by its address unless --node-name is set.
        given = row.get("NodeName", "")
        name = given if given and given != row["NodeManagerAddress"] else row["NodeManagerHostname"]
        found[row["NodeID"]] = RayNode(
            row["NodeID"], name, row["Alive"], row.get("DeathReasonMessage") or "", row["Resources"]
        )
    return found


def groups(ray: ModuleType) -> dict[str, RayGroup]:
    """Return all placement groups by their ids."""
    found: dict[str, RayGroup] = {}
    for number, row in ray.util.placement_group_table().items():
        at = row["bundles_to_node_id"]
        places = tuple(at[bundle] for bundle in sorted(at))
        found[number] = RayGroup(
            number, row["name"], row["state"], row["stats"]["scheduling_state"], row["bundles"][0], places
        )
    return found


def handle(ray: ModuleType, group: str) -> Any:
    """Return Ray's object for a placement group."""
    # In ``ray.util``, this name is the function.
    module = importlib.import_module("ray.util.placement_group")
    return module.PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))


def make_group(
    ray: ModuleType, name: str, bundle: Mapping[str, float], count: int, strategy: str, apart_from: Collection[str]
) -> str:
    """Request a placement group that outlives this program. Return its id.

    Args:
        apart_from: nodes that must not have any of its bundles.
    """
    more: dict[str, object] = {}
    if apart_from:
        more["bundle_label_selector"] = [{"ray.io/node-id": f"!in({','.join(sorted(apart_from))})"}] * count
    made = ray.util.placement_group([dict(bundle)] * count, strategy, name, lifetime="detached", **more)
    return made.id.hex()


def could_fit(nodes: Sequence[RayNode], bundle: Mapping[str, float], count: int, strategy: str) -> bool:
    """Return whether these nodes could hold this many bundles if they were empty."""
    fits = [node.fits(bundle) for node in nodes if node.alive]
    if strategy == "STRICT_SPREAD":
        return sum(fit > 0 for fit in fits) >= count
    if strategy == "STRICT_PACK":
        return max(fits, default=0) >= count
    return sum(fits) >= count


def amounts(resources: Mapping[str, float]) -> str:
    """Format resources: ``CPU 4, GPU 2``."""
    return ", ".join(f"{name} {_amount(name, resources[name])}" for name in _ordered(resources))


def lacking(ray: ModuleType, bundle: Mapping[str, float]) -> str:
    """Describe the free and total amounts in the cluster of the resources of a bundle."""
    has, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{name} {_amount(name, free.get(name, 0.0))} of {_amount(name, has.get(name, 0.0))}"
        for name in _ordered(bundle)
    )


def offered(nodes: Sequence[RayNode], bundle: Mapping[str, float]) -> str:
    """Describe the living nodes, equal ones merged: ``2 nodes with CPU 4, GPU 2``. Memory only if requested."""
    counts: dict[str, int] = {}
    for node in nodes:
        if node.alive:
            own = {
                name: value
                for name, value in node.resources.items()
                if value
                and not name.startswith(_INTERNAL)
                and "_group_" not in name
                and (name != "memory" or name in bundle)
            }
            shown = amounts(own) or "nothing"
            counts[shown] = counts.get(shown, 0) + 1
    most = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return "; ".join(f"{count} node{'s' * (count != 1)} with {shown}" for shown, count in most) or "no node"


def _ordered(resources: Mapping[str, float]) -> list[str]:
    return [*(name for name in _ORDER if name in resources), *sorted(name for name in resources if name not in _ORDER)]


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.3g} GiB" if name == "memory" else f"{value:g}"


#: The keys under which the first version records its activity, and why it has ended.
_STATUS, _ERROR = "__autoscaling_status", "__autoscaling_error"


def autoscaler_says(address: str, group: str) -> str:
    """Describe what the autoscaler does while a placement group waits, for both of Ray's versions.

    This lists nodes that it launches or failed to launch, and whether it can add nodes for the group at all. "" if
    there is no autoscaler, it does nothing, or it does not answer: the text is only displayed.

    Args:
        address: the address of the cluster to which this process is connected.
        group: the id of the placement group.
    """
    parts: list[str] = []
    for ask in (_second_version, _first_version):
        try:
            parts += ask(address, group)
        except Exception:  # an error in Ray's internals, of any version
            continue
    return "; ".join(f"the autoscaler {part}" for part in parts)


def _second_version(address: str, group: str) -> list[str]:
    raylet = importlib.import_module("ray._raylet")
    models = importlib.import_module("ray.core.generated.autoscaler_pb2")
    said = raylet.GcsClient(address).get_cluster_status(timeout_s=_AUTOSCALER_TIMEOUT)
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
    # Ray reports the reason only in its logs.
    if any(each.details.startswith(group) for each in state.infeasible_gang_resource_requests):
        parts.append("has no available node types that can fulfill it")
    return parts


def _first_version(address: str, group: str) -> list[str]:
    store = importlib.import_module("ray.experimental.internal_kv")
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
