"""``span``, ``traced`` and ``get_meter``: a program's own telemetry, through OpenTelemetry if that is installed.

This package configures no exporter and records nothing by itself. With ``opentelemetry-api`` installed, spans and
instruments use the tracer and meter providers that the process has configured. Without it, they are no-ops that cost
almost nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from monarch_kernel.runtime.actor.context import current

P = ParamSpec("P")
T = TypeVar("T")

_NAME = "monarch"


@functools.cache
def _opentelemetry(part: str) -> Any:
    """``opentelemetry.trace`` or ``opentelemetry.metrics``; None if it is not installed."""
    try:
        return importlib.import_module(f"opentelemetry.{part}")
    except ImportError:
        return None


class span:  # noqa: N801  # Monarch's name
    """A block of code as a span: ``with span("load"): ...``.

    With OpenTelemetry, this is a span of the tracer ``monarch`` inside the current span. Its attributes are the running
    actor's name, endpoint and rank, and it records an exception that leaves the block. Otherwise it is a no-op.
    """

    __slots__ = ("_entered", "_name")

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a span needs a name, got {name!r}")
        self._name = name
        self._entered: Any = None

    def __enter__(self) -> Self:
        trace = _opentelemetry("trace")
        if trace is not None:
            self._entered = trace.get_tracer(_NAME).start_as_current_span(self._name, attributes=_where())
            self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)


def _where() -> dict[str, Any]:
    """The running actor as attributes; does not start the runtime."""
    here = current.get()
    if here is None:
        return {}
    return {
        "monarch.actor": here.actor_instance.actor_id,
        "monarch.endpoint": here.endpoint_name,
        "monarch.rank": here.message_rank.rank,
    }


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

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def follow(*args: Any, **kwargs: Any) -> Any:
            with span(label):
                return await function(*args, **kwargs)

        return follow

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return function(*args, **kwargs)

    return call


def get_meter() -> Any:
    """This process's OpenTelemetry ``Meter``; without OpenTelemetry, a meter whose instruments are no-ops."""
    metrics = _opentelemetry("metrics")
    return _NO_METER if metrics is None else metrics.get_meter(_NAME)


class _NoInstrument:
    """Any instrument; ignores its arguments."""

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Does nothing, like the other methods."""

    record = set = add


class _NoMeter:
    """Has the methods of OpenTelemetry's ``Meter``."""

    name = _NAME
    version = None
    schema_url = None

    def create_counter(self, name: str, *_args: Any, **_kwargs: Any) -> _NoInstrument:
        """An instrument that records nothing, like all others."""
        return _NO_INSTRUMENT

    create_up_down_counter = create_histogram = create_gauge = create_counter
    create_observable_counter = create_observable_up_down_counter = create_observable_gauge = create_counter


_NO_INSTRUMENT = _NoInstrument()
_NO_METER = _NoMeter()
