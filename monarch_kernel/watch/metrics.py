"""Metrics of this controller's meshes, as a table, for Prometheus, and for OpenTelemetry.

``families`` computes them from a snapshot, ``counters`` accumulates monotonic values while metrics are on,
``collector`` combines both, and ``endpoint`` serves them.
"""

from __future__ import annotations

import hmac
import importlib.util
import logging
import os
import secrets
import socket
import sys
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from monarch_kernel import environment, introspection
from monarch_kernel.actor import get_meter
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.private_files import read_own_file, write_own_file
from monarch_kernel.watch.model import Delta, RankState, RankView, Snapshot
from monarch_kernel.watch.watcher import Watch

# Monotonic counters: counts of ranks that survive replaced ranks, failures, heals, and latencies of calls.

#: The upper bounds of the latency buckets (seconds).
BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
#: The number of endpoints with a separate histogram; the others share one.
MOST_ENDPOINTS = 200
#: The name of the shared histogram.
OTHERS = "other"

_FIELDS = {"calls": "calls", "call_failures": "failures", "sent_bytes": "sent", "received_bytes": "received"}


class Counters:
    """Counts since construction. ``note`` is for one thread; ``observe`` and ``latencies`` are thread-safe.

    Attributes:
        sums: by counter name, then by the names of mesh and host.
        events: failures by the name of the mesh and their kind.
        heals: healed ranks by the name of the mesh.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _FIELDS}
        self.events: Counter[tuple[str, ...]] = Counter()
        self.heals: Counter[str] = Counter()
        self._seen: dict[tuple[str, int], RankView] = {}
        self._names: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._latencies: dict[str, tuple[list[int], list[float]]] = {}

    # -- what a watch sees --------------------------------------------------------------------------

    def note(self, delta: Delta) -> None:
        """Count changes."""
        self._names.update((key, mesh.name) for key, mesh in delta.meshes.items())
        self._hosts.update((key, host.name) for key, host in delta.hosts.items())
        for (key, rank), view in delta.ranks.items():
            before = self._seen.get((key, rank))
            self._seen[key, rank] = view
            self._rank(self._names.get(key, key), before, view)
        for failure in delta.failures:
            self.events[self._names.get(failure.mesh, failure.mesh), failure.kind] += 1
        for key in delta.gone_meshes:
            for place in [place for place in self._seen if place[0] == key]:
                del self._seen[place]
            self._names.pop(key, None)

    def _rank(self, mesh: str, before: RankView | None, view: RankView) -> None:
        at = (mesh, self._hosts.get(view.host, view.host))
        same = before is not None and before.proc == view.proc
        for name, attribute in _FIELDS.items():
            now = getattr(view, attribute)
            was = getattr(before, attribute) if same else 0
            self.sums[name][at] += now - was if now >= was else now  # the counts of an actor vanish with it
        if before is not None and not same and before.state in (RankState.DEAD, RankState.HEALING):
            self.heals[mesh] += 1

    # -- calls --------------------------------------------------------------------------------------

    def observe(self, label: str, seconds: float) -> None:
        """Count a call of this controller."""
        with self._lock:
            found = self._latencies.get(label)
            if found is None:
                if len(self._latencies) >= MOST_ENDPOINTS:
                    label = OTHERS
                found = self._latencies.setdefault(label, ([0] * (len(BOUNDS) + 1), [0.0]))
            found[0][bisect_left(BOUNDS, seconds)] += 1
            found[1][0] += seconds

    def latencies(self) -> list[tuple[str, tuple[list[int], float]]]:
        """Return for each endpoint how many calls fell into each bucket, and the sum of their times."""
        with self._lock:
            return [(label, (list(counts), total[0])) for label, (counts, total) in self._latencies.items()]


# Metrics as plain data: families of samples with labels, computed from a snapshot. Pure.

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


# Collect metrics of this controller while they are on; export as a table, Prometheus text or to OpenTelemetry.

#: The update interval of metrics (seconds).
PERIOD = 1.0
#: The time for ranks to report (seconds).
REPORTS = 2.0
_SILENT = (RankState.DEAD, RankState.ENDED, RankState.UNRESPONSIVE, RankState.STARTING)
#: The content type by which scrapers recognise the format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, repr=False)
class MetricsTable(AsTable):
    """Metrics at one time, as a table."""

    families: tuple[MetricFamily, ...]

    def table(self) -> TableView:
        """Return one row per sample. Zero counts of ranks by state are left out."""
        rows: list[tuple[str, str, str]] = []
        for family in self.families:
            for labels, value in sorted(family.samples.items()):
                if value or family.name != "monarch_ranks":
                    rows.append((family.name, _pairs(family.labels, labels), _number(value)))
            for labels, histogram in sorted(family.histograms.items()):
                rows.append((family.name, _pairs(family.labels, labels), _spread(family, histogram)))
        return TableView(("metric", "of", "value"), rows, right=(2,))


class Metrics:
    """The metrics of this controller, collected between ``start`` and ``stop``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._version = 0  # of the last counted change
        self._counters = Counters()
        self._exported = False

    @property
    def is_on(self) -> bool:
        """Whether metrics are on."""
        return self._watch is not None

    def start(self) -> None:
        """Start counting. No effect if it is already on.

        If OpenTelemetry's metrics are installed, instruments with the same names are created on ``get_meter()``.
        """
        self._begin()

    def _begin(self) -> Watch:
        with self._lock:
            watch = self._watch
            if watch is not None:
                return watch
            self._counters = Counters()
            self._version = 0
            watch = self._watch = Watch(PERIOD)
            watch.subscribe(lambda _delta: self._follow())
            introspection.observe_calls(self._counters.observe)
            if not self._exported and importlib.util.find_spec("opentelemetry") is not None:
                self._exported = True
                self._export(get_meter(), watch)
            return watch

    def _follow(self) -> None:
        """Count changes."""
        with self._lock:
            if self._watch is not None and not self._watch.closed:
                delta = self._watch.since(self._version)
                self._version = delta.version
                self._counters.note(delta)

    def stop(self) -> None:
        """Stop counting. No effect if it is off."""
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:  # without the lock, which its thread may wait for
            introspection.observe_calls(None)
            watch.close()

    def once(self) -> MetricsTable:
        """Return the current metrics. If they are off, turn them on until ranks have reported."""
        with self._lock:
            if self._watch is not None:
                return self.table()
            watch = self._begin()
        try:
            for _ in watch.changes(REPORTS):
                ranks = [rank for ranks in watch.snapshot().ranks.values() for rank in ranks]
                if all(rank.rss or rank.state in _SILENT for rank in ranks):
                    break
            return self.table()
        finally:
            self.stop()

    def families(self) -> tuple[MetricFamily, ...]:
        """Return all current metrics; empty if they are off."""
        with self._lock:
            if self._watch is None:
                return ()
            self._follow()
            return tuple(families(self._watch.snapshot(), self._counters))

    def table(self) -> MetricsTable:
        """Return all metrics as a table."""
        return MetricsTable(self.families())

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format (``CONTENT_TYPE``).

        Raises:
            ModuleNotFoundError: prometheus-client is not installed.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Prometheus(self.families()))  # pyright: ignore[reportArgumentType]  # a duck-typed collector
        return bytes(generate_latest(registry))

    # -- OpenTelemetry --------------------------------------------------------------------------------

    def _export(self, meter: Any, watch: Watch) -> None:
        """Create an instrument of ``get_meter()`` for each metric with a single number."""
        observation: Any = getattr(importlib.import_module("opentelemetry.metrics"), "Observation", None)

        def observe(name: str) -> Callable[[object], Iterable[object]]:
            def callback(_options: object) -> Iterable[object]:
                for family in self.families():
                    if family.name == name:
                        for labels, value in family.samples.items():
                            yield observation(value, dict(zip(family.labels, labels, strict=True)))

            return callback

        for family in families(watch.snapshot(), self._counters):
            name = family.name.replace("monarch_", "monarch.", 1)
            if family.kind == "gauge":
                meter.create_observable_gauge(name, [observe(family.name)], description=family.help)
            elif family.kind == "counter":
                meter.create_observable_counter(name, [observe(family.name)], description=family.help)


class _Prometheus:
    """A collector of prometheus-client."""

    def __init__(self, found: tuple[MetricFamily, ...]) -> None:
        self._families = found

    def collect(self) -> Iterable[Any]:
        """Return the families as objects of prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for family in self._families:
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
                for labels, sample in family.histograms.items():
                    histogram.add_metric(labels, _buckets(family, sample), sample.total)
                yield histogram
                continue
            kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
            made = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.samples.items():
                made.add_metric(labels, value)
            yield made


def _buckets(family: MetricFamily, sample: HistogramSample) -> list[tuple[str, float]]:
    """Return cumulative counts, as in Prometheus."""
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip([*map(str, family.bounds), "+Inf"], sample.counts, strict=True):
        seen += count
        buckets.append((bound, seen))
    return buckets


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3g}"


def _spread(family: MetricFamily, sample: HistogramSample) -> str:
    """Summarize a histogram in one line: count, mean, and the bound that 99 % of the values are below."""
    count = sum(sample.counts)
    left = 0.99 * count
    bound = "more"
    for upper, inside in zip(family.bounds, sample.counts, strict=False):
        left -= inside
        if left <= 0:
            bound = f"{upper:g} s"
            break
    mean = sample.total / count if count else 0.0
    return f"{count} calls, mean {mean * 1000:.3g} ms, 99 % within {bound}"


_metrics: Metrics | None = None


def metrics() -> Metrics:
    """Return the metrics of this controller. They count only after they are started."""
    global _metrics
    if _metrics is None:
        _metrics = Metrics()
    return _metrics


# Serve metrics to Prometheus over HTTP on the loopback interface, protected by a token.
#
# Any user of the machine can connect to a loopback port. Each request must therefore have the header ``Authorization:
# Bearer TOKEN``. The token is in a file that only this user can read. Prometheus' configuration refers to the file
# (``credentials_file``). The token stays the same when a kernel restarts.

log = logging.getLogger(__name__)

#: The time for a client to send the token (seconds).
PATIENCE = 5.0
#: The maximum number of clients that have not sent it; a new one replaces the oldest.
MOST = 8


def token_file() -> str:
    """Return the file with this user's token: ``~/.config/monarch_kernel/metrics.token``, created if it is missing.

    Raises:
        OSError: it cannot be created or read, or another user could have written it.
    """
    path = os.path.join(environment.user_folder("config"), "metrics.token")
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        write_own_file(path, secrets.token_urlsafe(32).encode())
    return path


class MetricsEndpoint:
    """Serves ``/metrics`` on loopback until it is closed.

    Args:
        text: returns the metrics.
        port: the port; 0: any free port.

    Attributes:
        port: the port it listens on.
        token_file: the file with its token.

    Raises:
        OSError: the port is in use, or the token cannot be read.
    """

    def __init__(self, text: Callable[[], bytes], port: int = 0) -> None:
        self.token_file = token_file()
        token = read_own_file(self.token_file).strip()
        if len(token) < 16:
            raise OSError(f"{self.token_file} holds no token: remove it, and another one is made")
        self._server = _Server(("127.0.0.1", port), text, token)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="monarch-metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        return f"http://127.0.0.1:{self.port}/metrics"

    @property
    def scrape_config(self) -> str:
        """The settings for Prometheus' configuration."""
        return (
            "scrape_configs:\n"
            "  - job_name: monarch\n"
            f'    static_configs: [{{targets: ["127.0.0.1:{self.port}"]}}]\n'
            f"    authorization: {{credentials_file: {self.token_file}}}"
        )

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], token: bytes) -> None:
        self.text = text
        self.expected = b"Bearer " + token
        self._strangers: dict[socket.socket, threading.Timer] = {}  # oldest first, with the timer that ends each
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: object) -> None:
        timer = threading.Timer(PATIENCE, self._send_away, [request])
        timer.daemon = True
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= MOST else None
            self._strangers[request] = timer
        if oldest is not None:
            self._send_away(oldest)
        timer.start()
        super().process_request(request, client_address)

    def _send_away(self, stranger: socket.socket) -> None:
        if self.forget(stranger):
            with suppress(OSError):
                stranger.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def forget(self, request: socket.socket) -> bool:
        """Remove a client that has sent the token or is gone. Return whether it was unauthenticated."""
        with self._lock:
            timer = self._strangers.pop(request, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def process_request_thread(self, request: Any, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.forget(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Report faults, but not clients that have disconnected or were disconnected."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics could not be served", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version, sys_version = "monarch", ""

    def do_GET(self) -> None:  # name required by http.server
        server: Any = self.server
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, server.expected):
            self._answer(401, b"a token is needed\n", {"WWW-Authenticate": "Bearer"})
            return
        server.forget(self.connection)
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"there is only /metrics\n", {})
        else:
            self._answer(200, server.text(), {"Content-Type": CONTENT_TYPE})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server uses
        """Do not log requests."""
