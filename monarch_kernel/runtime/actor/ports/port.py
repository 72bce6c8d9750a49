"""`Port`: the sending end of a one-way typed pipe, which can travel to any process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_kernel.protocol.faults import capture, encode_fault
from monarch_kernel.protocol.messages import (
    DEAD,
    ERROR,
    OK,
    Death,
    ProcRef,
    Reply,
)
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.serialize import LARGE
from monarch_kernel.runtime.actor.definition import tell_undeliverable
from monarch_kernel.runtime.actor.ports.holders import came, give, let_go, met, pickled
from monarch_kernel.runtime.actor.process import get_system
from monarch_kernel.runtime.actor.wire_types import Body, Buffers

if TYPE_CHECKING:
    from monarch_kernel.runtime.actor.execution.instance import ActorInstance, Instance

R = TypeVar("R")


class Port(Generic[R]):
    """The sending end of a port. It can be pickled; any process may hold it and use it any number of times.

    Sending to a port whose receiver is gone raises only if ``return_undeliverable`` is set.
    """

    #: Whether sending to a receiver that is gone raises, instead of dropping the value.
    return_undeliverable = True

    def __class_getitem__(cls, _item: object) -> type[Port[Any]]:
        """``Port[int]`` at run time is ``Port``, so that annotations can be compared by ``is``."""
        return cls

    def __init__(self, ref: ProcRef, number: int, rank: int = 0) -> None:
        self._ref = ref
        self._number = number
        self._rank = rank
        self._holder: Instance | None = None  # the actor that received it in a message

    def send(self, value: R) -> None:
        """Send a value. The receiver's next ``recv()`` returns it."""
        body, buffers, ports = pickled(value)
        if ports:
            give(ports, self._ref)
        self._send(OK, body, buffers)

    def exception(self, error: BaseException) -> None:
        """Send an exception. The receiver's next ``recv()`` raises it."""
        self._send(ERROR, encode_fault(capture(error)), ())

    def _send(self, status: int, body: Body, buffers: Buffers) -> None:
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
        if buffers or (status == OK and type(body) is bytes and len(body) >= LARGE):
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


class OncePort(Port[R]):
    """A port that takes one value; sending another one raises."""

    _used = False

    def _send(self, status: int, body: Body, buffers: Buffers) -> None:
        if self._used:
            raise RuntimeError("this port takes a single value, which was already sent")
        self._used = True
        super()._send(status, body, buffers)


class ReplyPort(OncePort[R]):
    """The port that an endpoint with an explicit response port receives; it takes one answer for one call.

    A second answer through the actor's own copy ends the actor, as there is no call left to answer.
    """

    def __init__(self, ref: ProcRef, number: int, rank: int, instance: ActorInstance | None = None) -> None:
        super().__init__(ref, number, rank)
        self._instance = instance
        if instance is not None and number:
            instance.open_ports.add(self)

    def abandon(self, death: Death) -> None:
        """Report to the caller that the actor ended without an answer."""
        if not self._used:
            self.return_undeliverable = False  # the actor may have ended because the caller did
            self._send(DEAD, get_system().node.death_body(self._ref.id, death), ())

    def _send(self, status: int, body: Body, buffers: Buffers) -> None:
        self._leave_instance()
        if self._number or self._used:  # 0: a broadcast, which has no answer
            super()._send(status, body, buffers)
        self._used = True

    def _leave_instance(self) -> None:
        if self._instance is not None:
            self._instance.open_ports.discard(self)
            self._instance = None

    def __reduce__(self) -> object:
        self._leave_instance()  # the process that receives the port answers now
        return super().__reduce__()


def _rebuild(kind: type[Port[object]], ref: ProcRef, number: int, rank: int) -> Port[object]:
    """Return a port from a message; its receiver is notified if the actor that holds it ends."""
    port = kind(ref, number, rank)
    came(port)
    return port
