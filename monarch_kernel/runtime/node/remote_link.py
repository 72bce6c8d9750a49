"""A link to a process of another site, through the gateways of both sites."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from monarch_kernel.protocol.messages import ProcRef, Routed, encode
from monarch_kernel.protocol.serialize import Body
from monarch_kernel.runtime.node.interfaces import PeerLink


class SendingNode(Protocol):
    """The part of its node that the link uses: the numbers that order casts and other messages."""

    id: str
    order_lock: threading.RLock
    casts_to: dict[str, int]
    directs_to: dict[str, int]


class RemoteLink:
    """A link to a proc of another site, through a link to a gateway."""

    __slots__ = ("_node", "_ref", "_routed", "_stamp", "_via", "closed", "peer", "pid")

    local = False
    attached = True
    ended = ""

    def __init__(self, node: SendingNode, ref: ProcRef, via: PeerLink) -> None:
        self._node = node
        self._ref = ref
        self._via = via
        self._stamp = -1
        self._routed = b""
        self.peer = ref.id
        self.pid = 0
        self.closed = False

    @property
    def queued(self) -> int:
        """Bytes to the gateway that the kernel has not accepted yet."""
        return self._via.queued

    def send(self, header: bytes, body: Body = b"") -> None:
        """See ``Link.send``."""
        if self.closed:
            return
        node = self._node
        gateway = self._ref.gateway
        prefix = len(header).to_bytes(4, "little") + header
        pieces: Any = [prefix, *body] if type(body) is list else prefix if not len(body) else [prefix, body]
        with node.order_lock:  # messages are sent in the order in which they are counted
            casts = node.casts_to.get(gateway, 0)
            if casts != self._stamp:
                self._routed = encode(Routed(self.peer, node.id, gateway, casts))
                self._stamp = casts
            node.directs_to[gateway] = node.directs_to.get(gateway, 0) + 1
            self._via.send(self._routed, pieces)

    def drain(self) -> None:
        """Does nothing: no data of a remote proc waits here."""

    def close(self) -> None:
        """Drop all later messages."""
        self.closed = True

    abandon = close

    def __repr__(self) -> str:
        return f"<RemoteLink to {self.peer} through {self._via!r}>"
