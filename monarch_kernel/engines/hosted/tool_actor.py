"""One actor of a tool in a process of another runtime: a mailbox, and a thread that handles its messages in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from monarch_kernel.actor import Point
from monarch_kernel.output import on_behalf_of
from monarch_kernel.protocol.faults import capture, encode_fault
from monarch_kernel.protocol.messages import ERROR, OK, Call
from monarch_kernel.protocol.serialize import Body, dumps_flat, loads
from monarch_kernel.thread_frames import raise_in_thread

#: The actor that the calling code runs for.
here: ContextVar[ToolActor | None] = ContextVar("monarch_kernel_tool_actor", default=None)

#: The number of loop iterations after which the interpreter has certainly raised a pending asynchronous exception here.
_DELIVERED = 100

#: Answers a call with a status and a body; does nothing if no answer is wanted.
Answer = Callable[[int, bytes], None]


class AnswerPort:
    """The port of an endpoint that answers later, on any thread. Only the first answer counts."""

    def __init__(self, answer: Answer) -> None:
        self._answer: Answer | None = answer

    def send(self, value: object) -> None:
        """Answer the call with a value."""
        self._give(OK, dumps_flat(value))

    def exception(self, error: BaseException) -> None:
        """Fail the call."""
        self._give(ERROR, encode_fault(capture(error)))

    def _give(self, status: int, body: bytes) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(status, body)


class ToolActor:
    """An actor: its object, created by its first message, and its mailbox.

    Args:
        actor: its unique name.
        name: the name that it was spawned under.
        rank: its position in its mesh.
        drive: runs a function on the thread for the actor's messages, if that is the main thread of a rank; None: the
            actor has its own thread.
    """

    def __init__(self, actor: str, name: str, rank: Point, drive: Callable[[ToolActor], None] | None = None) -> None:
        self.actor = actor
        self.name = name
        self.rank = rank
        self.object: Any = None
        #: The running endpoint, its thread, and the cell that it runs for.
        self.running: str | None = None
        self.running_for = ""
        self.thread = 0
        #: The thread of the program that temporarily runs its message; 0: its own thread does.
        self._borrowed = 0
        self._lock = threading.Lock()
        #: Whether it ends after its current message.
        self.stopping = False
        #: How many messages it has begun to handle.
        self.handled = 0
        #: An event loop to run while the actor waits for messages, if its thread can do so.
        self.background: Any = None
        #: The endpoints that only the controlling viewer of a joined job may call.
        self.of_driver: frozenset[str] = frozenset()
        self._messages: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._drive = drive
        if drive is None:
            threading.Thread(target=self._run, name=f"monarch-tool-{name}", daemon=True).start()

    # -- messages ----------------------------------------------------------------------------------

    def create(self, make: Callable[[], object], answer: Answer) -> None:
        """Create the object by calling its class."""

        def work() -> None:
            self.object = make()

        self._post("__init__", "", work, answer)

    def call(self, message: Call, body: Body, answer: Answer) -> None:
        """Call an endpoint. Without an answer, an exception is dropped."""
        port: AnswerPort | None = None

        def run() -> Any:
            nonlocal port
            args, kwargs = loads(body, message.buffers)
            if self.object is None:
                raise RuntimeError(f"{self.name} could not be created")
            found = getattr(type(self.object), message.endpoint)
            if found.explicit_response_port:
                port = AnswerPort(answer)
                return found.function(self.object, port, *args, **kwargs)
            return found.function(self.object, *args, **kwargs)

        def settle(status: int, value: bytes) -> None:
            if port is None or status != OK:  # otherwise the endpoint answers through its port
                answer(status, value)

        self._post(message.endpoint, message.cell, run, settle)

    def stop(self, done: Callable[[], None]) -> None:
        """Run ``__cleanup__`` after the waiting messages, and accept no more."""

        def end() -> Any:
            cleanup = getattr(self.object, "__cleanup__", None)
            if cleanup is not None:
                cleanup(None)

        self.stopping = True
        self._post("__cleanup__", "", end, lambda _status, _body: done())
        self._messages.put(None)

    # -- interrupts --------------------------------------------------------------------------------

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in its running endpoint, at its next line of Python.

        Return whether an endpoint is running.
        """
        with self._lock:
            if self.running is None:
                return False
            raise_in_thread(self._borrowed or self.thread, KeyboardInterrupt)
            return True

    @contextmanager
    def borrowing(self) -> Generator[None]:
        """Let the calling thread run the actor's message: interrupts reach it, but never after the block."""
        with self._lock:
            self._borrowed = threading.get_ident()
        try:
            yield
        finally:
            ended = False
            while not ended:
                try:
                    with self._lock:
                        self._borrowed = 0
                    for _ in range(_DELIVERED):  # pending interrupts are raised here
                        pass
                    ended = True
                except KeyboardInterrupt:
                    pass

    def _post(self, endpoint: str, origin: str, work: Callable[[], object], answer: Answer) -> None:
        def message() -> None:
            self._handle(endpoint, origin, work, answer)

        self._messages.put(message)
        if self._drive is not None:
            self._drive(self)

    # -- on its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self.step(block=True):
                    return
            except KeyboardInterrupt:  # meant for an endpoint that has just ended
                continue

    def step(self, block: bool = False) -> bool:
        """Handle one message. Returns False after the last one, or if there is none and ``block`` is false."""
        try:
            message = self._messages.get(block)
        except queue.Empty:
            return False
        if message is None:
            return False
        message()
        return True

    def _handle(self, endpoint: str, origin: str, work: Callable[[], object], answer: Answer) -> None:
        token = here.set(self)
        self.thread = threading.get_ident()
        self.handled += 1
        self.running, self.running_for = endpoint, origin
        status = OK
        try:
            try:
                with on_behalf_of(origin):
                    body = dumps_flat(work())
            finally:
                here.reset(token)
                with self._lock:
                    self.running = None
                for _ in range(_DELIVERED):
                    pass
        except BaseException as error:
            status, body = ERROR, encode_fault(capture(error))
        answer(status, body)
