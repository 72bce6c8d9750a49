"""Record calls: at the caller from the call to its last answer, at the actor from the message to the answer.

The ``trace`` of a ``Call`` has the id of the caller's record, a blank, and the W3C ``traceparent`` of the caller's
OpenTelemetry span; each is empty if there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from threading import get_ident
from typing import TYPE_CHECKING, Any

from monarch_kernel.loading import after_import
from monarch_kernel.protocol.messages import Call
from monarch_kernel.protocol.serialize import Apart
from monarch_kernel.protocol.trace_records import CALL, ENDPOINT
from monarch_kernel.runtime.actor import telemetry
from monarch_kernel.runtime.actor.calls.pending import StreamCall
from monarch_kernel.runtime.actor.calls.target import Target
from monarch_kernel.runtime.actor.tracing import call_hooks
from monarch_kernel.runtime.actor.wire_types import Body, MessageLink
from monarch_kernel.runtime.node import recorder
from monarch_kernel.runtime.node.recorder import Recorder

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.execution.async_instance import AsyncActorInstance
    from monarch_kernel.runtime.actor.execution.instance import ActorInstance

#: Whether the running endpoint has raised; set by ``failed``.
_failed: ContextVar[bool] = ContextVar("monarch_kernel_trace_failed", default=False)


class _Recorded:
    """The record of a call at its caller; called back when the call is done."""

    __slots__ = ("_number", "_ring", "trace")

    def __init__(self, ring: Recorder, label: str, ranks: int, sink: Any) -> None:
        self._ring = ring
        number = self._number = ring.next()
        self.trace = call = f"{ring.prefix}{number:x}"
        ring.open[number] = (number, CALL, label, get_ident(), 0, ring.clock(), call, ranks)
        if sink is not None:  # the last answer ends it
            (sink._slots[-1] if type(sink) is StreamCall else sink).add_done_callback(self)

    def sent(self) -> None:
        """See ``call_hooks.SentCall``."""
        self._ring.end(self._number, 1)

    def __call__(self, _done: object) -> None:
        ring = self._ring
        begun = ring.open.pop(self._number, None)
        if begun is not None:
            ring.append((*begun, ring.clock(), 0))


class _Unrecorded:
    """A call that only carries the span of its caller."""

    __slots__ = ("trace",)

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def sent(self) -> None:
        """See ``call_hooks.SentCall``."""


_installed = False
_carries_spans = False
#: Called with the label and duration (seconds) of each answered call; None if there is no observer.
_observer: Callable[[str, float], object] | None = None


class _Timed:
    """Reports the duration of a call to the observer."""

    __slots__ = ("_label", "_observer", "_start")

    def __init__(self, label: str, observer: Callable[[str, float], object]) -> None:
        self._label = label
        self._observer = observer
        self._start = time.perf_counter()

    def __call__(self, _done: object) -> None:
        self._observer(self._label, time.perf_counter() - self._start)


def observe_calls(observer: Callable[[str, float], object] | None) -> None:
    """Call ``observer(label, seconds)`` for each call of this process that is answered from now on; None removes it.

    It runs on the polling thread, and must be fast.
    """
    global _observer
    _observer = observer
    follow()


_OF_TOOL = _Unrecorded("")


def _sending(label: str, target: Target, sink: Any) -> call_hooks.SentCall:
    if target.of_tool:
        return _OF_TOOL
    if _observer is not None and sink is not None:
        (sink._slots[-1] if type(sink) is StreamCall else sink).add_done_callback(_Timed(label, _observer))
    traceparent = telemetry.traceparent() if _carries_spans else ""
    ring = recorder.recording
    if ring is None:
        return _Unrecorded(f" {traceparent}" if traceparent else "")
    call = _Recorded(ring, label, len(target.procs), sink)
    if traceparent:
        call.trace += f" {traceparent}"
    return call


def install() -> None:
    """Install the hooks, and make calls carry spans once this process imports OpenTelemetry."""
    global _installed
    if not _installed:
        _installed = True
        call_hooks.handle, call_hooks.handle_async, call_hooks.failed = handle, handle_async, failed
        after_import(telemetry.TRACE, lambda _module: follow())


def follow() -> None:
    """Update the handling of outgoing calls: recorded, with spans, timed, or (usually) none of these."""
    global _carries_spans
    _carries_spans = telemetry.loaded()
    wanted = recorder.recording is not None or _carries_spans or _observer is not None
    call_hooks.sending = _sending if wanted else None


def handle(instance: ActorInstance, link: MessageLink, message: Call, body: Body) -> BaseException | None:
    """See ``call_hooks.handle``."""
    ring = recorder.recording
    call = message.trace
    if ring is None or " " in call or instance._spec.tool:
        return _handle_with_span(instance, link, message, body)
    return _record(ring, instance, link, message, body, call)


def _handle_with_span(instance: ActorInstance, link: MessageLink, message: Call, body: Body) -> BaseException | None:
    """Handle a call that is not to be recorded, or that carries a span."""
    ring = recorder.recording
    call, _, traceparent = message.trace.partition(" ")
    if not traceparent or instance.spec.tool:
        return instance._handle(link, message, body)
    with telemetry.continued(traceparent, f"{instance.name}.{message.endpoint}"):
        if ring is None:
            return instance._handle(link, message, body)
        return _record(ring, instance, link, message, body, call)


def _record(
    ring: Recorder, instance: ActorInstance, link: MessageLink, message: Call, body: Body, call: str
) -> BaseException | None:
    number = ring.next()
    name = f"{instance.name}.{message.endpoint}"
    ring.open[number] = begun = (number, ENDPOINT, name, get_ident(), 0, ring.clock(), call, _size(message, body))
    try:
        return instance._handle(link, message, body)
    finally:
        del ring.open[number]
        ring.append((*begun, ring.clock(), _mark() if _failed.get() else 0))


async def handle_async(
    instance: AsyncActorInstance, link: MessageLink, message: Call, body: Body
) -> BaseException | None:
    """See ``call_hooks.handle_async``."""
    call, _, traceparent = message.trace.partition(" ")
    if instance.spec.tool:
        return await instance._handle_async(link, message, body)
    if traceparent:
        with telemetry.continued(traceparent, f"{instance.name}.{message.endpoint}"):
            return await _handle_async(instance, link, message, body, call)
    return await _handle_async(instance, link, message, body, call)


async def _handle_async(
    instance: AsyncActorInstance, link: MessageLink, message: Call, body: Body, call: str
) -> BaseException | None:
    ring = recorder.recording
    if ring is None:
        return await instance._handle_async(link, message, body)
    task = recorder.next_group()
    recorder.group.set(task)  # each message has a task, and hence a context, of its own
    number = ring.begin(ENDPOINT, f"{instance.name}.{message.endpoint}", task, call, _size(message, body))
    try:
        return await instance._handle_async(link, message, body)
    finally:
        ring.end(number, _mark())


def _size(message: Call, body: Body) -> int:
    """Return the size of the arguments (bytes)."""
    if not isinstance(body, Apart):
        return len(body)
    return len(body.pickled) + (message.segment.size if message.segment is not None else sum(message.buffers))


def failed(error: BaseException) -> None:
    """See ``call_hooks.failed``."""
    _failed.set(True)
    telemetry.note_error(error)


def _mark() -> int:
    """Return 1 if the endpoint that has just ended raised, else 0."""
    if not _failed.get():
        return 0
    _failed.set(False)  # a thread has one context for all its messages
    return 1
