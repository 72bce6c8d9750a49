"""The state as a tree of nodes with the names of Monarch's admin server: root, hosts, procs, actors. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.watch.model import RankState, RankView, Snapshot

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
