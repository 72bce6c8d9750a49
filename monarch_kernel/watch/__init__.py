"""A live model of hosts, ranks and actors with their states, as snapshots and changes.

The widget, the panel, the metrics and the terminal are views of it. Programs can use it, too: docs/watching.md.
"""

from monarch_kernel.watch.board import Board, advanced
from monarch_kernel.watch.history.query import HistoryQueryError, QueryResult
from monarch_kernel.watch.history.recorder import History, history
from monarch_kernel.watch.metrics import Metrics, MetricsEndpoint, MetricsTable, metrics
from monarch_kernel.watch.model import (
    ActorView,
    Delta,
    FailureView,
    GpuView,
    HostView,
    MeshView,
    RankState,
    RankView,
    Snapshot,
    StopView,
)
from monarch_kernel.watch.status_table import show_live
from monarch_kernel.watch.tracing import Trace, TraceSummary, current_trace, trace
from monarch_kernel.watch.watcher import Watch, provide, watch

__all__ = [
    "ActorView",
    "Board",
    "Delta",
    "FailureView",
    "GpuView",
    "History",
    "HistoryQueryError",
    "HostView",
    "MeshView",
    "Metrics",
    "MetricsEndpoint",
    "MetricsTable",
    "QueryResult",
    "RankState",
    "RankView",
    "Snapshot",
    "StopView",
    "Trace",
    "TraceSummary",
    "Watch",
    "advanced",
    "current_trace",
    "history",
    "metrics",
    "provide",
    "show_live",
    "trace",
    "watch",
]
