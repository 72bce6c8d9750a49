"""``span``, ``traced`` and ``get_meter``: telemetry of programs, through OpenTelemetry if it is installed.

This package configures no exporter. With ``opentelemetry-api`` installed, spans and instruments use the tracer and
meter providers that the process has configured. Without it, they are no-ops that cost almost nothing. A trace of this
package (``monarch_kernel.watch.trace``) records spans in either case.

Calls carry the current span of their caller in a W3C ``traceparent``, and the endpoint runs in a span below it. One
trace therefore spans all processes. A process that has not imported ``opentelemetry.trace`` pays nothing for this.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from monarch_kernel.protocol.trace_records import SPAN
from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.definition import is_coroutine_function
from monarch_kernel.runtime.node import recorder

if TYPE_CHECKING:
    from types import ModuleType

P = ParamSpec("P")
T = TypeVar("T")

_NAME = "monarch"
#: The module that has OpenTelemetry's spans.
TRACE = "opentelemetry.trace"
_TRACEPARENT = r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})"


@functools.cache
def _opentelemetry(part: str) -> ModuleType | None:
    """Return ``opentelemetry.trace`` or ``opentelemetry.metrics``; None if it is not installed."""
    try:
        return importlib.import_module(f"opentelemetry.{part}")
    except ImportError:
        return None


class span:  # noqa: N801  # Monarch's name
    """A block of code as a span: ``with span("load"): ...``.

    With OpenTelemetry, this is a span of the tracer ``monarch`` inside the current span. Its attributes are the running
    actor's name, endpoint and rank, and it records an exception that leaves the block. Otherwise it is a no-op.
    """

    __slots__ = ("_entered", "_name", "_recorded")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a span needs a name, got {name!r}")
        self._name = name
        self._entered: Any = None
        self._recorded: tuple[recorder.Recorder, int] | None = None

    def __enter__(self) -> Self:
        ring = recorder.recording
        if ring is not None:
            self._recorded = ring, ring.begin(SPAN, self._name, recorder.group.get())
        trace = _opentelemetry("trace")
        if trace is not None:
            self._entered = trace.get_tracer(_NAME).start_as_current_span(self._name, attributes=_where())
            self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            ring, number = recorded
            ring.end(number, int(error is not None))
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)


def _where() -> dict[str, Any]:
    """Describe the running actor as attributes. Does not start the runtime."""
    here = current.get()
    if here is None:
        return {}
    return {
        "monarch.actor": str(here.actor_instance.actor_id),
        "monarch.endpoint": here.endpoint_name,
        "monarch.rank": here.message_rank.rank,
    }


# -- spans across processes -------------------------------------------------------------------------


def loaded() -> bool:
    """Return whether this process has imported OpenTelemetry's traces."""
    return TRACE in sys.modules


def traceparent() -> str:
    """Return the current span as a W3C ``traceparent``; empty if there is none."""
    trace = sys.modules.get(TRACE)
    get_span = getattr(trace, "get_current_span", None)  # absent while the module is being imported
    if get_span is None:
        return ""
    span = get_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 0xFF:02x}" if span.is_valid else ""


@contextmanager
def continued(traceparent: str, name: str) -> Generator[None]:
    """Run the block in a span below a span of another process; in none if OpenTelemetry is not installed here."""
    found = re.fullmatch(_TRACEPARENT, traceparent)
    trace = _opentelemetry("trace")
    if found is None or trace is None:
        yield
        return
    parent = trace.SpanContext(
        int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(found[3], 16))
    )
    above = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    begun = trace.get_tracer(_NAME).start_as_current_span(name, context=above, kind=trace.SpanKind.SERVER)
    with begun:
        yield


def note_error(error: BaseException) -> None:
    """Record an exception of an endpoint in its span."""
    trace = sys.modules.get(TRACE)
    if trace is None:
        return
    running = trace.get_current_span()
    if running.is_recording():
        running.record_exception(error)
        running.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))


@overload
def traced(fn: Callable[P, T], *, name: str | None = None) -> Callable[P, T]: ...
@overload
def traced(fn: None = None, *, name: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def traced(fn: Callable[P, T] | None = None, *, name: str | None = None) -> Any:
    """Run each call of a function, plain or async, in a ``span`` with the function's name, or the given name."""
    if fn is None:
        return functools.partial(traced, name=name)
    function: Any = fn
    label = name if name is not None else function.__name__

    if is_coroutine_function(function):

        @functools.wraps(function)
        async def follow(*args: Any, **kwargs: Any) -> object:
            with span(label):
                return await function(*args, **kwargs)

        return follow

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return function(*args, **kwargs)

    return call


def get_meter() -> Any:
    """Return this process's OpenTelemetry ``Meter``; without OpenTelemetry, a meter whose instruments are no-ops."""
    metrics = _opentelemetry("metrics")
    return _NO_METER if metrics is None else metrics.get_meter(_NAME)


class _NoInstrument:
    """Any instrument; ignores its arguments."""

    def add(self, amount: float, attributes: object = None, context: object = None) -> None:
        """Do nothing, like the other methods."""

    record = set = add


class _NoMeter:
    """Has the methods of OpenTelemetry's ``Meter``."""

    name = _NAME
    version = None
    schema_url = None

    def create_counter(self, name: str, *_args: object, **_kwargs: object) -> _NoInstrument:
        """Return an instrument that records nothing, like all others."""
        return _NO_INSTRUMENT

    create_up_down_counter = create_histogram = create_gauge = create_counter
    create_observable_counter = create_observable_up_down_counter = create_observable_gauge = create_counter


_NO_INSTRUMENT = _NoInstrument()
_NO_METER = _NoMeter()
