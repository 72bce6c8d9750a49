"""Names of Monarch's that this package has for its programs: deferred functions, telemetry, identifiers, ``attach``."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib.util
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ProcId,
    Uid,
    attach,
    attach_to_workers,
    current_actor_name,
    endpoint,
    get_meter,
    returns_future,
    span,
    this_host,
    traced,
)
from tests.actor.actors import PATIENCE
from tests.waiting import patience


@returns_future
async def forever(begun: list[Any]) -> None:
    """Waits until it is cancelled."""
    begun.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        begun.append("cancelled")


@returns_future
async def where() -> tuple[str, str]:
    """On whose behalf, and on which thread."""
    await asyncio.sleep(0)
    return current_actor_name(), threading.current_thread().name


class Defers(Actor):
    @endpoint
    def wait(self) -> Any:
        return current_actor_name(), where().get()

    @endpoint
    def convert(self) -> str:
        return where().then(lambda found: found[0]).get()


class Awaits(Actor):
    @endpoint
    async def wait(self) -> Any:
        future = where()
        assert await future is await future
        return current_actor_name(), future.get()


@pytest.mark.parametrize("kind", [Defers, Awaits])
def test_a_deferred_function_runs_for_its_actor(kind: Any) -> None:
    world = this_host().spawn_procs()
    name, (found, _thread) = world.spawn("a", kind).wait.call_one().get(PATIENCE)
    assert found == name
    if kind is Defers:
        assert world.spawn("b", kind).convert.call_one().get(PATIENCE).startswith("b-")


def test_a_deferred_function_runs_when_it_is_wanted() -> None:
    begun: list[Any] = []
    future = forever(begun)
    assert not future.done() and not begun
    with pytest.raises(TimeoutError, match="forever did not finish within 0.01 s and was cancelled"):
        future.get(0.01)
    assert begun == ["begun", "cancelled"]
    with pytest.raises(TimeoutError):
        future.get()
    with pytest.raises(TypeError, match="requires an async function"):
        returns_future(lambda: 3)  # type: ignore[arg-type]
    forever(begun)  # never wanted: no warning, as warnings are errors
    gc.collect()
    assert where().get()[1] == threading.current_thread().name


def test_a_deferred_function_in_a_loop() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    @returns_future
    async def look() -> tuple[int, Any]:
        await asyncio.sleep(0)
        return variable.get(), asyncio.get_running_loop()

    @returns_future
    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        variable.set(1)
        future = look()
        variable.set(2)
        assert await future == (1, asyncio.get_running_loop())
        assert where().get()[1].startswith("monarch-")  # the loop is blocked, so another one runs it
        with pytest.raises(ValueError, match="no"):
            await fail()
        begun: list[Any] = []
        gone = asyncio.ensure_future(future_of := _awaited(forever(begun)))
        while not begun:
            await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        del future_of
        assert begun == ["begun"]  # one that looked on was cancelled, not the body

    asyncio.run(main())


async def _awaited(future: Any) -> Any:
    return await future


def test_telemetry_without_a_provider() -> None:
    @traced
    def plain(x: int) -> int:
        return x + 1

    @traced(name="other")
    async def later(x: int) -> int:
        return x + 2

    assert plain(1) == 2 and asyncio.run(later(1)) == 3
    assert asyncio.iscoroutinefunction(later) and plain.__name__ == "plain"
    with pytest.raises(KeyError, match="k"), span("block"):
        raise KeyError("k")
    with pytest.raises(TypeError, match="a span needs a name"):
        span(3)  # type: ignore[arg-type]
    meter = get_meter()
    meter.create_counter("c").add(1, {"k": "v"})
    meter.create_histogram("h").record(2.0)
    meter.create_up_down_counter("u").add(-1)


OPENTELEMETRY = """
import json
from monarch_kernel.actor import Actor, context, endpoint, get_meter, span, this_host, traced
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

@traced
def inner():
    raise ValueError("no")

class Works(Actor):
    @endpoint
    def work(self):
        reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
        metrics.set_meter_provider(MeterProvider([reader]))
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        with span("outer"):
            try:
                inner()
            except ValueError:
                pass
        get_meter().create_counter("steps").add(3)
        inside, outside = exporter.get_finished_spans()
        assert inside.parent.span_id == outside.context.span_id
        assert inside.events[0].attributes["exception.type"] == "ValueError"
        (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
        (point,) = scope.metrics[0].data.data_points
        own = outside.attributes["monarch.actor"] == context().actor_instance.actor_id
        return inside.name, outside.name, own, outside.attributes["monarch.endpoint"], scope.scope.name, point.value

print(this_host().spawn_procs().spawn("works", Works).work.call_one().get(60))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None,
    reason="needs opentelemetry-sdk",
)
def test_telemetry_with_opentelemetry() -> None:
    run = subprocess.run([sys.executable, "-c", OPENTELEMETRY], capture_output=True, text=True, timeout=patience(120))
    assert run.stdout == "('inner', 'outer', True, 'work', 'monarch', 3)\n", run.stderr


def test_identifiers() -> None:
    one = Uid.instance_from_value(7, "x")
    assert str(one) == "x<8>" and one == Uid.from_string("<8>") and hash(one) == hash(Uid.from_string("y<8>"))
    assert (one.label, one.instance_value, one.is_instance, one.is_singleton) == ("x", 7, True, False)
    for uid in (Uid.instance("a-b"), Uid.anonymous(), Uid.instance_from_value((1 << 64) - 1), Uid.from_string("x")):
        assert Uid.from_string(str(uid)) == uid == pickle.loads(pickle.dumps(uid)) != one
    assert str(Uid.instance_from_value((1 << 64) - 1)) == "<JPwcyDCgEup>"
    proc = ProcId.from_string("worker<8>")
    assert proc == ProcId(one) == pickle.loads(pickle.dumps(proc)) and proc != one
    assert proc.label == "worker" and proc.uid.instance_value == 7
    for text in ("", "A", "a.b", "a<", "a<>", "a<0>", "abc-", "a" * 64, "<JPwcyDCgEuq>"):
        with pytest.raises(ValueError, match="invalid proc id: invalid uid"):
            ProcId.from_string(text)
    with pytest.raises(TypeError, match=r"use ProcId.from_string\(\)"):
        ProcId("x")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        Uid.instance_from_value(1 << 64)


@pytest.mark.own_runtime
def test_attach(workers: Any) -> None:
    (worker,) = workers(1, "ipc")
    with pytest.raises(ConnectionError, match="cannot attach to the worker"):
        attach("ipc:///nowhere/at/all", timeout=0.05)
    attach(worker.url)
    attach(worker.url)
    with pytest.raises(RuntimeError, match=f"comes too late: this process is attached to {worker.url}"):
        attach("tcp://127.0.0.1:1")
    host = attach_to_workers(workers=[worker.url])
    name, (found, _thread) = host.spawn_procs().spawn("a", Defers).wait.call_one().get(PATIENCE)
    assert found == name
    host.stop().get(PATIENCE)
