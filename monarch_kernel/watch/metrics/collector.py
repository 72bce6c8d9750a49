"""Collect metrics of this controller while they are on; export as a table, Prometheus text or to OpenTelemetry."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from monarch_kernel import introspection
from monarch_kernel.actor import get_meter
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.watch.metrics.counters import Counters
from monarch_kernel.watch.metrics.families import HistogramSample, MetricFamily, families
from monarch_kernel.watch.model import RankState
from monarch_kernel.watch.watcher import Watch

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

        def observe(name: str) -> Callable[[Any], Iterable[Any]]:
            def callback(_options: Any) -> Iterable[Any]:
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
