"""The tables of Monarch's telemetry, computed from a history and the current state. Pure.

Identifiers are numbers in these tables. Each is derived from the text identifier of the object, so tables can be
joined.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from monarch_kernel.watch.history.query import ColumnTable
from monarch_kernel.watch.model import RankState, RankView, Snapshot

# The state as a tree of nodes with the names of Monarch's admin server: root, hosts, procs, actors. Pure.

#: Ranks in these states are poisoned, in Monarch's terms: nothing can be spawned on them.
FAILED = (RankState.DEAD, RankState.UNRESPONSIVE)


@dataclass
class TopologyNode:
    """A node of the tree.

    Attributes:
        kind: "Root", "Host", "Proc" or "Actor".
        name: the display name.
        parent: the identity of the parent; "" for the root.
        properties: the properties of such a node in Monarch's server and tables.
        children: the identities of the children.
    """

    kind: str
    name: str
    parent: str
    properties: dict[str, Any]
    children: list[str] = field(default_factory=list[str])


def topology(snapshot: Snapshot, started_at: int, started_by: str) -> dict[str, TopologyNode]:
    """Return the nodes by their identities, parents before their children.

    Args:
        started_at: when the server was started (microseconds since 1970).
        started_by: the user who started it.
    """
    about = {"num_hosts": len(snapshot.hosts), "started_at": started_at, "started_by": started_by}
    found = {"root": TopologyNode("Root", "root", "", about)}

    def add(identity: str, node: TopologyNode) -> None:
        found[identity] = node
        found[node.parent].children.append(identity)

    for key, host in snapshot.hosts.items():
        add(f"host:{key}", TopologyNode("Host", host.name, "root", {"addr": host.name, "host_num_procs": 0}))
    for key, mesh in snapshot.meshes.items():
        for rank in snapshot.ranks.get(key, ()):
            above = f"host:{rank.host}" if f"host:{rank.host}" in found else "root"
            if above != "root":
                found[above].properties["host_num_procs"] += 1
            failed = rank.state in FAILED
            name = f"{mesh.name}[{rank.rank}]"
            proc = {
                "proc_name": name,
                "num_actors": len(rank.actors),
                "is_poisoned": int(failed),
                "failed_actor_count": len(rank.actors) if failed else 0,
            }
            add(proc_id(rank), TopologyNode("Proc", name, above, proc))
            for actor in rank.actors:
                status = "failed" if failed else "processing" if actor.endpoint else "idle"
                about = {
                    "actor_status": status,
                    "actor_type": actor.cls,
                    "messages_processed": actor.calls,
                    "last_message_handler": actor.endpoint,
                    "queue_depth": actor.waiting,
                    "is_system": 0,
                    "since": round(actor.since * 1e6),
                }
                add(f"{actor.name}.{proc_id(rank)}", TopologyNode("Actor", actor.name, proc_id(rank), about))
    return found


def proc_id(rank: RankView) -> str:
    """Return the identity of a rank's node."""
    return rank.proc or f"{rank.mesh}.{rank.rank}"


def as_text(nodes: dict[str, TopologyNode], url: str) -> str:
    """Return the tree as text for a terminal, each node with its address."""
    from urllib.parse import quote

    lines: list[str] = []

    def show(identity: str, indent: str, last: bool) -> None:
        node = nodes[identity]
        lines.append(f"{indent}{'└── ' if last else '├── '}{node.name}  ->  {url}/v1/{quote(identity, safe='')}")
        for child in node.children:
            show(child, indent + ("    " if last else "│   "), child == node.children[-1])

    for child in nodes["root"].children:
        show(child, "", child == nodes["root"].children[-1])
    return "\n".join([f"root  ->  {url}/v1/root", *lines]) + "\n"


Row = tuple[Any, ...]
_INTEGERS, _REALS = "value_i64 value_u64 sum_i64 sum_u64", "value_f64 sum_f64"
_NUMBERS = set(
    "id timestamp_us mesh_id rank parent_mesh_id actor_id start_timestamp_us is_monotonic snapshot_ts as_of "
    "child_sort_key is_system is_stopped num_hosts started_at host_num_procs num_actors is_poisoned failed_actor_count "
    "messages_processed queue_depth active_count complete truncated oldest_since failure_occurred_at "
    f"failure_is_propagated {_INTEGERS}".split()
)
_METRIC = "name timestamp_us start_timestamp_us scope_name unit "
_ABOUT = "attributes_json resource_attributes_json "

#: The columns of each table.
COLUMNS: dict[str, list[str]] = {
    name: columns.split()
    for name, columns in {
        "actors": "id timestamp_us mesh_id rank full_name display_name",
        "actor_status_events": "id timestamp_us actor_id new_status reason",
        "meshes": "id timestamp_us class given_name full_name shape_json parent_mesh_id parent_view_json",
        "metric_gauges": f"{_METRIC}{_ABOUT}value_f64 value_i64 value_u64",
        "metric_sums": f"{_METRIC}temporality is_monotonic {_ABOUT}sum_f64 sum_i64 sum_u64",
        "snapshots": "snapshot_id snapshot_ts",
        "nodes": "snapshot_id node_id node_kind as_of",
        "children": "snapshot_id parent_id child_id child_sort_key is_system is_stopped",
        "root_nodes": "snapshot_id node_id num_hosts started_at started_by",
        "host_nodes": "snapshot_id node_id addr host_num_procs",
        "proc_nodes": "snapshot_id node_id proc_name num_actors is_poisoned failed_actor_count",
        "actor_nodes": (
            "snapshot_id node_id actor_status actor_type messages_processed last_message_handler queue_depth is_system"
        ),
        "actor_executions": "snapshot_id node_id active_count complete truncated",
        "active_handlers": "snapshot_id node_id name active_count oldest_since",
        "actor_failures": (
            "snapshot_id node_id failure_error_message failure_root_cause_actor failure_root_cause_name "
            "failure_occurred_at failure_is_propagated"
        ),
    }.items()
}
#: Monarch's tables that are missing here, with the reason.
ELSEWHERE = "single messages and spans are in the trace of job.profile()"

_STATUS = {"idle": "Idle", "processing": "Processing"}
_GAUGES, _SUMS = ("memory", "cpu", "waiting"), ("calls", "failures", "sent", "received")


def kind_of(column: str) -> str:
    """Return the kind of a column: "integer", "real" or "text"."""
    return "integer" if column in _NUMBERS else "real" if column in _REALS.split() else "text"


def named(sql: str) -> list[str]:
    """Return the tables that a query names."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in COLUMNS if name in words]


def tables_of(
    names: list[str],
    history: Mapping[str, ColumnTable],
    snapshot: Snapshot,
    nodes: Mapping[str, TopologyNode],
    since: int,
) -> dict[str, ColumnTable]:
    """Return some of the tables.

    Args:
        names: the names of these tables.
        history: all tables of a history.
        snapshot, nodes: the current state, and its topology.
        since: omit older rows of events, metrics and failures (microseconds since 1970).
    """
    made: dict[str, ColumnTable] = {}
    for name in names:
        columns = COLUMNS[name]
        table = made[name] = ColumnTable({column: kind_of(column) for column in columns})
        for row in _ROWS[name](history, snapshot, nodes) if name in _ROWS else _of_snapshot(name, snapshot, nodes):
            at = "timestamp_us" if "timestamp_us" in columns else "failure_occurred_at"
            timed = name in ("actor_status_events", "metric_gauges", "metric_sums", "actor_failures")
            if not timed or row[columns.index(at)] >= since:
                table.append(*row)
    return made


@lru_cache(maxsize=1 << 16)
def number(text: str) -> int:
    """Return the numeric identifier of an object in these tables."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _actor_mesh(mesh: str, name: str) -> int:
    return number(f"{mesh}/{name}")


def _shapes(history: Mapping[str, ColumnTable]) -> dict[str, tuple[str, dict[str, int]]]:
    """Return name and shape of each proc mesh by its key."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    for key, _at, name, shape, _ranks, event in history["meshes"]:
        if event == "seen":
            sizes = (part.split("=") for part in shape.split(", ") if part)
            found[key] = (name, {label: int(size) for label, size in sizes})
    return found


def _place(rank: int, sizes: Mapping[str, int]) -> str:
    """Format a rank like Monarch: {'hosts': 0/1, 'gpus': 3/4}."""
    parts: list[str] = []
    for label, size in reversed([*sizes.items()]):
        rank, at = divmod(rank, size)
        parts.insert(0, f"'{label}': {at}/{size}")
    return f"{{{', '.join(parts)}}}" if parts else ""


def _actors(history: Mapping[str, ColumnTable], *_: object) -> Iterator[Row]:
    shapes = _shapes(history)
    for key, at, mesh, rank, name, cls in history["actors"]:
        sizes = shapes[mesh][1] if mesh in shapes else {}
        shown = f"<root>.<{cls} {name}{_place(rank, sizes)}>"
        yield number(key), at, _actor_mesh(mesh, name), rank, f"{name}.{key.rpartition('/')[0]}", shown


def _status_events(history: Mapping[str, ColumnTable], *_: object) -> Iterator[Row]:
    events: list[tuple[int, str, str, str]] = []
    of_rank: dict[tuple[str, int], list[tuple[int, str]]] = {}
    of_mesh: dict[str, list[tuple[int, str]]] = {}
    for key, at, mesh, rank, _name, _cls in history["actors"]:
        events += [(at, key, "Created", ""), (at, key, "Initializing", "")]
        of_rank.setdefault((mesh, rank), []).append((at, key))
        of_mesh.setdefault(mesh, []).append((at, key))
    for at, key, _mesh, _rank, status, reason in history["actor_status_events"]:
        events.append((at, key, _STATUS[status], reason))
    for at, mesh, rank, state, cause in history["rank_status_events"]:
        if state in FAILED:
            events += [(at, key, "Failed", cause) for made, key in of_rank.get((mesh, rank), ()) if made <= at]
    for mesh, at, _name, _shape, _ranks, event in history["meshes"]:
        if event == "gone":
            events += [(at, key, "Stopped", "") for made, key in of_mesh.get(mesh, ()) if made <= at]
    for place, (at, key, status, reason) in enumerate(sorted(events, key=lambda event: event[0])):
        yield number(f"{key} {at} {status} {place}"), at, number(key), status, reason or None


def _meshes(history: Mapping[str, ColumnTable], *_: object) -> Iterator[Row]:
    shapes = _shapes(history)
    text = {
        key: json.dumps({"inner": {"labels": list(sizes), "sizes": list(sizes.values())}})
        for key, (_name, sizes) in shapes.items()
    }
    first: set[int] = set()
    for key, at, name, _shape, _ranks, event in history["meshes"]:
        if event == "seen" and number(key) not in first:
            first.add(number(key))
            yield number(key), at, "Proc", name, name, text[key], 0, None
    for _key, at, mesh, _rank, name, cls in history["actors"]:
        if (identity := _actor_mesh(mesh, name)) not in first:
            first.add(identity)
            above = shapes[mesh][0] if mesh in shapes else mesh
            yield identity, at, cls, name, f"{above}/{name}", text.get(mesh, "{}"), number(mesh), None


def _metrics(fields: tuple[str, ...], middle: Row) -> Callable[..., Iterator[Row]]:
    def rows(history: Mapping[str, ColumnTable], *_: object) -> Iterator[Row]:
        samples = history["rank_samples"]
        columns = list(samples.columns)
        names = {key: name for key, (name, _sizes) in _shapes(history).items()}
        first: dict[tuple[str, int], int] = {}
        for sample in samples:
            row = dict(zip(columns, sample, strict=True))
            start = first.setdefault((row["mesh_id"], row["rank"]), row["timestamp_us"])
            about = json.dumps({"mesh": names.get(row["mesh_id"], row["mesh_id"]), "rank": row["rank"]})
            for column in fields:
                value = row[column]
                head = (f"rank.{column}", row["timestamp_us"], start, "monarch_kernel", _UNITS.get(column, ""))
                yield (*head, *middle, about, "{}", float(value), int(value), max(0, int(value)))

    return rows


_UNITS = {"memory": "By", "cpu": "%", "sent": "By", "received": "By"}


def _of_snapshot(name: str, snapshot: Snapshot, nodes: Mapping[str, TopologyNode]) -> Iterator[Row]:
    """Yield the rows of a table of snapshots: a single snapshot, of the current state."""
    at = round(snapshot.time * 1e6)
    this = f"{snapshot.version:016x}"
    if name == "snapshots":
        yield this, at
        return
    if name == "actor_failures":
        for failure in snapshot.failures:
            views = snapshot.ranks.get(failure.mesh, ())
            for rank in failure.ranks if failure.kind in ("death", "unresponsive") else ():
                node = proc_id(views[rank]) if rank < len(views) else f"{failure.mesh}.{rank}"
                yield this, node, failure.text, node, None, round(failure.time * 1e6), 0
        return
    for identity, node in nodes.items():
        about = node.properties
        if name == "nodes":
            yield this, identity, node.kind.lower(), at
        elif name == "children":
            for place, child in enumerate(node.children):
                yield this, identity, child, place, 0, 0
        elif name == "actor_executions" and node.kind == "Actor":
            yield this, identity, int(bool(about["last_message_handler"])), 1, 0
        elif name == "active_handlers" and node.kind == "Actor" and about["last_message_handler"]:
            yield this, identity, about["last_message_handler"], 1, about["since"]
        elif name == f"{node.kind.lower()}_nodes":
            yield (this, identity, *(about[column] if about[column] != "" else None for column in COLUMNS[name][2:]))


_ROWS: dict[str, Callable[..., Iterator[Row]]] = {
    "actors": _actors,
    "actor_status_events": _status_events,
    "meshes": _meshes,
    "metric_gauges": _metrics(_GAUGES, ()),
    "metric_sums": _metrics(_SUMS, ("cumulative", 1)),
}
