"""Ports: one-way typed pipes whose sending end can travel to any process.

A receiver knows who was given its port (``holders``), so that waiting for a value ends when all of those are dead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from monarch_kernel.protocol.faults import capture, decode_fault, encode_fault
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    OK,
    Death,
    ProcRef,
    Reply,
    decode_death,
    encode_death,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import loads
from monarch_kernel.runtime.actor.calls.pending import Target, failure_of
from monarch_kernel.runtime.actor.definition import tell_undeliverable
from monarch_kernel.runtime.actor.errors import SupervisionError, build_port_error
from monarch_kernel.runtime.actor.ports.holders import NobodyLeft, came, give, let_go, met, pickled
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.supervision.senders import Senders

R = TypeVar("R")


class Port(Generic[R]):
    """The sending end. Picklable; any process may hold and use it, any number of times.

    Sending to a port whose receiver is gone is an error only for a port with ``return_undeliverable`` set.
    """

    #: Whether a value for a receiver that is gone raises here instead of being dropped.
    return_undeliverable = True

    def __class_getitem__(cls, _item: Any) -> type[Port[Any]]:
        """``Port[int]`` at run time is ``Port``, so that annotations can be compared by ``is``."""
        return cls

    def __init__(self, ref: ProcRef, number: int, rank: int = 0) -> None:
        self._ref = ref
        self._number = number
        self._rank = rank
        self._holder: Any = None  # the actor that it came to in a message

    def send(self, value: R) -> None:
        """Send a value; it is what the receiver's next ``recv()`` gives."""
        body, buffers, ports = pickled(value)
        if ports:
            give(ports, self._ref)
        self._send(OK, body, buffers)

    def exception(self, error: BaseException) -> None:
        """Send an exception; the receiver's next ``recv()`` raises it."""
        self._send(ERROR, encode_fault(capture(error)), ())

    def _send(self, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        from monarch_kernel.runtime.actor.system import get_system

        node = get_system().node
        node.learn(self._ref)
        if self._ref.id == node.id:
            get_system().ports.used_here(self._number)
        link = node.link_to(self._ref.id)
        if link is None:
            cause = node.deaths[self._ref.id].cause
            if self.return_undeliverable and not tell_undeliverable(repr(self), (), cause):
                raise ConnectionError(f"the process that holds this port's receiver is gone: {cause}")
            return
        segment = None
        if buffers:
            body, segment = node.pack(body, buffers, [self._ref.id])
        link.send(encode_header(Reply(self._number, self._rank, status, buffers, segment)), body)

    def __reduce__(self) -> Any:
        met(self)
        return (_rebuild, (type(self), self._ref, self._number, self._rank))

    def __del__(self) -> None:
        holder = getattr(self, "_holder", None)
        if holder is not None:
            let_go(holder._system, self, holder.mesh_id)

    def __repr__(self) -> str:
        return f"<Port to {self._ref.id}#{self._number}>"


class ReplyPort(Port[R]):
    """The port that an endpoint with an explicit response port gets: it takes one answer for one call.

    A second answer through the copy that the actor itself holds ends the actor, as it would answer a question nobody
    asked.
    """

    def __init__(self, ref: ProcRef, number: int, rank: int, instance: Any = None) -> None:
        super().__init__(ref, number, rank)
        self._instance = instance
        self._used = False
        if instance is not None and number:
            instance.open_ports.add(self)

    def abandon(self, death: Death) -> None:
        """The actor ended without an answer."""
        if not self._used:
            self.return_undeliverable = False  # it may have been the caller's end that ended the actor
            self._send(DEAD, encode_death(death), ())

    def _send(self, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        if self._used:
            raise RuntimeError("this port takes a single reply, and it was sent already")
        self._used = True
        self._leave_instance()
        if self._number:  # 0: a broadcast; nobody waits for an answer
            super()._send(status, body, buffers)

    def _leave_instance(self) -> None:
        if self._instance is not None:
            self._instance.open_ports.discard(self)
            self._instance = None

    def __reduce__(self) -> Any:
        self._leave_instance()  # now it is for somebody else to answer
        return super().__reduce__()


def _rebuild(kind: type[Port[Any]], ref: ProcRef, number: int, rank: int) -> Port[Any]:
    """A port that has come in a message: if the actor that got it ends, its receiver is told."""
    port = kind(ref, number, rank)
    came(port)
    return port


class _Inlet:
    """Where a receiver's values arrive; does not keep the receiver alive."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        self._receiver = weakref.ref(receiver)

    def on_reply(self, rank: int, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        receiver = self._receiver()
        if receiver is not None:
            receiver.on_reply(rank, status, body, buffers)

    def on_peer_dead(self, proc: str, death: Death) -> None:
        """The book of ports tells of deaths, as it knows who has the port."""

    def senders(self) -> Senders | None:
        """Who was given the port; None when nobody receives any more."""
        receiver = self._receiver()
        return None if receiver is None else receiver._senders

    def nobody_left(self) -> None:
        """All who had the port are gone."""
        receiver = self._receiver()
        if receiver is not None:
            receiver.fail_waiting()


#: Rank, status, body, buffers.
_Item = tuple[int, int, Any, tuple[int, ...]]


class PortReceiver(Generic[R]):
    """The receiving end; stays in the process that opened it.

    When everybody who was given the port is dead or was stopped, ``recv`` raises a ``SupervisionError`` that tells who
    they were, after the values that had come. That is so for ports that went to actors as arguments, in results or
    through other ports, by however many of them; not for a port that this process itself has sent through, or that was
    pickled in another way: then nobody knows who may have it.
    """

    def __init__(self, ranked: bool = False, once: bool = False) -> None:
        from monarch_kernel.runtime.actor.system import get_system

        system = get_system()
        self._node = system.node
        self._reported = system.reported
        self._senders = Senders()
        self._number = self._node.new_call(_Inlet(self))
        self._ranked = ranked
        self._once = once
        self._lock = threading.RLock()  # reentrant: a future may be collected anywhere
        self._values: deque[_Item] = deque()  # that nothing waits for yet
        self._waiting: deque[weakref.ref[_Received]] = deque()  # in the order in which they were first waited for

    def on_reply(self, rank: int, status: int, body: Any, buffers: tuple[int, ...]) -> None:
        if self._once:
            self._node.end_call(self._number)
        with self._lock:
            self._values.append((rank, status, bytes(body) if not buffers else body, buffers))
        self._hand_out()

    def recv(self) -> Future[R]:
        """The next value, as a future. A value that was sent by ``Port.exception`` is raised.

        Which value that is shows when the future is first waited for (``get``, ``await``, a callback): values go to
        futures in the order in which that happens. A future that is thrown away takes none.
        """
        return _Received(self)

    def _hand_out(self) -> None:
        """Give what has come to those that wait."""
        while True:
            with self._lock:
                future = self._next() if self._values else None
                if future is None:
                    return
                item = self._values.popleft()
            future._resolve(item)

    def _next(self) -> _Received | None:
        """The future that has waited longest; those that were thrown away are passed over."""
        while self._waiting:
            future = self._waiting.popleft()()
            if future is not None and not future._done:
                return future
        return None

    def serve(self, future: _Received) -> None:
        """A future is waited for."""
        with self._lock:
            self._waiting.append(weakref.ref(future))
        self._hand_out()
        if self._senders.lost:
            self.fail_waiting()

    def dismiss(self, future: _Received) -> bool:
        """A future is not waited for any more; False: it has got its value in the meantime."""
        with self._lock:
            for waiting in self._waiting:
                if waiting() is future:
                    self._waiting.remove(waiting)
                    return True
        return False

    def take_back(self, item: _Item) -> None:
        """A future was thrown away before its value was read: the next one gets that."""
        with self._lock:
            self._values.appendleft(item)
        self._hand_out()

    def fail_waiting(self) -> None:
        """Nobody is left who could send: what waits for a value fails."""
        lost = self._senders.lost
        while lost:
            with self._lock:
                future = self._next()
            if future is None:
                return
            for sender, death in lost:
                key = (sender.actor, sender.proc.id) if death.what == "actor" else sender.proc.id
                self._reported.met.add(key)
            future._reject(NobodyLeft(lost))

    def _error(self, gone: NobodyLeft) -> SupervisionError:
        """What a ``recv`` raises when nobody is left."""
        groups: list[dict[int, Any]] = []  # by mesh; ranks of several slices of one may have the same number
        for sender, death in gone.lost:
            for group in groups:
                other = next(iter(group.values()))[0]
                if (sender.mesh, sender.extent) == (other.mesh, other.extent) and sender.rank not in group:
                    break
            else:
                groups.append(group := {})
            group[sender.rank] = (sender, death)
        told: list[Any] = []
        for group in groups:
            some = next(iter(group.values()))[0]
            refs = [group[rank][0].proc if rank in group else some.proc for rank in range(some.extent.nelements)]
            target = Target(some.mesh, some.actor, some.extent, tuple(refs), self._reported)
            failures = [failure_of(self._node, target, rank, None, group[rank][1]) for rank in sorted(group)]
            for failure in failures:
                target.note_raised(failure)
            told.append((some.mesh, some.extent, failures))
        return build_port_error(told)

    def ranked(self) -> PortReceiver[tuple[int, R]]:
        """The same receiver, of which ``recv`` gives ``(rank, value)``."""
        self._ranked = True
        return self  # type: ignore[return-value]  # the value type changes with the flag

    def close(self) -> None:
        """Take no more values."""
        self._node.end_call(self._number)

    def __reduce__(self) -> Any:
        raise TypeError("a PortReceiver cannot be pickled: send the Port, and receive where it was opened")

    def __del__(self) -> None:
        try:
            self._node.end_call(self._number)
        except AttributeError:  # construction failed
            pass


class _Received(Future[Any]):
    """The next value of a receiver, from when it is first waited for."""

    __slots__ = ("_awaiting", "_claims", "_kept", "_ranked", "_read", "_receiver")

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        super().__init__(receiver._node.poller, "recv()")
        self._ranked = receiver._ranked
        self._receiver = receiver  # somebody waits: the receiver must stay
        self._claims = False
        self._read = False
        self._awaiting = 0
        self._kept: _Received | None = None  # itself: what has callbacks lives until they are called

    def _claim(self) -> None:
        with self._receiver._lock:
            if self._claims:
                return
            self._claims = True
        self._receiver.serve(self)

    def done(self) -> bool:
        """Whether ``get`` would return (or raise) at once; asking claims nothing."""
        return self._done or (not self._claims and bool(self._receiver._values))

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value."""
        __tracebackhide__ = True
        self._claim()
        return super().get(timeout)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call ``callback(self)`` once there is a value."""
        self._kept = self
        self._claim()
        super().add_done_callback(callback)
        if self._done:
            self._kept = None

    def _finish(self) -> None:
        super()._finish()
        self._kept = None

    def __await__(self) -> Generator[Any, None, Any]:
        __tracebackhide__ = True
        self._claim()
        self._awaiting += 1
        try:
            return (yield from super().__await__())
        finally:
            self._awaiting -= 1
            if not self._done and not self._awaiting and self._kept is None and self._receiver.dismiss(self):
                self._claims = False  # cancelled: it claims again when it is waited for again

    def __del__(self) -> None:
        try:
            if self._done and not self._read and self._error is None:
                self._receiver.take_back(self._value)
        except AttributeError:  # construction failed
            pass

    def _result(self) -> Any:
        __tracebackhide__ = True
        self._read = True
        if isinstance(self._error, NobodyLeft):
            self._error = self._receiver._error(self._error)
        rank, status, body, buffers = super()._result()
        if status == ERROR:
            fault = decode_fault(body)
            raise fault.rebuild() or RuntimeError(fault.text)
        if status == DEAD:
            raise SupervisionError(decode_death(body).cause)
        value = loads(body, buffers)
        return (rank, value) if self._ranked else value


class Channel(Generic[R]):
    """Opens pipes between processes."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """A port and its receiver, which stays here. With ``once`` it takes a single value."""
        receiver: PortReceiver[R] = PortReceiver(once=once)
        return Port(receiver._node.ref, receiver._number), receiver

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[R], PortReceiver[tuple[int, R]]]:
        """Like ``open``; received values come with the rank of the actor that sent them."""
        port, receiver = Channel.open(once)
        return port, receiver.ranked()
