"""Spans of OpenTelemetry over several processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import patience

SCRIPT = """
from monarch_kernel.actor import Actor, concurrent_endpoint, endpoint, span, this_host
from monarch_kernel.runtime.actor.tracing import call_hooks

def setup():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter

def plain(each):
    parent = each.parent and each.parent.span_id
    return each.name, each.context.trace_id, each.context.span_id, parent, each.kind.name, each.status.status_code.name

class Inner(Actor):
    def __init__(self): self.exporter = setup()
    @endpoint
    def work(self):
        with span("inside"):
            return 1
    @endpoint
    def fail(self): raise ValueError("on purpose")
    @endpoint
    def spans(self): return [plain(each) for each in self.exporter.get_finished_spans()]

class Outer(Inner):
    @concurrent_endpoint
    async def forward(self, inner): return await inner.work.call_one()
    @concurrent_endpoint
    async def work(self): return 0
    @concurrent_endpoint
    async def fail(self): return 0
    @concurrent_endpoint
    async def spans(self): return [plain(each) for each in self.exporter.get_finished_spans()]

inner = this_host().spawn_procs().spawn("inner", Inner)
outer = this_host().spawn_procs().spawn("outer", Outer)
outer.spans.call_one().get(60), inner.spans.call_one().get(60)
assert call_hooks.sending is None  # this process has not imported OpenTelemetry
exporter = setup()
assert call_hooks.sending is not None
inner.work.call_one().get(60)  # outside any span
with span("root"):
    outer.forward.call_one(inner).get(60)
    try:
        inner.fail.call_one().get(60)
    except Exception:
        pass
(root,) = map(plain, exporter.get_finished_spans())
(forward,) = outer.spans.call_one().get(60)
alone, inside, work, failed = inner.spans.call_one().get(60)
assert alone[0] == "inside" and alone[1] != root[1] and alone[3] is None, alone
assert root[0] == "root" and forward[0] == "outer.forward" and forward[3] == root[2] and forward[4] == "SERVER"
assert work[0] == "inner.work" and work[3] == forward[2] and inside[0] == "inside" and inside[3] == work[2]
assert failed[0] == "inner.fail" and failed[3] == root[2] and failed[5] == "ERROR"
assert {each[1] for each in (root, forward, work, inside, failed)} == {root[1]}
print("one trace")
"""


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs opentelemetry-sdk")
def test_one_trace_spans_the_controller_and_actors_that_call_each_other() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=patience(120))
    assert run.stdout == "one trace\n", run.stderr


METRICS = """
import time
from opentelemetry import metrics as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
otel.set_meter_provider(MeterProvider([reader]))

from monarch_kernel.actor import this_host
from monarch_kernel.watch import metrics
from tests.watch.actors import Worker

worker = this_host().spawn_procs(name="m", per_host={"gpus": 2}).spawn("worker", Worker)
worker.work.call().get(60)
metrics().start()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points for metric in scope.metrics}
    if any(point.value for point in found.get("monarch.calls", ())):
        break
(point,) = found["monarch.calls"]
idle = [each.value for each in found["monarch.ranks"] if each.attributes["state"] == "idle"]
print(scope.scope.name, point.value, point.attributes["mesh"], idle)
"""


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is None, reason="needs opentelemetry-sdk")
def test_metrics_are_instruments_of_the_meter() -> None:
    run = subprocess.run(
        [sys.executable, "-c", METRICS],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=Path(__file__).resolve().parents[2],
    )
    assert run.stdout == "monarch 2.0 m [2.0]\n", run.stderr
