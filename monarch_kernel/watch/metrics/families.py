"""Metrics as plain data: families of samples with labels, computed from a snapshot. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from monarch_kernel.watch.metrics.counters import BOUNDS, Counters
from monarch_kernel.watch.model import RankState, Snapshot

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """A histogram.

    Attributes:
        counts: the number of values in each bucket, and above the last bound; not cumulative.
        total: the sum of all values.
    """

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric.

    Attributes:
        name: its name without the suffix "_total" that counters get in Prometheus' text.
        kind: "gauge", "counter" or "histogram".
        help: its description.
        labels: the names of the labels.
        samples: the values, by the values of the labels.
        histograms: the same for a histogram.
        bounds: the upper bounds of its buckets.
    """

    name: str
    kind: str
    help: str
    labels: Labels
    samples: dict[Labels, float] = field(default_factory=dict[Labels, float])
    histograms: dict[Labels, HistogramSample] = field(default_factory=dict[Labels, HistogramSample])
    bounds: Sequence[float] = ()


def families(snapshot: Snapshot, counters: Counters) -> list[MetricFamily]:
    """Return all metrics, in display order."""
    where = ("mesh", "host")
    found = [
        MetricFamily("monarch_ranks", "gauge", "Ranks by state.", (*where, "state")),
        MetricFamily("monarch_ranks_older", "gauge", "Ranks that run modules older than their host's tree.", where),
        MetricFamily("monarch_mailbox_messages", "gauge", "Messages that wait in mailboxes.", where),
        MetricFamily("monarch_mailbox_messages_max", "gauge", "Messages that wait at the rank with the most.", where),
        MetricFamily("monarch_rank_memory_bytes", "gauge", "Resident memory of ranks.", where),
        MetricFamily("monarch_rank_cpu_ratio", "gauge", "Processors that ranks use.", where),
        MetricFamily("monarch_hung", "gauge", "1 if the mesh hangs.", ("mesh",)),
        MetricFamily(
            "monarch_host_cpu_ratio", "gauge", "How busy the processors of a host are, from 0 to 1.", ("host",)
        ),
        MetricFamily("monarch_host_memory_bytes", "gauge", "Memory of a host.", ("host", "kind")),
        MetricFamily("monarch_gpu_use_ratio", "gauge", "How busy a GPU is, from 0 to 1.", ("host", "gpu")),
        MetricFamily("monarch_gpu_memory_bytes", "gauge", "Memory of a GPU.", ("host", "gpu", "kind")),
    ]
    named = {family.name.removeprefix("monarch_"): defaultdict[Labels, float](float) for family in found}
    _of_ranks(snapshot, named)
    _of_hosts(snapshot, named)
    for mesh in snapshot.meshes.values():
        named["hung"][(mesh.name,)] = float(bool(mesh.hang))
    for family in found:
        family.samples.update(named[family.name.removeprefix("monarch_")])
    return [*found, *_counted(counters, where)]


def _of_ranks(snapshot: Snapshot, named: dict[str, defaultdict[Labels, float]]) -> None:
    hosts = {key: host.name for key, host in snapshot.hosts.items()}
    for key, mesh in snapshot.meshes.items():
        for view in snapshot.ranks.get(key, ()):
            at = (mesh.name, hosts.get(view.host, view.host))
            for state in RankState:
                named["ranks"][(*at, state.value)] += view.state is state
            named["ranks_older"][at] += view.older
            named["mailbox_messages"][at] += view.waiting
            named["mailbox_messages_max"][at] = max(named["mailbox_messages_max"][at], view.waiting)
            named["rank_memory_bytes"][at] += view.rss
            named["rank_cpu_ratio"][at] += view.cpu / 100


def _of_hosts(snapshot: Snapshot, named: dict[str, defaultdict[Labels, float]]) -> None:
    for host in snapshot.hosts.values():
        if host.memory_total:
            named["host_cpu_ratio"][(host.name,)] = host.cpu / 100
            named["host_memory_bytes"][(host.name, "used")] = host.memory_used
            named["host_memory_bytes"][(host.name, "total")] = host.memory_total
        for gpu in host.gpus:
            at = (host.name, str(gpu.index))
            named["gpu_use_ratio"][at] = gpu.use / 100
            named["gpu_memory_bytes"][(*at, "used")] = gpu.memory_used
            named["gpu_memory_bytes"][(*at, "total")] = gpu.memory_total


def _counted(counters: Counters, where: Labels) -> Iterable[MetricFamily]:
    for name, help_text in (
        ("calls", "Endpoints that ranks have run."),
        ("call_failures", "Endpoints that raised."),
        ("sent_bytes", "Bytes of messages that ranks have sent."),
        ("received_bytes", "Bytes of messages that ranks have received."),
    ):
        yield MetricFamily(
            f"monarch_{name}",
            "counter",
            help_text,
            where,
            {at: float(count) for at, count in counters.sums[name].items()},
        )
    events = ("mesh", "kind")
    text = "Deaths, errors, hangs and ranks that stopped responding, since metrics are on."
    yield MetricFamily(
        "monarch_failures", "counter", text, events, {at: float(count) for at, count in counters.events.items()}
    )
    heals: dict[Labels, float] = {(mesh,): float(count) for mesh, count in counters.heals.items()}
    yield MetricFamily("monarch_heals", "counter", "Ranks that were healed, since metrics are on.", ("mesh",), heals)
    histograms: dict[Labels, HistogramSample] = {
        (label,): HistogramSample(tuple(counts), total) for label, (counts, total) in counters.latencies()
    }
    text = "How long calls of this controller take, to the last answer, since metrics are on."
    yield MetricFamily("monarch_call_seconds", "histogram", text, ("endpoint",), {}, histograms, BOUNDS)
