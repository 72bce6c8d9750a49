"""The tables of a history, and the views of them."""

from __future__ import annotations

#: The columns of each table, with their kinds. Times are microseconds since 1970. ``mesh_id`` is the key of a mesh.
TABLES: dict[str, dict[str, str]] = {
    "meshes": {
        "id": "text",
        "timestamp_us": "integer",
        "name": "text",
        "shape": "text",
        "ranks": "integer",
        "event": "text",  # "seen" or "gone"
    },
    "actors": {
        "id": "text",
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "name": "text",
        "class": "text",
    },
    "actor_status_events": {
        "timestamp_us": "integer",
        "actor_id": "text",
        "mesh_id": "text",
        "rank": "integer",
        "new_status": "text",  # "idle" or "processing"
        "reason": "text",  # the endpoint
    },
    "rank_status_events": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "new_status": "text",
        "reason": "text",
    },
    "actor_failures": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "ranks": "text",
        "kind": "text",
        "reason": "text",
    },
    "rank_samples": {
        "timestamp_us": "integer",
        "mesh_id": "text",
        "rank": "integer",
        "memory": "integer",
        "cpu": "real",
        "waiting": "integer",
        "calls": "integer",
        "failures": "integer",
        "sent": "integer",
        "received": "integer",
    },
    "host_samples": {
        "timestamp_us": "integer",
        "host": "text",
        "cpu": "real",
        "memory_used": "integer",
        "memory_total": "integer",
    },
}

_GAUGES = {"rank.memory": "memory", "rank.cpu": "cpu", "rank.waiting": "waiting"}
_SUMS = {"rank.calls": "calls", "rank.failures": "failures", "rank.sent": "sent", "rank.received": "received"}


def _long(metrics: dict[str, str]) -> str:
    """Return a view with one row for each metric of each sample."""
    return " UNION ALL ".join(
        f"SELECT timestamp_us, '{name}' AS name, mesh_id, rank, CAST({column} AS DOUBLE) AS value FROM rank_samples"
        for name, column in metrics.items()
    )


#: Views, with the table that each needs.
VIEWS: dict[str, tuple[str, str]] = {
    "metric_gauges": ("rank_samples", _long(_GAUGES)),
    "metric_sums": ("rank_samples", _long(_SUMS)),
}
