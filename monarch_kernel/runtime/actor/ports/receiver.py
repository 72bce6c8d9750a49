"""`PortReceiver`: the receiving end of a port, and `Channel`, which opens both ends.

A receiver knows which actors were given its port (`holders`), so a wait for a value ends when all of them are dead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic

from monarch_kernel.protocol.faults import decode_fault
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    Death,
    death_of,
)
from monarch_kernel.protocol.serialize import loads
from monarch_kernel.runtime.actor.calls.target import Target, failure_of
from monarch_kernel.runtime.actor.errors import RankFailure, SupervisionError, build_port_error
from monarch_kernel.runtime.actor.ports.holders import NobodyLeft
from monarch_kernel.runtime.actor.ports.port import OncePort, Port, R
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.wire_types import Buffers, ReplyBody
from monarch_kernel.runtime.mesh.shape import Extent
from monarch_kernel.runtime.node.future import Future
from monarch_kernel.runtime.supervision import Sender, Senders


class _Inlet:
    """The sink for a receiver's values; does not keep the receiver alive, unless a callback waits for one."""

    __slots__ = ("_receiver", "held")

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        self._receiver = weakref.ref(receiver)
        #: Futures with callbacks, and awaited futures. They stay alive until these have run, although there may be no
        #: other reference, because a loop does not hold its tasks.
        self.held: set[_Received] = set()

    def on_reply(self, rank: int, status: int, body: ReplyBody, buffers: Buffers) -> None:
        receiver = self._receiver()
        if receiver is not None:
            receiver.on_reply(rank, status, body, buffers)

    def on_peer_dead(self, proc: str, death: Death) -> None:
        """Do nothing: ``PortHolders`` reports deaths, because it knows the port's holders."""

    def senders(self) -> Senders | None:
        """Return the holders of the port; None if the receiver is gone."""
        receiver = self._receiver()
        return None if receiver is None else receiver._senders

    def nobody_left(self) -> None:
        """Handle that all holders of the port are gone."""
        receiver = self._receiver()
        if receiver is not None:
            receiver.fail_waiting()


#: Rank, status, body, buffers.
_Item = tuple[int, int, ReplyBody, Buffers]


class PortReceiver(Generic[R]):
    """The receiving end; stays in the process that opened it.

    When all holders of the port are dead or stopped, ``recv`` first returns the values that arrived, and then raises a
    ``SupervisionError`` that names the holders. This covers ports that reached actors as arguments, in results or
    through other ports, over any number of hops. It does not cover a port that this process itself sent through, or
    that was pickled in another way, as its holders are unknown.
    """

    def __init__(self, ranked: bool = False, once: bool = False) -> None:
        system = get_system()
        self._node = system.node
        self._reported = system.reported
        self._senders = Senders()
        self._inlet = _Inlet(self)
        self._number = self._node.new_call(self._inlet)
        self._ranked = ranked
        self._once = once
        self._received = False  # with `once`: whether the value was read
        self._lock = threading.RLock()  # reentrant, as a future may be garbage-collected anywhere
        self._values: deque[_Item] = deque()  # values that no future waits for yet
        self._waiting: deque[weakref.ref[_Received]] = deque()  # in the order of their first wait

    def on_reply(self, rank: int, status: int, body: ReplyBody, buffers: Buffers) -> None:
        if self._once:
            self._node.end_call(self._number)
        with self._lock:
            kept = bytes(body) if not buffers and isinstance(body, bytes | bytearray | memoryview) else body
            self._values.append((rank, status, kept, buffers))
        self._hand_out()

    def recv(self) -> Future[R]:
        """Return the next value, as a future. An exception sent by ``Port.exception`` is raised.

        Futures get values in the order in which they are first waited for (``get``, ``await``, a callback). A future
        that is dropped before that takes none.

        Raises:
            ValueError: the port was opened with ``once``, and its value was received.
        """
        if self._received:
            raise ValueError("this port was opened with once=True and is already used: its one value was received")
        return _Received(self)

    def _hand_out(self) -> None:
        """Resolve waiting futures with the values that arrived."""
        while True:
            with self._lock:
                future = self._next() if self._values else None
                if future is None:
                    return
                item = self._values.popleft()
            future._resolve(item)

    def _next(self) -> _Received | None:
        """Return the future that has waited longest; skips dropped futures."""
        while self._waiting:
            future = self._waiting.popleft()()
            if future is not None and not future._done:
                return future
        return None

    def serve(self, future: _Received) -> None:
        """Queue a future that begins to wait."""
        with self._lock:
            self._waiting.append(weakref.ref(future))
        self._hand_out()
        if self._senders.lost:
            self.fail_waiting()

    def dismiss(self, future: _Received) -> bool:
        """Remove a future that stops waiting. Return False if it got its value in the meantime."""
        with self._lock:
            for waiting in self._waiting:
                if waiting() is future:
                    self._waiting.remove(waiting)
                    return True
        return False

    def take_back(self, item: _Item) -> None:
        """Pass the value of a future that was dropped unread to the next future."""
        with self._lock:
            self._values.appendleft(item)
        self._hand_out()

    def fail_waiting(self) -> None:
        """Fail all waiting futures, because no holder of the port is left."""
        lost = self._senders.lost
        while lost:
            with self._lock:
                future = self._next()
            if future is None:
                return
            for sender, death in lost:
                key = (sender.actor, sender.proc.id) if death.of_actor else sender.proc.id
                self._reported.met.add(key)
            future._reject(NobodyLeft(lost))

    def _error(self, gone: NobodyLeft) -> SupervisionError:
        """Return the error that ``recv`` raises when no holder is left."""
        # By mesh, and by slice: ranks of several slices of one mesh may have the same number.
        groups: list[dict[int, tuple[Sender, Death]]] = []
        for sender, death in gone.lost:
            for group in groups:
                other = next(iter(group.values()))[0]
                if (sender.mesh, sender.extent) == (other.mesh, other.extent) and sender.rank not in group:
                    break
            else:
                groups.append(group := {})
            group[sender.rank] = (sender, death)
        told: list[tuple[str, Extent, list[RankFailure]]] = []
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
        """Return the same receiver; ``recv`` returns ``(rank, value)`` from now on."""
        self._ranked = True
        return self  # type: ignore[return-value]  # the value type changes with the flag

    def close(self) -> None:
        """Accept no more values."""
        self._node.end_call(self._number)

    def __reduce__(self) -> Any:
        raise TypeError("a PortReceiver cannot be pickled: send the Port, and receive where it was opened")

    def __del__(self) -> None:
        try:
            self._node.end_call(self._number)
        except AttributeError:  # construction failed
            pass


class _Received(Future[Any]):
    """The next value of a receiver, claimed at the first wait."""

    __slots__ = ("_awaiting", "_called_back", "_claims", "_ranked", "_read", "_receiver")

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        super().__init__(receiver._node.poller, "recv()")
        self._ranked = receiver._ranked
        self._receiver = receiver  # keeps the receiver alive
        self._claims = False
        self._read = False
        self._awaiting = 0
        self._called_back = False

    def _claim(self) -> None:
        with self._receiver._lock:
            if self._claims:
                return
            self._claims = True
        self._receiver.serve(self)

    def done(self) -> bool:
        """Return whether ``get`` would return (or raise) at once. Claims no value."""
        return self._done or (not self._claims and bool(self._receiver._values))

    def _wait(self, timeout: float | None) -> None:
        __tracebackhide__ = True
        self._claim()
        super()._wait(timeout)

    def add_done_callback(self, callback: Callable[[Future[object]], None]) -> None:
        """Call ``callback(self)`` once the value has arrived."""
        self._called_back = True
        self._hold()
        super().add_done_callback(callback)

    def _hold(self) -> None:
        """Claim the next value, and stay alive until it has arrived."""
        held = self._receiver._inlet.held
        held.add(self)
        self._claim()
        if self._done:
            held.discard(self)

    def _finish(self) -> None:
        super()._finish()
        self._receiver._inlet.held.discard(self)

    def __await__(self) -> Generator[object, None, object]:
        __tracebackhide__ = True
        self._hold()
        self._awaiting += 1
        try:
            return (yield from super().__await__())
        finally:
            self._awaiting -= 1
            if not self._done and not self._awaiting and not self._called_back and self._receiver.dismiss(self):
                self._claims = False  # cancelled: the next wait claims again
                self._receiver._inlet.held.discard(self)

    def __del__(self) -> None:
        try:
            if self._done and not self._read and self._error is None:
                self._receiver.take_back(self._value)
        except AttributeError:  # construction failed
            pass

    def _result(self) -> object:
        __tracebackhide__ = True
        self._read = True
        self._receiver._received = self._receiver._once
        if isinstance(self._error, NobodyLeft):
            self._error = self._receiver._error(self._error)
        rank, status, body, buffers = super()._result()
        if status == ERROR:
            fault = decode_fault(body)
            raise fault.rebuild() or RuntimeError(fault.text)
        if status == DEAD:
            raise SupervisionError(death_of(body).cause)
        value = loads(body, buffers)
        return (rank, value) if self._ranked else value


class Channel(Generic[R]):
    """Opens one-way pipes between processes."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """Return a port and its receiver, which stays in this process. With ``once`` it takes a single value."""
        receiver: PortReceiver[R] = PortReceiver(once=once)
        return (OncePort if once else Port)(receiver._node.ref, receiver._number), receiver

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[R], PortReceiver[tuple[int, R]]]:
        """Like ``open``; values are received with the rank of the actor that sent them."""
        port, receiver = Channel.open(once)
        return port, receiver.ranked()
