"""Serve one front end of this controller: its feed, its queries and actions, and the streams that it follows.

It is independent of the transport. A comm of JupyterLab's panel (`monarch_kernel.kernel.views`) and a widget in a
notebook (`monarch_kernel.widgets.mesh_widget`) pass it messages, and send its messages. docs/watching.md lists them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from monarch_kernel.runtime.actor.errors import ActorError, SupervisionError
from monarch_kernel.watch import Watch, watch
from monarch_kernel.watch.feed import Feed, Message
from monarch_kernel.widgets.plotting import Sampler

# Send messages over a comm from any thread, even while a cell runs.


def comm_sender(comm: Any) -> Callable[[dict[str, object]], None]:
    """Return a function that sends data over a comm. In an ipykernel, its messages have no parent cell."""
    kernel = _kernel_of(comm)
    if kernel is None:
        return lambda data: comm.send(data=data)

    def send(data: dict[str, Any]) -> None:
        content = {"comm_id": comm.comm_id, "data": data}
        kernel.session.send(kernel.iopub_socket, "comm_msg", content, parent=None, ident=comm.topic)

    return send


def _kernel_of(comm: Any) -> Any:
    """Return the ipykernel of a comm; None if it belongs to another kind of kernel."""
    if not type(comm).__module__.startswith("ipykernel."):
        return None
    if comm.kernel is not None:
        return comm.kernel
    from ipykernel.kernelbase import Kernel

    return Kernel.instance() if Kernel.initialized() else None


log = logging.getLogger(__name__)

#: The interval at which the lease of a front end is renewed that cannot do so while a cell runs (seconds).
RENEW = 3.0
#: The maximum number of requests of one front end in progress. Further ones are rejected.
MOST_REQUESTS = 16
#: The maximum number of logs and expressions that one front end may follow. Further ones are rejected.
MOST_STREAMS = 32
#: The time limit for an answer (seconds).
ANSWER_DEADLINE = 30.0
#: The time limit for requests that start processes or move files (seconds).
LONG_DEADLINE = 600.0
_LONG = frozenset({"up", "heal", "down", "restart", "sync", "attach", "stop_kept"})


class Closable(Protocol):
    """An activity that continues until it is closed."""

    def close(self) -> None:
        """End the activity. Closing again does nothing."""
        ...


class Services(Protocol):
    """The services that a notebook adds to the feed: answers, actions and logs."""

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs."""
        ...

    def ask(self, request: Mapping[str, object]) -> object:
        """Return the value of the answer to an `ask` message."""
        ...

    def act(self, request: Mapping[str, object]) -> str:
        """Execute a `do` message. Return a sentence about the action."""
        ...

    def follow(self, request: Mapping[str, object], push: Callable[[Message], object]) -> Closable:
        """Push `log` messages (without `kind` and `id`) while ranks write."""
        ...


class ViewRequestError(Exception):
    """A request that cannot be answered.

    Args:
        message: what happened, and why.
        hint: what to do next.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


_services: Services | None = None
#: Whether a front end has ever been connected to this process.
_was_viewed = False


def was_viewed() -> bool:
    """Return whether a panel or a live view has ever been connected to this process."""
    return _was_viewed


def use_services(services: Services | None) -> None:
    """Answer the requests of all front ends with these services; None: reject them."""
    global _services
    _services = services


class ViewConnection:
    """One front end, from its first message until it closes.

    Its feed and all its streams end when it no longer renews its lease, and begin again when it does.

    Args:
        send: sends a message to the front end. Called on any thread, one at a time.
        plots: begins the stream for a `plot` message, and pushes `points` (without `kind` and `id`); None: the front
            end's own sampler.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        plots: Callable[[Mapping[str, object], Callable[[Message], object]], Closable] | None = None,
    ) -> None:
        self._transport = send
        self._plots = plots or Sampler.of_request
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._inbox: list[Mapping[str, object]] = []
        self._news = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._behind_cells = False  # its messages arrive on the thread that runs cells, so none arrives during a cell
        self._requests: set[str] = set()
        self._streams: dict[str, Closable] = {}

    def receive(self, message: Mapping[str, object]) -> None:
        """Handle a message of the front end. Returns at once, on any thread. Unknown messages are ignored."""
        global _was_viewed
        _was_viewed = True
        kind = message.get("kind")
        if kind in ("lease", "again"):
            with self._changed:
                if self._closed:
                    return
                self._behind_cells = threading.current_thread() is threading.main_thread()
                self._inbox.append(message)
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="monarch-view", daemon=True)
                    self._thread.start()
        elif kind in ("ask", "do"):
            self._request(message)
        elif kind in ("follow", "plot"):
            self._beside(self._begin_stream, message)
        elif kind in ("unfollow", "unplot"):
            self._beside(self._end_stream, str(message.get("id")))

    def close(self) -> None:
        """End the connection, because the front end is gone. Closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._end_streams()

    @property
    def is_open(self) -> bool:
        """Whether the front end is currently fed."""
        return self._thread is not None and not self._closed

    # -- the feed ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Feed the front end until its lease expires. Runs on a separate thread."""
        try:
            with watch() as seen:
                self._feed(seen)
        except Exception:
            log.exception("a view of meshes has ended")
        finally:
            self._end_streams()
            with self._changed:
                self._thread = None
                again = bool(self._inbox) and not self._closed
            if again:  # the front end returned at the moment when this ended
                self.receive(self._inbox.pop())

    def _feed(self, seen: Watch) -> None:
        feed = Feed(seen, self._send)
        seen.subscribe(lambda _delta: self._wake())
        while True:
            with self._changed:
                inbox, self._inbox = self._inbox, []
                self._news = False
            if self._behind_cells and _services is not None and _services.is_busy:
                feed.receive({"kind": "lease"}, time.monotonic())
            for message in inbox:
                feed.receive(message, time.monotonic())
            seen.period = feed.period
            early = feed.push(time.monotonic())
            if early is None or self._closed:
                return
            with self._changed:
                if early:  # changes wait until they may be sent; messages of the front end do not
                    self._changed.wait_for(lambda: bool(self._inbox) or self._closed, early)
                left = feed.lease_left(time.monotonic()) + 0.01
                self._changed.wait_for(
                    lambda: self._news or bool(self._inbox) or self._closed,
                    min(left, RENEW) if self._behind_cells else left,
                )

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify()

    def _send(self, message: Message) -> None:
        with self._sending:
            if self._closed:
                return
            try:
                self._transport(message)
            except Exception:  # the kernel is ending, or its front end has closed the comm
                log.debug("a view of meshes was not reached", exc_info=True)
                threading.Thread(target=self.close, name="monarch-view-end", daemon=True).start()

    # -- requests ---------------------------------------------------------------------------------

    def _request(self, request: Mapping[str, object]) -> None:
        number = str(request.get("id"))
        with self._changed:
            refused = "" if len(self._requests) < MOST_REQUESTS else "too many requests are in progress"
            if not refused:
                self._requests.add(number)
        if refused:
            self._answer(number, error=ViewRequestError(refused, "wait for their answers"))
            return
        deadline = LONG_DEADLINE if request.get("what") in _LONG else ANSWER_DEADLINE
        timer = threading.Timer(deadline, self._late, [number, str(request.get("what")), deadline])
        timer.daemon = True
        timer.start()
        self._beside(self._work, request, number, timer)

    def _work(self, request: Mapping[str, object], number: str, timer: threading.Timer) -> None:
        try:
            value = services().ask(request) if request["kind"] == "ask" else {"text": services().act(request)}
        except BaseException as error:
            timer.cancel()
            self._settle(number, error=_refusal(error))
        else:
            timer.cancel()
            self._settle(number, value)

    def _late(self, number: str, what: str, deadline: float) -> None:
        self._settle(number, error=ViewRequestError(f"{what}: no answer within {deadline:g} s", "it may still happen"))

    def _settle(self, number: str, value: object = None, error: ViewRequestError | None = None) -> None:
        """Answer a request, unless it was already answered."""
        with self._changed:
            if number not in self._requests:
                return
            self._requests.discard(number)
        self._answer(number, value, error)

    def _answer(self, number: str, value: object = None, error: ViewRequestError | None = None) -> None:
        if error is None:
            self._send({"kind": "answer", "id": number, "value": value})
        else:
            self._send({"kind": "answer", "id": number, "error": {"message": str(error), "hint": error.hint}})

    # -- streams ----------------------------------------------------------------------------------

    def _begin_stream(self, request: Mapping[str, object]) -> None:
        number, kind = str(request.get("id")), "log" if request["kind"] == "follow" else "points"

        def push(message: Message) -> None:
            self._send({"kind": kind, "id": number, **message})

        self._end_stream(number)
        try:
            if len(self._streams) >= MOST_STREAMS:
                raise ViewRequestError("too many logs and expressions are followed", "close some of them")
            stream = services().follow(request, push) if kind == "log" else self._plots(request, push)
        except Exception as error:
            self._answer(number, error=_refusal(error))
            return
        with self._changed:
            if not self._closed:
                self._streams[number] = stream
                return
        stream.close()

    def _end_stream(self, number: str) -> None:
        with self._changed:
            stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()

    def _end_streams(self) -> None:
        for number in list(self._streams):
            self._end_stream(number)

    def _beside(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on a separate thread, because the caller may be the loop of a kernel."""
        threading.Thread(target=function, args=args, name="monarch-view-request", daemon=True).start()


def services() -> Services:
    """Return the services that answer requests.

    Raises:
        ViewRequestError: this process has no services.
    """
    if _services is None:
        raise ViewRequestError("here, meshes can only be watched", "run %load_ext monarch_kernel in a cell")
    return _services


def _refusal(error: BaseException) -> ViewRequestError:
    if isinstance(error, ViewRequestError):
        return error
    if isinstance(error, ActorError | SupervisionError):
        return ViewRequestError(str(error).split("\n", 1)[0])
    said = str(error) or type(error).__name__
    # an error of IPython, which need not be installed: the problem, then "; " and the remedy
    if type(error).__name__ == "UsageError":
        message, _, hint = said.partition("; ")
        return ViewRequestError(message, hint)
    return ViewRequestError(said if isinstance(error, LookupError | ValueError) else f"{type(error).__name__}: {said}")
